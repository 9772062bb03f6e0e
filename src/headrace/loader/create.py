"""Makes loaders over datasets and paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from headrace.datasets.core.base import BaseDataset
from headrace.loader.config import FIELDS, Data, DataLoaderConfig, PathOptions, check_options
from headrace.loader.data import check_dataset, is_path
from headrace.loader.loader import Loader, has_sampler


def create_dataloader(
    dataset: Data, config: DataLoaderConfig | None = None, **overrides: Unpack[PathOptions]
) -> Loader:
    """Creates a `Loader` for a dataset, or for a path, which `open_dataset` opens.

    Samples are shuffled by default, unlike in torch. Pass ``shuffle=False`` or
    ``config=DataLoaderConfig.eval()`` for validation and test data.

    Args:
        dataset: any torch dataset, or a path. With a path, keywords that are not fields of
            `DataLoaderConfig` are passed to `open_dataset`, as are `seed` and `max_memory_usage`.
        config: the options. None: the defaults.
        **overrides: fields of `DataLoaderConfig`, which replace those of `config`; see there for
            details. None: chosen at start-up.

            * ``batch_size=32``: number of samples per batch and rank. None: the dataset yields
              batches.
            * ``shuffle=None``: True, False, or "block": storage blocks are permuted and
              interleaved. None: True for most datasets.
            * ``num_workers=None``: number of worker processes. 0: load in this process.
            * ``pin_memory=None``: put batches in page-locked memory.
            * ``prefetch_factor=None``: number of batches that each worker prefetches.
            * ``persistent_workers=None``: keep workers alive between epochs.
            * ``drop_last=False``: drop the last, incomplete global batch.
            * ``pad=True``: pad the epoch with its own first samples to a multiple of the number of
              ranks.
            * ``collate_fn=None``: a callable that makes a batch from a list of samples, or the name
              of a registered one.
            * ``sampler=None``: an iterable of indices.
            * ``batch_sampler=None``: an iterable of lists of indices.
            * ``weights=None``: relative probability of each sample.
            * ``replacement=True``: with weights or balanced, a sample may come more than once.
            * ``balanced=False``: draw all classes equally often.
            * ``bucket_by_length=False``: batch samples of similar length: True, or one integer per
              sample.
            * ``num_samples=None``: number of samples per epoch, over all ranks.
            * ``seed=42``: seed of the order and of random transforms.
            * ``interleave=None``: with shuffle="block", number of lanes that a global batch draws
              from.
            * ``turns=None``: with shuffle="block", number of sets of lanes that are used in turn.
            * ``rank=None``, ``world_size=None``: rank of this process and number of ranks. None:
              detected.
            * ``device=None``: device that batches are moved to. None: batches stay on the host.
            * ``memory_format=None``: memory format of batches [batch, C, H, W] on the device, such
              as `torch.channels_last`.
            * ``max_memory_usage=None``: memory budget, a fraction or bytes ("500MB"). None: the
              dataset's.
            * ``multiprocessing_context=None``: "fork", "forkserver" or "spawn".
            * ``worker_init_fn=None``: a callable that is called in each worker with the worker's
              number.
            * ``generator=None``: a `torch.Generator` whose seed replaces `seed`.
            * ``timeout=0``: seconds to wait for a batch before an error. 0: no limit while the
              workers are alive.
            * ``enable_monitoring=True``: sample memory and CPU usage for `get_stats()`.
            * ``log_loading_stats=False``: log one line per epoch (logger "headrace.loader", INFO).

    Raises:
        ConfigError: an option is invalid, and the message names it; or other ranks create a
            different loader (`distributed/agreement.py`).
        BudgetError: not even one batch fits the memory budget.
    """
    check_dataset("create_dataloader", "dataset", dataset, has_sampler(config, overrides))
    options: dict[str, Any] = {**overrides}
    opened: Any = dataset
    if is_path(dataset):
        opened, options = open_path("create_dataloader", dataset, config, options)
    check_options("create_dataloader", config, options)
    return Loader(opened, config, **options)


def open_path(
    door: str,
    path: Any,
    config: DataLoaderConfig | None,
    options: Mapping[str, Any],
    arguments: frozenset[str] = frozenset(),
) -> tuple[BaseDataset, dict[str, Any]]:
    """The dataset of a path, and those of the options that are a loader's; the others, and what
    both know, are the dataset's. `door` is what the user called, and `arguments` are the names of
    its other arguments.
    """
    from headrace.datasets.open import known_keywords, open_dataset  # which imports all formats

    check_options(door, config, options, known_keywords() | arguments)
    own = {name: value for name, value in options.items() if name not in FIELDS}
    rest = {name: value for name, value in options.items() if name in FIELDS}
    shared = (config or DataLoaderConfig()).with_(**rest)
    for name in ("seed", "max_memory_usage"):  # of both
        if getattr(shared, name) != getattr(DataLoaderConfig, name):
            own[name] = getattr(shared, name)
    return open_dataset(path, **own), rest
