"""Rows of uncompressed Arrow files, of which only their own bytes are read, are those that pyarrow
decodes.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import FileChangedError, HeadraceError, TableDataset
from headrace.io.local_files import LocalFiles

pa = pytest.importorskip("pyarrow")
feather = pytest.importorskip("pyarrow.feather")

N = 211
BATCH = 60


def arrays_of(values: Any, size: int, **options: Any) -> Any:
    return pa.FixedSizeListArray.from_arrays(pa.array(values, **options), size)


def table_of_all_types() -> Any:
    drawn, rows = np.random.default_rng(0), range(N)
    pairs = arrays_of(arrays_of(range(6 * N), 3, type=pa.int16()), 2)
    images = [{"bytes": b"%d" % row, "path": None} if row % 5 else None for row in rows]
    kind = pa.fixed_shape_tensor(pa.int64(), [2, 3], permutation=[1, 0])
    return pa.table(
        {
            "integer": pa.array(np.arange(N) % 100, pa.int8()),
            "with_null": pa.array(drawn.random(N), mask=drawn.random(N) < 0.3),
            "half": drawn.random(N).astype("f2"),
            "bool": drawn.random(N) < 0.5,
            "text": [None if row % 11 == 3 else "ü" * (row % 7) for row in rows],
            "large": pa.array([f"text {row}" for row in rows], pa.large_string()),
            "bytes": [os.urandom(row % 50) for row in rows],
            "five": pa.array([bytes([row % 256]) * 5 for row in rows], pa.binary(5)),
            "list": [list(range(row % 5)) for row in rows],
            "texts": pa.array(
                [["a"] * (row % 3) if row % 4 else None for row in rows], pa.large_list(pa.utf8())
            ),
            "nested": [[[item] * item for item in range(row % 3)] for row in rows],
            "image": images,
            "null": pa.nulls(N),
            "coded": pa.array(
                [f"c{row % 3}" if row % 7 else None for row in rows]
            ).dictionary_encode(),
            "pairs": pairs,
            "with_nan": arrays_of(drawn.random(6 * N), 6, mask=drawn.random(6 * N) < 0.1),
            "wide": arrays_of(drawn.random(1500 * N), 1500),
            "bools": arrays_of(drawn.random(5 * N) < 0.5, 5),
            "two_texts": arrays_of([f"{item}ü" for item in range(2 * N)], 2),
            "tensor": pa.ExtensionArray.from_storage(kind, arrays_of(range(6 * N), 6)),
        }
    )


def write(path: Path, table: Any, is_stream: bool = False) -> Path:
    new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=BATCH)
    return path


@pytest.mark.parametrize("is_stream", [True, False])
def test_rows_are_those_that_pyarrow_decodes(tmp_path: Path, is_stream: bool) -> None:
    table = table_of_all_types()
    path = write(tmp_path / "a.arrow", table, is_stream)
    feather.write_feather(table, tmp_path / "b.arrow", compression="lz4", chunksize=BATCH)
    order = np.random.default_rng(1).integers(0, N, 90).tolist()
    columns = table.schema.names
    with TableDataset(path, columns) as plain, TableDataset(tmp_path / "b.arrow", columns) as other:
        assert "pread of the rows" in plain.explain()
        assert "record batch at a time" in other.explain()
        for indices in (order, [N - 1], range(N), [0, 0]):
            read, decoded = plain.sample_source.read(indices), other.sample_source.read(indices)
            for one, two in zip(read, decoded, strict=True):
                for name in columns:
                    np.testing.assert_equal(one[name], two[name], err_msg=name)
                    assert type(one[name]) is type(two[name]), name


@pytest.mark.parametrize("hole", ["row", "list inside", "number"])
def test_missing_numbers_are_errors(tmp_path: Path, hole: str) -> None:
    values: list[Any] = [[[1, 2], [3, 4]]] * 3
    values[1] = {"row": None, "list inside": [None, [3, 4]], "number": [[1, None], [3, 4]]}[hole]
    table = pa.table({"x": pa.array(values, pa.list_(pa.list_(pa.int32(), 2), 2))})
    feather.write_feather(table, tmp_path / "b.arrow", compression="lz4")
    for path in (write(tmp_path / "a.arrow", table), tmp_path / "b.arrow"):
        with TableDataset(path, "x") as dataset:
            assert dataset[2].tolist() == [[1, 2], [3, 4]]
            with pytest.raises(HeadraceError, match="'x' is null"):
                dataset[1]


def test_a_file_that_is_cut_short_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between the look at its version and the reading, where mapped memory would end the
    process.
    """
    path = write(tmp_path / "a.arrow", pa.table({"x": ["text" * 500] * N}))
    with TableDataset(path, "x") as dataset:
        assert len(dataset[0]) == 2000
        os.truncate(path, 40_000)
        with pytest.raises(FileChangedError):
            dataset.sample_source.read([N - 1, 3, 100])
        monkeypatch.setattr(LocalFiles, "check_open", lambda *_: None)
        with pytest.raises(HeadraceError, match=r"a\.arrow"):
            dataset.sample_source.read([N - 1, 3, 100])


def test_damaged_bytes_are_errors_or_other_values(tmp_path: Path) -> None:
    table = pa.table({"x": ["some text"] * 40, "y": [[1, 2, 3]] * 40, "z": range(40)})
    whole = write(tmp_path / "a.arrow", table).read_bytes()
    drawn, errors = random.Random(0), 0
    for number in range(60):
        damaged = bytearray(whole)
        for _ in range(4):
            damaged[drawn.randrange(len(whole))] ^= 1 << drawn.randrange(8)
        path = tmp_path / f"{number}.arrow"
        path.write_bytes(damaged)
        try:
            with TableDataset(path) as dataset:
                dataset.sample_source.read(range(len(dataset)))
        except HeadraceError:
            errors += 1
    assert 0 < errors < 60
