"""How does a dataset come to be, and how does it travel?

It notes the arguments of its constructor, is settled once the outermost ``__init__`` is through, becomes an `IterableDataset`
exactly when its mode is streaming, and is pickled as its plain class.
"""

from __future__ import annotations

import functools
import inspect
import os
from abc import ABCMeta
from enum import Enum
from typing import Any

from torch.utils.data import IterableDataset

from headrace.storage.scan import is_url, redact


class DatasetMeta(ABCMeta):
    """Notes the arguments of a dataset, and settles it once the outermost ``__init__`` is through."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of the constructor: `help` and editors would show the one of ``__call__`` below."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=[*signature.parameters.values()][1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        dataset = super().__call__(*args, **kwargs)
        dataset._arguments = _passed_arguments(cls, args, kwargs)
        dataset._settle()
        return dataset


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


def blank(cls: Any) -> Any:
    """A dataset as unpickling begins it: its state follows, and may lead back to it."""
    return object.__new__(cls)


def describe_call(name: str, arguments: dict[str, Any]) -> str:
    """The constructor's call as text: valid as far as its arguments have one, and without credentials."""
    shown = []
    for argument, value in arguments.items():
        if argument == "storage_options":
            shown.append("storage_options={...}")
        elif argument in ("data_path", "path"):
            shown.append(_shown(value))
        else:
            shown.append(f"{argument}={_shown(value)}")
    return f"{name}({', '.join(shown)})"


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return repr(value.value)
    if isinstance(value, (str, bytes, os.PathLike)):
        return repr(redact(value))
    if isinstance(value, (list, tuple)) and any(is_url(v) for v in value):
        return repr([redact(v) for v in value])
    return repr(value)
