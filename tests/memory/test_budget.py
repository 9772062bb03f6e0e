"""A ledger that threads, forks and the garbage collector can't bring out of balance, and messages that help."""

from __future__ import annotations

import gc
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BudgetError, ConfigError
from headrace.memory import budget as module
from headrace.memory.budget import MemoryBudget, Reservation, format_size, parse_size
from headrace.memory.limits import Limit, memory_limits, tightest

pytestmark = pytest.mark.quick_every(2)

MB = 10**6
LIMITS = [Limit("wide", 4000 * MB, 0), Limit("tight", 1200 * MB, 200 * MB)]  # 1 GB of headroom

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def in_child(check: Callable[[], bool]) -> bool:
    """Run `check` in a forked child and say whether it returned True."""
    child = os.fork()
    if child == 0:
        correct = False
        signal.alarm(60)  # a child that hangs is a failure, not a wait
        try:
            correct = check()
        finally:
            os._exit(0 if correct else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "nbytes"),
        [
            ("500MB", 500 * MB),
            ("2GB", 2 * 10**9),
            ("1.5GiB", 3 * 2**29),
            ("0.3 gb", 300 * MB),
            (" 7 kib ", 7 * 1024),
            ("1KB", 1000),
            (".5TiB", 2**39),
            ("1PB", 10**15),
            ("12", 12),
            ("12B", 12),
            ("0", 0),
            (12, 12),
            (0, 0),
            (np.int64(12), 12),
        ],
    )
    def test_parse(self, text: str | int, nbytes: int) -> None:
        assert parse_size(text) == nbytes
        assert type(parse_size(text)) is int

    @pytest.mark.parametrize("bad", ["", "MB", "1.5", "2G", "-1MB", "1e9", "1 000 MB", "GB2", "\u0663MB", -1, 1.5, True, None, "9" * 5000])
    def test_what_is_no_size(self, bad: str) -> None:
        with pytest.raises(ConfigError, match=r"disk_cache_size must be .*'500MB', '2GB' or '1\.5GiB'"):
            parse_size(bad, "disk_cache_size")

    @pytest.mark.parametrize(
        ("nbytes", "text"),
        [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.0 kB"),
            (462_300_000, "462.3 MB"),
            (999_949, "999.9 kB"),
            (999_950, "1.0 MB"),
            (25 * 10**9, "25.0 GB"),
            (10**18, "1000.0 PB"),
            (-2500, "-2.5 kB"),
        ],
    )
    def test_format(self, nbytes: int, text: str) -> None:
        assert format_size(nbytes) == text

    @given(st.integers(0, 10**18))
    def test_what_is_formatted_can_be_parsed(self, nbytes: int) -> None:
        assert abs(parse_size(format_size(nbytes)) - nbytes) <= 0.05001 * max(nbytes, 1)


class TestLimit:
    def test_a_fraction_of_the_tightest_headroom(self) -> None:
        assert MemoryBudget(limits=LIMITS).limit == 800 * MB
        assert MemoryBudget(0.25, limits=LIMITS).limit == 250 * MB
        assert MemoryBudget(1, limits=LIMITS).limit == MemoryBudget(1.0, limits=LIMITS).limit == 1000 * MB
        half: Any = np.float32(0.5)
        assert MemoryBudget(half, limits=LIMITS).limit == 500 * MB

    def test_bytes_are_a_cap_within_the_headroom(self) -> None:
        assert MemoryBudget("300MB", limits=LIMITS).limit == 300 * MB
        assert MemoryBudget(300 * MB, limits=LIMITS).limit == 300 * MB
        assert MemoryBudget("5GB", limits=LIMITS).limit == 1000 * MB

    def test_local_ranks_share_the_headroom(self) -> None:
        assert MemoryBudget(0.5, local_world_size=4, limits=LIMITS).limit == 125 * MB
        assert MemoryBudget("200MB", local_world_size=4, limits=LIMITS).limit == 200 * MB  # a cap per process
        assert MemoryBudget("300MB", local_world_size=4, limits=LIMITS).limit == 250 * MB

    def test_no_headroom(self) -> None:
        budget = MemoryBudget(limits=[Limit("full", 100, 200)])
        assert (budget.limit, budget.available) == (0, 0)
        assert budget.fits(0)
        assert not budget.fits(1)

    @given(st.floats(0, 1, exclude_min=True), st.integers(0, 2**60 - 1), st.integers(1, 64))
    def test_never_above_the_part_of_the_headroom(self, fraction: float, total: int, ranks: int) -> None:
        budget = MemoryBudget(fraction, local_world_size=ranks, limits=[Limit("any", total, 0)])
        assert 0 <= budget.limit <= total // ranks

    @pytest.mark.parametrize(
        "bad",
        [0, 0.0, -0.5, 1.5, 2e9, float("nan"), float("inf"), -1, True, False, None, [], "0", "0.8", "80%", "lots"],
    )
    def test_values_that_make_no_sense(self, bad: float) -> None:
        with pytest.raises(ConfigError, match=f"max_memory_usage.*{re.escape(repr(bad))}"):
            MemoryBudget(bad)

    @pytest.mark.parametrize("bad", [0, -1, 1.0, True, "2", None])
    def test_counts_that_make_no_sense(self, bad: int) -> None:
        with pytest.raises(ConfigError, match="local_world_size"):
            MemoryBudget(local_world_size=bad)
        with pytest.raises(ConfigError, match="n must be"):
            MemoryBudget(limits=LIMITS).share(bad)

    def test_limits_must_not_be_empty(self) -> None:
        with pytest.raises(ConfigError, match="limits"):
            MemoryBudget(limits=[])


class TestReserve:
    def test_counts_until_closed(self) -> None:
        budget = MemoryBudget(limits=LIMITS)
        with budget.reserve(300 * MB, "store") as store:
            other = budget.reserve(500 * MB, "ring")
            assert (budget.available, budget.reserved, budget.limit) == (0, 800 * MB, 800 * MB)
            assert store.nbytes == 300 * MB
            assert not budget.fits(1)
        assert budget.available == 300 * MB
        assert store.nbytes == 0
        store.close()
        other.close()
        other.close()
        assert (budget.available, budget.reserved) == (800 * MB, 0)

    def test_a_context_left_by_an_error_gives_back_and_lets_it_pass(self) -> None:
        budget = MemoryBudget(limits=LIMITS)
        with pytest.raises(KeyError), budget.reserve(1, "store"):
            raise KeyError
        assert budget.reserved == 0

    def test_resize(self) -> None:
        budget = MemoryBudget(limits=LIMITS)
        size: Any = np.int64(300 * MB)
        store = budget.reserve(size, "store")
        store.resize(800 * MB)
        assert budget.available == 0
        with pytest.raises(BudgetError, match=r"store needs 900\.0 MB \(100\.0 MB more\)"):
            store.resize(900 * MB)
        assert store.nbytes == budget.reserved == 800 * MB
        store.resize(0)
        assert (store.nbytes, budget.reserved) == (0, 0)
        store.resize(5)
        store.close()
        assert budget.reserved == 0
        with pytest.raises(ValueError, match="store is closed"):
            store.resize(1)
        assert budget.reserved == 0

    def test_what_does_not_fit_leaves_no_trace(self) -> None:
        budget = MemoryBudget(limits=LIMITS)
        with pytest.raises(BudgetError):
            budget.reserve(801 * MB, "store")
        assert budget.reserved == 0
        assert "store" not in budget.explain()

    @pytest.mark.parametrize("bad", [-1, 1.5, None, True])
    def test_sizes_that_make_no_sense(self, bad: int) -> None:
        budget = MemoryBudget(limits=LIMITS)
        with pytest.raises(ConfigError, match="nbytes"):
            budget.reserve(bad, "store")
        with pytest.raises(ConfigError, match="nbytes"):
            budget.reserve(1, "store").resize(bad)

    def test_the_error_holds_the_numbers_the_holders_and_a_remedy(self) -> None:
        budget = MemoryBudget(local_world_size=2, limits=LIMITS)
        store, rings = budget.reserve(200 * MB, "the store"), [budget.reserve(50 * MB, "the ring") for _ in range(2)]
        with pytest.raises(BudgetError) as info:
            budget.reserve(123 * MB, "the chunk cache")
        message = str(info.value)
        for part in (
            "the chunk cache needs 123.0 MB",
            "only 100.0 MB of the memory budget of 400.0 MB",
            "max_memory_usage=0.8 of 500.0 MB",
            "under tight divided by 2 local ranks",
            "Reserved in this process: 300.0 MB (the store: 200.0 MB, the ring: 100.0 MB)",
            "raise max_memory_usage",
            "loading_mode='lazy'",
        ):
            assert part in message
        assert isinstance(info.value, MemoryError)
        with pytest.raises(BudgetError) as info:
            budget.reserve(201 * MB, "the chunk cache")  # more than max_memory_usage=1.0 would allow
        assert "raise max_memory_usage" not in str(info.value)
        assert "with more memory" in str(info.value)
        assert store.nbytes + sum(ring.nbytes for ring in rings) == budget.reserved

    def test_many_holders_are_summed_up(self) -> None:
        budget = MemoryBudget(limits=LIMITS)
        held = [budget.reserve(size, f"part {size}") for size in range(1, 13)]
        assert "part 12: 12 B" in budget.explain()
        assert "4 others: 10 B" in budget.explain()
        assert len(held) == 12

    @pytest.mark.slow
    def test_garbage_is_given_back(self) -> None:
        budget = MemoryBudget(limits=LIMITS)
        reservation = budget.reserve(5 * MB, "store")
        assert budget.reserved == 5 * MB
        del reservation
        gc.collect()
        assert budget.reserved == 0

        class Owner:
            def __init__(self) -> None:
                self.me, self.held = self, budget.reserve(7 * MB, "cycle")

        Owner()
        gc.collect()
        assert budget.reserved == 0

    def test_a_reservation_outlives_its_budget(self) -> None:
        budget = MemoryBudget(limits=LIMITS)
        held = budget.share(2).reserve(MB, "store")
        gc.collect()
        assert budget.reserved == MB
        held.close()
        assert budget.reserved == 0

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

    def test_a_reservation_can_not_be_pickled(self) -> None:
        with pytest.raises(TypeError, match="the store belongs to its process"):
            pickle.dumps(MemoryBudget(limits=LIMITS).reserve(1, "the store"))


class TestShare:
    def test_an_equal_part_with_an_account_of_its_own(self) -> None:
        budget = MemoryBudget(limits=LIMITS)
        left, right = budget.share(2), budget.share(2)
        assert left.limit == right.limit == 400 * MB
        held = left.reserve(300 * MB, "left")
        assert (left.available, left.reserved) == (100 * MB, 300 * MB)
        assert (right.available, right.reserved) == (400 * MB, 0)
        assert (budget.available, budget.reserved) == (500 * MB, 300 * MB)
        with pytest.raises(BudgetError, match=r"100\.0 MB of the memory budget of 400\.0 MB .* share of"):
            left.reserve(101 * MB, "left")
        held.resize(400 * MB)
        held.close()
        assert (left.available, budget.available) == (400 * MB, 800 * MB)

    def test_a_share_of_what_is_left_and_of_a_share(self) -> None:
        budget = MemoryBudget(limits=LIMITS)
        store = budget.reserve(200 * MB, "store")
        share = budget.share(3)
        assert share.limit == 200 * MB
        inner = share.share(4)
        assert inner.limit == 50 * MB
        held = inner.reserve(30 * MB, "inner")
        assert (inner.reserved, share.reserved, budget.reserved) == (30 * MB, 30 * MB, 230 * MB)
        store.close()
        assert share.limit == 200 * MB
        held.close()
        assert budget.reserved == 0

    def test_a_share_can_not_hold_what_its_budget_has_not(self) -> None:
        budget = MemoryBudget(limits=LIMITS)
        share = budget.share(1)
        held = budget.reserve(700 * MB, "store")
        assert (share.limit, share.available) == (800 * MB, 100 * MB)
        assert not share.fits(held.nbytes)

    @given(st.integers(0, 10**12), st.integers(1, 50))
    def test_shares_never_sum_to_more_than_their_budget(self, total: int, n: int) -> None:
        budget = MemoryBudget(0.8, limits=[Limit("any", total, 0)])
        shares = [budget.share(n) for _ in range(n)]
        assert budget.available - n < sum(share.limit for share in shares) <= budget.available


class TestLedger:
    def test_all_budgets_of_a_process_draw_on_one(self) -> None:
        one, other = MemoryBudget(0.5), MemoryBudget("64MB")
        before = other.available
        assert 0 < before <= 64 * MB
        with one.reserve(before - 10, "store"):
            assert other.available == 10
            with pytest.raises(BudgetError, match="store"):
                other.reserve(11, "ring")
        assert other.available == before

    def test_limits_given_make_a_private_one(self) -> None:
        one, other = MemoryBudget(limits=LIMITS), MemoryBudget(limits=LIMITS)
        held = one.reserve(MB, "store")
        assert (one.reserved, other.reserved) == (held.nbytes, 0)

    def test_the_headroom_is_measured_once_at_first_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def test_this_machine(self) -> None:
        assert 0 < MemoryBudget(1.0).limit <= memory_limits()[0].total
        # Others use this machine too: its headroom at the first use, and now, differ by less than half.
        assert MemoryBudget(1.0).limit <= 1.5 * tightest(memory_limits()).headroom

    def test_explain(self) -> None:
        budget = MemoryBudget("600MB", local_world_size=2, limits=LIMITS)
        held = budget.reserve(20 * MB, "the ring")
        text = budget.explain()
        for part in (
            "500.0 MB, of which 480.0 MB are available",
            "max_memory_usage=600.0 MB within 500.0 MB, the headroom under tight divided by 2 local ranks",
            "the limit that counts: tight: 1.2 GB, of which 200.0 MB were used",
            "20.0 MB (the ring: 20.0 MB)",
            "wider: wide: 4.0 GB of 4.0 GB",
        ):
            assert part in text
        assert "a share of max_memory_usage" in budget.share(2).explain()
        held.close()
        assert "0 B (by nothing)" in budget.explain()

    def test_repr(self) -> None:
        assert repr(MemoryBudget(0.5, local_world_size=2)) == "MemoryBudget(0.5, local_world_size=2)"
        assert repr(MemoryBudget("1MB").share(2)).startswith("MemoryBudget(")
        assert repr(MemoryBudget(limits=LIMITS).reserve(1500, "x")) == "<Reservation of 1.5 kB for x>"


def work(budget: MemoryBudget, seed: int, faults: list[str]) -> None:
    """Reserve, resize, close and drop at random; report every sight of a budget that holds too much."""
    dice, held = random.Random(seed), list[Reservation]()
    for _ in range(150):
        action, size = dice.randrange(4), dice.randrange(budget.limit + 1)
        try:
            if action == 0 or not held:
                held.append(budget.reserve(size, f"thread {seed}"))
            elif action == 1:
                held[dice.randrange(len(held))].resize(size)
            elif action == 2:
                held.pop().close()
            else:
                del held[0]
        except BudgetError:
            pass
        if budget.reserved > budget.limit or sum(one.nbytes for one in held) > budget.limit:
            faults.append(f"{budget.reserved} of {budget.limit}")


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.integers(1, 1000), st.integers(0, 2**32), st.integers(2, 4))
def test_threads_never_exceed_the_limit(total: int, seed: int, n: int) -> None:
    root = MemoryBudget(1.0, limits=[Limit("small", total, 0)])
    faults: list[str] = []
    budgets = [root, root.share(2), root.share(2), root][:n]
    threads = [threading.Thread(target=work, args=(it, seed + i, faults)) for i, it in enumerate(budgets)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert faults == []
    gc.collect()
    assert [budget.reserved for budget in budgets] == [0] * n


def test_reservation_closed_while_growing_is_returned() -> None:
    class Closing(MemoryBudget):
        """Stands for another thread, which closes the reservation at the moment when the budget is asked."""

        victim: Reservation | None = None

        @property
        def available(self) -> int:
            if self.victim is not None:
                self.victim.close()
            return super().available

    budget = Closing(limits=LIMITS)
    reservation = budget.reserve(5, "store")
    budget.victim = reservation
    with pytest.raises(ValueError, match="closed"):
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
        assert (budget.available, share.available, given.nbytes) == (0, 0, 800 * MB)

        def child() -> bool:
            inner = share.share(2)
            held = inner.reserve(60 * MB, "chunks")
            return (inner.limit, inner.available, share.available) == (100 * MB, 40 * MB, 140 * MB) and held.nbytes > 0

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
                return budget.reserved == sum(entry.nbytes for entry in budget._ledger.entries)

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            assert all(in_child(child) for _ in range(25))
        finally:
            stop.set()
            thread.join()


class TestPickle:
    def test_the_limit_arrives_and_the_reservations_stay_behind(self) -> None:
        budget = MemoryBudget(0.5, local_world_size=2, limits=LIMITS)
        held = budget.reserve(100 * MB, "store")
        other = pickle.loads(pickle.dumps(budget))
        assert (other.limit, other.reserved) == (250 * MB, 0)
        share = pickle.loads(pickle.dumps(budget.share(3)))
        assert (share.limit, share.available) == (50 * MB, 50 * MB)
        held.close()
        empty = MemoryBudget(limits=[Limit("full", 5, 5)]).share(2)
        assert pickle.loads(pickle.dumps(empty)).limit == 0

    @pytest.mark.slow
    def test_a_budget_of_the_machine_is_measured_where_it_arrives(self) -> None:
        budget, share = MemoryBudget(0.5), MemoryBudget("64MB").share(2)
        assert b"psutil" not in pickle.dumps(budget)  # the limits are not in it
        script = """
import pickle, sys
from headrace.memory.limits import tightest, memory_limits
budget, share = pickle.loads(sys.stdin.buffer.read())
total = tightest(memory_limits()).headroom
assert 0.25 * total < budget.limit < 0.75 * total, (total, budget.limit)
held = share.reserve(share.limit, "chunks")
print(budget.reserved, share.available)
"""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            [sys.executable, "-c", script],
            input=pickle.dumps((budget, share)),
            env=environment,
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout.split() == [str(share.limit).encode(), b"0"]
