"""Finds the largest batch size that fits into memory.

A device reports with an error that memory ran out. A host mostly does not: the kernel kills the
process. So the growth of the process is measured, and what a larger step would take is predicted
from smaller ones.
"""

from __future__ import annotations

import dataclasses
import errno
import gc
import logging
import re
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from headrace.arguments import check_callable, check_integer, checks_keywords
from headrace.errors import BudgetError, ConfigError, warn
from headrace.memory.budget import MemoryBudget, format_size
from headrace.memory.limits import Limit, memory_limits
from headrace.order import detect_world
from headrace.order.seeding import preserved_rng
from headrace.profiling.running import devices_in_use, finish_kernels

if sys.platform != "win32":
    import resource

logger: logging.Logger = logging.getLogger("headrace.profiling")

_STEPS = 2  # of each size: the optimizer's state is made at the end of the first
_CEILING = 1 << 20  # without a limit: a step that ignores its size would never end
_NEAR = 32  # the host's memory is approached by steps of at least a thirty-second
_LOOK_EVERY = 0.002  # seconds between two looks at the process's memory
_WORDS = re.compile(
    # CUDA, HIP, XPU, MPS; cuBLAS, cuDNN, cuSOLVER; torch's allocator of the host; cuDNN's word for
    # sizes that it has no room for; MPS
    r"out of memory|_ALLOC_FAILED|DefaultCPUAllocator: (can't allocate|not enough) "
    r"memory|CUDNN_STATUS_NOT_SUPPORTED|Invalid buffer size"
    r"|Cannot allocate memory",
    re.IGNORECASE,
)


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
    door = "find_max_batch_size"
    check_integer(f"{door}: start", start, 1)
    check_integer(f"{door}: limit", limit, 1, optional=True)
    check_integer(f"{door}: multiple_of", multiple_of, 1)
    for name, value in {"start": start, "multiple_of": multiple_of}.items():
        if limit is not None and limit < value:
            raise ConfigError(
                f"{door}: limit={limit} is below {name}={value}: use a larger limit, or a smaller "
                f"{name}"
            )
    check_callable(f"{door}: step", step, optional=False)
    check_callable(f"{door}: reset", reset)
    most = (_CEILING if limit is None else limit) // multiple_of
    search = _Search(step, reset, multiple_of, HostRoom(max_memory_usage))
    with preserved_rng():
        size = search.largest(max(1, min(start // multiple_of, most)), most) * multiple_of
    if not size:
        raise BudgetError(
            f"{door}: not even a batch of {multiple_of} fits ({search.message}): use "
            "a smaller model, smaller samples, or activation checkpointing"
        ) from search.error
    if size == most * multiple_of and limit is None:
        warn(
            f"{door}: a batch of {size:,} still runs, and larger ones were not "
            "tried: check that the step uses its size"
        )
    logger.info("find_max_batch_size: %d", size)
    return size


class HostRoom:
    """Memory of the host that steps of growing sizes take, and the size that would still fit.

    Args:
        max_memory_usage: what all of it may take: a fraction of what is free, or bytes ("4GB").
        limits: lists the limits on memory as they are now.
        own: gives the bytes of this process.
        peak: runs something, and gives the most bytes that this process had meanwhile.
    """

    def __init__(
        self,
        max_memory_usage: float | int | str = 0.9,
        *,
        limits: Callable[[], Sequence[Limit]] = memory_limits,
        own: Callable[[], int] | None = None,
        peak: Callable[[Callable[[], None]], int] | None = None,
    ) -> None:
        self._usage = max_memory_usage
        self._ranks = detect_world().local_world_size
        self._limits = limits
        self._own = own or own_bytes
        self._peak = peak or peak_during
        self._before = self._own()
        self.taken: dict[int, int] = {}  # size -> bytes beyond `_before`, of the sizes that ran
        self._limit()

    def _limit(self) -> int:
        """Bytes that steps may take: what this process, and other ranks likewise, have grown since
        the first step counts as free.
        """
        grown = max(0, self._own() - self._before) * self._ranks
        limits = [
            dataclasses.replace(limit, used=max(0, limit.used - grown)) for limit in self._limits()
        ]
        return MemoryBudget(self._usage, local_world_size=self._ranks, limits=limits).limit

    def run(self, size: int, function: Callable[[], None]) -> int:
        """Runs a step of some size, and returns the bytes that it took."""
        taken = max(0, self._peak(function) - self._before)
        self.taken[size] = taken
        return taken

    def most(self, size: int) -> int:
        """The largest size, up to this one, that should fit."""
        last = max(self.taken, default=size)
        if size <= last:
            return size
        room = self._limit() - self.taken[last]
        slope = self._slope(last)
        if slope * (size - last) <= room:
            return size
        if slope:
            return last + max(0, int(room / slope))
        return last

    def _slope(self, last: int) -> float:
        """Bytes for each further sample, rather too many than too few: with one size known, all
        that it took.
        """
        if len(self.taken) == 1:
            return self.taken[last] / last
        sizes = sorted(self.taken)[:-1]
        distant = [size for size in sizes if last - size >= last // 8] or sizes[:1]
        slopes = [
            (self.taken[last] - self.taken[size]) / (last - size)
            for size in (distant[0], distant[-1])
        ]
        return max(0.0, *slopes)

    def needs(self, size: int) -> str:
        """The memory of a step of some size, in words."""
        last = max(self.taken)
        needed = format_size(self.taken[last] + self._slope(last) * (size - last))
        least = min(self._limits(), key=lambda limit: limit.headroom)
        return (
            f"about {needed} of the host's memory, of which {format_size(self._limit())} may be "
            f"taken (max_memory_usage={self._usage!r} of what is free under {least.name})"
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
        self._step = step
        self._reset = reset
        self._unit = unit
        self._room = room
        self.error: Exception | None = None
        self.message = ""

    def largest(self, start: int, limit: int) -> int:
        """The largest number of units in [1, limit] that fits, if a size fits wherever a larger
        one does. 0: none.
        """
        fits = 0
        fails = limit + 1
        number = start
        has_halved = False
        while fails - fits > 1:
            allowed = self._room.most(number * self._unit) // self._unit
            # a second, smaller size shows how much each sample takes
            if allowed < number and fits > 1 and len(self._room.taken) == 1 and not has_halved:
                has_halved = True
                self._try(fits // 2 * self._unit)
                continue
            if allowed < number:
                if allowed - fits <= fits // _NEAR:
                    size = number * self._unit
                    warn(
                        f"find_max_batch_size: {fits * self._unit} runs; {size} was not tried, "
                        f"since it would take {self._room.needs(size)}"
                    )
                    break
                number = allowed
            if self._try(number * self._unit):
                fits = number
            else:
                fails = number
            number = min(2 * fits, limit) if fails > limit else (fits + fails) // 2
        return fits

    def _try(self, size: int) -> bool:
        """True if a size fits."""
        outside = sys.exception()
        fits = True
        try:
            taken = self._room.run(size, lambda: self._run(size))
            logger.info(
                "batch size %d: runs; the process has grown by %s", size, format_size(taken)
            )
        except Exception as error:
            if not is_out_of_memory(error):
                error.add_note(f"headrace: in find_max_batch_size, with a batch size of {size}")
                if self._reset is not None:
                    self._reset()
                raise
            drop_frames(error, outside)
            self.error = error
            self.message = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            logger.info("batch size %d: %s", size, self.message)
            fits = False
        free_caches()
        if self._reset is not None:
            self._reset()
        return fits

    def _run(self, size: int) -> None:
        for _ in range(_STEPS):
            self._step(size)
            finish_kernels()


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error, or one that it was raised from, reports that memory ran out, on a device
    or on the host.
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        # headrace's BudgetError and NumPy's are MemoryErrors
        if isinstance(one, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(one, OSError) and one.errno == errno.ENOMEM:
            return True
        if isinstance(one, RuntimeError) and _WORDS.search(str(one)):
            return True
        seen.add(id(one))
        one = one.__cause__
    return False


def drop_frames(error: BaseException, outside: BaseException | None) -> None:
    """Empties the frames of an error and of those that it was raised from or while: their variables
    are the tensors that there was no room for. `outside`, which was being handled before, stays.
    """
    waiting = [error]
    seen = {id(outside)}
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [other for other in (one.__cause__, one.__context__) if other is not None]


def free_caches() -> None:
    """Frees cycles of objects, and memory that torch caches for devices in use."""
    gc.collect()
    for device in devices_in_use():
        device.empty_cache()


def own_bytes() -> int:
    """Bytes of memory that this process has now (RSS)."""
    return int(psutil.Process().memory_info().rss)


def peak_during(run: Callable[[], None]) -> int:
    """Calls a function, and returns the most bytes that this process had meanwhile.

    A thread looks every two milliseconds. The kernel's own record, which misses nothing, counts
    where it was broken.
    """
    peak = own_bytes()
    before = _record()
    ended = threading.Event()

    def look() -> None:
        nonlocal peak
        while not ended.wait(_LOOK_EVERY):
            peak = max(peak, own_bytes())

    watch = threading.Thread(target=look, name="headrace-memory", daemon=True)
    watch.start()
    try:
        run()
    finally:
        ended.set()
        watch.join()
    after = _record()
    return max(peak, own_bytes(), after if after > before else 0)


def _record() -> int:
    """The most bytes that this process ever had. 0: the system has no record."""
    if sys.platform == "win32":
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
