"""Says how samples are stored in a pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from headrace.errors import ConfigError
from headrace.storage.arrays.compressors import COMPRESSIONS

Store = Literal["encoded", "jpeg", "decoded"]
Check = Literal["decode", "header"]
LARGEST_SIDE = 65_500  # pixels: what libjpeg can write


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How samples are stored; see `pack` for each.

    Attributes:
        store: "encoded", "jpeg" or "decoded"; None: as the dataset has them.
        max_size, quality: of "jpeg".
        check: what is looked at of encoded images.
        end_token: an id that is put behind each text; None: none.
        compression: of arrays, in chunks: one of `COMPRESSIONS`; None: as they are.
        chunks: of arrays: samples a chunk; None: contiguous or, compressed, as many as suit their
            bytes.

    Raises:
        ConfigError: they make no sense, or not together.
    """

    store: Store | None = None
    max_size: int | None = None
    quality: int = 90
    check: Check = "decode"
    end_token: int | None = None
    compression: str | None = None
    chunks: int | None = None

    def __post_init__(self) -> None:
        if self.store not in (None, *get_args(Store)):
            raise ConfigError(f"store must be 'encoded', 'jpeg' or 'decoded', not {self.store!r}")
        if self.check not in get_args(Check):
            raise ConfigError(f"check must be 'decode' or 'header', not {self.check!r}")
        if self.check != "decode" and self.store not in (None, "encoded"):
            raise ConfigError(
                f"check='header' is for encoded images, and store={self.store!r} decodes them: "
                "leave out check"
            )
        if not self.is_jpeg and (self.max_size is not None or self.quality != 90):
            raise ConfigError("max_size and quality are for store='jpeg'")
        if self.max_size is not None and (
            not isinstance(self.max_size, int) or not 1 <= self.max_size <= LARGEST_SIDE
        ):
            raise ConfigError(
                f"max_size must be a number of pixels from 1 to {LARGEST_SIDE:,}, not "
                f"{self.max_size!r}"
            )
        if not isinstance(self.quality, int) or not 1 <= self.quality <= 100:
            raise ConfigError(f"quality must be an int from 1 to 100, not {self.quality!r}")
        if self.end_token is not None:
            if type(self.end_token) is not int or not 0 <= self.end_token < 2**31:
                raise ConfigError(
                    f"end_token must be an id that fits int32, not {self.end_token!r}"
                )
            if (self.store, self.check) != (None, "decode"):
                raise ConfigError(
                    "end_token is for texts, and store and check are for images: leave out one or "
                    "the other"
                )
        if self.compression is not None and self.compression not in COMPRESSIONS:
            raise ConfigError(
                f"compression must be one of {', '.join(map(repr, COMPRESSIONS))}, or None, not "
                f"{self.compression!r}"
            )
        if self.chunks is not None and (
            not isinstance(self.chunks, int) or isinstance(self.chunks, bool) or self.chunks < 1
        ):
            raise ConfigError(f"chunks must be a number of samples, 1 or more, not {self.chunks!r}")
        if self.is_chunked and self.store in ("encoded", "jpeg"):
            raise ConfigError(
                f"{self.layout}: encoded images are compressed already: pass store='decoded' for "
                "their pixels"
            )

    @property
    def is_chunked(self) -> bool:
        """True if arrays are cut into chunks."""
        return self.compression is not None or self.chunks is not None

    @property
    def layout(self) -> str:
        """What is said of chunks, as arguments."""
        said = {"compression": self.compression, "chunks": self.chunks}
        return " and ".join(
            f"{name}={value!r}" for name, value in said.items() if value is not None
        )

    @property
    def is_jpeg(self) -> bool:
        """True if images are re-encoded."""
        return self.store == "jpeg"
