"""Detects out-of-memory errors, and predicts the host memory that a larger step would use.

A device says so with an error, and a host sometimes does. Mostly it says nothing: the kernel kills
the process that went too far. So the growth of the process is measured, and what a larger step
would take is told from that of smaller ones.
"""

from __future__ import annotations

import dataclasses
import errno
import gc
import re
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from headrace.memory.budget import MemoryBudget, format_size
from headrace.memory.limits import Limit, memory_limits
from headrace.order import detect_world

if sys.platform != "win32":
    import resource

_WORDS = re.compile(
    # CUDA, HIP, XPU, MPS | cuBLAS, cuDNN, cuSOLVER | torch's allocator of the host | what cuDNN
    # says of sizes that it has no room for | MPS
    r"out of memory|_ALLOC_FAILED|DefaultCPUAllocator: (can't allocate|not enough) "
    r"memory|CUDNN_STATUS_NOT_SUPPORTED|Invalid buffer size"
    r"|Cannot allocate memory",
    re.IGNORECASE,
)
# seconds between two looks at the process while a step runs, each of some microseconds
_LOOK_EVERY = 0.002


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


def drop_frames(error: BaseException, outside: BaseException | None = None) -> None:
    """Empties the frames that an error, and what it was raised from or while, has come through:
    their variables are the tensors that there was no room for.

    Args:
        error: the error.
        outside: an error that was being handled before all that, and is left as it is.
    """
    waiting, seen = [error], {id(outside)}
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [other for other in (one.__cause__, one.__context__) if other is not None]


def _devices_in_use() -> list[Any]:
    """Torch's modules of the devices that this process uses."""
    devices: list[Any] = [
        device
        for device in (torch.cuda, torch.xpu)
        if device.is_available() and device.is_initialized()
    ]
    return [*devices, *([torch.mps] if torch.backends.mps.is_available() else [])]


def free_caches() -> None:
    """Gives memory back that nobody uses: circles of objects, and what torch keeps of devices in
    use.
    """
    gc.collect()
    for device in _devices_in_use():
        device.empty_cache()


def finish_kernels() -> None:
    """Waits for what devices in use are still at: an error that belongs to it comes here."""
    for device in _devices_in_use():
        device.synchronize()


def own_bytes() -> int:
    """Bytes of memory that this process has now (RSS)."""
    return int(psutil.Process().memory_info().rss)


def peak_during(run: Callable[[], None]) -> int:
    """Runs something, and gives the most bytes that this process had meanwhile.

    A thread looks every two milliseconds. The kernel's own record, which misses nothing, counts
    where it was broken: this is where the process has never been so large.
    """
    peak, ended = [own_bytes()], threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_EVERY):
            peak.append(max(peak.pop(), own_bytes()))

    before, watch = _record(), threading.Thread(target=look, name="headrace-memory", daemon=True)
    watch.start()
    try:
        run()
    finally:
        ended.set()
        watch.join()
    after = _record()
    return max(peak[0], own_bytes(), after if after > before else 0)


def _record() -> int:
    """The most bytes that this process ever had; 0 where nobody knows."""
    if sys.platform == "win32":
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class HostRoom:
    """What steps of growing sizes take of the host's memory, and which size would still fit.

    What they take in other processes is not seen, but for what it leaves less.

    Args:
        max_memory_usage: what all of it may take: a fraction of what is free, or bytes ("4GB"); see
            `MemoryBudget`.
        limits: lists the limits on memory as they are now.
        own: gives the bytes of this process.
        peak: runs something, and gives the most bytes that this process had meanwhile.

    Raises:
        ConfigError: `max_memory_usage` makes no sense.
    """

    def __init__(
        self,
        max_memory_usage: float | int | str = 0.9,
        *,
        limits: Callable[[], Sequence[Limit]] = memory_limits,
        own: Callable[[], int] = own_bytes,
        peak: Callable[[Callable[[], None]], int] = peak_during,
    ) -> None:
        self._usage, self._ranks = max_memory_usage, detect_world().local_world_size
        self._limits, self._own, self._peak = limits, own, peak
        self._before = own()
        # (size, bytes beyond `_before`) of what ran, in growing sizes
        self._taken: list[tuple[int, int]] = []
        self._budget()

    def _budget(self) -> MemoryBudget:
        """What there was before the first step: what this process, and other ranks likewise,
        have taken since counts as free.
        """
        grown = max(0, self._own() - self._before) * self._ranks
        limits = [
            dataclasses.replace(limit, used=max(0, limit.used - grown)) for limit in self._limits()
        ]
        return MemoryBudget(self._usage, local_world_size=self._ranks, limits=limits)

    def run(self, size: int, function: Callable[[], None]) -> int:
        """Runs a step of some size, which counts if it raises nothing, and gives the bytes that
        it took.
        """
        taken = max(0, self._peak(function) - self._before)
        self._taken = sorted([*((s, n) for s, n in self._taken if s != size), (size, taken)])
        return taken

    @property
    def sizes(self) -> int:
        """Number of sizes that ran."""
        return len(self._taken)

    def most(self, size: int) -> int:
        """The largest size, up to this one, that should fit; before the first step anything
        does.
        """
        if not self._taken or size <= self._taken[-1][0]:
            return size
        last, taken = self._taken[-1]
        limit, slope = self._budget().limit, self._slope()
        if taken + slope * (size - last) <= limit:
            return size
        return last + max(0, int((limit - taken) / slope)) if slope else last

    def needs(self, size: int) -> str:
        """What a step of some size would take, and what there is, in words."""
        last, taken = self._taken[-1]
        needed, limit = (
            format_size(taken + self._slope() * (size - last)),
            format_size(self._budget().limit),
        )
        least = min(self._limits(), key=lambda limit: limit.headroom)
        limiting = f"max_memory_usage={self._usage!r} of what is free under {least.name}"
        return f"about {needed} of the host's memory, of which {limit} may be taken ({limiting})"

    def _slope(self) -> float:
        """Bytes for each further sample, rather too many than too few: with one size known, all
        that it took.
        """
        last, taken = self._taken[-1]
        if len(self._taken) == 1:
            return taken / last
        others = [
            (size, nbytes) for size, nbytes in self._taken[:-1] if last - size >= last // 8
        ] or self._taken[:1]
        return max(
            0.0, *((taken - nbytes) / (last - size) for size, nbytes in (others[0], others[-1]))
        )


def describe(error: BaseException) -> str:
    """An error in a line."""
    lines: list[Any] = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
