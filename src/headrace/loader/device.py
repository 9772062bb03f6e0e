"""Moves batches to a device. On CUDA and XPU the next batch is copied while the current one is
processed.

NOTE [ CUDA prefetcher ]

* Copies use a copy stream, one per device and process, and so wait for none of the user's kernels.
  From pinned memory they are asynchronous. From other memory this process waits for the copy, but
  for no other work of the device.
* A batch is handed over without waiting: the stream that is current *at that moment* in the user's
  code is told to wait for the event of the copy, and is recorded for each tensor. The memory of the
  tensors belongs to the copy stream; without the record the next copy might reuse it while the
  user's kernels still read it.
* The source of a copy is kept alive until the event of the copy has completed. This is polled at
  each batch, without waiting. At the end of an epoch, and when an iterator is dropped, it is waited
  for (copies wait for no kernel, so that is short).
* A copy starts as soon as its batch is available without waiting: when batch n is handed over,
  batch n + 1 is taken if it is ready and pinned. If the device is the slower side, workers are
  ahead and it is; so a loop that waits for the device in each step (`loss.item()`) also overlaps
  its copies with the kernels. If `next` waited for batch n + 1, it would withhold batch n from the
  user. A thread that waits instead would compete with the training for the interpreter lock, and
  torch reports a dead worker to the main thread only. Otherwise (no worker has made the batch yet;
  no workers; not pinned) the copy starts when the batch is requested, and overlaps with the work
  that is still queued on the device.
* Images that arrive as uint8 are normalised on the copy stream too, before the event of the copy,
  so that the user's kernels find them finished. Intermediate values use memory of that stream only.
* A batch that was taken early does not count as received: its report, its error or the end of the
  epoch take effect when the user requests it, and `state_dict()` does not count it.
* This process runs ahead of the device, and device memory that another stream has used can't be
  reused before that stream has finished with it. To keep such memory bounded, a batch is handed out
  only when the device has finished all but the last two, and an epoch ends only when it has
  finished all but the last. This is waiting for the device, and is not counted as waiting for data.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from headrace.collate.vision import Normalization
from headrace.loader.processes import WorkerIterator
from headrace.memory.ring import Delivered
from headrace.memory.tree import map_tensors, tensors_of

# whose modules in torch have the same streams and events; others are copied to straight
_STREAMED = ("cuda", "xpu")
_QUEUED = 2  # batches whose kernels may wait in the device's queue while another one is handed out
# seconds between two looks at an event; other than the driver's own wait it takes no core, and
# Ctrl-C ends it
_NAP = 1e-4


def move_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """Moves all tensors of a batch to a device. Other values are unchanged.

    Dicts, lists, tuples, named tuples and dataclasses are traversed and keep their types. A copy is
    asynchronous only if it is safe to reuse its source: from pinned memory to a CUDA device.
    """
    target = torch.device(device)
    return map_tensors(batch, lambda tensor: _moved(tensor, target))


def _moved(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    is_safe = target.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned()
    return tensor.to(target, non_blocking=is_safe)


Step = Callable[[torch.Tensor], torch.Tensor]
"""What is done with a tensor on its device."""


class Transfer:
    """The transfer of one epoch's batches to a device: each is received and moved when it is asked
    for.

    Args:
        device: where to.
        normalization: of the images whose numbers are in a worker's report, on the device.
        memory_format: of tensors [batch, C, H, W] there; None: as they are made.
    """

    def __init__(
        self,
        device: torch.device,
        normalization: Normalization | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> None:
        self._device = device
        self._normalization = normalization
        self._format = memory_format
        self._seconds = 0.0

    def _finished(self, tensor: torch.Tensor, is_pixels: bool) -> torch.Tensor:
        """A tensor of the device, normalised and in the memory format that was asked for."""
        if is_pixels:
            assert self._normalization is not None
            return self._normalization.normalized(tensor, memory_format=self._format)
        if self._format is None or tensor.layout is not torch.strided or tensor.ndim != 4:
            return tensor
        return tensor.contiguous(memory_format=self._format)

    def await_device(self) -> None:
        """Waits while the device has too much in its queue."""

    def receive(self, deliveries: Iterator[Delivered]) -> Delivered:
        """The next delivery; raises what `next` raises."""
        return next(deliveries)

    def move(self, delivered: Delivered) -> Any:
        """The batch of the delivery that was received last, on the device."""
        began = time.perf_counter()
        numbers = itertools.count()
        pixels = delivered.report.get("pixels", ())

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return self._finished(_moved(tensor, self._device), next(numbers) in pixels)

        batch = map_tensors(delivered.batch, move)
        self._seconds += time.perf_counter() - began
        return batch

    def prefetch(self, deliveries: WorkerIterator) -> None:
        """Starts to copy the next batch if it is ready; neither waits nor raises."""

    def seconds(self) -> float:
        """Seconds that copies have taken, of those that ended since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def finish(self) -> None:
        """At the end of an epoch: waits for what is under way."""


class TorchAccelerator:
    """A device of torch's (with its index), and its copy stream. Any thread may use it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._copy_stream = self._module.Stream(device)

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which what this thread asks of the device goes to the copy stream."""
        context: contextlib.AbstractContextManager[Any] = self._module.stream(self._copy_stream)
        return context

    def current_stream(self) -> Any:
        """The stream to which the caller's kernels go at this moment, on this device."""
        return self._module.current_stream(self.device)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this process on the device; asynchronously if it is pinned."""
        return tensor.to(self.device, non_blocking=tensor.is_pinned())

    def convert(self, tensor: torch.Tensor, step: Step) -> torch.Tensor:
        """What a step makes of a tensor that `copy` gave."""
        return step(tensor)

    def mark(self, stream: Any = None) -> Any:
        """An event, which comes when a stream has done all that it was asked for; without a
        stream: the copy stream, with the time.
        """
        event = self._module.Event(enable_timing=stream is None)
        event.record(self._copy_stream if stream is None else stream)
        return event

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """The memory of a tensor that is dropped is used again only when a stream is through
        with what it is asked for until then.
        """
        tensor.record_stream(stream)


# one a device and process, since the allocator keeps the memory of each stream apart
_accelerator = functools.cache(TorchAccelerator)


def accelerator_of(device: torch.device) -> TorchAccelerator:
    """The accelerator of a device; without an index, of the one that is current."""
    if device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return _accelerator(device)


def transfer_to(
    device: torch.device | str | int,
    normalization: Normalization | None = None,
    memory_format: torch.memory_format | None = None,
) -> Transfer:
    """The transfer of an epoch's batches to a device."""
    target = torch.device(device)
    if target.type in _STREAMED and torch.get_device_module(target).is_available():
        return CudaPrefetcher(target, normalization, memory_format)
    return Transfer(target, normalization, memory_format)


class _Copy(NamedTuple):
    """A batch on its way to the device."""

    batch: Any
    made: list[torch.Tensor]  # its tensors that the copy stream has made
    is_whole: bool  # nothing is left to be moved
    done: Any  # event of the copy stream


class CudaPrefetcher(Transfer):
    """The transfer to a device with streams; see NOTE [ CUDA prefetcher ]."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self._early: Delivered | Exception | None = None  # taken before it was asked for
        self._started: _Copy | None = None  # of what was taken early
        # the source of each copy, which may still be read, and the events around it
        self._copies: deque[tuple[Delivered, Any, Any]] = deque()
        # for each batch, an event after the kernels of those before it
        self._handed: deque[Any] = deque()

    @functools.cached_property
    def _accelerator(self) -> TorchAccelerator:
        return accelerator_of(self._device)

    def await_device(self) -> None:
        self._await_all_but(_QUEUED - 1)

    def _await_all_but(self, number: int) -> None:
        while len(self._handed) > number:
            if self._handed[0].query():
                self._handed.popleft()
            else:
                time.sleep(_NAP)

    def receive(self, deliveries: Iterator[Delivered]) -> Delivered:
        early = self._early
        self._early = None
        if early is None:
            return next(deliveries)
        if isinstance(early, Exception):
            try:
                raise early
            finally:
                del early  # the traceback holds this frame
        return early

    def move(self, delivered: Delivered) -> Any:
        copy = self._started or self._start(delivered)
        self._started = None
        accelerator = self._accelerator
        if copy.made:
            stream = accelerator.current_stream()
            stream.wait_event(copy.done)
            for tensor in copy.made:
                accelerator.keep(tensor, stream)
            self._handed.append(accelerator.mark(stream))
        self._settle()
        return copy.batch if copy.is_whole else move_to_device(copy.batch, accelerator.device)

    def prefetch(self, deliveries: WorkerIterator) -> None:
        if self._early is not None or not deliveries.is_ready():
            return
        try:
            early = next(deliveries)
        except Exception as error:  # a worker has died just now: said when the batch is asked for
            self._early = error.with_traceback(None)
            return
        self._early = early
        if "failure" in early.report or early.report.get("exhausted"):
            return
        tensors = tensors_of(early.batch)
        # copies of others would keep this process waiting
        if all(_is_copyable(t) and (not t.numel() or t.is_pinned()) for t in tensors):
            # as where the device's memory is full: tried again when the batch is asked for
            with contextlib.suppress(Exception):
                self._started = self._start(early)

    def _start(self, delivered: Delivered) -> _Copy:
        """Begins to copy a batch."""
        accelerator = self._accelerator
        began = accelerator.mark()
        made: list[torch.Tensor] = []
        numbers = itertools.count()
        pixels = delivered.report.get("pixels", ())

        def move(tensor: torch.Tensor) -> torch.Tensor:
            finished = functools.partial(self._finished, is_pixels=next(numbers) in pixels)
            if not _is_copyable(tensor):
                return tensor
            made.append(accelerator.convert(accelerator.copy(tensor), finished))
            return made[-1]

        try:
            with accelerator.copying():
                batch = map_tensors(delivered.batch, move)
        finally:  # where it failed too: what has begun is still reading
            done = accelerator.mark()
            self._copies.append((delivered, began, done))
        return _Copy(batch, made, len(made) == next(numbers), done)

    def _settle(self) -> None:
        """Frees the sources of the copies that are done."""
        while self._copies and self._copies[0][-1].query():
            _, began, done = self._copies.popleft()
            self._seconds += began.elapsed_time(done) / 1000  # by the device's clock

    def finish(self) -> None:
        self._await_all_but(0)  # else short epochs would pile up
        self._await_copies()

    def _await_copies(self) -> None:
        if self._copies:
            self._copies[-1][-1].synchronize()
            self._settle()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self._await_copies()


def _is_copyable(tensor: torch.Tensor) -> bool:
    """True if `record_stream` knows its memory. Others (sparse, nested, quantized, those that do
    their own dispatch) go straight.
    """
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )
