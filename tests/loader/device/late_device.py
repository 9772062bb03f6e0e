"""An accelerator that is as late as one may be: a stream does nothing before somebody waits for it.

What a real one would do to a careless program happens here for sure: memory holds poison until its
copy has run; a source that is gone when its copy runs gives none; memory that is dropped while a
kernel on another stream is still to read it is overwritten, unless `keep` was called for that
stream. `hazards` lists the latter two.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

POISON, REUSED = 0xAB, 0xCD


class Stream:
    def __init__(self, owner: LateAccelerator, name: str) -> None:
        self.owner = owner
        self.name = name
        # with the memory that is read
        self.ops: deque[tuple[Callable[[], None], int | None]] = deque()

    def ask(self, op: Callable[[], None], reads: int | None = None) -> None:
        self.ops.append((op, reads))

    def run(self, until: Event | None = None) -> None:
        while self.ops and not (until is not None and until.come):
            self.ops.popleft()[0]()

    def wait_event(self, event: Event) -> None:
        self.owner.log.append(("wait", self.name))
        self.ask(lambda: event.stream.run(event))


class Event:
    def __init__(self, owner: LateAccelerator, stream: Stream) -> None:
        self.owner = owner
        self.stream, self.come, self.polls, self.tick = stream, False, 0, 0

    def query(self) -> bool:
        self.polls += 1
        patience = self.owner.patience
        if patience is not None and self.polls >= patience:
            self.stream.run(self)
        return self.come

    def synchronize(self) -> None:
        self.stream.run(self)

    def elapsed_time(self, done: Event) -> float:
        assert self.come and done.come and self.stream is done.stream is self.owner.side
        return 1000.0 * (done.tick - self.tick)


class LateAccelerator:
    """Streams, events and memory, all in this process; tensors "on" it are tensors of the CPU.

    Args:
        patience: how often an event must be asked whether it has come before it does by itself;
            None: never by itself.
    """

    def __init__(self, patience: int | None = 3) -> None:
        self.device = torch.device("cpu")
        self.patience = patience
        self.side, self.main = Stream(self, "side"), Stream(self, "main")
        self.of_the_user = [self.main]
        self.current = self.main
        self.log: list[tuple[Any, ...]] = []
        self.hazards: list[str] = []
        self.kept: dict[int, set[str]] = {}  # memory -> streams
        self.living = 0  # tensors that copies have made
        self.failures = 0  # of the copies that follow
        self._ticks = 0
        self._is_copying = False

    # -- what `CudaPrefetcher` asks for

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        self._is_copying = True
        try:
            yield
        finally:
            self._is_copying = False

    def current_stream(self) -> Stream:
        return self.current

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._is_copying
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("no memory left on the device")
        made = torch.empty_like(tensor, requires_grad=False)
        made.untyped_storage().fill_(POISON)
        alias, source = made.detach(), weakref.ref(tensor)
        if tensor.is_pinned():
            self.side.ask(lambda: self._arrive(alias, source()))
        elif tensor.numel():
            self.side.run()  # the driver waits for the stream
            self._arrive(alias, tensor)
        self.log.append(("copy", "pinned" if tensor.is_pinned() else "pageable"))
        return self._counted(made, alias)

    def convert(
        self, tensor: torch.Tensor, step: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        assert self._is_copying
        # `made` of poison, until the stream comes to it
        made, source = step(tensor), tensor.detach()
        if made is tensor:
            return tensor
        made.untyped_storage().fill_(POISON)
        alias = made.detach()

        def run() -> None:
            alias.copy_(step(source))

        self.side.ask(run)
        self.log.append(("convert", str(tensor.dtype)))
        return self._counted(made, alias)

    def _counted(self, made: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
        self.living += 1
        weakref.finalize(made, self._dropped, alias, made.data_ptr()).atexit = False
        return made

    def mark(self, stream: Stream | None = None) -> Event:
        event = Event(self, stream or self.side)

        def come() -> None:
            self._ticks += 1
            event.come, event.tick = True, self._ticks

        event.stream.ask(come)
        return event

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.log.append(("keep", stream.name))
        self.kept.setdefault(tensor.data_ptr(), set()).add(stream.name)

    # -- what the user's code does

    def another_stream(self) -> Stream:
        self.of_the_user.append(Stream(self, f"user {len(self.of_the_user)}"))
        return self.of_the_user[-1]

    @contextlib.contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        try:
            yield
        finally:
            self.current = before

    def kernel(self, tensor: torch.Tensor, found: list[torch.Tensor]) -> None:
        """Asks the current stream for a kernel that reads a tensor into a list."""
        alias = tensor.detach()
        self.current.ask(lambda: found.append(alias.clone()), tensor.data_ptr())

    # -- memory

    def _arrive(self, made: torch.Tensor, source: torch.Tensor | None) -> None:
        if source is None:
            self.hazards.append("a source was gone before its copy was done")
        else:
            made.copy_(source.detach())

    def _dropped(self, alias: torch.Tensor, memory: int) -> None:
        self.living -= 1
        kept = self.kept.pop(memory, set()) | {self.side.name}
        for stream in self.of_the_user:
            if stream.name not in kept and memory and any(read == memory for _, read in stream.ops):
                self.hazards.append(
                    f"memory was reused before stream {stream.name} was through with it"
                )
                self.side.ask(lambda: alias.untyped_storage().fill_(REUSED))


def is_pinned(tensor: torch.Tensor) -> bool:
    """Stands in for `Tensor.is_pinned`, which says no of an empty one too."""
    return bool(getattr(tensor, "is_fake_pinned", False)) and bool(tensor.numel())


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Stands in for `Tensor.pin_memory`."""
    pinned = tensor.detach().clone()
    pinned.is_fake_pinned = True  # type: ignore[attr-defined]
    return pinned
