"""An order in which samples are drawn by weight.

With replacement each position draws for itself: a hash of (seed, epoch, position) picks a place in the running sum of the weights. Without,
the samples stand in the order of exponential random times with the weights as rates, which is the order in which drawing one after
the other, by weight, would take them (P. Efraimidis and P. Spirakis, "Weighted random sampling with a reservoir", Information Processing
Letters 97, 2006).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.dtypes import IntArray
from headrace.errors import ConfigError
from headrace.order.base import DEFAULT_GLOBAL_BATCH, Order, digest_of
from headrace.order.permutation import derive_keys, mix

FloatArray = NDArray[np.float64]

_PART = 65_536
_KEYS = 6
_LN2 = 0.6931471805599453


class WeightedOrder(Order):
    """Samples drawn by weight. A pure function of its arguments, on every machine; memory: 8 bytes a weight, and without replacement
    8 more a position, which are sorted anew each epoch.

    >>> order = WeightedOrder([1, 0, 3], n=8, seed=7)
    >>> order[:].tolist()
    [2, 0, 0, 2, 2, 2, 2, 2]

    Args:
        weights: [samples] numbers of at least 0, in any scale; a sample of weight 0 is never drawn.
        n: positions of an epoch. None: as many as there are samples; without replacement, as have a weight above 0.
        replacement: True if a sample may be drawn again.
        seed, epoch, global_batch: see `Order`.

    Attributes:
        replacement: the argument.

    Raises:
        ConfigError: a weight that is negative or no finite number, no weight above 0, or more positions without replacement than samples
            with a weight above 0.
    """

    shuffle: bool | str = "weights"

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
        self.replacement: bool = bool(replacement)
        self.repeats: bool = self.replacement
        positive = int(np.count_nonzero(self._weights))
        if n is None:
            n = self._weights.size if replacement else positive
        super().__init__(n, seed, epoch, global_batch)
        if self.n and not positive:
            raise ConfigError("weights: none of them is above 0, so there is nothing to draw")
        if not replacement and self.n > positive:
            raise ConfigError(
                f"num_samples={self.n} can't be drawn without replacement: {positive} of {self._weights.size} samples have a weight "
                "above 0; use a smaller num_samples, or replacement=True"
            )
        if replacement:
            with np.errstate(over="ignore"):  # checked below
                self._sums = np.cumsum(self._weights)
            self._last = int(np.flatnonzero(self._weights)[-1]) if positive else 0
            if not np.isfinite(self._sums[-1:]).all():
                raise ConfigError("weights: their sum is beyond the range of a float64; scale them down")
        self._digest = digest_of(self._weights)
        self._begin()

    def _begin(self) -> None:
        self._keys = derive_keys("weights", self.seed, self.epoch, count=_KEYS).astype(np.uint32)
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
            times[start : start + _PART] = -_log(1.0 - _uniform(part, self._keys)) / self._weights[part]
        if self.n < times.size:
            soon = np.flatnonzero(times <= np.partition(times, self.n - 1)[self.n - 1]) if self.n else np.empty(0, np.int64)
            candidates, times = candidates[soon], times[soon]
        return candidates[np.argsort(times, kind="stable")[: self.n]]

    def parameters(self) -> dict[str, Any]:
        return self._parameters(self._weights.size, num_samples=self.n, weights=self._digest, replacement=self.replacement)

    def __repr__(self) -> str:
        return (
            f"WeightedOrder(<{self._weights.size} weights>, n={self.n}, replacement={self.replacement}, seed={self.seed}, "
            f"epoch={self.epoch}, global_batch={self.global_batch})"
        )


def _check_weights(weights: ArrayLike) -> FloatArray:
    try:
        array = np.array(np.asarray(weights), dtype=np.float64)  # a copy: the user's may change
    except (TypeError, ValueError) as error:
        raise ConfigError(f"weights must be one number a sample, not {weights!r:.80}: {error}") from None
    if array.ndim != 1:
        raise ConfigError(f"weights must be one number a sample, got an array of shape {list(array.shape)}")
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if wrong.size:
        raise ConfigError(f"weights must be finite and at least 0; sample {wrong[0]} has {array[wrong[0]]} ({wrong.size} are wrong)")
    return array


def _uniform(numbers: IntArray, keys: NDArray[np.uint32]) -> FloatArray:
    """A hash of each number as a float64 in [0, 1): 53 bits out of two streams of 32."""
    low, high = (numbers & 0xFFFFFFFF).astype(np.uint32), (numbers >> 32).astype(np.uint32)
    first, second = (mix(mix(mix(low, k[0]) ^ high, k[1]), k[2]) for k in (keys[:3], keys[3:]))
    return ((first >> np.uint32(5)).astype(np.float64) * 67108864.0 + (second >> np.uint32(6)).astype(np.float64)) / 9007199254740992.0


def _log(x: FloatArray) -> FloatArray:
    """The natural logarithm, out of operations that IEEE 754 rounds the same on every machine.

    The system's own differs in its last bit from one processor to the next, and two ranks that sorted by it could disagree.
    """
    mantissa, exponent = np.frexp(x)
    low = mantissa < 0.7071067811865476
    mantissa, exponent = np.where(low, mantissa * 2.0, mantissa), exponent - low
    ratio = (mantissa - 1.0) / (mantissa + 1.0)  # log m = 2 artanh ratio, and ratio is at most 0.172
    square = ratio * ratio
    series = np.zeros_like(ratio)
    for power in range(23, 0, -2):
        series = series * square + 1.0 / power
    return 2.0 * ratio * series + exponent * _LN2
