"""Tries advice: the loader as it is and one that follows the advice take turns, so that both
meet the same machine.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from headrace.errors import HeadraceError
from headrace.profiling.advice import copy_of
from headrace.profiling.limit import Candidate
from headrace.profiling.running import Running, Step

_ROUNDS = 3
_LEAST = 0.4  # seconds of a turn
_FILLING = 0.55  # of the time that there is, for an epoch that fills a cache


def try_advice(
    loader: Any, candidate: Candidate, free: float | None, step: Step | None, seconds: float
) -> None:
    """Measures the gain of an advice, and notes it there: the median of the rounds, the least and
    the most of them.

    How much the step lets through is known as a rate, and the gain up to there depends on how fast
    the loader is as it is. That is measured again here, and the prediction follows it: other
    programs may have come or gone since.

    Args:
        loader: the user's, of which a copy runs.
        candidate: what is tried.
        free: samples a second of the step with batches in memory; None: there is no step.
        step: what is done with a batch.
        seconds: for all of it.
    """
    advice, variant = candidate.advice, candidate.variant
    assert variant is not None
    until = time.perf_counter() + seconds
    base, other, owned = Running(copy_of(loader)), None, None
    try:
        made, owned = variant()
        other = Running(made)
        if advice.options.get("loading_mode") == "cached" and not _fill(
            other, until - (1 - _FILLING) * seconds
        ):
            advice.not_measured = (
                "an epoch takes longer than there is time for: profile with more seconds"
            )
            return
        turn = max(_LEAST, 0.9 * (until - time.perf_counter()) / (2 * _ROUNDS + 1))
        own_step = step
        if candidate.keeps_batch and step is not None:
            (known, _), call = base.first(1)[0], step
            own_step = lambda batch: call(known)  # noqa: E731
        gains, before = [], []
        base.run(turn / 2, step)
        for number in range(_ROUNDS):
            pair = (base, other) if number % 2 == 0 else (other, base)
            rates = {id(one): one.run(turn, step if one is base else own_step).rate for one in pair}
            before.append(rates[id(base)])
            gains.append(rates[id(other)] / max(rates[id(base)], 1e-9))
        if free is not None and candidate.unlimited is not None:
            advice.predicted = max(
                1.0, min(candidate.unlimited, free / max(statistics.median(before), 1e-9))
            )
        advice.measured, advice.spread = statistics.median(gains), (min(gains), max(gains))
    except HeadraceError as error:
        advice.not_measured = f"it could not be tried: {error}"
    finally:
        base.close()
        if other is not None:
            other.close()
        if owned is not None:
            owned.close()


def _fill(running: Running, until: float) -> bool:
    """Runs one epoch, so that all samples are cached. False: there was not enough time."""
    loader = running.loader
    for _ in range(len(loader)):
        running.first(1)
        if time.perf_counter() > until:
            return False
    return True
