"""The registry of collate functions, by name and by modality."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.arguments import is_of_callables
from headrace.collate.sequences import TextCollator, pad_collate
from headrace.collate.stack import list_collate, stack_collate
from headrace.collate.vision import DetectionCollator, VisionCollator
from headrace.errors import ConfigError

Collate = Callable[..., Any]


class Collator(NamedTuple):
    """An entry of the registry.

    Attributes:
        name: the name to pass to `get`.
        function: the collate function, or a class whose instances are collate functions.
        modality: the kind of samples, or None.
        description: one line of text.
    """

    name: str
    function: Collate
    modality: str | None
    description: str


class Collators:
    """Collate functions by name and by modality. The last registration wins."""

    def __init__(self) -> None:
        self._entries: dict[str, Collator] = {}

    def register(
        self, name: str, modality: str | None = None, description: str = ""
    ) -> Callable[[Collate], Collate]:
        """Returns a decorator that registers a collate function, or a class of such.

        A collate function is a callable ``(samples, **options) -> batch``. A class with callable
        instances is called with the options, and makes one.

        Args:
            name: the name for `get` and ``collate_fn=``.
            modality: a second name, which refers to the last registration of the modality.
            description: one line of text, for `list`.

        Raises:
            ConfigError: the name is not a str, or the registered object is not callable.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f'write @collators.register("name") with a name, not {name!r}')

        def add(function: Collate) -> Collate:
            if not callable(function):
                raise ConfigError(f"the collator {name!r} must be a callable, not {function!r}")
            self._entries.pop(name, None)
            self._entries[name] = Collator(name, function, modality, description)
            return function

        return add

    def get(self, name_or_modality: str, **options: Any) -> Collate:
        """Returns the collate function with that name, or the last one registered for that
        modality.

        A class is called with `options`. For a collate function they are bound as keywords.

        Raises:
            ConfigError: there is no such function (the message lists the names), or a class does
                not take these options.
        """
        entry = self._entries.get(name_or_modality)
        if entry is None:
            entry = next((e for e in reversed(self.list()) if e.modality == name_or_modality), None)
        if entry is None:
            names = sorted({*self._entries, *(e.modality for e in self.list() if e.modality)})
            raise ConfigError(
                f"collate_fn: no collator is called {name_or_modality!r}: use one of "
                f"{', '.join(names)}"
            )
        function = entry.function
        # a class without callable instances, such as `list`, is a function of the samples
        if not isinstance(function, type) or not is_of_callables(function):
            return functools.partial(function, **options) if options else function
        try:
            made: Collate = function(**options)
        except TypeError as error:
            raise ConfigError(f"collator {entry.name!r}: {error}; it is {function!r}") from error
        return made

    def list(self) -> list[Collator]:
        """Returns all entries, in order of registration."""
        return [*self._entries.values()]


collators: Collators = Collators()
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
