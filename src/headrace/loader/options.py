"""The keywords of loaders, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, TypedDict

import torch

from headrace.datasets.options import DataPath, FormatOptions


class Indexable(Protocol):
    """What has samples by number: a torch dataset, a HuggingFace dataset, a list."""

    def __getitem__(self, index: Any, /) -> Any: ...


Data = Indexable | DataPath


class LoaderOptions(TypedDict, total=False):
    """The fields of `DataLoaderConfig` as keywords."""

    batch_size: int | None
    shuffle: bool | Literal["block"] | None
    num_workers: int | None
    pin_memory: bool | None
    prefetch_factor: int | None
    persistent_workers: bool | None
    drop_last: bool
    pad: bool
    collate_fn: Callable[[list[Any]], Any] | str | None
    sampler: Iterable[int] | None
    batch_sampler: Iterable[list[int]] | None
    weights: Any
    replacement: bool
    balanced: bool
    bucket_by_length: Any
    num_samples: int | None
    seed: int
    interleave: int | None
    turns: int | None
    rank: int | None
    world_size: int | None
    device: torch.device | str | int | None
    max_memory_usage: float | int | str | None
    multiprocessing_context: Any
    worker_init_fn: Callable[[int], Any] | None
    generator: torch.Generator | None
    timeout: float
    enable_monitoring: bool
    log_loading_stats: bool


class PathOptions(LoaderOptions, FormatOptions, total=False):
    """The keywords of a loader over a path: its own and those of `open_dataset`; `pad`, which both have, is the loader's."""
