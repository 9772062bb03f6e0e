"""Names the fields of nested samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from headrace.errors import ConfigError

Field = str | int
"""A key, a position or the name of an attribute; "outer.inner" for a field inside of another."""


class Step(NamedTuple):
    """One step of the way."""

    text: str
    """As a message shows it: ``['key']``, ``[0]`` or ``.name``."""
    names: tuple[str, ...]
    """What a user may call it: a field of a named tuple has its name and its position."""


FieldPath = tuple[Step, ...]
"""The way to a field: the steps from the sample through dicts, tuples and dataclasses."""


def at_path(path: FieldPath) -> str:
    """ " at ['key'][0]"; nothing for the sample itself."""
    return f" at {''.join(step.text for step in path)}" if path else ""


class Fields:
    """Fields that the user named.

    Args:
        given: a field, or several.
        argument: the argument that they were given as, for messages.

    Raises:
        ConfigError: something else than keys and positions was given.
    """

    def __init__(self, given: Field | Iterable[Field], argument: str) -> None:
        names = (
            list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
        )
        for name in names:
            if isinstance(name, bool) or not isinstance(name, (str, int)):
                raise ConfigError(
                    f"{argument} must hold keys (texts) or positions (integers) of a sample, not "
                    f"a {type(name).__name__}"
                )
        self.names: tuple[str, ...] = tuple(str(name) for name in names)
        self.argument: str = argument

    def find(self, path: FieldPath, met: set[str], around: bool = False) -> str | None:
        """The name of the field at a path, or `around` it; it is added to those that were met."""
        paths = [path[:end] for end in range(1, len(path) + 1)] if around else [path]
        name = next((name for part in paths for name in self.names if _means(name, part)), None)
        if name is not None:
            met.add(name)
        return name

    def check(self, met: set[str], sample: Any) -> None:
        """Raises a ConfigError where a name was not met in the samples; the message lists what
        there is.
        """
        for name in self.names:
            if name not in met:
                raise ConfigError(
                    f"{self.argument}: the samples have no field {name!r} of that kind; they "
                    f"have: {_names_in(sample)}"
                )


def _means(name: str, path: FieldPath) -> bool:
    if len(path) == 1:
        return name in path[0].names
    parts = name.split(".")
    return len(parts) == len(path) and all(
        part in step.names for part, step in zip(parts, path, strict=True)
    )


def _names_in(sample: Any) -> str:
    if isinstance(sample, Mapping):
        return ", ".join(repr(key) for key in sample)
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return ", ".join(repr(name) for name in sample._fields)
    if isinstance(sample, (tuple, list)):
        return f"the positions 0 to {len(sample) - 1}" if sample else "none"
    if dataclasses.is_dataclass(sample):
        return ", ".join(repr(field.name) for field in dataclasses.fields(sample))
    return f"none, a sample is a {type(sample).__name__}"
