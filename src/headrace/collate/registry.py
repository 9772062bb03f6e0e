"""The registry of collate functions, by name and by modality."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.arguments import described, is_of_callables
from headrace.collate.sequences import TextCollator, pad_collate
from headrace.collate.stack import list_collate, stack_collate
from headrace.collate.vision import DetectionCollator, VisionCollator
from headrace.errors import ConfigError
from headrace.synonyms import COLLATORS

Collate = Callable[..., Any]


class Collator(NamedTuple):
    """An entry of the registry.

    Attributes:
        name: the name to pass to `get`.
        function: the collate function, or a factory or class that makes one.
        modality: kind of samples that it is for, or None.
        description: one line of text.
        is_factory: True if `function` is called with the options and returns the collate function.
    """

    name: str
    function: Collate
    modality: str | None
    description: str
    is_factory: bool


class Collators:
    """Collate functions by name and by modality. The last registration wins."""

    def __init__(self) -> None:
        self._entries: dict[str, Collator] = {}

    def register(
        self,
        name: str,
        modality: str | None = None,
        description: str = "",
        *,
        factory: bool | None = None,
    ) -> Callable[[Collate], Collate]:
        """Returns a decorator that registers a collate function, or something that makes one.

        A collate function is a callable ``(samples, **options) -> batch``. A factory ``(**options)
        -> collate function``, or a class with callable instances, makes one.

        Args:
            name: the name for `get` and ``collate_fn=``.
            modality: a second name, which refers to the last registration of the modality.
            description: one line of text, for `list`.
            factory: True: the function is called with the options and returns the collate function.
                False: it is the collate function itself. None: a class with callable instances is a
                factory, and so is a function that can be called without arguments, such as
                ``make(task=None, **options)``. A factory with a required argument,
                ``make(tokenizer)``, needs ``factory=True``.

        Raises:
            ConfigError: the name is not a str, or the registered object is not callable.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"the name of a collator must be a text, not {name!r}: write "
                '@collators.register("name")'
            )

        def add(function: Collate) -> Collate:
            if not callable(function):
                raise ConfigError(f"the collator {name!r} must be a callable, not {function!r}")
            is_factory = factory
            if factory is None:
                is_factory = _looks_like_factory(function)
            self._entries.pop(name, None)
            self._entries[name] = Collator(name, function, modality, description, bool(is_factory))
            return function

        return add

    def get(self, name_or_modality: str = "", **options: Any) -> Collate:
        """Returns the collate function with that name, or the last one registered for that
        modality.

        A factory or a class is called with `options`. For a collate function they are bound as
        keywords.

        Raises:
            ConfigError: no name is given; there is no such function, and the message lists the
                names; or a factory or class does not take these options, or does not return a
                callable.
        """
        if not name_or_modality:
            given = next(iter(options.values()), "pad")
            raise ConfigError(
                "collators.get takes the name or modality first: write "
                f"collators.get({described(given)})"
            )
        entry = self._entries.get(name_or_modality)
        if entry is None:
            entry = next((e for e in reversed(self.list()) if e.modality == name_or_modality), None)
        if entry is None:
            names = {*self._entries, *(e.modality for e in self.list() if e.modality)}
            remedy = f"there are: {', '.join(sorted(names))}"
            instead = COLLATORS.get(name_or_modality)
            if instead in self._entries:
                remedy = f"use {instead!r}"
            raise ConfigError(f"collate_fn: no collator is called {name_or_modality!r}; {remedy}")
        function = entry.function
        if not entry.is_factory:
            if not options:
                return function
            return functools.partial(function, **options)
        try:
            made: Collate = function(**options)
        except TypeError as error:
            raise ConfigError(f"collator {entry.name!r}: {error}; it is {function!r}") from error
        if not callable(made):
            raise ConfigError(
                f"collator {entry.name!r} is registered as a factory, and {function!r} returned a "
                f"{type(made).__name__} where a collate function should be: if it takes samples "
                "and returns their batch, register it with factory=False"
            )
        return made

    def list(self) -> list[Collator]:
        """Returns all entries, in order of registration."""
        return [*self._entries.values()]


def _looks_like_factory(function: Collate) -> bool:
    """True for a class whose instances can be called, which `list` is not, and for a function
    that can be called without an argument.
    """
    if isinstance(function, type):
        return is_of_callables(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some builtins
        return False
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):  # a wrapper: (*args, **kwargs)
        return False
    return all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in parameters)


collators = Collators()
"""The registry of collate functions. `register`, `get` and `list` are its methods."""
for _name, _modality, _function, _description in (
    ("default", None, stack_collate, "stack samples of one shape; structure and dtypes are kept"),
    ("list", None, list_collate, "the samples as a list, as they are"),
    ("pad", None, pad_collate, "sequences padded to one length, with attention_mask and lengths"),
    ("detection", None, DetectionCollator, "images, and the objects in each as a list of dicts"),
    ("text", "text", TextCollator, "texts or tokens for a language model, with labels"),
    ("vision", "image", VisionCollator, "images, normalised on their way into the batch"),
):
    collators.register(_name, _modality, _description)(_function)
