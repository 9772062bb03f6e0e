"""The samples of one batch, and their names in messages."""

from __future__ import annotations

from typing import Any

from headrace.datasets.core.base import BaseDataset
from headrace.memory.ring import Arena
from headrace.order import BatchRequest


class Samples:
    """The samples of one batch on their way from `Fetch` to `Collate`: a list, or whatever a dataset's ``__getitems__`` gives, or what
    lies in the batch's buffer already.

    Args:
        dataset: that the request's indices are of; None: the samples have no indices.

    Attributes:
        arena: the batch's slot while it is written to; None: it gets memory of its own.
    """

    def __init__(
        self,
        items: Any,
        request: BatchRequest,
        report: dict[str, Any],
        error: BaseException | None = None,
        arena: Arena | None = None,
        dataset: Any = None,
    ) -> None:
        self.items, self.request, self.report, self.error, self.arena = items, request, report, error, arena
        self.dataset = dataset

    def name_of(self, position: int) -> str:
        """A sample by its index, and the file or row that it is of, as far as they are known."""
        indices = self._indices()
        if indices is None or position >= len(indices):
            return f"sample {position} of the batch"
        index = indices[position]
        try:
            return f"sample {index} ({self.dataset.source_of(index)})"
        except Exception:  # a foreign dataset has no such method; and an error must not hide the one that is told
            return f"sample {index}"

    def _indices(self) -> list[Any] | None:
        """The index of each item; None where it is not known."""
        indices, count = list(self.request), self.report["samples"]
        if len(indices) > count and isinstance(self.dataset, BaseDataset):
            skipped = {index for index, *_ in self.report["counts"].get("skipped_samples", ())}
            indices = [index for index, whole in zip(indices, self.dataset._whole_indices(indices), strict=True) if whole not in skipped]
        return indices if self.dataset is not None and len(indices) == count else None
