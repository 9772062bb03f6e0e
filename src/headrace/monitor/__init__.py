"""Measures memory, CPU time and waits while a training loads."""

from headrace.monitor.hooks import BatchTimes, SlowStage
from headrace.monitor.memory import MemoryMonitor
from headrace.monitor.stats import LoadingMonitor

__all__ = ["BatchTimes", "LoadingMonitor", "MemoryMonitor", "SlowStage"]
