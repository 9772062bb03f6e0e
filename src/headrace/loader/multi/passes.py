"""Iterates over one epoch of several loaders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.errors import StateError, WorkerError, warn
from headrace.loader.multi.schedule import Schedule
from headrace.order.epoch import pass_epoch


@dataclass
class MultiPosition:
    """Where an epoch stands."""

    epoch: int
    schedule: Schedule
    passes: list[int]
    """Number of the pass that each loader is in."""
    has_ended: bool = False
    """True if all loaders ended before the number of batches was reached."""


class MultiIterator:
    """One epoch of a `MultiDataLoader`, from a place on, which it moves."""

    def __init__(self, loaders: dict[str, Any], position: MultiPosition, steps: int) -> None:
        self._loaders, self._names = loaders, list(loaders)
        self._position, self._steps = position, steps
        self._batches: dict[int, Iterator[Any]] = {}  # begun at the first batch: a loader that waits for its turn holds nothing
        self._fruitless = [0] * len(position.passes)  # passes in a row that gave nothing
        self.is_done: bool = False
        self._is_left = False

    def __iter__(self) -> MultiIterator:
        return self

    def __len__(self) -> int:
        """Batches that are left."""
        return 0 if self.is_done else max(0, self._steps - self._position.schedule.step)

    def __next__(self) -> tuple[str, Any]:
        if self._is_left:
            raise StateError("this iterator can't go on: its MultiDataLoader has begun another one, loaded a state, or was closed")
        schedule, names = self._position.schedule, self._names
        while not self.is_done:
            number = schedule.pick() if schedule.step < self._steps else None
            if number is None:
                self._position.has_ended = True
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
            schedule.took(number)
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
            position.schedule.out.add(number)
        position.schedule.ended(number)
        if number not in position.schedule.out:
            position.passes[number] += 1
            self._loaders[name].set_epoch(pass_epoch(position.epoch, position.passes[number]))

    def _end(self) -> None:
        self.is_done = True
        self._batches.clear()

    def leave(self) -> None:
        """Frees the loaders; what comes after it is an error."""
        self._end()
        self._is_left = True
