"""Measures how many workers and how large a batch a training can use."""

from headrace.profiling.tune import find_max_batch_size
from headrace.profiling.workers import SuggestedWorkers, suggest_num_workers

__all__ = ["SuggestedWorkers", "find_max_batch_size", "suggest_num_workers"]
