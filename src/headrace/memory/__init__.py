"""The memory budget, and what is held within it."""

from headrace.memory.budget import MemoryBudget
from headrace.memory.lru import LRUCache
from headrace.memory.processes import PerProcess as WorkerHandle

__all__ = ["LRUCache", "MemoryBudget", "WorkerHandle"]
