"""Measures memory, CPU time and waits while a training loads."""

from headrace.monitor.hooks import BatchTimes, SlowStage
from headrace.monitor.loading import LoadingMonitor
from headrace.monitor.memory import MemoryMonitor

__all__ = ["BatchTimes", "LoadingMonitor", "MemoryMonitor", "SlowStage"]
