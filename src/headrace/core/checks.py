"""Checks of a dataset's arguments, made before anything is read."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from headrace.arguments import check_callable, check_names, described, synonyms
from headrace.core.decoder import chained
from headrace.core.held import check_cache_size
from headrace.core.modes import LoadingMode
from headrace.core.options import REMOTE
from headrace.errors import ConfigError
from headrace.io.resolve.expressions import entries_of
from headrace.io.resolve.file_set import FileSet
from headrace.memory.budget import MemoryBudget
from headrace.storage.source import Source
from headrace.synonyms import LOADER_OPTIONS

OF_LOADERS = dict.fromkeys(LOADER_OPTIONS, "in create_dataloader")
"""Where to pass what is no option of a dataset."""
_CHOICES: dict[str, tuple[Any, ...]] = {
    "cache_policy": ("auto", "keep", "lru"),
    "hold": (None, "encoded", "decoded"),
    "shared": ("rank", "machine"),
}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def keywords_of(cls: type) -> frozenset[str]:
    """The keywords that the constructor of a dataset's class takes, those that it passes on
    included.
    """
    names: set[str] = set()
    for base in reversed(cls.__mro__):
        if base is not object and "__init__" in vars(base):
            # which a class passes on by itself
            names -= {"source", "targets", "sample_decoder"}
            signature = inspect.signature(base.__init__)  # type: ignore[misc]
            names |= {p.name for p in signature.parameters.values() if p.kind in _NAMED}
    return frozenset(names - {"self"}) | (
        REMOTE if getattr(cls, "reads_urls", False) else frozenset()
    )


def check_arguments(
    dataset: object,
    data_path: Any,
    options: Mapping[str, Any],
    name: str = "data_path",
    **given: Any,
) -> None:
    """Raises for what no dataset takes.

    Args:
        dataset: whose constructor was called: messages name its class.
        data_path: what is to be read, called `name`.
        options: the keywords that are passed on to `BaseDataset`.
        **given: other arguments of `BaseDataset`.

    Raises:
        ConfigError: the message names the argument.
        DataNotFoundError: `data_path` is empty.
    """
    cls = type(dataset)
    check_names(cls.__name__, options, keywords_of(cls), OF_LOADERS)
    if not isinstance(data_path, FileSet):
        entries_of(data_path, name)
    check_common({**options, **given})


def check_common(options: Mapping[str, Any]) -> None:
    """Raises a ConfigError for arguments of `BaseDataset` that make no sense; those that are
    missing have their defaults.
    """
    transforms = options.get("transforms")
    if transforms is not None and not (
        options.get("transform") is options.get("target_transform") is None
    ):
        raise ConfigError(
            "give either transforms (joint) or transform and target_transform, not both"
        )
    chained(options.get("transform"))
    chained(transforms, "transforms")
    check_callable("target_transform", options.get("target_transform"))
    for name, allowed in _CHOICES.items():
        if name in options and options[name] not in allowed:
            raise ConfigError(
                f"{name} must be one of {', '.join(map(repr, allowed))}, not {options[name]!r}"
            )
    on_error = options.get("on_error", "raise")
    if not isinstance(on_error, str):
        check_callable("on_error", on_error)
    if on_error is None or (isinstance(on_error, str) and on_error not in ("raise", "skip")):
        raise ConfigError(
            f"on_error must be one of 'raise', 'skip', or a callable, not {on_error!r}"
        )
    mode = LoadingMode.of(options.get("loading_mode", LoadingMode.LAZY))
    if options.get("shared") == "machine" and mode not in (LoadingMode.EAGER, LoadingMode.CACHED):
        raise ConfigError(
            f"shared='machine' has no meaning for loading_mode={mode.value!r}, which holds no "
            "samples"
        )
    try:
        operator.index(options.get("seed", 0))
    except TypeError:
        raise ConfigError(f"seed must be an integer, not {described(options['seed'])}") from None
    MemoryBudget(options.get("max_memory_usage", 0.8))
    check_cache_size(options.get("cache_size"))


def check_source(source: object) -> None:
    """Raises a ConfigError for what is no `Source`, which is what `BaseDataset` reads."""
    if isinstance(source, Source):
        return
    if isinstance(source, (str, bytes, os.PathLike)):
        raise ConfigError(
            f"BaseDataset reads a Source, and {source!r} is a path: use open_dataset(path), which "
            "finds the format, or ImageDataset, "
            "TextDataset, HDF5Dataset or ZarrDataset; for a format of your own subclass "
            "BaseDataset and pass super().__init__ a Source"
        )
    raise ConfigError(
        f"BaseDataset reads a Source, not {described(source)}: subclass Source (__len__, read, "
        "fingerprint), or give create_dataloader any "
        "torch dataset as it is"
    )


def as_targets(targets: Any, count: int) -> Any:
    """One target a sample, as they are kept: a column of a table, and what else has an array to
    give, becomes that array.

    Raises:
        ConfigError: it is no sequence, or has another length than there are samples.
    """
    if targets is not None and not isinstance(targets, (np.ndarray, list, tuple, torch.Tensor)):
        targets = array_in(targets)
    if targets is None:
        return None
    if isinstance(targets, (str, Mapping)) or not hasattr(targets, "__len__"):
        raise ConfigError(
            f"targets must be a sequence of one target a sample, not {described(targets)}"
        )
    if len(targets) != count:
        raise ConfigError(
            f"targets holds {len(targets):,} targets, and there are {count:,} samples: give one "
            "for each"
        )
    return targets


def array_in(values: Any) -> Any:
    """The array that a column of pandas or polars, or any other object with an array's protocol,
    has to give; else the object itself.
    """
    values = values.to_numpy() if hasattr(values, "to_numpy") else values
    return np.asarray(values) if hasattr(values, "__array__") else values


def check_call(cls: type, args: Sequence[Any], passed: Mapping[str, Any]) -> None:
    """Raises a ConfigError for a keyword that the constructor of a dataset's class does not have;
    for a class of the user's own, if it is a word of another library.
    """
    known = keywords_of(cls)
    is_ours = cls.__module__.startswith("headrace.")
    try:
        inspect.signature(cls).bind(*args, **passed)
    except TypeError:
        words = [name for name in passed if is_ours or synonyms(name, known)]
        check_names(cls.__name__, words, known, OF_LOADERS)
