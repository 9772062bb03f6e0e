"""The fields of nested samples: how they are reached, shown in messages, and named by users."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from headrace.errors import ConfigError
from headrace.memory.tree import field_of, keys_of

Field = str | int
"""A key, a position or the name of an attribute; "outer.inner" for a field inside of another."""
_SHOWN = 30  # fields in a message


class Step(NamedTuple):
    """One step of the way."""

    text: str
    """As a message shows it: ``['key']``, ``[0]`` or ``.name``."""
    names: tuple[str, ...]
    """What a user may call it: a field of a named tuple has its position and its name."""


FieldPath = tuple[Step, ...]
"""The way to a field: the steps from the sample through dicts, tuples and dataclasses."""


def at_path(path: FieldPath) -> str:
    """ " at ['key'][0]"; nothing for the sample itself."""
    if not path:
        return ""
    return f" at {''.join(step.text for step in path)}"


def step_to(value: Any, key: Any) -> Step:
    """The step to what a container holds at one of its `keys_of`."""
    if isinstance(key, dataclasses.Field):
        return Step(f".{key.name}", (key.name,))
    if isinstance(value, Mapping):
        return Step(f"[{key!r}]", (str(key),))
    return Step(f"[{key}]", (str(key), *getattr(value, "_fields", ())[key : key + 1]))


def shown_fields(value: Any) -> str:
    """What a container holds, for messages."""
    keys = keys_of(value)
    if not keys:
        return f"no fields, in a {type(value).__name__}"
    names = [repr(step_to(value, key).names[-1]) for key in islice(keys, _SHOWN)]
    return f"the fields {', '.join(names)}, in a {type(value).__name__}"


class Fields:
    """Fields that the user named.

    Args:
        given: a field, or several.
        argument: the argument that they were given as, for messages.

    Raises:
        ConfigError: something else than keys and positions was given.
    """

    def __init__(self, given: Field | Iterable[Field], argument: str) -> None:
        if isinstance(given, str) or not isinstance(given, Iterable):
            given = [given]
        self.names: list[str] = []
        self.argument: str = argument
        for name in given:
            if isinstance(name, bool) or not isinstance(name, (str, int)):
                raise ConfigError(
                    f"{argument} must hold keys (texts) or positions (integers) of a sample, not "
                    f"a {type(name).__name__}"
                )
            self.names.append(str(name))

    def find(self, path: FieldPath) -> str | None:
        """The name of the field at a path; "" names the sample itself."""
        for name in self.names:
            parts = [part for part in name.split(".") if part]
            if len(path) == 1:
                parts = [name]
            is_named = all(part in step.names for part, step in zip(parts, path, strict=False))
            if is_named and len(parts) == len(path):
                return name
        return None

    def check(self, sample: Any) -> None:
        """Raises a ConfigError where the sample has no such field; the message lists those that it
        has.
        """
        for name in self.names:
            if not (_has(sample, [name]) or _has(sample, name.split("."))):
                raise ConfigError(
                    f"{self.argument}: the samples have no field {name!r}; a sample has "
                    f"{shown_fields(sample)}"
                )


def _has(value: Any, parts: list[str]) -> bool:
    if not parts:
        return True
    return any(
        parts[0] in step_to(value, key).names and _has(field_of(value, key), parts[1:])
        for key in keys_of(value) or ()
    )
