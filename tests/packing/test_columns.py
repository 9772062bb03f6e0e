"""Packs whose targets are dicts: what is opened is what was packed, and other programs read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from torch.utils.data import Dataset

from headrace import HDF5Dataset, ImageDataset, TableDataset, create_dataloader, open_dataset, pack
from headrace.cli.main import main
from headrace.errors import ConfigError, FormatError, TargetExistsError
from headrace.packing import verify
from headrace.storage.hdf5.packed import packed_info
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.data.make import make_photos
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.quick_every(6)

COUNT, SHARD = 24, 6000
MODES = ("lazy", "eager", "cached", "streaming")
WAYS: dict[str, dict[str, Any]] = {
    "file": {},
    "parts": {"shard_size": SHARD},
    "zarr": {"shard_size": SHARD, "format": "zarr"},
    "jpeg": {"store": "jpeg", "max_size": 24},
    "decoded": {"store": "decoded"},
    "decoded parts": {"store": "decoded", "shard_size": 2000, "compression": "gzip", "chunks": 2},
    "decoded zarr": {"store": "decoded", "shard_size": 2000, "format": "zarr"},
}


def make_labels(folder: Path) -> Path:
    """Writes images and labels.jsonl: texts, integers, floats, truth values, several labels of
    one sample, and a column of no targets.
    """
    photos = make_photos(folder / "photos", per_class=COUNT // 3, size=(20, 30))
    names = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.*"))
    rows = [
        {
            "file": name,
            "kind": ("oak", "ash", "elm")[number % 3],
            "age": number - 3,
            "height/m": number / 4,
            "sound": number % 2 == 0,
            "seen in": ["may"] * (number % 2) + ["june"] * (number % 3 > 0),
            "patient": f"p{number % 4}",
        }
        for number, name in enumerate(names)
    ]
    (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


CHOSEN = ("kind", "height/m", "age", "sound", "seen in")


def labelled(folder: Path, **options: Any) -> ImageDataset:
    return ImageDataset(
        folder / "photos", targets=folder / "labels.jsonl", **{"target_name": CHOSEN, **options}
    )


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_labels(tmp_path_factory.mktemp("trees"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_images_have_the_targets_of_the_source(
    trees: Path, way: str, mode: Any, tmp_path: Path
) -> None:
    with labelled(trees, image_size=16) as dataset:
        out = pack(dataset, tmp_path / "out", **WAYS[way])
        assert verify(out).ok
        with ImageDataset(out, image_size=16, loading_mode=mode, return_index=True) as packed:
            opened = sorted(packed, key=lambda sample: sample[-1])
            assert len(packed) == COUNT and packed.fingerprint == dataset.fingerprint
            for number, (image, target, _) in enumerate(opened):
                assert list(target) == list(CHOSEN) and same(target, dataset[number][1])
                assert way == "jpeg" or same(image, dataset[number][0])
            assert {
                name: type(value) for name, value in opened[0][1].items() if name != "seen in"
            } == {
                "kind": int,
                "height/m": float,
                "age": int,
                "sound": bool,
            }
            assert packed.classes == dataset.classes == []
            assert packed.column_classes == {
                "kind": ["ash", "elm", "oak"],
                "seen in": ["june", "may"],
            }


class Own(Dataset[Any]):
    """Arrays, some of several lengths, with targets that are dicts of numbers and arrays."""

    def __init__(self, is_ragged: bool = False) -> None:
        self.is_ragged = is_ragged

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
        length = index % 3 if self.is_ragged else 2
        return np.full((length, 2), index, np.int16), {
            "turn": index / 2,
            "kind": index % 3,
            "place": np.arange(2, dtype=np.int8) + index,
        }


@pytest.mark.parametrize("way", ["file", "parts", "zarr", "ragged"])
def test_arrays_have_the_targets_of_the_source(way: str, tmp_path: Path) -> None:
    own = Own(way == "ragged")
    out = pack(
        own, tmp_path / "out", **{"shard_size": 40, **WAYS.get(way, {})} if way != "file" else {}
    )
    assert verify(out).ok
    for again in ("again", "and again"):
        with open_dataset(out, target_name="targets") as packed:
            for (row, target), (wanted, of_source) in zip(
                packed, map(own.__getitem__, range(COUNT)), strict=True
            ):
                assert np.array_equal(row, wanted) and same(target, of_source)
            # by name
            assert [type(value) for value in packed[3][1].values()] == [int, np.ndarray, float]
            out = pack(packed, tmp_path / again)
    with HDF5Dataset(out) as alone:
        assert np.array_equal(alone[5], own[5][0])


def test_compounds_of_hdf5_are_packed(tmp_path: Path) -> None:
    rows = np.zeros(COUNT, [("speed", "<f4"), ("gear", "u1"), ("at", "<i2", (2,))])
    rows["speed"], rows["gear"], rows["at"] = (
        np.arange(COUNT) / 4,
        np.arange(COUNT) % 5,
        np.arange(2 * COUNT).reshape(COUNT, 2),
    )
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["data"], file["drive"] = np.arange(COUNT), rows
    with HDF5Dataset(tmp_path / "in.h5", "data", target_name="drive") as dataset:
        assert dataset[5][1]["gear"] == 0 and dataset[7][1]["speed"] == 1.75
        for number, how in enumerate(
            ({}, {"shard_size": 30}, {"shard_size": 30, "format": "zarr"})
        ):
            with open_dataset(
                pack(dataset, tmp_path / f"out{number}", **how), target_name="targets"
            ) as packed:
                assert same(list(packed), list(dataset)) and packed[1][1].keys() == {
                    "speed",
                    "gear",
                    "at",
                }


def test_structs_of_a_table_are_packed(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    drive = [{"speed": number / 4, "gear": number % 5} for number in range(COUNT)]
    parquet.write_table(
        pyarrow.table({"pixel": range(COUNT), "drive": drive}), tmp_path / "in.parquet"
    )
    with TableDataset(tmp_path / "in.parquet", "pixel", target_name="drive") as dataset:
        out = pack(dataset, tmp_path / "out.h5")
        with HDF5Dataset(out, target_name="targets") as packed:
            assert [target for _, target in packed] == drive == [target for _, target in dataset]


def test_views_and_packs_are_packed_again(trees: Path, tmp_path: Path) -> None:
    chosen = [7, 2, 9]
    with labelled(trees) as dataset:
        out = pack(dataset.subset(chosen), tmp_path / "view.h5")
        wanted = [dataset[index][1] for index in chosen]
    for number, how in enumerate(
        ({}, {"shard_size": 2000}, {"shard_size": 2000, "format": "zarr"})
    ):
        with ImageDataset(out) as packed:
            assert same([target for _, target in packed], wanted)
            classes = packed.column_classes
            assert packed.label_columns.keys() == {*CHOSEN} and packed.label_columns[
                "age"
            ].tolist() == [4, -1, 6]
            out = pack(packed, tmp_path / f"again{number}", **how)
    with ImageDataset(out) as packed:
        assert packed.column_classes == classes and same([target for _, target in packed], wanted)
    with ImageDataset(out, targets=None) as packed:
        assert packed[0][1] is None


@pytest.mark.parametrize("how", [{}, {"shard_size": SHARD, "format": "zarr"}])
def test_batches_and_splits_are_those_of_the_source(
    trees: Path, how: dict[str, Any], tmp_path: Path
) -> None:
    with (
        labelled(trees, image_size=16) as dataset,
        ImageDataset(pack(dataset, tmp_path / "out", **how), image_size=16) as packed,
    ):
        ours, theirs = (
            list(create_dataloader(one, batch_size=5, seed=3, num_workers=2))
            for one in (packed, dataset)
        )
        assert same(ours, theirs) and set(ours[0][1]) == {*CHOSEN}
        train, held_out = packed.split(0.5, stratify="kind", seed=1)
        of_source = dataset.split(0.5, stratify="kind", seed=1)
        assert [
            same(list(one), list(other))
            for one, other in zip((train, held_out), of_source, strict=True)
        ] == [True, True]


def test_h5py_and_zarr_read_the_columns(trees: Path, tmp_path: Path) -> None:
    with labelled(trees) as dataset:
        ages = [dataset[index][1]["age"] for index in range(COUNT)]
        with h5py.File(pack(dataset, tmp_path / "out.h5")) as file:
            said = json.loads(file.attrs["headrace"])
            assert [name for name, _ in said["target_columns"]] == list(CHOSEN) and said[
                "version"
            ] == 7
            assert file["targets_2"][:].tolist() == ages and "targets" not in file
        group = zarr.open_group(
            pack(dataset, tmp_path / "out", format="zarr", shard_size=SHARD) / "data.zarr", mode="r"
        )
        assert group["targets_2"][:].tolist() == ages and group["targets_4"].shape == (COUNT, 2)


def test_other_packs_keep_their_layout(trees: Path, tmp_path: Path) -> None:
    with labelled(trees, target_name="kind") as dataset:
        info = packed_info(str(pack(dataset, tmp_path / "out.h5")))
        assert (
            info is not None
            and info.version == 1
            and info.target_columns is None
            and info.classes == ["ash", "elm", "oak"]
        )


@pytest.mark.parametrize("how", [{}, {"shard_size": SHARD, "format": "zarr"}])
def test_through_a_server(trees: Path, how: dict[str, Any], tmp_path: Path) -> None:
    with labelled(trees, image_size=16) as dataset:
        name = "manifest.json" if pack(dataset, tmp_path / "out", **how).is_dir() else ""
        path = tmp_path / "out" if name else (tmp_path / "out").rename(tmp_path / "out.h5")
        with RangeServer(path if name else tmp_path) as server:
            options: dict[str, Any] = {"image_size": 16, "cache_dir": tmp_path / "cache"}
            with ImageDataset(f"{server.url}/{name or path.name}", **options) as packed:
                assert same(list(packed), list(dataset))


@pytest.mark.parametrize("how", [{}, {"format": "zarr"}])
def test_other_labels_are_another_plan(how: dict[str, Any], tmp_path: Path) -> None:
    make_labels(tmp_path)
    with labelled(tmp_path) as dataset:
        pack(dataset, tmp_path / "out", shard_size=SHARD, **how)
    text = (tmp_path / "labels.jsonl").read_text()
    for other in (text.replace('"age": 5', '"age": 50'), text.replace('"elm"', '"fir"')):
        (tmp_path / "labels.jsonl").write_text(other)
        with (
            labelled(tmp_path) as dataset,
            pytest.raises(TargetExistsError, match=r"annotations|target_columns"),
        ):
            pack(dataset, tmp_path / "out", shard_size=SHARD, **how)


@pytest.mark.parametrize("value", [[None, {"a": 1}], [[1], [1, 2]]], ids=["kinds", "lengths"])
def test_a_column_that_is_no_array_is_named(value: list[Any], tmp_path: Path) -> None:
    make_labels(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    lines = [
        json.dumps({**row, "odd": value[number % 2] or "none"}) for number, row in enumerate(rows)
    ]
    (tmp_path / "labels.jsonl").write_text("\n".join(lines))
    with (
        labelled(tmp_path, target_name=["kind", "odd"]) as dataset,
        pytest.raises(ConfigError, match=r"the column 'odd' .*target_name="),
    ):
        pack(dataset, tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()


def test_targets_that_are_unlike_are_an_error(tmp_path: Path) -> None:
    class Unlike(Own):
        def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
            return np.zeros(2), {"a": 1} if index < 5 else {"b": 1}

    class Texts(Own):
        def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
            return np.zeros(2), {"a": 1, "name": "oak"}

    class Numbered(Own):
        def __getitem__(self, index: int) -> tuple[Any, dict[Any, Any]]:
            return np.zeros(2), {0: 1, 1: 2}

    class Unnamed(Own):
        def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
            return np.zeros(2), {"": 1}

    class Nested(Own):
        def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
            return np.zeros(2), {"a": {"b": 1}}

    for own, message in (
        (Unlike(), "target of sample 5 can't be packed with the others"),
        (Texts(), "target of sample 0, 'name', can't be packed"),
        (Nested(), "the column 'a' of these targets can't be packed"),
        (
            Numbered(),
            "target of sample 0 can't be packed: names in dicts must be texts .* 0 is none",
        ),
        (
            Unnamed(),
            "target of sample 0 can't be packed: names in dicts must be texts .* '' is none",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            pack(own, tmp_path / "out.h5")


def test_packs_of_other_columns_are_no_dataset(trees: Path, tmp_path: Path) -> None:
    for number, chosen in enumerate((["kind", "age"], ["kind", "sound"])):
        with labelled(trees, target_name=chosen) as dataset:
            pack(dataset, tmp_path / f"{number}.h5")
    with pytest.raises(FormatError, match="can't be one dataset"):
        ImageDataset(str(tmp_path / "*.h5"))


def test_info_names_the_columns(
    trees: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with labelled(trees) as dataset:
        for out in (
            pack(dataset, tmp_path / "out.h5"),
            pack(dataset, tmp_path / "out", shard_size=SHARD, format="zarr"),
        ):
            assert main(["info", str(out)]) == 0
            assert (
                "targets kind (3 classes), height/m, age, sound, seen in (2 classes)"
                in " ".join(capsys.readouterr().out.split())
            )


def test_the_command_packs_columns(trees: Path, tmp_path: Path) -> None:
    command = [
        "pack",
        str(trees / "photos"),
        "--targets",
        str(trees / "labels.jsonl"),
        "--no-progress",
    ]
    for names, wanted in ((["kind", "age"], {"kind", "age"}), ([], {*CHOSEN, "patient"})):
        out = tmp_path / f"{len(names)}.h5"
        assert (
            main(
                [*command, str(out), *(word for name in names for word in ("--target-name", name))]
            )
            == 0
        )
        with ImageDataset(out) as packed:
            assert set(packed[0][1]) == wanted
        assert main(["preview", str(out), "-o", str(tmp_path / f"{len(names)}.png")]) == 0


class TestContract(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, trees: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        out = tmp_path_factory.getbasetemp() / "contract-columns"
        with labelled(trees) as dataset:
            self.path = out if out.exists() else Path(pack(dataset, out, shard_size=SHARD))

    def make(self, **options: Any) -> ImageDataset:
        return ImageDataset(self.path, image_size=8, **options)
