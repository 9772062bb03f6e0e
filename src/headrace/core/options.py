"""Arguments of datasets: loading modes and keywords, their checks and their text; and classes that
combine others, for streaming and unpickled datasets.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, StrEnum
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from torch.utils.data import IterableDataset

from headrace.arguments import (
    check_callable,
    check_choice,
    check_integer,
    check_names,
    described,
    parameters_of,
    synonyms,
)
from headrace.core.decoder import chained
from headrace.core.held import check_cache_size
from headrace.core.reader import OnError
from headrace.errors import ConfigError
from headrace.formats.resolve.file_set import FileSet
from headrace.formats.resolve.resolver import entries_of
from headrace.io.paths import is_url, redact
from headrace.io.remote.options import RemoteKeywords
from headrace.memory.budget import check_usage
from headrace.synonyms import LOADER_OPTIONS
from headrace.tokenizer import shown_tokenizer

ModeName = Literal["lazy", "eager", "cached", "streaming"]
Transform = Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None
"""A callable, or several that are applied one after the other. None: no transform."""
JointTransform = (
    Callable[[Any, Any], tuple[Any, Any]] | Sequence[Callable[[Any, Any], tuple[Any, Any]]] | None
)
"""The same for callables that take input and target."""


class LoadingMode(StrEnum):
    """When samples are read.

    "lazy": at each access. "eager": all at the start. "cached": at the first access, later from
    memory. "streaming": ahead of the reader, in order.
    """

    LAZY = "lazy"
    EAGER = "eager"
    STREAMING = "streaming"
    CACHED = "cached"

    @classmethod
    def _missing_(cls, value: object) -> LoadingMode:
        """Names in another case; raises a ConfigError that lists the modes for all else."""
        for mode in cls:
            if isinstance(value, str) and value.lower() == mode:
                return mode
        names = ", ".join(repr(mode.value) for mode in cls)
        raise ConfigError(f"loading_mode must be one of {names}, not {value!r}")


class CommonOptions(TypedDict, total=False):
    """Keywords that every dataset takes in addition to those of its format; see `BaseDataset`."""

    target_transform: Callable[[Any], Any] | None
    transforms: JointTransform
    cache_size: int | str | None
    max_memory_usage: float | int | str
    cache_policy: Literal["auto", "keep", "lru"]
    hold: Literal["decoded", "encoded"] | None
    shared: Literal["rank", "machine"]
    cache_dir: str | os.PathLike[str] | None
    on_error: OnError
    seed: int
    return_index: bool
    progress: bool | None


class PathOptions(CommonOptions, RemoteKeywords, total=False):
    """Keywords of every dataset that reads paths and URLs; see `BaseDataset` and, for URLs,
    `RemoteOptions`.
    """


UNSET: Any = "default"
"""An argument that was not given, such as `image_size`."""
COMMON, REMOTE = CommonOptions.__optional_keys__, RemoteKeywords.__optional_keys__
"""The names of these keywords."""


def passed_arguments(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, including keywords in ``**options``.

    Raises:
        TypeError: the constructor does not take them.
    """
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]
    _, *given = signature.bind(None, *args, **kwargs).arguments.items()
    passed = dict(given)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            passed.update(passed.pop(parameter.name, {}))
    for name, value in passed.items():
        if isinstance(value, FileSet):
            passed[name] = value.given
    return passed


def classes_of(cls: type) -> tuple[type, ...]:
    """The classes that a class of headrace's combines; for any other class, itself."""
    return getattr(cls, "_parts", ()) or (cls,)


@functools.cache
def joined_class(*parts: type) -> type:
    """A class that combines several, with the name of the first."""
    cls = parts[0]
    bases = [part for part in parts[1:] if not issubclass(cls, part)]
    if not bases:
        return cls
    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_parts": (*classes_of(cls), *(part for part in bases if part is not IterableDataset)),
    }
    made: type = type(cls)(cls.__name__, (cls, *bases), names)
    return made


def blank(*parts: type) -> Any:
    """An empty dataset for unpickling; its state follows."""
    return object.__new__(joined_class(*parts))


def describe_call(name: str, arguments: dict[str, Any]) -> str:
    """The constructor call as text, without credentials; valid if its arguments' reprs are."""
    shown = [
        _shown(value) if argument in ("data_path", "path") else describe_argument(argument, value)
        for argument, value in arguments.items()
    ]
    return f"{name}({', '.join(shown)})"


def describe_argument(name: str, value: Any) -> str:
    """A keyword of such a call."""
    if name == "storage_options":
        return "storage_options={...}"
    return f"{name}={shown_tokenizer(value) if name == 'tokenizer' else _shown(value)}"


_OF_LOADING = {"data_path", "transform", "loading_mode"} | COMMON | REMOTE
"""Arguments that don't change the cached value of a sample."""


def describe_held(cls: type, arguments: dict[str, Any]) -> str:
    """The class and arguments that decide the cached value of a sample, as text.

    Raises:
        ConfigError: an argument can't be compared with that of another process.
    """
    compared = {name: value for name, value in sorted(arguments.items()) if name not in _OF_LOADING}
    for name, value in compared.items():
        if not _is_plain(value):
            raise ConfigError(
                f"shared='machine': {cls.__name__}'s argument {describe_argument(name, value)} "
                "can't be compared with that of another process: override held_as() to return a "
                "text that identifies the held value"
            )
    return f"{cls.__module__}.{cls.__qualname__} {compared!r}"


def describe_data(data_path: Any) -> str:
    """The paths of the data, as text that is equal in all processes.

    Raises:
        ConfigError: there is an object without such a text among them.
    """
    paths = list(data_path) if isinstance(data_path, (tuple, list)) else [data_path]
    for number, path in enumerate(paths):
        if isinstance(path, (str, os.PathLike)) and not is_url(path):
            paths[number] = os.path.abspath(os.path.expanduser(path))
        elif not _is_plain(path):
            raise ConfigError(
                f"shared='machine': {describe_argument('data_path', data_path)} can't be compared "
                "with that of another process: use shared='rank'"
            )
    return repr(paths)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, [*value.keys(), *value.values()]))
    return value is None or isinstance(
        value, (bool, int, float, str, bytes, os.PathLike, np.generic)
    )


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return repr(value.value)
    if isinstance(value, (str, bytes, os.PathLike)):
        return repr(redact(value))
    if isinstance(value, (list, tuple)) and any(is_url(v) for v in value):
        return repr([redact(v) for v in value])
    return repr(value)


OF_LOADERS = dict.fromkeys(LOADER_OPTIONS, "in create_dataloader")
"""Options of loaders, and where to pass them."""
_CHOICES: dict[str, tuple[Any, ...]] = {
    "cache_policy": ("auto", "keep", "lru"),
    "hold": (None, "encoded", "decoded"),
    "shared": ("rank", "machine"),
}


@functools.lru_cache(1024)
def keywords_of(cls: type) -> frozenset[str]:
    """The keywords of a dataset class, including those that its constructor passes on."""
    names: set[str] = set()
    for base in reversed(cls.__mro__):
        if base is not object and "__init__" in vars(base):
            # a class passes these on itself
            names -= {"source", "targets", "sample_decoder"}
            names |= parameters_of(base.__init__)  # type: ignore[misc]
    if getattr(cls, "reads_urls", False):
        names |= REMOTE
    return frozenset(names)


def check_arguments(
    dataset: object,
    data_path: Any,
    options: Mapping[str, Any],
    name: str = "data_path",
    **given: Any,
) -> None:
    """Checks the arguments of a dataset's constructor.

    Args:
        dataset: the dataset; messages name its class.
        data_path: its path, the argument `name`.
        options: the keywords that are passed on to `BaseDataset`.
        **given: other arguments of `BaseDataset`.

    Raises:
        ConfigError: the message names the argument.
        DataNotFoundError: `data_path` is empty.
    """
    cls: Any = type(dataset)
    check_names(cls.__name__, options, keywords_of(cls), OF_LOADERS)
    entries_of(data_path, name)
    check_common({**options, **given})


def check_common(options: Mapping[str, Any]) -> None:
    """Raises a ConfigError for invalid arguments of `BaseDataset`; missing ones have defaults."""
    transforms = options.get("transforms")
    if transforms is not None and not (
        options.get("transform") is options.get("target_transform") is None
    ):
        raise ConfigError(
            "pass either transforms (joint) or transform and target_transform, not both"
        )
    chained(options.get("transform"))
    chained(transforms, "transforms")
    if options.get("target_transform") is not None:
        check_callable("target_transform", options["target_transform"])
    for name, allowed in _CHOICES.items():
        if name in options:
            check_choice(name, options[name], allowed)
    on_error = options.get("on_error", "raise")
    if callable(on_error):
        check_callable("on_error", on_error)
    elif on_error not in ("raise", "skip"):
        raise ConfigError(
            f"on_error must be one of 'raise', 'skip', or a callable, not {on_error!r}"
        )
    mode = LoadingMode(options.get("loading_mode", LoadingMode.LAZY))
    if options.get("shared") == "machine" and mode not in (LoadingMode.EAGER, LoadingMode.CACHED):
        raise ConfigError(
            f"shared='machine' has no effect with loading_mode={mode.value!r}, which holds no "
            "samples: leave it out"
        )
    check_integer("seed", options.get("seed", 0))
    check_usage(options.get("max_memory_usage", 0.8))
    if options.get("cache_size") is not None:
        check_cache_size(options["cache_size"])


def as_targets(targets: Any, count: int) -> Any:
    """A sequence of one target per sample; a Series and anything else with an array becomes that
    array.

    Raises:
        ConfigError: it is not a sequence, or does not have one target per sample.
    """
    if targets is None:
        return None
    if hasattr(targets, "to_numpy"):
        targets = targets.to_numpy()
    elif not isinstance(targets, torch.Tensor) and hasattr(targets, "__array__"):
        targets = np.asarray(targets)
    if isinstance(targets, (str, Mapping)) or not hasattr(targets, "__len__"):
        raise ConfigError(
            f"targets must be a sequence of one target per sample, not {described(targets)}"
        )
    if len(targets) != count:
        raise ConfigError(
            f"targets holds {len(targets):,} targets for {count:,} samples: pass one per sample"
        )
    return targets


def check_call(cls: type, passed: Mapping[str, Any]) -> None:
    """Raises a ConfigError for a keyword that a dataset class does not have; for a class of the
    user's own only if it is a word of another library.
    """
    known = keywords_of(cls)
    is_ours = cls.__module__.startswith("headrace.")
    words = [name for name in passed if is_ours or synonyms(name, known)]
    check_names(cls.__name__, words, known, OF_LOADERS)
