"""What must hold for every dataset, as tests that others subclass."""

from headrace.testing.contract import DatasetContract

__all__ = ["DatasetContract"]
