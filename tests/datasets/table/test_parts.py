"""Windows, blocks and rows of the texts and chats of a table are those of the same texts as .jsonl."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import ConfigError, HeadraceWarning, SampleError, TableDataset, TextDataset, create_dataloader, document_mask
from headrace.testing.contract import DatasetContract, same
from headrace.tokenizer import CharTokenizer
from tests.datasets.table.test_table import CALLS, chats_table, name_of, write, write_chats
from tests.datasets.text.chat_tokenizer import ChatTokenizer
from tests.servers.ranges import RangeServer

pa = pytest.importorskip("pyarrow")  # in the extra `test`

N = 40
TEXTS = [f"Zeile {row} äöü " * (1 + row % 4) for row in range(N)]
CUTS: list[dict[str, Any]] = [
    {"packing": True, "max_length": 16},
    {"packing": True, "max_length": 16, "end_token": 3},
    {"packing": "bfd", "max_length": 48},
    {"stride": 5, "max_length": 9},
]


def texts_table(texts: list[Any] = TEXTS) -> Any:
    return pa.table({"text": texts, "label": [row % 3 for row in range(len(texts))]})


def write_texts(folder: Path, texts: list[str] = TEXTS) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["parquet", "stream", "feather"])
def test_parts_are_those_of_text_dataset(kind: str, cut: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / name_of(kind), texts_table(), kind, rows=7)
    keep: dict[str, Any] = {"cache_dir": tmp_path / "cache"}
    with TableDataset(path, text_column="text", **cut, **keep) as dataset, TextDataset(write_texts(tmp_path), **cut, **keep) as texts:
        assert len(dataset) == len(texts) > 3 and all(same(dataset[at], texts[at]) for at in range(len(texts)))
        assert dataset.has_texts and np.array_equal(dataset.lengths(), texts.lengths())  # type: ignore[arg-type]
        shuffle: Any
        for shuffle, workers in ((True, 0), ("block", 0), (False, 2)):
            ours, others = (create_dataloader(one, batch_size=3, shuffle=shuffle, seed=5, num_workers=workers) for one in (dataset, texts))
            with ours, others:
                assert all(same(*both) for both in zip(ours, others, strict=True))


def test_chats_in_rows_and_blocks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", chats_table(), rows=2)
    with TableDataset(path, text_column="messages", tokenizer=ChatTokenizer(CALLS)) as dataset:
        lines = write_chats(tmp_path, dataset, [None] * 6)
        assert dataset.text_of(3) == lines.text_of(3)
    for cut in CUTS[0], {"packing": "bfd", "max_length": 120}:
        ours = TableDataset(path, text_column="messages", tokenizer=ChatTokenizer(CALLS), **cut)
        other = TextDataset(tmp_path / "chats.jsonl", unit="chat", tokenizer=ChatTokenizer(CALLS), **cut)
        with ours, other:
            assert len(ours) == len(other) and all(same(ours[at], other[at]) for at in range(len(ours))) and "labels" in ours[0]
    with TableDataset(path, text_column="messages", tokenizer=ChatTokenizer(CALLS), packing="bfd", max_length=120) as rows:
        batch = next(iter(create_dataloader(rows, batch_size=2, num_workers=0)))
        assert document_mask(batch["document_ids"]).shape == (2, 1, 120, 120)
    for wrong, said in (({"stride": 3}, "would supervise a turn twice"), ({"packing": True, "end_token": 1}, "whose template ends")):
        with pytest.raises(ConfigError, match=said):
            TableDataset(path, text_column="messages", tokenizer=ChatTokenizer(CALLS), max_length=9, **wrong)


def test_windows_have_the_targets_and_texts_of_their_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", texts_table(), rows=7)
    with TableDataset(path, text_column="text", target_name="label", stride=9, max_length=9) as dataset:
        edges = np.cumsum([0, *(-(-len(CharTokenizer()(text)) // 9) for text in TEXTS)])
        assert len(dataset) == edges[-1] == len(dataset.targets)
        for row in (0, 3, 17, N - 1):
            first = int(edges[row])
            assert dataset.text_of(first) == TEXTS[row] and dataset[first]["labels"] == row % 3 == dataset.targets[first]
        view = pickle.loads(pickle.dumps(dataset.subset([int(edges[17])])))
        assert view.text_of(0) == TEXTS[17] and view[0]["labels"] == 17 % 3


def test_a_text_that_is_none_is_an_error_or_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", texts_table([*TEXTS[:9], None, *TEXTS[9:]]), rows=4)
    with pytest.raises(SampleError, match=r"row 9: column 'text' has no text \(null\)"):
        TableDataset(path, text_column="text", packing=True, max_length=8)
    with (
        pytest.warns(HeadraceWarning, match="1 of 41 documents can't be read, or tokenised, and are left out; the first: .*row 9"),
        TableDataset(path, text_column="text", packing=True, max_length=8, on_error="skip") as dataset,
        TextDataset(write_texts(tmp_path), packing=True, max_length=8) as texts,
    ):
        assert len(dataset) == len(texts) and same(dataset[5]["input_ids"], texts[5]["input_ids"])


def test_tokens_are_kept_and_belong_to_their_files(tmp_path: Path) -> None:
    made = list[int]()

    class Counting:
        fingerprint = "counting"

        def __call__(self, text: str) -> list[int]:
            made.append(1)
            return list(text.encode())

    def blocks() -> int:
        made.clear()
        with TableDataset(
            path, text_column="text", tokenizer=Counting(), packing=True, max_length=8, cache_dir=tmp_path / "cache"
        ) as dataset:
            return len(dataset)

    path = write(tmp_path / "a.parquet", texts_table(), rows=7)
    count = blocks()
    assert sum(made) == N and blocks() == count and not made
    write(path, texts_table(TEXTS + TEXTS), rows=7)
    assert blocks() > count and sum(made) == 2 * N


def test_by_url_and_from_a_plain_copy(tmp_path: Path) -> None:
    path, cut = write(tmp_path / "data" / "a.parquet", texts_table(), rows=7), CUTS[0]
    with RangeServer(path.parent) as server, TableDataset(path, text_column="text", **cut) as here:
        for where, more in ((f"{server.url}/a.parquet", {}), (path, {"plain_copy": True})):
            with TableDataset(where, text_column="text", cache_dir=tmp_path / "cache", **cut, **more) as dataset:
                assert all(same(dataset[at], here[at]) for at in range(len(here)))


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", texts_table())
    np.save(tmp_path / "a.npy", np.zeros(3))
    for given, said in (
        ({"packing": True}, "packing is for text_column: name the column"),
        ({"stride": 3}, "stride is for text_column: name the column"),
        ({"text_column": "text", "packing": True}, "packing=True needs max_length="),
        ({"text_column": "text", "end_token": 1}, "end_token has a meaning with stride or packing only"),
        ({"text_column": "text", "packing": True, "max_length": 8, "target_name": "label"}, "target_name can't be given with packing"),
        ({"text_column": "text", "packing": True, "max_length": 8, "columns": ["label"]}, "leave out columns"),
        ({"text_column": "text", "stride": 8, "max_length": 8, "image_column": "label"}, "leave out columns and image_column"),
        ({"text_column": "label", "packing": True, "max_length": 8}, "holds no texts or chats"),
    ):
        with pytest.raises((ConfigError, ValueError), match=said):
            TableDataset(path, **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="which have no columns of images or texts"):
        TableDataset(tmp_path / "a.npy", text_column="x", packing=True, max_length=8)
    with TableDataset(path) as dataset, pytest.raises(ConfigError, match="no column of texts is named"):
        dataset.text_of(0)
    with TableDataset(path, text_column="text", packing=True, max_length=8) as blocks, pytest.raises(ConfigError, match="of no one text"):
        blocks.text_of(0)


@pytest.mark.slow
class TestBlocks(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path: Path) -> None:
        self.path = write(tmp_path / "a.parquet", texts_table(), rows=7)

    def make(self, **options: Any) -> TableDataset:
        return TableDataset(self.path, text_column="text", packing=True, max_length=16, **options)
