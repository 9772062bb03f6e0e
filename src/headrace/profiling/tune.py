"""Finds the largest batch size that fits into memory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from headrace.arguments import check_integer
from headrace.errors import BudgetError, ConfigError, warn
from headrace.memory.budget import format_size
from headrace.order.seeding import preserved_rng
from headrace.profiling.room import HostRoom, describe, drop_frames, finish_kernels, free_caches, is_out_of_memory

logger: logging.Logger = logging.getLogger("headrace.profiling")

_STEPS = 2  # of each size: what an optimizer holds comes with the first, and is there beside the second
_CEILING = 1 << 20  # where no limit is given: nobody wants more, and a step that takes no notice of its size would never end
_NEAR = 32  # what memory on the host allows is neared by steps of at least a thirty-second


def find_max_batch_size(
    step: Callable[[int], Any],
    start: int = 64,
    limit: int | None = None,
    *,
    multiple_of: int = 1,
    reset: Callable[[], Any] | None = None,
    max_memory_usage: float | int | str = 0.9,
) -> int:
    """The largest batch size with which a training step runs, twice in a row, in the memory that there is.

    It is tried out: the size doubles as long as the step runs, or is halved until it does, and the rest is found by bisection, with some
    2 log2(size) sizes in all. An error that says "out of memory" means too large, on a device (CUDA, ROCm, XPU, MPS) or on the host
    (`MemoryError`, torch's allocator, a `BudgetError` of headrace). A host mostly raises nothing, but kills: so the growth of this
    process is measured, and a size that would take more than there is, is not tried; a warning says so. The first size has nothing
    before it: begin with one that is safe.

    ::

        def step(batch_size):
            images = torch.randn(batch_size, 3, 224, 224, device="cuda")
            loss = model(images).logsumexp(1).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        batch_size = find_max_batch_size(step, multiple_of=8)

    The steps are real ones: they change weights, the optimizer's state, statistics of normalisation and schedules. Restore them with
    `reset`, or make them anew afterwards. Only the global random generators (of Python, NumPy, and torch's of the CPU) are put back here.
    A batch of the real shapes counts: where they differ, take the largest; a batch from a dataset that has fewer samples tells nothing.

    With several ranks, each finds its own: call it on all of them at once (a step of DistributedDataParallel needs all ranks, which
    must then agree on every size: better take the bare model there), and train with the least, by
    ``torch.distributed.all_reduce(size, op=ReduceOp.MIN)``.

    Args:
        step: does all that a training step does with a batch of so many samples: makes it, forward, backward, the optimizer. What it
            returns is dropped.
        start: the size that is tried first.
        limit: the largest that is tried; None: 1,048,576, and a warning if even that runs.
        multiple_of: only multiples of it; start and limit are rounded down, a smaller start up to it.
        reset: called after each size that ran or did not fit, the last one too.
        max_memory_usage: what steps may take of the host's memory: a fraction of what is free (in a container: of what its cgroup
            leaves, and divided by the ranks of a machine), or bytes ("4GB").

    Returns:
        The size. Leave some of it away where other things will want memory too: validation, other shapes, fragments.

    Raises:
        ConfigError: an argument makes no sense.
        BudgetError: not even the smallest size fits.
        Exception: anything else that `step` raises, with a note of the size.
    """
    _check(step, start, limit, multiple_of, reset)
    most = (_CEILING if limit is None else limit) // multiple_of
    search = _Search(step, reset, multiple_of, HostRoom(max_memory_usage))
    with preserved_rng():
        size = search.largest(max(1, min(start // multiple_of, most)), most) * multiple_of
    if not size:
        raise BudgetError(
            f"find_max_batch_size: not even a batch of {multiple_of} fits ({search.message}): use a smaller model, smaller samples, or "
            "activation checkpointing"
        ) from search.error
    if size == most * multiple_of and limit is None:
        warn(f"find_max_batch_size: a batch of {size:,} still runs, and larger ones were not tried: check that the step uses its size")
    logger.info("find_max_batch_size: %d", size)
    return size


def _check(step: Any, start: Any, limit: Any, multiple_of: Any, reset: Any) -> None:
    for name, value in (("start", start), ("limit", limit), ("multiple_of", multiple_of)):
        check_integer(f"find_max_batch_size: {name}", value, 1, optional=name == "limit")
    if limit is not None and limit < max(start, multiple_of):
        larger = f"start={start}" if limit < start else f"multiple_of={multiple_of}"
        raise ConfigError(f"find_max_batch_size: limit={limit} is below {larger}: use a larger limit, or a smaller {larger.split('=')[0]}")
    if not callable(step):
        raise ConfigError(f"find_max_batch_size: step must be a callable that takes a batch size, not {step!r}")
    if reset is not None and not callable(reset):
        raise ConfigError(f"find_max_batch_size: reset must be a callable without arguments, not {reset!r}")


class _Search:
    """Tries sizes, in units.

    Args:
        step, reset: the user's.
        unit: samples.
        room: on the host.

    Attributes:
        error: the last that said out of memory, emptied of what it held.
        message: the same in a line.
    """

    def __init__(self, step: Callable[[int], Any], reset: Callable[[], Any] | None, unit: int, room: HostRoom) -> None:
        self._step, self._reset, self._unit, self._room = step, reset, unit, room
        self.error: Exception | None = None
        self.message = ""

    def largest(self, start: int, limit: int) -> int:
        """The largest number of units in [1, limit] that fits, if a size fits wherever a larger one does; 0: none."""
        fits, fails, number = 0, limit + 1, start
        while fails - fits > 1:
            allowed = self._room.most(number * self._unit) // self._unit
            if allowed < number and fits > 1 and self._room.sizes == 1:  # how much of it each sample takes, a smaller size says
                self._try(fits // 2 * self._unit)
                continue
            if allowed < number:
                if allowed - fits <= fits // _NEAR:
                    self._stopped(fits, number)
                    break
                number = allowed
            if self._try(number * self._unit):
                fits = number
            else:
                fails = number
            number = min(2 * fits, limit) if fails > limit else (fits + fails) // 2
        return fits

    def _stopped(self, fits: int, number: int) -> None:
        size = number * self._unit
        warn(f"find_max_batch_size: {fits * self._unit} runs; {size} was not tried, since it would take {self._room.needs(size)}")

    def _try(self, size: int) -> bool:
        """True if a size fits."""
        outside = sys.exception()
        try:
            taken = self._room.run(size, lambda: self._run(size))
        except Exception as error:
            if not is_out_of_memory(error):
                error.add_note(f"headrace: in find_max_batch_size, with a batch size of {size}")
                raise
            drop_frames(error, outside)
            self.error, self.message = error, describe(error)
            logger.info("batch size %d: %s", size, self.message)
            fits = False
        else:
            logger.info("batch size %d: runs; the process has grown by %s", size, format_size(taken))
            fits = True
        free_caches()
        if self._reset is not None:
            self._reset()
        return fits

    def _run(self, size: int) -> None:
        for _ in range(_STEPS):
            self._step(size)
            finish_kernels()
