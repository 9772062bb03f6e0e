"""Names the sample in the warnings of other libraries' decoders, such as Pillow's."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any


class _Decoding(threading.local):
    sample: tuple[Callable[[int], str], int] | None = None


_decoding = _Decoding()


class NamedWarnings:
    """As a context: warnings that this thread issues inside, and that are no class of headrace's,
    end with the sample's path.

    `warnings.catch_warnings` would be for all threads at once, and would have warnings shown again
    for each sample that Python shows once.

    Args:
        location: gives the path of a sample.
        index: of the sample.
    """

    __slots__ = ("_sample",)

    def __init__(self, location: Callable[[int], str], index: int) -> None:
        self._sample = location, index

    def __enter__(self) -> None:
        if not hasattr(warnings.showwarning, "names_samples"):
            warnings.showwarning = _named(warnings.showwarning)
        _decoding.sample = self._sample

    def __exit__(self, *_: object) -> None:
        _decoding.sample = None


_UNNAMED = contextlib.nullcontext()


def naming(
    is_wanted: bool, location: Callable[[int], str], index: int
) -> contextlib.AbstractContextManager[None]:
    """`NamedWarnings`, if they are wanted."""
    return NamedWarnings(location, index) if is_wanted else _UNNAMED


def _named(show: Callable[..., None]) -> Callable[..., None]:
    """A function in place of `warnings.showwarning` that names the sample, and then goes on to
    what was there.
    """

    def shown(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if _decoding.sample is not None and not category.__module__.startswith("headrace."):
            location, index = _decoding.sample
            with contextlib.suppress(TypeError):  # a class of more arguments
                message = category(f"{message} ({location(index)})")
        show(message, category, *where, **more)

    shown.names_samples = True  # type: ignore[attr-defined]
    return shown
