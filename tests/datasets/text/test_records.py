"""Records of texts: when they are the unit, their texts, targets and lengths."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from headrace import TextDataset, open_dataset, pack
from headrace.datasets.text import passes
from headrace.errors import ConfigError, FormatError, SampleError
from tests.datasets.text.test_text import labels, texts, write

pytestmark = pytest.mark.usefixtures("own_cache")

ROWS = [{"text": "one"}, {"text": "two words"}]


def one_file(folder: Path, name: str, content: str) -> Path:
    return write(folder, {name: content}) / name


def table(*targets: str, delimiter: str = ",") -> str:
    rows = [f"row {n}{delimiter}{target}\n" for n, target in enumerate(targets)]
    return f"text{delimiter}label\n" + "".join(rows)


def lines(*targets: Any) -> str:
    rows = [{"text": f"row {n}", "label": target} for n, target in enumerate(targets)]
    return "".join(json.dumps(row) + "\n" for row in rows)


class TestUnit:
    def test_records_are_the_default(self, tmp_path: Path) -> None:
        json_lines = "\n".join(map(json.dumps, ROWS))
        columns = "id\ttext\n1\tone\n2\ttwo words\n"
        for name, content in {
            "a.JSONL": json_lines,
            "a.ndjson": json_lines,
            "a.csv": columns.replace("\t", ","),
            "a.tsv": columns,
            "a.json": " " + json.dumps(ROWS, indent=1),
        }.items():
            path = one_file(tmp_path / name, name, content)
            pattern = str(path.with_name("*.*"))
            for opened in (TextDataset(path), TextDataset(pattern), open_dataset(path.parent)):
                assert texts(opened) == ["one", "two words"], name
            assert len(TextDataset(path, unit="file")) == 1

    def test_json_is_records_or_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        for encoding in ("utf-8-sig", "utf-16"):
            path.write_text(json.dumps(["one", "two"]), encoding=encoding)
            assert texts(TextDataset(path, encoding=encoding)) == ["one", "two"]
        for content in ('{"text": "x"}', "[1, 2]", "[]", '"[x"'):
            path.write_text(content)
            assert texts(TextDataset(path)) == [content]
        with gzip.open(tmp_path / "b.json.gz", "wt") as file:
            file.write(json.dumps([{"text": "y"}]))
        assert texts(TextDataset(tmp_path / "b.json.gz")) == ["y"]

    def test_another_delimiter_is_told_and_used(self, tmp_path: Path) -> None:
        for delimiter in ";|\t":
            path = one_file(tmp_path, "a.csv", table("b", "a, c", delimiter=delimiter))
            with pytest.raises(FormatError) as raised:
                TextDataset(path)
            assert f"delimiter={delimiter!r}" in str(raised.value)
            given: Any = {"delimiter": delimiter, "target_field": "label"}
            dataset = TextDataset(path, cache_dir=tmp_path / "kept", **given)
            assert texts(dataset) == ["row 0", "row 1"]
            assert dataset.classes == ["a, c", "b"]
        for name, delimiter in (("a.csv", "::"), ("a.jsonl", ";")):
            path = one_file(tmp_path, name, lines(2))
            with pytest.raises(ConfigError, match="delimiter"):
                TextDataset(path, delimiter=delimiter)

    def test_records_among_other_texts(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "a", {"a.txt": "x\ny", "b.json": json.dumps(ROWS)})
        assert len(TextDataset(folder)) == 2
        assert texts(TextDataset(folder / "b.json", unit="record")) == ["one", "two words"]
        files: Any = {"a.csv": table("1"), "b.jsonl": lines(2), "notes.md": "x"}
        folder = write(tmp_path / "b", files)
        for opened in (TextDataset, open_dataset):
            with pytest.raises(ConfigError, match=r"a.csv, .*notes.md: pass unit='file'"):
                opened(folder)
        assert len(TextDataset(folder, unit="file")) == 3
        assert len(TextDataset([folder / "a.csv", folder / "b.jsonl"])) == 2

    def test_a_field_that_is_named_means_records(self, tmp_path: Path) -> None:
        path = one_file(tmp_path, "a.json", json.dumps([{"body": "x", "n": 3}]))
        dataset = TextDataset(path, text_field="body", target_field="n")
        assert (texts(dataset), labels(dataset)) == (["x"], [3])
        with pytest.raises(FormatError, match=r"b.txt"):
            TextDataset(one_file(tmp_path, "b.txt", "x"), text_field="body")


class TestText:
    def test_made_by_a_callable(self, tmp_path: Path) -> None:
        path = one_file(tmp_path, "a.csv", "title,body\nA,b\nC,d\n")
        dataset = TextDataset(path, text_field=lambda row: row["title"] + row["body"])
        assert texts(dataset) == ["Ab", "Cd"]
        for text_field, said in ((lambda row: 3, "int"), (lambda row: row["x"], "KeyError: 'x'")):
            with pytest.raises(SampleError, match=f"record 1: text_field .*{said}"):
                TextDataset(path, text_field=text_field)[0]
        options: Any = {"packing": True, "max_length": 2, "cache_dir": tmp_path / "kept"}
        with TextDataset(path, text_field=lambda row: row["body"], **options) as blocks:
            assert texts(blocks) == ["bd"]
        # nobody could know the callable again
        assert not [*(tmp_path / "kept").glob("headrace-tokens*")]

    def test_length_is_that_of_the_text(self, tmp_path: Path) -> None:
        rows = [{"text": "é" * n, "other": "x" * (1000 - 7 * n)} for n in (5, 1, 9)]
        path = one_file(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
        dataset = TextDataset(path)
        assert dataset.lengths().tolist() == [5, 1, 9]
        assert dataset.subset([2, 0]).lengths().tolist() == [9, 5]
        assert TextDataset(path, max_length=4).lengths().tolist() == [4, 1, 4]


class TestTargets:
    def test_of_tables(self, tmp_path: Path) -> None:
        given: list[tuple[Any, list[Any], list[str]]] = [
            (("1", "0", " 12"), [1, 0, 12], []),
            (("1", "0.5", "-2e3"), [1.0, 0.5, -2000.0], []),
            (("9007199254740993", "-9223372036854775808"), [2**53 + 1, -(2**63)], []),
            (("100000000000000000000", "1"), [1e20, 1.0], []),
            (("1", "x", "99999999999999999999"), [0, 2, 1], ["1", "99999999999999999999", "x"]),
            (("1", "x", "0"), [1, 2, 0], ["0", "1", "x"]),
            (("1_0", "2"), [0, 1], ["1_0", "2"]),
        ]
        for targets, expected, classes in given:
            for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
                path = one_file(tmp_path, name, table(*targets, delimiter=delimiter))
                dataset = TextDataset(path, target_field="label")
                assert labels(dataset) == dataset.targets.tolist() == expected
                assert [type(label) for label in labels(dataset)] == list(map(type, expected))
                assert dataset.classes == list(dataset.class_to_idx) == classes
                assert labels(dataset.subset([1, 0])) == expected[1::-1]
                assert labels(pickle.loads(pickle.dumps(dataset))) == expected
        with TextDataset(pack(dataset, tmp_path / "a.h5", progress=False)) as packed:
            assert (labels(packed), packed.classes) == (expected, classes)

    def test_of_json_lines(self, tmp_path: Path) -> None:
        """Those that are neither numbers nor texts throughout are given as they are."""
        given: list[tuple[Any, list[Any] | None, list[str]]] = [
            ((1, 0), [1, 0], []),
            ((1, 2.5), [1.0, 2.5], []),
            (("b", "a"), [1, 0], ["a", "b"]),
            ((True, False), None, []),
            ((1, "1"), None, []),
            ((1, None), None, []),
            (([1, 2], {"a": 1}), None, []),
        ]
        for targets, expected, classes in given:
            path = one_file(tmp_path, "a.jsonl", lines(*targets))
            dataset = TextDataset(path, target_field="label")
            assert labels(dataset) == (list(targets) if expected is None else expected)
            assert dataset.classes == classes, targets
            assert (dataset.targets is None) == (expected is None), targets
        folder = write(tmp_path / "both", {"a.jsonl": lines(3, 4), "b.csv": table("5", "6")})
        assert labels(TextDataset(folder, target_field="label")) == [3, 4, 5, 6]

    def test_integers_that_no_column_holds(self, tmp_path: Path) -> None:
        for targets in ((5, 2**63 + 11), (2**53 + 1, 2.5), (2.5, 1, 2**53 + 1)):
            files = {"a.jsonl": lines(*targets), "a.csv": table(*map(str, targets))}
            for name, content in files.items():
                path = one_file(tmp_path, name, content)
                said = rf"{name}, (line|record) \d has \d+, an integer"
                with pytest.raises(ConfigError, match=said):
                    TextDataset(path, target_field="label")

    def test_a_record_without_a_target(self, tmp_path: Path) -> None:
        for bad in ("", "1,2"):
            path = one_file(tmp_path, "a.csv", table("5", bad, "7"))
            with pytest.raises(SampleError, match=r"sample 1 .*a.csv, record 2"):
                TextDataset(path, target_field="label")
            with TextDataset(path, target_field="label", on_error="skip") as dataset:
                assert dataset.targets.tolist() == [5, -1, 7]
                assert dataset.sample_reader.take_report().get("errors", 0) == 0
                found = dataset.__getitems__([0, 1, 2])
                assert [sample["labels"] for sample in found] == [5, 7]

    def test_are_found_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = one_file(tmp_path, "a.csv", table("b", "a"))
        options: Any = {"target_field": "label", "cache_dir": tmp_path / "kept"}
        assert labels(TextDataset(path, **options)) == [1, 0]
        monkeypatch.setattr(passes, "read_targets", lambda *_: pytest.fail("read again"))
        with TextDataset(path, **options) as again:
            assert again.classes == ["a", "b"]
            assert labels(again) == [1, 0]
            assert again.lengths().tolist() == [5, 5]
        with pytest.raises(pytest.fail.Exception):
            TextDataset(path, on_error="skip", **options)
