"""Moves batches to a device."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from headrace.memory.ring import Delivered
from headrace.memory.tree import map_tensors


class Deliveries(Protocol):
    """The deliveries of an epoch, in their order."""

    def __next__(self) -> Delivered: ...
    def is_ready(self) -> bool:
        """True if the next one is here, and pinned, so that `next` does not wait for it."""

    def close(self) -> None:
        """No further ones are asked for."""


def move_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """The batch with all its tensors on a device; what is no tensor stays as it is.

    Dicts, lists, tuples, named tuples and dataclasses are gone through and keep their types. A copy runs asynchronously only
    where it is safe to use its source again: from pinned memory to a CUDA device.
    """
    target = torch.device(device)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        is_safe = target.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned()
        return tensor.to(target, non_blocking=is_safe)

    return map_tensors(batch, move)


class Transfer:
    """The transfer of one epoch's batches to the user: each is received and moved when it is asked for.

    Args:
        device: where to; None: they stay where they are.
    """

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        self._device = device
        self._seconds = 0.0

    def await_device(self) -> None:
        """Waits while the device has too much in its queue."""

    def receive(self, deliveries: Deliveries) -> Delivered:
        """The next delivery; raises what `next` raises."""
        return next(deliveries)

    def move(self, delivered: Delivered) -> Any:
        """The batch of the delivery that was received last, on the device."""
        if self._device is None:
            return delivered.batch
        began = time.perf_counter()
        batch = move_to_device(delivered.batch, self._device)
        self._seconds += time.perf_counter() - began
        return batch

    def prefetch(self, deliveries: Deliveries) -> None:
        """Does for the next batch what can be done already; neither waits nor raises."""

    def seconds(self) -> float:
        """Seconds that copies have taken, of those that ended since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def finish(self) -> None:
        """At the end of an epoch: waits for what is under way."""
