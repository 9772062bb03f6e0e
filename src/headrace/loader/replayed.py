"""Makes a plain torch DataLoader repeatable by replaying it.

It is replayed: whatever it draws from is seeded by (seed, epoch), and to resume it is gone through
again from its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from headrace.errors import StateError
from headrace.loader.data import length_of
from headrace.monitor.stats import Stats
from headrace.order.seeding import OF_SAMPLER, Draws, SampleSeeder


class ReplayedLoader:
    """A torch DataLoader with the epochs and the state of a `Loader`.

    What its sampler draws, and without workers its dataset too, from the global generators or from
    those that it holds, follows from (seed, epoch). What persistent workers draw is not repeated:
    take a `Loader` where random transforms must be.

    Args:
        loader: the DataLoader; its `set_epoch`, and those of its samplers and dataset, are called
            where they have one.
        seed: any integer.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self.loader: DataLoader[Any] = loader
        self.seed: int = seed
        self._seeder = SampleSeeder(
            loader.sampler, loader.batch_sampler, loader.generator, loader.dataset
        )
        self._epoch = 0
        self._received = 0

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch of the next iterator; another than that of a loaded state drops the
        position.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            self._received = 0

    def __iter__(self) -> Iterator[Any]:
        loader = self.loader
        parts = (loader, loader.sampler, loader.batch_sampler, loader.dataset)
        for part in {id(part): part for part in parts}.values():
            set_epoch = getattr(part, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)
        draws = Draws(self._seeder, self.seed, self._epoch, OF_SAMPLER)
        with draws():
            batches = iter(loader)
        return _Replay(self, batches, draws)

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the batches of it that were received, and the seed."""
        return {"epoch": self._epoch, "batches": self._received, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """The next iterator of the state's epoch goes on at its position; with `strict` the seeds
        must be equal.

        Raises:
            StateError: it is no state of a replayed loader, or of another seed.
        """
        own = self.state_dict()
        saved: list[Any] = []
        if isinstance(state, dict):
            saved = [state.get(name) for name in own]
        if [type(value) for value in saved] != [int, int, int] or min(saved[:2]) < 0:
            raise StateError(
                "load_state_dict: this is no state of a torch DataLoader in a MultiDataLoader: "
                f"{state!r}"
            )
        epoch, batches, seed = saved
        if strict and seed != self.seed:
            raise StateError(
                f"load_state_dict: the state was saved with seed={seed}, this loader has "
                f"seed={self.seed}"
            )
        self._epoch = epoch
        self._received = batches

    def get_stats(self) -> dict[str, Any]:
        """What a plain DataLoader is; it counts nothing."""
        loader = self.loader
        return Stats(
            dataset_size=length_of(loader.dataset) or 0,
            num_batches=length_of(loader) or 0,
            batch_size=loader.batch_size or 0,
            num_workers=loader.num_workers,
        )

    def close(self) -> None:
        """Nothing: the workers of a plain DataLoader are its own."""


class _Replay:
    """One epoch of a plain DataLoader, from the position on that it was loaded with."""

    def __init__(self, owner: ReplayedLoader, batches: Iterator[Any], draws: Draws) -> None:
        self._owner = owner
        self._batches = batches
        self._draws = draws
        self._skip = owner._received
        self._failure: Exception | None = None

    def __iter__(self) -> _Replay:
        return self

    def __next__(self) -> Any:
        if self._failure is not None:
            raise self._failure  # what comes after an error depends on the loader
        try:
            with self._draws():
                while self._skip:
                    next(self._batches)
                    self._skip -= 1
                batch = next(self._batches)
        except StopIteration:
            raise
        except Exception as error:
            self._failure = error
            raise
        self._owner._received += 1
        return batch
