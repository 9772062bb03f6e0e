"""The laws that every dataset keeps, as tests to subclass."""

from headrace.testing.contract import DatasetContract

__all__ = ["DatasetContract"]
