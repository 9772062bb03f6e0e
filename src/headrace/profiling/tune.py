"""Finds the largest batch size that fits into memory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from headrace.arguments import check_integer, checks_keywords
from headrace.errors import BudgetError, ConfigError, warn
from headrace.memory.budget import format_size
from headrace.order.seeding import preserved_rng
from headrace.profiling.room import (
    HostRoom,
    describe,
    drop_frames,
    finish_kernels,
    free_caches,
    is_out_of_memory,
)

logger: logging.Logger = logging.getLogger("headrace.profiling")

# of each size: what an optimizer holds comes with the first, and is there beside the second
_STEPS = 2
# where no limit is given: nobody wants more, and a step that takes no notice of its size would
# never end
_CEILING = 1 << 20
_NEAR = 32  # what memory on the host allows is neared by steps of at least a thirty-second


@checks_keywords
def find_max_batch_size(
    step: Callable[[int], Any],
    start: int = 64,
    limit: int | None = None,
    *,
    multiple_of: int = 1,
    reset: Callable[[], Any] | None = None,
    max_memory_usage: float | int | str = 0.9,
) -> int:
    """Finds the largest batch size with which a training step runs, twice in a row, in the
    available memory.

    The size doubles while the step succeeds, or is halved until it does, and is then refined by
    bisection; about 2 log2(size) sizes are tried. An error that says "out of memory" means that the
    size is too large, on a device (CUDA, ROCm, XPU, MPS) or on the host (`MemoryError`, torch's
    allocator, a `BudgetError` of headrace). A host usually kills the process instead of raising an
    error. Therefore the growth of this process is measured, and a size that would need more than is
    available is not tried, with a warning. There is no measurement before the first size, so start
    with a safe one.

    ```python
    def step(batch_size):
        images = torch.randn(batch_size, 3, 224, 224, device="cuda")
        loss = model(images).logsumexp(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    batch_size = find_max_batch_size(step, multiple_of=8)
    ```

    The steps are real: they change weights, optimizer state, normalisation statistics and
    schedules. Restore them with `reset`, or create them again afterwards. Only the global random
    generators (of Python, NumPy, and torch on the CPU) are restored here. Use batches of real
    shapes, and the largest if shapes differ. A batch from a dataset with fewer samples than the
    size gives no valid result.

    With several ranks, each finds its own size. Call it on all of them at once, with the bare
    model, since a step of DistributedDataParallel needs all ranks, which would have to agree on
    every size. Train with the smallest result, by ``torch.distributed.all_reduce(size,
    op=ReduceOp.MIN)``.

    Args:
        step: a callable that takes a batch size and performs a whole training step: makes the
            batch, forward, backward, optimizer. Its result is ignored.
        start: first size to try.
        limit: largest size to try. None: 1,048,576, with a warning if even that succeeds.
        multiple_of: try only multiples of this number. `start` and `limit` are rounded down to one;
            a smaller `start` is raised to it.
        reset: a callable that is called after each size, whether it succeeded or not, including the
            last one.
        max_memory_usage: host memory that steps may use: a fraction of the free memory (in a
            container: of what its cgroup leaves, divided by the ranks of the machine), or bytes
            ("4GB").

    Returns:
        The size. Use a smaller one if validation, other shapes or fragmentation will need memory
        too.

    Raises:
        ConfigError: an argument is invalid.
        BudgetError: not even the smallest size fits.
        Exception: any other error of `step`, with a note of the size.
    """
    _check(step, start, limit, multiple_of, reset)
    most = (_CEILING if limit is None else limit) // multiple_of
    search = _Search(step, reset, multiple_of, HostRoom(max_memory_usage))
    with preserved_rng():
        size = search.largest(max(1, min(start // multiple_of, most)), most) * multiple_of
    if not size:
        raise BudgetError(
            f"find_max_batch_size: not even a batch of {multiple_of} fits ({search.message}): use "
            "a smaller model, smaller samples, or "
            "activation checkpointing"
        ) from search.error
    if size == most * multiple_of and limit is None:
        warn(
            f"find_max_batch_size: a batch of {size:,} still runs, and larger ones were not "
            "tried: check that the step uses its size"
        )
    logger.info("find_max_batch_size: %d", size)
    return size


def _check(step: Any, start: Any, limit: Any, multiple_of: Any, reset: Any) -> None:
    for name, value in (("start", start), ("limit", limit), ("multiple_of", multiple_of)):
        check_integer(f"find_max_batch_size: {name}", value, 1, optional=name == "limit")
    if limit is not None and limit < max(start, multiple_of):
        larger = f"start={start}" if limit < start else f"multiple_of={multiple_of}"
        raise ConfigError(
            f"find_max_batch_size: limit={limit} is below {larger}: use a larger limit, or a "
            f"smaller {larger.split('=')[0]}"
        )
    if not callable(step):
        raise ConfigError(
            f"find_max_batch_size: step must be a callable that takes a batch size, not {step!r}"
        )
    if reset is not None and not callable(reset):
        raise ConfigError(
            f"find_max_batch_size: reset must be a callable without arguments, not {reset!r}"
        )


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

    def __init__(
        self, step: Callable[[int], Any], reset: Callable[[], Any] | None, unit: int, room: HostRoom
    ) -> None:
        self._step, self._reset, self._unit, self._room = step, reset, unit, room
        self.error: Exception | None = None
        self.message = ""

    def largest(self, start: int, limit: int) -> int:
        """The largest number of units in [1, limit] that fits, if a size fits wherever a larger
        one does; 0: none.
        """
        fits, fails, number = 0, limit + 1, start
        has_halved = False
        while fails - fits > 1:
            allowed = self._room.most(number * self._unit) // self._unit
            # how much of it each sample takes, a smaller size says
            if allowed < number and fits > 1 and self._room.sizes == 1 and not has_halved:
                has_halved = True
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
        warn(
            f"find_max_batch_size: {fits * self._unit} runs; {size} was not tried, since it would "
            f"take {self._room.needs(size)}"
        )

    def _try(self, size: int) -> bool:
        """True if a size fits."""
        outside = sys.exception()
        try:
            taken = self._room.run(size, lambda: self._run(size))
        except Exception as error:
            if not is_out_of_memory(error):
                error.add_note(f"headrace: in find_max_batch_size, with a batch size of {size}")
                if self._reset is not None:
                    self._reset()
                raise
            drop_frames(error, outside)
            self.error, self.message = error, describe(error)
            logger.info("batch size %d: %s", size, self.message)
            fits = False
        else:
            logger.info(
                "batch size %d: runs; the process has grown by %s", size, format_size(taken)
            )
            fits = True
        free_caches()
        if self._reset is not None:
            self._reset()
        return fits

    def _run(self, size: int) -> None:
        for _ in range(_STEPS):
            self._step(size)
            finish_kernels()
