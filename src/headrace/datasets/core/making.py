"""How does a dataset come to be, and how does it travel?

It notes the arguments of its constructor, is settled once the outermost ``__init__`` is through, becomes an `IterableDataset`
exactly when its mode is streaming, and is pickled as its plain class.
"""

from __future__ import annotations

import functools
import inspect
import os
from abc import ABCMeta, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset

from headrace.datasets.core.checks import explain_call
from headrace.datasets.core.options import COMMON, REMOTE
from headrace.errors import ConfigError
from headrace.io.paths import is_url, redact
from headrace.memory.anonymous import SHARED_FROM, SharedArray, is_spawning
from headrace.memory.budget import MemoryBudget
from headrace.modes import LoadingMode
from headrace.order import detect_world
from headrace.tokenizer import shown_tokenizer


class DatasetMeta(ABCMeta):
    """Notes the arguments of a dataset, and settles it once the outermost ``__init__`` is through."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of the constructor: `help` and editors would show the one of ``__call__`` below."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=[*signature.parameters.values()][1:])

    def _create(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            dataset = super().__call__(*args, **kwargs)
        except TypeError as error:
            explain_call(cls, args, kwargs, error)
            raise
        dataset._arguments = _passed_arguments(cls, args, kwargs)
        dataset._settle()
        return dataset

    if not TYPE_CHECKING:
        __call__ = _create  # a type checker that sees it takes every dataset for Any


def _passed_arguments(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, keywords that go through ``**options`` included."""
    signature = inspect.signature(cls)
    passed = signature.bind(*args, **kwargs).arguments
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            passed.update(passed.pop(parameter.name, {}))
    return dict(passed)


@functools.cache
def streaming_class(cls: type) -> type:
    """The same class, and an IterableDataset: torch decides by `isinstance` how it treats a dataset."""
    if issubclass(cls, IterableDataset):
        return cls
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "_plain_class": cls}
    made: type = type(cls)(cls.__name__, (cls, IterableDataset), names)  # type: ignore[misc]
    return made


class Travelling:
    """The part of a dataset that is pickled: to a worker with its store, anywhere else without what is held."""

    loading_mode: LoadingMode
    _left_at_spawn: int | None = None
    """In a spawned worker, whose ledger knows nothing of its parent's reservations: what these left of the budget."""

    @property
    @abstractmethod
    def budget(self) -> MemoryBudget:
        """This process's memory budget."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return blank, (getattr(type(self), "_plain_class", type(self)),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_chunk_bytes": None, "_ahead_bytes": None}
        state["_seeder"] = None  # found anew: the copy holds copies of the generators
        state.pop("_travelling", None)
        if is_spawning():
            state["_left_at_spawn"] = self.budget.available
            state["_world"] = detect_world()  # a spawned worker does not see torch.distributed
            for name in ("targets", "_chosen"):
                state[name] = self._mapped_by_workers(name)
        else:
            state["_mode"] = None
        return state

    def _mapped_by_workers(self, name: str) -> Any:
        """An attribute as it travels to a spawned worker: a large array is moved to where all workers map it."""
        value = getattr(self, name)
        if not isinstance(value, np.ndarray) or value.dtype.hasobject or value.nbytes < SHARED_FROM:
            return value
        travelling: dict[str, tuple[Any, SharedArray]] = self.__dict__.setdefault("_travelling", {})
        if name not in travelling or travelling[name][0] is not value:
            shared = SharedArray(value)
            travelling[name] = shared.moved(), shared
            setattr(self, name, travelling[name][0])
        return travelling[name][1]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({k: v.array if isinstance(v, SharedArray) else v for k, v in state.items()})
        if self.loading_mode is LoadingMode.STREAMING:
            cls: Any = type(self)
            self.__class__ = streaming_class(cls)


def blank(cls: Any) -> Any:
    """A dataset as unpickling begins it: its state follows, and may lead back to it."""
    return object.__new__(cls)


def describe_call(name: str, arguments: dict[str, Any]) -> str:
    """The constructor's call as text: valid as far as its arguments have one, and without credentials."""
    shown = [
        _shown(value) if argument in ("data_path", "path") else describe_argument(argument, value) for argument, value in arguments.items()
    ]
    return f"{name}({', '.join(shown)})"


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
    said = {name: value for name, value in sorted(arguments.items()) if name not in _OF_LOADING}
    for name, value in said.items():
        if not _is_plain(value):
            raise ConfigError(
                f"shared='machine': {cls.__name__}'s argument {describe_argument(name, value)} has no value that another process could "
                "compare: override held_as() and say in text what decides the held value"
            )
    cls = getattr(cls, "_plain_class", cls)
    return f"{cls.__module__}.{cls.__qualname__} {said!r}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, [*value.keys(), *value.values()]))
    return value is None or isinstance(value, (bool, int, float, str, bytes, os.PathLike, np.generic))


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return repr(value.value)
    if isinstance(value, (str, bytes, os.PathLike)):
        return repr(redact(value))
    if isinstance(value, (list, tuple)) and any(is_url(v) for v in value):
        return repr([redact(v) for v in value])
    return repr(value)
