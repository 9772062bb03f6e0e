"""Records are found where Python's own readers of CSV and JSON find them."""

from __future__ import annotations

import csv
import io
import itertools
import json
import multiprocessing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings, strategies as st

from headrace.errors import FormatError
from headrace.formats.text import index, records
from headrace.formats.text.records import csv_row, field_of, json_places, json_record
from headrace.formats.text.source import LinesSource


def opened(path: Path) -> LinesSource:
    return LinesSource(path, "record")


def rows_of(source: LinesSource) -> list[Any]:
    found = list(map(source.row, range(len(source)), source.read(range(len(source)))))
    source.close()
    return found


class TestCsv:
    @settings(max_examples=60)
    @given(text=st.text(st.sampled_from('a,"\r\n '), max_size=25), piece=st.integers(1, 9))
    @example(text='"a\n""b""\n",c\n\nd,"e', piece=3)
    @example(text='a"b\n,c"\n', piece=3)
    @example(text='a, "b\nc"\n', piece=2)
    @example(text='""""\r\n""\r\n', piece=1)
    def test_as_pythons_reader_has_it(self, text: str, piece: int, tmp_path_factory: Any) -> None:
        """Fields too, or an error where it has one."""
        path = tmp_path_factory.getbasetemp() / "generated.csv"
        path.write_bytes(("x,y\n" + text).encode())
        expected = found = None
        try:
            reader = csv.reader(io.StringIO(text, newline=""), strict=True)
            expected = [row for row in reader if row]
        except csv.Error:
            expected = None
        try:
            with mock.patch.object(index, "PIECE", piece):
                source = opened(path)
                rows = source.read(range(len(source)))
                found = [csv_row(record.decode(), ",") for record in rows]
        except FormatError:
            found = None
        assert found == expected

    def test_many_records_that_only_pythons_reader_understands(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("headrace.formats.text.index.PIECE", 3)
        inches = "".join(f'{n},{n}" disk\n' for n in range(3, 20))
        (tmp_path / "a.csv").write_text(f'id,text\n\n1,5" disk\n2,"a\n\nb"\n\n{inches}')
        expected = [{"id": "1", "text": '5" disk'}, {"id": "2", "text": "a\n\nb"}]
        expected += [{"id": str(n), "text": f'{n}" disk'} for n in range(3, 20)]
        assert rows_of(opened(tmp_path / "a.csv")) == expected

    def test_what_is_none(self, tmp_path: Path) -> None:
        for content, said in (
            (b'id,text\n1,"a\n2,b\n', "never closed: .* byte 8 "),
            (b"", "empty"),
            (b"\n\n", "empty"),
            (b"caf\xe9,text\n1,2\n", "encoding="),
        ):
            (tmp_path / "a.csv").write_bytes(content)
            with pytest.raises(FormatError, match=f"a.csv.*{said}"):
                opened(tmp_path / "a.csv")
        with pytest.raises(FormatError, match="2 records"):
            csv_row("a\nb", ",")

    def test_a_field_of_any_length(self, tmp_path: Path) -> None:
        long, before = "x\n" * 100_000, csv.field_size_limit()
        with open(tmp_path / "a.csv", "w", newline="") as file:
            csv.writer(file).writerows([["text"], [long], ["short"], ['5" disk'], [long]])
        texts = [row["text"] for row in rows_of(opened(tmp_path / "a.csv"))]
        assert texts == [long, "short", '5" disk', long]
        assert csv.field_size_limit() == before

    def test_a_child_while_its_parent_reads(self) -> None:
        """The lock that a thread of the parent holds is not the child's."""

        def read() -> None:
            assert csv_row("a" * 200_000 + ",b", ",")[1] == "b"

        with records._any_field():
            child = multiprocessing.get_context("fork").Process(target=read)
            child.start()
        child.join(10)
        exit_code = child.exitcode
        child.kill()
        child.join()
        assert exit_code == 0


plain_values: Any = st.none() | st.integers() | st.text(max_size=4)
values: Any = (
    plain_values
    | st.lists(plain_values, max_size=2)
    | st.dictionaries(st.text(max_size=2), plain_values, max_size=2)
)


class TestJson:
    @settings(max_examples=40)
    @given(
        given=st.lists(values, max_size=4),
        indent=st.sampled_from([None, 1]),
        ascii_only=st.booleans(),
        space=st.sampled_from(["", " \r\n\t"]),
    )
    def test_the_elements_of_a_list(
        self, given: list[Any], indent: Any, ascii_only: bool, space: str
    ) -> None:
        text = space + json.dumps(given, indent=indent, ensure_ascii=ascii_only) + space
        data = text.encode("utf-8", "surrogatepass")
        places = itertools.pairwise(json_places(data).tolist())
        parts = [data[start:end].decode("utf-8", "surrogatepass") for start, end in places]
        assert [json_record(part.rstrip(", \r\n\t")) for part in parts] == given

    def test_what_is_none(self) -> None:
        for data, said in (
            (b"", "no list of records"),
            (b'{"text": 1}', "jsonl"),
            (b"[", "record 1 at byte 1 "),
            (b"[1, 2", "byte 5, after 2 records"),
            (b"[1 2]", "byte 3, after 1 records"),
            (b"[1, oops]", "record 2 at byte 4 "),
            (b"[1,]", "record 2 at byte 3 "),
            (b"[,1]", "record 1"),
            (b"[1] [2]", "byte 4"),
            (b"[" * 100_000, "record 1 at byte 1 "),
            (b'["\xff', "record 1"),
            (b"[" + b"9" * 5000 + b"]", "record 1"),
        ):
            with pytest.raises(FormatError, match=said):
                json_places(data)
        for text in ("", "  ", "{", "[" * 100_000, "{} {}", "9" * 5000, "nul"):
            with pytest.raises(FormatError, match=r"not JSON|blank"):
                json_record(text)
        for record, said in (({"a": 1}, "'a'"), ([1], "list")):
            with pytest.raises(FormatError, match=said):
                field_of(record, "b")

    def test_lines_of_json_end_with_a_line_feed_alone(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_bytes(b'{"a":\r1}\r\n\r\n\n{"a": 2}')
        source = opened(tmp_path / "a.jsonl")
        assert source.location(1).endswith("a.jsonl, record 2")
        assert rows_of(source) == [{"a": 1}, {"a": 2}]
