"""How does a dataset go by another one, which says what a sample is, and have a mode, a budget and an order of its own?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.filling import Like
from headrace.errors import SampleError
from headrace.order.seeding import SampleSeeder


class DelegatingDataset(BaseDataset):
    """The records of another dataset of headrace's, decoded, paired and presented as there.

    Subclasses set `_inner` before they call ``__init__``, and take over its targets and transforms; `_adopt_traits` after it.
    """

    _inner: BaseDataset
    """The dataset inside, or a view of one; in mode "lazy", so that it holds nothing."""
    _transforms_added = False
    """Are there transforms that the dataset inside does not know of?"""

    def _adopt_traits(self) -> None:
        """What loaders and users look for at the dataset inside."""
        inner = self._inner
        self.fork_safe: bool = inner.fork_safe
        self.collate: Callable[[list[Any]], Any] | str | None = inner.collate
        self.always_pairs: bool = inner.always_pairs
        self._augment, self.names_warnings = inner._augment, inner.names_warnings
        for name in ("classes", "class_to_idx"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def _replace_transform(self, transform: Any) -> None:
        if self._transforms_added:
            return super()._replace_transform(transform)
        self._inner = copy.copy(self._inner)
        self._inner._replace_transform(transform)
        self.transform, self.transforms, self._augment = self._inner.transform, self._inner.transforms, self._inner._augment

    def decode(self, record: Any) -> Any:
        return self._inner.decode(record)

    @property
    def stores_values(self) -> bool:
        return self._inner.stores_values

    @property
    def decodes_together(self) -> bool:
        return self._inner.decodes_together

    def decode_together(self, found: Sequence[tuple[int, Any]], failed: Callable[[int, str, Exception], SampleError]) -> list[Any]:
        chosen = self._inner._chosen
        inside = found if chosen is None else [(int(chosen[index]), record) for index, record in found]
        return self._inner.decode_together(inside, failed)

    def pair(self, index: int, value: Any) -> tuple[Any, Any]:
        if type(self._inner).pair is BaseDataset.pair:
            return super().pair(index, value)  # by this dataset's `targets`, which a user may replace
        return self._inner.pair(int(self._whole_indices(index)), value)

    def present(self, value: Any) -> Any:
        return self._inner.present(value)

    def assemble(self, value: Any, target: Any) -> Any:
        return self._inner.assemble(value, target)

    @property
    def _is_fillable(self) -> bool:
        return not (self.return_index or self._is_transformed) and self._inner._is_fillable

    @property
    def _copies(self) -> bool:
        return self._inner._copies

    def value_like(self) -> Like | None:
        return self._inner.value_like()

    def input_like(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Like | None:
        return self._inner.input_like(shape, dtype)

    def draw(self, value: Any) -> Any:
        return self._inner.draw(value)

    def present_into(self, value: Any, drawn: Any, out: npt.NDArray[Any]) -> None:
        self._inner.present_into(value, drawn, out)

    def is_late(self, error: Exception) -> bool:
        return self._inner.is_late(error)

    def held_nbytes(self) -> int | None:
        return self._inner.held_nbytes() if self._inner._chosen is None else None

    def sample_nbytes(self) -> int | None:
        return None if self._transforms_added else self._inner.sample_nbytes()

    def held_as(self) -> str:
        return self._inner.held_as()

    @property
    def holds_encoded(self) -> bool:
        return self._inner.holds_encoded

    def _new_seeder(self) -> SampleSeeder:
        inner = {name: value for name, value in vars(self._inner).items() if not name.startswith("_")}
        inner.update(transform=self.transform, target_transform=self.target_transform, transforms=self.transforms)
        own = (value for name, value in vars(self).items() if not name.startswith("_"))
        holders = *inner.values(), *own  # first the inner's: each generator gets the stream that it has there
        chosen = self._inner._chosen
        return SampleSeeder(*holders) if chosen is None else ViewSeeder(chosen, *holders)


class ViewSeeder(SampleSeeder):
    """Seeds a sample of a view as the same sample of the whole dataset."""

    def __init__(self, chosen: npt.NDArray[np.int64], *holders: object) -> None:
        super().__init__(*holders)
        self._chosen = chosen

    def __call__(self, seed: int, epoch: int, index: int, k: int = 0) -> None:
        super().__call__(seed, epoch, int(self._chosen[index]), k)
