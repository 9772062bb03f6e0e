"""Orders that follow from an entry of each sample: its weight, its class, or its length."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.dtypes import IntArray, distinct
from headrace.errors import ConfigError
from headrace.order.epoch import DEFAULT_GLOBAL_BATCH, Order, digest_of
from headrace.order.permutation import (
    KEY_COUNT,
    Keys,
    derive_keys,
    mix,
    permute,
    permute_within,
)

FloatArray = NDArray[np.float64]

POOL = 64
"""Global batches of a pool of `BucketedOrder`."""
_PART = 65_536
_LN2 = 0.6931471805599453


class _DrawnOrder(Order):
    """An order that depends on one entry per sample. A state has the digest of the entries.

    Args:
        entries: one per sample.
        n: number of positions. None: number of samples with replacement, else `most`.
        most: largest number of positions without replacement.
        replacement: True if a sample may be drawn more than once.
    """

    _entries_are: str

    def __init__(
        self,
        entries: NDArray[Any],
        n: int | None,
        most: int,
        replacement: bool,
        seed: int,
        epoch: int,
        global_batch: int,
    ) -> None:
        if n is None:
            n = most
            if replacement:
                n = entries.size
        super().__init__(n, seed, epoch, global_batch)
        if self.n and not most:
            raise ConfigError(
                f"num_samples={self.n} can't be drawn by {self._entries_are}: there are no "
                "samples, or none has a weight above 0"
            )
        if self.n > most and not replacement:
            raise ConfigError(
                f"num_samples={self.n} can't be drawn by {self._entries_are} without replacement, "
                f"which gives at most {most} of the {entries.size} samples: use a smaller "
                "num_samples, or replacement=True"
            )
        self.repeats = bool(replacement)
        self._samples = entries.size
        self._digest = digest_of(entries)
        self._begin()

    def parameters(self) -> dict[str, Any]:
        return {
            **super().parameters(),
            "n": self._samples,
            self._entries_are: self._digest,
            "num_samples": self.n,
            "replacement": self.repeats,
        }


class WeightedOrder(_DrawnOrder):
    """Samples drawn by weight.

    A pure function of its arguments, on every machine. Memory: 8 bytes per weight; without
    replacement another 8 per position, which are sorted anew each epoch.

    With replacement, a hash of (seed, epoch, position) picks a place in the cumulative sum of the
    weights, independently for each position. Without replacement, samples are ordered by
    exponential random times with the weights as rates, which is the order of drawing one after the
    other by weight (P. Efraimidis and P. Spirakis, "Weighted random sampling with a reservoir",
    Information Processing Letters 97, 2006).

    >>> order = WeightedOrder([1, 0, 3], n=8, seed=7)
    >>> order[:].tolist()
    [2, 0, 0, 2, 2, 2, 2, 2]

    Args:
        weights: [samples] non-negative numbers, in any scale; a sample with weight 0 is never
            drawn.
        n: number of positions in an epoch. None: number of samples; without replacement, number of
            samples with a weight above 0.
        replacement: True if a sample may be drawn more than once.
        seed, epoch, global_batch: see `Order`.

    Raises:
        ConfigError: a weight is negative or not finite, no weight is above 0, or, without
            replacement, there are more positions than samples with a weight above 0.
    """

    shuffle: bool | str = "weights"
    _entries_are = "weights"

    def __init__(
        self,
        weights: ArrayLike,
        *,
        n: int | None = None,
        replacement: bool = True,
        seed: int = 42,
        epoch: int = 0,
        global_batch: int = DEFAULT_GLOBAL_BATCH,
    ) -> None:
        array = _entries(weights, "biuf", "weights must be one number per sample")
        self._weights = array.astype(np.float64)  # a copy: the user's may change
        wrong = np.flatnonzero(~(np.isfinite(self._weights) & (self._weights >= 0)))
        if wrong.size:
            raise ConfigError(
                f"weights must be finite and at least 0; sample {wrong[0]} has "
                f"{array[wrong[0]]} ({wrong.size} are wrong)"
            )
        positive = np.flatnonzero(self._weights)
        super().__init__(self._weights, n, positive.size, replacement, seed, epoch, global_batch)
        self._last = positive[-1:]
        if not replacement:
            return
        with np.errstate(over="ignore"):  # checked below
            self._sums = np.cumsum(self._weights)
        if not np.isfinite(self._sums[-1:]).all():
            raise ConfigError(
                "weights: their sum is beyond the range of a float64; scale them down"
            )

    def _begin(self) -> None:
        self._keys = derive_keys("weights", self.seed, self.epoch, count=6)
        self._order: IntArray | None = None

    def _indices(self, positions: IntArray) -> IntArray:
        if not self.repeats:
            if self._order is None:
                self._order = self._sorted()
            return self._order[positions]
        drawn = _uniform(positions, self._keys) * self._sums[-1]
        indices: IntArray = np.searchsorted(self._sums, drawn, side="right")
        return np.minimum(indices, self._last)  # the product may round up to the sum

    def _sorted(self) -> IntArray:
        """The samples of an epoch without replacement, in the order of their random times."""
        candidates = np.flatnonzero(self._weights)
        times = np.empty(candidates.size)
        for start in range(0, candidates.size, _PART):
            part = candidates[start : start + _PART]
            exponential = -_log(1.0 - _uniform(part, self._keys))
            times[start : start + _PART] = exponential / self._weights[part]
        if 0 < self.n < times.size:
            soon = np.flatnonzero(times <= np.partition(times, self.n - 1)[self.n - 1])
            candidates = candidates[soon]
            times = times[soon]
        return candidates[np.argsort(times, kind="stable")[: self.n]]


class BalancedOrder(_DrawnOrder):
    """All classes equally often.

    A pure function of its arguments. Memory: 8 bytes per sample.

    With C classes, each C consecutive positions contain every class once, in random order. Each
    time that a class comes, its next sample is taken; after its last sample, the class starts again
    in another order. So the balance is exact, and no sample of a class comes twice before all of
    them have come once.

    >>> order = BalancedOrder(["cat", "cat", "cat", "dog"], seed=7)
    >>> order[:].tolist()
    [0, 3, 2, 3]

    Args:
        classes: [samples] class of each sample, as integers or strings.
        n: number of positions in an epoch. None: number of samples; without replacement, size of
            the smallest class times the number of classes.
        replacement: True if a class whose samples are used up starts again.
        seed, epoch, global_batch: see `Order`.

    Raises:
        ConfigError: classes are neither integers nor strings, or, without replacement, there are
            more positions than possible.
    """

    shuffle: bool | str = "balanced"
    _entries_are = "classes"

    def __init__(
        self,
        classes: ArrayLike,
        *,
        n: int | None = None,
        replacement: bool = True,
        seed: int = 42,
        epoch: int = 0,
        global_batch: int = DEFAULT_GLOBAL_BATCH,
    ) -> None:
        needed = "balanced=True needs one class per sample, as integers or strings"
        array = _entries(classes, "biuUSO", needed)
        try:
            _, numbers, counts = np.unique(array, return_inverse=True, return_counts=True)
        except TypeError as error:  # what can't be compared
            raise ConfigError(f"{needed}: {error}; pass weights= instead") from None
        most = int(counts.min(initial=numbers.size)) * counts.size
        numbers = numbers.astype(np.int64)
        super().__init__(numbers, n, most, replacement, seed, epoch, global_batch)
        self._by_class = np.argsort(numbers, kind="stable")
        self._counts = counts.astype(np.int64)
        self._starts = np.cumsum(counts) - counts

    def _begin(self) -> None:
        self._keys = derive_keys("balanced", self.seed, self.epoch, count=3 + 2 * KEY_COUNT)

    def _indices(self, positions: IntArray) -> IntArray:
        number_of_classes = np.full(positions.size, self._counts.size)
        rounds, places = np.divmod(positions, self._counts.size)
        round_key, class_key, pass_key = self._keys[:3]
        own = mix(rounds.astype(np.uint32), round_key)
        keys = mix(own, self._keys[3 : 3 + KEY_COUNT, np.newaxis])
        classes = permute_within(places, number_of_classes, keys)
        counts = self._counts[classes]
        passes, turns = np.divmod(rounds, counts)
        own = mix(mix(classes.astype(np.uint32), class_key) ^ passes.astype(np.uint32), pass_key)
        keys = mix(own, self._keys[3 + KEY_COUNT :, np.newaxis])
        members = self._starts[classes] + permute_within(turns, counts, keys)
        indices: IntArray = self._by_class[members]
        return indices


class BucketedOrder(_DrawnOrder):
    """A shuffle whose batches contain samples of similar length.

    A pure function of its arguments. Memory: 8 bytes per sample.

    The samples are shuffled and cut into pools of `POOL` global batches. Each pool is sorted by
    length and cut into batches, which are shuffled. So there is little padding, and batches still
    differ between epochs, in their samples and in their order.

    >>> lengths = [9, 1, 5, 2, 8, 1, 9, 3]
    >>> [lengths[i] for i in BucketedOrder(lengths, seed=7, global_batch=2)]
    [8, 5, 1, 1, 9, 9, 3, 2]

    Args:
        lengths: [samples] non-negative integers.
        seed, epoch, global_batch: see `Order`.

    Raises:
        ConfigError: lengths are not such integers.
    """

    shuffle: bool | str = True
    _entries_are = "lengths"

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        seed: int = 42,
        epoch: int = 0,
        global_batch: int = DEFAULT_GLOBAL_BATCH,
    ) -> None:
        array = _entries(lengths, "iu", "bucket_by_length needs one integer per sample")
        if array.size and array.min() < 0:
            raise ConfigError(
                f"bucket_by_length: the length of sample {int(array.argmin())} is {array.min()}, "
                "below 0"
            )
        self.lengths: IntArray = array.astype(np.int64)
        super().__init__(self.lengths, None, array.size, False, seed, epoch, global_batch)

    def _begin(self) -> None:
        self._keys = derive_keys("bucketed", self.seed, self.epoch, count=KEY_COUNT)
        self._last_pool = -1  # which was asked last
        self._members = np.empty(0, np.int64)

    def _indices(self, positions: IntArray) -> IntArray:
        pools, places = np.divmod(positions, self.global_batch * POOL)
        out = np.empty_like(positions)
        for number in distinct(pools).tolist():
            if number != self._last_pool:
                self._members = self._pool(number)
                self._last_pool = number
            chosen = pools == number
            out[chosen] = self._members[places[chosen]]
        return out

    def _pool(self, number: int) -> IntArray:
        """The samples of a pool, in their order."""
        size = self.global_batch * POOL
        positions = np.arange(number * size, min((number + 1) * size, self.n))
        members = permute(positions, self.n, self._keys)
        members = members[np.argsort(-self.lengths[members], kind="stable")]
        # the incomplete batch, of the shortest, stays at the end
        full = members.size // self.global_batch
        batches, rest = np.split(members, [full * self.global_batch])
        keys = derive_keys("pool", self.seed, self.epoch, number, count=KEY_COUNT)
        shuffled = batches.reshape(full, self.global_batch)[permute(np.arange(full), full, keys)]
        return np.append(shuffled, rest)


def _entries(values: ArrayLike, kinds: str, needed: str) -> NDArray[Any]:
    """One entry per sample, as an array of one of these kinds of dtype."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:  # rows of different lengths, for instance
        raise ConfigError(f"{needed}: {error}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        raise ConfigError(f"{needed}, got {array.dtype} of shape {list(array.shape)}")
    return array


def _uniform(numbers: IntArray, keys: Keys) -> FloatArray:
    """A hash of each number as a float64 in [0, 1): 53 bits from two hashes of 32."""
    low = (numbers & 0xFFFFFFFF).astype(np.uint32)
    high = (numbers >> 32).astype(np.uint32)
    first = mix(mix(mix(low, keys[0]) ^ high, keys[1]), keys[2]) >> np.uint32(5)
    second = mix(mix(mix(low, keys[3]) ^ high, keys[4]), keys[5]) >> np.uint32(6)
    return (first.astype(np.float64) * 2.0**26 + second.astype(np.float64)) / 2.0**53


def _log(x: FloatArray) -> FloatArray:
    """The natural logarithm, by operations that IEEE 754 rounds equally on every machine.

    The last bit of the system's own depends on the processor, so that two ranks could sort
    differently.
    """
    mantissa, exponent = np.frexp(x)
    is_low = mantissa < 0.7071067811865476
    mantissa = np.where(is_low, mantissa * 2.0, mantissa)
    # log m = 2 artanh ratio, and ratio is at most 0.172
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = np.zeros_like(ratio)
    for power in range(23, 0, -2):
        series = series * square + 1.0 / power
    return 2.0 * ratio * series + (exponent - is_low) * _LN2
