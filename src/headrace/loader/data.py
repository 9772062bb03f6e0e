"""Checks and looks into what a loader is given: datasets, paths and devices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from headrace.arguments import described
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.batch import Collating
from headrace.datasets.unnormalized import Images, look_at_images
from headrace.datasets.wrapped import parts_of
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
    return isinstance(dataset, (str, os.PathLike)) or (
        isinstance(dataset, (list, tuple))
        and bool(dataset)
        and all(isinstance(d, (str, os.PathLike)) for d in dataset)
    )


def check_dataset(door: str, name: str, dataset: Any, has_sampler: bool = False) -> None:
    """Raises a ConfigError for what is neither a dataset nor a path; `door` is what the user
    called. The indices of a sampler of the user's may be keys of a dict.
    """
    wanted = f"{door}: {name} must be a dataset or a path"
    if isinstance(dataset, type):
        raise ConfigError(f"{wanted}, not {described(dataset)}: write {dataset.__name__}(...)")
    if isinstance(dataset, DataLoader):
        raise ConfigError(f"{wanted}, not a loader: pass its dataset, loader.dataset")
    if (
        isinstance(dataset, Mapping)
        and len(dataset)
        and not has_sampler
        and not (0 in dataset or len(dataset) - 1 in dataset)
    ):
        keys = ", ".join(repr(key) for key, _ in zip(dataset, range(5), strict=False))
        raise ConfigError(
            f"{wanted}, not a dict of {keys}: pass one of its values, or all of them to "
            "MultiDataLoader"
        )
    if isinstance(dataset, (list, tuple, Mapping)) and len(dataset):
        first = next(iter(dataset.values() if isinstance(dataset, Mapping) else dataset))
        # HuggingFace's
        if isinstance(first, (Dataset, DataLoader)) or hasattr(first, "column_names"):
            raise ConfigError(
                f"{wanted}, not a {type(dataset).__name__} of {described(first)}, ...: pass "
                "torch.utils.data.ConcatDataset([...]) for "
                "epochs of all their samples, or pass them to MultiDataLoader({'a': ..., 'b': "
                "...}) for batches of each"
            )
    if hasattr(dataset, "iloc") and hasattr(dataset, "columns"):
        raise ConfigError(
            f"{wanted}, not a table ({described(dataset)}): pass its rows, table.to_dict('records')"
        )
    if isinstance(dataset, bytes):
        raise ConfigError(
            f"{wanted}, not {described(dataset)}: pass the path as text, os.fsdecode(path)"
        )
    if (
        isinstance(dataset, (list, tuple))
        and len(dataset)
        and isinstance(dataset[0], (str, os.PathLike))
        and not is_path(dataset)
    ):
        number, entry = next(
            (n, e) for n, e in enumerate(dataset) if not isinstance(e, (str, os.PathLike))
        )
        raise ConfigError(
            f"{wanted}, and this list begins with a path and has {described(entry)} at place "
            f"{number}"
        )
    if (
        is_path(dataset)
        or isinstance(dataset, IterableDataset)
        or hasattr(dataset, "__getitem__")
        or hasattr(dataset, "__getitems__")
    ):
        return
    if hasattr(dataset, "__iter__"):
        raise ConfigError(
            f"{wanted}, not {described(dataset)}: give it __getitem__ and __len__, or make it an "
            "IterableDataset"
        )
    raise ConfigError(f"{wanted}, not {described(dataset)}")


def is_accelerator(device: Any) -> bool:
    """True of a device that computes beside the host."""
    return device is not None and torch.device(device).type not in ("cpu", "meta")


def images_until(device: Any, dataset: Any, collating: Collating) -> Images:
    """Where the images of a loader are normalised: there, or on the host."""
    return look_at_images(dataset, collating) if is_accelerator(device) else Images()


def check_device(device: Any) -> None:
    """Raises a ConfigError for a device that this process can't reach; asks nothing that would
    initialise one.
    """
    kind = None if device is None else torch.device(device).type
    module = getattr(torch, str(kind), None)
    if kind not in ("cuda", "mps", "xpu") or (module is not None and module.is_available()):
        return
    raise ConfigError(
        f"device={str(device)!r}, and torch sees no {str(kind).upper()} device here: install a "
        "torch with support for it, look at the "
        f"driver, or write device={str(kind)!r} if torch.{kind}.is_available() else 'cpu'"
    )
