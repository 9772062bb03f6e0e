"""Which collate functions are there, and what are they called?"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.collate.pad import PadCollator
from headrace.collate.stack import list_collate, stack_collate
from headrace.collate.text import TextCollator
from headrace.collate.vision import VisionCollator
from headrace.errors import ConfigError

Collate = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Collator:
    """An entry of the registry.

    Attributes:
        name: what `get` finds it by.
        function: the collate function, or a class of such functions.
        modality: what kind of samples it is for, or None.
        description: one line.
    """

    name: str
    function: Collate
    modality: str | None
    description: str


class Collators:
    """Collate functions by name and by modality; the last registration wins."""

    def __init__(self) -> None:
        self._entries: dict[str, Collator] = {}

    def register(self, name: str, modality: str | None = None, description: str = "") -> Callable[[Collate], Collate]:
        """A decorator that registers a collate function ``(samples, **options) -> batch``, or a class ``(**options)`` of such functions.

        Raises:
            ConfigError: the name is no text, or what is registered is no callable.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f'the name of a collator must be a text, not {name!r}: write @collators.register("name")')

        def add(function: Collate) -> Collate:
            if not callable(function):
                raise ConfigError(f"the collator {name!r} must be a callable, not {function!r}")
            self._entries.pop(name, None)
            self._entries[name] = Collator(name, function, modality, description)
            return function

        return add

    def get(self, name_or_modality: str, **options: Any) -> Collate:
        """The function of that name, else the one registered last for that modality, with `options` bound to it.

        Of a class whose instances can be called, an instance made with the options.

        Raises:
            ConfigError: there is none; the message lists the names. Or the class has no such options.
        """
        entry = self._entries.get(name_or_modality)
        if entry is None:
            fitting = [e for e in self._entries.values() if e.modality == name_or_modality]
            if not fitting:
                names = ", ".join(sorted({*self._entries, *(e.modality for e in self._entries.values() if e.modality)}))
                raise ConfigError(f"collate_fn: no collator is called {name_or_modality!r}; there are: {names}")
            entry = fitting[-1]
        function = entry.function
        if isinstance(function, type) and any("__call__" in vars(base) for base in function.__mro__):  # which `list` is not
            try:
                inspect.signature(function).bind(**options)
            except TypeError as error:
                raise ConfigError(f"collator {entry.name!r}: {error}; it is {function.__name__}{inspect.signature(function)}") from None
            made: Collate = function(**options)
            return made
        return functools.partial(function, **options) if options else function

    def list(self) -> list[Collator]:
        """All entries, in the order of registration."""
        return [*self._entries.values()]


collators = Collators()
collators.register("default", description="stack samples of one shape; structure and dtypes are kept")(stack_collate)
collators.register("list", description="the samples as a list, as they are")(list_collate)
collators.register("pad", description="sequences padded to one length, with attention_mask and lengths")(PadCollator)
collators.register("text", modality="text", description="texts or tokens for a language model, with labels")(TextCollator)
collators.register("vision", modality="image", description="uint8 images, normalised on their way into the batch")(VisionCollator)
