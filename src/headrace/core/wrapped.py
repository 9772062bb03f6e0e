"""Datasets inside of a dataset that wraps others, such as torch's `Subset` and `ConcatDataset`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Subset


def parts_of(dataset: Any, opaque: type | tuple[type, ...] = ()) -> Iterator[Any]:
    """A dataset and, each once, those that it holds as `dataset` or `datasets`, and so on; not
    those inside of an `opaque` one.
    """
    waiting, seen = [dataset], set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if not isinstance(part, opaque):
            for name in ("dataset", "datasets"):
                inner = getattr(part, "__dict__", {}).get(name)
                if inner is not None:
                    waiting.extend(inner if isinstance(inner, (list, tuple)) else [inner])


def answers_batches(dataset: Any) -> bool:
    """True if it has a ``__getitems__`` that counts. A torch Subset always has one: it hands a
    batch on, or makes it sample by sample.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")
