"""Windows, blocks and rows of the texts and chats of a table are those of the same texts as
.jsonl.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import (
    ConfigError,
    HeadraceWarning,
    SampleError,
    TableDataset,
    TextDataset,
    create_dataloader,
    document_mask,
    pack,
)
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
    with (
        TableDataset(path, text_column="text", **cut, **keep) as dataset,
        TextDataset(write_texts(tmp_path), **cut, **keep) as texts,
    ):
        assert len(dataset) == len(texts) > 3 and all(
            same(dataset[at], texts[at]) for at in range(len(texts))
        )
        assert dataset.has_texts and np.array_equal(dataset.lengths(), texts.lengths())  # type: ignore[arg-type]
        shuffle: Any
        for shuffle, workers in ((True, 0), ("block", 0), (False, 2)):
            ours, others = (
                create_dataloader(one, batch_size=3, shuffle=shuffle, seed=5, num_workers=workers)
                for one in (dataset, texts)
            )
            with ours, others:
                assert all(same(*both) for both in zip(ours, others, strict=True))


def test_chats_in_rows_and_blocks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", chats_table(), rows=2)
    with TableDataset(path, text_column="messages", tokenizer=ChatTokenizer(CALLS)) as dataset:
        lines = write_chats(tmp_path, dataset, [None] * 6)
        assert dataset.text_of(3) == lines.text_of(3)
    for cut in CUTS[0], {"packing": "bfd", "max_length": 120}:
        ours = TableDataset(path, text_column="messages", tokenizer=ChatTokenizer(CALLS), **cut)
        other = TextDataset(
            tmp_path / "chats.jsonl", unit="chat", tokenizer=ChatTokenizer(CALLS), **cut
        )
        with ours, other:
            assert (
                len(ours) == len(other)
                and all(same(ours[at], other[at]) for at in range(len(ours)))
                and "labels" in ours[0]
            )
    with TableDataset(
        path, text_column="messages", tokenizer=ChatTokenizer(CALLS), packing="bfd", max_length=120
    ) as rows:
        batch = next(iter(create_dataloader(rows, batch_size=2, num_workers=0)))
        assert document_mask(batch["document_ids"]).shape == (2, 1, 120, 120)
    for wrong, said in (
        ({"stride": 3}, "would supervise a turn twice"),
        ({"packing": True, "end_token": 1}, "whose template ends"),
    ):
        with pytest.raises(ConfigError, match=said):
            TableDataset(
                path, text_column="messages", tokenizer=ChatTokenizer(CALLS), max_length=9, **wrong
            )


def test_windows_have_the_targets_and_texts_of_their_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", texts_table(), rows=7)
    with TableDataset(
        path, text_column="text", target_name="label", stride=9, max_length=9
    ) as dataset:
        edges = np.cumsum([0, *(-(-len(CharTokenizer()(text)) // 9) for text in TEXTS)])
        assert len(dataset) == edges[-1] == len(dataset.targets)
        for row in (0, 3, 17, N - 1):
            first = int(edges[row])
            assert (
                dataset.text_of(first) == TEXTS[row]
                and dataset[first]["labels"] == row % 3 == dataset.targets[first]
            )
        view = pickle.loads(pickle.dumps(dataset.subset([int(edges[17])])))
        assert view.text_of(0) == TEXTS[17] and view[0]["labels"] == 17 % 3


def test_a_text_that_is_none_is_an_error_or_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", texts_table([*TEXTS[:9], None, *TEXTS[9:]]), rows=4)
    with pytest.raises(SampleError, match=r"row 9: column 'text' has no text \(null\)"):
        TableDataset(path, text_column="text", packing=True, max_length=8)
    with (
        pytest.warns(
            HeadraceWarning,
            match=(
                "1 of 41 documents can't be read, or tokenised, and are left out; the first: "
                ".*row 9"
            ),
        ),
        TableDataset(
            path, text_column="text", packing=True, max_length=8, on_error="skip"
        ) as dataset,
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
            path,
            text_column="text",
            tokenizer=Counting(),
            packing=True,
            max_length=8,
            cache_dir=tmp_path / "cache",
        ) as dataset:
            return len(dataset)

    path = write(tmp_path / "a.parquet", texts_table(), rows=7)
    count = blocks()
    assert sum(made) == N and blocks() == count and not made
    write(path, texts_table(TEXTS + TEXTS), rows=7)
    assert blocks() > count and sum(made) == 2 * N


def test_by_url(tmp_path: Path) -> None:
    path, cut = write(tmp_path / "data" / "a.parquet", texts_table(), rows=7), CUTS[0]
    with RangeServer(path.parent) as server, TableDataset(path, text_column="text", **cut) as here:
        url, kept = f"{server.url}/a.parquet", tmp_path / "cache"
        with TableDataset(url, text_column="text", cache_dir=kept, **cut) as dataset:
            assert all(same(dataset[at], here[at]) for at in range(len(here)))


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", texts_table())
    np.save(tmp_path / "a.npy", np.zeros(3))
    for given, said in (
        ({"packing": True}, "packing is for text_column: name the column"),
        ({"stride": 3}, "stride is for text_column: name the column"),
        ({"text_column": "text", "packing": True}, "packing=True needs max_length="),
        (
            {"text_column": "text", "end_token": 1},
            "end_token has a meaning with stride or packing only",
        ),
        (
            {"text_column": "text", "packing": True, "max_length": 8, "target_name": "label"},
            "target_name can't be given with packing",
        ),
        (
            {"text_column": "text", "packing": True, "max_length": 8, "columns": ["label"]},
            "leave out columns",
        ),
        (
            {"text_column": "text", "stride": 8, "max_length": 8, "image_column": "label"},
            "leave out columns and image_column",
        ),
        ({"text_column": "label", "packing": True, "max_length": 8}, "holds no texts or chats"),
    ):
        with pytest.raises((ConfigError, ValueError), match=said):
            TableDataset(path, **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="which have no columns of images or texts"):
        TableDataset(tmp_path / "a.npy", text_column="x", packing=True, max_length=8)
    with (
        TableDataset(path) as dataset,
        pytest.raises(ConfigError, match="no column of texts is named"),
    ):
        dataset.text_of(0)
    with (
        TableDataset(path, text_column="text", packing=True, max_length=8) as blocks,
        pytest.raises(ConfigError, match="of no one text"),
    ):
        blocks.text_of(0)


@pytest.mark.slow
# -- packing


@pytest.mark.parametrize("cut", [{}, *CUTS])
def test_packed_texts_are_those_of_the_table(cut: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", texts_table(), rows=7)
    end = {"end_token": cut["end_token"]} if "end_token" in cut else {}
    with TableDataset(path, text_column="text", **cut) as dataset:
        pack(dataset, tmp_path / "a.h5", progress=False)
        cut_again = {name: value for name, value in cut.items() if name not in end}
        with TextDataset(tmp_path / "a.h5", **cut_again) as packed:
            assert len(packed) == len(dataset) and all(
                same(packed[at], dataset[at]) for at in range(len(dataset))
            )
            assert packed.document_unit == "record" and isinstance(packed.tokenizer, CharTokenizer)
    with TextDataset(write_texts(tmp_path), **cut) as texts:
        pack(texts, tmp_path / "b.h5", progress=False)
    with (
        TextDataset(tmp_path / "a.h5", max_length=9) as one,
        TextDataset(tmp_path / "b.h5", max_length=9) as other,
    ):
        assert all(same(one[at], other[at]) for at in range(N))


def test_packed_texts_in_parts_with_targets(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", texts_table(), rows=7)
    with TableDataset(path, text_column="text", target_name="label") as dataset:
        view = dataset.subset([3, 30, 5, 8, 21, 11])
        for one, name in ((dataset, "all"), (view, "some")):
            pack(one, tmp_path / name, shard_size=300, progress=False)
            assert len([*(tmp_path / name).glob("*.h5")]) > 1
            with TextDataset(tmp_path / name) as packed:
                assert len(packed) == len(one) and all(
                    same(packed[at], one[at]) for at in range(len(one))
                )
        pack(view, tmp_path / "view.h5", progress=False)
        with TextDataset(tmp_path / "view.h5", stride=4, max_length=6) as windows:
            assert int(windows[0]["labels"]) == 0 and len(windows) > 6
        assert pack(dataset, tmp_path / "dry.h5", dry_run=True, progress=False).samples == N
    refused = "texts beside other columns can't be packed as tokens: leave out columns"
    with (
        TableDataset(path, ["text", "label"], text_column="text") as several,
        pytest.raises(ConfigError, match=refused),
    ):
        pack(several, tmp_path / "several.h5", progress=False)
    refused = "a view of windows or blocks can't be packed"
    with (
        TableDataset(path, text_column="text", stride=4, max_length=6) as whole,
        pytest.raises(ConfigError, match=refused),
    ):
        pack(whole.subset([1, 2]), tmp_path / "windows.h5", progress=False)


def test_packed_chats_are_those_of_the_table(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", chats_table(), rows=2)
    with TableDataset(path, text_column="messages", tokenizer=ChatTokenizer(CALLS)) as dataset:
        pack(dataset, tmp_path / "chats.h5", progress=False)
        with TextDataset(tmp_path / "chats.h5") as packed:
            assert packed.is_of_chats and len(packed) == len(dataset)
            assert all(same(packed[at], dataset[at]) for at in range(len(dataset)))


def test_packed_texts_without_those_that_are_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", texts_table([*TEXTS[:3], None, *TEXTS[4:]]), rows=7)
    with (
        TableDataset(path, text_column="text") as dataset,
        pytest.raises(SampleError, match=r"a\.parquet, row 3.*has no text \(null\)"),
    ):
        pack(dataset, tmp_path / "a.h5", progress=False)
    with TableDataset(path, text_column="text", on_error="skip") as dataset:
        with pytest.warns(HeadraceWarning):
            pack(dataset, tmp_path / "a.h5", progress=False)
        with pytest.warns(HeadraceWarning):
            pack(dataset, tmp_path / "parts", shard_size=300, progress=False)
        with TextDataset(tmp_path / "a.h5") as one, TextDataset(tmp_path / "parts") as other:
            assert len(one) == len(other) == N - 1 and all(
                same(one[at], other[at]) for at in range(N - 1)
            )


def test_a_pass_over_all_texts_decodes_each_block_once(tmp_path: Path) -> None:
    texts = [f"{row} " * 40 for row in range(6000)]
    path = write(tmp_path / "a.parquet", texts_table(texts), rows=3000)
    with TableDataset(path, text_column="text", max_memory_usage=6 << 20) as dataset:
        block = dataset.sample_source.block_nbytes
        dataset.block_memory.hold_chunks(0)
        dataset.sample_source.take_counts()
        assert dataset.lengths() is not None
        tokens, _ = dataset.tokens()
        assert dataset.sample_source.take_counts()["chunks_decoded"] == 4 and block > 0
        assert np.array_equal(np.diff(tokens.short[0]), [len(text) for text in texts])
        dataset.ids_of([0])
        dataset.ids_of([1])
        # nothing is held any longer
        assert dataset.sample_source.take_counts()["chunks_decoded"] == 2


class TestBlocks(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path: Path) -> None:
        self.path = write(tmp_path / "a.parquet", texts_table(), rows=7)

    def make(self, **options: Any) -> TableDataset:
        return TableDataset(self.path, text_column="text", packing=True, max_length=16, **options)
