"""Makes loaders over datasets and paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.dataset import BaseDataset
from headrace.loader.config import FIELDS, Data, DataLoaderConfig, check_options
from headrace.loader.data import check_dataset, is_path
from headrace.loader.loader import Loader


def create_dataloader(
    dataset: Data, config: DataLoaderConfig | None = None, **overrides: Any
) -> Loader:
    """Creates a `Loader` for a dataset, or for a path, which `open_dataset` opens.

    Samples are shuffled by default, unlike in torch. Pass ``shuffle=False`` or
    ``config=DataLoaderConfig.eval()`` for validation and test data.

    Args:
        dataset: any torch dataset, or a path. With a path, keywords that are not fields of
            `DataLoaderConfig` are passed to `open_dataset`, as are `seed` and `max_memory_usage`.
        config: the options. None: the defaults.
        **overrides: fields of `DataLoaderConfig`, which replace those of `config`; see there.

    Raises:
        ConfigError: an option is invalid, and the message names it; or other ranks create a
            different loader (`loader/agreement.py`).
        BudgetError: not even one batch fits the memory budget.
    """
    options: dict[str, Any] = {**overrides}
    opened: Any = dataset
    if is_path(dataset):
        opened, options = open_path("create_dataloader", dataset, config, options)
    check_options("create_dataloader", config, options)
    config = (config or DataLoaderConfig()).with_(**options)
    check_dataset("create_dataloader", "dataset", opened, config.has_sampler)
    return Loader(opened, config)


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
        value = getattr(shared, name)
        if value != getattr(DataLoaderConfig, name):
            own[name] = value
    return open_dataset(path, **own), rest
