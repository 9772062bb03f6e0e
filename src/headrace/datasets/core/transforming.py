"""How does a decoded value become a finished sample?

Its target is found, the random generators are seeded for it alone, and the user's transforms are called (law 1).
"""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from headrace.datasets.image.augment import Augment
from headrace.errors import SampleError, warn
from headrace.order.request import BatchRequest
from headrace.order.seeding import SampleSeeder, preserved_rng, rng_states, warn_off_main_thread


class SampleTransforming(ABC):
    """The part of a dataset that finishes samples. Indices are those of the dataset itself, which may be a view."""

    transform: Callable[[Any], Any] | None
    target_transform: Callable[[Any], Any] | None
    transforms: Callable[[Any, Any], tuple[Any, Any]] | None
    targets: Sequence[Any] | npt.NDArray[Any] | None
    return_index: bool
    always_pairs = False
    """Is a sample a pair even where there are no targets?"""
    _chosen: npt.NDArray[np.int64] | None
    _augment: Augment | None = None
    """Random changes that a format makes itself, before any transform."""
    _seeder: SampleSeeder | None = None
    _seeded: tuple[Any, ...] = ()  # the transforms that the seeder knows
    _is_untried = True  # have the transforms not been called since the seeder looked for generators?
    _warned = False

    # -- what a format overrides

    def pair(self, index: int, value: Any) -> tuple[Any, Any]:
        """Input and target of a held value; `present` gets the input. Default: the value, and a copy of its entry in `targets`."""
        return value, None if self.targets is None else _plain(self.targets[index])

    def present(self, value: Any) -> Any:
        """What a transform gets, and without one the sample's input. Default: the value itself, writable."""
        return value.copy() if isinstance(value, np.ndarray) and not value.flags.writeable else value

    def assemble(self, value: Any, target: Any) -> Any:
        """A finished sample of input and target. Default: both as a tuple, or the input alone where there are no targets."""
        return value if self.targets is None and not self.always_pairs else (value, target)

    def is_late(self, error: Exception) -> bool:
        """Does an error of `draw` or `present` say that the sample can't be decoded? Of formats that decode there."""
        return False

    @abstractmethod
    def source_of(self, index: int) -> str:
        """Where a sample lies."""

    @abstractmethod
    def _failed(self, index: int, what: str, error: Exception) -> SampleError:
        """Raises, or gives, the error of a sample that can't be read."""

    @abstractmethod
    def _naming(self, index: int) -> AbstractContextManager[Any]:
        """As a context: warnings of the decoder name the sample."""

    @abstractmethod
    def _replacement(self, index: int, path: str, failure: SampleError) -> list[Any]:
        """What stands in a batch for a sample that can't be read."""

    # -- inside

    @property
    def _transforms(self) -> tuple[Any, ...]:
        return self.transforms, self.transform, self.target_transform

    @property
    def _is_transformed(self) -> bool:
        return any(transform is not None for transform in self._transforms)

    @property
    def _is_random(self) -> bool:
        return self._augment is not None or self._is_transformed

    def _finished(self, request: BatchRequest, values: list[Any], may_repeat: Callable[[], bool]) -> list[Any]:
        """The samples of a batch, without those that are left out.

        Args:
            request: says what belongs to the batch.
            values: for each index the decoded value, or a SampleError.
            may_repeat: says whether the same draws may have come before; asked only if a warning is due.
        """
        is_random = self._is_random
        is_ours_to_restore = is_random and get_worker_info() is None
        if is_ours_to_restore:
            warn_off_main_thread()
        samples = []
        with preserved_rng(self._get_seeder()) if is_ours_to_restore else nullcontext():
            last = None
            for number, (index, value) in enumerate(zip(request, values, strict=True)):
                if isinstance(value, SampleError):
                    samples.extend(self._replacement(index, self.source_of(index), value))
                else:
                    last = request.seed, request.epoch, self._whole(index), 0 if request.draws is None else request.draws[number]
                    made = self._finish(index, value, is_random, *last)
                    samples.extend(self._replacement(index, self.source_of(index), made) if isinstance(made, SampleError) else [made])
                    values[number] = None  # decoded and finished samples of a whole batch need not be there at once
            if last is not None and is_random and not self._warned and may_repeat():
                self._warn_of_repeats(*last)
        return samples

    def _whole(self, index: int) -> int:
        return index if self._chosen is None else int(self._chosen[index])

    def _finish(self, index: int, value: Any, is_random: bool, seed: int, epoch: int, whole: int, k: int) -> Any:
        """The finished sample; or a SampleError, where it turned out here that it can't be decoded."""
        try:
            value, target = self.pair(index, value)
            with self._naming(whole):
                if is_random:
                    value, target = self._call_seeded(value, target, seed, epoch, whole, k)
                else:
                    value = self.present(value)
        except Exception as error:
            if self.is_late(error):
                return self._failed(whole, "can't be decoded", error)
            error.add_note(f"headrace: while transforming sample {index} ({self.source_of(index)})")
            raise
        sample = self.assemble(value, target)
        return _with_index(sample, index) if self.return_index else sample

    def _call_seeded(self, value: Any, target: Any, seed: int, epoch: int, whole: int, k: int) -> tuple[Any, Any]:
        seeder = self._get_seeder()
        untouched = copy.deepcopy((value, target)) if self._is_untried else None
        seeder(seed, epoch, whole, k)
        found = self._call(self.present(value), target)
        if untouched is not None:
            self._is_untried = False
            now = self._new_seeder()
            if len(now.generators) != len(seeder.generators):  # some transforms make theirs when they are first called: draw again
                self._seeder = now
                now(seed, epoch, whole, k)
                found = self._call(self.present(untouched[0]), untouched[1])
        return found

    def _call(self, value: Any, target: Any) -> tuple[Any, Any]:
        if self.transforms is not None:
            value, target = self.transforms(value, target)
        if self.transform is not None:
            value = self.transform(value)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return value, target

    def _get_seeder(self) -> SampleSeeder:
        if self._seeder is None or not all(map(operator.is_, self._seeded, self._transforms)):  # equal ones hold other generators
            self._seeder, self._seeded, self._is_untried = self._new_seeder(), self._transforms, True
        return self._seeder

    def _new_seeder(self) -> SampleSeeder:
        return SampleSeeder(*(v for k, v in vars(self).items() if not k.startswith("_")))

    def _warn_of_repeats(self, seed: int, epoch: int, whole: int, k: int) -> None:
        """Did the transforms of the last sample draw anything? Then they draw the same in each epoch that nobody names."""
        self._warned = True
        after = rng_states()
        self._get_seeder()(seed, epoch, whole, k)
        if rng_states() != after:
            warn(
                f"{type(self).__name__}: the random transforms draw the same numbers in each epoch, since nobody says which epoch it is: "
                "call dataset.set_epoch(epoch) before each one, or take headrace.create_dataloader, which does"
            )


def _plain(target: Any) -> Any:
    """A target as users of PyTorch expect it: a Python number, not a NumPy scalar; of what may be written to, a copy."""
    if isinstance(target, np.generic):
        return target.item()
    return target if target is None or isinstance(target, (int, float, str, bytes)) else copy.deepcopy(target)


def _with_index(sample: Any, index: int) -> Any:
    if isinstance(sample, dict):
        return {**sample, "index": index}
    return (*sample, index) if type(sample) is tuple else (sample, index)
