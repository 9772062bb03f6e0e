"""The predictions of the model follow from its costs."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from typing import Any

import pytest

from headrace.profiling.gil import gil_fraction
from headrace.profiling.model import Costs, fewest_workers, gain

COSTS = Costs(work=0.010, cpu=0.010, main=0.0, step=0.0, step_cpu=0.0, workers=1, cores=8)


def costs(**values: Any) -> Costs:
    return dataclasses.replace(COSTS, **values)


def test_the_rate_of_a_loop() -> None:
    rows: list[tuple[dict[str, Any], float]] = [
        ({}, 100),
        ({"workers": 4}, 400),
        ({"workers": 16}, 800),  # the cores are the limit
        ({"workers": 16, "cpu": 0.001}, 1600),  # they wait
        ({"workers": 0}, 100),
        ({"workers": 0, "step": 0.010}, 50),  # one after the other
        ({"workers": 4, "step": 0.010}, 100),
        ({"workers": 4, "step": 0.010, "main": 0.010}, 50),
        ({"workers": 4, "cores": 2, "step": 0.001, "step_cpu": 0.010}, 100),
        # with other programs beside: workers get a share of busy cores, and who waits needs none
        ({"cores": 2, "others": 1.0}, 100),
        ({"cores": 2, "others": 1.0, "workers": 2}, 100 * 4 / 3),
        ({"cores": 2, "others": 9.0, "workers": 2, "cpu": 0.001}, 200),
    ]
    for values, rate in rows:
        assert costs(**values).loop() == pytest.approx(rate), values


def test_gains() -> None:
    assert gain(COSTS, COSTS.with_workers(3)) == pytest.approx(3)
    assert gain(COSTS, COSTS.without(0.008, computes=True)) == pytest.approx(5)
    with_step = costs(step=0.005)
    assert gain(with_step, with_step.with_workers(4)) == pytest.approx(2), "the step limits then"
    assert costs(cpu=0.001).without(0.005, computes=False).cpu == 0.001
    assert costs(workers=2, step=1.0, step_cpu=1.0).loading() == pytest.approx(200), "no step in it"


@pytest.mark.parametrize("workers", [0, 2])
def test_scaled_to_what_was_measured(workers: int) -> None:
    measured = costs(workers=workers, main=0.001, cpu=0.004).scaled_to(150)
    assert measured.loading() == pytest.approx(150)
    # measurements that contradict each other are not believed
    assert costs(workers=1).scaled_to(1e6).work == pytest.approx(0.005)


def test_the_fewest_workers_that_are_best() -> None:
    assert fewest_workers(costs(step=0.0030), [1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert fewest_workers(costs(cores=2), [1, 2, 4]) == 2


def in_python() -> None:
    until = time.perf_counter() + 0.02
    while time.perf_counter() < until:
        sum(number * number for number in range(100))


def in_c() -> None:
    hashlib.sha256(bytes(4 << 20)).digest()


@pytest.mark.slow
def test_code_that_holds_the_lock_is_told_from_code_that_lets_go() -> None:
    """Of several tries the median, and both beside each other: other processes may hold the
    cores, and make all wake-ups late.
    """
    held = sorted(gil_fraction(in_python, 0.3) or 0.0 for _ in range(5))[2]
    free = sorted(gil_fraction(in_c, 0.3) or 0.0 for _ in range(5))[2]
    assert held > 0.5 and held > free
