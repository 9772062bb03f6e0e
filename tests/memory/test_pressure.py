"""Memory pressure: when memory is short, and what is given back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.core import held as held_module
from headrace.core.held import Held
from headrace.core.values import Records
from headrace.memory import limits as pressure
from headrace.memory.budget import MemoryBudget
from headrace.memory.limits import Limit, PressureWatch
from headrace.memory.store import MISSING, SampleStore

GB, MB = 10**9, 10**6


class Machine:
    """One whose free memory a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
        self.total, self.free = total, free
        monkeypatch.setattr(pressure, "common_limits", self.limits)

    def limits(self, notes: list[str] | None = None) -> list[Limit]:
        return [
            Limit("wide", 10 * self.total, 0),
            Limit("tight", self.total, self.total - self.free),
        ]


def test_when_memory_is_short_and_how_much_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    lows = [(1000 * GB, 900 * GB, 1 << 30), (10 * GB, GB, GB // 10), (10 * GB, 0, 0)]
    for total, free, low in [*lows, (10 * GB, 9 * GB, GB // 2)]:
        machine = Machine(monkeypatch, total, free)
        watch = PressureWatch()
        assert watch.low == low
    excesses = {9 * GB: -8 * GB, GB: 0, GB // 2: 0, GB // 2 - 1: GB // 2 + 1, 0: GB}
    for free, excess in excesses.items():
        machine.free = free
        assert watch.excess() == excess


def test_a_mode_gives_way_to_a_neighbour_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 20 * MB, 15 * MB)
    monkeypatch.setattr(held_module, "PERIOD", 0.0)
    source: Any = None
    reserved = MemoryBudget("10MB").reserve(0, "a store")
    mode = Held(Records(source), SampleStore(40, 4 << 20), reserved)
    for i in range(40):
        mode.admit([i], [np.full(100_000, i, np.uint8)])
    everything = range(40)
    assert all(value is not MISSING for value in mode.get(everything))
    machine.free = 500_000  # a neighbour allocates
    left = [value is not MISSING for value in mode.get(everything)]
    assert 0 < sum(left) < 40 and mode.stats()["released_bytes"] >= 1_500_000
    assert all(
        (value == i).all()
        for i, value in zip(everything, mode.get(everything), strict=True)
        if value is not MISSING
    )
    machine.free = 15 * MB  # and goes away
    mode.get([0])
    for i in everything:
        mode.admit([i], [np.full(100_000, i, np.uint8)])
    assert all(value is not MISSING for value in mode.get(everything))
