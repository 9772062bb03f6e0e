"""Names the sample in the warnings of other libraries' decoders, such as Pillow's."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any, Self


class _Decoding(threading.local):
    where: Callable[[], str] | None = None


_decoding = _Decoding()


class NamedWarnings:
    """As a context: warnings that this thread issues inside, and that say nothing of headrace's, end with the sample's path.

    `warnings.catch_warnings` would be for all threads at once, and would have warnings shown again for each sample that Python shows once.

    Args:
        location: gives the path of a sample.
        index: of the sample.
    """

    __slots__ = ("_index", "_location")

    def __init__(self, location: Callable[[int], str], index: int) -> None:
        self._location, self._index = location, index

    def __enter__(self) -> Self:
        if not hasattr(warnings.showwarning, "names_samples"):
            warnings.showwarning = _named(warnings.showwarning)
        _decoding.where = self._where
        return self

    def __exit__(self, *_: object) -> None:
        _decoding.where = None

    def _where(self) -> str:
        return self._location(self._index)


def _named(show: Callable[..., None]) -> Callable[..., None]:
    """A function in place of `warnings.showwarning` that names the sample, and then goes on to what was there."""

    def shown(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        location = _decoding.where
        if location is not None and not category.__module__.startswith("headrace."):
            with contextlib.suppress(TypeError):  # a class of more arguments
                message = category(f"{message} ({location()})")
        show(message, category, *where, **more)

    shown.names_samples = True  # type: ignore[attr-defined]
    return shown
