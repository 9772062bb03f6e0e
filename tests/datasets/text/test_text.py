"""TextDataset: token ids of texts in every unit and every mode, and nothing made up where there
are none.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from headrace import (
    BaseDataset,
    CharTokenizer,
    ConfigError,
    DataNotFoundError,
    FileChangedError,
    FormatError,
    HeadraceWarning,
    ImageDataset,
    MemoryEfficientDataset,
    SampleError,
    TextDataset,
    create_dataloader,
    open_dataset,
)
from headrace.storage.text import plain
from headrace.storage.text.source import LinesSource
from headrace.testing import DatasetContract
from tests.collate.tokenizers import HuggingFace, SentencePiece, Tiktoken, Tokenizers
from tests.datasets.lines_like_python import NEWLINES, differences

pytestmark = pytest.mark.quick_every(3)

MODES = ("lazy", "eager", "cached", "streaming")
WORDS = ["the", "mill", "wheel", "turns", "in", "the", "river"]


def write(folder: Path, contents: dict[str, bytes | str]) -> Path:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def text(sample: Any) -> str:
    """What the characters of a sample are."""
    return CharTokenizer().decode(sample["input_ids"].tolist())


def texts(dataset: Any) -> list[str]:
    return [text(dataset[n]) for n in range(len(dataset))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two class folders of three files in all, of five lines."""
    return write(
        tmp_path / "data",
        {
            "prose/a.txt": "one\ntwo\n",
            "prose/b.md": b"\xef\xbb\xbfthree",
            "verse/c.txt.gz": gzip.compress(b"x\n\n"),
        },
    )


class TestUnits:
    def test_files(self, folder: Path) -> None:
        dataset = TextDataset(folder)
        assert texts(dataset) == ["one\ntwo\n", "three", "x\n\n"]
        sample = dataset[0]
        assert (
            sample.keys() == {"input_ids"}
            and sample["input_ids"].dtype == torch.int64
            and sample["input_ids"].shape == (8,)
        )
        assert dataset.source_of(1) == str(folder / "prose/b.md")

    def test_lines(self, folder: Path, tmp_path: Path) -> None:
        dataset = TextDataset(folder, unit="line", cache_dir=tmp_path / "cache")
        assert texts(dataset) == ["one", "two", "three", "x", ""] and texts(dataset[1:3]) == [
            "two",
            "three",
        ]
        assert dataset.source_of(-1) == f"{folder}/verse/c.txt.gz, line 2" and dataset[4][
            "input_ids"
        ].shape == (0,)

    def test_records(self, tmp_path: Path) -> None:
        rows = [
            {"text": "a", "n": 1.5, "body": "B"},
            {"text": "\ud800 e\u0301 \u05d0", "n": None, "body": "\0"},
        ]
        folder = write(
            tmp_path / "data",
            {
                "a.jsonl": "\n\n".join(map(json.dumps, rows)),
                "b.json": json.dumps(rows),
                "c.csv": "n,text,body\r\n3,x,y",
            },
        )
        dataset = TextDataset(folder, unit="record", target_field="n")
        assert texts(dataset) == ["a", "\ud800 e\u0301 \u05d0"] * 2 + ["x"]
        assert [sample["labels"] for sample in (dataset[n] for n in range(5))] == [
            1.5,
            None,
            1.5,
            None,
            "3",
        ]
        assert texts(TextDataset(folder, unit="record", text_field="body")) == ["B", "\0"] * 2 + [
            "y"
        ]

    def test_labels_by_folder(self, folder: Path, tmp_path: Path) -> None:
        for unit, labels in [("file", [0, 0, 1]), ("line", [0, 0, 0, 1, 1])]:
            dataset = TextDataset(folder, unit=unit, labels="folders", cache_dir=tmp_path / "cache")
            assert (
                [dataset[n]["labels"] for n in range(len(dataset))]
                == labels
                == list(dataset.targets)
            )
            assert dataset.classes == ["prose", "verse"]
        windows = TextDataset(
            folder, max_length=4, stride=4, labels="folders", cache_dir=tmp_path / "cache"
        )
        assert [windows[n]["labels"] for n in range(len(windows))] == [0, 0, 0, 0, 1]
        with pytest.raises(
            ConfigError, match=r"labels=.folders.: the files lie in no class folders"
        ):
            TextDataset(folder / "prose", labels="folders")

    def test_truncated(self, folder: Path) -> None:
        assert texts(TextDataset(folder, max_length=3)) == ["one", "thr", "x\n\n"]
        assert texts(TextDataset(folder, max_length=None)) == texts(TextDataset(folder))

    def test_transform_and_index(self, folder: Path) -> None:
        dataset = TextDataset(
            folder,
            transform=lambda sample: {**sample, "length": len(sample["input_ids"])},
            return_index=True,
        )
        assert [(dataset[n]["length"], dataset[n]["index"]) for n in range(3)] == [
            (8, 0),
            (5, 1),
            (3, 2),
        ]

    def test_what_text_it_was(self, folder: Path, tmp_path: Path) -> None:
        assert TextDataset(folder, max_length=2).text_of(0) == "one\ntwo\n"
        dataset = TextDataset(folder, unit="line", cache_dir=tmp_path / "cache")
        assert dataset.text_of(-2) == "x" and dataset.subset([3, 1]).text_of(1) == "two"
        windows = TextDataset(folder, max_length=4, stride=2, cache_dir=tmp_path / "cache")
        assert windows.text_of(1) == "one\ntwo\n" and windows.source_of(1) == str(
            folder / "prose/a.txt"
        )
        with pytest.raises(ConfigError, match="of no one text"):
            TextDataset(folder, max_length=4, packing=True, cache_dir=tmp_path / "cache").text_of(0)


class TestTokenizers:
    @pytest.mark.parametrize(
        "tokenizer",
        [
            HuggingFace(),
            Tokenizers(),
            Tokenizers(pads=True),
            Tiktoken(),
            SentencePiece(),
            lambda text: [5] * len(text.split()),
        ],
    )
    def test_of_every_kind(self, tokenizer: Any, tmp_path: Path) -> None:
        path = write(tmp_path, {"a.txt": "the mill\n\nthe river turns in the wheel\n"}) / "a.txt"
        whole, cut = (
            TextDataset(path, tokenizer=tokenizer, max_length=max_length, unit="line")
            for max_length in (None, 3)
        )
        assert [len(whole[n]["input_ids"]) for n in range(3)] in ([2, 0, 6], [4, 2, 8])
        assert [len(cut[n]["input_ids"]) for n in range(3)] == [
            min(3, len(whole[n]["input_ids"])) for n in range(3)
        ]
        assert [sample["input_ids"].tolist() for sample in whole.__getitems__([2, 0])] == [
            whole[n]["input_ids"].tolist() for n in (2, 0)
        ]
        blocks = TextDataset(
            path,
            tokenizer=tokenizer,
            max_length=4,
            unit="line",
            packing=True,
            cache_dir=tmp_path / "cache",
        )
        joined = [token for n in range(3) for token in whole[n]["input_ids"].tolist()]
        assert [
            token for n in range(len(blocks)) for token in blocks[n]["input_ids"].tolist()
        ] == joined[: len(joined) // 4 * 4]

    @pytest.mark.parametrize(
        ("gives", "said"),
        [
            ([1.5], "no list of ids"),
            (None, "no list of ids"),
            ("ids", "no list of ids"),
            (["a"], "no list of ids"),
            ([True], "no list of ids"),
            ([2**31], "fit int32"),
            ([2**63], "fit int32|no list"),
            ([2**70], "no list of ids"),
            ([-1], "at least 0"),
            ([[1], [2, 3]], "no list of ids"),
            (ValueError, "no such word"),
        ],
    )
    def test_that_gives_no_ids(self, gives: Any, said: str, folder: Path, tmp_path: Path) -> None:
        def tokenizer(text: str) -> Any:
            if gives is ValueError and text == "two":
                raise gives("no such word")
            return gives if text == "two" else [1, 2]

        dataset = TextDataset(
            folder, tokenizer=tokenizer, unit="line", cache_dir=tmp_path / "cache"
        )
        assert dataset[0]["input_ids"].tolist() == [1, 2]
        with pytest.raises(
            SampleError, match=rf"sample 1 can't be tokenised: .*a.txt, line 2: .*({said})"
        ):
            dataset.__getitems__([0, 1, 2])
        skipping = TextDataset(
            folder, tokenizer=tokenizer, unit="line", on_error="skip", cache_dir=tmp_path / "cache"
        )
        assert len(skipping.__getitems__([0, 1, 2])) == 2
        with pytest.raises(SampleError, match=r"a.txt, line 2"):
            TextDataset(
                folder,
                tokenizer=tokenizer,
                max_length=4,
                unit="line",
                packing=True,
                cache_dir=tmp_path / "cache",
            )

    def test_that_gives_fewer_than_it_was_given(self, folder: Path) -> None:
        class Forgetful:
            def encode_batch(self, texts: list[str]) -> list[list[int]]:
                return [[1]] * (len(texts) - 1)

        with pytest.raises(
            SampleError, match=r"can't be tokenised.*given 1 texts and gave ids of 0"
        ):
            TextDataset(folder, tokenizer=Forgetful()).__getitems__([0, 1])

    def test_a_surrogate_that_a_tokenizer_does_not_take(self, tmp_path: Path) -> None:
        path = write(tmp_path, {"a.jsonl": '{"text": "\\ud800"}\n{"text": "sound"}\n'}) / "a.jsonl"
        dataset = TextDataset(path, tokenizer=lambda text: list(text.encode()), unit="record")
        assert len(dataset[1]["input_ids"]) == 5
        with pytest.raises(
            SampleError,
            match=r"sample 0 can't be tokenised: .*a.jsonl, line 1: .*surrogates not allowed",
        ):
            dataset[0]


class TestBadInput:
    def test_a_byte_that_is_no_utf8(self, tmp_path: Path) -> None:
        folder = write(
            tmp_path / "data",
            {"a.txt": b"sound\r\nalso\ncaf\xe9 \xe9\n", "b.txt.gz": gzip.compress(b"x\ny\xff\n")},
        )
        for unit, first, second in [
            ("file", r"a.txt", r"b.txt.gz"),
            ("line", r"a.txt, line 3", r"b.txt.gz, line 2"),
        ]:
            dataset = TextDataset(folder, unit=unit, cache_dir=tmp_path / "cache")
            bad = (0, 1) if unit == "file" else (2, 4)
            with pytest.raises(
                SampleError,
                match=rf"{first}: byte 0xe9 at offset 15 is no utf-8 .*encoding= or errors=",
            ):
                dataset[bad[0]]
            with pytest.raises(SampleError, match=rf"{second}: byte 0xff at offset 3 is no utf-8"):
                dataset[bad[1]]
        assert texts(TextDataset(folder / "a.txt", unit="line", encoding="latin-1")) == [
            "sound",
            "also",
            "café é",
        ]
        for errors in ("replace", "ignore", "surrogateescape", "backslashreplace"):
            expected = (folder / "a.txt").read_bytes().decode("utf-8", errors)
            assert texts(TextDataset(folder / "a.txt", errors=errors)) == [expected]
            assert (
                texts(TextDataset(folder / "a.txt", unit="line", errors=errors))
                == expected.splitlines()
            )

    @pytest.mark.parametrize("unit", ["file", "line"])
    def test_utf16_is_recognised(self, unit: str, tmp_path: Path) -> None:
        path = write(tmp_path, {"a.txt": "one\n".encode("utf-16")}) / "a.txt"
        with pytest.raises(SampleError, match=r"begins as UTF-16 does: pass encoding='utf-16'"):
            TextDataset(path, unit=unit)[0]
        assert texts(TextDataset(path, unit=unit, encoding="utf-16", cache_dir=tmp_path / "c")) == [
            "one\n" if unit == "file" else "one"
        ]

    def test_characters_of_every_kind(self, tmp_path: Path) -> None:
        mixed = (
            "\u05e9\u05dc\u05d5\u05dd \u202bab e\u0301 \u0645\u0631\u062d\u0628\u0627 "
            "\U0001f468\u200d\U0001f469 "
        )
        given = mixed + "\0 \x1c \x85 \u2028 \x0b \U0010ffff"
        path = write(tmp_path, {"a.txt": given}) / "a.txt"
        # str.splitlines would cut it
        assert texts(TextDataset(path)) == [given] == texts(TextDataset(path, unit="line"))
        known = TextDataset(path, tokenizer=CharTokenizer("ab"))[0]["input_ids"]
        assert sorted(set(known.tolist())) == [1, 2, 3]

    def test_nothing(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"a.txt": b"", "b.txt": b"\xef\xbb\xbf"})
        assert texts(TextDataset(folder)) == ["", ""]
        lines = TextDataset(folder, unit="line")
        assert len(lines) == 0 and list(create_dataloader(lines, num_workers=0)) == []
        blocks = TextDataset(folder, max_length=4, packing=True, cache_dir=tmp_path / "cache")
        assert len(blocks) == 0 and list(create_dataloader(blocks, num_workers=0)) == []
        windows = TextDataset(folder, max_length=4, stride=2, cache_dir=tmp_path / "cache")
        assert [len(windows[n]["input_ids"]) for n in range(2)] == [0, 0]

    def test_a_line_of_json_that_is_none(self, tmp_path: Path) -> None:
        bad = ["{", "[1]", "  ", '{"other": 1}', '{"text": 5}', "[" * 100_000, "5", "\0"]
        path = (
            write(tmp_path, {"a.jsonl": '{"text": "a"}\n\n' + "\n".join(bad) + '\n{"text": "b"}'})
            / "a.jsonl"
        )
        dataset = TextDataset(path, unit="record")
        assert (text(dataset[0]), text(dataset[-1])) == ("a", "b") and len(dataset) == len(bad) + 2
        for number in range(1, len(bad) + 1):
            with pytest.raises(
                SampleError,
                match=rf"sample {number} can't be decoded: .*a.jsonl, line {number + 2}: ",
            ) as raised:
                dataset[number]
            assert len(str(raised.value)) < 500
        skipping = TextDataset(path, unit="record", on_error="skip")
        assert skipping.text_of(0) == "a"
        with pytest.raises(SampleError, match="sample 1 can't be decoded"):
            skipping.text_of(1)
        assert [text(sample) for sample in skipping.__getitems__(range(len(skipping)))] == [
            "a",
            "b",
        ]
        replaced = TextDataset(
            path,
            unit="record",
            on_error=lambda index, path, error: (index, path.rpartition(" ")[2]),
        )
        assert replaced.__getitems__([0, 1, 2])[1:] == [(1, "3"), (2, "4")]

    def test_a_table_without_that_field(self, tmp_path: Path) -> None:
        """Which may be one without a header."""
        for content in ("id,body\n1,2\n", "text,text\n1,2\n"):
            write(tmp_path, {"a.csv": content})
            with pytest.raises(
                FormatError, match=r"a.csv: its first line names .*'text': pass text_field="
            ):
                TextDataset(tmp_path / "a.csv", unit="record")
        write(tmp_path, {"a.csv": "id,text\n1,2\n3\n"})
        with pytest.raises(FormatError, match=r"none of these is 'label': pass"):
            TextDataset(tmp_path / "a.csv", unit="record", target_field="label")
        with pytest.raises(
            SampleError,
            match=r"a.csv, record 2: it has 1 fields, and the first line of its file names 2",
        ):
            TextDataset(tmp_path / "a.csv", unit="record")[1]

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        folder = write(tmp_path, {"a.json": '{"text": 1}', "b.txt": "x", "c.csv.gz": b"no gzip"})
        with pytest.raises(FormatError, match=r"a.json: it holds no list of records.*jsonl"):
            TextDataset(folder / "a.json", unit="record")
        with pytest.raises(FormatError, match=r"b.txt: records are read from"):
            TextDataset(folder / "b.txt", unit="record")
        with pytest.raises(FormatError, match=r"c.csv.gz is"):
            TextDataset(folder / "c.csv.gz", unit="line", cache_dir=tmp_path / "cache")
        with pytest.raises(SampleError, match=r"sample 0 can't be decoded: .*c.csv.gz is"):
            TextDataset(folder / "c.csv.gz", unit="file")[0]
        with pytest.raises(DataNotFoundError, match=r"\.jsonl"):
            TextDataset(write(tmp_path / "images", {"a.png": b""}))

    @pytest.mark.parametrize("unit", ["file", "line"])
    def test_a_text_that_is_too_large(
        self, unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plain, "LARGE", 1000)
        folder = write(tmp_path / "data", {"a.txt": "x" * 400_000, "b.txt": "sound"})
        dataset = TextDataset(folder, unit=unit, max_memory_usage="1MB")
        assert text(dataset[1]) == "sound"
        with pytest.raises(
            SampleError,
            match=(
                r"sample 0 can't be read: .*a.txt.*a text of 400.0 kB.*split it, or raise "
                r"max_memory_usage"
            ),
        ):
            dataset[0]
        skipping = TextDataset(folder, unit=unit, max_memory_usage="1MB", on_error="skip")
        assert [text(sample) for sample in skipping.__getitems__([0, 1])] == ["sound"]

    @pytest.mark.parametrize("unit", ["file", "line"])
    def test_a_file_that_is_changed_or_gone(self, unit: str, folder: Path, tmp_path: Path) -> None:
        dataset = TextDataset(folder, unit=unit, cache_dir=tmp_path / "cache")
        (folder / "prose/b.md").unlink()
        with pytest.raises(SampleError, match=r"can't be read: .*b.md.*No such file"):
            dataset[1 if unit == "file" else 2]
        (folder / "prose/a.txt").write_text("o")
        if unit == "line":
            with pytest.raises(
                FileChangedError,
                match=r"a.txt has been changed since it was opened: open the dataset again",
            ):
                dataset[1]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (
                {"unit": "word"},
                "unit must be one of None, 'file', 'line', 'record', 'chat', not 'word'",
            ),
            ({"max_length": 0}, "max_length"),
            ({"max_length": True}, "max_length"),
            ({"max_length": 1.5}, "max_length"),
            ({"stride": 0}, "stride"),
            ({"stride": 600, "max_length": 512}, "stride=600 is larger than max_length=512"),
            ({"stride": 5}, "stride=5 needs max_length="),
            ({"packing": True}, "packing=True needs max_length=, the tokens of a sample"),
            ({"packing": "wrapped"}, "packing must be True, False or 'bfd', not 'wrapped'"),
            ({"packing": "bfd"}, "packing='bfd' needs max_length=, the tokens of a sample"),
            ({"packing": "bfd", "max_length": 4, "stride": 2}, "can't be given together"),
            ({"packing": True, "stride": 5}, "can't be given together"),
            ({"end_token": 1}, "end_token has a meaning with stride or packing only"),
            ({"end_token": -1, "packing": True}, "end_token"),
            ({"target_field": "x", "unit": "file"}, "target_field"),
            (
                {"target_field": ["x"]},
                "target_field must be the name of one field, or None, not ['x']",
            ),
            (
                {"text_field": ["a", "b"]},
                "text_field must be the name of one field, or a callable from a record to its "
                "text, not ['a', 'b']",
            ),
            (
                {"text_field": "x", "unit": "line"},
                "text_field='x' is a field of records: pass unit='record'",
            ),
            ({"labels": "names"}, "labels"),
            ({"newline": "\n\n"}, "newline"),
            ({"encoding": "utf-9"}, "encoding='utf-9'"),
            ({"errors": "xmlcharrefreplace"}, "xmlcharrefreplace"),
            ({"tokenizer": "gpt2"}, "tokenizer is a str"),
            ({"data_path": ["memory://texts", "texts"]}, "mixes URLs and local paths"),
            (
                {"data_path": ["memory://texts", "texts"], "unit": "line"},
                "mixes URLs and local paths",
            ),
            (
                {"packing": True, "max_length": 5000},
                "max_length=5000: with packing=True a sample has so many tokens, and there are 16 "
                "in all",
            ),
        ],
    )
    def test_arguments_that_make_no_sense(
        self, options: dict[str, Any], said: str, folder: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match=re.escape(said)):
            TextDataset(**{"data_path": folder, "cache_dir": tmp_path / "cache", **options})

    def test_a_home_that_can_not_be_written_to(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Small texts need no folder."""
        (tmp_path / "file").write_text("no folder")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
        assert texts(TextDataset(folder / "prose", unit="line")) == ["one", "two", "three"]
        with pytest.warns(HeadraceWarning, match=r"tokens are not kept"):
            assert len(TextDataset(folder, max_length=5, packing=True)) == 3
        with pytest.raises(PermissionError, match=r"c.txt.gz is read through a plain copy"):
            TextDataset(folder, unit="line")


class TestLeftOut:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write(tmp_path / "data", {"a.txt": b"sound text", "b.txt": b"\xff", "c.txt": b""})

    def test_windows_and_blocks_of_what_can_be_read(self, folder: Path, tmp_path: Path) -> None:
        for _ in range(2):  # made, and found again
            with pytest.warns(
                HeadraceWarning,
                match=(
                    r"1 of 3 documents can't be read, or tokenised, and are left out; the first: "
                    r".*b.txt"
                ),
            ):
                windows = TextDataset(
                    folder, max_length=6, stride=6, on_error="skip", cache_dir=tmp_path / "cache"
                )
            assert texts(windows) == ["sound ", "text", ""] and windows.source_of(2) == str(
                folder / "c.txt"
            )
        with pytest.warns(HeadraceWarning, match="left out"):
            blocks = TextDataset(
                folder, max_length=5, packing=True, on_error="skip", cache_dir=tmp_path / "cache"
            )
        assert texts(blocks) == ["sound", " text"]

    def test_nothing_is_left(self, folder: Path, tmp_path: Path) -> None:
        for how in ({"packing": True}, {"stride": 6}):
            with pytest.raises(
                SampleError,
                match=(
                    r"none of 3 documents can be read, or tokenised.*the first: "
                    r".*a.txt.*on_error=.raise."
                ),
            ):
                TextDataset(
                    folder,
                    tokenizer=lambda _: [0.5],
                    max_length=6,
                    on_error="skip",
                    cache_dir=tmp_path / "cache",
                    **how,
                )

    def test_they_are_no_excuse_where_errors_are_raised(self, folder: Path, tmp_path: Path) -> None:
        with pytest.warns(HeadraceWarning, match="left out"):
            TextDataset(
                folder, max_length=6, stride=6, on_error="skip", cache_dir=tmp_path / "cache"
            )
        with pytest.raises(
            SampleError, match=r"sample 1 can't be decoded: .*b.txt: byte 0xff at offset 0"
        ):
            TextDataset(folder, max_length=6, stride=6, cache_dir=tmp_path / "cache")


class TestParts:
    def test_windows(self, folder: Path, tmp_path: Path) -> None:
        dataset = TextDataset(
            folder, max_length=4, stride=3, end_token=9, cache_dir=tmp_path / "cache"
        )
        found = [dataset[n]["input_ids"].tolist() for n in range(len(dataset))]
        whole = [[*(ord(c) + 2 for c in text), 9] for text in ("one\ntwo\n", "three", "x\n\n")]
        assert found == [
            whole[0][0:4],
            whole[0][3:7],
            whole[0][6:10],
            whole[1][0:4],
            whole[1][3:7],
            whole[2],
        ]
        assert all(sample.keys() == {"input_ids"} for sample in (dataset[0], dataset[5]))

    def test_blocks(self, folder: Path, tmp_path: Path, make_loader: Any) -> None:
        dataset = TextDataset(folder, max_length=6, packing=True, cache_dir=tmp_path / "cache")
        assert texts(dataset) == ["one\ntw", "o\nthre"]
        assert (
            dataset[1]["document_ids"].tolist() == [0, 0, 1, 1, 1, 1]
            and dataset[1]["document_ids"].dtype == torch.int32
        )
        (batch,) = make_loader(dataset, batch_size=4, num_workers=0, shuffle=False)
        assert (
            batch["input_ids"].shape == (2, 6)
            and batch["input_ids"].dtype == torch.int64
            and batch["document_ids"].dtype == torch.int32
        )
        (listed,) = make_loader(
            dataset, batch_size=4, num_workers=0, shuffle=False, collate_fn="list"
        )
        assert all(
            torch.equal(batch[name], torch.stack([sample[name] for sample in listed]))
            for name in batch
        )

    def test_tokens_are_made_once(self, folder: Path, tmp_path: Path) -> None:
        class Counting:
            fingerprint, count = "counting 1", 0

            def __call__(self, text: str) -> list[int]:
                Counting.count += 1
                return [ord(c) for c in text]

        for options in ({"packing": True}, {"stride": 2}, {"packing": True}):
            TextDataset(
                folder, tokenizer=Counting(), max_length=5, cache_dir=tmp_path / "cache", **options
            )
        assert Counting.count == 3
        (folder / "prose/b.md").write_text("other")
        changed = TextDataset(
            folder, tokenizer=Counting(), max_length=5, packing=True, cache_dir=tmp_path / "cache"
        )
        assert Counting.count == 6 and bytes(changed[1]["input_ids"].tolist()) == b"wo\not"
        TextDataset(
            folder,
            tokenizer=Counting(),
            max_length=5,
            unit="line",
            packing=True,
            cache_dir=tmp_path / "cache",
        )
        assert Counting.count == 11

    def test_states_of_other_parts_are_told_apart(self, folder: Path, tmp_path: Path) -> None:
        options: list[dict[str, Any]] = [
            {},
            {"packing": True},
            {"stride": 5},
            {"stride": 4},
            {"packing": True, "end_token": 1},
            {"unit": "line"},
        ]
        made = {
            TextDataset(folder, max_length=5, cache_dir=tmp_path / "cache", **some).fingerprint
            for some in options
        }
        assert len(made) == len(options)


class TestAround:
    def test_it_is_found(self, folder: Path, tmp_path: Path, photos: Path) -> None:
        assert texts(open_dataset(folder)) == texts(TextDataset(folder))
        assert texts(open_dataset(folder / "prose/a.txt", unit="line")) == ["one", "two"]
        assert (
            len(open_dataset(f"{folder}/*/*.txt*")) == 2
            and len(open_dataset([folder / "prose", folder / "verse"])) == 3
        )
        assert isinstance(open_dataset(photos), ImageDataset)
        with pytest.raises(DataNotFoundError):
            open_dataset(tmp_path / "nowhere")
        os.symlink(folder, folder / "prose" / "loop")
        assert isinstance(open_dataset(folder), TextDataset)
        write(folder, {"prose/z.png": b"", "verse/z.png": b""})
        assert isinstance(open_dataset(folder), ImageDataset)

    def test_repr_and_explain(self, folder: Path, tmp_path: Path) -> None:
        dataset = TextDataset(folder, unit="line", max_length=9, cache_dir=tmp_path / "cache")
        said = repr(dataset)
        assert (
            said.endswith("# 5 samples")
            and len(eval(said, {"TextDataset": TextDataset, "PosixPath": Path})) == 5
        )
        assert (
            "5 of 3 files, 1 of them through plain copies" in dataset.explain()
            and "read from" in dataset.explain()
        )
        blocks = TextDataset(
            folder,
            tokenizer=CharTokenizer("abc"),
            max_length=4,
            packing=True,
            cache_dir=tmp_path / "cache",
        )
        for tokenizer in (HuggingFace(), Tokenizers()):
            assert f"tokenizer=<{type(tokenizer).__name__} of 11 tokens>" in repr(
                TextDataset(folder, tokenizer=tokenizer)
            )
        assert (
            "CharTokenizer('abc')" in repr(blocks)
            and "16 of 3 documents, as uint16, by ranges from" in blocks.explain()
        )

    def test_fingerprint(self, folder: Path, tmp_path: Path) -> None:
        """Of names and numbers, wherever they lie."""
        import shutil

        shutil.copytree(folder, tmp_path / "elsewhere")
        for options in ({}, {"unit": "line"}, {"packing": True, "max_length": 4}):
            here, there = (
                TextDataset(path, cache_dir=tmp_path / "cache", **options)
                for path in (folder, tmp_path / "elsewhere")
            )  # type: ignore[arg-type]
            assert here.fingerprint == there.fingerprint

    def test_views(self, folder: Path, tmp_path: Path) -> None:
        dataset = TextDataset(folder, unit="line", labels="folders", cache_dir=tmp_path / "cache")
        assert texts(dataset.subset([4, 0])) == ["", "one"] and [
            dataset[3:][n]["labels"] for n in range(2)
        ] == [1, 1]
        first, second = dataset.split(0.4)
        assert sorted(texts(first) + texts(second)) == sorted(texts(dataset))

    @pytest.mark.parametrize(
        "options",
        [{}, {"unit": "line"}, {"max_length": 4, "stride": 2}, {"max_length": 4, "packing": True}],
        ids=str,
    )
    def test_pickled(
        self, options: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dataset = TextDataset(folder, cache_dir=tmp_path / "cache", **options)
        expected, state = texts(dataset), pickle.dumps(dataset)
        assert texts(pickle.loads(state)) == expected and len(state) < 12_000
        monkeypatch.chdir(tmp_path)
        assert texts(pickle.loads(state)) == expected

    def test_paths_that_are_relative(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Lines, copies and tokens are found after the process has gone elsewhere."""
        monkeypatch.chdir(tmp_path)
        dataset = TextDataset("data", unit="line", cache_dir="cache")
        blocks = TextDataset("data", max_length=4, packing=True, cache_dir="cache")
        states = pickle.dumps((dataset, blocks))
        monkeypatch.chdir("/")
        assert [len(texts(other)) for other in pickle.loads(states)] == [5, 4]

    def test_memory_efficient(self, folder: Path, tmp_path: Path) -> None:
        found = MemoryEfficientDataset(folder, unit="line", cache_dir=tmp_path / "cache")
        assert texts(found) == texts(found) == ["one", "two", "three", "x", ""]
        wrapped = MemoryEfficientDataset(TextDataset(folder))
        assert texts(wrapped) == ["one\ntwo\n", "three", "x\n\n"]

    @pytest.mark.parametrize("hold", ["encoded", "decoded"])
    @pytest.mark.parametrize("mode", ["eager", "cached"])
    @pytest.mark.parametrize("unit", ["file", "line", "record"])
    def test_held(self, hold: str, mode: str, unit: str, tmp_path: Path) -> None:
        rows = [
            json.dumps({"text": word * number, "n": number}) for number, word in enumerate(WORDS)
        ]
        folder = write(
            tmp_path / "data",
            {"a.jsonl": "\n".join(rows), "b.jsonl": "\n".join(rows[:2]) + "\nno json\n"},
        )
        given: Any = {
            "unit": unit,
            "on_error": "skip",
            **({"target_field": "n"} if unit == "record" else {}),
        }
        plainly = TextDataset(folder, **given)
        expected = plainly.__getitems__(range(len(plainly)))
        with TextDataset(folder, loading_mode=mode, hold=hold, progress=False, **given) as dataset:
            for _ in range(2):
                found = dataset.__getitems__(range(len(dataset)))
                assert list(map(str, found)) == list(map(str, expected))
            assert dataset.mode.stats()["hits"] > 0

    def test_shared_by_the_machine(self, folder: Path, tmp_path: Path) -> None:
        for tokenizer in (None, CharTokenizer("abc")):
            with TextDataset(
                folder,
                tokenizer=tokenizer,
                shared="machine",
                loading_mode="eager",
                cache_dir=tmp_path / "cache",
                progress=False,
            ) as dataset:
                assert len(dataset[0]["input_ids"]) == 8
        with pytest.raises(ConfigError, match=r"shared='machine'.*tokenizer"):
            TextDataset(
                folder,
                tokenizer=lambda text: [1],
                shared="machine",
                loading_mode="eager",
                cache_dir=tmp_path / "cache",
                progress=False,
            )

    def test_batches_are_padded(self, folder: Path, make_loader: Any) -> None:
        (batch,) = make_loader(TextDataset(folder), batch_size=3, num_workers=0, shuffle=False)
        assert batch["input_ids"].shape == (3, 8) and batch["attention_mask"].sum(1).tolist() == [
            8,
            5,
            3,
        ]
        assert batch["labels"][1].tolist() == [*(ord(c) + 2 for c in "three"), -100, -100, -100]

    def test_in_a_plain_dataloader(self, folder: Path) -> None:
        assert sorted(
            text(sample) for sample in DataLoader(TextDataset(folder), batch_size=None)
        ) == ["one\ntwo\n", "three", "x\n\n"]


def all_units(folder: Path, cache: Path) -> list[dict[str, Any]]:
    return [
        {"data_path": folder, "unit": "file"},
        {"data_path": folder, "unit": "line", "cache_dir": cache},
        {"data_path": folder, "max_length": 4, "stride": 2, "cache_dir": cache},
        {"data_path": folder, "max_length": 4, "packing": True, "cache_dir": cache},
    ]


@pytest.mark.parametrize("unit", range(4))
def test_equal_in_every_mode_with_and_without_workers(
    unit: int, folder: Path, tmp_path: Path, make_loader: Any
) -> None:
    options, expected = all_units(folder, tmp_path / "cache")[unit], None
    for mode in MODES:
        dataset = TextDataset(**options, loading_mode=mode, return_index=True, progress=False)
        for workers in (0, 2) if mode in ("lazy", "streaming") else (0,):
            loader = make_loader(
                dataset,
                batch_size=2,
                shuffle="block",
                num_workers=workers,
                multiprocessing_context="fork" if workers else None,
            )
            found = [{name: values.tolist() for name, values in batch.items()} for batch in loader]
            expected = found if expected is None else expected
            assert found == expected, (mode, workers)
            loader.close()
        dataset.close()


ENCODINGS = ["utf-8", "latin-1", "utf-16", "shift_jis", "utf-32-be"]


def generated(folder: Path, encoding: str) -> Path:
    """Latin-like texts, with every end of a line, and none at the end of one."""
    random = np.random.default_rng(5)
    words = ["arma", "virumque", "cano", "Troiae", "qui", "primus", "ab", "oris", '"', ""]
    words += {
        "utf-8": ["āē \u2028", "\U0001f600"],
        "latin-1": ["àé\x85"],
        "shift_jis": ["ソ表"],
    }.get(encoding, ["\u0a0d\u0d0a", "\U00010a0a"])
    for number in range(12):
        ends = [["\n"], ["\r\n"], ["\r"], ["\n", "\r\n", "\r"]][number % 4]
        some = [
            " ".join(random.choice(words, random.integers(0, 9))) + str(random.choice(ends))
            for _ in range(25)
        ]
        write(
            folder,
            {
                f"{number % 3}/{number}.txt": ("".join(some) + "finis" * (number % 2)).encode(
                    encoding
                )
            },
        )
    return folder


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_lines_are_those_of_python(encoding: str, tmp_path: Path) -> None:
    folder = generated(tmp_path / "data", encoding)
    for newline in NEWLINES:
        assert not list(differences(folder, 0, newline, encoding, cache_dir=tmp_path / "cache"))
    assert not list(
        differences(
            folder, 3 if encoding == "utf-8" else 0, None, encoding, cache_dir=tmp_path / "cache"
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("newline", NEWLINES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_lines_are_those_of_python_with_workers(
    encoding: str, newline: Any, tmp_path: Path
) -> None:
    assert not list(
        differences(
            generated(tmp_path / "data", encoding),
            3,
            newline,
            encoding,
            cache_dir=tmp_path / "cache",
        )
    )


def test_that_a_difference_would_be_seen(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LinesSource.read
    monkeypatch.setattr(
        LinesSource,
        "read",
        lambda self, indices: [line.replace(b"w", b"v") for line in real(self, indices)],
    )
    found = list(differences(folder / "prose", 0, None, cache_dir=tmp_path / "cache"))
    assert len(found) == 1 and "a.txt, line 2: 'tvo' instead of 'two'" in found[0]


# -- the laws


class _Contract(DatasetContract):
    """24 documents in three files."""

    options: Any = {}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.base = tmp_path_factory.getbasetemp() / f"contract-{type(self).__name__}"
        self.path = self.base / "data"
        if not self.path.exists():
            self.fill()

    def document(self, number: int) -> str:
        return " ".join(WORDS[: number % 7 + 1]) + f" {number}"

    def fill(self) -> None:
        rows = [self.document(number) + "\n" for number in range(24)]
        write(self.path, {f"{n}.txt": "".join(rows[8 * n : 8 * n + 8]) for n in range(3)})

    def make(self, **options: Any) -> BaseDataset:
        return TextDataset(self.path, cache_dir=self.base / "cache", **self.options, **options)


@pytest.mark.slow
class TestLinesKeepTheLaws(_Contract):
    options = {"unit": "line", "labels": None}  # noqa: RUF012

    def make_bad(self, **options: Any) -> tuple[BaseDataset, list[int]]:
        if not (self.base / "bad").exists():
            write(
                self.base / "bad",
                {
                    "a.txt": b"".join(
                        b"%d %s\n" % (n, b"\xff" if n in (3, 17) else b"") for n in range(24)
                    )
                },
            )
        return TextDataset(self.base / "bad", unit="line", **options), [3, 17]


@pytest.mark.slow
class TestFilesKeepTheLaws(_Contract):
    def fill(self) -> None:
        write(self.path, {f"{n % 3}/{n:02}.txt": self.document(n) for n in range(24)})

    def make(self, **options: Any) -> BaseDataset:
        return TextDataset(self.path, labels="folders", **options)

    def make_bad(self, **options: Any) -> tuple[BaseDataset, list[int]]:
        bad = self.base / "bad"
        if not bad.exists():
            write(bad, {f"{n:02}.txt": self.document(n) for n in range(24)})
            write(bad, {"05.txt": b"\xff", "04.txt.gz": b"cut short"})
            (bad / "04.txt").unlink()
        return TextDataset(bad, **options), [4, 5]


@pytest.mark.slow
class TestRecordsKeepTheLaws(_Contract):
    options = {"unit": "record", "target_field": "n"}  # noqa: RUF012

    def fill(self) -> None:
        rows = [json.dumps({"text": self.document(n), "n": n}) for n in range(24)]
        csv_rows = [f'"{self.document(n)}",{n}\n' for n in range(5)]
        write(
            self.path,
            {
                "a.jsonl": "\n\n".join(rows),
                "b.json": f"[{', '.join(rows[:4])}]",
                "c.csv": "text,n\n" + "".join(csv_rows),
            },
        )

    def make_bad(self, **options: Any) -> tuple[BaseDataset, list[int]]:
        rows = ["{" if n in (2, 9) else json.dumps({"text": self.document(n)}) for n in range(24)]
        write(self.base / "bad", {"a.jsonl": "\n".join(rows)})
        return TextDataset(self.base / "bad", unit="record", **options), [2, 9]


@pytest.mark.slow
class TestWindowsKeepTheLaws(_Contract):
    options = {"unit": "line", "max_length": 12, "stride": 8}  # noqa: RUF012


@pytest.mark.slow
class TestBlocksKeepTheLaws(_Contract):
    options = {"max_length": 16, "packing": True, "end_token": 1}  # noqa: RUF012


@pytest.mark.slow
class TestRowsKeepTheLaws(_Contract):
    options = {"unit": "line", "max_length": 40, "packing": "bfd", "end_token": 1}  # noqa: RUF012
