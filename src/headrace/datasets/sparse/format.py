"""What a sample of a `SparseDataset` is."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.core.batch import BatchReader, Collating
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder, plain_target
from headrace.datasets.sparse.batches import SparseLayout, to_sample
from headrace.datasets.sparse.ways import reader_of_rows
from headrace.dtypes import ArraySpec
from headrace.errors import ConfigError
from headrace.memory.budget import format_size


class SparseDecoder(Decoder):
    """Rows as dense tensors, sparse CSR tensors, or pairs of columns and values. Values are the
    records, so modes hold rows sparse.

    Args:
        columns: of a row.
        dtype: of its values.
        layout: of samples and batches.
    """

    copies = False

    def __init__(self, columns: int, dtype: np.dtype[Any], layout: SparseLayout) -> None:
        self.columns = columns
        self.dtype = dtype
        self.layout = layout

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        targets = dataset.targets
        if isinstance(targets, np.ndarray) and targets.dtype.names is not None:
            row = targets[index]
            return value, {name: plain_target(row[name]) for name in targets.dtype.names}
        return super().split_target(value, index, dataset)

    def to_input(self, value: Any) -> Any:
        return to_sample(value, self.columns, self.layout)

    def input_spec(self, value: ArraySpec) -> ArraySpec | None:
        return None

    def sample_nbytes(self) -> int | None:
        return self.columns * self.dtype.itemsize if self.layout == "dense" else None

    def packed_value(self, value: Any) -> Any:
        if self.layout != "dense":
            raise ConfigError(
                f"layout={self.layout!r}: sparse rows can't be packed. Leave the file as it is: "
                "SparseDataset reads it in place. Or pass layout='dense' to pack dense rows, of "
                f"{format_size(self.columns * self.dtype.itemsize)} each"
            )
        return to_sample(value, self.columns, "dense").numpy()

    def own_reader(self, dataset: Any, collating: Collating) -> BatchReader | None:
        return reader_of_rows(dataset, collating, self.columns, self.layout)
