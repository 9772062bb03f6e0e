"""TextDataset: token ids of texts in every unit, and nothing made up where there are none."""

from __future__ import annotations

import gc
import gzip
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import (
    BaseDataset,
    BudgetError,
    CharTokenizer,
    ConfigError,
    DataNotFoundError,
    FormatError,
    HeadraceWarning,
    SampleError,
    TextDataset,
)
from headrace.formats.text import plain
from headrace.memory import MemoryBudget
from headrace.testing import DatasetContract
from tests.collate.tokenizers import Counting, HuggingFace, SentencePiece, Tiktoken, Tokenizers

pytestmark = pytest.mark.usefixtures("own_cache")

WORDS = ["the", "mill", "wheel", "turns", "in", "the", "river"]
FILES = ["one\ntwo\n", "three", "x\n\n"]
BLOCKS: dict[str, Any] = {"max_length": 4, "packing": True}
WINDOWS: dict[str, Any] = {"max_length": 4, "stride": 2}


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


def labels(dataset: Any) -> list[Any]:
    return [dataset[n]["labels"] for n in range(len(dataset))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two class folders of three files in all, of five lines."""
    verse = gzip.compress(b"x\n\n")
    files = {"prose/a.txt": FILES[0], "prose/b.md": b"\xef\xbb\xbfthree", "verse/c.txt.gz": verse}
    return write(tmp_path / "data", files)


class TestUnits:
    def test_files(self, folder: Path) -> None:
        dataset = TextDataset(folder)
        assert texts(dataset) == FILES
        assert dataset[0].keys() == {"input_ids"}
        assert dataset[0]["input_ids"].dtype == torch.int64
        assert dataset.source_of(1) == str(folder / "prose/b.md")
        assert texts(TextDataset(folder, max_length=3)) == ["one", "thr", "x\n\n"]
        assert TextDataset(folder, max_length=2).text_of(0) == FILES[0]

    def test_lines(self, folder: Path) -> None:
        dataset = TextDataset(folder, unit="line")
        assert texts(dataset) == ["one", "two", "three", "x", ""]
        assert texts(dataset[1:3]) == ["two", "three"]
        assert dataset.source_of(-1) == f"{folder}/verse/c.txt.gz, line 2"
        assert dataset[4]["input_ids"].shape == (0,)
        assert dataset.text_of(-2) == "x"
        assert dataset.subset([3, 1]).text_of(1) == "two"

    def test_windows(self, folder: Path) -> None:
        dataset = TextDataset(folder, max_length=4, stride=3, end_token=9)
        found = [dataset[n]["input_ids"].tolist() for n in range(len(dataset))]
        one, three, x = [[*(ord(c) + 2 for c in text), 9] for text in FILES]
        assert found == [one[0:4], one[3:7], one[6:10], three[0:4], three[3:7], x]
        assert dataset.source_of(1) == str(folder / "prose/a.txt")

    def test_blocks(self, folder: Path, loader_of: Any) -> None:
        dataset = TextDataset(folder, max_length=6, packing=True)
        assert texts(dataset) == ["one\ntw", "o\nthre"]
        assert dataset[1]["document_ids"].tolist() == [0, 0, 1, 1, 1, 1]
        (batch,) = loader_of(dataset, shuffle=False)
        for name, dtype in (("input_ids", torch.int64), ("document_ids", torch.int32)):
            assert torch.equal(batch[name], torch.stack([dataset[n][name] for n in range(2)]))
            assert batch[name].dtype == dtype
        with pytest.raises(ConfigError, match="not texts"):
            dataset.text_of(0)

    def test_labels_by_folder(self, folder: Path) -> None:
        for unit, wanted in [("file", [0, 0, 1]), ("line", [0, 0, 0, 1, 1])]:
            dataset = TextDataset(folder, unit=unit, labels="folders")
            assert labels(dataset) == wanted == list(dataset.targets)
            assert dataset.classes == ["prose", "verse"]
        assert labels(dataset[3:]) == [1, 1]
        windows = TextDataset(folder, max_length=4, stride=4, labels="folders")
        assert labels(windows) == [0, 0, 0, 0, 1]
        with pytest.raises(ConfigError, match=r"labels=.folders."):
            TextDataset(folder / "prose", labels="folders")


class TestTokenizers:
    def test_of_every_kind(self, tmp_path: Path) -> None:
        path = write(tmp_path, {"a.txt": "the mill\n\nthe river turns in the wheel\n"}) / "a.txt"
        known: list[Any] = [HuggingFace(), Tokenizers(pads=True), Tiktoken(), SentencePiece()]
        for tokenizer in (*known, lambda text: [5] * len(text.split())):
            options: Any = {"tokenizer": tokenizer, "unit": "line"}
            whole, cut = (TextDataset(path, max_length=length, **options) for length in (None, 3))
            ids = [whole[n]["input_ids"].tolist() for n in range(3)]
            assert list(map(len, ids)) in ([2, 0, 6], [4, 2, 8])
            assert [len(cut[n]["input_ids"]) for n in range(3)] == [min(3, len(row)) for row in ids]
            together = whole.__getitems__([2, 0])
            assert [sample["input_ids"].tolist() for sample in together] == [ids[2], ids[0]]
            blocks = TextDataset(path, **options, **BLOCKS)
            joined = [token for row in ids for token in row]
            found = torch.cat([blocks[n]["input_ids"] for n in range(len(blocks))])
            assert found.tolist() == joined[: len(joined) // 4 * 4]

    def test_that_gives_no_ids(self, folder: Path) -> None:
        def tokenizer(text: str) -> Any:
            if text != "two":
                return [1, 2]
            if gives is ValueError:
                raise ValueError("no such word")
            return gives

        options: Any = {"tokenizer": tokenizer, "unit": "line"}
        bad: list[Any] = [[1.5], None, "ids", ["a"], [True], [2**31], [2**63], [2**70], [-1]]
        for gives in (*bad, [[1], [2, 3]], ValueError):
            dataset = TextDataset(folder, **options)
            assert dataset[0]["input_ids"].tolist() == [1, 2]
            with pytest.raises(SampleError, match=r"sample 1 .*a.txt, line 2"):
                dataset.__getitems__([0, 1, 2])
            skipping = TextDataset(folder, on_error="skip", **options)
            assert len(skipping.__getitems__([0, 1, 2])) == 2, gives
            with pytest.raises(SampleError, match=r"a.txt, line 2"):
                TextDataset(folder, **options, **BLOCKS)

    def test_that_takes_no_surrogates(self, tmp_path: Path) -> None:
        path = write(tmp_path, {"a.jsonl": '{"text": "\\ud800"}\n{"text": "sound"}\n'}) / "a.jsonl"
        dataset = TextDataset(path, tokenizer=lambda text: list(text.encode()), unit="record")
        assert len(dataset[1]["input_ids"]) == 5
        with pytest.raises(SampleError, match=r"sample 0 .*a.jsonl, record 1.*surrogates"):
            dataset[0]

    def test_samples_of_one_reading_share_no_memory(self, folder: Path) -> None:
        first, second = TextDataset(folder, unit="line").__getitems__([2, 0])
        first["input_ids"][:] = 0
        assert text(second) == "one"
        assert first["input_ids"].untyped_storage().nbytes() == 8 * 5


class TestBadInput:
    def test_a_byte_that_is_no_utf8(self, tmp_path: Path) -> None:
        bad, packed = b"sound\r\nalso\ncaf\xe9 \xe9\n", gzip.compress(b"x\ny\xff\n")
        folder = write(tmp_path / "data", {"a.txt": bad, "b.txt.gz": packed})
        for unit, places in (
            ("file", {0: "a.txt: byte 0xe9 at offset 15", 1: "b.txt.gz: byte 0xff at offset 3"}),
            ("line", {2: "a.txt, line 3: byte 0xe9 at offset 15", 4: "b.txt.gz, line 2: byte"}),
        ):
            dataset = TextDataset(folder, unit=unit)
            for index, said in places.items():
                with pytest.raises(SampleError, match=said):
                    dataset[index]
        lines = TextDataset(folder / "a.txt", unit="line", encoding="latin-1")
        assert texts(lines) == ["sound", "also", "café é"]
        expected = bad.decode("utf-8", "replace")
        assert texts(TextDataset(folder / "a.txt", errors="replace")) == [expected]

    def test_utf16_is_recognised(self, tmp_path: Path) -> None:
        path = write(tmp_path, {"a.txt": "one\n".encode("utf-16")}) / "a.txt"
        for unit, expected in (("file", "one\n"), ("line", "one")):
            with pytest.raises(SampleError, match="encoding='utf-16'"):
                TextDataset(path, unit=unit)[0]
            assert texts(TextDataset(path, unit=unit, encoding="utf-16")) == [expected]

    def test_characters_of_every_kind(self, tmp_path: Path) -> None:
        given = "\u05e9\u05dc \u202bab e\u0301 \u0645 \U0001f468\u200d\U0001f469 \0 \x1c \x85 "
        given += "\u2028 \x0b \U0010ffff"
        path = write(tmp_path, {"a.txt": given}) / "a.txt"
        # str.splitlines would cut it
        assert texts(TextDataset(path)) == [given] == texts(TextDataset(path, unit="line"))
        known = TextDataset(path, tokenizer=CharTokenizer("ab"))[0]["input_ids"]
        assert sorted(set(known.tolist())) == [1, 2, 3]

    def test_nothing(self, tmp_path: Path, loader_of: Any) -> None:
        folder = write(tmp_path / "data", {"a.txt": b"", "b.txt": b"\xef\xbb\xbf"})
        assert texts(TextDataset(folder)) == ["", ""]
        for options in ({"unit": "line"}, BLOCKS):
            dataset = TextDataset(folder, **options)
            assert len(dataset) == 0
            assert list(loader_of(dataset)) == []
        assert texts(TextDataset(folder, **WINDOWS)) == ["", ""]

    def test_a_line_of_json_that_is_none(self, tmp_path: Path) -> None:
        bad = ["{", "[1]", "  ", '{"other": 1}', '{"text": 5}', "[" * 100_000, "5", "\0"]
        content = '{"text": "a"}\n\n' + "\n".join(bad) + '\n{"text": "b"}'
        path = write(tmp_path, {"a.jsonl": content}) / "a.jsonl"
        dataset = TextDataset(path, unit="record")
        assert (text(dataset[0]), text(dataset[-1]), len(dataset)) == ("a", "b", len(bad) + 2)
        for number in range(1, len(bad) + 1):
            with pytest.raises(SampleError) as raised:
                dataset[number]
            assert f"sample {number} can't be decoded" in str(raised.value)
            assert f"{path}, record {number + 1}: " in str(raised.value)
            assert len(str(raised.value)) < 500
        skipping = TextDataset(path, unit="record", on_error="skip")
        assert skipping.text_of(0) == "a"
        with pytest.raises(SampleError, match="sample 1"):
            skipping.text_of(1)
        assert [text(sample) for sample in skipping.__getitems__(range(len(bad) + 2))] == ["a", "b"]

    def test_a_table_without_that_field(self, tmp_path: Path) -> None:
        """Which may be one without a header."""
        for content in ("id,body\n1,2\n", "text,text\n1,2\n"):
            write(tmp_path, {"a.csv": content})
            with pytest.raises(FormatError, match=r"a.csv: .*'text': pass text_field="):
                TextDataset(tmp_path / "a.csv", unit="record")
        write(tmp_path, {"a.csv": "id,text\n1,2\n3\n"})
        with pytest.raises(FormatError, match="'label'"):
            TextDataset(tmp_path / "a.csv", unit="record", target_field="label")
        with pytest.raises(SampleError, match=r"a.csv, record 2: it has 1 fields"):
            TextDataset(tmp_path / "a.csv", unit="record")[1]

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        folder = write(tmp_path, {"a.json": '{"text": 1}', "b.txt": "x", "c.csv.gz": b"no gzip"})
        for name, unit in (("a.json", "record"), ("b.txt", "record"), ("c.csv.gz", "line")):
            with pytest.raises(FormatError, match=name):
                TextDataset(folder / name, unit=unit)
        with pytest.raises(SampleError, match=r"sample 0 .*c.csv.gz"):
            TextDataset(folder / "c.csv.gz", unit="file")[0]
        with pytest.raises(DataNotFoundError, match=r"\.jsonl"):
            TextDataset(write(tmp_path / "images", {"a.png": b""}))

    def test_a_text_too_large(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plain, "LARGE", 1000)
        folder = write(tmp_path / "data", {"a.txt": "x" * 400_000, "b.txt": "sound"})
        for unit in ("file", "line"):
            dataset = TextDataset(folder, unit=unit, max_memory_usage="1MB")
            assert text(dataset[1]) == "sound"
            with pytest.raises(SampleError, match=r"sample 0 .*a.txt.*400.0 kB"):
                dataset[0]

    def test_arguments_that_make_no_sense(self, folder: Path) -> None:
        bad: list[tuple[dict[str, Any], str]] = [
            ({"unit": "word"}, "'word'"),
            ({"max_length": 0}, "max_length"),
            ({"stride": 0}, "stride"),
            ({"stride": 600, "max_length": 512}, "stride=600"),
            ({"stride": 5}, "max_length="),
            ({"packing": True}, "max_length="),
            ({"packing": "wrapped"}, "'wrapped'"),
            ({"packing": True, "max_length": 4, "stride": 2}, "together"),
            ({"end_token": 1}, "end_token"),
            ({"end_token": -1, "packing": True}, "end_token"),
            ({"target_field": "x", "unit": "file"}, "target_field"),
            ({"target_field": ["x"]}, r"\['x'\]"),
            ({"text_field": "x", "unit": "line"}, "text_field='x'"),
            ({"labels": "names"}, "labels"),
            ({"encoding": "utf-9"}, "utf-9"),
            ({"tokenizer": "gpt2"}, "tokenizer"),
            ({"packing": True, "max_length": 5000}, "max_length=5000.* 16 "),
        ]
        for options, said in bad:
            with pytest.raises(ConfigError, match=said):
                TextDataset(**{"data_path": folder, **options})

    def test_a_home_that_can_not_be_written_to(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Small texts need no folder."""
        (tmp_path / "file").write_text("no folder")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
        assert texts(TextDataset(folder / "prose", unit="line")) == ["one", "two", "three"]
        with pytest.warns(HeadraceWarning, match="tokens are not kept"):
            assert len(TextDataset(folder, max_length=5, packing=True)) == 3
        with pytest.raises(PermissionError, match=r"c.txt.gz"):
            TextDataset(folder, unit="line")

    def test_parts_of_documents_that_can_be_read(self, tmp_path: Path) -> None:
        contents: dict[str, Any] = {"a.txt": b"sound text", "b.txt": b"\xff", "c.txt": b""}
        folder = write(tmp_path / "data", contents)
        windows: dict[str, Any] = {"max_length": 6, "stride": 6}
        blocks: dict[str, Any] = {"max_length": 5, "packing": True}
        for how, expected in [(windows, ["sound ", "text", ""]), (blocks, ["sound", " text"])]:
            for _ in range(2):  # made, and found again
                with pytest.warns(HeadraceWarning, match=r"1 of 3 .*b.txt"):
                    dataset = TextDataset(folder, on_error="skip", **how)
                assert texts(dataset) == expected
            # which is no excuse where errors are raised
            with pytest.raises(SampleError, match=r"sample 1 .*b.txt: byte 0xff at offset 0"):
                TextDataset(folder, **how)
            with pytest.raises(SampleError, match=r"none of 3 .*a.txt"):
                TextDataset(folder, tokenizer=lambda _: [0.5], on_error="skip", **how)


class TestAround:
    def test_tokens_are_made_once(self, folder: Path) -> None:
        def made_by(name: str = "1", **how: Any) -> list[str]:
            tokenizer = Counting(name)
            how = {"packing": True, "max_length": 5, **how}
            opened.append(TextDataset(folder, tokenizer=tokenizer, **how))
            return tokenizer.made

        opened: list[Any] = []
        assert made_by() == FILES
        assert made_by(packing=False, stride=2) == made_by() == []
        (folder / "prose/b.md").write_text("other")
        assert made_by() == [FILES[0], "other", FILES[2]]
        assert bytes(opened[-1][1]["input_ids"].tolist()) == b"wo\not"
        for how, count in (({"unit": "line"}, 5), ({"end_token": 1}, 3), ({"name": "2"}, 3)):
            assert len(made_by(**how)) == count

    @pytest.mark.slow
    def test_held_tokens_count_in_the_budget(self, tmp_path: Path) -> None:
        """Those of a tokenizer that can't be known again are not kept on the disk."""
        path = write(tmp_path, {"a.txt": "x" * 3_000_000}) / "a.txt"
        for ids, nbytes in ((65_535, 6_000_000), (65_536, 12_000_000)):
            options: Any = {"tokenizer": lambda text, ids=ids: [ids] * len(text), **BLOCKS}
            before = MemoryBudget().reserved
            dataset = TextDataset(path, **options)
            assert 0 <= MemoryBudget().reserved - before - nbytes < 1000
            assert dataset[9]["input_ids"].tolist() == [ids] * 4
            del dataset
            gc.collect()
            assert MemoryBudget().reserved == before
        with pytest.raises(BudgetError, match="tokens of all documents"):
            TextDataset(path, max_memory_usage="10MB", **options)

    def test_pickled_and_read_elsewhere(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of paths that are relative, too: lines, copies and tokens are found again."""
        monkeypatch.chdir(tmp_path)
        for options in ({"unit": "line"}, WINDOWS, BLOCKS):
            dataset = TextDataset(folder.name, cache_dir="cache", **options)
            expected, state = texts(dataset), pickle.dumps(dataset)
            assert len(state) < 12_000
            with monkeypatch.context() as elsewhere:
                elsewhere.chdir("/")
                assert texts(pickle.loads(state)) == expected, options

    def test_shared_by_the_machine(self, folder: Path) -> None:
        options: Any = {"shared": "machine", "loading_mode": "eager", "progress": False}
        for tokenizer in (None, CharTokenizer("abc")):
            with TextDataset(folder, tokenizer=tokenizer, **options) as dataset:
                assert len(dataset[0]["input_ids"]) == 8
        with pytest.raises(ConfigError, match="tokenizer"):
            TextDataset(folder, tokenizer=lambda text: [1], **options)


# -- the laws


@pytest.mark.slow
class TestLinesKeepTheLaws(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path: Path) -> None:
        rows = [f"{' '.join(WORDS[: n % 7 + 1])} {n}\n".encode() for n in range(24)]
        files: Any = {f"{n}.txt": b"".join(rows[8 * n : 8 * n + 8]) for n in range(3)}
        self.path = write(tmp_path / "data", files)
        rows[3] = rows[17] = b"\xff\n"
        self.bad = write(tmp_path / "bad", {"a.txt": b"".join(rows)})

    def make(self, **options: Any) -> BaseDataset:
        return TextDataset(self.path, unit="line", labels=None, **options)

    def make_bad(self, **options: Any) -> tuple[BaseDataset, list[int]]:
        return TextDataset(self.bad, unit="line", **options), [3, 17]
