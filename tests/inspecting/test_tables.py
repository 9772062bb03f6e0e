"""What is told of Parquet, Arrow and NumPy files is what TableDataset gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace import ConfigError, FormatError, TableDataset
from headrace.cli.main import main
from headrace.inspecting import inspect
from tests.datasets.table.test_table import WRITERS, encoded, name_of, some_table, write

pa = pytest.importorskip("pyarrow")


@pytest.mark.parametrize("kind", WRITERS)
def test_columns_and_rows(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / name_of(kind), some_table(), kind)
    report = inspect(path)
    with TableDataset(path) as dataset:
        assert (report.samples, report.fingerprint) == (len(dataset), dataset.fingerprint)
    assert (
        report.format == ("Parquet" if kind == "parquet" else "Arrow")
        and report.stored == path.stat().st_size
    )
    assert [node.path for node in report.nodes] == [
        "",
        *some_table().schema.names,
    ] and report.nodes[1].dtype == "int32"
    assert report.opens_as == f"headrace.TableDataset({str(path)!r})"
    blocks = report.details["row groups" if kind == "parquet" else "record batches"]
    assert blocks == {"count": 6, "rows of each": 10}
    (access,) = report.access
    assert access.chunks == (0 if kind in ("arrow", "stream") else 1)


def test_images_classes_and_types_that_are_refused(tmp_path: Path) -> None:
    noted = {
        "info": {
            "features": {
                "label": {"_type": "ClassLabel", "names": ["cat", "dog"]},
                "image": {"_type": "Image"},
            }
        }
    }
    rows = {"image": [{"bytes": encoded(0), "path": None}] * 4, "label": [0, 1, 1, 1]}
    table = pa.table(rows).replace_schema_metadata({"huggingface": json.dumps(noted)})
    path = write(tmp_path / "a.parquet", table)
    report = inspect(path)
    assert (
        report.opens_as
        == f"headrace.TableDataset({str(path)!r}, image_column='image', target_name='label')"
    )
    assert report.classes == {"cat": 1, "dog": 3} and report.classes_are == "values of 'label'"
    path = write(
        tmp_path / "b.parquet", table.append_column("when", pa.array([0] * 4, pa.timestamp("us")))
    )
    report = inspect(path)
    assert (
        "no tensor can hold 'when' (timestamp[us]): pass columns=[...] without it" in report.notes
        and report.fingerprint is None
    )


def test_large_row_groups_are_advised_against(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.inspecting.tables._LARGE", 1000)
    (advice,) = inspect(write(tmp_path / "a.parquet", some_table())).advice
    assert advice.code.startswith("row_group_size=") and "decodes its whole row group" in advice.why


def test_arrays_of_numpy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "a.npy", np.zeros((30, 5), np.float32))
    np.savez(tmp_path / "b.npz", x=np.zeros((30, 5)), classes=np.zeros(3))
    report = inspect(tmp_path / "a.npy")
    with TableDataset(tmp_path / "a.npy") as dataset:
        assert (report.samples, report.fingerprint, report.samples_are) == (
            30,
            dataset.fingerprint,
            "rows of float32 [5]",
        )
    report = inspect(tmp_path / "b.npz")
    assert (
        report.samples is None
        and "different numbers of rows" in report.notes[0]
        and len(report.nodes) == 3
    )
    np.savez_compressed(tmp_path / "c.npz", x=np.zeros(3))
    with pytest.raises(FormatError, match="is compressed"):
        inspect(tmp_path / "c.npz")
    assert main(["info", str(tmp_path / "a.npy")]) == 0
    assert "headrace.TableDataset(" in capsys.readouterr().out


def test_the_command_tells_of_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.parquet", some_table())
    assert main(["info", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert (
        "57 (rows of 12 columns)" in said
        and "a row at random" in said
        and "1 chunk decoded" in said
    )


def test_without_pyarrow_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", some_table())
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    for open_it in (TableDataset, inspect):
        with pytest.raises(
            ConfigError, match=r"need the package pyarrow: pip install 'headrace\[arrow\]'"
        ):
            open_it(path)
    np.save(tmp_path / "a.npy", np.zeros(3))
    assert len(TableDataset(tmp_path / "a.npy")) == 3
