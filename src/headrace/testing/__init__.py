"""The laws of headrace for datasets, as tests to subclass."""

from headrace.testing.contract import DatasetContract

__all__ = ["DatasetContract"]
