"""Batches: what makes them in a way of its own, and collate functions as they are called for
them.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from headrace.collate import TextCollator, list_collate, stack_collate
from headrace.collate.fields import Step
from headrace.collate.stack import stack_tree
from headrace.errors import CollateError, ConfigError
from headrace.memory.ring import empty
from headrace.order.request import BatchRequest
from headrace.order.seeding import OF_COLLATE, SampleSeeder, preserved_rng

if TYPE_CHECKING:
    from headrace.core.dataset import BaseDataset

Join = Callable[..., Any]
"""Makes a batch of ids that lie one behind the other, and of their lengths; None: it must see
the samples.
"""
NameOf = Callable[[int], str]
"""Names the sample at a position of a batch."""


_STACKED = {"b": torch.bool, "i": torch.int64, "u": torch.int64, "f": torch.float64}
"""What numbers become as they are stacked, by the kind of their dtype."""


class MadeBatch(NamedTuple):
    """A finished batch."""

    batch: Any
    samples: int


class NotTogetherError(Exception):
    """The samples of a batch could not be read together, for its cause; they are read one by one
    then, which names the one at fault.
    """

    @property
    def cause(self) -> Exception | None:
        """The cause without its frames, which hold the batch's memory."""
        found = self.__cause__
        return found.with_traceback(None) if isinstance(found, Exception) else None


class BatchReader(ABC):
    """Makes the batches of a format in a way that only this one has."""

    name: str
    """What `explain()` calls it."""
    writes_in_place: bool = True
    """True if samples are written straight into their batch."""

    @abstractmethod
    def read(self, request: BatchRequest) -> MadeBatch | None:
        """The batch of a request, or None: samples have to be made one by one.

        Args:
            request: names the samples; one at least.

        Raises:
            NotTogetherError: they have to be read one by one.
        """


class Collating:
    """A collate function as it is called for a batch: with random numbers of its own, and with the
    samples' names in its errors.

    Args:
        function: the collate function; None: the one sample is the batch.
        of_one: True if the dataset yields batches, and the function gets one of them.
    """

    def __init__(self, function: Callable[[Any], Any] | None, of_one: bool = False) -> None:
        self.function, self._of_one = function, of_one
        self.stacks: bool = function is stack_collate and not of_one
        """True if samples are stacked."""
        self.join: Join | None = (
            function.join if type(function) is TextCollator and not of_one else None
        )
        self._is_random = function not in (None, stack_collate, list_collate)
        # another may have chosen among them
        self._names_samples = getattr(function, "__module__", "").startswith("headrace.")
        self._seeder: SampleSeeder | None = None
        self._seconds = 0.0

    @property
    def is_users(self) -> bool:
        """True if the function is none of headrace's."""
        return self.function is not None and not self._names_samples

    def calls(self, function: Callable[[Any], Any]) -> bool:
        """True if that function gets the samples of each batch."""
        return self.function is function and not self._of_one

    def take_seconds(self) -> float:
        """Seconds that the function has taken since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def __call__(self, samples: Any, request: BatchRequest, name_of: NameOf) -> Any:
        """The batch of samples: seed, epoch and step of the request key its random numbers, and
        `name_of` names samples in errors.
        """
        if self.function is None:
            return samples[0]
        if self._of_one:
            samples = samples[0]
        start = time.perf_counter()
        try:
            return self._called(samples, request)
        except CollateError as error:
            raise CollateError(
                error.naming(name_of if self._names_samples else "sample {} of the batch".format)
            ) from None
        finally:
            self._seconds += time.perf_counter() - start

    def _called(self, samples: Any, request: BatchRequest) -> Any:
        assert self.function is not None
        if not self._is_random:
            return self.function(samples)
        if self._seeder is None:
            self._seeder = SampleSeeder(self.function)
        # a collate function may draw too (MixUp): keyed by the batch's step
        with preserved_rng(self._seeder):
            self._seeder(request.seed, request.epoch, OF_COLLATE, request.step)
            batch = self.function(samples)
        if callable(batch):
            name = getattr(self.function, "__name__", type(self.function).__name__)
            raise ConfigError(
                f"collate_fn: {name} returned a {type(batch).__name__} where a batch should be, "
                "so it makes a collate function and is "
                f"none: pass what it returns, collate_fn={name}(...), or register it with "
                "factory=True"
            )
        return batch

    def batch_of(
        self, dataset: Any, samples: list[Any], indices: Sequence[int], request: BatchRequest
    ) -> MadeBatch:
        """The batch of finished samples of a dataset of headrace's, which names them by their
        indices.
        """
        return MadeBatch(
            self(samples, request, functools.partial(named, dataset, indices)), len(samples)
        )

    def __getstate__(self) -> dict[str, Any]:
        # found anew: the copy holds copies of the generators
        return {**self.__dict__, "_seeder": None}


def with_targets(dataset: BaseDataset, inputs: Any, indices: Sequence[int]) -> MadeBatch:
    """The batch of inputs, with targets if samples have any: as stacking the samples makes it."""
    targets = dataset.targets
    if (
        isinstance(targets, np.ndarray)
        and targets.ndim == 1
        and targets.dtype.kind in _STACKED
        and targets.dtype != np.uint64
    ):
        picked = targets[np.asarray(indices, np.int64)]
        out = empty(picked.shape, _STACKED[targets.dtype.kind])
        np.copyto(out.numpy(), picked)
        return MadeBatch((inputs, out), len(indices))
    if targets is None and not dataset.sample_decoder.always_pairs:
        return MadeBatch(inputs, len(indices))
    each = [dataset.target_of(index) for index in indices]
    try:
        stacked = stack_tree(each, path=(Step("[1]", ("1",)),))
    except CollateError as error:
        raise CollateError(error.naming(functools.partial(named, dataset, indices))) from None
    return MadeBatch((inputs, stacked), len(indices))


def named(dataset: Any, indices: Sequence[Any] | None, position: int) -> str:
    """A sample by its index, and the file or row that it is of, as far as they are known."""
    if indices is None or position >= len(indices):
        return f"sample {position} of the batch"
    index = indices[position]
    try:
        return f"sample {index} ({dataset.source_of(index)})"
    # a foreign dataset has no such method; and an error must not hide the one that is told
    except Exception:
        return f"sample {index}"
