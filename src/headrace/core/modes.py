"""Loading modes: when the bytes of samples are read. Each mode is one short file, with one
protocol (`modes.mode.Mode`) for all.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from headrace.errors import ConfigError

ModeName = Literal["lazy", "eager", "cached", "streaming"]


class LoadingMode(StrEnum):
    """When samples are read.

    "lazy": at each access. "eager": all at the start. "cached": at the first access, later from
    memory. "streaming": ahead of the reader, in order.
    """

    LAZY = "lazy"
    EAGER = "eager"
    STREAMING = "streaming"
    CACHED = "cached"

    @classmethod
    def of(cls, value: LoadingMode | str) -> LoadingMode:
        """Returns the mode with that name, in any case.

        Raises:
            ConfigError: there is no such mode; the message lists all four.
        """
        try:
            return cls(value.lower() if isinstance(value, str) else value)
        except ValueError:
            names = ", ".join(repr(m.value) for m in cls)
            raise ConfigError(f"loading_mode must be one of {names}, not {value!r}") from None
