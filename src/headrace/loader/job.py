"""Who carries the batches of an epoch from the workers to the parent?

A `Job`: a plain torch DataLoader, whose dataset, batch sampler and collate function speak tickets, and its ring. A `Loader` has
one at a time, and a second one only while two of its iterators are alive.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from headrace.errors import WorkerError
from headrace.loader.batches import Plan
from headrace.loader.config import DataLoaderConfig
from headrace.loader.fetch import Collate, Fetch, RemoteTraceback, WorkerInit
from headrace.memory.ring import Delivered, Ring
from headrace.order import Ticket


class _Dispatch:
    """The batch sampler that torch sees: the plan's tickets, each with a slot of the ring."""

    def __init__(self, plan: Plan, ring: Ring) -> None:
        self.plan, self._ring = plan, ring
        self.handed_out = 0
        self.begin(0, 0)

    def begin(self, epoch: int, step: int) -> None:
        self._epoch, self._step, self.handed_out = epoch, step, 0

    def __iter__(self) -> Iterator[Ticket]:
        for ticket in self.plan.tickets(self._epoch, self._step):
            ticket.slot = self._ring.take()
            self.handed_out += 1
            yield ticket

    def __len__(self) -> int:
        return self.plan.steps() or 0


class Job:
    """Workers, their ring, and the torch DataLoader that drives them.

    Args:
        fetch: makes samples of tickets.
        plan: makes the tickets.
        config: resolved.
        collate: the collate function; None: a sample is a batch.
    """

    def __init__(self, fetch: Fetch, plan: Plan, config: DataLoaderConfig, collate: Callable[[list[Any]], Any] | None) -> None:
        workers = config.num_workers or 0
        self.ring = Ring(workers * (config.prefetch_factor or 1) + 2)
        self.dispatch = _Dispatch(plan, self.ring)
        parallel: dict[str, Any] = {}
        if workers:
            parallel = {
                "prefetch_factor": config.prefetch_factor,
                "persistent_workers": config.persistent_workers,
                "multiprocessing_context": config.multiprocessing_context,
                "worker_init_fn": WorkerInit(config.worker_init_fn),
                "timeout": config.timeout,
            }
        into_slots: Any = Collate(self.ring, collate)
        self._loader: DataLoader[Any] = DataLoader(
            fetch,
            batch_sampler=self.dispatch,
            collate_fn=into_slots,
            num_workers=workers,
            pin_memory=bool(config.pin_memory),
            generator=torch.Generator().manual_seed(0),  # torch draws a base seed from it, and not from the user's generator
            **parallel,
        )
        self.is_lasting = not workers or bool(config.persistent_workers)

    def start(self, epoch: int, step: int) -> Iterator[Delivered]:
        """The deliveries of an epoch from a step on. What a lasting job had still on its way is dropped."""
        self.dispatch.begin(epoch, step)
        return iter(self._loader)


def failure_of(delivered: Delivered) -> Exception | None:
    """The error that a worker delivered instead of a batch, with its place and its traceback, ready to be raised."""
    said = delivered.report.get("failure")
    if said is None:
        return None
    data, text, worker = said
    error: Exception = pickle.loads(data)
    epoch, step = delivered.report["epoch"], delivered.report["step"]
    error.add_note(f"headrace: in worker {worker}, epoch {epoch}, batch {step}")
    error.__cause__ = RemoteTraceback(text)
    return error


def death_of(error: RuntimeError, epoch: int, step: int, timeout: float) -> WorkerError:
    """What to raise where torch says that a worker is gone, or that none answered in time."""
    text = str(error)
    if "timed out" in text:
        return WorkerError(
            f"no batch within timeout={timeout:g} s in epoch {epoch}, waiting for batch {step}: a read hangs, or takes longer; "
            "look at the workers with `py-spy dump --pid`, or raise timeout"
        )
    return WorkerError(
        f"a worker died in epoch {epoch}, while batch {step} was waited for ({text.splitlines()[0]}): if it was killed for want of "
        "memory, take fewer workers or a smaller prefetch_factor; the loader starts new workers with its next iterator"
    )
