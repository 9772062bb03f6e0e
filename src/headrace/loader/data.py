"""Checks and looks into what a loader is given: datasets, paths and devices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from headrace.arguments import described
from headrace.core.dataset import BaseDataset
from headrace.core.views import parts_of
from headrace.errors import ConfigError


def length_of(dataset: Any) -> int | None:
    """The length of a dataset, if it has one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def inner_datasets(dataset: Any) -> list[BaseDataset]:
    """The headrace datasets that a dataset is, or wraps (`Subset`, `ConcatDataset` and their
    like).
    """
    return [part for part in parts_of(dataset, opaque=BaseDataset) if isinstance(part, BaseDataset)]


def source_of(dataset: Any, index: int) -> str | None:
    """Where a sample lies: its path, or file and row; None where the dataset does not say."""
    find = getattr(dataset, "source_of", None)
    return str(find(index)) if callable(find) and isinstance(index, int) else None


def is_path(dataset: Any) -> bool:
    """True if it is a path, or several, rather than a dataset."""
    paths = dataset if isinstance(dataset, (list, tuple)) else [dataset]
    return bool(paths) and all(isinstance(path, (str, os.PathLike)) for path in paths)


def check_dataset(door: str, name: str, dataset: Any, has_sampler: bool = False) -> None:
    """Raises a ConfigError for what is neither a dataset nor a path; `door` is what the user
    called. The indices of a sampler of the user's may be keys of a dict.
    """
    if is_path(dataset) or isinstance(dataset, IterableDataset):
        return
    instead = "pass a dataset with __getitem__ and __len__, or an IterableDataset"
    is_indexed = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    first = None
    if isinstance(dataset, type):
        instead = f"write {dataset.__name__}(...)"
    elif isinstance(dataset, DataLoader):
        instead = "pass its dataset, loader.dataset"
    elif hasattr(dataset, "iloc") and hasattr(dataset, "columns"):
        instead = "pass the rows of the table, table.to_dict('records')"
    elif isinstance(dataset, Mapping) and not has_sampler:
        if not dataset or 0 in dataset or len(dataset) - 1 in dataset:
            return
        keys = ", ".join(map(repr, [*dataset][:5]))
        instead = f"pass one of its values (of {keys}), or all to MultiDataLoader"
    elif is_indexed and not isinstance(dataset, bytes):
        if isinstance(dataset, (list, tuple)):
            first = next(iter(dataset), None)
        # HuggingFace's datasets have column names
        if not (isinstance(first, (Dataset, DataLoader)) or hasattr(first, "column_names")):
            return
        instead = (
            "pass torch.utils.data.ConcatDataset([...]) for epochs of all their samples, or pass "
            "them to MultiDataLoader({'a': ..., 'b': ...}) for batches of each"
        )
    what = described(dataset)
    if first is not None:
        what = f"a {type(dataset).__name__} of {described(first)}, ..."
    raise ConfigError(f"{door}: {name} must be a dataset or a path, not {what}: {instead}")


def is_accelerator(device: Any) -> bool:
    """True of a device that computes beside the host."""
    return device is not None and torch.device(device).type not in ("cpu", "meta")


def check_device(device: Any) -> None:
    """Raises a ConfigError for a device that this process can't reach; asks nothing that would
    initialise one.
    """
    if device is None:
        return
    kind = torch.device(device).type
    module = getattr(torch, kind, None)
    if kind in ("cuda", "mps", "xpu") and not (module is not None and module.is_available()):
        raise ConfigError(
            f"device={str(device)!r}, and torch sees no {kind.upper()} device here: install a "
            f"torch with support for it, look at the driver, or write device={kind!r} if "
            f"torch.{kind}.is_available() else 'cpu'"
        )
