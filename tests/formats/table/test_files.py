"""Files that are no tables, or can't be read, are errors at opening."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import AccessError, FormatError, TableDataset
from headrace.formats.table import files

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def test_tables_without_columns_are_errors(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2, 3]}).select([])
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(FormatError, match=name):
            TableDataset(tmp_path / name)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", path)

    (tmp_path / "rows").write_bytes(b"PAR1")
    monkeypatch.setattr(files, "open", refused, raising=False)
    with pytest.raises(AccessError, match="rows"):
        TableDataset(tmp_path / "rows")
