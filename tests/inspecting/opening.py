"""Opens what a report proposes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import headrace
from headrace.inspecting.report import Report


@contextlib.contextmanager
def opened(report: Report, **names: Any) -> Iterator[Any]:
    """The dataset of `opens_as`, which is as the report says."""
    with eval(str(report.opens_as), {"headrace": headrace, **names}) as dataset:
        assert report.samples == len(dataset)
        assert report.fingerprint in (None, dataset.fingerprint)
        yield dataset
