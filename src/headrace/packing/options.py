"""The options of `pack`."""

from __future__ import annotations

import re
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

from headrace.arguments import check_integer
from headrace.errors import ConfigError
from headrace.formats.arrays.codecs import COMPRESSIONS
from headrace.memory.budget import parse_size
from headrace.memory.limits import usable_cpus
from headrace.memory.processes import check_may_start

Store = Literal["encoded", "jpeg", "decoded"]
Check = Literal["decode", "header"]
LARGEST_SIDE = 65_500  # pixels: what libjpeg can write


class PackKeywords(TypedDict, total=False):
    """Keywords of `pack`; see there."""

    store: Store | None
    max_size: int | None
    quality: int
    check: Check
    end_token: int | None
    compression: str | None
    chunks: int | None
    shard_size: int | str | None
    part: str | None
    parts: str | None
    workers: int | None
    processes: int
    executor: Executor | None
    storage_options: dict[str, Any] | None
    overwrite: bool
    progress: bool | None


@dataclass(frozen=True)
class PackOptions:
    """The keywords of `pack` with their defaults; see there.

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
    shard_size: int | str | None = None
    part: str | None = None
    parts: str | None = None
    workers: int | None = None
    processes: int = 1
    executor: Executor | None = None
    storage_options: dict[str, Any] | None = None
    overwrite: bool = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {
            "store": (*get_args(Store), None),
            "check": get_args(Check),
            "compression": (*COMPRESSIONS, None),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                shown = ", ".join(map(repr, allowed))
                raise ConfigError(f"{name} must be one of {shown}, not {value!r}")
        if not self.is_jpeg and (self.max_size is not None or self.quality != 90):
            raise ConfigError("max_size and quality are for store='jpeg'")
        for name, most in (("max_size", LARGEST_SIDE), ("quality", 100)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or not 1 <= value <= most):
                raise ConfigError(f"{name} must be an integer from 1 to {most}, not {value!r}")
        end = self.end_token
        if end is not None and (type(end) is not int or not 0 <= end < 2**31):
            raise ConfigError(f"end_token must be an id that fits int32, not {end!r}")
        check_integer("chunks", self.chunks, 1, optional=True)
        if self.is_chunked and self.store in ("encoded", "jpeg"):
            raise ConfigError(
                f"{self.layout}: encoded images are compressed already: pass store='decoded' for "
                "their pixels"
            )
        check_integer("workers", self.workers, 1, optional=True)
        check_integer("processes", self.processes, 1)
        if self.processes > 1:
            check_may_start(f"processes={self.processes}")
        if self.shard_size is None:
            of_parts = ("part", "parts", "processes", "executor", "storage_options")
            for name in of_parts:
                if getattr(self, name) not in (None, 1):
                    raise ConfigError(
                        f"{name} is for packs of several parts: pass shard_size, such as '1GB', "
                        "or leave it out"
                    )
        _ = self.part_nbytes
        self.share(1 << 62)

    @property
    def is_chunked(self) -> bool:
        """True if arrays are cut into chunks."""
        return self.compression is not None or self.chunks is not None

    @property
    def layout(self) -> str:
        """The arguments that set chunks, for messages."""
        given = {"compression": self.compression, "chunks": self.chunks}
        return " and ".join(f"{name}={value!r}" for name, value in given.items() if value)

    @property
    def is_jpeg(self) -> bool:
        """True if images are re-encoded."""
        return self.store == "jpeg"

    @property
    def threads(self) -> int:
        """Number of threads of each process."""
        return self.workers or max(1, usable_cpus() // self.processes)

    @property
    def part_nbytes(self) -> int:
        """Approximate bytes of a part; for a single file more than any has."""
        if self.shard_size is None:
            return 1 << 62
        nbytes = parse_size(self.shard_size, "shard_size")
        if nbytes < 1:
            raise ConfigError("shard_size must be at least 1 byte")
        return nbytes

    def share(self, count: int) -> range:
        """The numbers of the parts that this call packs, out of `count`.

        Raises:
            ConfigError: `part` and `parts` make no sense, or both are given.
        """
        if self.part is not None and self.parts is not None:
            raise ConfigError("pass part or parts, not both")
        if self.part is not None:
            first, of = self._pair("part", "/", "'i/N' with i from 0 to N - 1, such as '3/8'")
            return range(first, count, of)
        if self.parts is None:
            return range(count)
        first, stop = self._pair("parts", ":", "'a:b' with a < b, such as '0:16'")
        if stop > count:
            raise ConfigError(f"parts={self.parts}: the plan has {count:,} parts")
        return range(first, stop)

    def _pair(self, name: str, between: str, wanted: str) -> tuple[int, int]:
        """Parses an option of two increasing numbers."""
        text = str(getattr(self, name))
        match = re.fullmatch(rf"(\d+){between}(\d+)", text, re.ASCII)
        if match is None or not int(match[1]) < int(match[2]):
            raise ConfigError(f"{name} must be {wanted}, not {getattr(self, name)!r}")
        return int(match[1]), int(match[2])
