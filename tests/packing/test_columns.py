"""Packs whose targets are dicts: what may be a column, other labels, and commands.

That targets are those of the source: test_round_trips.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import HDF5Dataset, ImageDataset, open_dataset, pack
from headrace.cli.main import main
from headrace.errors import ConfigError, FormatError, TargetExistsError
from headrace.storage.hdf5.packed import packed_info
from headrace.testing.contract import same
from tests.data.make import make_photos
from tests.packing.cases import COLUMNS, COUNT, Own, make_labels
from tests.packing.shared import samples_of

pytestmark = pytest.mark.quick_every(2)

ZARR: dict[str, Any] = {"shard_size": 3000, "format": "zarr"}


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    photos = make_photos(tmp_path / "photos", per_class=COUNT // 3, size=(32, 24))
    make_labels(photos, tmp_path / "labels.jsonl")
    return tmp_path


def labelled(folder: Path, **options: Any) -> ImageDataset:
    options = {"target_name": COLUMNS, "targets": folder / "labels.jsonl", **options}
    return ImageDataset(folder / "photos", **options)


def test_columns_keep_types_and_classes(trees: Path) -> None:
    with labelled(trees) as source:
        out = pack(source, trees / "out.h5")
    with ImageDataset(out) as packed:
        target = packed[1][1]
        assert [type(target[name]) for name in COLUMNS[:3]] == [int, float, bool]
        assert packed.column_classes == {"kind": ["ash", "elm", "oak"], "seen in": ["june", "may"]}
        heights = packed.label_columns["height/m"]
        assert heights.tolist() == [number / 4 for number in range(COUNT)]
    with ImageDataset(out, targets=None) as packed:
        assert packed[0][1] is None


@pytest.mark.parametrize("how", [{}, {"shard_size": 30}, {"shard_size": 30, "format": "zarr"}])
def test_compounds_of_hdf5_are_columns(how: dict[str, Any], tmp_path: Path) -> None:
    rows = np.zeros(COUNT, [("speed", "<f4"), ("gear", "u1"), ("at", "<i2", (2,))])
    rows["speed"] = np.arange(COUNT) / 4
    rows["gear"] = np.arange(COUNT) % 5
    rows["at"] = np.arange(2 * COUNT).reshape(COUNT, 2)
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["data"] = np.arange(COUNT)
        file["drive"] = rows
    with HDF5Dataset(tmp_path / "in.h5", "data", target_name="drive") as source:
        assert source[5][1]["gear"] == 0 and source[7][1]["speed"] == 1.75
        with open_dataset(pack(source, tmp_path / "out", **how), target_name="targets") as packed:
            assert same(samples_of(packed), samples_of(source))
            assert packed[1][1].keys() == {"speed", "gear", "at"}


def test_one_column_keeps_the_old_layout(trees: Path) -> None:
    with labelled(trees, target_name="kind") as source:
        info = packed_info(pack(source, trees / "out.h5"))
    assert info is not None and (info.version, info.target_columns) == (1, None)
    assert info.classes == ["ash", "elm", "oak"]


@pytest.mark.parametrize("how", [{"shard_size": 3000}, ZARR])
def test_other_labels_are_another_plan(how: dict[str, Any], trees: Path) -> None:
    with labelled(trees) as source:
        pack(source, trees / "out", **how)
    text = (trees / "labels.jsonl").read_text()
    for other in (text.replace("0.25", "0.75"), text.replace('"elm"', '"fir"')):
        (trees / "labels.jsonl").write_text(other)
        with (
            labelled(trees) as source,
            pytest.raises(TargetExistsError, match=r"annotations|target_columns"),
        ):
            pack(source, trees / "out", **how)


@pytest.mark.parametrize("values", [["none", {"a": 1}], [[1], [1, 2]]], ids=["kinds", "lengths"])
def test_a_column_that_is_no_array_is_named(values: list[Any], trees: Path) -> None:
    rows = [json.loads(line) for line in (trees / "labels.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "odd": values[number % 2]}) for number, row in enumerate(rows)]
    (trees / "labels.jsonl").write_text("\n".join(lines))
    with (
        labelled(trees, target_name=["kind", "odd"]) as source,
        pytest.raises(ConfigError, match=r"'odd' .*target_name="),
    ):
        pack(source, trees / "out.h5")
    assert not (trees / "out.h5").exists()


def test_targets_that_are_no_columns(tmp_path: Path) -> None:
    class Samples(Own):
        def __init__(self, target: Any, others: Any = None) -> None:
            self.target = target
            self.others = others or target

        def __getitem__(self, index: int) -> Any:
            return np.zeros(2), self.target if index < 5 else self.others

    rows: list[tuple[Any, Any, str]] = [
        ({"a": 1}, {"b": 1}, "target of sample 5"),
        ({"a": 1, "name": "oak"}, None, "target of sample 0, 'name'"),
        ({"a": {"b": 1}}, None, "column 'a'"),
        ({0: 1, 1: 2}, None, "target of sample 0.* 0 is none"),
        ({"": 1}, None, "target of sample 0.* '' is none"),
    ]
    for target, others, message in rows:
        with pytest.raises(ConfigError, match=message):
            pack(Samples(target, others), tmp_path / "out.h5")


def test_packs_of_other_columns_are_no_dataset(trees: Path) -> None:
    for chosen in ("kind", "sound"):
        with labelled(trees, target_name=["height/m", chosen]) as source:
            pack(source, trees / f"{chosen}.h5")
    with pytest.raises(FormatError, match="can't be one dataset"):
        ImageDataset(str(trees / "*.h5"))


def test_commands(trees: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(trees / "out.h5")
    options = ["--targets", str(trees / "labels.jsonl"), "--overwrite", "--no-progress"]
    for names in (["--target-name", "kind", "--target-name", "sound"], []):
        assert main(["pack", str(trees / "photos"), out, *options, *names]) == 0
        with ImageDataset(out) as packed:
            assert set(packed[0][1]) == ({"kind", "sound"} if names else {*COLUMNS})
    with labelled(trees) as source:
        store = pack(source, trees / "out", **ZARR)
    for path in (out, str(store)):
        capsys.readouterr()
        assert main(["info", path]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "kind (3 classes), height/m, sound, seen in (2 classes)" in shown
    assert main(["preview", out, "-o", str(trees / "sheet.png")]) == 0
