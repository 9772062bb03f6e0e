"""Records are found where Python's own readers of CSV and JSON find them."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.errors import FormatError
from headrace.storage.text import lines, records
from headrace.storage.text.files import local_texts
from headrace.storage.text.lines import strip_end
from headrace.storage.text.records import (
    QuoteCheck,
    csv_fields,
    csv_row,
    field_of,
    format_of,
    json_places,
    json_record,
)
from headrace.storage.text.source import LinesSource
from tests.io.resolve.scanning import scan


def opened(path: Path, unit: str = "record", newline: Any = None) -> LinesSource:
    texts = local_texts(scan(path, [".csv", ".tsv", ".json", ".jsonl"]))
    return LinesSource(
        texts, unit, newline, "utf-8", "strict", path.parent / "cache", is_kept=False
    )


def rows_of(source: LinesSource) -> list[Any]:
    found = [
        source.fields(n, record.decode())
        for n, record in enumerate(source.read(range(len(source))))
    ]
    source.close()
    return found


class TestCsv:
    @pytest.mark.slow
    @settings(max_examples=150, deadline=None)
    @given(text=st.text(st.sampled_from('a,"\r\n '), max_size=25), piece=st.integers(1, 9))
    @example(text='"a\n""b""\n",c\n\nd,"e', piece=3)
    @example(text='a"b\n,c"\n', piece=3)
    @example(text='a, "b\nc"\n', piece=2)
    @example(text='""""\r\n""\r\n', piece=1)
    def test_as_pythons_reader_has_it(self, text: str, piece: int, tmp_path_factory: Any) -> None:
        """Fields too, or an error where it has one."""
        path = tmp_path_factory.getbasetemp() / "generated.csv"
        path.write_bytes(("x,y\n" + text).encode())
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        try:
            expected = [row for row in reader if row]
        except csv.Error:
            expected = None
        before, lines.PIECE = lines.PIECE, piece
        try:
            source = opened(path)
            found = [csv_row(record.decode(), ",") for record in source.read(range(len(source)))]
            assert found == expected
        except FormatError:
            assert expected is None
        finally:
            lines.PIECE = before

    @settings(max_examples=60, deadline=None)
    @given(
        rows=st.lists(
            st.lists(st.text(st.sampled_from('aé,"\r\n\t ;'), max_size=8), min_size=2, max_size=2),
            max_size=6,
        ),
        data=st.data(),
    )
    def test_what_python_wrote(
        self, rows: list[list[str]], data: Any, tmp_path_factory: Any
    ) -> None:
        kind = data.draw(st.sampled_from(["csv", "tsv"]))
        style: Any = {
            "lineterminator": data.draw(st.sampled_from(["\n", "\r\n", "\r"])),
            "delimiter": "," if kind == "csv" else "\t",
        }
        if style["lineterminator"] != "\r\n" or data.draw(st.booleans()):
            # else the writer forgets those line ends that it does not write itself
            style["quoting"] = csv.QUOTE_ALL
        path = tmp_path_factory.getbasetemp() / f"written.{kind}"
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, **style).writerows([["text", "id"], *rows])
        assert rows_of(opened(path)) == [{"text": text, "id": other} for text, other in rows]

    def test_many_records_that_only_pythons_reader_understands(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("headrace.storage.text.scan._TOGETHER", 3)
        path = tmp_path / "a.csv"
        path.write_text(
            'id,text\n\n1,5" disk\n2,"a\n\nb"\n\n'
            + "".join(f'{n},{n}" disk\n' for n in range(3, 20))
        )
        assert rows_of(opened(path)) == [
            {"id": "1", "text": '5" disk'},
            {"id": "2", "text": "a\n\nb"},
            *({"id": str(n), "text": f'{n}" disk'} for n in range(3, 20)),
        ]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('id,text\n1,"a\n2,b\n', "line 3: unexpected end of data"),
            ("", "it is empty"),
            ("\n\n", "it is empty"),
        ],
    )
    def test_what_is_none(self, text: str, said: str, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(FormatError, match=f"a.csv.*{said}"):
            opened(tmp_path / "a.csv")

    def test_a_header_that_is_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_bytes(b"caf\xe9,text\n1,2\n")
        with pytest.raises(FormatError, match=r"a.csv: a byte of the first line.*encoding="):
            opened(tmp_path / "a.csv")

    def test_a_field_of_any_length(self, tmp_path: Path) -> None:
        long = "x\n" * 100_000
        with open(tmp_path / "a.csv", "w", newline="") as file:
            csv.writer(file).writerows([["text"], [long], ["short"], ['5" disk'], [long]])
        before = csv.field_size_limit()
        assert rows_of(opened(tmp_path / "a.csv")) == [
            {"text": text} for text in (long, "short", '5" disk', long)
        ]
        assert csv.field_size_limit() == before

    def test_a_long_field_in_a_child_whose_parent_reads_one_too(self) -> None:
        """The lock that another thread of the parent holds is not the child's."""
        if "fork" not in multiprocessing.get_all_start_methods():
            pytest.skip("there is no fork")
        with records._any_field():
            child = multiprocessing.get_context("fork").Process(
                target=csv_row, args=("x" * 200_000, ",")
            )
            child.start()
        child.join(30)
        alive = child.is_alive()
        child.kill()
        child.join()
        assert not alive and child.exitcode == 0

    def test_records_with_other_numbers_of_fields(self) -> None:
        assert csv_fields("1,2", ",", ["a", "b"]) == {"a": "1", "b": "2"}
        with pytest.raises(
            FormatError, match="it has 3 fields, and the first line of its file names 2"
        ):
            csv_fields("1,2,3", ",", ["a", "b"])
        with pytest.raises(FormatError, match="2 records"):
            csv_row("a\nb", ",")

    @settings(max_examples=80, deadline=None)
    @given(text=st.text(st.sampled_from('a,"\n'), max_size=20), size=st.integers(1, 21))
    def test_quotes_are_looked_at_in_any_pieces(self, text: str, size: int) -> None:
        data = np.frombuffer(text.encode(), np.uint8)
        whole, parts = QuoteCheck(","), QuoteCheck(",")
        if data.size:
            whole(data)
        for start in range(0, len(data), size):
            parts(data[start : start + size])
        assert (whole.is_plain, whole.count) == (
            parts.is_plain,
            parts.count,
        ) and whole.count == text.count('"')

    def test_which_quotes_are_plain(self) -> None:
        for text, is_plain in [
            ('"a","b"\n"c"', True),
            ('"a""b"', True),
            ('a"b"', False),
            ('a, "b"', False),
            ("", True),
            ('"a"\r"b"', True),
        ]:
            check = QuoteCheck(",")
            if text:
                check(np.frombuffer(text.encode(), np.uint8))
            assert check.is_plain == is_plain, text


plain_values: Any = st.none() | st.integers() | st.text(max_size=4)
values: Any = (
    plain_values
    | st.lists(plain_values, max_size=2)
    | st.dictionaries(st.text(max_size=2), plain_values, max_size=2)
)


class TestJson:
    @settings(max_examples=40, deadline=None)
    @given(
        given=st.lists(values, max_size=4),
        indent=st.sampled_from([None, 1]),
        ascii_only=st.booleans(),
        space=st.sampled_from(["", " \r\n\t"]),
    )
    def test_the_elements_of_a_list(
        self, given: list[Any], indent: Any, ascii_only: bool, space: str
    ) -> None:
        data = (space + json.dumps(given, indent=indent, ensure_ascii=ascii_only) + space).encode(
            "utf-8", "surrogatepass"
        )
        starts, ends = json_places(data)
        assert [
            json.loads(data[a:b].decode("utf-8", "surrogatepass"))
            for a, b in zip(starts, ends, strict=True)
        ] == given

    @pytest.mark.parametrize(
        ("data", "said"),
        [
            (b"", "no list of records"),
            (b'{"text": 1}', "no list of records.*jsonl"),
            (b"[", "record 1 at byte 1 is no JSON"),
            (b"[1, 2", "breaks off at byte 5, after 2 records"),
            (b"[1 2]", "breaks off at byte 3, after 1 records"),
            (b"[1, oops]", "record 2 at byte 4 is no JSON: Expecting value"),
            (b"[1,]", "record 2 at byte 3 is no JSON"),
            (b"[,1]", "record 1"),
            (b"[1] [2]", "something follows the end of the list, at byte 4"),
            (b"[" * 100_000, "record 1 at byte 1 is no JSON"),
            (b'["\xff', "record 1"),
            (b"[" + b"9" * 5000 + b"]", "record 1"),
        ],
    )
    def test_what_is_none(self, data: bytes, said: str) -> None:
        with pytest.raises(FormatError, match=said):
            json_places(data)

    @pytest.mark.parametrize("text", ["", "  ", "{", "[" * 100_000, "{} {}", "9" * 5000, "nul"])
    def test_a_record_that_is_none(self, text: str) -> None:
        with pytest.raises(FormatError, match=r"no JSON|blank"):
            json_record(text, False)

    def test_what_follows_a_record_of_a_list(self) -> None:
        assert json_record('{"a": 1}, \n', True) == {"a": 1}

    def test_fields(self) -> None:
        assert field_of({"a": 1}, "a") == 1
        with pytest.raises(FormatError, match=r"no field 'b'; it has 'a'.*text_field="):
            field_of({"a": 1}, "b")
        with pytest.raises(FormatError, match="it is a list and no object"):
            field_of([1], "b")


def test_which_files_have_records() -> None:
    for name, ending in [
        ("a.CSV", ".csv"),
        ("a.jsonl.gz", ".jsonl"),
        ("b.json.zst", ".json"),
        ("c.tsv", ".tsv"),
    ]:
        assert format_of(name) == ending
    with pytest.raises(
        FormatError, match=r"a.txt: records are read from .csv, .tsv, .json, .jsonl.*unit='line'"
    ):
        format_of("a.txt")


def test_lines_of_json_end_with_a_line_feed_alone(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a":\r1}\r\n\r\n\n{"a": 2}')
    source = opened(tmp_path / "a.jsonl", newline="\r")
    assert rows_of(source) == [{"a": 1}, {"a": 2}]
    assert source.location(1).endswith("a.jsonl, line 4")
    assert strip_end(b"a\r\n", "\n") == b"a\r"
