"""Makes loaders over datasets and paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from headrace.datasets import open_dataset
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.open import known_keywords
from headrace.loader.config import FIELDS, Data, DataLoaderConfig, PathOptions, check_options
from headrace.loader.data import check_dataset, is_path
from headrace.loader.loader import Loader, has_sampler


def create_dataloader(dataset: Data, config: DataLoaderConfig | None = None, **overrides: Unpack[PathOptions]) -> Loader:
    """A `Loader` over a dataset, or over a path, which `open_dataset` opens.

    Samples are shuffled by default, unlike torch's: pass ``shuffle=False``, or ``config=DataLoaderConfig.eval()``, for validation and
    test data.

    Args:
        dataset: any torch dataset, or a path; with a path, keywords that are no fields of `DataLoaderConfig` go to `open_dataset`,
            as do `seed` and `max_memory_usage`.
        config: the options; the defaults without.
        **overrides: fields of `DataLoaderConfig`, which says more of each, that replace those of `config`. None: chosen at start-up.

            * ``batch_size=32``: samples of a batch of each rank; None: the dataset yields batches.
            * ``shuffle=None``: True, False, or "block": blocks of the storage are permuted and interleaved. None: True for most datasets.
            * ``num_workers=None``: worker processes; 0: load in this process.
            * ``pin_memory=None``: batches arrive in page-locked memory.
            * ``prefetch_factor=None``: batches on their way for each worker.
            * ``persistent_workers=None``: workers live on between epochs.
            * ``drop_last=False``: leave the last, incomplete global batch out.
            * ``pad=True``: fill the epoch up with its own first samples to a multiple of the number of ranks.
            * ``collate_fn=None``: makes a batch of samples: a callable, or the name of a registered one.
            * ``sampler=None``: an iterable of indices.
            * ``batch_sampler=None``: an iterable of lists of indices.
            * ``weights=None``: one number a sample: how likely it is to be drawn.
            * ``replacement=True``: with weights or balanced, a sample may come again.
            * ``balanced=False``: all classes come equally often.
            * ``bucket_by_length=False``: batches hold samples of like length: True, or one integer a sample.
            * ``num_samples=None``: samples of an epoch, over all ranks.
            * ``seed=42``: of order and random transforms.
            * ``interleave=None``: with shuffle="block", lanes that a global batch draws from.
            * ``turns=None``: with shuffle="block", sets of lanes that are used in turn.
            * ``rank=None``, ``world_size=None``: of this process in the job; None: found out.
            * ``device=None``: where batches go; None: they stay.
            * ``memory_format=None``: of batches [batch, C, H, W] there: `torch.channels_last`, say.
            * ``max_memory_usage=None``: the memory budget, a fraction or bytes ("500MB"); None: the dataset's.
            * ``multiprocessing_context=None``: "fork", "forkserver" or "spawn".
            * ``worker_init_fn=None``: called in each worker with its number.
            * ``generator=None``: a `torch.Generator` whose seed is used instead of `seed`.
            * ``timeout=0``: seconds to wait for a batch before an error; 0: for ever, as long as the workers live.
            * ``enable_monitoring=True``: sample memory and CPU for `get_stats()`.
            * ``log_loading_stats=False``: log a line an epoch (logger "headrace.loader", INFO).

    Raises:
        ConfigError: an option makes no sense, the message names it; or other ranks build another loader (`distributed/agreement.py`).
        BudgetError: not even one batch fits the memory budget.
    """
    check_dataset("create_dataloader", "dataset", dataset, has_sampler(config, overrides))
    options: dict[str, Any] = {**overrides}
    opened: Any = dataset
    if is_path(dataset):
        opened, options = open_path("create_dataloader", dataset, config, options)
    check_options("create_dataloader", config, options)
    return Loader(opened, config, **options)


def open_path(door: str, path: Any, config: DataLoaderConfig | None, options: Mapping[str, Any]) -> tuple[BaseDataset, dict[str, Any]]:
    """The dataset of a path, and those of the options that are a loader's; the others, and what both know, are the dataset's. `door` is
    what the user called."""
    check_options(door, config, options, known_keywords())
    own = {name: value for name, value in options.items() if name not in FIELDS}
    rest = {name: value for name, value in options.items() if name in FIELDS}
    shared = (config or DataLoaderConfig()).with_(**rest)
    for name in ("seed", "max_memory_usage"):  # of both
        if getattr(shared, name) != getattr(DataLoaderConfig, name):
            own[name] = getattr(shared, name)
    return open_dataset(path, **own), rest
