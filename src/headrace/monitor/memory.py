"""Measures used and available memory.

`MemoryMonitor` limits how often it measures, so it can be called with every batch.
"""

from __future__ import annotations

import os
import time
from typing import Any

from headrace.arguments import check_seconds, checks_keywords
from headrace.memory.budget import parse_size
from headrace.memory.limits import memory_limits, tightest
from headrace.memory.processes import renew_after_fork
from headrace.monitor.stats import pss_of

GB = 1e9
"""Bytes of a GB, in all names that end in ``_gb``."""


class MemoryMonitor:
    """Monitors the tightest memory limit: the machine's, a cgroup's (containers, SLURM) or the
    process's own.

    It uses no thread and measures only when called, so peaks between two measurements are missed. A
    forked or unpickled copy starts anew in its process.

    Args:
        interval: minimum seconds between two measurements, each of which takes about a millisecond.

    Raises:
        ConfigError: `interval` is not a number of at least 0.
    """

    @checks_keywords
    def __init__(self, interval: float = 1.0) -> None:
        self.interval: float = check_seconds("interval", interval)
        self._forget()

    def _forget(self) -> None:
        self._measured_at: float | None = None
        self._peak_used = 0
        self._peak_pss = 0
        renew_after_fork(self)

    after_fork = _forget

    def start_monitoring(self) -> None:
        """Clears the peaks, and measures."""
        self._forget()
        self.update()

    def update(self) -> bool:
        """Measures if `interval` seconds have passed since the last measurement. Cheap enough to
        call with every batch.

        Returns:
            True if it measured.
        """
        now = time.monotonic()
        if self._measured_at is not None and now - self._measured_at < self.interval:
            return False
        self._measured_at = now
        self._limit = tightest(memory_limits())
        self._pss = pss_of(os.getpid())
        self._peak_used = max(self._peak_used, self._limit.used)
        self._peak_pss = max(self._peak_pss, self._pss)
        return True

    def get_memory_stats(self) -> dict[str, Any]:
        """Returns the last measurement, which is never older than `interval`. A GB is 1e9 bytes
        (`GB`).

        Returns:
            ``limit_gb`` and ``limit_source``: the tightest limit and its name. ``used_gb`` and
                ``available_gb``: memory under this limit, over all processes that it covers;
                ``percent``: used share of the limit. ``process_pss_gb``: memory of this process
                alone, with shared pages in proportion. ``peak_used_gb`` and
                ``peak_process_pss_gb``: maxima since the start, the first under whichever limit was
                the tightest at the time.
        """
        self.update()
        limit = self._limit
        return {
            "used_gb": limit.used / GB,
            "available_gb": limit.headroom / GB,
            "percent": 100 * limit.used / limit.total if limit.total else 100.0,
            "limit_gb": limit.total / GB,
            "limit_source": limit.name,
            "process_pss_gb": self._pss / GB,
            "peak_used_gb": self._peak_used / GB,
            "peak_process_pss_gb": self._peak_pss / GB,
        }

    @checks_keywords
    def check_memory_constraint(self, nbytes: int | str) -> bool:
        """True if `nbytes` more bytes (such as ``500_000_000`` or ``"500MB"``) fit under the
        tightest limit, measured now.

        Raises:
            ConfigError: `nbytes` is not a size.
        """
        return parse_size(nbytes, "nbytes") <= tightest(memory_limits()).headroom

    def __repr__(self) -> str:
        return f"MemoryMonitor(interval={self.interval!r})"

    def __reduce__(self) -> Any:
        return type(self), (self.interval,)
