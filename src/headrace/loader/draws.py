"""Keeps the random numbers of the user's iterators repeatable, and apart from those of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.order.seeding import SampleSeeder, preserved_rng, snapshot_rng


class Draws:
    """Random numbers of its own for work that is done in pieces.

    Inside ``with draws():`` the global generators, and those that the holder holds, stand where the piece before has left them, and
    before the first one where (seed, epoch, place) puts them. So the work draws the same whatever comes between its pieces, and
    leaves no trace outside.

    Args:
        seeder: knows the holder's generators.
        seed, epoch, place, k: what the numbers follow from; `place` stands for the index of a sample, and is negative.
    """

    def __init__(self, seeder: SampleSeeder, seed: int, epoch: int, place: int, k: int = 0) -> None:
        self._seeder = seeder
        self._go_on: Callable[[], None] = lambda: seeder(seed, epoch, place, k)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with preserved_rng(self._seeder):
            self._go_on()
            try:
                yield
            finally:
                self._go_on = snapshot_rng(self._seeder)
