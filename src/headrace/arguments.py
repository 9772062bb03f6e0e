"""Checks of arguments that all entry points share."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import ParamSpec, TypeVar, overload

import numpy as np

from headrace.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")

OLD_NAMES = {
    "BatchTransform": "transform= of a dataset, which works on samples, or collate_fn=VisionCollator(), which works on batches",
    "CellMapDataLoader": "create_dataloader(dataset)",
    "CellMapDataset": "ZarrDataset(path, patch_shape=...)",
    "CollatorRegistry": "collators, which is the registry: collators.get(name), @collators.register(name)",
    "CustomCollateFn": "collate_fn=, any callable from a list of samples to a batch",
    "DataLoaderFactory": "create_dataloader(path or dataset), for all formats and uses",
    "DataLoaderPerformanceMonitor": "loader.get_stats(), or LoadingMonitor() for a loop of one's own",
    "EfficientDataLoader": "create_dataloader(dataset)",
    "MultiDataLoaderConfig": "the arguments of MultiDataLoader(loaders, ...)",
    "SamplingStrategy": "a string: MultiDataLoader(loaders, 'weighted')",
    "UniversalDataModule": "DataModule(train, val)",
    "create_optimized_dataloader": "create_dataloader(dataset)",
    "get_collator": "collators.get(name)",
    "get_optimal_num_workers": "num_workers=None, or suggest_num_workers(dataset), which measures",
    "set_reproducible_training": "seed_everything(seed, deterministic=True)",
}
"""Names of older guides, and what to use instead. None is an alias: each promised something that is done in another way here."""


def explain_missing(name: str, known: Collection[str]) -> str:
    """What to say of an attribute that the package has not."""
    instead, meant = OLD_NAMES.get(name), nearest(name, known)
    remedy = f": use {instead}" if instead else f": did you mean {meant}?" if meant else ""
    return f"headrace has no {name!r}{remedy}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was most likely meant, whatever its case and underscores."""
    by_letters = {_letters(word): word for word in known}
    matches = difflib.get_close_matches(_letters(name), by_letters, 1, 0.75)
    return by_letters[matches[0]] if matches else None


def _letters(name: str) -> str:
    return name.lower().replace("_", "")


def check_names(door: str, names: Iterable[str], known: Collection[str], hints: Mapping[str, str] | None = None) -> None:
    """Raises a ConfigError for the first name that is not known; it says which one was meant.

    Args:
        door: what the user called, as the message calls it.
        names: keywords that were passed.
        known: those that there are.
        hints: words of other libraries and older guides, and what to write instead.
    """
    for name in names:
        if name in known:
            continue
        hint, meant = (hints or {}).get(name), nearest(name, known)
        remedy = f"use {hint}" if hint else f"did you mean {meant}?" if meant else f"it has {', '.join(sorted(known))}"
        raise ConfigError(f"{door} has no {name!r}: {remedy}")


@overload
def check_integer(name: str, value: object, least: int | None = None) -> int: ...
@overload
def check_integer(name: str, value: object, least: int | None = None, *, optional: bool) -> int | None: ...
def check_integer(name: str, value: object, least: int | None = None, *, optional: bool = False) -> int | None:
    """An integer of any kind (numpy's too) as an int.

    Raises:
        ConfigError: it is none, is below `least`, or is None where it is not optional.
    """
    if value is None and optional:
        return None
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    number = operator.index(value) if is_integer else None  # type: ignore[arg-type]
    if number is None or (least is not None and not least <= number < 2**63):
        at_least = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{name} must be an integer{at_least}{' or None' if optional else ''}, not {described(value)}")
    return number


def check_seconds(name: str, value: object, least: float = 0.0) -> float:
    """A number of seconds as a float.

    Raises:
        ConfigError: it is none, is below `least`, or is not finite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
        raise ConfigError(f"{name} must be a number of seconds, at least {least:g}, not {described(value)}")
    return float(value)


def check_flag(name: str, value: object, *, optional: bool = False) -> None:
    """Raises a ConfigError for what is neither True nor False, nor None where it is optional."""
    if not isinstance(value, bool) and not (optional and value is None):
        raise ConfigError(f"{name} must be True or False{' or None' if optional else ''}, not {described(value)}")


def checks_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """A function that refuses keywords it does not have by a ConfigError, which proposes the nearest."""
    known = {p.name for p in inspect.signature(function).parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}

    @functools.wraps(function)
    def checked(*args: P.args, **keywords: P.kwargs) -> T:
        check_names(function.__name__, keywords, known)
        return function(*args, **keywords)

    return checked


def described(value: object) -> str:
    """A value as a message calls it that refuses it: short, and a class as a class."""
    if value is None or isinstance(value, (bool, int, float, complex)):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value) if isinstance(value, (str, bytes)) else ""
    return text if text and len(text) <= 60 else f"{'an' if type(value).__name__[:1] in 'aeiouAEIOU' else 'a'} {type(value).__name__}"


def check_callable(name: str, value: object) -> None:
    """Raises a ConfigError for what can't be called, and for a class whose instances were meant. None passes."""
    if value is None:
        return
    if isinstance(value, type) and is_of_callables(value):
        raise ConfigError(f"{name} is the class {value.__name__}, and one of its instances was meant: write {value.__name__}(...)")
    if not callable(value):
        raise ConfigError(f"{name} must be a callable, not {described(value)}")


def is_of_callables(value: type) -> bool:
    """True if the instances of a class can be called, as those of `str` and `torch.Tensor` can't."""
    return any("__call__" in vars(base) for base in value.__mro__)
