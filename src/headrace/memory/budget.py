"""The memory budget of a process, and the reservations made from it.

A process has one ledger. It measures the headroom under the tightest limit once, at its first use,
and all budgets of the process draw on it: whatever holds memory (store, cache, ring, read-ahead)
reserves its bytes first, or is refused.

NOTE [ Releases and the garbage collector ]
A reservation may be collected at any allocation, even in a thread that holds the lock and is
half-way through a change. So the ledger holds weak references alone, by numbers that are never used
twice, and copies them by one call before it looks at them.

NOTE [ Shares and processes ]
A forked child goes on with a copy of the ledger, a spawned one starts with an empty one, and
neither side sees what the other reserves later. So a parent gives its workers shares, whose bytes
are fixed when they are made and which have ledgers of their own, and reserves what it gives away.
"""

from __future__ import annotations

import itertools
import numbers
import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Any

from headrace.arguments import check_integer, checks_keywords
from headrace.display import Lines
from headrace.errors import BudgetError, ConfigError
from headrace.memory.anonymous import is_spawning
from headrace.memory.limits import Limit, memory_limits, tightest

_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgtp", 1):
    _UNITS |= {f"{_prefix}b": 10 ** (3 * _power), f"{_prefix}ib": 2 ** (10 * _power)}
_SIZE = re.compile(r"(\d{1,18}|\d{0,18}\.\d{1,18}) ?([a-z]*)", re.ASCII)


def parse_size(size: str | int, name: str = "size") -> int:
    """Return a size in bytes.

    Args:
        size: bytes, or a number with a unit, in any case: B, kB, MB, GB, TB, PB (powers of 1000),
            or KiB to PiB (1024).
        name: name of the value in error messages.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip().lower())
        if match and match[2] in _UNITS and (match[1].isdigit() or _UNITS[match[2]] > 1):
            from fractions import Fraction

            return int(Fraction(match[1]) * _UNITS[match[2]])
    elif isinstance(size, numbers.Integral) and not isinstance(size, bool) and size >= 0:
        return int(size)
    raise ConfigError(
        f"{name} must be a number of bytes (an int of at least 0) or a string such as '500MB', "
        "'2GB' or '1.5GiB' "
        f"(units: B, kB, MB, GB, TB, PB, KiB, MiB, GiB, TiB, PiB), not {size!r}"
    )


def format_size(n: float) -> str:
    """Return `n` bytes as readable text, in powers of 1000: `462.3 MB`."""
    if abs(n) < 1000:
        return f"{n:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        n /= 1000
        if abs(n) < 999.95:  # from there on it would be rounded to 1000.0
            return f"{n:.1f} {unit}"
    return f"{n / 1000:.1f} PB"


_numbers = itertools.count()
_lock = threading.RLock()  # one for all ledgers, so that a fork has one lock to hold


class _Ledger:
    """What is reserved in this process, and under which limits. Its methods are called with
    `_lock` held.
    """

    def __init__(self, limits: Sequence[Limit] | None = None) -> None:
        self.limits = limits
        self.notes: list[str] = []
        # see NOTE [ Releases and the garbage collector ]
        self.all: weakref.WeakValueDictionary[int, Reservation] = weakref.WeakValueDictionary()

    def limit(self) -> Limit:
        if self.limits is None:
            self.limits = memory_limits(notes=self.notes)
        return tightest(self.limits)

    def reservations(self) -> list[Reservation]:
        """Those that hold something."""
        found = [reference() for reference in self.all.valuerefs()]
        return [one for one in found if one is not None and one.nbytes and not one.is_closed]

    def holders(self) -> str:
        """Say how much is held, and by whom, the largest first."""
        sums: Counter[str] = Counter()
        for one in self.reservations():
            sums[one.what] += one.nbytes
        words = [f"{what}: {format_size(nbytes)}" for what, nbytes in sums.most_common()]
        return f"{format_size(sums.total())} ({', '.join(words) or 'by nothing'})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        # The measurement stays behind too: the pickle may be opened on another machine.
        if self is _process_ledger:
            return "_process_ledger"
        return _Ledger, (self.limits,)


_process_ledger = _Ledger()

if hasattr(os, "register_at_fork"):
    # No other thread is half-way through a change at the moment of a fork.
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )


class MemoryBudget:
    """Limits how much memory headrace may use in this process.

    All budgets of a process draw on one ledger: what is reserved through one is not available to
    another. Thread-safe. A pickle contains the limit, but no reservations; see NOTE [ Shares and
    processes ].

    Args:
        max_memory_usage: a fraction (0 < f <= 1) of the headroom, or an absolute limit for this
            process in bytes (`"500MB"`, or an int above 1), which never exceeds the headroom.
        local_world_size: number of ranks on this machine, which share the headroom equally; or a
            callable that returns it at each use.
        limits: limits to use instead of the machine's, with a private ledger: for tests, or to plan
            for another machine.

    Raises:
        ConfigError: an argument is invalid; the message names it.
    """

    @checks_keywords
    def __init__(
        self,
        max_memory_usage: float | str = 0.8,
        *,
        local_world_size: int | Callable[[], int] = 1,
        limits: Sequence[Limit] | None = None,
    ) -> None:
        if limits is not None and not limits:
            raise ConfigError(
                "limits must hold at least one Limit, or be None for those of this machine"
            )
        self._usage = check_usage(max_memory_usage)  # a float is a fraction, an int is bytes
        if not callable(local_world_size):
            local_world_size = partial(int, check_integer("local_world_size", local_world_size, 1))
        self._ranks = local_world_size
        # a spawned worker's ledger knows nothing of its parent's reservations
        self._at_spawn: int | None = None
        self._ledger = _process_ledger
        if limits is not None:
            self._ledger = _Ledger(limits)

    @property
    def limit(self) -> int:
        """Total bytes that may be reserved through this budget."""
        headroom = self._headroom
        wanted = self._usage
        if isinstance(wanted, float):
            wanted *= headroom
        # a product of large numbers may be rounded up, beyond the headroom
        return min(headroom, int(wanted))

    @property
    def reserved(self) -> int:
        """Bytes that count against `limit`: all that this process has reserved; for a share what
        was reserved through it.
        """
        with _lock:
            return sum(one.nbytes for one in self._ledger.reservations())

    @property
    def available(self) -> int:
        """Bytes that can be reserved now, at least 0."""
        with _lock:
            return max(0, self.limit - self.reserved)

    def left(self) -> int:
        """Bytes that this process may use for a short time: its share, among all workers, of what
        is available.
        """
        from torch.utils.data import get_worker_info  # `read_rows` needs no torch

        info = get_worker_info()
        workers = 1
        if info is not None:
            workers = info.num_workers
        return (self.available if self._at_spawn is None else self._at_spawn) // workers

    def __getstate__(self) -> dict[str, Any]:
        if not is_spawning() or self._at_spawn is not None:
            return self.__dict__
        return {**self.__dict__, "_at_spawn": self.available}

    def fits(self, nbytes: int) -> bool:
        """True if `nbytes` could be reserved now. Another thread may reserve first; only
        `reserve` is binding.
        """
        return nbytes <= self.available

    def share(self, n: int) -> MemoryBudget:
        """Return a budget for an equal n-th part of what is available now, to be given to another
        process.

        A share has its own account. Create all n shares, or one for n workers, and then reserve
        here what you gave away; see NOTE [ Shares and processes ].

        Raises:
            ConfigError: `n` is not an integer of at least 1.
        """
        n = check_integer("n", n, 1)
        return MemoryBudget(1.0, limits=[Limit(f"a share of {self}", self.available // n, 0)])

    def reserve(self, nbytes: int, what: str) -> Reservation:
        """Reserve `nbytes` for `what` (a description for messages, such as "the batch ring").

        Returns:
            A context manager that releases the bytes when it is closed or garbage collected.

        Raises:
            BudgetError: they don't fit; the message lists the reservations and the remedy.
            ConfigError: `nbytes` is not an integer of at least 0.
        """
        reservation = Reservation(self, what)
        reservation.resize(nbytes)
        return reservation

    def explain(self) -> str:
        """Describe the budget, the limit that it follows from, and all reservations."""
        with _lock:
            tight = self._ledger.limit()
            lines = [
                f"memory budget: {format_size(self.limit)}, of which "
                f"{format_size(self.available)} are available",
                f"  it is {self._origin()}",
                f"  the limit that counts: {tight.name}: {format_size(tight.total)}, "
                f"of which {format_size(tight.used)} were used when it was measured",
                f"  reserved in this process: {self._ledger.holders()}",
            ]
            for limit in self._ledger.limits or ():
                if limit is not tight:
                    free = format_size(limit.headroom)
                    total = format_size(limit.total)
                    lines.append(f"  wider: {limit.name}: {free} of {total} free")
            lines += [f"  ignored: {note}" for note in self._ledger.notes]
            return Lines("\n".join(lines))

    def __repr__(self) -> str:
        return f"MemoryBudget({self._usage!r}, local_world_size={self._ranks()})"

    @property
    def _headroom(self) -> int:
        """What this process may hold at most: its part, among the local ranks, of the headroom."""
        with _lock:
            return self._ledger.limit().headroom // self._ranks()

    def _origin(self) -> str:
        usage = f"{self._usage} of"
        if isinstance(self._usage, int):
            usage = f"{format_size(self._usage)} within"
        headroom = f"{format_size(self._headroom)}, the headroom under {self._ledger.limit().name}"
        return f"max_memory_usage={usage} {headroom} divided by {self._ranks()} local ranks"


class Reservation:
    """Reserved bytes of a budget, until closed, left as a context, or garbage collected.
    Thread-safe.

    `MemoryBudget.reserve` creates it. It counts in its own process alone: a copy that a worker
    receives reserves nothing.
    """

    def __init__(self, budget: MemoryBudget, what: str) -> None:
        self._budget = budget
        self.what: str = what
        self.nbytes: int = 0
        """Reserved bytes, 0 when closed."""
        self.is_closed: bool = False
        budget._ledger.all[next(_numbers)] = self

    def resize(self, nbytes: int) -> None:
        """Reserve more bytes, or fewer. If more don't fit, the old number stays.

        Raises:
            BudgetError: they don't fit.
            ConfigError: `nbytes` is not an integer of at least 0.
            ValueError: the reservation is closed.
        """
        nbytes = check_integer("nbytes", nbytes, 0)
        budget = self._budget
        with _lock:
            available = budget.available
            if self.is_closed:
                raise ValueError(f"the reservation for {self.what} is closed: reserve anew")
            more = nbytes - self.nbytes
            if more > available:
                remedy = "use a machine or container with more memory"
                if budget.reserved + more <= budget._headroom:
                    remedy = "raise max_memory_usage"
                raise BudgetError(
                    f"{self.what} needs {format_size(nbytes)}, {format_size(more)} more than it "
                    f"has, but only {format_size(available)} of the memory budget of "
                    f"{format_size(budget.limit)} are available. The budget is "
                    f"{budget._origin()}. Reserved in this process: {budget._ledger.holders()}. "
                    f"Either {remedy}, or hold less: loading_mode='lazy', fewer workers, a smaller "
                    "batch_size, prefetch_factor or cache_size"
                )
            self.nbytes = nbytes

    def close(self) -> None:
        """Release the bytes. Closing again has no effect."""
        self.is_closed = True
        self.nbytes = 0

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_usage(value: Any) -> float:
    """Return `max_memory_usage`: a fraction as a float, and bytes as an int.

    Raises:
        ConfigError: it is neither.
    """
    nbytes = 0
    if isinstance(value, str):
        nbytes = parse_size(value, "max_memory_usage, given as a string,")
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        if 0 < float(value) <= 1:
            return float(value)
        if isinstance(value, numbers.Integral) and int(value) > 1:
            nbytes = int(value)
    if nbytes:
        return nbytes
    raise ConfigError(
        "max_memory_usage must be a fraction of the headroom (0 < f <= 1, such as 0.8) or a "
        f"number of bytes (such as '500MB', '2GB' or an int), not {value!r}"
    )


def size_of(record: Any) -> int:
    """Bytes of a record; 64 where they are not known."""
    if isinstance(record, (bytes, str)):
        return len(record)
    if isinstance(record, dict):
        return sum(map(size_of, record.values()))
    if isinstance(record, (tuple, list)):
        return sum(map(size_of, record))
    try:
        nbytes = int(getattr(record, "nbytes", 0))
    except RuntimeError:  # a sparse tensor does not say it
        nbytes = 0
    if nbytes:
        return nbytes
    if isinstance(record, Sized):
        return len(record)
    return 64
