"""Schedules which of several loaders yields the next batch.

A schedule is a pure function of the strategy and of what was received so far: a few integers, no
random numbers. So every rank draws from the same loaders in the same order, and a run can be
resumed at any batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from headrace.arguments import check_integer, checks_keywords
from headrace.errors import ConfigError

STRATEGIES = ("round_robin", "sequential", "weighted", "alternating")


class Schedule:
    """The sequence of loader numbers, one per batch, and the position in an epoch.

    "weighted" follows the quota method of M. L. Balinski and H. P. Young ("The Quota Method of
    Apportionment", Amer. Math. Monthly 82, 1975): of the loaders whose quota ``weight /
    sum(weights) * (step + 1)`` exceeds the number of their batches so far, the one with the largest
    ``weight / (batches + 1)`` is next. After every step each loader has yielded its quota, rounded
    up or down. The share of a loader that has dropped out is divided among the others.

    Args:
        strategy: one of `STRATEGIES`.
        weights: one integer per loader, 0 or more; only "weighted" uses them.
        pattern: numbers of loaders; "round_robin" and "alternating" take them in turn, "sequential"
            one after the other.
        cycles: True if a loader starts again at its end; otherwise it drops out.

    Attributes:
        epoch: number of the epoch.
        counts: number of batches that each loader has yielded.
        passes: number of the pass of each loader.
        cursor: position in the pattern.
        out: loaders that have dropped out.
        has_ended: True if all loaders ended before the number of batches was reached.
    """

    def __init__(
        self,
        strategy: str,
        weights: Sequence[int],
        pattern: Sequence[int],
        cycles: bool,
        epoch: int = 0,
    ) -> None:
        self._strategy = strategy
        self._weights = list(weights)
        self._pattern = list(pattern)
        self._cycles = cycles
        self.epoch: int = epoch
        self.counts: list[int] = [0] * len(weights)
        self.passes: list[int] = [0] * len(weights)
        self.cursor: int = 0
        self.out: set[int] = set()
        self.has_ended: bool = False

    @property
    def step(self) -> int:
        """Batches that all loaders together have given."""
        return sum(self.counts)

    @property
    def drawn(self) -> list[int]:
        """The loaders that batches are ever drawn from."""
        if self._strategy == "weighted":
            return [number for number, weight in enumerate(self._weights) if weight]
        return sorted(set(self._pattern))

    def pick(self) -> int | None:
        """The loader of the next batch; None where all have dropped out."""
        if self._strategy == "weighted":
            return self._by_quota()
        slot = self._next_slot()
        return None if slot is None else self._pattern[slot]

    def took(self, loader: int) -> None:
        """A batch of the loader that `pick` named was received."""
        if self._strategy in ("round_robin", "alternating"):
            slot = self._next_slot()
            assert slot is not None
            self.cursor = (slot + 1) % len(self._pattern)
        self.counts[loader] += 1

    def ended(self, loader: int) -> None:
        """The loader that `pick` named is through, once more."""
        if not self._cycles:
            self.out.add(loader)
        if self._strategy == "sequential":
            self.cursor = (self._pattern.index(loader) + 1) % len(self._pattern)

    def _next_slot(self) -> int | None:
        """The first place of the pattern, from the cursor on, whose loader has not dropped out."""
        size = len(self._pattern)
        for slot in range(self.cursor, self.cursor + size):
            if self._pattern[slot % size] not in self.out:
                return slot % size
        return None

    def _by_quota(self) -> int | None:
        active = [number for number in self.drawn if number not in self.out]
        total = sum(self._weights[number] for number in active)
        coming = sum(self.counts[number] for number in active) + 1
        # those that would not be ahead of their quota
        behind = [n for n in active if self.counts[n] * total < self._weights[n] * coming]
        # the largest weight / (batches + 1), of equal ones the first
        return max(
            behind, key=lambda n: Fraction(self._weights[n], self.counts[n] + 1), default=None
        )


def whole_weights(
    names: Sequence[str], weights: Mapping[str, float] | Sequence[float]
) -> list[int]:
    """Weights as the smallest integers in the same proportions, in the order of the names; 0.1
    means a tenth.

    Raises:
        ConfigError: one is missing, of another name, negative or no finite number, or all are 0.
    """
    named = weights
    if isinstance(weights, Sequence) and not isinstance(weights, str):
        named = dict(zip(names, weights, strict=False))
    if not isinstance(named, Mapping) or set(named) != set(names) or len(weights) != len(names):
        raise ConfigError(
            f"weights must be a dict or a list of one number for each of {list(names)}, not "
            f"{weights!r}"
        )
    fractions = [_fraction(name, named[name]) for name in names]
    if not any(fractions):
        raise ConfigError("weights: at least one must be above 0")
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * scale) for fraction in fractions]
    divisor = math.gcd(*whole)
    return [weight // divisor for weight in whole]


def _fraction(name: str, weight: Any) -> Fraction:
    try:
        value = float(weight)
        if 0 <= value < math.inf and not isinstance(weight, (bool, str)):
            return Fraction(repr(value))
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(f"weights: that of {name!r} must be a number of 0 or more, not {weight!r}")


def pattern_of(names: Sequence[str], pattern: Sequence[str] | None) -> list[int]:
    """The numbers of the loaders that a pattern names; without one, all in turn.

    Raises:
        ConfigError: it is empty, no list, or names a loader that is not there.
    """
    numbers = {name: number for number, name in enumerate(names)}
    if pattern is None:
        return list(numbers.values())
    is_list = isinstance(pattern, Sequence) and not isinstance(pattern, str) and len(pattern) > 0
    if not is_list or not numbers.keys() >= set(pattern):
        raise ConfigError(f"pattern must be a list of names of {list(names)}, not {pattern!r}")
    return [numbers[name] for name in pattern]


@checks_keywords
def split_workers(num_workers: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Splits a number of workers in proportion to shares, by largest remainder (the method of A.
    Hamilton, 1792).

    Args:
        num_workers: total number of workers.
        shares: a non-negative number for each name; only their proportions matter.

    Returns:
        A dict from name to number of workers, which may be 0; their sum is `num_workers`. Of equal
        remainders the first wins.

    Raises:
        ConfigError: `num_workers` is below 0, a share is negative or not finite, or no share is
            above 0.
    """
    num_workers = check_integer("num_workers", num_workers, 0)
    if not isinstance(shares, Mapping) or not shares:
        raise ConfigError(f"shares must be a dict of a number for each name, not {shares!r}")
    weights = dict(zip(shares, whole_weights(list(shares), shares), strict=True))
    total = sum(weights.values())
    split = {name: num_workers * weight // total for name, weight in weights.items()}
    remainders = {name: num_workers * weight % total for name, weight in weights.items()}
    by_remainder = sorted(shares, key=remainders.__getitem__, reverse=True)
    for name in by_remainder[: num_workers - sum(split.values())]:
        split[name] += 1
    return split
