"""What is told of Parquet, Arrow and NumPy files is what TableDataset gives."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace import ConfigError, FormatError, TableDataset
from headrace.inspecting import inspect
from tests.datasets.table.test_table import WRITERS, encoded, name_of, some_table, write
from tests.inspecting.opening import opened

pa = pytest.importorskip("pyarrow")


def test_columns_and_rows(tmp_path: Path) -> None:
    for number, kind in enumerate(WRITERS):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = write(folder / name_of(kind), some_table(), kind)
        report = inspect(path)
        with opened(report):
            assert report.stored == path.stat().st_size
        assert report.format == ("Parquet" if kind == "parquet" else "Arrow")
        assert [node.path for node in report.nodes] == ["", *some_table().schema.names]
        assert report.nodes[1].dtype == "int32"
        blocks = report.details["row groups" if kind == "parquet" else "record batches"]
        assert blocks == {"count": 6, "rows of each": 10}
        (access,) = report.access
        assert access.chunks == (0 if kind in ("arrow", "stream") else 1)


def test_images_classes_and_types_that_are_refused(tmp_path: Path) -> None:
    label = {"_type": "ClassLabel", "names": ["cat", "dog"]}
    noted = {"info": {"features": {"label": label, "image": {"_type": "Image"}}}}
    rows = {"image": [{"bytes": encoded(0), "path": None}] * 4, "label": [0, 1, 1, 1]}
    table = pa.table(rows).replace_schema_metadata({"huggingface": json.dumps(noted)})
    report = inspect(write(tmp_path / "a.parquet", table))
    assert str(report.opens_as).endswith("image_column='image', target_name='label')")
    assert report.classes == {"cat": 1, "dog": 3}
    assert report.classes_are == "values of 'label'"
    with opened(report):
        pass
    table = table.append_column("when", pa.array([0] * 4, pa.timestamp("us")))
    report = inspect(write(tmp_path / "b.parquet", table))
    assert any("'when' (timestamp[us])" in note for note in report.notes)
    assert report.fingerprint is None


def test_large_row_groups_are_advised_against(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.inspecting.tables._LARGE", 1000)
    (advice,) = inspect(write(tmp_path / "a.parquet", some_table())).advice
    assert advice.code.startswith("row_group_size=")


def test_arrays_of_numpy(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((30, 5), np.float32))
    np.savez(tmp_path / "b.npz", x=np.zeros((30, 5)), classes=np.zeros(3))
    report = inspect(tmp_path / "a.npy")
    with opened(report):
        assert (report.samples, report.samples_are) == (30, "rows of float32 [5]")
    report = inspect(tmp_path / "b.npz")
    assert (report.samples, len(report.nodes)) == (None, 3)
    assert "different numbers of rows" in report.notes[0]
    np.savez_compressed(tmp_path / "c.npz", x=np.zeros(3))
    with pytest.raises(FormatError, match="is compressed"):
        inspect(tmp_path / "c.npz")


def test_without_pyarrow_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", some_table())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for open_it in (TableDataset, inspect):
        with pytest.raises(ConfigError, match=r"pip install 'headrace\[arrow\]'"):
            open_it(path)
    np.save(tmp_path / "a.npy", np.zeros(3))
    assert len(TableDataset(tmp_path / "a.npy")) == 3
