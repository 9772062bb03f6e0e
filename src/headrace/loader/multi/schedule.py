"""Schedules which of several loaders yields the next batch, and iterates over an epoch of them.

A schedule is a pure function of the strategy and of what was received so far: a few integers, no
random numbers. So every rank draws from the same loaders in the same order, and a run can be
resumed at any batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from headrace.arguments import check_flag, check_integer, checks_keywords
from headrace.errors import ConfigError, StateError, WorkerError, warn
from headrace.order.epoch import pass_epoch

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
        self.weights: list[int] = list(weights)
        self.pattern: list[int] = list(pattern)
        self._strategy, self._cycles = strategy, cycles
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
        return (
            [i for i, weight in enumerate(self.weights) if weight]
            if self._strategy == "weighted"
            else sorted(set(self.pattern))
        )

    def pick(self) -> int | None:
        """The loader of the next batch; None where all have dropped out."""
        if self._strategy == "weighted":
            return self._by_quota()
        slot = self._next_slot()
        return None if slot is None else self.pattern[slot]

    def took(self, loader: int) -> None:
        """A batch of the loader that `pick` named was received."""
        slot = self._next_slot()
        self.counts[loader] += 1
        if slot is not None and self._strategy in ("round_robin", "alternating"):
            self.cursor = (slot + 1) % len(self.pattern)

    def ended(self, loader: int) -> None:
        """The loader that `pick` named is through, once more."""
        if not self._cycles:
            self.out.add(loader)
        if self._strategy == "sequential":
            self.cursor = (self.pattern.index(loader) + 1) % len(self.pattern)

    def _next_slot(self) -> int | None:
        """The first place of the pattern, from the cursor on, whose loader has not dropped out."""
        size = len(self.pattern)
        slots = (slot % size for slot in range(self.cursor, self.cursor + size))
        return next((slot for slot in slots if self.pattern[slot] not in self.out), None)

    def _by_quota(self) -> int | None:
        active = [i for i in self.drawn if i not in self.out]
        total, coming = (
            sum(self.weights[i] for i in active),
            sum(self.counts[i] for i in active) + 1,
        )
        best: int | None = None
        for i in active:
            if self.counts[i] * total >= self.weights[i] * coming:
                continue  # it would be ahead of its quota
            if best is None or self.weights[i] * (self.counts[best] + 1) > self.weights[best] * (
                self.counts[i] + 1
            ):
                best = i
        return best


class MultiIterator:
    """One epoch of a `MultiDataLoader`, from a position on, which it moves."""

    def __init__(self, loaders: dict[str, Any], position: Schedule, steps: int) -> None:
        self._loaders, self._names = loaders, list(loaders)
        self._position, self._steps = position, steps
        # begun at the first batch: a loader that waits for its turn holds nothing
        self._batches: dict[int, Iterator[Any]] = {}
        self._fruitless = [0] * len(position.passes)  # passes in a row that gave nothing
        self.is_done: bool = False
        self._is_left = False

    def __iter__(self) -> MultiIterator:
        return self

    def __len__(self) -> int:
        """Batches that are left."""
        return 0 if self.is_done else max(0, self._steps - self._position.step)

    def __next__(self) -> tuple[str, Any]:
        if self._is_left:
            raise StateError(
                "this iterator can't go on: its MultiDataLoader has begun another one, loaded a "
                "state, or was closed"
            )
        position, names = self._position, self._names
        while not self.is_done:
            number = position.pick() if position.step < self._steps else None
            if number is None:
                position.has_ended = True
                self._end()
                break
            if number not in self._batches:
                self._batches[number] = iter(self._loaders[names[number]])
            try:
                batch = next(self._batches[number])
            except StopIteration:
                self._through(number)
                continue
            except WorkerError:
                self._end()
                raise
            position.took(number)
            self._fruitless[number] = 0
            return names[number], batch
        raise StopIteration

    def _through(self, number: int) -> None:
        """A loader's pass is at its end."""
        position, name = self._position, self._names[number]
        del self._batches[number]
        self._fruitless[number] += 1
        if self._fruitless[number] > 1:
            warn(f"loader {name!r} has no batches, and is left out")
            position.out.add(number)
        position.ended(number)
        if number not in position.out:
            position.passes[number] += 1
            self._loaders[name].set_epoch(pass_epoch(position.epoch, position.passes[number]))

    def _end(self) -> None:
        self.is_done = True
        self._batches.clear()

    def leave(self) -> None:
        """Frees the loaders; what comes after it is an error."""
        self._end()
        self._is_left = True


def check_schedule(
    strategy: Any, weights: Any, pattern: Any, epoch_length: Any, cycles: Any
) -> None:
    """Raises a ConfigError for the first argument of a `MultiDataLoader` that makes no sense, or
    that its strategy doesn't read.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
    if weights is not None and strategy != "weighted":
        raise ConfigError(f"weights are for strategy='weighted', not for {strategy!r}")
    if pattern is not None and strategy != "alternating":
        raise ConfigError(f"pattern is for strategy='alternating', not for {strategy!r}")
    if epoch_length not in ("sum", "max", "min"):
        raise ConfigError(f"epoch_length must be 'sum', 'max' or 'min', not {epoch_length!r}")
    check_flag("cycle_short_loaders", cycles)


def whole_weights(
    names: Sequence[str], weights: Mapping[str, float] | Sequence[float]
) -> list[int]:
    """Weights as the smallest integers in the same proportions, in the order of the names; 0.1
    means a tenth.

    Raises:
        ConfigError: one is missing, of another name, negative or no finite number, or all are 0.
    """
    if isinstance(weights, Mapping):
        if set(weights) != set(names):
            raise ConfigError(
                f"weights must name each loader once: they name {_listed(weights)}, the loaders "
                f"are {_listed(names)}"
            )
        given = [weights[name] for name in names]
    elif (
        isinstance(weights, Sequence)
        and not isinstance(weights, str)
        and len(weights) == len(names)
    ):
        given = list(weights)
    else:
        raise ConfigError(
            f"weights must be a dict, or a list of one number for each of {_listed(names)}, not "
            f"{weights!r}"
        )
    fractions = [_fraction(name, weight) for name, weight in zip(names, given, strict=True)]
    if not any(fractions):
        raise ConfigError("weights: at least one must be above 0")
    scale = math.lcm(*(f.denominator for f in fractions))
    whole = [int(f * scale) for f in fractions]
    divisor = math.gcd(*whole)
    return [weight // divisor for weight in whole]


def _fraction(name: str, weight: Any) -> Fraction:
    try:
        value = float("nan") if isinstance(weight, (bool, str)) else float(weight)
    except (TypeError, ValueError, OverflowError):
        value = float("nan")
    if not 0 <= value < math.inf:
        raise ConfigError(
            f"weights: that of {name!r} must be a number of 0 or more, not {weight!r}"
        )
    return Fraction(repr(value))


def pattern_of(names: Sequence[str], pattern: Sequence[str] | None) -> list[int]:
    """The numbers of the loaders that a pattern names; without one, all in turn.

    Raises:
        ConfigError: it is empty, no list, or names a loader that is not there.
    """
    if pattern is None:
        return list(range(len(names)))
    if isinstance(pattern, str) or not isinstance(pattern, Sequence) or not pattern:
        raise ConfigError(
            f"pattern must be a list of loaders' names, such as {list(names)!r}, not {pattern!r}"
        )
    unknown = [name for name in pattern if name not in names]
    if unknown:
        raise ConfigError(f"pattern names {unknown[0]!r}; the loaders are {_listed(names)}")
    return [list(names).index(name) for name in pattern]


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
    names = list(shares)
    weights = whole_weights(names, shares)
    total = sum(weights)
    split = [num_workers * weight // total for weight in weights]
    by_remainder = sorted(range(len(names)), key=lambda i: (-(num_workers * weights[i] % total), i))
    for i in by_remainder[: num_workers - sum(split)]:
        split[i] += 1
    return dict(zip(names, split, strict=True))


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(repr, names)) or "none"
