"""The interface of an epoch's order: indices by position, computed from a few arguments."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Literal, Self, TypeAlias, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.arguments import check_integer
from headrace.dtypes import IntArray

Shuffle: TypeAlias = bool | Literal["block"]

DEFAULT_GLOBAL_BATCH = 64

_PART = 65_536  # positions at a time, so that temporaries don't grow with the request


class Order(ABC):
    """The samples of an epoch as a sequence of indices, accessed by position. Picklable. Don't
    change its attributes.

    Args:
        n: number of positions in an epoch.
        seed: any integer.
        epoch: any integer.
        global_batch: number of samples per batch over all ranks.

    Attributes:
        n, seed, epoch, global_batch: the arguments.
        shuffle: kind of order: False, True, "block", "weights" or "balanced".
        repeats: True if an index may come more than once in an epoch. The position is then part of
            the seed of a sample's random transforms (`k` in `order.seeding`), so that they differ.

    Raises:
        ConfigError: an argument is invalid.
    """

    repeats = False
    shuffle: bool | str

    def __init__(self, n: int, seed: int, epoch: int, global_batch: int) -> None:
        self.n: int = check_integer("n", n, least=0)
        self.seed: int = check_integer("seed", seed)
        self.epoch: int = check_integer("epoch", epoch)
        self.global_batch: int = check_integer("global_batch", global_batch, least=1)

    def with_epoch(self, epoch: int) -> Self:
        """Returns the order of another epoch. Cheap, since everything that epochs have in common
        is shared.
        """
        other = copy.copy(self)
        other.epoch = check_integer("epoch", epoch)
        other._begin()
        return other

    @abstractmethod
    def _begin(self) -> None:
        """Makes what belongs to `epoch` alone."""

    @abstractmethod
    def _indices(self, positions: IntArray) -> IntArray:
        """The indices at positions in [0, n)."""

    def segments(self) -> IntArray | None:
        """Returns the segments of the storage whose samples all come soon after the first one.

        int64 array [segments + 1]: segment s has the samples ``[s]`` to ``[s + 1] - 1``. None:
        batches draw from everywhere, or there are no blocks.
        """
        return None

    def parameters(self) -> dict[str, Any]:
        """Returns the parameters that the orders of all epochs depend on, as plain values for a
        saved state; large ones as a digest.
        """
        return {
            "n": self.n,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "global_batch": self.global_batch,
            "interleave": None,
            "turns": None,
            "blocks": None,
        }

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, positions: int | np.integer) -> int: ...
    @overload
    def __getitem__(self, positions: slice | ArrayLike) -> IntArray: ...
    def __getitem__(self, positions: int | np.integer | slice | ArrayLike) -> int | IntArray:
        """Returns the indices of the samples at these positions.

        Args:
            positions: an integer, a slice, or integers of any shape; negative ones count from the
                end.

        Returns:
            int for an integer, else an int64 array of the positions' shape.

        Raises:
            IndexError: a position is outside of [-n, n), or not an integer.
        """
        if isinstance(positions, slice):
            array = flat = np.arange(*positions.indices(self.n), dtype=np.int64)
        else:
            array = np.asarray(positions)
            if array.size and not np.issubdtype(array.dtype, np.integer):
                raise IndexError(
                    f"positions must be integers, a slice or an integer array, got {array.dtype}"
                )
            if array.size and (array.min() < -self.n or array.max() >= self.n):
                raise IndexError(
                    f"positions must be in an order of {self.n} samples, got {array.min()} to "
                    f"{array.max()}"
                )
            flat = array.ravel().astype(np.int64)
            flat[flat < 0] += self.n
        out = np.empty(flat.size, np.int64)
        for start in range(0, flat.size, _PART):
            part = slice(start, start + _PART)
            out[part] = self._indices(flat[part])
        if isinstance(positions, int | np.integer):
            return int(out[0])
        return out.reshape(array.shape)

    def __iter__(self) -> Iterator[int]:
        start = 0
        size = 64  # positions at a time: first few, so that it begins at once, then more
        while start < self.n:
            yield from self[start : start + size].tolist()
            start += size
            size = min(4 * size, 4_096)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.parameters().items())
        return f"{type(self).__name__}({shown}, epoch={self.epoch})"


def digest_of(array: NDArray[Any]) -> str:
    """A short hash of an array's values, the same on every machine."""
    values = array.astype(array.dtype.newbyteorder("<"))
    return hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest()
