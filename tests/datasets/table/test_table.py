"""TableDataset over Parquet and Arrow files as users see it: samples, columns, images, texts,
files that are not as they should be.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headrace import (
    BudgetError,
    ConfigError,
    DataNotFoundError,
    FileChangedError,
    FormatError,
    HeadraceWarning,
    ImageDataset,
    MemoryEfficientDataset,
    MissingNameError,
    SampleError,
    TableDataset,
    TextDataset,
    create_dataloader,
    open_dataset,
    pack,
)
from headrace.inspecting import inspect
from headrace.testing.contract import DatasetContract, same
from tests.datasets.remote_contract import RemoteDatasetContract
from tests.datasets.text.chat_tokenizer import CHATML, ChatTokenizer

pytestmark = pytest.mark.quick_every(4)

pa = pytest.importorskip("pyarrow")  # in the extra `test`
pq = pytest.importorskip("pyarrow.parquet")
pe = pytest.importorskip("pyarrow.parquet.encryption")

N = 57
WRITERS = ("parquet", "arrow", "stream", "feather")
"""Parquet; Arrow files and streams, of which only the rows are read; Feather, whose buffers are
compressed.
"""


def some_table(n: int = N, start: int = 0) -> Any:
    """Columns of all kinds."""
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
    elif kind == "feather":
        with (
            pa.OSFile(str(path), "wb") as file,
            pa.ipc.new_file(
                file, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
            ) as out,
        ):
            out.write_table(table, max_chunksize=rows)
    else:
        new = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as out:
            out.write_table(table, max_chunksize=rows)
    return path


def name_of(kind: str) -> str:
    return "a.parquet" if kind == "parquet" else "a.arrow"


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
@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
def test_samples_are_dicts_of_values(kind: str, mode: str, tmp_path: Path) -> None:
    path = write(tmp_path / name_of(kind), some_table(), kind)
    vectors = np.random.default_rng(0).random((N, 3), np.float32)
    with TableDataset(path, loading_mode=mode, progress=False) as dataset:
        assert len(dataset) == N and dataset.blocks().tolist() == [10] * 5 + [7]
        for row in (0, 9, 10, 33, 56, -1):
            sample = dataset[row]
            wanted = expected(row % N, vectors)
            real, other = sample.pop("real"), wanted.pop("real")
            assert (
                same(sample, wanted)
                and torch.equal(torch.nan_to_num(real), torch.nan_to_num(other))
                and real.dtype == other.dtype
            )
        assert dataset.source_of(12) == f"{path}, row 12"
        assert list(dataset[0]) == list(expected(0, vectors))


@pytest.mark.parametrize("kind", WRITERS)
def test_several_files_follow_one_another(kind: str, tmp_path: Path) -> None:
    for number, n in enumerate((12, 0, 1, 25)):
        write(tmp_path / f"{number}-{name_of(kind)}", some_table(n, 100 * number), kind)
    with TableDataset(tmp_path, ["number", "text"]) as dataset:
        wanted = [*range(12), 200, *range(300, 325)]
        assert [int(sample["number"]) for sample in dataset] == wanted
        assert dataset.source_of(13).endswith(f"3-{name_of(kind)}, row 0")
        batch = dataset.__getitems__([37, 0, 12, 0])
        assert [int(sample["number"]) for sample in batch] == [324, 0, 200, 0]


def test_parquet_and_arrow_files_are_one_table(tmp_path: Path) -> None:
    paths = [
        write(
            tmp_path / f"{kind}.{'parquet' if kind == 'parquet' else 'arrow'}", some_table(7), kind
        )
        for kind in WRITERS
    ]
    with TableDataset(paths, "number") as dataset:
        assert [int(sample) for sample in dataset] == [*range(7)] * 4
        assert "row group" in dataset.explain() and "pread of the rows" in dataset.explain()


def test_one_column_alone_is_the_sample(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", some_table())
    with TableDataset(path, "vector", target_name="number") as dataset:
        vector, target = dataset[5]
        assert vector.shape == (3,) and target == 5 and dataset.targets.dtype == np.int32
        loader = create_dataloader(dataset, batch_size=8, shuffle=False, num_workers=0)
        assert "straight from storage" in loader.explain()
        vectors, targets = next(iter(loader))
        assert (
            vectors.shape == (8, 3)
            and vectors.dtype == torch.float32
            and targets.tolist() == list(range(8))
        )
        assert torch.equal(vectors[5], vector)
    with TableDataset(path, "text") as texts, TableDataset(path, ["text"]) as dicts:
        assert texts[2] == "Zeile 2 äöü" * 2 and dicts[2] == {"text": texts[2]}


# one by one; together; wide ones by themselves
@pytest.mark.parametrize("few, wide", [(8, 8192), (1, 8192), (1, 1)])
def test_columns_are_batched_without_samples(
    few: int, wide: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.storage.table.source._FEW", few)
    monkeypatch.setattr("headrace.storage.table.source._WIDE", wide)
    path = write(tmp_path / "a.parquet", some_table())
    with TableDataset(path, ["number", "vector", "word", "truth"], target_name="half") as dataset:
        loader = create_dataloader(dataset, batch_size=16, shuffle=True, num_workers=0, seed=2)
        assert "column by column" in loader.explain()
        fast = [pickle.loads(pickle.dumps(batch)) for batch in loader]
        slow = create_dataloader(
            dataset.with_transform(lambda row: row),
            batch_size=16,
            shuffle=True,
            num_workers=0,
            seed=2,
        )
        assert same(fast, [pickle.loads(pickle.dumps(batch)) for batch in slow])
        assert (
            fast[0][0]["word"][0].startswith("w")
            and fast[0][0]["vector"].shape == (16, 3)
            and fast[0][1].dtype == torch.float64
        )


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {name: cast(one, dtype) for name, one in value.items()}
    return (
        [cast(one, dtype) for one in value]
        if isinstance(value, list)
        else value.to(dtype)
        if isinstance(value, torch.Tensor)
        else value
    )


@pytest.mark.parametrize("mode", ["lazy", "cached"])
@pytest.mark.parametrize("kind", WRITERS)
def test_numbers_are_cast(kind: str, mode: Any, tmp_path: Path) -> None:
    path = write(tmp_path / name_of(kind), some_table(), kind)
    with (
        TableDataset(path, dtype="float32", loading_mode=mode) as dataset,
        TableDataset(path) as plain,
    ):
        assert all(same(dataset[row], cast(plain[row], torch.float32)) for row in (3, 6, 3))
        assert (
            dataset[1]["truth"].dtype == torch.float32
            and dataset[1]["inner"]["x"].dtype == torch.float32
        )
    with TableDataset(path, "vector", target_name="number", dtype="float64") as dataset:
        vector, target = dataset[4]
        assert vector.dtype == torch.float64 and target == 4
        loader = create_dataloader(dataset, batch_size=8, num_workers=0, shuffle=False)
        assert (
            next(iter(loader))[0].dtype == torch.float64
            and "sample by sample" not in loader.explain()
        )


def test_cast_columns_are_batched_without_samples(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", some_table())
    with TableDataset(
        path, ["number", "vector", "word", "truth"], target_name="half", dtype="float16"
    ) as dataset:
        loader = create_dataloader(dataset, batch_size=16, shuffle=True, num_workers=0, seed=2)
        assert "column by column" in loader.explain()
        fast = [pickle.loads(pickle.dumps(batch)) for batch in loader]
        slow = create_dataloader(
            dataset.with_transform(lambda row: row),
            batch_size=16,
            shuffle=True,
            num_workers=0,
            seed=2,
        )
        assert same(fast, [pickle.loads(pickle.dumps(batch)) for batch in slow])
        assert (
            fast[0][0]["number"].dtype == fast[0][0]["truth"].dtype == torch.float16
            and fast[0][1].dtype == torch.float64
        )


def test_cast_rows_of_numpy(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(40).reshape(20, 2))
    np.savez(tmp_path / "b.npz", x=np.arange(20), y=np.arange(20))
    with (
        TableDataset(tmp_path / "a.npy", dtype="float32") as rows,
        TableDataset(tmp_path / "b.npz", dtype="int16") as dicts,
    ):
        assert same(rows[3], torch.tensor([6.0, 7.0])) and same(
            dicts[2], {name: torch.tensor(2, dtype=torch.int16) for name in "xy"}
        )
    with pytest.raises(ConfigError, match="dtype='flat' is no NumPy dtype"):
        TableDataset(tmp_path / "a.npy", dtype="flat")


def test_targets_are_no_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", some_table())
    with TableDataset(path, target_name="word") as dataset:
        row, target = dataset[6]
        assert (
            target == 2
            and dataset.classes == ["w0", "w1", "w2", "w3"]
            and "word" not in row
            and len(row) == 11
        )
    with pytest.raises(
        FormatError, match=r"row 10: target_name='text': there is no value \(null\)"
    ):
        TableDataset(path, target_name="text")


def test_a_row_group_is_decoded_once_a_batch(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", some_table(400), rows=20)
    with TableDataset(path, ["number"]) as dataset:
        loader = create_dataloader(
            dataset, batch_size=10, shuffle="block", num_workers=0, interleave=4, turns=2
        )
        seen = torch.cat([batch["number"] for batch in loader])
        assert sorted(seen.tolist()) == list(range(400))
        assert 20 <= loader.get_stats()["chunks_decoded"] <= 20 + 4 * 2 - 1
    with TableDataset(path, ["number"], max_memory_usage=900) as dataset:
        pass
    with pytest.raises(BudgetError, match=r"a chunk of TableSource takes .* when it is decoded"):
        TableDataset(path, ["number"], max_memory_usage=50)


def test_rows_in_place_reserve_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", some_table(400), "stream", rows=400)
    with TableDataset(path, ["number"], max_memory_usage=900) as dataset:
        assert int(dataset[399]["number"]) == 399 and dataset.sample_source.block_nbytes == 0


@pytest.mark.parametrize("kind", WRITERS)
def test_pickles_and_workers_read_on(kind: str, tmp_path: Path, make_loader: Any) -> None:
    path = write(tmp_path / name_of(kind), some_table(), kind)
    with TableDataset(path, ["number", "text"]) as dataset:
        first = dataset[3]
        with pickle.loads(pickle.dumps(dataset)) as copy:
            assert same(copy[3], first) and copy.fingerprint == dataset.fingerprint
        loader = make_loader(
            dataset,
            batch_size=4,
            num_workers=2,
            shuffle=False,
            multiprocessing_context="forkserver",
        )
        assert [number for batch in loader for number in batch["number"].tolist()] == list(range(N))


# -- images


def encoded(number: int, size: tuple[int, int] = (20, 14), kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (*size[::-1], 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, kind)
    return data.getvalue()


def pictures(as_struct: bool, n: int = 24) -> Any:
    images: list[Any] = [encoded(number) for number in range(n)]
    if as_struct:
        images = [{"bytes": image, "path": f"{number}.png"} for number, image in enumerate(images)]
    return pa.table(
        {
            "image": pa.array(images),
            "label": [number % 3 for number in range(n)],
            "caption": [f"no {number}" for number in range(n)],
        }
    )


@pytest.fixture
def folder_of_pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(24):
        (folder / f"{number:02}.png").write_bytes(encoded(number))
    return folder


@pytest.mark.parametrize("as_struct", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"image_size": 8, "normalize": False},
        {"image_size": None, "color": "L"},
        {"transform": np.asarray},
    ],
)
def test_images_are_those_of_image_dataset(
    as_struct: bool, options: Any, folder_of_pictures: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.parquet", pictures(as_struct))
    plain = ImageDataset(
        folder_of_pictures, targets=[number % 3 for number in range(24)] and None, **options
    )
    with TableDataset(path, image_column="image", target_name="label", **options) as dataset:
        for number in (0, 13, 23):
            image, target = dataset[number]
            assert same(image, plain[number][0]) and target == number % 3
    if options.get("image_size"):
        loader = create_dataloader(
            TableDataset(path, image_column="image", target_name="label", **options),
            batch_size=6,
            num_workers=0,
        )
        assert "row by row" in loader.explain()
        images, targets = next(iter(loader))
        assert (
            images.shape == (6, 3, 8, 8)
            and images.dtype == torch.uint8
            and targets.dtype == torch.int64
        )


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
def test_images_among_other_columns(mode: str, folder_of_pictures: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pictures(True))
    plain = ImageDataset(folder_of_pictures, targets=None, image_size=8)
    with TableDataset(
        path,
        ["caption", "image"],
        image_column="image",
        image_size=8,
        loading_mode=mode,
        progress=False,
    ) as dataset:
        sample = dataset[5]
        assert (
            list(sample) == ["caption", "image"]
            and sample["caption"] == "no 5"
            and same(sample["image"], plain[5][0])
        )
        batch = next(iter(create_dataloader(dataset, batch_size=4, shuffle=False, num_workers=0)))
        assert batch["image"].shape == (4, 3, 8, 8) and batch["caption"] == [
            f"no {number}" for number in range(4)
        ]


def test_random_crops_of_images(tmp_path: Path) -> None:
    from headrace import RandomHorizontalFlip, RandomResizedCrop

    path = write(tmp_path / "a.parquet", pictures(False))
    augment = [RandomResizedCrop(8), RandomHorizontalFlip()]
    with TableDataset(path, image_column="image", transform=augment) as dataset:
        dataset.set_epoch(1)
        first = dataset[3][0]
        assert first.shape == (3, 8, 8) and same(first, dataset[3][0])
        dataset.set_epoch(2)
        assert not same(first, dataset[3][0])


@pytest.mark.quick_every(1)
@pytest.mark.parametrize("mode", ["lazy", "cached", "streaming"])
def test_crops_of_hub_images_in_batches(mode: str, tmp_path: Path) -> None:
    from headrace import RandomResizedCrop

    plain = TableDataset(
        write(tmp_path / "a.parquet", pictures(False)),
        image_column="image",
        target_name="label",
        transform=RandomResizedCrop(8),
    )
    path = write(tmp_path / "b.parquet", pictures(True))
    with TableDataset(
        path,
        image_column="image",
        target_name="label",
        transform=RandomResizedCrop(8),
        loading_mode=mode,
    ) as dataset:
        images, _ = next(
            iter(create_dataloader(dataset, batch_size=6, shuffle=False, num_workers=0))
        )
    expected, _ = next(iter(create_dataloader(plain, batch_size=6, shuffle=False, num_workers=0)))
    assert same(images, expected)


@pytest.mark.quick_every(1)
def test_a_missing_hub_image_is_said_before_a_crop(tmp_path: Path) -> None:
    from headrace import RandomResizedCrop

    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    images = pa.array([{"bytes": None, "path": "x.jpg"}] * 2, kind)
    path = write(tmp_path / "a.parquet", pa.table({"image": images}))
    dataset = TableDataset(path, image_column="image", transform=RandomResizedCrop(8))
    with pytest.raises(SampleError, match="holds the path of an image and not its bytes"):
        dataset.__getitems__([0, 1])


@pytest.mark.falls_back
def test_images_that_are_none(tmp_path: Path) -> None:
    images = [encoded(0), None, b"no image", encoded(3)]
    path = write(tmp_path / "a.parquet", pa.table({"image": images}))
    with TableDataset(path, image_column="image", on_error="skip") as dataset:
        assert (
            len(
                next(iter(create_dataloader(dataset, batch_size=4, shuffle=False, num_workers=0)))[
                    0
                ]
            )
            == 2
        )
    with TableDataset(path, image_column="image") as dataset:
        with pytest.raises(
            SampleError,
            match=r"sample 1 can't be decoded: .*row 1: column 'image' has no image \(null\) there",
        ):
            dataset[1]
        with pytest.raises(SampleError, match="sample 2 can't be decoded"):
            dataset[2]
    path = write(
        tmp_path / "b.parquet",
        pa.table(
            {"image": [{"bytes": None, "path": "a/b.png"}] * 2},
            pa.schema({"image": pa.struct({"bytes": pa.binary(), "path": pa.string()})}),
        ),
    )
    with (
        TableDataset(path, image_column="image") as dataset,
        pytest.raises(SampleError, match=r"the path of an image .*'a/b.png'"),
    ):
        dataset[0]
    with pytest.raises(
        FormatError, match="image_column='label': the column is of type int64, and holds no images"
    ):
        TableDataset(write(tmp_path / "c.parquet", pictures(True)), image_column="label")


# -- texts


def words(n: int = 30) -> Any:
    return pa.table(
        {
            "text": [f"the mill wheel {number} turns" * (1 + number % 3) for number in range(n)],
            "label": [number % 2 for number in range(n)],
        }
    )


def test_texts_are_those_of_text_dataset(tmp_path: Path) -> None:
    table = words()
    path = write(tmp_path / "a.parquet", table)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    plain = TextDataset(
        tmp_path / "a.jsonl",
        max_length=20,
        target_field="label",
        cache_dir=tmp_path / "cache",
        progress=False,
    )
    with TableDataset(path, text_column="text", target_name="label", max_length=20) as dataset:
        assert all(same(dataset[number], plain[number]) for number in range(30))
        batches = [
            list(create_dataloader(one, batch_size=7, shuffle=False, num_workers=0))
            for one in (dataset, plain)
        ]
        assert same(*batches)
    with TableDataset(
        path, text_column="text", tokenizer=lambda text: [len(word) for word in text.split()]
    ) as dataset:
        assert dataset[0]["input_ids"].tolist() == [3, 4, 5, 1, 5] and dataset.lengths()[
            :2
        ].tolist() == [22, 42 + 2]
        loader = create_dataloader(dataset, batch_size=4, shuffle=False, num_workers=0)
        assert (
            "padded at once" in loader.explain()
            and next(iter(loader))["attention_mask"].shape[0] == 4
        )


@pytest.mark.parametrize("mode", ["lazy", "cached"])
def test_texts_among_other_columns(mode: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pictures(True))
    options: dict[str, Any] = {
        "image_column": "image",
        "text_column": "caption",
        "image_size": 8,
        "loading_mode": mode,
    }
    with TableDataset(path, ["label"], **options) as dataset:
        sample = dataset[3]
        assert list(sample) == ["label", "image", "input_ids"] and sample["image"].shape == (
            3,
            8,
            8,
        )
        assert sample["input_ids"].tolist() == [ord(letter) + 2 for letter in "no 3"]
    with TableDataset(path, target_name="label", **options) as dataset:
        batch = next(iter(create_dataloader(dataset, batch_size=4, shuffle=False, num_workers=0)))
        assert (
            batch["image"].shape == (4, 3, 8, 8)
            and batch["input_ids"].shape == (4, 4)
            and batch["labels"].tolist() == [0, 1, 2, 0]
        )


def chats_table(count: int = 6, **columns: Any) -> Any:
    """Chats of two turns; where there are tool calls, all structs have the field."""
    call = [{"function": {"name": "saw", "arguments": "{}"}}]
    rows = [
        [
            {"role": "user", "content": f"number {row}", "tool_calls": None},
            {
                "role": "assistant",
                "content": None if row == 1 else f"answer {row}",
                "tool_calls": call if row == 1 else None,
            },
        ]
        for row in range(count)
    ]
    return pa.table({"messages": rows, **columns})


CALLS = CHATML.replace(
    "message['content']", "(message.content or message.tool_calls[0].function.name)"
)


@pytest.mark.parametrize("kind", ["parquet", "stream"])
def test_chats_are_those_of_text_dataset(kind: str, tmp_path: Path) -> None:
    tools = ['[{"name": "saw"}]'] * 5 + [None]
    path = write(
        tmp_path / name_of(kind), chats_table(tools=tools, number=list(range(6))), kind, rows=2
    )
    template, lines = (
        "{{ (tools or [{'name': 'none'}])[0].name }}" + CALLS,
        tmp_path / "chats.jsonl",
    )
    records = [
        {"messages": row, "tools": tool}
        for row, tool in zip(chats_table()["messages"].to_pylist(), tools, strict=True)
    ]
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    texts = TextDataset(lines, tokenizer=ChatTokenizer(template))
    with TableDataset(path, text_column="messages", tokenizer=ChatTokenizer(template)) as dataset:
        assert all(same(dataset[row], texts[row]) for row in range(6)) and dataset.lengths()[
            0
        ] == len(texts.text_of(0))
        batch = next(iter(create_dataloader(dataset, batch_size=2, num_workers=0, shuffle=False)))
        expected = next(iter(create_dataloader(texts, batch_size=2, num_workers=0, shuffle=False)))
        assert (
            same(batch, expected)
            and dataset.held_as()
            != TableDataset(path, text_column="messages", tokenizer=ChatTokenizer(CALLS)).held_as()
        )
    with TableDataset(
        path, ["number"], text_column="messages", tokenizer=ChatTokenizer(template)
    ) as dataset:
        assert list(dataset[3]) == ["number", "input_ids", "labels"] and dataset[3]["number"] == 3
        assert torch.equal(dataset[3]["labels"], texts[3]["labels"])
    with TableDataset(
        path, ["tools"], text_column="messages", tokenizer=ChatTokenizer(template)
    ) as dataset:
        assert dataset[3]["tools"] == tools[3] and torch.equal(
            dataset[3]["input_ids"], texts[3]["input_ids"]
        )
    with open_dataset(
        path,
        text_column="messages",
        tokenizer=ChatTokenizer(None),
        chat_template=template,
        max_length=40,
    ) as dataset:
        assert torch.equal(dataset[3]["labels"], texts[3]["labels"][:40])


def test_chats_of_tables_that_are_none(tmp_path: Path) -> None:
    rows = [
        *chats_table()["messages"].to_pylist(),
        None,
        [{"role": "user", "content": "x", "tool_calls": None}],
    ]
    path = write(tmp_path / "a.parquet", pa.table({"messages": rows, "note": ["x"] * 8}))
    with TableDataset(path, text_column="messages", tokenizer=ChatTokenizer(CALLS)) as dataset:
        with pytest.raises(SampleError, match="row 6: column 'messages' has no chat"):
            dataset[6]
        with pytest.raises(SampleError, match="row 7: it has no assistant's turn"):
            dataset[7]
    with TableDataset(
        path, text_column="messages", tokenizer=ChatTokenizer(CALLS), on_error="skip"
    ) as dataset:
        assert [
            len(batch["labels"])
            for batch in create_dataloader(dataset, batch_size=8, num_workers=0)
        ] == [6]
        assert dataset.lengths()[6:].tolist() == [0, 0]
    with pytest.raises(ConfigError, match="chats need a tokenizer with a chat template"):
        TableDataset(path, text_column="messages")
    with pytest.raises(ConfigError, match="target_name can't be given for chats"):
        TableDataset(path, text_column="messages", target_name="note", tokenizer=ChatTokenizer())
    with pytest.raises(
        ConfigError, match="chat_template is for chats, and the column 'note' holds texts"
    ):
        TableDataset(path, text_column="note", tokenizer=ChatTokenizer(), chat_template="x")
    with pytest.raises(ConfigError, match="chat_template is for text_column: name the column"):
        TableDataset(path, chat_template="x")


def test_a_system_column_comes_first(tmp_path: Path) -> None:
    for values, count in ((["be kind"] * 6, 1), ([3] * 6, 0)):  # numbers are no message
        path = write(tmp_path / "a.parquet", chats_table(system=values))
        with TableDataset(path, text_column="messages", tokenizer=ChatTokenizer(CALLS)) as dataset:
            texts = write_chats(tmp_path, dataset, values)
            assert (
                dataset.lengths()[0] == len(texts.text_of(0))
                and texts.text_of(0).count("be kind") == count
            )
            assert all(same(dataset[row], texts[row]) for row in range(6))


def write_chats(folder: Path, dataset: TableDataset, system: list[Any]) -> TextDataset:
    """The same chats as .jsonl."""
    rows = zip(chats_table()["messages"].to_pylist(), system, strict=True)
    records = [
        {"messages": row, **({"system": one} if isinstance(one, str) else {})} for row, one in rows
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return TextDataset(folder / "chats.jsonl", tokenizer=dataset.tokenizer)


def test_texts_that_are_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"text": ["a", None, "c"], "n": [1, 2, 3]}))
    for columns in (None, ["n"]):
        with TableDataset(path, columns, text_column="text") as dataset:
            with pytest.raises(
                SampleError,
                match=r"sample 1 can't be decoded: .* column 'text' has no text \(null\) there",
            ):
                dataset.__getitems__([0, 1])
            assert dataset[2]["input_ids"].tolist() == [101]
    said = r"sample 1 can't be decoded: .* column 'text' has no text \(null\) there"
    with TableDataset(path, text_column="text") as dataset, pytest.raises(SampleError, match=said):
        dataset.lengths()
    with TableDataset(path, text_column="text", on_error="skip") as dataset:
        assert dataset.lengths().tolist() == [1, 0, 1]


# -- arguments and files that make no sense


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": ["number", "number"]}, "columns names a column twice"),
        ({"columns": []}, "columns must be the name of a column"),
        ({"columns": 3}, "columns must be the name of a column"),
        ({"image_size": 8}, "image_size is for image_column: name the column"),
        ({"tokenizer": len}, "tokenizer is for text_column"),
        ({"target_name": 3}, "target_name must be the name of one column"),
        (
            {"image_column": "text", "text_column": "text"},
            "image_column and text_column are both 'text'",
        ),
        ({"column": "number"}, "columns"),
        ({"text_column": "text", "max_length": 0}, "max_length must be"),
    ],
)
def test_arguments_that_make_no_sense(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", some_table())
    with pytest.raises(ConfigError, match=said):
        TableDataset(path, **options)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_missing_column_lists_those_there_are(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / name_of(kind), some_table(), kind)
    for options in ({"columns": "numbr"}, {"columns": ["text", "numbr"]}, {"target_name": "numbr"}):
        with pytest.raises(
            MissingNameError, match=r"a\.\w+ has no column 'numbr'; it has: .*number"
        ):
            TableDataset(path, **options)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("axes", [None, (1, 2, 0)])
def test_tensors_of_arrow_keep_their_shape(
    kind: str, axes: tuple[int, ...] | None, tmp_path: Path
) -> None:
    values = np.arange(N * 24, dtype=np.float32).reshape(N, 2, 3, 4)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    if axes is not None:
        of_axes = pa.fixed_shape_tensor(pa.float32(), (2, 3, 4), permutation=axes)
        tensors = pa.ExtensionArray.from_storage(of_axes, tensors.storage)
        values = values.transpose(0, *(axis + 1 for axis in axes))
    path = write(
        tmp_path / name_of(kind), pa.table({"m": tensors, "number": pa.array(range(N))}), kind
    )
    with TableDataset(path) as dataset:
        assert dataset[1]["m"].shape == values.shape[1:]
        for batch in create_dataloader(dataset, batch_size=10, num_workers=0):
            assert np.array_equal(batch["m"].numpy(), values[batch["number"].numpy()])
    with TableDataset(path, "m") as dataset:
        assert np.array_equal(np.stack([dataset[row].numpy() for row in range(N)]), values)


def test_a_text_is_no_arrow_file(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_text("name,number\nx,1\n")
    with pytest.raises(
        FormatError, match=r"it is no Arrow file, but text that begins with 'name,number"
    ):
        TableDataset(tmp_path / "a.arrow")


@pytest.mark.parametrize("kind", WRITERS)
def test_a_type_that_is_refused_is_named(kind: str, tmp_path: Path) -> None:
    table = some_table().append_column("when", pa.array([0] * N, pa.timestamp("us")))
    table = table.append_column(
        "deep", pa.array([[{"a": 1}]] * N, pa.list_(pa.struct({"a": pa.decimal128(5, 2)})))
    )
    path = write(tmp_path / name_of(kind), table, kind)
    with pytest.raises(
        FormatError,
        match=(
            r"column 'when' is of type timestamp\[us\], which no tensor can hold: leave it out "
            r"with columns="
        ),
    ):
        TableDataset(path)
    with pytest.raises(FormatError, match=r"column 'deep' is of type decimal128\(5, 2\)"):
        TableDataset(path, "deep")
    with TableDataset(path, ["number"]) as dataset:
        assert len(dataset) == N


@pytest.mark.falls_back
@pytest.mark.parametrize("kind", WRITERS)
def test_a_missing_number_is_an_error_of_its_sample(kind: str, tmp_path: Path) -> None:
    path = write(
        tmp_path / name_of(kind), pa.table({"n": pa.array([1, None, 3]), "m": [1, 2, 3]}), kind
    )
    said = (
        r"sample 1 can't be read: .*row 1: column 'n' has no value \(null\) there, and int64 has "
        r"none"
    )
    with TableDataset(path) as dataset, pytest.raises(SampleError, match=said):
        list(create_dataloader(dataset, batch_size=3, shuffle=False, num_workers=0))
    with TableDataset(path, on_error="skip") as dataset:
        (batch,) = create_dataloader(dataset, batch_size=3, shuffle=False, num_workers=0)
        assert batch["n"].tolist() == [1, 3]


@pytest.mark.parametrize("kind", WRITERS)
def test_files_that_differ_are_no_table(kind: str, tmp_path: Path) -> None:
    write(tmp_path / f"0{name_of(kind)}", pa.table({"n": [1], "x": [0.5]}), kind)
    write(tmp_path / f"1{name_of(kind)}", pa.table({"n": ["a"], "x": [0.5]}), kind)
    with pytest.raises(
        FormatError, match=r"can't be one table: column 'n' is string here, and int64 there"
    ):
        TableDataset(tmp_path)
    with TableDataset(tmp_path, "x") as dataset:
        assert len(dataset) == 2


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_that_is_cut_short(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / name_of(kind), some_table(), kind)
    whole = path.read_bytes()
    for size in (
        0,
        3,
        9,
        len(whole) // 2,
        len(whole) - 12 if kind != "stream" else len(whole) - 100,
    ):
        path.write_bytes(whole[:size])
        with pytest.raises(
            FormatError,
            match=r"a\.(parquet|arrow) is (empty|no (Parquet|Arrow) file, or a damaged one)",
        ):
            TableDataset(path)
    path.write_bytes(b"<html>" * 50)
    with pytest.raises(FormatError, match=r"is no (Parquet|Arrow) file"):
        TableDataset(path)


def test_a_row_group_that_is_cut_short(tmp_path: Path) -> None:
    """The footer is sound, and says of a row group more than there is."""
    path = write(tmp_path / "a.parquet", some_table(), compression="none")
    data, group = path.read_bytes(), pq.read_metadata(path).row_group(3)
    first, last = group.column(0), group.column(group.num_columns - 1)
    start, end = (one.dictionary_page_offset or one.data_page_offset for one in (first, last))
    stop = end + last.total_compressed_size
    path.write_bytes(data[: start + 20] + bytes(stop - start - 20) + data[stop:])
    with TableDataset(path) as dataset:
        assert dataset[29]["words"] == ["a", "b29"]
        with pytest.raises(
            SampleError,
            match=(
                r"sample 33 can't be read: .*a\.parquet, row 33.*a\.parquet, row group 3 is "
                r"damaged"
            ),
        ):
            dataset[33]
    with TableDataset(path, on_error="skip") as dataset:
        assert len(dataset.__getitems__([28, 29, 33, 40])) == 3
    # all that lies before is gone: the footer's places lead behind the end
    path.write_bytes(data[:4] + data[start:])
    with pytest.raises(
        FormatError,
        match=(
            r"row group \d+ would lie at bytes .*, and the row groups of the file end at byte .*: "
            r"it is cut short"
        ),
    ):
        TableDataset(path)


def test_a_record_batch_that_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", some_table(), "feather")
    data = bytearray(path.read_bytes())
    with TableDataset(path, "text") as dataset:
        start, stop = (
            int(one.array[2])
            for one in (
                dataset.sample_source.tables[0]._starts,
                dataset.sample_source.tables[0]._stops,
            )
        )
    middle = data.index(bytes.fromhex("28b52ffd"), start)  # a zstd frame
    data[middle : stop - 8] = bytes(stop - 8 - middle)
    path.write_bytes(data)
    with TableDataset(path, "text") as dataset:
        assert dataset[0] == ""
        with pytest.raises(
            SampleError, match=r"sample 21 can't be read: .*row 21.* record batch 2 is damaged"
        ):
            dataset[21]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_that_changes_is_not_read_on(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / name_of(kind), some_table(), kind)
    with TableDataset(path, ["number"], on_error="skip") as dataset:
        dataset[0]
        os.utime(path, (1, 1))
        with pytest.raises(FileChangedError, match="has been changed since it was opened"):
            dataset[1]


def test_the_splits_of_a_data_set_are_no_table(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / "saved" / split / "data-00000-of-00001.arrow", words(), "stream")
        write(tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet", words())
        (tmp_path / "saved" / split / "state.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for folder in (tmp_path / "saved", tmp_path / "hub"):
        with pytest.raises(
            FormatError,
            match=(
                r"holds the splits of a data set \(test, train\), which are not one table: pass "
                r"the files of one"
            ),
        ):
            TableDataset(folder)
    for path in (
        tmp_path / "saved" / "train",
        str(tmp_path / "hub/data/train-*.parquet"),
        [tmp_path / "saved" / "test"],
    ):
        with open_dataset(path, columns=["label"]) as dataset:
            assert len(dataset) == 30


def test_what_huggingface_caches_is_no_part_of_a_table(tmp_path: Path) -> None:
    write(tmp_path / "data-00000-of-00001.arrow", words(), "stream")
    write(tmp_path / "cache-0123456789abcdef.arrow", words(3), "stream")
    (tmp_path / "state.json").write_text("{}")
    with open_dataset(tmp_path) as dataset:
        assert type(dataset) is TableDataset and len(dataset) == 30


def test_shapes_and_classes_of_huggingface(tmp_path: Path) -> None:
    features = {
        "x": {"_type": "Array2D", "shape": [2, 3], "dtype": "int32"},
        "label": {"_type": "ClassLabel", "names": ["cat", "dog"]},
    }
    schema = pa.schema(
        {"x": pa.list_(pa.list_(pa.int32())), "label": pa.int64()},
        {"huggingface": json.dumps({"info": {"features": features}})},
    )
    table = pa.table(
        {
            "x": [[[1, 2, 3], [4, 5, row]] for row in range(12)],
            "label": [row % 2 for row in range(12)],
        },
        schema,
    )
    for kind in WRITERS:
        path = write(tmp_path / kind / name_of(kind), table, kind, rows=5)
        with TableDataset(path, ["x"], target_name="label") as dataset:
            assert dataset[7][0]["x"].tolist() == [[1, 2, 3], [4, 5, 7]] and dataset.classes == [
                "cat",
                "dog",
            ]
            rows, labels = next(
                iter(create_dataloader(dataset, batch_size=6, shuffle=False, num_workers=0))
            )
            assert rows["x"].shape == (6, 2, 3) and labels.tolist() == [0, 1] * 3
            assert dataset.class_to_idx == {"cat": 0, "dog": 1}


# -- beside other functions


def test_open_dataset_finds_tables_by_name_and_content(tmp_path: Path) -> None:
    for kind in WRITERS:
        path = write(tmp_path / kind / name_of(kind), some_table(), kind)
        other = path.rename(path.with_name("without_ending"))
        with open_dataset(other, columns="number") as dataset:
            assert type(dataset) is TableDataset and int(dataset[5]) == 5
    with pytest.raises(ConfigError, match=r"columns is an option for .*tables, and here are texts"):
        (tmp_path / "a.txt").write_text("x")
        open_dataset(tmp_path / "a.txt", columns="number")
    with MemoryEfficientDataset(
        tmp_path / "parquet" / "without_ending", columns=["number"], progress=False
    ) as dataset:
        assert int(dataset[5]["number"]) == 5
    with pytest.raises(DataNotFoundError, match=r"there is 1 \.parquet: use TableDataset"):
        ImageDataset(write(tmp_path / "one" / "a.parquet", words()).parent)


def test_tables_are_packed(tmp_path: Path) -> None:
    from headrace import HDF5Dataset

    path = write(tmp_path / "a.parquet", some_table())
    with TableDataset(path, ["number", "vector"], target_name="half") as dataset:
        pack(dataset, tmp_path / "rows.h5", workers=1, progress=False)
        with HDF5Dataset(tmp_path / "rows.h5", target_name="targets") as packed:
            assert (
                torch.equal(packed[7][0]["vector"], dataset[7][0]["vector"])
                and packed[7][1] == 7
                and packed.fingerprint == dataset.fingerprint
            )
    with (
        TableDataset(path, "text", on_error="skip") as dataset,
        pytest.raises(ConfigError, match="can't be packed"),
    ):
        pack(dataset.subset([10]), tmp_path / "none.h5", workers=1, progress=False)
    with TableDataset(path, "word") as dataset:
        pack(dataset, tmp_path / "words.h5", workers=1, progress=False)
        with HDF5Dataset(tmp_path / "words.h5") as packed:
            assert packed[6] == "w2"
    images = write(tmp_path / "b.parquet", pictures(True))
    with TableDataset(
        images, image_column="image", target_name="label", image_size=8, normalize=False
    ) as dataset:
        pack(dataset, tmp_path / "images.h5", workers=1, progress=False)
        with HDF5Dataset(tmp_path / "images.h5", target_name="targets") as packed:
            assert same(packed[4], dataset[4])
    with (
        TableDataset(images, ["image", "caption"], text_column="caption") as dataset,
        pytest.raises(ConfigError, match=r"texts beside other columns .* leave out columns"),
    ):
        pack(dataset, tmp_path / "texts.h5", workers=1, progress=False)


# -- the contracts


class _Contract(DatasetContract):
    kind = "parquet"

    @pytest.fixture(autouse=True)
    def _data(self, tmp_path: Path) -> None:
        self.path = write(tmp_path / name_of(self.kind), some_table(48), self.kind, rows=5)

    def make(self, **options: Any) -> TableDataset:
        return TableDataset(self.path, ["number", "vector", "blob"], **options)

    def make_bad(self, **options: Any) -> tuple[TableDataset, list[int]]:
        path = self.path.with_name(f"bad-{self.path.name}")
        if not path.exists():
            numbers = pa.array([None if row in (6, 31) else row for row in range(40)], pa.int32())
            write(
                path,
                pa.table({"number": numbers, "word": [str(row) for row in range(40)]}),
                self.kind,
                rows=5,
            )
        return TableDataset(path, **options), [6, 31]


@pytest.mark.falls_back
class TestParquet(_Contract):
    pass


@pytest.mark.slow
@pytest.mark.falls_back
class TestMapped(_Contract):
    kind = "stream"


@pytest.mark.slow
@pytest.mark.falls_back
class TestFeather(_Contract):
    kind = "feather"


@pytest.mark.slow
class TestOneColumn(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path: Path) -> None:
        self.path = write(tmp_path / "a.parquet", some_table(48), rows=5)

    def make(self, **options: Any) -> TableDataset:
        return TableDataset(self.path, "vector", target_name="number", **options)


@pytest.mark.slow
@pytest.mark.falls_back
class TestImages(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path: Path) -> None:
        self.path = write(tmp_path / "a.parquet", pictures(True), rows=5)

    def make(self, **options: Any) -> TableDataset:
        return TableDataset(
            self.path,
            image_column="image",
            target_name="label",
            image_size=8,
            transform_input="tensor",
            **options,
        )


@pytest.mark.slow
@pytest.mark.falls_back
class TestChats(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path: Path) -> None:
        self.path = write(tmp_path / "a.parquet", chats_table(24, tools=["[]"] * 24), rows=5)

    def make(self, **options: Any) -> TableDataset:
        return TableDataset(
            self.path, text_column="messages", tokenizer=ChatTokenizer(CALLS), **options
        )

    def make_bad(self, **options: Any) -> tuple[TableDataset, list[int]]:
        path = self.path.with_name("bad.parquet")
        rows = [
            None if row in (6, 21) else chat
            for row, chat in enumerate(chats_table(24)["messages"].to_pylist())
        ]
        write(path, pa.table({"messages": rows}), rows=5)
        return TableDataset(
            path, text_column="messages", tokenizer=ChatTokenizer(CALLS), **options
        ), [6, 21]


class TestRemoteParquet(RemoteDatasetContract):
    names = ("a.parquet", "b.parquet")
    has_index = False

    def write(self, folder: Path) -> None:
        for number, name in enumerate(self.names):
            write(folder / name, some_table(40, 100 * number), rows=8)

    def make(self, paths: list[str], **options: Any) -> TableDataset:
        return TableDataset(paths, ["number", "vector", "word"], **{"progress": False, **options})


@pytest.mark.slow
class TestRemoteStream(TestRemoteParquet):
    names = ("a.arrow", "b.arrow")
    has_index = True
    kind = "stream"

    def write(self, folder: Path) -> None:
        for number, name in enumerate(self.names):
            write(folder / name, some_table(40, 100 * number), self.kind, rows=8)


@pytest.mark.slow
class TestRemoteFeather(TestRemoteStream):
    kind = "feather"


def test_texts_of_many_rows_are_those_of_pyarrow(tmp_path: Path) -> None:
    """Row groups of ASCII texts alone, of others, and of none; numbers beside them, of many
    blocks in a batch.
    """
    texts = [
        None if row % 13 == 5 else f"{'ä' if row in range(100, 200) else 'a'} {row}" * (row % 3)
        for row in range(400)
    ]
    numbers = np.random.default_rng(1).random((400, 5), np.float32)
    table = pa.table(
        {
            "text": pa.array([*texts, *[None] * 100], pa.large_string()),
            "row": range(500),
            "vector": pa.FixedSizeListArray.from_arrays(
                pa.array(np.vstack([numbers, numbers[:100]]).reshape(-1)), 5
            ),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    for shuffle in ("block", True, False):
        for batch in create_dataloader(
            tmp_path / "a.parquet", batch_size=60, shuffle=shuffle, num_workers=0
        ):
            rows = batch["row"].tolist()
            assert batch["text"] == [table["text"][row].as_py() for row in rows]
            assert batch["vector"].tolist() == [table["vector"][row].as_py() for row in rows]


def test_random_rows_decode_each_block_once(tmp_path: Path) -> None:
    pq.write_table(pa.table({"row": range(2000)}), tmp_path / "a.parquet", row_group_size=100)
    dataset = TableDataset(tmp_path / "a.parquet")
    loader = create_dataloader(dataset, batch_size=8, shuffle=True, num_workers=0)
    for _ in range(2):
        assert sorted(row for batch in loader for row in batch["row"].tolist()) == list(range(2000))
    assert loader.get_stats()["chunks_decoded"] == 20


def test_random_rows_of_too_large_blocks_are_advised(tmp_path: Path) -> None:
    table = pa.table(
        {
            "row": range(20_000),
            "vector": pa.FixedSizeListArray.from_arrays(
                pa.array(np.zeros(20_000 * 64, np.float32)), 64
            ),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    dataset = TableDataset(tmp_path / "a.parquet", max_memory_usage="8MB")
    with pytest.warns(
        HeadraceWarning,
        match=r"the blocks of TableDataset take 5\.\d MB",
    ):
        create_dataloader(dataset, batch_size=8, shuffle=True, num_workers=0)
    # which decodes each once, in any case
    create_dataloader(dataset, batch_size=8, shuffle=False, num_workers=0)


@pytest.mark.parametrize(("usage", "decodes"), [("64MB", 20), ("8MB", 60)])
def test_a_small_table_stays_decoded_in_blocks(tmp_path: Path, usage: str, decodes: int) -> None:
    """Where there is room for it; what is cached stays below what is reserved."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(20_000 * 64, np.float32)), 64)
    pq.write_table(
        pa.table({"row": range(20_000), "vector": vectors}),
        tmp_path / "a.parquet",
        row_group_size=1000,
        use_dictionary=False,
    )
    with TableDataset(tmp_path / "a.parquet", max_memory_usage=usage) as dataset:
        loader = create_dataloader(
            dataset, batch_size=100, shuffle="block", interleave=2, turns=1, num_workers=0
        )
        assert ("all stay decoded" in loader.explain()) is (decodes == 20)
        cached = dataset.sample_source._decoded._cached  # type: ignore[union-attr]
        for _ in range(3):
            rows = list[int]()
            for batch in loader:
                rows += batch["row"].tolist()
                assert (
                    cached.nbytes
                    <= cached.max_bytes
                    <= dataset.budget.limit - dataset.budget.available
                )
            assert sorted(rows) == list(range(20_000))
        assert decodes <= loader.get_stats()["chunks_decoded"] <= decodes + 3 * 1


def test_lists_of_any_length_are_targets(tmp_path: Path) -> None:
    tags = pa.array([[3, 7], [5], []], pa.list_(pa.int64()))
    pq.write_table(pa.table({"x": [1.0, 2.0, 3.0], "tags": tags}), tmp_path / "t.parquet")
    dataset = TableDataset(tmp_path / "t.parquet", "x", target_name="tags")
    assert [target.tolist() for _, target in map(dataset.__getitem__, range(3))] == [
        [3, 7],
        [5],
        [],
    ]


@pytest.mark.parametrize("null", range(5))
def test_the_row_of_a_missing_target_is_named(null: int, tmp_path: Path) -> None:
    numbers = [None if row == null else row for row in range(5)]
    for name, some in (("a", slice(0, 2)), ("b", slice(2, 5))):
        table = pa.table({"x": list(range(5))[some], "y": pa.array(numbers[some], pa.int64())})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    where = f"a.parquet, row {null}" if null < 2 else f"b.parquet, row {null - 2}"
    with pytest.raises(FormatError, match=rf"{where}: column 'y' has no value \(null\)"):
        TableDataset(tmp_path, target_name="y")


def test_a_column_called_index_is_not_replaced(tmp_path: Path) -> None:
    pq.write_table(pa.table({"index": ["q", "w"], "x": [1, 2]}), tmp_path / "t.parquet")
    assert TableDataset(tmp_path / "t.parquet")[1] == {"index": "w", "x": torch.tensor(2)}
    with pytest.raises(
        ConfigError,
        match="have a field 'index' of their own, which return_index=True would replace",
    ):
        TableDataset(tmp_path / "t.parquet", return_index=True)[0]
    assert TableDataset(tmp_path / "t.parquet", columns=["x"], return_index=True)[1] == {
        "index": 1,
        "x": torch.tensor(2),
    }


@pytest.mark.quick_every(1)
@pytest.mark.parametrize("kind", ["parquet", "arrow", "feather"])
def test_repeated_texts_stay_dictionaries(kind: str, tmp_path: Path) -> None:
    long, n = "A" * 2000, 20_000
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, "i4")), pa.array([long]))
    blobs = pa.array([{"bytes": long.encode()}] * n)
    numbers = pa.array([[7, 7]] * n)
    columns = (
        {"x": texts, "numbers": numbers}
        if kind != "parquet"
        else {"x": texts, "s": blobs, "numbers": numbers}
    )
    path = write(tmp_path / f"a.{kind}", pa.table(columns), kind, rows=n)
    with TableDataset(path) as dataset:
        (table,) = dataset.sample_source.tables
        if not table.is_in_place:
            block = table.decode(0, dataset.sample_source._read_blocks([0])[0])
            assert block.nbytes < 1_000_000  # decoded texts are 40 MB
        assert dataset.sample_source.layout_nbytes >= 16 * n or kind == "feather"  # the lists
        assert dataset[n - 1]["x"] == long
        if kind == "parquet":
            assert dataset[3]["s"] == {"bytes": long.encode()}


class _Keys(pe.KmsClient):  # type: ignore[misc]
    """Wraps keys with their names only."""

    def __init__(self, _: Any) -> None:
        super().__init__()

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return base64.b64encode(master_key_identifier.encode() + key_bytes)

    def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
        return base64.b64decode(wrapped_key)[len(master_key_identifier) :]


def write_encrypted(path: Path, plaintext_footer: bool) -> Path:
    config = pe.EncryptionConfiguration(
        footer_key="footer__",
        column_keys={"colkey__": ["secret"]},
        plaintext_footer=plaintext_footer,
        data_key_length_bits=128,
    )
    properties = pe.CryptoFactory(_Keys).file_encryption_properties(
        pe.KmsConnectionConfig(), config
    )
    table = pa.table({"open": list(range(10)), "secret": [f"s{row}" for row in range(10)]})
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table, row_group_size=4)
    return path


@pytest.mark.quick_every(1)
def test_encrypted_columns_are_named(tmp_path: Path) -> None:
    path = write_encrypted(tmp_path / "a.parquet", plaintext_footer=True)
    for arguments in ({}, {"columns": ["secret"]}, {"columns": ["open"], "target_name": "secret"}):
        with pytest.raises(FormatError, match="column 'secret' is encrypted"):
            TableDataset(path, **arguments)
    with TableDataset(path, ["open"]) as dataset:
        assert [int(dataset[row]["open"]) for row in range(10)] == list(range(10))
    report = inspect(path)
    assert "columns=['open']" in report.opens_as and any(
        "'secret'" in note for note in report.notes
    )
    with pytest.raises(FormatError, match="encrypted footer"):
        TableDataset(write_encrypted(tmp_path / "b.parquet", plaintext_footer=False))


def of_arrow(is_stream: bool, **columns: Any) -> bytes:
    """The bytes of an Arrow file."""
    table, sink = pa.table(columns), pa.BufferOutputStream()
    with (pa.ipc.new_stream if is_stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


@pytest.mark.quick_every(1)
@pytest.mark.parametrize("is_stream", [False, True])
def test_forged_arrow_files_are_errors_of_ours(is_stream: bool, tmp_path: Path) -> None:
    three, many = struct.pack("<q", 3), struct.pack("<q", 140_000_000_000)
    forged = [of_arrow(is_stream, x=pa.array([1, None, 3])).replace(b"x\0\0\0", b"\xff\0\0\0")]
    for values in ([1, 2, 3], ["a", "b", "c"], [True, None, False], [[1], [2], None]):
        forged.append(of_arrow(is_stream, x=pa.array(values)).replace(three, many))
    if not is_stream:
        whole = of_arrow(is_stream, x=pa.array([1, 2, 3]))
        forged.append(whole[:8] + bytes(8) + whole[16:])
    for number, data in enumerate(forged):
        path = tmp_path / f"{number}.arrow"
        path.write_bytes(data)
        with pytest.raises((FormatError, SampleError)):
            _ = TableDataset(path)[2]
    path = tmp_path / "nothing.arrow"  # rows of no bytes take no memory
    path.write_bytes(of_arrow(is_stream, x=pa.array([b""] * 3, pa.binary(0))).replace(three, many))
    with TableDataset(path) as dataset:
        assert len(dataset) == 140_000_000_000 and dataset[10**10] == {"x": b""}


@pytest.mark.quick_every(1)
@pytest.mark.parametrize("offset", [5, 1 << 31, 0xFFFFFFF0])
def test_a_wrong_directory_of_npz_is_an_error(offset: int, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, a=np.arange(10), b=np.arange(10))
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, data.rfind(b"PK\5\6") + 16, offset)
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"a\.npz"):
        TableDataset(path)


@pytest.mark.quick_every(1)
def test_info_on_two_columns_of_one_name(tmp_path: Path) -> None:
    table = pa.table(
        [pa.array([1, 2]), pa.array([3, 4]), pa.array(["a", "b"])], names=["x", "x", "y"]
    )
    report = inspect(write(tmp_path / "a.parquet", table))
    assert report.opens_as.endswith("columns=['y'])") and any(
        "several columns are named 'x'" in note for note in report.notes
    )
