"""Measures memory, CPU time and waits while a training loads."""

from headrace.monitor.memory import MemoryMonitor
from headrace.monitor.stats import BatchTimes, LoadingMonitor, SlowStage

__all__ = ["BatchTimes", "LoadingMonitor", "MemoryMonitor", "SlowStage"]
