"""The interface of the ways of making a batch, of which one is chosen for a dataset, its mode and its collate function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

from headrace.order.request import BatchRequest


class MadeBatch(NamedTuple):
    """A finished batch."""

    batch: Any
    samples: int


class BatchWay(ABC):
    """One way of making a batch. All ways give the same batch, bit for bit (law 1); they differ in what they cost."""

    name: ClassVar[str]
    """What `explain()` calls it."""
    writes_in_place: bool = False
    """True if samples are written straight into their batch, also where they are read and decoded."""

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
