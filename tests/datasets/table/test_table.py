"""TableDataset over Parquet and Arrow files: samples, images, texts, and files that are none."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import (
    BudgetError,
    ConfigError,
    DataNotFoundError,
    FileChangedError,
    FormatError,
    HeadraceWarning,
    ImageDataset,
    Loader,
    MissingNameError,
    SampleError,
    TableDataset,
    create_dataloader,
    open_dataset,
)
from headrace.formats.table import arrow
from headrace.io.remote_files import RemoteFiles
from headrace.testing.contract import DatasetContract, same
from tests.data.make import image_bytes
from tests.datasets.remote_contract import RemoteDatasetContract
from tests.servers.ranges import RangeServer

pa = pytest.importorskip("pyarrow")  # in the extra `test`
pq = pytest.importorskip("pyarrow.parquet")
pe = pytest.importorskip("pyarrow.parquet.encryption")

N = 57
WRITERS = ("parquet", "arrow", "stream", "feather")
"""Parquet; Arrow files and streams, of which only the rows are read; Feather, whose buffers are
compressed.
"""


def some_table(n: int = N, start: int = 0) -> Any:
    rows = range(start, start + n)
    random = np.random.default_rng(start)
    vectors = random.random((n, 3), np.float32)
    return pa.table(
        {
            "number": pa.array(rows, pa.int32()),
            "truth": pa.array([row % 3 == 0 for row in rows]),
            "half": pa.array(np.arange(n, dtype=np.float16)),
            "real": pa.array([None if row % 7 == 6 else row / 3 for row in rows], pa.float64()),
            "text": pa.array(
                [None if row % 11 == 10 else f"Zeile {row} äöü" * (row % 3) for row in rows],
                pa.string(),
            ),
            "word": pa.array([f"w{row % 4}" for row in rows], pa.string()).dictionary_encode(),
            "blob": pa.array([bytes([row % 256]) * (row % 5) for row in rows], pa.large_binary()),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 3),
            "ragged": pa.array(
                [[float(item) for item in range(row % 4)] for row in rows], pa.list_(pa.float32())
            ),
            "nested": pa.array([[[1, 2], [row]] for row in rows], pa.list_(pa.list_(pa.int64()))),
            "words": pa.array([["a", f"b{row}"] for row in rows]),
            "inner": pa.array([{"x": row, "y": None if row % 2 else str(row)} for row in rows]),
        }
    )


def write(path: Path, table: Any, kind: str = "parquet", rows: int = 10, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=rows, **options)
        return path
    new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    compression = "zstd" if kind == "feather" else None
    how = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema, options=how) as out:
        out.write_table(table, max_chunksize=rows)
    return path


def name_of(kind: str) -> str:
    return "a.parquet" if kind == "parquet" else "a.arrow"


def written(folder: Path, table: Any, kind: str, rows: int = 10) -> Path:
    """In a folder of its kind."""
    return write(folder / kind / name_of(kind), table, kind, rows)


def loader_of(dataset: Any, batch_size: int, **options: Any) -> Loader:
    return create_dataloader(
        dataset, batch_size=batch_size, **{"shuffle": False, "num_workers": 0, **options}
    )


def first_batch(dataset: Any, batch_size: int) -> Any:
    return next(iter(loader_of(dataset, batch_size)))


def expected(row: int, vectors: Any) -> dict[str, Any]:
    return {
        "number": torch.tensor(row, dtype=torch.int32),
        "truth": torch.tensor(row % 3 == 0),
        "half": torch.tensor(float(row), dtype=torch.float16),
        "real": torch.tensor(math.nan if row % 7 == 6 else row / 3, dtype=torch.float64),
        "text": None if row % 11 == 10 else f"Zeile {row} äöü" * (row % 3),
        "word": f"w{row % 4}",
        "blob": bytes([row % 256]) * (row % 5),
        "vector": torch.from_numpy(vectors[row]),
        "ragged": torch.arange(float(row % 4)),
        "nested": [torch.tensor([1, 2]), torch.tensor([row])],
        "words": ["a", f"b{row}"],
        "inner": {"x": torch.tensor(row), "y": None if row % 2 else str(row)},
    }


# -- what samples are


@pytest.mark.parametrize("kind", WRITERS)
def test_samples_are_dicts_of_values(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / name_of(kind), some_table(), kind)
    vectors = np.random.default_rng(0).random((N, 3), np.float32)
    for mode in ("lazy", "eager", "cached"):
        with TableDataset(path, loading_mode=mode, progress=False) as dataset:
            assert len(dataset) == N
            assert dataset.blocks().tolist() == [10] * 5 + [7]
            for row in (0, 9, 10, 33, 56, -1):
                sample, wanted = dataset[row], expected(row % N, vectors)
                real, other = sample["real"], wanted["real"]
                assert list(sample) == list(wanted)
                assert real.dtype == other.dtype
                sample["real"], wanted["real"] = torch.nan_to_num(real), torch.nan_to_num(other)
                assert same(sample, wanted), (mode, row)
            assert dataset.source_of(12) == f"{path}, row 12"


def test_files_of_all_kinds_are_one_table(tmp_path: Path) -> None:
    sizes = [("parquet", 12), ("stream", 0), ("parquet", 0), ("arrow", 1), ("feather", 25)]
    paths = [
        write(tmp_path / f"{number}-{name_of(kind)}", some_table(n, 100 * number), kind)
        for number, (kind, n) in enumerate(sizes)
    ]
    with TableDataset(paths, ["number", "text"]) as dataset:
        wanted = [*range(12), 300, *range(400, 425)]
        assert [int(sample["number"]) for sample in dataset] == wanted
        assert dataset.source_of(13) == f"{paths[4]}, row 0"
        batch = dataset.__getitems__([37, 0, 12, 0])
        assert [int(sample["number"]) for sample in batch] == [424, 0, 300, 0]
        assert "row group" in dataset.explain()
        assert "pread of the rows" in dataset.explain()


def test_one_column_alone_is_the_sample(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", some_table())
    with TableDataset(path, "vector", target_name="number") as dataset:
        vector, target = dataset[5]
        assert vector.shape == (3,)
        assert target == 5
        assert dataset.targets.dtype == np.int32
        loader = loader_of(dataset, 8)
        assert "straight from storage" in loader.explain()
        vectors, targets = next(iter(loader))
        assert vectors.shape == (8, 3)
        assert same(vectors[5], vector)
        assert targets.tolist() == list(range(8))
    with TableDataset(path, "text") as texts, TableDataset(path, ["text"]) as dicts:
        assert texts[2] == "Zeile 2 äöü" * 2
        assert dicts[2] == {"text": texts[2]}


# one by one; together, and cast; wide ones by themselves
@pytest.mark.parametrize(
    ("few", "wide", "dtype"), [(8, 8192, None), (1, 8192, "float16"), (1, 1, None)]
)
def test_columns_are_batched_without_samples(
    few: int, wide: int, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.formats.table.source._FEW", few)
    monkeypatch.setattr("headrace.formats.table.source._WIDE", wide)
    path = write(tmp_path / "a.parquet", some_table())
    columns = ["number", "vector", "word", "truth"]
    with TableDataset(path, columns, target_name="half", dtype=dtype) as dataset:
        loader = loader_of(dataset, 16, shuffle=True, seed=2)
        assert "column by column" in loader.explain()
        one_by_one = dataset.with_transform(dict)
        plain = loader_of(one_by_one, 16, shuffle=True, seed=2)
        for batch, other in zip(loader, plain, strict=True):
            assert same(batch, other)
            rows, targets = batch
            assert rows["vector"].shape[1:] == (3,)
            assert rows["number"].dtype == (torch.float16 if dtype else torch.int32)
            assert targets.dtype == torch.float64


def test_targets_are_no_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", some_table())
    with TableDataset(path, target_name="word") as dataset:
        row, _ = dataset[6]
        assert "word" not in row and len(row) == 11
    tags = pa.array([[3, 7], [5], []], pa.list_(pa.int64()))
    path = write(tmp_path / "b.parquet", pa.table({"x": [1.0, 2.0, 3.0], "tags": tags}))
    dataset = TableDataset(path, "x", target_name="tags")
    assert [target.tolist() for _, target in dataset] == [[3, 7], [5], []]


def test_the_row_of_a_missing_target_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "texts.parquet", some_table())
    with pytest.raises(FormatError, match="row 10: column 'text'"):
        TableDataset(path, target_name="text")
    for null, where in ((0, "a.parquet, row 0"), (2, "b.parquet, row 0"), (4, "b.parquet, row 2")):
        numbers = [None if row == null else row for row in range(5)]
        table = pa.table({"x": range(5), "y": pa.array(numbers, pa.int64())})
        write(tmp_path / "y" / "a.parquet", table.slice(0, 2))
        write(tmp_path / "y" / "b.parquet", table.slice(2))
        with pytest.raises(FormatError, match=f"{where}: column 'y'"):
            TableDataset(tmp_path / "y", target_name="y")


@pytest.mark.parametrize("axes", [None, (1, 2, 0)])
def test_tensors_of_arrow_keep_their_shape(axes: Any, tmp_path: Path) -> None:
    values = np.arange(N * 24, dtype=np.float32).reshape(N, 2, 3, 4)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    if axes is not None:
        of_axes = pa.fixed_shape_tensor(pa.float32(), (2, 3, 4), permutation=axes)
        tensors = pa.ExtensionArray.from_storage(of_axes, tensors.storage)
        values = values.transpose(0, *(axis + 1 for axis in axes))
    for kind in WRITERS:
        path = written(tmp_path, pa.table({"m": tensors, "number": pa.array(range(N))}), kind)
        with TableDataset(path) as dataset:
            assert dataset[1]["m"].shape == values.shape[1:]
            for batch in loader_of(dataset, 10, shuffle=True):
                assert np.array_equal(batch["m"].numpy(), values[batch["number"].numpy()]), kind
        with TableDataset(path, "m") as dataset:
            assert np.array_equal(dataset[N - 1].numpy(), values[-1]), kind


def test_shapes_and_classes_of_huggingface(tmp_path: Path) -> None:
    features = {
        "x": {"_type": "Array2D", "shape": [2, 3], "dtype": "int32"},
        "label": {"_type": "ClassLabel", "names": ["cat", "dog"]},
    }
    schema = pa.schema(
        {"x": pa.list_(pa.list_(pa.int32())), "label": pa.int64()},
        {"huggingface": json.dumps({"info": {"features": features}})},
    )
    rows = [[[1, 2, 3], [4, 5, row]] for row in range(12)]
    table = pa.table({"x": rows, "label": [0, 1] * 6}, schema)
    for kind in WRITERS:
        with TableDataset(written(tmp_path, table, kind, 5), ["x"], target_name="label") as dataset:
            assert dataset[7][0]["x"].tolist() == rows[7]
            assert dataset.class_to_idx == {"cat": 0, "dog": 1}
            batch, labels = first_batch(dataset, 6)
            assert batch["x"].shape == (6, 2, 3)
            assert labels.tolist() == [0, 1] * 3
        other = pa.table({"x": [*rows[:-1], [[1], [2]]], "label": [0] * 12}, schema)
        dataset = TableDataset(written(tmp_path, other, kind), ["x"])
        with dataset, pytest.raises(SampleError, match=r"\[2, 3\]"):
            dataset[11]


def test_a_column_called_index_is_not_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", pa.table({"index": ["q", "w"], "x": [1, 2]}))
    assert TableDataset(path)[1] == {"index": "w", "x": torch.tensor(2)}
    with pytest.raises(ConfigError, match="'index'"):
        TableDataset(path, return_index=True)[0]
    assert TableDataset(path, ["x"], return_index=True)[1] == {"index": 1, "x": torch.tensor(2)}


def test_texts_of_many_rows_are_those_of_pyarrow(tmp_path: Path) -> None:
    """Row groups of ASCII texts, of others, and of none; numbers beside them."""
    texts: list[str | None] = [f"{'ä' if 100 <= row < 200 else 'a'} {row}" for row in range(400)]
    texts[5::13] = [None] * len(texts[5::13])
    texts += [None] * 100
    vectors = np.random.default_rng(1).random((500, 5), np.float32)
    columns = {
        "text": pa.array(texts, pa.large_string()),
        "row": range(500),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 5),
    }
    path = write(tmp_path / "a.parquet", pa.table(columns), rows=100)
    for shuffle in ("block", True, False):
        for batch in loader_of(path, 60, shuffle=shuffle):
            rows = batch["row"].tolist()
            assert batch["text"] == [texts[row] for row in rows]
            assert np.array_equal(batch["vector"].numpy(), vectors[rows])


@pytest.mark.parametrize("kind", ["parquet", "arrow", "feather"])
def test_repeated_texts_stay_dictionaries(kind: str, tmp_path: Path) -> None:
    long, n = "A" * 2000, 20_000
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, "i4")), pa.array([long]))
    columns = {"x": texts, "numbers": pa.array([[7, 7]] * n)}
    if kind == "parquet":
        columns["s"] = pa.array([{"bytes": long.encode()}] * n)
    path = write(tmp_path / f"a.{kind}", pa.table(columns), kind, rows=n)
    with TableDataset(path) as dataset:
        (table,) = dataset.sample_source.tables
        if not table.is_in_place:
            block = table.decode(0, dataset.sample_source._blocks.read([0])[0])
            assert block.nbytes < 1_000_000  # decoded texts are 40 MB
        assert dataset.sample_source.layout_nbytes >= 16 * n or kind == "feather"  # the lists
        assert dataset[n - 1]["x"] == long
        if kind == "parquet":
            assert dataset[3]["s"] == {"bytes": long.encode()}


# -- what is decoded, and held


def test_each_row_group_is_decoded_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", some_table(400), rows=20)
    with TableDataset(path, ["number"]) as dataset:
        for options in ({"shuffle": "block", "interleave": 4, "turns": 2}, {"shuffle": True}):
            loader = loader_of(dataset, 10, **options)
            for _ in range(2):
                seen = torch.cat([batch["number"] for batch in loader])
                assert sorted(seen.tolist()) == list(range(400)), options
            assert loader.get_stats()["chunks_decoded"] <= 20 + 4 * 2 - 1, options
    TableDataset(path, ["number"], max_memory_usage=900).close()
    with pytest.raises(BudgetError):
        TableDataset(path, ["number"], max_memory_usage=50)
    path = write(tmp_path / "a.arrow", some_table(400), "stream", rows=400)
    with TableDataset(path, ["number"], max_memory_usage=900) as dataset:  # read in place
        assert int(dataset[399]["number"]) == 399
        assert dataset.sample_source.block_nbytes == 0


@pytest.mark.parametrize(("usage", "decodes"), [("64MB", 20), ("8MB", 60)])
def test_a_small_table_stays_decoded_in_blocks(tmp_path: Path, usage: str, decodes: int) -> None:
    """Where there is room for it; what is cached stays below what is reserved."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(20_000 * 64, np.float32)), 64)
    table = pa.table({"row": range(20_000), "vector": vectors})
    path = write(tmp_path / "a.parquet", table, rows=1000, use_dictionary=False)
    with TableDataset(path, max_memory_usage=usage) as dataset:
        loader = loader_of(dataset, 100, shuffle="block", interleave=2, turns=1)
        cached = dataset.sample_source._opened.chunks  # type: ignore[union-attr]
        for _ in range(3):
            rows = list[int]()
            for batch in loader:
                rows += batch["row"].tolist()
                reserved = dataset.budget.limit - dataset.budget.available
                assert cached.nbytes <= cached.max_bytes <= reserved
            assert sorted(rows) == list(range(20_000))
        assert decodes <= loader.get_stats()["chunks_decoded"] <= decodes + 3 * 1
        if usage == "8MB":  # random rows would decode each block again and again
            with pytest.warns(HeadraceWarning, match=r"TableDataset take 5\.\d MB"):
                loader_of(dataset, 8, shuffle=True)


# -- images


def encoded(number: int, size: tuple[int, int] = (20, 14), kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (*size[::-1], 3), np.uint8)
    return image_bytes(pixels, kind)


def test_bytes_are_decoded_by_extension(tmp_path: Path) -> None:
    images = [encoded(0), None, b"no image", encoded(3)]
    table = pa.table({"image": images, "text": ["a"] * 4, "note": [b'{"x": 1}'] * 4})
    path = write(tmp_path / "a.parquet", table)
    decode: Any = {"image": "png", "note": json.loads}
    with TableDataset(path, decode=decode, on_error="skip") as dataset:
        batch = next(iter(loader_of(dataset, 4, collate_fn="list")))
        assert [sample["note"] for sample in batch] == [{"x": 1}] * 2
        assert batch[0]["image"].dtype == torch.uint8 and batch[0]["image"].shape[0] == 3
    with TableDataset(path, "image", decode={"image": "png"}) as dataset:
        for row, said in ((1, "row 1: column 'image'"), (2, "sample 2")):
            with pytest.raises(SampleError, match=said):
                dataset[row]
    for wrong in ({"image": "doc"}, {"text": "txt"}, {"x": "png"}, "png"):
        with pytest.raises(ConfigError, match="decode"):
            TableDataset(path, decode=wrong)  # type: ignore[arg-type]


# -- arguments and files that make no sense


def test_arguments_that_make_no_sense(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", some_table())
    bad: tuple[tuple[dict[str, Any], str], ...] = (
        ({"columns": ["number", "number"]}, "columns"),
        ({"columns": []}, "columns"),
        ({"column": "number"}, "columns"),
        ({"target_name": 3}, "target_name"),
    )
    for options, said in bad:
        with pytest.raises(ConfigError, match=said):
            TableDataset(path, **options)


@pytest.mark.falls_back
@pytest.mark.parametrize("kind", WRITERS)
def test_columns_that_cant_be_read_are_named(kind: str, tmp_path: Path) -> None:
    decimals = pa.array([[{"a": 1}]] * 3, pa.list_(pa.struct({"a": pa.decimal128(5, 2)})))
    table = pa.table(
        {
            "n": pa.array([1, None, 3]),
            "m": [1, 2, 3],
            "when": pa.array([0] * 3, pa.timestamp("us")),
            "deep": decimals,
        }
    )
    path = write(tmp_path / name_of(kind), table, kind)
    for options in (
        {"columns": "x"},
        {"columns": ["m", "x"]},
        {"columns": ["m"], "target_name": "x"},
    ):
        with pytest.raises(MissingNameError, match=r"a\.\w+ .*'x'.*: deep, m, n, when"):
            TableDataset(path, **options)
    for columns, said in ((None, r"'when' .*timestamp\[us\]"), ("deep", r"decimal128\(5, 2\)")):
        with pytest.raises(FormatError, match=said):
            TableDataset(path, columns)
    columns = ["n", "m"]
    with (
        TableDataset(path, columns) as dataset,
        pytest.raises(SampleError, match=r"sample 1 .*row 1: column 'n'"),
    ):
        list(loader_of(dataset, 3))
    with TableDataset(path, columns, on_error="skip") as dataset:
        assert first_batch(dataset, 3)["n"].tolist() == [1, 3]


def test_files_that_differ_are_no_table(tmp_path: Path) -> None:
    for kind in WRITERS:
        folder = tmp_path / kind
        write(folder / f"0{name_of(kind)}", pa.table({"n": [1], "x": [0.5]}), kind)
        write(folder / f"1{name_of(kind)}", pa.table({"n": ["a"], "x": [0.5]}), kind)
        with pytest.raises(FormatError, match="column 'n' is string here, and int64 there"):
            TableDataset(folder)
        with TableDataset(folder, "x") as dataset:
            assert len(dataset) == 2
        texts = [pa.nulls(2), pa.array(["a", None])]
        parts = [
            write(folder / f"t{n}{name_of(kind)}", pa.table([texts[n]], ["t"]), kind)
            for n in (0, 1)
        ]
        assert list(TableDataset(parts, "t")) == [None, None, "a", None]


def test_a_file_that_is_cut_short_or_none(tmp_path: Path) -> None:
    for kind in WRITERS:
        path = written(tmp_path, some_table(), kind)
        whole = path.read_bytes()
        end = 100 if kind == "stream" else 12
        contents = [whole[:size] for size in (0, 3, 9, len(whole) // 2, len(whole) - end)]
        for content in (*contents, b"<html>" * 50, b"name,number\nx,1\n"):
            path.write_bytes(content)
            with pytest.raises(FormatError, match=path.name):
                TableDataset(path)


def test_a_row_group_that_is_cut_short(tmp_path: Path) -> None:
    """The footer is sound, and says of a row group more than there is."""
    path = write(tmp_path / "a.parquet", some_table(), compression="none")
    data, group = path.read_bytes(), pq.read_metadata(path).row_group(3)
    first, last = group.column(0), group.column(group.num_columns - 1)
    start = first.dictionary_page_offset or first.data_page_offset
    stop = (last.dictionary_page_offset or last.data_page_offset) + last.total_compressed_size
    path.write_bytes(data[: start + 20] + bytes(stop - start - 20) + data[stop:])
    with TableDataset(path) as dataset:
        assert dataset[29]["words"] == ["a", "b29"]
        with pytest.raises(SampleError, match=r"sample 33 .*a.parquet, row 33.*row group 3"):
            dataset[33]
    with TableDataset(path, on_error="skip") as dataset:
        assert len(dataset.__getitems__([28, 29, 33, 40])) == 3
    # all that lies before is gone: the footer's places lead behind the end
    path.write_bytes(data[:4] + data[start:])
    with pytest.raises(FormatError, match=r"a.parquet.*row group \d"):
        TableDataset(path)


def test_a_record_batch_that_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", some_table(), "feather")
    data = bytearray(path.read_bytes())
    with TableDataset(path, "text") as dataset:
        table = dataset.sample_source.tables[0]
        start, _, stop = table._places.array[2].tolist()
    middle = data.index(bytes.fromhex("28b52ffd"), start)  # a zstd frame
    data[middle : stop - 8] = bytes(stop - 8 - middle)
    path.write_bytes(data)
    with TableDataset(path, "text") as dataset:
        assert dataset[0] == ""
        with pytest.raises(SampleError, match=r"sample 21 .*row 21.* record batch 2"):
            dataset[21]


def of_arrow(is_stream: bool, **columns: Any) -> bytes:
    table, sink = pa.table(columns), pa.BufferOutputStream()
    with (pa.ipc.new_stream if is_stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


@pytest.mark.parametrize("is_stream", [False, True])
def test_forged_arrow_files_are_errors_of_ours(is_stream: bool, tmp_path: Path) -> None:
    three, many = struct.pack("<q", 3), struct.pack("<q", 140_000_000_000)
    forged = [of_arrow(is_stream, x=pa.array([1, None, 3])).replace(b"x\0\0\0", b"\xff\0\0\0")]
    for values in ([1, 2, 3], ["a", "b", "c"], [True, None, False], [[1], [2], None]):
        forged.append(of_arrow(is_stream, x=pa.array(values)).replace(three, many))
    if not is_stream:
        whole = of_arrow(is_stream, x=pa.array([1, 2, 3]))
        forged.append(whole[:8] + bytes(8) + whole[16:])
    path = tmp_path / "a.arrow"
    for data in forged:
        path.write_bytes(data)
        with pytest.raises((FormatError, SampleError)):
            _ = TableDataset(path)[2]
    # rows of no bytes take no memory
    path.write_bytes(of_arrow(is_stream, x=pa.array([b""] * 3, pa.binary(0))).replace(three, many))
    with TableDataset(path) as dataset:
        assert len(dataset) == 140_000_000_000
        assert dataset[10**10] == {"x": b""}


def test_opening_a_remote_arrow_file_takes_a_few_round_trips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one for each record batch, of which its footer says where they lie."""
    monkeypatch.setattr(arrow, "_REMOTE", 1 << 10)
    table = some_table(640)
    words = table["word"].combine_chunks().dictionary_encode()
    table = table.set_column(table.schema.get_field_index("word"), "word", words)
    path = write(tmp_path / "a.arrow", table, "arrow", rows=10)
    read = RemoteFiles.read
    asked = list[int]()

    def counted(self: RemoteFiles, ranges: Any) -> Any:
        asked.append(ranges.size)
        return read(self, ranges)

    monkeypatch.setattr(RemoteFiles, "read", counted)
    with RangeServer(tmp_path) as server:
        url = f"{server.url}/a.arrow"
        with TableDataset(url, cache_dir=tmp_path / "cache", progress=False) as far:
            assert len(asked) < 8 and max(asked) > 64, asked
            with TableDataset(path) as near:
                assert same(list(far), list(near))
        data = path.read_bytes()
        end = len(data) - 10 - int.from_bytes(data[-10:-6], "little")
        for at in range(end, len(data), 1179):  # whatever its footer says
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
            with contextlib.suppress(FormatError, SampleError):
                assert len(TableDataset(url, cache_dir=tmp_path / "cache", progress=False)) <= 640


def test_a_file_that_changes_is_not_read_on(tmp_path: Path) -> None:
    for kind in WRITERS:
        path = written(tmp_path, some_table(), kind)
        with TableDataset(path, ["number"], on_error="skip") as dataset:
            dataset[0]
            os.utime(path, (1, 1))
            with pytest.raises(FileChangedError):
                dataset[1]


class _Keys(pe.KmsClient):  # type: ignore[misc]
    """Leaves keys as they are."""

    def wrap_key(self, key_bytes: bytes, _: str) -> bytes:
        return base64.b64encode(key_bytes)


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_encrypted_files_are_refused(plaintext_footer: bool, tmp_path: Path) -> None:
    """At the metadata of encrypted columns pyarrow aborts the process."""
    path = tmp_path / "a.parquet"
    config = pe.EncryptionConfiguration("footer__", column_keys={"colkey__": ["secret"]})
    config.plaintext_footer = plaintext_footer
    factory = pe.CryptoFactory(lambda _: _Keys())
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), config)
    table = pa.table({"open": list(range(10)), "secret": [f"s{row}" for row in range(10)]})
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table, row_group_size=4)
    with pytest.raises(FormatError, match=r"a\.parquet is encrypted"):
        TableDataset(path, ["open"])


# -- folders, and other functions


def test_the_splits_of_a_data_set_are_no_table(tmp_path: Path) -> None:
    saved, hub = tmp_path / "saved", tmp_path / "hub"
    for split in ("train", "test"):
        write(saved / split / "data-00000-of-00001.arrow", some_table(30), "stream")
        write(hub / "data" / f"{split}-00000-of-00001.parquet", some_table(30))
        (saved / split / "state.json").write_text("{}")
        write(tmp_path / "flat" / f"{split}.parquet", some_table(3))
    with pytest.warns(HeadraceWarning, match=r"test\.parquet and train\.parquet"):
        TableDataset(tmp_path / "flat")
    for name in ("cache-0123456789abcdef.arrow", "cache-mine.arrow"):  # no part of it
        write(saved / "train" / name, some_table(3), "stream")
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for folder in (saved, hub):
        with pytest.raises(FormatError, match=rf"test '{folder}/\S*test\S*', train '{folder}/"):
            TableDataset(folder)
    splits = (saved / "train", f"{saved}/train/*.arrow", f"{hub}/data/train-*.parquet")
    for path in (*splits, [saved / "test"]):
        with open_dataset(path, columns=["number"]) as dataset:
            assert len(dataset) == 30


def test_columns_of_one_name(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([n, n + 1]) for n in (1, 3, 5)], names=["x", "x", "y"])
    for kind in ("parquet", "arrow"):
        path = write(tmp_path / f"a.{kind}", table, kind)
        assert int(TableDataset(path, "y")[1]) == 6
        with pytest.raises(FormatError, match=r"has 2 columns 'x': .*columns="):
            TableDataset(path)


def test_open_dataset_finds_tables_by_content(tmp_path: Path) -> None:
    for kind in WRITERS:
        path = written(tmp_path, some_table(), kind)
        with open_dataset(path.rename(tmp_path / f"{kind}-file"), columns="number") as dataset:
            assert type(dataset) is TableDataset and int(dataset[5]) == 5
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match="columns"):
        open_dataset(tmp_path / "a.txt", columns="number")
    with pytest.raises(DataNotFoundError, match=r"1 \.parquet: use TableDataset"):
        ImageDataset(write(tmp_path / "one" / "a.parquet", some_table(30)).parent)


# -- the contracts


@pytest.mark.slow
@pytest.mark.falls_back
class TestParquet(DatasetContract):
    kind = "parquet"

    @pytest.fixture(autouse=True)
    def _data(self, tmp_path: Path) -> None:
        self.path = write(tmp_path / name_of(self.kind), some_table(48), self.kind, rows=5)

    def make(self, **options: Any) -> TableDataset:
        return TableDataset(self.path, ["number", "vector", "blob"], **options)

    def make_bad(self, **options: Any) -> tuple[TableDataset, list[int]]:
        path = self.path.with_name(f"bad-{self.path.name}")
        numbers = pa.array([None if row in (6, 31) else row for row in range(40)], pa.int32())
        table = pa.table({"number": numbers, "word": [str(row) for row in range(40)]})
        if not path.exists():
            write(path, table, self.kind, rows=5)
        return TableDataset(path, **options), [6, 31]


class TestInPlace(TestParquet):
    kind = "stream"


@pytest.mark.slow
class TestRemoteParquet(RemoteDatasetContract):
    names = ("a.parquet", "b.parquet")
    has_index = False
    kind = "parquet"

    def write(self, folder: Path) -> None:
        for number, name in enumerate(self.names):
            write(folder / name, some_table(40, 100 * number), self.kind, rows=8)

    def make(self, paths: list[str], **options: Any) -> TableDataset:
        return TableDataset(paths, ["number", "vector", "word"], **{"progress": False, **options})


class TestRemoteStream(TestRemoteParquet):
    names = ("a.arrow", "b.arrow")
    has_index = True
    kind = "stream"
