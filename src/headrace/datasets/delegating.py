"""Datasets over another one, which says what a sample is, with a mode, a budget and an order of
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder, chained, wrapped_decoder
from headrace.core.views import ColumnsOfView
from headrace.storage.source import Source


class DelegatingDataset(BaseDataset):
    """The records of another dataset of headrace's, in the format that they have there.

    Args:
        inner: the dataset inside, or a view of one; in mode "lazy", so that it holds nothing.
        source: its records, numbered as there.
        adds_transforms: True if there are transforms that the dataset inside does not know of.
        **options: of `BaseDataset`.
    """

    def __init__(
        self, inner: BaseDataset, source: Source, adds_transforms: bool = False, **options: Any
    ) -> None:
        self._inner, self._adds_transforms = inner, adds_transforms
        super().__init__(
            source, sample_decoder=wrapped_decoder(inner), targets=inner.targets, **options
        )
        self.fork_safe: bool = inner.fork_safe
        self.collate: Callable[[list[Any]], Any] | str | None = inner.collate
        chosen = inner._chosen  # the samples inside are numbered as there
        columns = inner.label_columns
        if columns is not BaseDataset.label_columns:
            self.label_columns: Mapping[str, Any] = (
                columns if chosen is None else ColumnsOfView(columns, chosen)
            )
        for name in ("classes", "class_to_idx", "column_classes"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def _with_transform(self, transform: Any) -> tuple[Decoder, Callable[[Any], Any] | None]:
        return (
            (self._decoder, chained(transform))
            if self._adds_transforms
            else super()._with_transform(transform)
        )

    def seed_index(self, index: int) -> int:
        return self._inner.seed_index(super().seed_index(index))

    def seeded_objects(self) -> Iterator[Any]:
        """First the inner dataset's: each generator gets the stream that it has there."""
        inner = self._inner.public_attributes()
        inner.update(
            transform=self.transform,
            target_transform=self.target_transform,
            transforms=self.transforms,
        )
        yield from inner.values()
        yield from super().seeded_objects()

    def held_nbytes(self) -> int | None:
        return self._inner.held_nbytes() if self._inner._chosen is None else None

    def held_as(self) -> str:
        return self._inner.held_as()

    @property
    def holds_encoded(self) -> bool:
        return self._inner.holds_encoded
