"""ZarrDataset: rows, patches of a volume, labels, and stores that are not as they should be."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings, strategies as st

from headrace import (
    ConfigError,
    DataNotFoundError,
    FileChangedError,
    FormatError,
    MissingNameError,
    SampleError,
    ZarrDataset,
    open_dataset,
)
from headrace.formats.arrays.volumes import PatchGrid
from headrace.testing.contract import same

SHAPE = (9, 11, 13)
VOLUME = np.random.default_rng(1).integers(-500, 500, (2, *SHAPE)).astype("i2")
LABELS = np.random.default_rng(2).integers(0, 5, SHAPE).astype("u1")
ROWS = np.arange(24, dtype="i4").reshape(8, 3)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    root.create_array("volume", data=VOLUME, chunks=(1, 4, 5, 6), shards=(2, 8, 10, 12))
    root.create_array("labels", data=LABELS, chunks=(4, 4, 4))
    return tmp_path / "a.zarr"


def rows_of(dataset: Any) -> Any:
    return np.stack([np.asarray(dataset[index]) for index in range(len(dataset))])


# -- patches


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_corners_follow_from_indices(data: Any) -> None:
    axes = data.draw(st.integers(1, 3))
    extents = st.lists(st.integers(1, 12), min_size=axes, max_size=axes)
    shape, patch, stride = (data.draw(extents) for _ in range(3))
    edges = data.draw(st.sampled_from(["drop", "pad", "shift"]))
    grid = PatchGrid(shape, patch, stride, edges)
    along = []
    for size, extent, step in zip(shape, patch, stride, strict=True):
        starts = [start for start in range(0, size, step) if start + extent <= size]
        if edges == "pad":
            starts = [0]
            while starts[-1] + extent < size and starts[-1] + step < size:
                starts.append(starts[-1] + step)
        elif edges == "shift" and starts and starts[-1] + extent < size:
            starts.append(size - extent)
        along.append(starts)
    assert [grid.corner(index) for index in range(len(grid))] == [*itertools.product(*along)]


@pytest.mark.parametrize(
    ("edges", "pad", "direct"),
    [("drop", "reflect", True), ("pad", "reflect", True), ("shift", "edge", False),
     pytest.param("pad", "edge", True, marks=pytest.mark.slow),
     pytest.param("pad", "constant", False, marks=pytest.mark.slow)],
)  # fmt: skip
def test_patches_are_the_parts_of_the_volume(
    store: Path, make_loader: Any, edges: Any, pad: Any, direct: bool
) -> None:
    options: dict[str, Any] = {"patch_shape": (4, 4, 5), "stride": 3, "edges": edges, "pad": pad}
    options |= {"target_name": "labels", "direct": direct}
    dataset = ZarrDataset(store, "volume", **options)
    reach = [(0, 12)] * 3
    volume, labels = np.pad(VOLUME, [(0, 0), *reach], mode=pad), np.pad(LABELS, reach, mode=pad)
    assert len(dataset) == (2 * 3 * 3 if edges == "drop" else 3 * 4 * 4)
    for index in range(len(dataset)):
        z, y, x = dataset.corner_of(index)
        part = np.s_[..., z : z + 4, y : y + 4, x : x + 5]
        expected = torch.from_numpy(volume[part].copy()), torch.from_numpy(labels[part].copy())
        assert same(dataset[index], expected)
    for shuffle in (False, "block"):
        loader = make_loader(dataset, batch_size=5, shuffle=shuffle, num_workers=0, seed=4)
        order = dataset.epoch_order(shuffle, 4, 0, 5)[np.arange(len(dataset))]
        found = torch.cat([patches for patches, _ in loader])
        assert torch.equal(found, torch.stack([dataset[int(index)][0] for index in order]))


def test_patches_larger_than_the_volume(store: Path) -> None:
    for pad in ("reflect", "edge", "constant"):
        options: dict[str, Any] = {"patch_shape": (40, 12, 5), "edges": "pad", "pad": pad}
        dataset = ZarrDataset(store, "labels", **options)
        padded = np.pad(LABELS, [(0, 31), (0, 1), (0, 12)], mode=pad)  # type: ignore[call-overload]
        assert len(dataset) == 3
        for index in range(3):
            x = dataset.corner_of(index)[2]
            assert np.array_equal(dataset[index], padded[:, :, x : x + 5]), pad


def test_constant_padding_is_the_fill_value(tmp_path: Path) -> None:
    expected = np.full((8, 8), -7.5, "f4")
    expected[:4, :4] = 1
    padded: dict[str, Any] = {"patch_shape": (4, 4), "edges": "pad", "pad": "constant"}
    for direct, version in ((True, 2), (False, 3), (True, 3)):
        options: dict[str, Any] = {"fill_value": -7.5, "zarr_format": version, "overwrite": True}
        path = tmp_path / "a.zarr"
        zarr.create_array(path, shape=(5, 5), chunks=(2, 2), dtype="f4", **options)[:4, :4] = 1
        found = rows_of(ZarrDataset(path, direct=direct, **padded)).reshape(2, 2, 4, 4)
        assert np.array_equal(found.transpose(0, 2, 1, 3).reshape(8, 8), expected)


def test_patches_of_whole_axes_and_of_boxes(store: Path) -> None:
    dataset = ZarrDataset(store, "volume", patch_shape=(1, -1, -1))
    assert len(dataset) == 9 and torch.equal(dataset[4], torch.from_numpy(VOLUME[:, 4:5]))
    boxes = [((1, 1, 1), (3, 5, 3)), ((6, 7, 8), (9, 9, 10))]
    dataset = ZarrDataset(store, "volume", patch_shape=(2, 2, 2), boxes=boxes)
    corners = [dataset.corner_of(i) for i in range(len(dataset))]
    assert corners == [(1, 1, 1), (1, 3, 1), (6, 7, 8)]
    assert torch.equal(dataset[1], torch.from_numpy(VOLUME[:, 1:3, 3:5, 1:3]))
    assert "patch 1 at [1, 3, 1]" in dataset.source_of(1)


def test_one_extent_means_all_axes_of_space(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    for shape, expected in (((30,), (4,)), ((9, 11), (4, 4)), ((2, 3, 9, 11, 13), (2, 3, 4, 4, 4))):
        root.create_array("plain", shape=shape, dtype="u1", overwrite=True)
        assert ZarrDataset(tmp_path / "a.zarr", "plain", patch_shape=4)[0].shape == expected
    named = np.random.default_rng(1).integers(0, 99, (9, 11, 4))
    root.create_array("named", data=named, dimension_names=["Y", "x", "channel"])
    dataset = ZarrDataset(tmp_path / "a.zarr", "named", patch_shape=np.int64(5), stride=np.int64(3))
    assert len(dataset) == 2 * 3 and dataset[0].shape == (5, 5, 4)
    assert np.array_equal(dataset[4], named[3:8, 3:8])


@pytest.mark.parametrize("mode", ["lazy", "streaming"])
def test_patches_of_several_volumes(tmp_path: Path, make_loader: Any, mode: str) -> None:
    options: dict[str, Any] = {"patch_shape": 4, "stride": 3, "edges": "shift"}
    options |= {"target_name": "labels", "progress": False}
    expected, alone = [], []
    for number in range(3):
        volume = np.random.default_rng(number).integers(0, 99, (2, 8 + 2 * number, 9, 10))
        path = tmp_path / f"{number}.zarr"
        root = zarr.open_group(path, mode="w", zarr_format=2 + number % 2)  # type: ignore[arg-type]
        root.create_array("raw", data=volume.astype("i2"), chunks=(1, 4, 4, 4))
        root.create_array("labels", data=(volume[0] % 5).astype("u1"), chunks=(4, 4, 4))
        alone.append(ZarrDataset(path, "raw", **options))
        corners = range(len(alone[-1]))
        expected += [(number, alone[-1].corner_of(i), alone[-1][i]) for i in corners]
    dataset = ZarrDataset(str(tmp_path / "*.zarr"), "raw", loading_mode=mode, **options)
    assert len(dataset) == len(expected)
    if mode == "lazy":
        for index, (number, corner, sample) in enumerate(expected):
            assert (dataset.volume_of(index), dataset.corner_of(index)) == (number, corner)
            assert same(dataset[index], sample)
    assert f"2.zarr, raw, patch {len(alone[2]) - 1} at" in dataset.source_of(-1)
    loader = make_loader(dataset, batch_size=7, shuffle="block", num_workers=0, seed=3)
    seen = sorted(patch.numpy().tobytes() for batch, _ in loader for patch in batch)
    assert seen == sorted(patch.numpy().tobytes() for _, _, (patch, _) in expected)


def test_volumes_that_are_of_different_kinds(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.zarr" for number in range(3)]
    for path, (dtype, channels) in zip(paths, (("i2", 2), ("i2", 3), ("i4", 2)), strict=True):
        zarr.create_array(path, shape=(channels, 8, 8, 8), dtype=dtype)
    for pair, named in (
        (paths[:2], r"int16 \[3, 4, 4, 4\] here, and of int16 \[2, 4, 4, 4\]"),
        (paths[::2], r"int32 \[2, 4, 4, 4\] here"),
    ):
        with pytest.raises(FormatError, match=named):
            ZarrDataset(pair, patch_shape=4)
    with pytest.raises(ConfigError, match=r"boxes.* 2 stores"):
        ZarrDataset(paths[:2], patch_shape=4, boxes=[((0, 0, 0), (4, 4, 4))])
    with pytest.raises(ConfigError, match=r"2\.zarr.*\[9, 9, 9\]"):
        ZarrDataset(paths[2:], patch_shape=9)


def test_arguments_that_make_no_sense(store: Path) -> None:
    patch: dict[str, Any] = {"patch_shape": (4, 4, 5)}
    boxes = [((0, 0, 0), (3, 9, 9)), ((0, 0, 0), (9, 3, 9))]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"patch_shape": (4, 4, 5, 2, 2)}, r"5 .*\[2, 9, 11, 13\]"),
        ({"patch_shape": (40, 4, 5)}, r"a\.zarr: 'volume'.*\[40, 4, 5\].*along 0"),
        ({"patch_shape": (40, 40, 5), "edges": "shift"}, r"\[9, 11, 13\].*along 0, 1"),
        ({"patch_shape": 4, "boxes": boxes}, "boxes"),
        ({"patch_shape": 2, "boxes": [((5, 5, 5), (9, 12, 9))]}, r"\[5, 5, 5\] to \[9, 12, 9\]"),
        ({"patch_shape": 64}, r"\[64, 64, 64\]"),
        ({"patch_shape": 0}, "patch_shape"),
        ({"patch_shape": (4, 0, 5)}, r"patch_shape=\[4, 0, 5\]"),
        ({**patch, "stride": (1, 1)}, r"stride=\[1, 1\]"),
        ({**patch, "edges": "wrap"}, "'wrap'"),
        ({**patch, "pad": "wrap"}, "pad"),
        ({"patch_shape": (2, 4, 4, 5), "target_name": "labels"}, r"'labels'.*\[9, 11, 13\]"),
        *(({name: value}, f"{name} .*patch_shape") for name, value in
          (("stride", 3), ("edges", "shift"), ("edges", "nonsense"), ("pad", "edge"))),
        ({"missing": "zero"}, "missing"),
        ({"dataset_name": []}, "dataset_name"),
        ({"dataset_name": [1]}, "dataset_name"),
        ({"target_name": ["y"]}, "target_name"),
    ]  # fmt: skip
    for options, named in cases:
        with pytest.raises(ConfigError, match=named):
            ZarrDataset(store, **{"dataset_name": "volume", **options})


# -- rows, and stores


def test_rows_of_several_stores(tmp_path: Path) -> None:
    data = [np.random.default_rng(n).integers(0, 99, (n, 4)) for n in (5, 9)]
    for number, rows in enumerate(data):
        root = zarr.open_group(tmp_path / f"{number}.zarr", mode="w", zarr_format=2 + number)
        root.create_array("x", data=rows, chunks=(2, 4))
        root.create_array("y", data=np.arange(len(rows)), chunks=(4,))
    dataset = ZarrDataset(str(tmp_path / "*.zarr"), "x", target_name="y")
    assert dataset.targets.tolist() == [*range(5), *range(9)]
    assert np.array_equal(np.stack([row for row, _ in dataset]), np.concatenate(data))
    both = ZarrDataset(tmp_path / "1.zarr", ["x", "y"])
    assert both[3]["y"] == 3 and both[3]["x"].tolist() == data[1][3].tolist()


def test_a_store_that_is_damaged_or_is_none(store: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("none.zarr", "empty"):
        with pytest.raises(DataNotFoundError, match=name):
            ZarrDataset(tmp_path / name)
    with pytest.raises(ConfigError, match="nowhere"):
        ZarrDataset("nowhere://bucket/a.zarr")
    with pytest.raises(MissingNameError, match="'x'; it has: 'labels', 'volume'"):
        ZarrDataset(store, "x")
    shard = store / "volume" / "c" / "0" / "0" / "0" / "0"
    whole = shard.read_bytes()
    for damage, named in ((whole[:10], "index"), (whole[:-1] + b"\0", "checksum")):
        shard.write_bytes(damage)
        dataset = ZarrDataset(store, "volume", patch_shape=(4, 4, 5))
        with pytest.raises(SampleError, match=rf"sample 0 .*patch 0 at \[0, 0, 0\].*{named}"):
            dataset[0]
    place = store / "volume" / "zarr.json"
    place.write_text(place.read_text()[:40])
    with pytest.raises(FormatError, match=r"volume/zarr\.json"):
        ZarrDataset(store, "volume")


@pytest.mark.parametrize(("version", "zipped"), [(2, False), (3, False), (3, True)])
def test_strings_of_any_length(
    tmp_path: Path, make_loader: Any, version: Any, zipped: bool
) -> None:
    words = np.array([f"{'ä' * (i % 7)}{i}" for i in range(12)], dtype=object)
    path = tmp_path / "a.zarr"
    root = zarr.open_group(path, mode="w", zarr_format=version)
    root.create_array("words", shape=(12,), chunks=(5,), dtype="string")[...] = words
    pairs = root.create_array("pairs", shape=(6, 2), chunks=(4, 1), dtype="string")
    pairs[...] = words.reshape(6, 2)
    root.create_array("fixed", data=words.astype("U9"), chunks=(5,))
    root.create_array("x", data=np.arange(12), chunks=(5,))
    if zipped:
        path = Path(shutil.make_archive(str(tmp_path / "b"), "zip", path))
    dataset = ZarrDataset(path, "x", target_name="words")
    assert dataset[11] == (11, words[11]) and type(dataset[1][1]) is str
    for name in ("words", "fixed"):
        with ZarrDataset(path, name, loading_mode="eager", progress=False) as alone:
            assert [alone[i] for i in range(12)] == words.tolist()
    both = ZarrDataset(path, ["x", "words"])
    assert both.__getitems__([3, 3, 1]) == [{"x": i, "words": words[i]} for i in (3, 3, 1)]
    assert [ZarrDataset(path, "pairs")[i] for i in range(6)] == words.reshape(6, 2).tolist()
    loader = make_loader(ZarrDataset(path, "words"), batch_size=5, shuffle=False, num_workers=0)
    assert [word for batch in loader for word in batch] == words.tolist()
    with pytest.raises(ConfigError):
        ZarrDataset(path, "words", missing="error")
    with pytest.raises(FormatError):
        ZarrDataset(path, "words", patch_shape=(2,))


def test_zips_with_a_folder_at_their_root(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    root.create_array("deep/x", data=ROWS, chunks=(2, 3))
    files = [file for file in (tmp_path / "a.zarr").rglob("*") if file.is_file()]
    for method, before in ((zipfile.ZIP_STORED, "a.zarr"), (zipfile.ZIP_DEFLATED, "some/where/a")):
        path = tmp_path / f"{method}.zip"
        with zipfile.ZipFile(path, "w", method) as file:
            file.comment = b"a comment of the whole file"
            file.writestr("__MACOSX/a.zarr/zarr.json", "junk")
            for one in files:
                file.write(one, f"{before}/{one.relative_to(tmp_path / 'a.zarr')}")
        assert np.array_equal(rows_of(ZarrDataset(path)), ROWS)
        assert isinstance(open_dataset(path, dataset_name="deep/x"), ZarrDataset)
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as file:
        file.writestr("a/zarr.json", "{}")
        file.writestr("b/.zgroup", "{}")
    with pytest.raises(FormatError, match=r"two\.zip: .*'a' and 'b'"):
        ZarrDataset(tmp_path / "two.zip")


@pytest.mark.parametrize("consolidated", [False, True])
def test_a_sibling_of_another_kind_does_not_matter(tmp_path: Path, consolidated: bool) -> None:
    path = tmp_path / "a.zarr"
    root = zarr.open_group(path, mode="w")
    root.create_array("x", data=ROWS)
    root.create_array("other", data=ROWS)
    if consolidated:
        zarr.consolidate_metadata(path)
    codec, unknown = '"name": "zstd"', '"name": "of tomorrow"'
    for place, count in ((path / "other" / "zarr.json", 2), (path / "zarr.json", 1)):
        place.write_text(place.read_text().replace(codec, unknown, count))
    for direct in (True, False):
        assert ZarrDataset(path, "x", direct=direct)[7].tolist() == ROWS[7].tolist()
    with pytest.raises(FormatError, match=r"'other' .*of tomorrow"):
        ZarrDataset(path, "other")


def test_the_array_of_a_root_has_no_name(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    zarr.create_array(path, data=ROWS, chunks=(2, 3))
    dataset = ZarrDataset(path)
    assert dataset.source_of(3) == f"{path}, row 3" and "\nrows: " in dataset.explain()
    metadata = json.loads((path / "zarr.json").read_text())
    metadata["codecs"] = [{"name": "of tomorrow"}]
    (path / "zarr.json").write_text(json.dumps(metadata))
    with pytest.raises(FormatError, match=r"a\.zarr .*of tomorrow"):
        ZarrDataset(path)


# -- stores that change


def write_rows(path: Path, value: int, layout: dict[str, Any], mode: str = "w") -> None:
    time.sleep(0.02)  # longer than a tick of the clock that files get their times from
    if mode == "w":
        zarr.create_array(path, shape=(40, 6), dtype="i4", **{"chunks": (4, 6), **layout})
    zarr.open_array(path, mode="r+")[...] = value


RAW: dict[str, Any] = {"compressors": None, "fill_value": 9}
CHANGES: list[tuple[str, dict[str, Any], bool]] = [
    ("rewritten", RAW, True),
    ("replaced", {"fill_value": 9}, True),
    ("moved", {**RAW, "chunks": (1, 6)}, True),
    ("emptied", {"shards": (20, 6), "fill_value": 9}, True),
    ("emptied", RAW, True),
    ("moved", {"shards": (20, 6), "fill_value": 9}, True),
    ("rewritten", {"fill_value": 9}, False),
    ("replaced", {"shards": (20, 6), "fill_value": 9}, False),
]


@pytest.mark.parametrize(("change", "layout", "direct"), CHANGES)
def test_a_store_that_is_changed_is_an_error(
    tmp_path: Path, change: str, layout: dict[str, Any], direct: bool
) -> None:
    path = tmp_path / "a.zarr"
    write_rows(path, 1, layout)
    before, between = (ZarrDataset(path, direct=direct) for _ in range(2))
    assert sum(int(between[i].sum()) for i in range(0, 40, 10)) == 24
    if change == "moved":  # a copy with the times of the original
        shutil.copytree(path, tmp_path / "b.zarr", copy_function=shutil.copy2)
    if change in ("replaced", "moved"):
        shutil.rmtree(path)
    if change == "moved":
        os.rename(tmp_path / "b.zarr", path)
    elif change == "emptied":
        time.sleep(0.02)
        for file in path.rglob("*"):
            if file.is_file() and file.name != "zarr.json":
                file.unlink()
    else:
        write_rows(path, 2, layout, mode="w" if change == "replaced" else "r+")
    for dataset in (before, between):
        for index in (0, 13, 39):
            with pytest.raises(FileChangedError):
                dataset[index]
    now = {"rewritten": 2, "replaced": 2, "moved": 1, "emptied": 9}[change]
    assert int(ZarrDataset(path, direct=direct)[5][0]) == now


def test_other_stores_that_are_changed(tmp_path: Path) -> None:
    words = zarr.create_array(tmp_path / "words.zarr", shape=(12,), chunks=(5,), dtype="string")
    words[...] = "old"
    dataset = ZarrDataset(tmp_path / "words.zarr")
    time.sleep(0.02)
    words[...] = "new"
    with pytest.raises(FileChangedError):
        dataset[3]
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = tmp_path / f"{method}.zarr.zip"
        for value in (1, 2):
            with zarr.storage.ZipStore(path, mode="w", compression=method) as store:
                zarr.create_array(store, data=np.full((8, 3), value, "i4"), chunks=(2, 3))
            if value == 1:
                dataset = ZarrDataset(path)
                assert dataset[0].tolist() == [1, 1, 1]
        with pytest.raises(FileChangedError):
            dataset[5]


def test_a_file_server_whose_clock_is_ahead(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    write_rows(path, 1, RAW)
    later = time.time() + 60
    for file in [path, *path.rglob("*")]:
        os.utime(file, (later, later))
    dataset = ZarrDataset(path)
    assert (rows_of(dataset) == 1).all()
    os.utime(path / "c" / "3" / "0", (later + 1, later + 1))
    with pytest.raises(FileChangedError, match="c/3/0"):
        dataset[13]


def test_raw_targets_in_chunks_that_are_wider_than_the_array(tmp_path: Path) -> None:
    root, targets = zarr.open_group(tmp_path / "a.zarr", mode="w"), np.arange(65).reshape(13, 5)
    root.create_array("x", data=targets, chunks=(4, 20), compressors=None)
    dataset = ZarrDataset(tmp_path / "a.zarr", "x", target_name="x")
    assert np.array_equal(dataset.targets, targets) and dataset[7][0].tolist() == [*targets[7]]


def test_chunk_files_in_any_order(tmp_path: Path) -> None:
    rows = np.random.default_rng(5).integers(0, 9, (40, 6)).astype("i4")
    order = np.random.default_rng(6).permutation(40).tolist()
    layouts = itertools.product(((1, 6), (4, 6), (4, 3), (1, 3)), (None, "auto"))
    for chunks, compressors in layouts:
        options: dict[str, Any] = {"chunks": chunks, "compressors": compressors, "fill_value": 7}
        path = tmp_path / "a.zarr"
        array = zarr.create_array(path, shape=(40, 6), dtype="i4", overwrite=True, **options)
        array[:30] = rows[:30]  # the rest is never written
        expected = np.concatenate([rows[:30], np.full((10, 6), 7)])[order]
        found = torch.stack(list(ZarrDataset(path).__getitems__(order)))
        assert np.array_equal(found, expected), options
