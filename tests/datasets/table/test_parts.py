"""Windows, blocks and rows of a table's texts and chats are those of the same texts as .jsonl."""

from __future__ import annotations

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
    pack,
)
from headrace.collate import document_mask
from headrace.testing.contract import same
from headrace.tokenizer import CharTokenizer
from tests.collate.tokenizers import Counting
from tests.datasets.table.test_table import (
    CALLS,
    chats_table,
    first_batch,
    name_of,
    write,
    write_chats,
    write_lines,
)
from tests.datasets.text.chat_tokenizer import chat_tokenizer

pa = pytest.importorskip("pyarrow")  # in the extra `test`

N = 40
TEXTS = [f"Zeile {row} äöü " * (1 + row % 4) for row in range(N)]
CUTS: list[dict[str, Any]] = [
    {"packing": True, "max_length": 16},
    {"packing": True, "max_length": 16, "end_token": 3},
    {"stride": 5, "max_length": 9},
]
CHATS: dict[str, Any] = {"text_column": "messages", "tokenizer": chat_tokenizer(CALLS)}


def texts_table(texts: list[Any] = TEXTS) -> Any:
    return pa.table({"text": texts, "label": [row % 3 for row in range(len(texts))]})


def write_texts(folder: Path) -> Path:
    return write_lines(folder / "texts.jsonl", [{"text": text} for text in TEXTS])


def same_samples(one: Any, other: Any) -> bool:
    return len(one) == len(other) > 3 and all(
        same(one[index], other[index]) for index in range(len(other))
    )


@pytest.mark.parametrize("cut", CUTS[1:])
def test_parts_are_those_of_text_dataset(cut: dict[str, Any], tmp_path: Path) -> None:
    with TextDataset(write_texts(tmp_path), cache_dir=tmp_path / "cache", **cut) as texts:
        for kind in ("parquet", "stream", "feather"):
            path, keep = write(tmp_path / name_of(kind), texts_table(), kind, 7), tmp_path / kind
            with TableDataset(path, text_column="text", cache_dir=keep, **cut) as dataset:
                assert same_samples(dataset, texts), kind
                assert dataset.has_texts
                assert np.array_equal(dataset.lengths(), texts.lengths())  # type: ignore[arg-type]
                for shuffle in (True, "block"):
                    options: Any = {"batch_size": 3, "shuffle": shuffle, "num_workers": 0}
                    with (
                        create_dataloader(dataset, seed=5, **options) as ours,
                        create_dataloader(texts, seed=5, **options) as others,
                    ):
                        for batch, other in zip(ours, others, strict=True):
                            assert same(batch, other), (kind, shuffle)


def test_chats_in_blocks(tmp_path: Path) -> None:
    path, lines = write(tmp_path / "a.parquet", chats_table(), rows=2), write_chats(tmp_path)
    with TextDataset(lines, tokenizer=CHATS["tokenizer"]) as texts:
        assert TableDataset(path, **CHATS).text_of(3) == texts.text_of(3)
    cut: Any = {"packing": True, "max_length": 16}
    ours = TableDataset(path, **CHATS, **cut)
    other = TextDataset(lines, unit="chat", tokenizer=CHATS["tokenizer"], **cut)
    with ours, other:
        assert same_samples(ours, other)
        assert "labels" in ours[0]
        documents = first_batch(ours, 2)["document_ids"]
        assert document_mask(documents).shape == (2, 1, 16, 16)
    for wrong in ({"stride": 3}, {"packing": True, "end_token": 1}):
        with pytest.raises(ConfigError):
            TableDataset(path, max_length=9, **CHATS, **wrong)


def test_windows_have_the_targets_and_texts_of_their_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", texts_table(), rows=7)
    how: Any = {"text_column": "text", "target_name": "label", "stride": 9, "max_length": 9}
    with TableDataset(path, **how) as dataset:
        edges = np.cumsum([0, *(-(-len(text) // 9) for text in TEXTS)])
        assert len(dataset) == edges[-1] == len(dataset.targets)
        for row in (0, 3, 17, N - 1):
            first = int(edges[row])
            assert dataset.text_of(first) == TEXTS[row]
            assert dataset[first]["labels"] == row % 3 == dataset.targets[first]
        view = pickle.loads(pickle.dumps(dataset.subset([int(edges[17])])))
        assert view.text_of(0) == TEXTS[17]
        assert view[0]["labels"] == 17 % 3


def test_a_text_that_is_none_is_an_error_or_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", texts_table([*TEXTS[:9], None, *TEXTS[9:]]), rows=4)
    how: Any = {"packing": True, "max_length": 8}
    with pytest.raises(SampleError, match="row 9: column 'text'"):
        TableDataset(path, text_column="text", **how)
    with pytest.warns(HeadraceWarning, match=r"1 of 41 .*row 9"):
        dataset = TableDataset(path, text_column="text", on_error="skip", **how)
    with TextDataset(write_texts(tmp_path), **how) as texts:
        assert len(dataset) == len(texts)
        assert same(dataset[5]["input_ids"], texts[5]["input_ids"])


def test_tokens_are_kept_and_belong_to_their_files(tmp_path: Path) -> None:
    path, how = tmp_path / "a.parquet", {"packing": True, "max_length": 8}
    for texts, made in ((TEXTS, TEXTS), (TEXTS, []), (TEXTS[:9], TEXTS[:9])):
        tokenizer = Counting()
        if made:
            write(path, texts_table(texts), rows=7)
        kept: Any = {"cache_dir": tmp_path / "cache", "tokenizer": tokenizer, **how}
        TableDataset(path, text_column="text", **kept).close()
        assert tokenizer.made == made


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", texts_table())
    blocks: dict[str, Any] = {"text_column": "text", "packing": True, "max_length": 8}
    for given in (
        {"packing": True},
        {"stride": 3},
        {"text_column": "text", "packing": True},
        {"text_column": "text", "end_token": 1},
        {**blocks, "target_name": "label"},
        {**blocks, "columns": ["label"]},
        {"text_column": "text", "stride": 8, "max_length": 8, "image_column": "label"},
        {**blocks, "text_column": "label"},
    ):
        with pytest.raises((ConfigError, ValueError)):
            TableDataset(path, **given)
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(ConfigError, match="columns of images or texts"):
        TableDataset(tmp_path / "a.npy", **blocks)
    for dataset in (TableDataset(path), TableDataset(path, **blocks)):
        with dataset, pytest.raises(ConfigError):
            dataset.text_of(0)
    beside = TableDataset(path, ["text", "label"], text_column="text")
    for refused in (beside, TableDataset(path, **blocks).subset([1, 2])):
        with pytest.raises(ConfigError):
            pack(refused, tmp_path / "refused.h5", progress=False)


# -- packing


@pytest.mark.parametrize("cut", [{}, CUTS[2]])
def test_packed_texts_are_those_of_the_table(cut: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", texts_table(), rows=7)
    with TableDataset(path, text_column="text", target_name="label") as whole:
        view = whole.subset([3, 30, 5, 8, 21, 11])
        pack(view, tmp_path / "parts", shard_size=300, progress=False)
        assert len([*(tmp_path / "parts").glob("*.h5")]) > 1
        assert same_samples(TextDataset(tmp_path / "parts"), view)
    with TableDataset(path, text_column="text", **cut) as dataset:
        pack(dataset, tmp_path / "a.h5", progress=False)
        cut_again = {name: value for name, value in cut.items() if name != "end_token"}
        with TextDataset(tmp_path / "a.h5", **cut_again) as packed:
            assert same_samples(packed, dataset)
            assert packed.document_unit == "record"
            assert isinstance(packed.tokenizer, CharTokenizer)
    with TextDataset(write_texts(tmp_path), **cut) as texts:
        pack(texts, tmp_path / "b.h5", progress=False)
    with TextDataset(tmp_path / "a.h5") as one, TextDataset(tmp_path / "b.h5") as other:
        assert same_samples(one, other)


def test_a_pass_over_all_texts_decodes_each_block_once(tmp_path: Path) -> None:
    texts = [f"{row} " * 40 for row in range(6000)]
    path = write(tmp_path / "a.parquet", texts_table(texts), rows=3000)
    with TableDataset(path, text_column="text", max_memory_usage=6 << 20) as dataset:
        source = dataset.sample_source
        assert source.block_nbytes > 0
        dataset.block_memory.hold_chunks(0)
        source.take_counts()
        assert dataset.lengths() is not None
        tokens, _ = dataset.tokens()
        assert source.take_counts()["chunks_decoded"] == 4
        assert np.array_equal(np.diff(tokens.short[0]), [len(text) for text in texts])
        dataset.ids_of([0])
        dataset.ids_of([1])
        assert source.take_counts()["chunks_decoded"] == 2  # nothing is held any longer
