"""Targets of tables: dictionary-encoded texts are class numbers, other texts stay texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import SampleError, TableDataset
from tests.datasets.table.test_table import WRITERS, first_batch, write, written

pa = pytest.importorskip("pyarrow")  # in the extra `test`

N = 24
KINDS = [("oak", "ash", "elm")[row % 3] for row in range(N)]
CLASSES = ["ash", "elm", "oak"]


def kinds_table(kinds: list[Any] = KINDS, dtype: Any = None) -> Any:
    encoded = pa.array(kinds, dtype or pa.string()).dictionary_encode()
    return pa.table({"size": range(len(kinds)), "kind": encoded, "plain": kinds})


def test_dictionary_encoded_texts_are_classes(tmp_path: Path) -> None:
    for kind in WRITERS:
        path = written(tmp_path, kinds_table(), kind, rows=N)
        dataset = TableDataset(path, "size", target_name="kind")
        assert dataset.class_to_idx == {"ash": 0, "elm": 1, "oak": 2}
        assert [CLASSES[target] for _, target in dataset] == KINDS
        assert type(dataset[0][1]) is int
        targets = first_batch(dataset, N)[1]
        assert targets.dtype == torch.int64
        assert [CLASSES[target] for target in targets] == KINDS
        for part in dataset.split(0.5, stratify=True):
            assert np.bincount(part.targets).tolist() == [4, 4, 4]
        texts = TableDataset(path, "size", target_name="plain")
        assert [target for _, target in texts] == KINDS
        assert texts.classes == []


def test_codes_beyond_the_dictionary_are_errors(tmp_path: Path) -> None:
    """Nulls, too: pyarrow itself ends the process where it meets such codes beside them."""
    for code in (-1, 3):
        codes = pa.array([0, code, 1, None], pa.int32())
        kinds = pa.DictionaryArray.from_arrays(codes, ["oak", "ash", None], safe=False)
        path = write(tmp_path / "a.arrow", pa.table({"kind": kinds}), "arrow", rows=4)
        with TableDataset(path, "kind") as dataset:
            assert [dataset[0], dataset[2]] == ["oak", "ash"]
            for read in (lambda: dataset[1], lambda: dataset.__getitems__([0, 1, 2])):
                with pytest.raises(SampleError, match=f"item {code} of its dictionary"):
                    read()


def test_dictionaries_of_any_type_and_file(tmp_path: Path) -> None:
    tables = [kinds_table(dtype=dtype) for dtype in (pa.large_string(), pa.string_view())]
    unused = pa.DictionaryArray.from_arrays([1, 2, 0] * 8, ["elm", "oak", "ash", "fir"])
    tables.append(pa.table({"size": range(N), "kind": unused}))
    for table in tables:
        path = write(tmp_path / "a.arrow", table, "arrow", rows=N)
        with TableDataset(path, "size", target_name="kind") as dataset:
            assert dataset.classes == CLASSES
            assert dataset[0][1] == 2
    # each row group has a dictionary of its own
    first = write(tmp_path / "a.parquet", kinds_table(KINDS[:10]), rows=2)
    second = write(tmp_path / "b.parquet", kinds_table(["yew", "ash"]))
    with TableDataset([first, second], "size", target_name="kind") as dataset:
        assert dataset.classes == [*CLASSES, "yew"]
        assert [dataset.classes[target] for _, target in dataset] == [*KINDS[:10], "yew", "ash"]
