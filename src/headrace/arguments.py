"""Checks arguments, for all entry points."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar, overload

import numpy as np

from headrace.errors import ConfigError
from headrace.synonyms import ARGUMENTS, NAMES, WITHOUT_ARGUMENT

P = ParamSpec("P")
T = TypeVar("T")


def explain_missing(name: str, known: Collection[str]) -> str:
    """The message about an attribute that the package does not have."""
    if name in NAMES:
        return f"headrace has no {name!r}: use {NAMES[name]}"
    meant = nearest(name, known)
    if meant is None:
        return f"headrace has no {name!r}"
    return f"headrace has no {name!r}: did you mean {meant}?"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was most likely meant, ignoring case and underscores."""
    by_letters = {word.lower().replace("_", ""): word for word in known}
    letters = name.lower().replace("_", "")
    for match in difflib.get_close_matches(letters, by_letters, 1, 0.75):
        return by_letters[match]
    return None


def check_names(
    function: str,
    names: Iterable[str],
    known: Collection[str],
    elsewhere: Mapping[str, str] | None = None,
) -> None:
    """Raises a ConfigError for the first unknown name; the message says what to write instead.

    Args:
        function: name of the called function.
        names: the passed keywords.
        known: the keywords of the function.
        elsewhere: keywords of other functions, and where to pass them.
    """
    for name in names:
        if name not in known:
            remedy = _remedy(name, known, elsewhere or {})
            raise ConfigError(f"{function} has no {name!r}: {remedy}")


def _remedy(name: str, known: Collection[str], elsewhere: Mapping[str, str]) -> str:
    """What to write instead: by known meanings first, then by similar names."""
    instead = synonyms(name, known)
    if instead:
        return f"use {instead}"
    if name in elsewhere:
        return f"use it {elsewhere[name]}, whose option it is"
    for remedy in ARGUMENTS.get(name, ()):
        if _argument_of(remedy) in elsewhere:
            return f"use {remedy} {elsewhere[_argument_of(remedy)]}"
    if name in WITHOUT_ARGUMENT:
        return f"use {WITHOUT_ARGUMENT[name]}"
    meant = nearest(name, known)
    if meant and name not in ARGUMENTS:
        return f"did you mean {meant}?"
    return f"it has {', '.join(sorted(known))}"


def synonyms(name: str, known: Collection[str]) -> str:
    """What to write for a word of another library in a call with the known keywords; "" for other
    words.
    """
    return " or ".join(r for r in ARGUMENTS.get(name, ()) if _argument_of(r) in known)


def _argument_of(remedy: str) -> str:
    return re.split(r"\W", remedy, maxsplit=1)[0]


@overload
def check_integer(name: str, value: object, least: int | None = None) -> int: ...
@overload
def check_integer(
    name: str, value: object, least: int | None = None, *, optional: bool
) -> int | None: ...
def check_integer(
    name: str, value: object, least: int | None = None, *, optional: bool = False
) -> int | None:
    """An integer, of NumPy too, as an int.

    Raises:
        ConfigError: it is not an integer, is below `least`, or is None and not optional.
    """
    if value is None and optional:
        return None
    must = "must be an integer"
    if least is not None:
        must = f"{must} of at least {least}"
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise ConfigError(f"{name} {must}, not {described(value)}")
    number = operator.index(value)
    if least is not None and not least <= number < 2**63:
        raise ConfigError(f"{name} {must}, not {number}")
    return number


def check_seconds(name: str, value: object, least: float = 0.0) -> float:
    """A number of seconds as a float.

    Raises:
        ConfigError: it is not a number, is below `least`, or is not finite.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value < math.inf:  # type: ignore[operator]
        raise ConfigError(
            f"{name} must be a number of seconds, at least {least:g}, not {described(value)}"
        )
    return float(value)  # type: ignore[arg-type]


def check_choice(name: str, value: object, choices: Iterable[str | bool | None]) -> None:
    """Raises a ConfigError unless a value is one of the choices."""
    allowed = list(choices)
    if not isinstance(value, (str, bool, type(None))) or value not in allowed:
        shown = ", ".join(map(repr, allowed))
        raise ConfigError(f"{name} must be one of {shown}, not {value!r}")


def check_flag(name: str, value: object, *, optional: bool = False) -> None:
    """Raises a ConfigError unless a value is True or False, or None if it is optional."""
    if not isinstance(value, bool) and not (optional and value is None):
        raise ConfigError(f"{name} must be True or False, not {described(value)}")


def parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's parameters, without ``self``, ``*args`` and ``**options``."""
    parameters = inspect.signature(function).parameters.values()
    names = (p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
    return frozenset(names) - {"self"}


def checks_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function to raise a ConfigError for unknown keywords, which says what to write
    instead.

    A function with ``**options`` checks these itself; only synonyms of its own keywords are refused
    here.
    """
    known = parameters_of(function)
    parameters = inspect.signature(function).parameters.values()
    takes_options = any(p.kind is p.VAR_KEYWORD for p in parameters)
    shown = function.__qualname__.removesuffix(".__init__").split(".")[-1]

    @functools.wraps(function)
    def checked(*args: P.args, **keywords: P.kwargs) -> T:
        if not known.issuperset(keywords):
            refused = [name for name in keywords if not takes_options or synonyms(name, known)]
            check_names(shown, refused, known)
        return function(*args, **keywords)

    return checked


def described(value: object) -> str:
    """A short description of a value, for messages."""
    if value is None or isinstance(value, (bool, int, float, complex)):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (str, bytes)) and len(repr(value)) <= 60:
        return repr(value)
    name = type(value).__name__
    if name[:1] in "aeiouAEIOU":
        return f"an {name}"
    return f"a {name}"


def check_callable(name: str, value: object, *, optional: bool = True) -> None:
    """Raises a ConfigError unless a value is a callable, or None if it is optional; also for a
    class instead of its callable instance.
    """
    if isinstance(value, type) and is_of_callables(value):
        shown = value.__name__
        raise ConfigError(f"{name} is the class {shown}, not an instance: write {shown}(...)")
    if not callable(value) and not (optional and value is None):
        raise ConfigError(f"{name} must be a callable, not {described(value)}")


def is_of_callables(value: type) -> bool:
    """True if the instances of a class are callable."""
    return any("__call__" in vars(base) for base in value.__mro__)
