"""A shuffle whose batches hold samples of similar length.

The samples are shuffled, and cut into pools of some global batches. In each pool they are sorted by length and cut into batches, which
are shuffled. So little is padded, and batches still differ from epoch to epoch, in what they hold and in their order.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.dtypes import IntArray
from headrace.errors import ConfigError
from headrace.order.base import DEFAULT_GLOBAL_BATCH, Order, digest_of
from headrace.order.permutation import KEY_COUNT, derive_keys, permute

POOL = 64
"""Global batches of a pool."""
_CACHED = 4  # pools whose order is cached


class BucketedOrder(Order):
    """A shuffle whose batches hold samples of similar length. A pure function of its arguments; memory: 8 bytes a sample.

    >>> lengths = [9, 1, 5, 2, 8, 1, 9, 3]
    >>> [lengths[i] for i in BucketedOrder(lengths, seed=7, global_batch=2)]
    [8, 5, 1, 1, 9, 9, 3, 2]

    Args:
        lengths: [samples] integers of at least 0.
        seed, epoch, global_batch: see `Order`.

    Raises:
        ConfigError: lengths that are no such integers.
    """

    shuffle: bool | str = True

    def __init__(self, lengths: ArrayLike, *, seed: int = 42, epoch: int = 0, global_batch: int = DEFAULT_GLOBAL_BATCH) -> None:
        self.lengths: IntArray = _check_lengths(lengths)
        super().__init__(self.lengths.size, seed, epoch, global_batch)
        self._digest = digest_of(self.lengths)
        self._begin()

    def _begin(self) -> None:
        self._keys = derive_keys("bucketed", self.seed, self.epoch, count=KEY_COUNT)
        self._pools: OrderedDict[int, IntArray] = OrderedDict()

    def _indices(self, positions: IntArray) -> IntArray:
        pools, places = np.divmod(positions, self.global_batch * POOL)
        out = np.empty_like(positions)
        for number in np.unique(pools).tolist():
            chosen = pools == number
            out[chosen] = self._pool(number)[places[chosen]]
        return out

    def _pool(self, number: int) -> IntArray:
        """The samples of a pool, in their order."""
        if number in self._pools:
            self._pools.move_to_end(number)
            return self._pools[number]
        size = self.global_batch * POOL
        members = permute(np.arange(number * size, min((number + 1) * size, self.n)), self.n, self._keys)
        members = members[np.argsort(-self.lengths[members], kind="stable")]
        full = members.size // self.global_batch  # the incomplete batch, of the shortest, stays at the end
        batches = members[: full * self.global_batch].reshape(full, self.global_batch)
        keys = derive_keys("pool", self.seed, self.epoch, number, count=KEY_COUNT)
        made = np.concatenate([batches[permute(np.arange(full), full, keys)].ravel(), members[full * self.global_batch :]])
        self._pools[number] = made
        if len(self._pools) > _CACHED:
            self._pools.popitem(last=False)
        return made

    def shuffled(self, positions: IntArray) -> IntArray:
        """The indices at these positions if nothing were sorted: for comparison."""
        return permute(positions, self.n, self._keys)

    def parameters(self) -> dict[str, Any]:
        return self._parameters(self.n, lengths=self._digest)

    def __repr__(self) -> str:
        return f"BucketedOrder(<{self.n} lengths>, seed={self.seed}, epoch={self.epoch}, global_batch={self.global_batch})"


def padding_fraction(lengths: NDArray[np.int64]) -> float:
    """How much of some batches is padding, if each is padded to its longest sample.

    Args:
        lengths: [batches, samples] int64.
    """
    padded = int(lengths.max(axis=1).sum()) * lengths.shape[1] if lengths.size else 0
    return 1 - int(lengths.sum()) / padded if padded else 0.0


def _check_lengths(lengths: ArrayLike) -> IntArray:
    try:
        array = np.asarray(lengths)
    except ValueError as error:
        raise ConfigError(f"bucket_by_length needs one length a sample: {error}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(f"bucket_by_length needs one integer a sample, got {array.dtype} of shape {list(array.shape)}")
    if array.size and array.min() < 0:
        raise ConfigError(f"bucket_by_length: the length of sample {int(array.argmin())} is {array.min()}, below 0")
    return array.astype(np.int64)
