"""The order of an epoch: sequential, a full permutation, or a block shuffle.

An `Order` gives indices by position, computed from a few arguments. `EpochOrder` computes them from
a few integers. `ResizedOrder` cuts it short, or repeats it.
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Literal, Self, TypeAlias, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.arguments import check_choice, check_integer, checks_keywords
from headrace.dtypes import IntArray, distinct
from headrace.errors import ConfigError
from headrace.order.lanes import AlignedLanes, BlockSequence, Lanes
from headrace.order.permutation import KEY_COUNT, derive_keys, permute

Shuffle: TypeAlias = bool | Literal["block"]

DEFAULT_GLOBAL_BATCH = 64
DEFAULT_INTERLEAVE = 64
DEFAULT_TURNS = 12  # divided by 1, 2, 3, 4, 6 and 12 workers, so that each has lanes of its own

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
        """Returns the order of another epoch. Cheap: the orders share what doesn't depend on it."""
        other = copy.copy(self)
        other.epoch = check_integer("epoch", epoch)
        other._begin()
        return other

    @abstractmethod
    def _begin(self) -> None:
        """Computes what depends on `epoch`."""

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
        for start in range(0, self.n, 4_096):
            yield from self[start : start + 4_096].tolist()

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.parameters().items())
        return f"{type(self).__name__}({shown}, epoch={self.epoch})"


def digest_of(array: NDArray[Any]) -> str:
    """A short hash of an array's values, the same on every machine."""
    values = array.astype(array.dtype.newbyteorder("<"))
    return hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest()


class EpochOrder(Order):
    """The order of an epoch, as a sequence of sample indices that is computed and not stored.

    It is a pure function of its arguments: the same on every machine, rank and worker. Memory is
    O(1) for ``shuffle=False`` and ``True`` (plus the block sizes, if given) and O(blocks) for
    ``"block"``. The arguments except `blocks` are attributes of the same names; don't change them.

    >>> order = EpochOrder(1_000_000_000_000, seed=7)
    >>> order[[5, 0, -1]].tolist()
    [222200520135, 730370520133, 574349482096]

    Args:
        n: number of samples.
        shuffle: False: 0, 1, 2, ... True: a permutation of all samples. "block": blocks are
            permuted and interleaved, and samples are permuted inside their block, or inside the
            part of it that is read separately (see `order.lanes`).
        seed: any integer.
        epoch: any integer. Seed and epoch are hashed together, so no epoch of one seed repeats an
            epoch of another.
        blocks: integer array [blocks], sizes of consecutive runs of samples that are stored
            together; their sum is `n`. None: each sample is a block, so "block" equals True.
        global_batch: number of samples per batch over all ranks. Only "block" depends on it.
        interleave: for "block": number of lanes that a global batch draws from. None:
            `DEFAULT_INTERLEAVE`.
        turns: for "block": number of sets of lanes, used by consecutive global batches in turn;
            ideally a multiple of the number of workers.
        aligned: for "block": blocks are read and decoded as a whole, so lanes cut as few of them as
            possible (`AlignedLanes`). Takes effect if all blocks have one size, except the last,
            which may be smaller.

    Raises:
        ConfigError: an argument is invalid, or block sizes don't sum up to `n`.
    """

    @checks_keywords
    def __init__(
        self,
        n: int,
        *,
        shuffle: Shuffle = True,
        seed: int = 42,
        epoch: int = 0,
        blocks: ArrayLike | None = None,
        global_batch: int = DEFAULT_GLOBAL_BATCH,
        interleave: int | None = None,
        turns: int = DEFAULT_TURNS,
        aligned: bool = False,
    ) -> None:
        super().__init__(n, seed, epoch, global_batch)
        if isinstance(shuffle, np.bool_):
            shuffle = bool(shuffle)
        check_choice("shuffle", shuffle, (False, True, "block"))
        self.shuffle = shuffle
        if interleave is None:
            interleave = DEFAULT_INTERLEAVE
        self.interleave: int = check_integer("interleave", interleave, least=1)
        self.turns: int = check_integer("turns", turns, least=1)
        self._edges: IntArray | None = None
        self._lanes: Lanes | None = None
        if blocks is not None:
            sizes = np.asarray(blocks)
            self._edges = _edges_of(sizes, self.n)
            if shuffle == "block":
                shape = (self.n, self.global_batch, self.interleave, self.turns)
                self._lanes = Lanes(*shape)
                # the last one may be smaller, but not empty
                is_even = aligned and sizes.size and 0 < sizes[-1] <= sizes[0]
                if is_even and (sizes[:-1] == sizes[0]).all():
                    self._lanes = AlignedLanes(*shape, int(sizes[0]))
        self._begin()

    def _begin(self) -> None:
        self._keys = derive_keys("order", self.seed, self.epoch, count=KEY_COUNT)
        self._sequence: BlockSequence | None = None

    def _indices(self, positions: IntArray) -> IntArray:
        if self._lanes is not None:
            return self._blocks_of_epoch().index_at(self._lanes.place_of(positions))
        if self.shuffle:
            return permute(positions, self.n, self._keys)
        return positions

    def segments(self) -> IntArray | None:
        if self._lanes is None:
            return None
        return self._blocks_of_epoch().segments()

    def parameters(self) -> dict[str, Any]:
        """Returns the parameters that the orders of all epochs depend on, as plain values for a
        saved state.

        ``interleave``, ``turns`` and ``blocks`` (the layout, and a digest of the sizes) are None if
        the order doesn't depend on them; ``shuffle`` is True where there are no blocks to shuffle
        by.
        """
        common = super().parameters()
        if self._lanes is None or self._edges is None:
            return {**common, "shuffle": bool(self.shuffle)}
        blocks = f"{self._lanes.layout}-{digest_of(self._edges)}"
        return {**common, "interleave": self.interleave, "turns": self.turns, "blocks": blocks}

    def _blocks_of_epoch(self) -> BlockSequence:
        """Computed at first use, since most epochs made by `with_epoch` are never accessed."""
        if self._sequence is None:
            assert self._lanes is not None and self._edges is not None
            cuts = self._lanes.cuts
            # the parts of a block are permuted by themselves, unless most have one sample or two
            if cuts.size >= self._edges.size:
                cuts = cuts[:0]
            last_stays = self._lanes.last_stays
            self._sequence = BlockSequence(self._edges, self.seed, self.epoch, cuts, last_stays)
        return self._sequence


def pass_epoch(epoch: int, number: int) -> int:
    """The epoch whose order pass `number` of an epoch takes, if a loader is iterated over several
    times in an epoch.

    Returns:
        `epoch` itself for pass 0; otherwise a hash of both in [2**61, 2**62), which no counted
        epoch reaches.
    """
    if number == 0:
        return epoch
    high, low = derive_keys("pass", epoch, number, count=2).tolist()
    hashed: int = 1 << 61 | ((high << 32 | low) & ((1 << 61) - 1))
    return hashed


class ResizedOrder(Order):
    """The first `n` positions of an order. Past its end all samples come again, in another order
    (`pass_epoch`).

    Args:
        order: order of all samples.
        n: number of positions in an epoch; 0 if there are no samples.

    Attributes:
        whole: the order of all samples, of this epoch.
    """

    def __init__(self, order: EpochOrder, n: int) -> None:
        super().__init__(n if order.n else 0, order.seed, order.epoch, order.global_batch)
        self.shuffle: bool | str = order.shuffle
        self.whole: EpochOrder = order
        self.repeats: bool = self.n > order.n
        self._begin()

    def _begin(self) -> None:
        self.whole = self.whole.with_epoch(self.epoch)
        # the last pass that was computed: a block shuffle makes a table for each
        self._pass = 0
        self._order = self.whole

    def _indices(self, positions: IntArray) -> IntArray:
        if not self.repeats:
            return self.whole[positions]
        passes, places = np.divmod(positions, self.whole.n)
        out = np.empty_like(positions)
        for number in distinct(passes).tolist():
            if number != self._pass:
                self._pass = number
                self._order = self.whole.with_epoch(pass_epoch(self.epoch, number))
            chosen = passes == number
            out[chosen] = self._order[places[chosen]]
        return out

    def segments(self) -> IntArray | None:
        if self.repeats:
            return None
        return self.whole.segments()

    def parameters(self) -> dict[str, Any]:
        return {**self.whole.parameters(), "num_samples": self.n}


def _edges_of(sizes: NDArray[Any], n: int) -> IntArray:
    """The starts of blocks, and the end of the last one."""
    if sizes.ndim != 1 or (sizes.size and not np.issubdtype(sizes.dtype, np.integer)):
        raise ConfigError(
            f"blocks must be a list of integer sizes, got shape {sizes.shape} of {sizes.dtype}"
        )
    if sizes.size and sizes.min() < 0:
        raise ConfigError(f"blocks must be sizes of 0 and more, got {sizes.min()}")
    edges = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=edges[1:])
    if edges[-1] != n:
        raise ConfigError(
            f"blocks must sum up to n = {n}, but the {sizes.size} sizes sum up to {edges[-1]}"
        )
    return edges
