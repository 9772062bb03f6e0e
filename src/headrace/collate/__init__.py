"""How do samples become a batch?"""

from headrace.collate.registry import collators
from headrace.collate.stack import list_collate, stack_collate

__all__ = ["collators", "list_collate", "stack_collate"]
