"""The finished samples of another library's dataset as records: each is read under random numbers
of its own, and copied at once.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import IterableDataset

from headrace.arguments import described
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder
from headrace.core.wrapped import answers_batches
from headrace.errors import ConfigError
from headrace.memory.per_process import PerProcess
from headrace.memory.tree import copied
from headrace.order.request import BatchRequest, working_on
from headrace.order.seeding import SampleSeeder, preserved_rng, rng_states
from headrace.storage.source import Source

ALONE: Final[Any] = type("Alone", (), {"__repr__": lambda self: "ALONE"})()
"""The target of a finished sample that is no pair of input and target."""


class ForeignDecoder(Decoder):
    """Samples that another dataset has finished: pairs of input and target where they are tuples of
    two, else inputs as a whole.

    Args:
        needs_pairs: True if transforms are called that get a target.
    """

    stores_values = False
    splits_targets = True
    always_pairs = True
    makes_plain_samples = False

    def __init__(self, needs_pairs: bool) -> None:
        self._needs_pairs = needs_pairs

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        if type(value) is tuple and len(value) == 2:
            return value
        if self._needs_pairs:
            raise ConfigError(
                f"target_transform and transforms have no meaning here: sample {index} is no "
                "tuple of two, and so has no target; "
                "transform= gets it as a whole"
            )
        return value, ALONE

    def make_sample(self, value: Any, target: Any, has_target: bool) -> Any:
        return value if target is ALONE else (value, target)


class Foreign(Source):
    """A foreign dataset's samples as records.

    What a sample draws at random depends on (seed, its index) alone: not on the epoch, the process,
    nor the samples around it. So does what headrace's own datasets inside of it draw.

    Args:
        dataset: has ``__getitem__`` and ``__len__``; ``__getitems__`` is used where there is one.
        seed: of the random numbers.

    Raises:
        ConfigError: it is no map-style dataset.
    """

    # the random generators of a process are common to its threads, and who knows about the dataset
    thread_safe = False

    def __init__(self, dataset: Any, seed: int) -> None:
        self._length = _length_of(dataset)
        self._dataset, self._seed = dataset, seed
        self._answers_batches = answers_batches(dataset)
        self._reset()

    def _reset(self) -> None:
        self._draws = False
        self._seeder: SampleSeeder | None = None
        # a thread of the parent may hold the parent's while it forks
        self._lock = PerProcess(threading.Lock)

    def __len__(self) -> int:
        return self._length

    def read(self, indices: Sequence[int]) -> list[Any]:
        with self._lock.get(), working_on(BatchRequest((), self._seed, 0)):
            wanted = [int(index) for index in indices]
            seeder = self._seeder or SampleSeeder(self._dataset)
            with preserved_rng(seeder):
                samples = self._read(wanted, seeder)
            if self._seeder is None:
                self._seeder = SampleSeeder(self._dataset)
                # some datasets make their generators when they are first read
                if len(self._seeder.generators) != len(seeder.generators):
                    with preserved_rng(self._seeder):
                        samples = self._read(wanted, self._seeder)
            return samples

    def _read(self, indices: list[int], seeder: SampleSeeder) -> list[Any]:
        if self._answers_batches and len(indices) > 1 and not self._draws:
            before = rng_states(seeder)
            samples = self._batch(indices)
            if rng_states(seeder) == before:
                return list(map(copy_of, samples))
            # random numbers that depend on the whole batch: each sample has to be read by itself
            self._draws = True
        copies = []
        for index in indices:
            seeder(self._seed, 0, index)
            if self._answers_batches:
                copies.append(copy_of(self._batch([index])[0]))
            else:
                copies.append(copy_of(self._dataset[index]))
        return copies

    def _batch(self, indices: list[int]) -> Sequence[Any]:
        samples: Sequence[Any] = self._dataset.__getitems__(indices)
        if len(samples) != len(indices):
            raise ValueError(f"__getitems__ gave {len(samples)} samples for {len(indices)} indices")
        return samples

    def location(self, index: int) -> str:
        return f"{type(self._dataset).__name__}[{index}]"

    def fingerprint(self) -> str:
        own = getattr(self._dataset, "fingerprint", None)
        if isinstance(own, str):
            return own
        name = f"{type(self._dataset).__module__}.{type(self._dataset).__qualname__} {self._length}"
        return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()

    def held_as(self) -> str:
        """What `BaseDataset.held_as` says of these samples.

        Raises:
            ConfigError: nobody can tell them from others.
        """
        name = type(self._dataset).__name__
        if not isinstance(getattr(self._dataset, "fingerprint", None), str):
            raise ConfigError(
                "shared='machine': nobody can tell whether another process holds the samples of "
                f"the same {name}: give it an attribute `fingerprint`, a text that says what its "
                "samples are"
            )
        return f"finished samples of {name}, seed {self._seed}"

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("_draws", "_seeder", "_lock")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


def copy_of(sample: Any) -> Any:
    """A copy of a sample, which shares no memory with the dataset.

    Raises:
        TypeError: it can't be pickled; the message names the types in it.
    """
    try:
        return copied(sample)
    except MemoryError:
        raise
    except Exception as error:
        raise TypeError(
            f"a sample must be picklable, so that it can be held, and {_type_of(sample)} is "
            f"not: {error}"
        ) from error


def _type_of(sample: Any) -> str:
    items: Any = ()
    if isinstance(sample, dict):
        items = sample.values()
    elif isinstance(sample, (tuple, list)):
        items = sample
    inside = ", ".join(dict.fromkeys(type(item).__name__ for item in items))
    return f"{type(sample).__name__} of {inside}" if inside else type(sample).__name__


def _length_of(dataset: Any) -> int:
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"data_path: {name} is an IterableDataset, which gives no sample by index: pass a "
            "map-style dataset, or a path"
        )
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"data_path: {name} is a mapping, whose keys are no indices: pass one of its values, "
            "or a path"
        )
    wanted = "pass a path, or a dataset with __getitem__ and __len__"
    if isinstance(dataset, type):
        raise ConfigError(f"data_path: {dataset.__name__} is a class: {wanted}")
    missing = [method for method in ("__getitem__", "__len__") if not hasattr(dataset, method)]
    if missing:
        what = described(dataset)
        raise ConfigError(
            f"data_path: {what} is no path and no map-style dataset, for it has no "
            f"{' and no '.join(missing)}: {wanted}"
        )
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise ConfigError(f"data_path: {name} has no length ({error}): {wanted}") from error


def foreign_targets(dataset: Any, length: int) -> Any:
    """The `targets` of a foreign dataset, if they are one for each sample."""
    targets: Any = getattr(dataset, "targets", None)
    if isinstance(targets, torch.Tensor):
        targets = targets.numpy(force=True)
    is_column = isinstance(targets, (list, tuple)) or (
        isinstance(targets, np.ndarray) and targets.ndim
    )
    return targets if is_column and len(targets) == length else None
