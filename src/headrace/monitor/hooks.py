"""Calls the user's functions with the times of each batch, and with slow stages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.hooks import RemovableHandle

from headrace.arguments import check_callable, check_seconds
from headrace.errors import ConfigError
from headrace.monitor.stats import STAGES

_SECONDS = {stage: f"{stage}_seconds" for stage in STAGES}
_Functions = OrderedDict[int, tuple[Callable[[Any], Any], float]]  # with their thresholds


class BatchTimes(NamedTuple):
    """Times of one batch, in seconds. Times of stages are those of the worker."""

    epoch: int
    step: int
    """Number of the batch in the epoch."""
    samples: int
    wait_seconds: float
    """Time that the loop was blocked in ``next``."""
    step_seconds: float
    """Time from the previous batch to the request for this one: the loop's own work."""
    read_seconds: float
    decode_seconds: float
    transform_seconds: float
    sample_seconds: float
    """For a dataset of another library: all its work for the samples."""
    collate_seconds: float
    work_seconds: float
    """Time from the worker's first step to its last."""
    worker_pid: int
    """Process that made the batch."""
    began: float
    """Start of the worker's work, by `time.perf_counter`, which is the same clock in all
    processes of a machine.
    """
    received: float
    """Time at which the loop received the batch, by the same clock."""


@dataclass(frozen=True, slots=True)
class SlowStage:
    """A stage of a batch that took longer than a threshold."""

    stage: str
    """One of `STAGES`."""
    seconds: float
    """Seconds of the whole batch."""
    epoch: int
    step: int
    """Number of the batch in the epoch."""
    worker_pid: int


OnBatch = Callable[[BatchTimes], Any]
OnSlow = Callable[[SlowStage], Any]


class Hooks:
    """The functions that a user has registered with one loader."""

    def __init__(self) -> None:
        self._on_batch: _Functions = OrderedDict()
        self._on_slow: _Functions = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._on_batch or self._on_slow)

    def on_batch(self, function: OnBatch) -> RemovableHandle:
        """See `Loader.on_batch`."""
        return _added("on_batch", self._on_batch, function)

    def on_slow(self, threshold: float, function: OnSlow) -> RemovableHandle:
        """See `Loader.on_slow`."""
        seconds = check_seconds("on_slow: threshold", threshold)
        return _added("on_slow", self._on_slow, function, seconds)

    def tell(self, report: dict[str, Any], wait: float, step: float, received: float) -> None:
        """Calls the functions with a batch that the user is about to get.

        Args:
            report: the worker's.
            wait, step: seconds blocked in ``next``, and of the loop before that.
            received: when the batch came.
        """
        counts = report["counts"]
        if self._on_batch:
            stages = {name: counts.get(name, 0.0) for name in _SECONDS.values()}
            times = BatchTimes(
                epoch=report["epoch"],
                step=report["step"],
                samples=report["samples"],
                wait_seconds=wait,
                step_seconds=step,
                work_seconds=counts["work_seconds"],
                worker_pid=report["pid"],
                began=report["began"],
                received=received,
                **stages,
            )
            for function, _ in list(self._on_batch.values()):
                function(times)
        for function, threshold in list(self._on_slow.values()):
            for stage, name in _SECONDS.items():
                seconds = counts.get(name, 0.0)
                if seconds > threshold:
                    at = (report["epoch"], report["step"], report["pid"])
                    function(SlowStage(stage, seconds, *at))


def _added(
    door: str, functions: _Functions, function: Callable[[Any], Any], threshold: float = 0.0
) -> RemovableHandle:
    check_callable(f"{door}: function", function)
    if function is None:
        raise ConfigError(f"{door}: function must be a callable, not None")
    handle = RemovableHandle(functions)
    functions[handle.id] = function, threshold
    return handle
