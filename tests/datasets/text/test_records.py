"""Records of texts: when they are the unit, which text and target they have, and how long they
are.
"""

from __future__ import annotations

import gzip
import json
import pickle
import re
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from headrace import TextDataset, open_dataset, pack
from headrace.datasets.text import passes as text_passes
from headrace.errors import ConfigError, FormatError, HeadraceWarning, SampleError
from tests.datasets.text.test_text import texts, write

ROWS = [{"text": "one"}, {"text": "two words"}]


def table(*targets: str, delimiter: str = ",") -> str:
    return f"text{delimiter}label\n" + "".join(
        f"row {n}{delimiter}{target}\n" for n, target in enumerate(targets)
    )


def lines(*targets: Any) -> str:
    return "".join(
        json.dumps({"text": f"row {n}", "label": target}) + "\n" for n, target in enumerate(targets)
    )


def labels(dataset: TextDataset) -> list[Any]:
    return [dataset[n]["labels"] for n in range(len(dataset))]


class TestUnit:
    @pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.ndjson", "a.csv", "a.tsv", "a.json"])
    def test_records_are_the_default(self, name: str, tmp_path: Path) -> None:
        content = (
            "\n".join(map(json.dumps, ROWS))
            if "json" in name.lower()
            else "id\ttext\n1\tone\n2\ttwo words\n"
        )
        content = (
            f" [\n{json.dumps(ROWS[0])}, {json.dumps(ROWS[1])}]" if name == "a.json" else content
        )
        path = (
            write(
                tmp_path,
                {name: content if not name.endswith("csv") else content.replace("\t", ",")},
            )
            / name
        )
        for opened in (
            TextDataset(path),
            TextDataset(tmp_path),
            open_dataset(path),
            TextDataset(str(tmp_path / "*.*")),
        ):
            assert texts(opened) == ["one", "two words"]
        assert len(TextDataset(path, unit="file")) == 1

    @pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
    def test_lists_of_json_are_records(self, encoding: str, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        path.write_text(json.dumps(["one", "two"]), encoding=encoding)
        assert texts(TextDataset(path, encoding=encoding)) == ["one", "two"]

    @pytest.mark.parametrize("content", [{"text": "x"}, [1, 2], [], "[x"])
    def test_other_json_is_a_file(self, content: Any, tmp_path: Path) -> None:
        path = write(tmp_path, {"a.json": json.dumps(content)}) / "a.json"
        assert texts(TextDataset(path)) == [json.dumps(content)]
        with gzip.open(tmp_path / "b.json.gz", "wt") as file:
            file.write(json.dumps([{"text": "y"}]))
        assert texts(TextDataset(tmp_path / "b.json.gz")) == ["y"]

    def test_another_delimiter_is_told_and_used(self, tmp_path: Path) -> None:
        for delimiter in ";|\t":
            path = write(tmp_path, {"a.csv": table("b", "a, c", delimiter=delimiter)}) / "a.csv"
            with pytest.raises(
                FormatError,
                match=re.escape(
                    f"fields seem to be separated by {delimiter!r}: pass delimiter={delimiter!r}"
                ),
            ):
                TextDataset(path, cache_dir=tmp_path / "kept")
            dataset = TextDataset(
                path, delimiter=delimiter, target_field="label", cache_dir=tmp_path / "kept"
            )
            assert texts(dataset) == ["row 0", "row 1"] and dataset.classes == ["a, c", "b"]
        with pytest.raises(ConfigError, match="delimiter must be one ASCII character"):
            TextDataset(path, delimiter="::")
        with pytest.raises(ConfigError, match=r"is for records of \.csv and \.tsv"):
            TextDataset(write(tmp_path, {"a.jsonl": lines(2)}) / "a.jsonl", delimiter=";")

    def test_files_elsewhere(self, tmp_path: Path) -> None:
        folder = write(tmp_path, {"a.txt": "x\ny", "b.json": json.dumps(ROWS)})
        assert len(TextDataset(folder)) == 2
        assert texts(TextDataset(folder / "b.json", unit="record")) == ["one", "two words"]

    def test_a_field_that_is_named_means_records(self, tmp_path: Path) -> None:
        path = write(tmp_path, {"a.json": json.dumps([{"body": "x", "n": 3}])}) / "a.json"
        assert texts(TextDataset(path, text_field="body")) == ["x"]
        assert labels(TextDataset(path, text_field="body", target_field="n")) == [3]
        with pytest.raises(
            FormatError,
            match=(
                r"b.txt: records are read from .*unit='file', and no text_field= or "
                r"target_field="
            ),
        ):
            TextDataset(write(tmp_path, {"b.txt": "x"}), text_field="body")

    def test_both_kinds_are_an_error_that_names_both_ways(self, tmp_path: Path) -> None:
        folder = write(tmp_path, {"a.csv": table("1"), "b.jsonl": lines(2), "notes.md": "x"})
        for opened in (TextDataset, open_dataset):
            with pytest.raises(
                ConfigError,
                match=(
                    r"2 files of records, such as a.csv, and 1 other texts, such as notes.md: "
                    r"pass unit='file'"
                ),
            ):
                opened(folder)
        assert (
            len(TextDataset(folder, unit="file")) == 3
            and len(TextDataset([folder / "a.csv", folder / "b.jsonl"])) == 2
        )

    def test_of_a_server(self, tmp_path: Path) -> None:
        memory = fsspec.filesystem("memory")
        memory.pipe_file("/records/a/b.jsonl", lines("x", "y").encode())
        try:
            for url in ("memory://records/a/b.jsonl", "memory://records"):
                dataset = TextDataset(url, cache_dir=tmp_path)
                assert texts(dataset) == ["row 0", "row 1"] and dataset.source_of(1).endswith(
                    "a/b.jsonl, line 2"
                )
            whole = TextDataset("memory://records", labels="folders", cache_dir=tmp_path)
            assert whole.classes == ["a"] and whole.class_to_idx == {"a": 0}
        finally:
            memory.rm("/records", recursive=True)

    def test_windows_of_records(self, tmp_path: Path) -> None:
        path = write(tmp_path, {"a.jsonl": lines(1, 2)}) / "a.jsonl"
        with TextDataset(path, max_length=2, stride=2, cache_dir=tmp_path / "cache") as windows:
            assert texts(windows) == ["ro", "w ", "0", "ro", "w ", "1"]
        assert pack(windows, tmp_path / "a.h5") and texts(TextDataset(tmp_path / "a.h5")) == [
            "row 0",
            "row 1",
        ]

    def test_nothing_is_cut(self, tmp_path: Path) -> None:
        path = write(tmp_path, {"a.txt": "x" * 5000}) / "a.txt"
        assert (
            len(TextDataset(path)[0]["input_ids"]) == 5000
            and len(TextDataset(path, max_length=7)[0]["input_ids"]) == 7
        )


class TestText:
    def test_a_list_of_texts(self, tmp_path: Path) -> None:
        folder = write(tmp_path, {"a.json": '["one", "two"]', "b.jsonl": '"three"\n'})
        assert texts(TextDataset(folder, unit="record")) == ["one", "two", "three"]
        with pytest.raises(SampleError, match="it is a str and no object with fields"):
            TextDataset(folder, unit="record", text_field="body")[0]

    def test_made_by_a_callable(self, tmp_path: Path) -> None:
        path = write(tmp_path, {"a.csv": "title,body\nA,b\nC,d\n"}) / "a.csv"
        assert texts(TextDataset(path, text_field=lambda row: row["title"] + row["body"])) == [
            "Ab",
            "Cd",
        ]
        with pytest.raises(SampleError, match=r"record 1: text_field made a int and no text"):
            TextDataset(path, text_field=lambda row: 3)[0]
        with TextDataset(
            path,
            text_field=lambda row: row["body"],
            max_length=2,
            packing=True,
            cache_dir=tmp_path / "kept",
        ) as blocks:
            assert texts(blocks) == ["bd"]
        # nobody could know the callable again
        assert not [*(tmp_path / "kept").glob("headrace-tokens*")]


class TestTargets:
    @pytest.mark.parametrize(
        ("targets", "expected", "dtype", "classes"),
        [
            (("1", "0", " 12"), [1, 0, 12], "int64", []),
            (("1", "0.5", "-2e3"), [1.0, 0.5, -2000.0], "float64", []),
            (("99999999999999999999", "1"), [1e20, 1.0], "float64", []),
            (("dog", "cat", "dog"), [1, 0, 1], "int64", ["cat", "dog"]),
            (("1", "x", "0"), [1, 2, 0], "int64", ["0", "1", "x"]),
            (("1_0", "2"), [0, 1], "int64", ["1_0", "2"]),
        ],
    )
    @pytest.mark.parametrize("ending", ["csv", "tsv"])
    def test_of_tables(
        self,
        targets: tuple[str, ...],
        expected: list[Any],
        dtype: str,
        classes: list[str],
        ending: str,
        tmp_path: Path,
    ) -> None:
        path = (
            write(
                tmp_path,
                {f"a.{ending}": table(*targets, delimiter="," if ending == "csv" else "\t")},
            )
            / f"a.{ending}"
        )
        with TextDataset(path, target_field="label") as dataset:
            assert labels(dataset) == expected and all(
                type(label) is type(expected[0]) for label in labels(dataset)
            )
            assert dataset.targets.dtype == dtype and dataset.targets.tolist() == expected
            assert dataset.classes == classes and dataset.class_to_idx == {
                name: number for number, name in enumerate(classes)
            }
            assert (
                labels(dataset.subset([1, 0])) == expected[1::-1]
                and labels(pickle.loads(pickle.dumps(dataset))) == expected
            )
            with TextDataset(pack(dataset, tmp_path / "a.h5")) as packed:
                assert labels(packed) == expected and packed.classes == classes

    @pytest.mark.parametrize(
        ("targets", "expected", "classes"),
        [
            ((1, 0), [1, 0], []),
            ((1, 2.5), [1.0, 2.5], []),
            (("b", "a"), [1, 0], ["a", "b"]),
            ((True, False), None, []),
            ((1, "1"), None, []),
            ((1, None), None, []),
            (([1, 2], {"a": 1}), None, []),
        ],
    )
    def test_of_json_lines(
        self,
        targets: tuple[Any, ...],
        expected: list[Any] | None,
        classes: list[str],
        tmp_path: Path,
    ) -> None:
        path = write(tmp_path, {"a.jsonl": lines(*targets)}) / "a.jsonl"
        with TextDataset(path, target_field="label") as dataset:
            assert (
                labels(dataset) == list(targets if expected is None else expected)
                and dataset.classes == classes
            )
            assert expected == (None if dataset.targets is None else dataset.targets.tolist())

    def test_of_tables_beside_json(self, tmp_path: Path) -> None:
        folder = write(tmp_path, {"a.jsonl": lines(3, 4), "b.csv": table("5", "6")})
        assert labels(TextDataset(folder, target_field="label")) == [3, 4, 5, 6]

    @pytest.mark.parametrize(
        ("bad", "said"),
        [("", "its field 'label' is empty, so it has no target"), ("1,2", "it has 3 fields")],
    )
    def test_a_record_without_a_target(self, bad: str, said: str, tmp_path: Path) -> None:
        path = write(tmp_path, {"a.csv": table("5", bad, "7")}) / "a.csv"
        with pytest.raises(
            SampleError, match=rf"sample 1 can't be decoded: .*a.csv, record 2: {said}"
        ):
            TextDataset(path, target_field="label")
        with TextDataset(path, target_field="label", on_error="skip") as dataset:
            assert (
                dataset.targets.tolist() == [5, -1, 7]
                and dataset.sample_reader.take_report().get("errors", 0) == 0
            )
            assert [sample["labels"] for sample in dataset.__getitems__([0, 1, 2])] == [5, 7]

    def test_are_found_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, kept = (
            write(tmp_path, {"a.csv": table("b", "a")}) / "a.csv",
            {"cache_dir": tmp_path / "kept", "target_field": "label"},
        )
        with TextDataset(path, **kept) as dataset:
            assert labels(dataset) == [1, 0]
        monkeypatch.setattr(text_passes, "_records", lambda *_: pytest.fail("read again"))
        with TextDataset(path, **kept) as again:
            assert (
                again.classes == ["a", "b"]
                and labels(again) == [1, 0]
                and again.lengths().tolist() == [5, 5]
            )
        with pytest.raises(pytest.fail.Exception):
            TextDataset(path, on_error="skip", **kept)

    def test_texts_that_are_hardly_classes(self, tmp_path: Path) -> None:
        path = write(tmp_path, {"a.csv": table(*(f"text {n}" for n in range(150)))}) / "a.csv"
        with pytest.warns(
            HeadraceWarning, match=r"target_field='label' holds 150 different texts in 150 records"
        ):
            TextDataset(path, target_field="label")


def test_length_is_that_of_the_text(tmp_path: Path) -> None:
    rows = [{"text": "é" * n, "other": "x" * (1000 - 7 * n)} for n in (5, 1, 9)]
    path = write(tmp_path, {"a.jsonl": "\n".join(map(json.dumps, rows))}) / "a.jsonl"
    with TextDataset(path) as dataset:
        assert dataset.lengths().tolist() == [5, 1, 9] and dataset.subset(
            [2, 0]
        ).lengths().tolist() == [9, 5]
    assert TextDataset(path, max_length=4).lengths().tolist() == [4, 1, 4]
    assert np.issubdtype(dataset.lengths().dtype, np.int64)
