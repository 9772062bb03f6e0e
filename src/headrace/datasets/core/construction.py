"""Construction, repr and pickling of datasets.

A dataset notes the arguments of its constructor, is settled once the outermost ``__init__`` is
through, becomes an `IterableDataset` exactly when its mode is streaming, and is pickled as its
plain class.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from headrace.datasets.core.checks import explain_call
from headrace.datasets.core.options import COMMON, REMOTE
from headrace.display import Lines
from headrace.errors import ConfigError
from headrace.io.paths import is_url, redact
from headrace.memory.anonymous import SHARED_FROM, SharedArray, is_spawning
from headrace.modes import LoadingMode
from headrace.order import detect_world
from headrace.tokenizer import shown_tokenizer

STEPS = ("decode", "value_spec", "split_target", "to_input", "make_sample")
"""The steps from a record to a sample that a subclass may override; a `SampleFormat` has the
same.
"""


def prepare_class(cls: Any, base: type) -> None:
    """Notes which steps a new dataset class overrides, and has its constructor settle the dataset
    when it is through.
    """
    cls._overridden = frozenset(
        step for step in STEPS if getattr(cls, step) is not getattr(base, step)
    )
    if "__init__" in vars(cls):
        cls.__init__ = settling(cls.__init__)


def settling(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that, where it is the outermost one, notes its arguments and settles the
    dataset.
    """

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        cls = type(self)
        if cls.__init__ is not __init__:  # called by that of a subclass
            return init(self, *args, **kwargs)
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            explain_call(cls, args, kwargs, error)
            raise
        if "block_memory" not in vars(self):
            raise ConfigError(
                f"{cls.__name__}.__init__ does not call that of its base class, which opens the "
                "data: call super().__init__(...) "
                "in it (of a BaseDataset with a Source); a dataset that does all by itself is a "
                "torch.utils.data.Dataset"
            )
        self._arguments = _passed_arguments(cls, args, kwargs)
        self._settle()

    return __init__


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
    """The same class, and an `IterableDataset`."""
    if issubclass(cls, IterableDataset):
        return cls
    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_plain_class": cls,
    }
    made: type = type(cls)(cls.__name__, (cls, IterableDataset), names)  # type: ignore[misc]
    return made


def reduced(dataset: Any, protocol: Any) -> tuple[Any, ...]:
    """For `pickle`: a dataset travels to a worker with its store, anywhere else without what is
    held, and always as its plain class.
    """
    return blank, (getattr(type(dataset), "_plain_class", type(dataset)),), dataset.__getstate__()


def state_of(dataset: Any) -> dict[str, Any]:
    """What travels of a dataset."""
    state = {name: value for name, value in dataset.__dict__.items() if name != "_travelling"}
    if is_spawning():
        state["_world"] = detect_world()  # a spawned worker does not see torch.distributed
        for name in ("targets", "_chosen"):
            state[name] = _mapped_by_workers(dataset, name)
    else:
        state["_mode"] = None
    return state


def _mapped_by_workers(dataset: Any, name: str) -> Any:
    """An attribute as it travels to a spawned worker: a large array is moved to where all
    workers map it.
    """
    value = getattr(dataset, name)
    if not isinstance(value, np.ndarray) or value.dtype.hasobject or value.nbytes < SHARED_FROM:
        return value
    travelling: dict[str, tuple[Any, SharedArray]] = dataset.__dict__.setdefault("_travelling", {})
    if name not in travelling or travelling[name][0] is not value:
        shared = SharedArray(value)
        travelling[name] = shared.moved(), shared
        setattr(dataset, name, travelling[name][0])
    return travelling[name][1]


def restore(dataset: Any, state: dict[str, Any]) -> None:
    """Fills a blank dataset with what travelled."""
    dataset.__dict__.update(
        {k: v.array if isinstance(v, SharedArray) else v for k, v in state.items()}
    )
    become_iterable(dataset)


def become_iterable(dataset: Any) -> None:
    """Makes a dataset an `IterableDataset` exactly when it is streaming (law 8): torch decides by
    `isinstance`, and the mode may be known only when the constructor is through.
    """
    if dataset.loading_mode is LoadingMode.STREAMING:
        dataset.__class__ = streaming_class(dataset.__class__)


def blank(cls: Any) -> Any:
    """A dataset as unpickling begins it: its state follows, and may lead back to it."""
    return object.__new__(cls)


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
        *(f"{name}: {way}" for name, way in dataset.sample_source.how().items()),
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
    cls = getattr(cls, "_plain_class", cls)
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
