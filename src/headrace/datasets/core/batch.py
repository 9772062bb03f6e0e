"""Batches: the interface of the ways of making one, and collate functions as they are called for
it.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from headrace.collate import TextCollator, list_collate, stack_collate
from headrace.collate.fields import Step
from headrace.collate.stack import stack_tree
from headrace.errors import CollateError, ConfigError
from headrace.order.request import BatchRequest
from headrace.order.seeding import OF_COLLATE, SampleSeeder, preserved_rng

Join = Callable[..., Any]
"""Makes a batch of ids that lie one behind the other, and of their lengths; None: it must see
the samples.
"""
NameOf = Callable[[int], str]
"""Names the sample at a position of a batch."""


class MadeBatch(NamedTuple):
    """A finished batch."""

    batch: Any
    samples: int


class BatchWay(ABC):
    """One way of making a batch. All ways give the same batch, bit for bit (law 1); they differ
    in what they cost.
    """

    name: ClassVar[str]
    """What `explain()` calls it."""
    writes_in_place: bool = False
    """True if samples are written straight into their batch, also where they are read and
    decoded.
    """

    @abstractmethod
    def make(self, request: BatchRequest, error: Exception | None = None) -> MadeBatch:
        """The batch of a request, inside the ring slot that is open.

        Args:
            request: names the samples.
            error: why a faster way could not make this batch.

        Raises:
            SampleError: a sample can't be read; or, where such are skipped, none can.
            CollateError: the samples make no batch.
        """

    def explain(self) -> str:
        """The way in words."""
        return self.name


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


def stacked_targets(dataset: Any, targets: list[Any], indices: Sequence[int]) -> Any:
    """The targets of samples as stacking the samples makes them."""
    try:
        return stack_tree(targets, path=(Step("[1]", ("1",)),))
    except CollateError as error:
        raise CollateError(error.naming(functools.partial(named, dataset, indices))) from None


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
