"""Texts, bytes, ids and chats of a column of any container are those of the same .jsonl."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr

from headrace import (
    ConfigError,
    HeadraceWarning,
    MissingNameError,
    SampleError,
    TextDataset,
    create_dataloader,
    open_dataset,
    pack,
)
from headrace.testing.contract import same
from headrace.tokenizer import CharTokenizer
from tests.data.make import make_tar
from tests.datasets.text.chat_tokenizer import MARKED, chat_tokenizer

pa = pytest.importorskip("pyarrow")  # in the extra `test`
pq = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.usefixtures("own_cache")

N = 40
TEXTS = [f"Zeile {row} äöü " * (1 + row % 4) for row in range(N)]
CUTS: list[dict[str, Any]] = [
    {},
    {"max_length": 20},
    {"packing": True, "max_length": 16, "end_token": 3},
    {"stride": 5, "max_length": 9},
]
CALLS = MARKED.replace(
    "message.content", "(message.content or message.tool_calls[0].function.name)"
)


def write_table(path: Path, rows: int = 7, **columns: list[Any]) -> Path:
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    return path


def write_texts(path: Path, texts: list[Any] = TEXTS) -> Path:
    return write_table(path, text=texts, label=[row % 3 for row in range(len(texts))])


def write_lines(path: Path, texts: list[str] = TEXTS) -> Path:
    rows = [json.dumps({"text": text, "label": row % 3}) + "\n" for row, text in enumerate(texts)]
    path.write_text("".join(rows))
    return path


def same_samples(one: Any, other: Any) -> bool:
    return len(one) == len(other) > 3 and all(
        same(one[index], other[index]) for index in range(len(other))
    )


def batches(dataset: Any, **options: Any) -> list[Any]:
    options = {"batch_size": 3, "num_workers": 0, "seed": 5, **options}
    with create_dataloader(dataset, **options) as loader:
        return [pickle.loads(pickle.dumps(batch)) for batch in loader]


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("cut", CUTS)
def test_columns_of_tables_in_all_modes(cut: dict[str, Any], tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl")
    with TextDataset(lines, cache_dir=tmp_path / "cache", **cut) as texts:
        for name in ("a.parquet", "a.arrow"):
            path = write_texts(tmp_path / name)
            for mode in ("lazy", "eager", "cached", "streaming"):
                options: Any = {"column": "text", "loading_mode": mode, "progress": False, **cut}
                with TextDataset(path, cache_dir=tmp_path / name[2:], **options) as dataset:
                    assert len(dataset) == len(texts)
                    assert np.array_equal(dataset.lengths(), texts.lengths())
                    shuffle = mode != "lazy" and "block" if mode == "streaming" else False
                    if not shuffle:
                        assert same(batches(dataset, shuffle=False), batches(texts, shuffle=False))
                        continue
                    count = sum(len(batch["input_ids"]) for batch in batches(dataset))
                    assert count == len(texts)


@pytest.mark.slow
def test_texts_bytes_and_ids_of_any_container(tmp_path: Path) -> None:
    ids = [[ord(letter) + 2 for letter in text] for text in TEXTS]
    write_table(tmp_path / "a.parquet", text=TEXTS, bytes=[t.encode() for t in TEXTS], ids=ids)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["text"] = TEXTS
        of_ids = file.create_dataset("ids", (N,), h5py.vlen_dtype(np.uint16))
        for row in range(N):
            of_ids[row] = ids[row]
    make_tar(tmp_path / "a.tar", [(f"{row:03d}.txt", t.encode()) for row, t in enumerate(TEXTS)])
    fixed = np.array([row[:9] for row in ids], np.int32)
    zarr.open_group(tmp_path / "a.zarr").create_array("ids", data=fixed)
    with TextDataset(write_lines(tmp_path / "a.jsonl"), max_length=9) as texts:
        expected = [texts[row] for row in range(N)]
    columns = {"a.parquet": ["text", "bytes", "ids"], "a.h5": ["text", "ids"], "a.tar": ["txt"]}
    columns["a.zarr"] = ["ids"]
    for name, column in [(name, column) for name, each in columns.items() for column in each]:
        with open_dataset(tmp_path / name, column=column, max_length=9) as dataset:
            assert type(dataset) is TextDataset
            assert same([dataset[row] for row in range(N)], expected), (name, column)
            batch = next(iter(create_dataloader(dataset, batch_size=4, num_workers=2)))
            assert batch["attention_mask"].shape[0] == 4
            if column == "ids":
                with pytest.raises(ConfigError, match="holds ids"):
                    dataset.text_of(0)
            else:
                assert dataset.text_of(3) == TEXTS[3]


def test_targets_of_another_column(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.parquet")
    how: Any = {"column": "text", "target_field": "label", "stride": 9, "max_length": 9}
    with TextDataset(path, column="text", target_field="label") as whole:
        assert [whole[row]["labels"] for row in range(N)] == [row % 3 for row in range(N)]
    with TextDataset(path, **how) as dataset:
        edges = np.cumsum([0, *(-(-len(text) // 9) for text in TEXTS)])
        assert len(dataset) == edges[-1] == len(dataset.targets)
        for row in (0, 3, 17, N - 1):
            first = int(edges[row])
            assert dataset[first]["labels"] == row % 3 == dataset.targets[first]
        view = pickle.loads(pickle.dumps(dataset.subset([int(edges[17])])))
        assert view[0]["labels"] == 17 % 3
    names = write_table(tmp_path / "b.parquet", text=TEXTS[:3], label=["b", "a", "b"])
    with TextDataset(names, column="text", target_field="label") as classes:
        assert classes.classes == ["a", "b"]
        assert classes.targets.tolist() == [1, 0, 1]


def test_texts_that_are_none(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.parquet", [*TEXTS[:9], None, *TEXTS[9:]])
    how: Any = {"column": "text", "packing": True, "max_length": 8}
    said = "row 9: column 'text'"
    with TextDataset(path, column="text") as dataset:
        for read in (dataset.lengths, lambda: dataset[9], lambda: TextDataset(path, **how)):
            with pytest.raises(SampleError, match=said):
                read()
    with TextDataset(path, column="text", on_error="skip") as dataset:
        assert dataset.lengths()[8:11].tolist() == [len(TEXTS[8]), 0, len(TEXTS[9])]
    with pytest.warns(HeadraceWarning, match=r"1 of 41 .*row 9"):
        dataset = TextDataset(path, on_error="skip", **how)
    with TextDataset(write_lines(tmp_path / "a.jsonl"), packing=True, max_length=8) as texts:
        assert len(dataset) == len(texts)
        assert same(dataset[5]["input_ids"], texts[5]["input_ids"])


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.parquet")
    blocks: dict[str, Any] = {"packing": True, "max_length": 8}
    for given in (
        {"end_token": 1},
        {**blocks, "target_field": "label"},
        {"unit": "line"},
        {"labels": "folders"},
        {"text_field": "body"},
        {"delimiter": ";"},
        {"unit": "chat"},
    ):
        with pytest.raises(ConfigError):
            TextDataset(path, column="text", **given)
    with pytest.raises(MissingNameError, match="'other'"):
        TextDataset(path, column="other")
    with pytest.raises(ConfigError, match="column="):
        TextDataset(path)  # its bytes are no text
    with TextDataset(path, column="label") as numbers, pytest.raises(SampleError, match="a text"):
        numbers[0]
    lines = write_lines(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="column="):
        TextDataset(lines, column="text")
    refused = TextDataset(path, column="text", **blocks).subset([1, 2])
    with pytest.raises(ConfigError):
        pack(refused, tmp_path / "refused.h5", progress=False)


def test_packed_texts_are_those_of_the_table(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.parquet")
    with TextDataset(path, column="text", target_field="label") as whole:
        view = whole.subset([3, 30, 5, 8, 21, 11])
        pack(view, tmp_path / "parts", shard_size=300, progress=False)
        assert len([*(tmp_path / "parts").glob("*.h5")]) > 1
        assert same_samples(TextDataset(tmp_path / "parts"), view)
    cut: Any = {"packing": True, "max_length": 16}
    with TextDataset(path, column="text", end_token=3, **cut) as dataset:
        pack(dataset, tmp_path / "a.h5", progress=False)
        with TextDataset(tmp_path / "a.h5", **cut) as packed:
            assert same_samples(packed, dataset)
            assert packed.document_unit == "record"
            assert isinstance(packed.tokenizer, CharTokenizer)


# -- chats


def chats(count: int = 6) -> list[Any]:
    """Chats of two turns; where there are tool calls, all structs have the field."""
    call = [{"function": {"name": "saw", "arguments": "{}"}}]
    rows = [
        [
            {"role": "user", "content": f"number {row}", "tool_calls": None},
            {"role": "assistant", "content": f"answer {row}", "tool_calls": None},
        ]
        for row in range(count)
    ]
    rows[1][1] |= {"content": None, "tool_calls": call}
    return rows


def write_chats(folder: Path, **columns: list[Any]) -> Path:
    table = pa.table({"messages": chats(), **columns})
    rows = [{k: v for k, v in row.items() if v is not None} for row in table.to_pylist()]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_chats_are_those_of_json_lines(name: str, tmp_path: Path) -> None:
    more = {"tools": ['[{"name": "saw"}]'] * 5 + [None], "system": ["be kind"] * 6}
    path = write_table(tmp_path / name, rows=2, messages=chats(), number=list(range(6)), **more)
    template = "{{ (tools or [{'name': 'none'}])[0].name }}" + CALLS
    options: Any = {"column": "messages", "tokenizer": chat_tokenizer(template)}
    texts = TextDataset(write_chats(tmp_path, **more), tokenizer=chat_tokenizer(template))
    assert "be kind" in texts.text_of(0)
    with TextDataset(path, **options) as dataset:
        assert same_samples(dataset, texts)
        assert dataset.lengths()[0] == len(texts.text_of(0))
        assert same(batches(dataset), batches(texts))
        other = TextDataset(path, column="messages", tokenizer=chat_tokenizer(CALLS))
        assert dataset.held_as() != other.held_as()
    cut: Any = {"packing": True, "max_length": 16}
    of_lines = TextDataset(texts.data_path, tokenizer=chat_tokenizer(template), **cut)
    with TextDataset(path, **options, **cut) as blocks:
        assert same_samples(blocks, of_lines)
        assert "labels" in blocks[0]
    options |= {"tokenizer": chat_tokenizer(None), "chat_template": template, "max_length": 80}
    with open_dataset(path, **options) as dataset:
        assert torch.equal(dataset[3]["labels"], texts[3]["labels"][:80])


def test_chats_of_tables_that_are_none(tmp_path: Path) -> None:
    alone = [{"role": "user", "content": "x", "tool_calls": None}]
    path = write_table(tmp_path / "a.parquet", messages=[*chats(), None, alone], note=["x"] * 8)
    how: Any = {"column": "messages", "tokenizer": chat_tokenizer(CALLS)}
    with TextDataset(path, **how) as dataset:
        for row in (6, 7):
            with pytest.raises(SampleError, match=f"row {row}"):
                dataset[row]
    with TextDataset(path, on_error="skip", **how) as dataset:
        assert [len(batch["labels"]) for batch in batches(dataset, batch_size=8)] == [6]
        assert dataset.lengths()[6:].tolist() == [0, 0]
    with TextDataset(path, column="messages") as dataset, pytest.raises(SampleError, match="chat"):
        dataset[0]
    for options in ({"target_field": "note"}, {"stride": 3, "max_length": 9}):
        with pytest.raises(ConfigError):
            TextDataset(path, unit="chat", **how, **options)
