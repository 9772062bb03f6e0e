"""Which sample stands at position p of an epoch?

`EpochOrder` answers for any position, from a few integers: no list of indices is ever written down, a run can stop and
go on anywhere, and workers and ranks need not talk to agree.
"""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.errors import ConfigError
from headrace.order.lanes import BlockSequence, Lanes
from headrace.order.permutation import KEY_COUNT, derive_keys, permute

IntArray: TypeAlias = NDArray[np.int64]
Shuffle: TypeAlias = bool | Literal["block"]

DEFAULT_GLOBAL_BATCH = 64
DEFAULT_INTERLEAVE = 64
DEFAULT_TURNS = 12  # divided by 1, 2, 3, 4, 6 and 12 workers, so that each has lanes of its own

_PART = 65_536  # positions at a time, so that temporaries don't grow with the request


class EpochOrder:
    """The order of an epoch, as a sequence of sample indices that is computed and not stored.

    A pure function of its arguments: the same on every machine, rank and worker. Memory is O(1) for ``shuffle=False``
    and ``True`` (plus the block sizes, if given) and O(blocks) for ``"block"``. The arguments but for `blocks` are
    attributes of the same names; don't change them.

    >>> order = EpochOrder(1_000_000_000_000, seed=7)
    >>> order[[5, 0, -1]].tolist()
    [222200520135, 730370520133, 574349482096]

    Args:
        n: number of samples.
        shuffle: False: 0, 1, 2, ...; True: a permutation of all samples; "block": blocks are permuted and interleaved,
            and samples are permuted inside their block, so that a block is read once (see `order.lanes`).
        seed: any integer.
        epoch: any integer. Seed and epoch are hashed together: no epoch of one seed repeats an epoch of another.
        blocks: integer array [blocks] of the sizes of consecutive runs of samples that are stored together; their sum
            is `n`. None: each sample is a block of its own, and then "block" gives what True gives.
        global_batch: samples in a batch over all ranks. Only "block" depends on it.
        interleave: for "block", how many places of the sequence of blocks a global batch draws from; None:
            `DEFAULT_INTERLEAVE`.
        turns: for "block", after how many global batches the same places come again. Best a multiple of the number of
            workers.

    Raises:
        ConfigError: an argument that makes no sense, or block sizes that don't sum up to `n`.
    """

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
    ) -> None:
        self.n = _integer("n", n, least=0)
        self.shuffle = _check_shuffle(shuffle)
        self.seed = _integer("seed", seed)
        self.epoch = _integer("epoch", epoch)
        self.global_batch = _integer("global_batch", global_batch, least=1)
        self.interleave = _integer("interleave", DEFAULT_INTERLEAVE if interleave is None else interleave, least=1)
        self.turns = _integer("turns", turns, least=1)
        self._edges = None if blocks is None else _edges_of(blocks, self.n)
        laned = self.shuffle == "block" and self._edges is not None
        self._lanes = Lanes(self.n, self.global_batch, self.interleave, self.turns) if laned else None
        self._keys = self._derive_keys()
        self._sequence: BlockSequence | None = None

    def with_epoch(self, epoch: int) -> EpochOrder:
        """Gives the order of another epoch; cheap, since all that epochs have in common is shared."""
        other = copy.copy(self)
        other.epoch = _integer("epoch", epoch)
        other._keys = other._derive_keys()
        other._sequence = None
        return other

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, positions: int | np.integer) -> int: ...
    @overload
    def __getitem__(self, positions: slice | ArrayLike) -> IntArray: ...
    def __getitem__(self, positions: int | np.integer | slice | ArrayLike) -> int | IntArray:
        """Gives the indices of the samples at these positions.

        Args:
            positions: an integer, a slice, or integers of any shape; negative ones count from the end.

        Returns:
            int for an integer, else an int64 array of the positions' shape.

        Raises:
            IndexError: a position outside [-n, n), or positions that are no integers.
        """
        return self._answer(self._indices, positions)

    def block_of(self, positions: int | np.integer | slice | ArrayLike) -> int | IntArray:
        """Gives the number of the block that the sample at each position belongs to, in the form of `__getitem__`."""
        return self._answer(self._blocks, positions)

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.n, _PART):
            yield from self[start : start + _PART].tolist()

    def parameters(self) -> dict[str, int | str | bool | None]:
        """Gives what the order of all epochs follows from, as plain values that fit into a saved state.

        ``interleave``, ``turns`` and ``blocks`` (a digest of the sizes) are None where the order doesn't depend on
        them.
        """
        laned = self._lanes is not None
        return {
            "n": self.n,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "global_batch": self.global_batch,
            "interleave": self.interleave if laned else None,
            "turns": self.turns if laned else None,
            "blocks": self._digest() if laned else None,
        }

    def __repr__(self) -> str:
        blocks = "None" if self._edges is None else f"<{self._edges.size - 1} sizes>"
        return (
            f"EpochOrder({self.n}, shuffle={self.shuffle!r}, seed={self.seed}, epoch={self.epoch}, blocks={blocks}, "
            f"global_batch={self.global_batch}, interleave={self.interleave}, turns={self.turns})"
        )

    def _answer(self, function: Callable[[IntArray], IntArray], positions: int | np.integer | slice | ArrayLike) -> int | IntArray:
        """Applies a function of valid positions, a part at a time, and gives the result in the form of the question."""
        flat, shape = _flatten(positions, self.n)
        out = np.empty(flat.size, np.int64)
        for start in range(0, flat.size, _PART):
            out[start : start + _PART] = function(flat[start : start + _PART])
        return int(out[0]) if shape is None else out.reshape(shape)

    def _indices(self, positions: IntArray) -> IntArray:
        if self._lanes is not None:
            return self._blocks_in_order().index_at(self._lanes.place_of(positions))
        return permute(positions, self.n, self._keys) if self.shuffle else positions

    def _blocks(self, positions: IntArray) -> IntArray:
        if self._lanes is not None:
            return self._blocks_in_order().block_at(self._lanes.place_of(positions))
        indices = self._indices(positions)
        return indices if self._edges is None else np.searchsorted(self._edges, indices, side="right") - 1

    def _blocks_in_order(self) -> BlockSequence:
        """The table of this epoch, made at its first use: most epochs that `with_epoch` names are never asked."""
        if self._sequence is None:
            assert self._edges is not None
            self._sequence = BlockSequence(self._edges, self.seed, self.epoch)
        return self._sequence

    def _derive_keys(self) -> NDArray[np.uint64]:
        return derive_keys("order", self.seed, self.epoch, count=KEY_COUNT)

    def _digest(self) -> str | None:
        if self._edges is None:
            return None
        return hashlib.blake2b(self._edges.astype("<i8").tobytes(), digest_size=16).hexdigest()


def pass_epoch(epoch: int, number: int) -> int:
    """Gives the epoch by whose order pass `number` of an epoch goes, where a loader is gone through several times in one.

    Args:
        epoch: number of the epoch.
        number: 0 for the first pass, whose order is the epoch's own.

    Returns:
        `epoch` itself for the first pass; else a hash of both in [2**61, 2**62), where no epoch that is counted ever comes.
    """
    if number == 0:
        return epoch
    high, low = derive_keys("pass", epoch, number, count=2).tolist()
    hashed: int = 1 << 61 | ((high << 32 | low) & ((1 << 61) - 1))
    return hashed


def _flatten(positions: int | np.integer | slice | ArrayLike, n: int) -> tuple[IntArray, tuple[int, ...] | None]:
    """Gives positions in [0, n) as a flat array, and their shape: None for a single integer."""
    if isinstance(positions, slice):
        flat = np.arange(*positions.indices(n), dtype=np.int64)
        return flat, flat.shape
    array = np.asarray(positions)
    if array.size == 0:
        return np.empty(0, np.int64), array.shape
    if not np.issubdtype(array.dtype, np.integer):
        raise IndexError(f"positions must be integers, a slice or an integer array, got {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < -n or high >= n:
        raise IndexError(f"position {low if low < -n else high} is outside an order of {n} samples")
    flat = array.ravel().astype(np.int64)
    if low < 0:
        flat = np.where(flat < 0, flat + n, flat)
    return flat, None if isinstance(positions, int | np.integer) else array.shape


def _edges_of(blocks: ArrayLike, n: int) -> IntArray:
    sizes = np.asarray(blocks)
    if sizes.ndim != 1 or not (sizes.size == 0 or np.issubdtype(sizes.dtype, np.integer)):
        raise ConfigError(f"blocks must be a list of integer sizes, got shape {sizes.shape} of {sizes.dtype}")
    if sizes.size and sizes.min() < 0:
        raise ConfigError(f"blocks must be sizes of 0 and more, got {sizes.min()}")
    edges = np.concatenate([[0], np.cumsum(sizes.astype(np.int64))])
    if edges[-1] != n:
        raise ConfigError(f"blocks must sum up to n = {n}, but the {sizes.size} sizes sum up to {edges[-1]}")
    return edges


def _check_shuffle(shuffle: object) -> Shuffle:
    if isinstance(shuffle, str) and shuffle == "block":
        return "block"
    if isinstance(shuffle, bool | np.bool_):
        return bool(shuffle)
    raise ConfigError(f'shuffle must be False, True or "block", got {shuffle!r}')


def _integer(name: str, value: object, least: int | None = None) -> int:
    if not isinstance(value, int | np.integer):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if least is not None and not least <= value < 2**62:
        raise ConfigError(f"{name} must be at least {least} (and below 2**62), got {value}")
    return operator.index(value)
