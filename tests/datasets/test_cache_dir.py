"""What is kept in `cache_dir`: its parents are made, and a full disk is the disk's fault."""

from __future__ import annotations

import errno
import functools
import gzip
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from headrace import HeadraceWarning, StreamingDataset, TextDataset
from headrace.errors import AccessError
from headrace.io.array_file import ArrayWriter
from headrace.testing.contract import same
from tests.data.gallery import make_gallery
from tests.data.make import make_tar

Kinds = dict[str, Callable[..., Any]]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    """By name what opens a dataset of which something is kept."""
    folder = tmp_path_factory.mktemp("kinds")
    made = make_gallery(folder)
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"a\nbb\n"))
    (folder / "a.jsonl").write_text('{"text": "a", "label": 0}\n{"text": "bb", "label": 2}\n')
    make_tar(folder / "a.tar", [("0.cls", b"2")])
    fields = {"text_field": "text", "target_field": "label"}
    kept = ("lines", "tokens")
    return {
        **{name: made[name] for name in kept},
        "plain copy": functools.partial(TextDataset, folder / "a.txt.gz", unit="line"),
        "records": functools.partial(TextDataset, folder / "a.jsonl", **fields),
        "tar": functools.partial(StreamingDataset, folder / "a.tar"),
    }


def first_of(opened: Callable[..., Any], cache: Path) -> Any:
    with opened(cache_dir=cache) as dataset:
        return next(iter(dataset))


def test_its_parents_are_made(kinds: Kinds, tmp_path: Path) -> None:
    for name, opened in kinds.items():
        cache = tmp_path / name / "a" / "b"
        first_of(opened, cache)
        assert any(path.suffix == ".bin" for path in cache.iterdir()), name


def test_a_disk_that_is_full(kinds: Kinds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {name: first_of(opened, tmp_path / name) for name, opened in kinds.items()}
    full = [(name, errno.ENOSPC) for name in kinds]
    for name, number in [*full, ("lines", errno.EDQUOT), ("tar", errno.EROFS)]:
        error = OSError(number, os.strerror(number))
        monkeypatch.setattr(ArrayWriter, "_put", mock.Mock(side_effect=error))
        cache, reason = tmp_path / f"{name} {number}", re.escape(os.strerror(number))
        if name == "plain copy":
            with pytest.raises(AccessError, match=reason):
                first_of(kinds[name], cache)
            continue
        with pytest.warns(HeadraceWarning, match=rf"^cache_dir=.*{reason}"):
            assert same(first_of(kinds[name], cache), expected[name]), name
        assert not any(path.suffix in (".bin", ".part") for path in cache.iterdir()), name
