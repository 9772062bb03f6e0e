"""An order in which all classes come equally often.

Of C classes, each C positions in a row hold every class once, in an order of their own. Each time that a class comes, its next sample is
taken; when they are through, they begin again in another order. So balance is exact, and no sample of a class comes twice before
each of them has come once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.dtypes import IntArray
from headrace.errors import ConfigError
from headrace.order.base import DEFAULT_GLOBAL_BATCH, Order, digest_of
from headrace.order.permutation import KEY_COUNT, derive_keys, mix, permute_within


class BalancedOrder(Order):
    """All classes equally often. A pure function of its arguments; memory: 8 bytes a sample.

    >>> order = BalancedOrder(["cat", "cat", "cat", "dog"], seed=7)
    >>> order[:].tolist()
    [0, 3, 2, 3]

    Args:
        classes: [samples] the class of each sample, as integers or strings.
        n: positions of an epoch. None: as many as there are samples; without replacement, the samples of the smallest class times the
            number of classes.
        replacement: True if a sample may come again when its class is through.
        seed, epoch, global_batch: see `Order`.

    Attributes:
        replacement: the argument.

    Raises:
        ConfigError: classes that are no integers or strings, or more positions without replacement than there can be.
    """

    shuffle: bool | str = "balanced"

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
        self.replacement: bool = bool(replacement)
        self.repeats: bool = self.replacement
        most = int(counts.min()) * counts.size if counts.size else 0
        super().__init__((numbers.size if replacement else most) if n is None else n, seed, epoch, global_batch)
        if self.n and not numbers.size:
            raise ConfigError(f"num_samples={self.n} can't be drawn: there are no samples")
        if not replacement and self.n > most:
            raise ConfigError(
                f"num_samples={self.n} can't be drawn without replacement: the smallest of {counts.size} classes has {counts.min()} "
                f"samples, enough for {most}; use a smaller num_samples, or replacement=True"
            )
        self._by_class = np.argsort(numbers, kind="stable")
        self._counts, self._starts = counts, np.cumsum(counts) - counts
        self._digest = digest_of(numbers)
        self._begin()

    def _begin(self) -> None:
        self._keys = derive_keys("balanced", self.seed, self.epoch, count=3 + 2 * KEY_COUNT).astype(np.uint32)

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
        indices: IntArray = self._by_class[self._starts[classes] + permute_within(turns, counts, keys)]
        return indices

    def parameters(self) -> dict[str, Any]:
        return self._parameters(self._by_class.size, num_samples=self.n, classes=self._digest, replacement=self.replacement)

    def __repr__(self) -> str:
        return (
            f"BalancedOrder(<{self._by_class.size} samples in {self._counts.size} classes>, n={self.n}, replacement={self.replacement}, "
            f"seed={self.seed}, epoch={self.epoch}, global_batch={self.global_batch})"
        )


def _check_classes(classes: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The class of each sample as a number, and the number of samples of each class."""
    try:
        array = np.asarray(classes)
    except ValueError as error:
        raise ConfigError(f"balanced=True needs one class a sample: {error}") from None
    if array.ndim != 1:
        raise ConfigError(f"balanced=True needs one class a sample, got targets of shape {list(array.shape)}")
    if array.size and array.dtype.kind not in "biuUSO":
        raise ConfigError(f"balanced=True needs integers or strings as classes, got targets of {array.dtype}: pass weights= instead")
    try:
        _, numbers, counts = np.unique(array, return_inverse=True, return_counts=True)
    except TypeError:  # what can't be compared
        kinds = ", ".join(sorted({type(value).__name__ for value in array.tolist()}))
        raise ConfigError(f"balanced=True needs integers or strings as classes, got {kinds}: pass weights= instead") from None
    return numbers.astype(np.int64), counts.astype(np.int64)
