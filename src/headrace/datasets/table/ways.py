"""Makes batches of tables column by column, without making samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.casting import cast_into
from headrace.core.batcher import Collating, ColumnReader, is_known
from headrace.core.dataset import BaseDataset
from headrace.dtypes import ArraySpec
from headrace.storage.table.source import TableSource

Specs = Mapping[str, ArraySpec | None]


def reader_of_columns(
    dataset: BaseDataset, collating: Collating, stored: Specs, specs: Specs, lists: frozenset[str]
) -> ColumnReader | None:
    """What makes stacked batches of dicts, where nothing is held. None: samples are made one by
    one.

    Args:
        dataset: of a table.
        collating: the collate function.
        stored: shape and dtype of the values of each column, if they are alike.
        specs: those that they are cast to.
        lists: names of columns whose values become lists.
    """
    source = dataset.sample_source
    if not isinstance(source, TableSource) or source.is_one or not collating.stacks:
        return None
    if not dataset.value_source.is_direct or not dataset.sample_decoder.makes_plain_samples:
        return None
    if dataset.sample_decoder.splits_targets:
        return None
    if not all(name in lists or is_known(spec) for name, spec in specs.items()):
        return None
    cast = {name: spec for name, spec in stored.items() if spec and spec != specs[name]}

    def read(indices: npt.NDArray[np.int64], outs: dict[str, Any]) -> int:
        beside = {
            name: np.empty((len(indices), *spec.shape), spec.dtype) for name, spec in cast.items()
        }
        source.read_columns(indices, {**outs, **beside})
        for name, values in beside.items():
            cast_into(values, outs[name])
        return sum(_nbytes(out) for out in (*outs.values(), *beside.values()))

    return ColumnReader("column by column, straight from storage", dataset, dict(specs), read)


def _nbytes(out: Any) -> int:
    if isinstance(out, list):
        return sum(len(value) for value in out if value)
    return int(out.nbytes)
