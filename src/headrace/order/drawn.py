"""Orders that follow from an entry of each sample: its weight, its class, or its length."""

from __future__ import annotations

from typing import Any

import cachetools
import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.dtypes import IntArray
from headrace.errors import ConfigError
from headrace.order.base import DEFAULT_GLOBAL_BATCH, Order, digest_of
from headrace.order.permutation import KEY_COUNT, derive_keys, mix, permute, permute_within
from headrace.sorting import distinct

FloatArray = NDArray[np.float64]

POOL = 64
"""Global batches of a pool of `BucketedOrder`."""
_CACHED = 4  # pools whose order is cached
_PART = 65_536
_LN2 = 0.6931471805599453


class _EntriesOrder(Order):
    """An order of entries, one a sample, which a state knows by their digest."""

    _entries_are: str

    def __init__(
        self, entries: NDArray[Any], n: int, seed: int, epoch: int, global_batch: int
    ) -> None:
        super().__init__(n, seed, epoch, global_batch)
        self._samples, self._digest = entries.size, digest_of(entries)

    def parameters(self) -> dict[str, Any]:
        return self._parameters(self._samples, **{self._entries_are: self._digest})

    def __repr__(self) -> str:
        shown = f"<{self._samples} {self._entries_are}>{self._options()}"
        return (
            f"{type(self).__name__}({shown}, seed={self.seed}, epoch={self.epoch}, "
            f"global_batch={self.global_batch})"
        )

    def _options(self) -> str:
        return ""


class _DrawingOrder(_EntriesOrder):
    """An order of `n` positions that draws with replacement, or without.

    Args:
        entries: one a sample.
        n: positions; None: all samples with replacement, else `most`.
        most: positions that there can be without replacement.
        nothing, too_few: what is wrong if there is nothing to draw, or too little without
            replacement.
    """

    def __init__(
        self,
        entries: NDArray[Any],
        n: int | None,
        most: int,
        replacement: bool,
        nothing: str,
        too_few: str,
        **common: int,
    ) -> None:
        self.replacement: bool = bool(replacement)
        self.repeats: bool = self.replacement
        super().__init__(
            entries, (entries.size if replacement else most) if n is None else n, **common
        )
        if self.n and not most:
            raise ConfigError(nothing)
        if not replacement and self.n > most:
            raise ConfigError(
                f"num_samples={self.n} can't be drawn without replacement: {too_few}; use a "
                "smaller num_samples, or replacement=True"
            )

    def parameters(self) -> dict[str, Any]:
        return {**super().parameters(), "num_samples": self.n, "replacement": self.replacement}

    def _options(self) -> str:
        return f", n={self.n}, replacement={self.replacement}"


class WeightedOrder(_DrawingOrder):
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

    Attributes:
        replacement: the argument.

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
        self._weights = _check_weights(weights)
        positive = int(np.count_nonzero(self._weights))
        nothing = "weights: none of them is above 0, so there is nothing to draw"
        too_few = f"{positive} of {self._weights.size} samples have a weight above 0"
        common = {"seed": seed, "epoch": epoch, "global_batch": global_batch}
        super().__init__(self._weights, n, positive, replacement, nothing, too_few, **common)
        if replacement:
            with np.errstate(over="ignore"):  # checked below
                self._sums = np.cumsum(self._weights)
            self._last = int(np.flatnonzero(self._weights)[-1]) if positive else 0
            if not np.isfinite(self._sums[-1:]).all():
                raise ConfigError(
                    "weights: their sum is beyond the range of a float64; scale them down"
                )
        self._begin()

    def _begin(self) -> None:
        self._keys = derive_keys("weights", self.seed, self.epoch, count=6).astype(np.uint32)
        self._order: IntArray | None = None

    def _indices(self, positions: IntArray) -> IntArray:
        if self.replacement:
            drawn = _uniform(positions, self._keys) * self._sums[-1]
            indices: IntArray = np.searchsorted(self._sums, drawn, side="right")
            return np.minimum(indices, self._last)  # the product may round up to the sum
        if self._order is None:
            self._order = self._ordered()
        return self._order[positions]

    def _ordered(self) -> IntArray:
        """The samples of an epoch without replacement, in the order of their random times."""
        candidates = np.flatnonzero(self._weights)
        times = np.empty(candidates.size)
        for start in range(0, candidates.size, _PART):
            part = candidates[start : start + _PART]
            times[start : start + _PART] = (
                -_log(1.0 - _uniform(part, self._keys)) / self._weights[part]
            )
        if self.n < times.size:
            soon = (
                np.flatnonzero(times <= np.partition(times, self.n - 1)[self.n - 1])
                if self.n
                else np.empty(0, np.int64)
            )
            candidates, times = candidates[soon], times[soon]
        return candidates[np.argsort(times, kind="stable")[: self.n]]


class BalancedOrder(_DrawingOrder):
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

    Attributes:
        replacement: the argument.

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
        numbers, counts = _check_classes(classes)
        smallest = int(counts.min(initial=numbers.size))
        most = smallest * counts.size
        nothing = f"num_samples={n} can't be drawn: there are no samples"
        too_few = f"the smallest of {counts.size} classes has {smallest} samples, enough for {most}"
        super().__init__(
            numbers,
            n,
            most,
            replacement,
            nothing,
            too_few,
            seed=seed,
            epoch=epoch,
            global_batch=global_batch,
        )
        self._by_class = np.argsort(numbers, kind="stable")
        self._counts, self._starts = counts, np.cumsum(counts) - counts
        self._begin()

    def _begin(self) -> None:
        self._keys = derive_keys("balanced", self.seed, self.epoch, count=3 + 2 * KEY_COUNT).astype(
            np.uint32
        )

    def _indices(self, positions: IntArray) -> IntArray:
        if not positions.size:
            return positions
        rounds, places = np.divmod(positions, self._counts.size)
        round_key, class_key, pass_key = self._keys[:3]
        own = mix(rounds.astype(np.uint32), round_key)
        keys = mix(own, self._keys[3 : 3 + KEY_COUNT, np.newaxis]).astype(np.uint64)
        classes = permute_within(places, np.full(places.size, self._counts.size), keys)
        counts = self._counts[classes]
        passes, turns = np.divmod(rounds, counts)
        own = mix(mix(classes.astype(np.uint32), class_key) ^ passes.astype(np.uint32), pass_key)
        keys = mix(own, self._keys[3 + KEY_COUNT :, np.newaxis]).astype(np.uint64)
        indices: IntArray = self._by_class[
            self._starts[classes] + permute_within(turns, counts, keys)
        ]
        return indices


class BucketedOrder(_EntriesOrder):
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
        self.lengths: IntArray = _check_lengths(lengths)
        super().__init__(self.lengths, self.lengths.size, seed, epoch, global_batch)
        self._begin()

    def _begin(self) -> None:
        self._keys = derive_keys("bucketed", self.seed, self.epoch, count=KEY_COUNT)
        self._pools: cachetools.LRUCache[int, IntArray] = cachetools.LRUCache(_CACHED)

    def _indices(self, positions: IntArray) -> IntArray:
        pools, places = np.divmod(positions, self.global_batch * POOL)
        out = np.empty_like(positions)
        for number in distinct(pools).tolist():
            chosen = pools == number
            out[chosen] = self._pool(number)[places[chosen]]
        return out

    def _pool(self, number: int) -> IntArray:
        """The samples of a pool, in their order."""
        if number in self._pools:
            return self._pools[number]
        size = self.global_batch * POOL
        positions = np.arange(number * size, min((number + 1) * size, self.n))
        members = permute(positions, self.n, self._keys)
        members = members[np.argsort(-self.lengths[members], kind="stable")]
        # the incomplete batch, of the shortest, stays at the end
        full = members.size // self.global_batch
        batches = members[: full * self.global_batch].reshape(full, self.global_batch)
        keys = derive_keys("pool", self.seed, self.epoch, number, count=KEY_COUNT)
        made = np.concatenate(
            [
                batches[permute(np.arange(full), full, keys)].ravel(),
                members[full * self.global_batch :],
            ]
        )
        self._pools[number] = made
        return made


def _check_weights(weights: ArrayLike) -> FloatArray:
    try:
        array = np.array(np.asarray(weights), dtype=np.float64)  # a copy: the user's may change
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"weights must be one number a sample, not {weights!r:.80}: {error}"
        ) from None
    if array.ndim != 1:
        raise ConfigError(
            f"weights must be one number a sample, got an array of shape {list(array.shape)}"
        )
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if wrong.size:
        raise ConfigError(
            f"weights must be finite and at least 0; sample {wrong[0]} has {array[wrong[0]]} "
            f"({wrong.size} are wrong)"
        )
    return array


def _check_classes(classes: ArrayLike) -> tuple[IntArray, IntArray]:
    """The class of each sample as a number, and the number of samples of each class."""
    array = _as_array(classes, "balanced=True needs one class a sample")
    if array.ndim != 1:
        raise ConfigError(
            f"balanced=True needs one class a sample, got targets of shape {list(array.shape)}"
        )
    if array.size and array.dtype.kind not in "biuUSO":
        raise ConfigError(
            f"balanced=True needs integers or strings as classes, got targets of {array.dtype}: "
            "pass weights= instead"
        )
    try:
        _, numbers, counts = np.unique(array, return_inverse=True, return_counts=True)
    except TypeError:  # what can't be compared
        kinds = ", ".join(sorted({type(value).__name__ for value in array.tolist()}))
        raise ConfigError(
            f"balanced=True needs integers or strings as classes, got {kinds}: pass weights= "
            "instead"
        ) from None
    return numbers.astype(np.int64), counts.astype(np.int64)


def _check_lengths(lengths: ArrayLike) -> IntArray:
    array = _as_array(lengths, "bucket_by_length needs one length a sample")
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(
            f"bucket_by_length needs one integer a sample, got {array.dtype} of shape "
            f"{list(array.shape)}"
        )
    if array.size and array.min() < 0:
        raise ConfigError(
            f"bucket_by_length: the length of sample {int(array.argmin())} is {array.min()}, "
            "below 0"
        )
    return array.astype(np.int64)


def _as_array(values: ArrayLike, needed: str) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise ConfigError(f"{needed}: {error}") from None


def _uniform(numbers: IntArray, keys: NDArray[np.uint32]) -> FloatArray:
    """A hash of each number as a float64 in [0, 1): 53 bits out of two streams of 32."""
    low, high = (numbers & 0xFFFFFFFF).astype(np.uint32), (numbers >> 32).astype(np.uint32)
    first, second = (mix(mix(mix(low, k[0]) ^ high, k[1]), k[2]) for k in (keys[:3], keys[3:]))
    return (
        (first >> np.uint32(5)).astype(np.float64) * 67108864.0
        + (second >> np.uint32(6)).astype(np.float64)
    ) / 9007199254740992.0


def _log(x: FloatArray) -> FloatArray:
    """The natural logarithm, out of operations that IEEE 754 rounds the same on every machine.

    The system's own differs in its last bit from one processor to the next, and two ranks that
    sorted by it could disagree.
    """
    mantissa, exponent = np.frexp(x)
    low = mantissa < 0.7071067811865476
    mantissa, exponent = np.where(low, mantissa * 2.0, mantissa), exponent - low
    # log m = 2 artanh ratio, and ratio is at most 0.172
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = np.zeros_like(ratio)
    for power in range(23, 0, -2):
        series = series * square + 1.0 / power
    return 2.0 * ratio * series + exponent * _LN2
