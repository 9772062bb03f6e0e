"""Loading modes: when the bytes of samples move. One short file each, one protocol (`modes.mode.Mode`) for all."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from headrace.errors import ConfigError

ModeName = Literal["lazy", "eager", "cached", "streaming"]


class LoadingMode(StrEnum):
    """When samples are read: at each access, all at the start, at the first access, or ahead of the reader."""

    LAZY = "lazy"
    EAGER = "eager"
    STREAMING = "streaming"
    CACHED = "cached"

    @classmethod
    def of(cls, value: LoadingMode | str) -> LoadingMode:
        """The mode of that name, in any case.

        Raises:
            ConfigError: there is none; the message lists the four.
        """
        try:
            return cls(value.lower() if isinstance(value, str) else value)
        except ValueError:
            names = ", ".join(repr(m.value) for m in cls)
            raise ConfigError(f"loading_mode must be one of {names}, not {value!r}") from None
