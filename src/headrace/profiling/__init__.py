"""Measures what holds a training back, and how many workers and how large a batch it can use."""

from headrace.profiling.compare import SuggestedWorkers, suggest_num_workers
from headrace.profiling.profile import profile_dataloader
from headrace.profiling.result import Profile
from headrace.profiling.tune import find_max_batch_size

__all__ = [
    "Profile",
    "SuggestedWorkers",
    "find_max_batch_size",
    "profile_dataloader",
    "suggest_num_workers",
]
