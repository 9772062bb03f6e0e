"""What a dataset's constructor was called with, as arguments and in words; the class of a dataset
that streams, and of one that is unpickled.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from headrace.core.options import COMMON, REMOTE
from headrace.display import Lines
from headrace.errors import ConfigError
from headrace.io.paths import is_url, redact
from headrace.tokenizer import shown_tokenizer


def passed_arguments(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, keywords that go through ``**options`` included."""
    signature = inspect.signature(cls)
    passed = signature.bind(*args, **kwargs).arguments
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            passed.update(passed.pop(parameter.name, {}))
    return dict(passed)


def classes_of(cls: type) -> tuple[type, ...]:
    """The classes that users wrote of which headrace made a class; else this one alone."""
    return getattr(cls, "_parts", ()) or (cls,)


@functools.cache
def joined_class(*parts: type) -> type:
    """A class with the name of the first part, and what all of them can."""
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
    """A dataset as unpickling begins it: its state follows, and may lead back to it."""
    return object.__new__(joined_class(*parts))


def describe_call(name: str, arguments: dict[str, Any]) -> str:
    """The constructor's call as text: valid as far as its arguments have one, and without
    credentials.
    """
    shown = [
        _shown(value) if argument in ("data_path", "path") else describe_argument(argument, value)
        for argument, value in arguments.items()
    ]
    return f"{name}({', '.join(shown)})"


def explained(dataset: Any, stats: Mapping[str, int]) -> Lines:
    """How a dataset's samples are read, what is cached, and where its budget stands."""
    cached = "records as stored" if dataset.holds_encoded else "decoded samples"
    what = {"lazy": "nothing is held", "streaming": "only the read-ahead window is held"}
    lines = [
        f"{type(dataset).__name__}: {len(dataset):,} samples from "
        f"{type(dataset.sample_source).__name__}",
        f"loading_mode {dataset.loading_mode}: "
        f"{what.get(str(dataset.loading_mode), f'{cached} are held, shared by all workers')}",
        *(f"{name}: {way}" for name, way in dataset.sample_source.describe().ways.items()),
    ]
    if stats:
        lines.append("now: " + ", ".join(f"{name} {count:,}" for name, count in stats.items()))
    return Lines("\n".join([*lines, dataset.budget.explain()]))


def describe_argument(name: str, value: Any) -> str:
    """A keyword of such a call."""
    if name == "storage_options":
        return "storage_options={...}"
    return f"{name}={shown_tokenizer(value) if name == 'tokenizer' else _shown(value)}"


_OF_LOADING = {"data_path", "transform", "loading_mode"} | COMMON | REMOTE
"""Arguments that don't change what is held of a sample."""


def describe_held(cls: type, arguments: dict[str, Any]) -> str:
    """Class and arguments on which it depends what is held of a sample.

    Raises:
        ConfigError: an argument can't be compared with that of another process.
    """
    compared = {name: value for name, value in sorted(arguments.items()) if name not in _OF_LOADING}
    for name, value in compared.items():
        if not _is_plain(value):
            raise ConfigError(
                f"shared='machine': {cls.__name__}'s argument {describe_argument(name, value)} "
                "has no value that another process could "
                "compare: override held_as() and say in text what decides the held value"
            )
    return f"{cls.__module__}.{cls.__qualname__} {compared!r}"


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
