"""A ledger that threads, forks and the garbage collector can't bring out of balance."""

from __future__ import annotations

import pickle
import re
import threading
from typing import Any

import numpy as np
import pytest

from headrace.errors import BudgetError, ConfigError
from headrace.memory import budget as module
from headrace.memory.budget import MemoryBudget, Reservation, format_size, parse_size
from headrace.memory.limits import Limit, memory_limits
from tests.memory.forks import in_child, needs_fork

MB = 10**6
LIMITS = [Limit("wide", 4000 * MB, 0), Limit("tight", 1200 * MB, 200 * MB)]  # 1 GB of headroom


def test_sizes() -> None:
    parsed: dict[Any, int] = {"500MB": 500 * MB, "1.5GiB": 3 * 2**29, "0.3 gb": 300 * MB}
    parsed |= {" 7 kib ": 7 * 1024, "1KB": 1000, ".5TiB": 2**39, "1PB": 10**15}
    parsed |= {"12": 12, "12B": 12, 0: 0, np.int64(13): 13}
    for text, nbytes in parsed.items():
        assert parse_size(text) == nbytes
        assert type(parse_size(text)) is int
    texts: list[Any] = ["", "MB", "1.5", "2G", "-1MB", "1e9", "1 000 MB", "\u0663MB", "9" * 5000]
    for bad in [*texts, -1, 1.5, True, None]:
        with pytest.raises(ConfigError, match="disk_cache_size"):
            parse_size(bad, "disk_cache_size")
    formatted = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 999_949: "999.9 kB", 999_950: "1.0 MB"}
    formatted |= {10**18: "1000.0 PB", -2500: "-2.5 kB"}
    assert {nbytes: format_size(nbytes) for nbytes in formatted} == formatted


def test_the_limit_is_a_part_of_the_tightest_headroom() -> None:
    for usage, ranks, limit in [
        (0.8, 1, 800),
        (1, 1, 1000),
        (np.float32(0.5), 1, 500),
        ("300MB", 1, 300),
        (300 * MB, 1, 300),
        ("5GB", 1, 1000),
        (0.5, 4, 125),
        ("200MB", 4, 200),
        ("300MB", 4, 250),
    ]:
        budget = MemoryBudget(usage, local_world_size=ranks, limits=LIMITS)
        assert budget.limit == budget.available == limit * MB, (usage, ranks)
        full = MemoryBudget(usage, limits=[Limit("full", 100, 200)])
        assert full.limit == 0
        assert full.fits(0)
        assert not full.fits(1)


def test_arguments_that_make_no_sense() -> None:
    usages: list[Any] = [0, -0.5, 1.5, 2e9, float("nan"), float("inf"), -1]
    for bad in [*usages, True, None, [], "0", "0.8", "80%"]:
        with pytest.raises(ConfigError, match=re.escape(repr(bad))):
            MemoryBudget(bad)
    budget: Any = MemoryBudget(limits=LIMITS)
    held = budget.reserve(1, "store")
    for bad in (-1, 1.0, True, "2", None):
        with pytest.raises(ConfigError, match=re.escape(repr(bad))):
            MemoryBudget(local_world_size=bad)
        for refused, arguments in [
            (budget.share, (bad,)),
            (budget.reserve, (bad, "store")),
            (held.resize, (bad,)),
        ]:
            with pytest.raises(ConfigError, match=re.escape(repr(bad))):
                refused(*arguments)
    with pytest.raises(ConfigError, match="limits"):
        MemoryBudget(limits=[])


def test_errors_and_explain_hold_the_numbers() -> None:
    budget = MemoryBudget(local_world_size=2, limits=LIMITS)
    held = [budget.reserve(5 * MB, f"part {number}") for number in range(20)]
    held.append(budget.reserve(200 * MB, "the store"))
    with pytest.raises(BudgetError) as refused:
        budget.reserve(123 * MB, "the chunk cache")
    assert isinstance(refused.value, MemoryError) and budget.reserved == 300 * MB
    said = str(refused.value)
    for number in ("the chunk cache", "123.0 MB", "100.0 MB", "400.0 MB", "tight", "200.0 MB"):
        assert number in said
    assert "raise max_memory_usage" in said
    with pytest.raises(BudgetError) as hopeless:
        budget.reserve(201 * MB, "the chunk cache")  # more than max_memory_usage=1.0 would allow
    assert "raise max_memory_usage" not in str(hopeless.value)
    text = budget.explain() + budget.share(2).explain() + repr(held[-1]) + repr(budget)
    held.clear()
    for number in ("100.0 MB", "300.0 MB", "part 19: 5.0 MB", "wide: 4.0 GB", "share", "0.8"):
        assert number in text
    assert "by nothing" in budget.explain()


def test_a_budget_travels_with_its_limit_alone() -> None:
    budget = MemoryBudget(0.5, local_world_size=2, limits=LIMITS)
    held = budget.reserve(100 * MB, "store")
    other = pickle.loads(pickle.dumps(budget))
    assert (other.limit, other.reserved) == (250 * MB, 0)
    share = pickle.loads(pickle.dumps(budget.share(3)))
    assert (share.limit, share.available) == (50 * MB, 50 * MB)
    held.close()
    full = MemoryBudget(limits=[Limit("full", 5, 5)]).share(2)
    assert pickle.loads(pickle.dumps(full)).limit == 0
    machines = pickle.dumps(MemoryBudget(0.5))
    assert b"psutil" not in machines  # its limits are measured where it arrives
    assert pickle.loads(machines).limit <= memory_limits()[0].total


class TestReserve:
    def test_counts_until_closed_and_is_resized(self) -> None:
        budget = MemoryBudget(limits=LIMITS)
        size: Any = np.int64(300 * MB)
        with budget.reserve(size, "store") as store:
            other = budget.reserve(500 * MB, "ring")
            assert (budget.available, budget.reserved, budget.limit) == (0, 800 * MB, 800 * MB)
            assert store.nbytes == 300 * MB and not budget.fits(1)
        assert (budget.available, store.nbytes) == (300 * MB, 0)
        store.close()
        other.resize(800 * MB)
        with pytest.raises(BudgetError, match=r"900\.0 MB"):
            other.resize(900 * MB)
        assert other.nbytes == budget.reserved == 800 * MB
        other.resize(0)
        assert (other.nbytes, budget.reserved) == (0, 0)
        other.resize(5)
        other.close()
        other.close()
        with pytest.raises(ValueError, match="ring"):
            other.resize(1)
        assert (budget.available, budget.reserved) == (800 * MB, 0)

    def test_closing_never_waits_for_the_lock(self) -> None:
        """A finalizer may run anywhere: see NOTE [ Releases and the garbage collector ]."""
        budget = MemoryBudget(limits=LIMITS)
        reservation = budget.reserve(MB, "store")
        closer = threading.Thread(target=reservation.close, daemon=True)
        with module._lock:
            closer.start()
            closer.join(60)
            assert not closer.is_alive()
        assert budget.reserved == 0


def test_a_share_is_an_equal_part_with_an_account_of_its_own() -> None:
    budget = MemoryBudget(limits=LIMITS)
    left, right = budget.share(2), budget.share(2)
    assert left.limit == right.limit == 400 * MB
    held = left.reserve(300 * MB, "left")
    assert (left.available, left.reserved) == (100 * MB, 300 * MB)
    assert (right.available, right.reserved) == (400 * MB, 0)
    with pytest.raises(BudgetError, match=r"100\.0 MB"):
        left.reserve(101 * MB, "left")
    held.resize(400 * MB)
    held.close()
    assert left.available == 400 * MB


class TestLedger:
    def test_headroom_is_measured_once_at_first_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []

        def measure(notes: list[str]) -> list[Limit]:
            calls.append(1)
            notes.append("cgroup v1 /x is ignored")
            return [Limit("measured", 100 * len(calls), 0)]

        monkeypatch.setattr(module, "memory_limits", measure)
        monkeypatch.setattr(module, "_process_ledger", module._Ledger())
        budgets = [MemoryBudget(1.0) for _ in range(3)]
        assert calls == []
        assert [budget.limit for budget in budgets] == [100, 100, 100]
        assert "ignored: cgroup v1 /x is ignored" in budgets[0].explain()
        assert calls == [1]


def test_reservation_closed_while_growing_is_returned() -> None:
    class Closing(MemoryBudget):
        """Another thread closes the reservation when the budget is asked."""

        victim: Reservation | None = None

        @property
        def available(self) -> int:
            if self.victim is not None:
                self.victim.close()
            return super().available

    budget = Closing(limits=LIMITS)
    reservation = budget.reserve(5, "store")
    budget.victim = reservation
    with pytest.raises(ValueError, match="store"):
        reservation.resize(10)
    assert budget.reserved == 0


@needs_fork
class TestFork:
    def test_a_child_starts_with_the_ledger_it_inherits(self) -> None:
        budget = MemoryBudget(limits=LIMITS)
        store = budget.reserve(300 * MB, "store")

        def child() -> bool:
            inherited = budget.available == 500 * MB
            mine = budget.reserve(400 * MB, "mine")
            store.close()
            return inherited and mine.nbytes == budget.reserved == 400 * MB

        assert in_child(child)
        assert budget.reserved == 300 * MB

    def test_in_a_child_a_share_stands_for_itself(self) -> None:
        budget = MemoryBudget(limits=LIMITS)
        share = budget.share(4)
        given = budget.reserve(4 * share.limit, "what the workers got")
        assert (budget.available, share.available, given.nbytes) == (0, 200 * MB, 800 * MB)

        def child() -> bool:
            inner = share.share(2)
            held = inner.reserve(60 * MB, "chunks")
            return (inner.limit, inner.available, share.available) == (
                100 * MB,
                40 * MB,
                200 * MB,
            ) and held.nbytes > 0

        assert in_child(child)

    @pytest.mark.slow
    def test_a_fork_never_catches_another_thread_half_way(self) -> None:
        budget = MemoryBudget(limits=LIMITS)
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                with budget.reserve(7 * MB, "churn") as held:
                    held.resize(9 * MB)

        def child() -> bool:
            with budget.reserve(MB, "child"):  # would hang on a lock that was inherited locked
                return budget.reserved == sum(one.nbytes for one in budget._ledger.reservations())

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            assert all(in_child(child) for _ in range(10))
        finally:
            stop.set()
            thread.join()
