"""ZarrDataset as users see it: rows, patches of a volume, labels, and stores that are not as
they should be.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import (
    ConfigError,
    DataNotFoundError,
    FileChangedError,
    FormatError,
    HDF5Dataset,
    MissingNameError,
    SampleError,
    ZarrDataset,
    create_dataloader,
    open_dataset,
    pack,
)
from headrace.storage.arrays.patches import Box, PatchGrid
from headrace.storage.zarr.stores import ZarrFolder
from headrace.testing import DatasetContract

pytestmark = pytest.mark.quick_every(5)

SHAPE = (9, 11, 13)
VOLUME = np.random.default_rng(1).integers(-500, 500, (2, *SHAPE)).astype("i2")
LABELS = np.random.default_rng(2).integers(0, 5, SHAPE).astype("u1")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    root.create_array(
        "volume", shape=VOLUME.shape, dtype="i2", chunks=(1, 4, 5, 6), shards=(2, 8, 10, 12)
    )[...] = VOLUME
    root.create_array("labels", shape=SHAPE, dtype="u1", chunks=(4, 4, 4))[...] = LABELS
    return tmp_path / "a.zarr"


# -- the arithmetic of patches


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_corners_follow_from_indices(data: Any) -> None:
    axes = data.draw(st.integers(1, 3))
    extents = st.lists(st.integers(1, 12), min_size=axes, max_size=axes)
    shape, patch, stride = (data.draw(extents) for _ in range(3))
    edges = data.draw(st.sampled_from(["drop", "pad", "shift"]))
    grid = PatchGrid(shape, patch, stride, edges)
    corners = [grid.corner(index) for index in range(len(grid))]
    assert len(set(corners)) == len(corners) and sorted(corners) == corners
    along = []
    for size, extent, step in zip(shape, patch, stride, strict=True):
        starts = [a for a in range(0, size, step) if a + extent <= size]
        if edges == "pad":
            starts = [0]
            while starts[-1] + extent < size and starts[-1] + step < size:
                starts.append(starts[-1] + step)
        elif edges == "shift" and starts and starts[-1] + extent < size:
            starts.append(size - extent)
        along.append(starts)
    assert corners == list(itertools.product(*along))
    assert all(
        start < size for corner in corners for start, size in zip(corner, shape, strict=True)
    )


def test_boxes() -> None:
    boxes = [Box((0, 0), (4, 6)), Box((5, 5), (9, 10))]
    grid = PatchGrid((10, 10), (2, 3), (2, 3), "drop", boxes)
    corners = [grid.corner(index) for index in range(len(grid))]
    assert corners == [(0, 0), (0, 3), (2, 0), (2, 3), (5, 5), (7, 5)]
    with pytest.raises(
        ConfigError, match=r"the box from \[5, 5\] to \[11, 9\] does not lie inside"
    ):
        PatchGrid((10, 10), (2, 3), (2, 3), boxes=[Box((5, 5), (11, 9))])


# -- patches


@pytest.mark.parametrize("edges", ["drop", "pad", "shift"])
@pytest.mark.parametrize("direct", [True, False])
def test_patches_are_the_parts_of_the_volume(store: Path, edges: str, direct: bool) -> None:
    dataset = ZarrDataset(
        store,
        "volume",
        target_name="labels",
        patch_shape=(4, 4, 5),
        stride=3,
        edges=edges,
        direct=direct,
    )
    reach = [(0, 12)] + [(0, 12)] * 2
    padded = np.pad(VOLUME, [(0, 0), *reach], mode="reflect"), np.pad(LABELS, reach, mode="reflect")
    assert len(dataset) == {"drop": 2 * 3 * 3, "pad": 3 * 4 * 4, "shift": 3 * 4 * 4}[edges]
    for index in range(len(dataset)):
        z, y, x = dataset.corner_of(index)
        patch, labels = dataset[index]
        assert torch.equal(patch, torch.from_numpy(padded[0][:, z : z + 4, y : y + 4, x : x + 5]))
        assert torch.equal(labels, torch.from_numpy(padded[1][z : z + 4, y : y + 4, x : x + 5]))
    dataset.close()


@pytest.mark.parametrize("pad", ["reflect", "edge", "constant"])
def test_patches_larger_than_the_volume(store: Path, pad: Any) -> None:
    dataset = ZarrDataset(
        store, "volume", target_name="labels", patch_shape=(40, 12, 5), edges="pad", pad=pad
    )
    reach = [(0, 31), (0, 1), (0, 12)]
    assert len(dataset) == 3
    for index in range(3):
        _, _, x = dataset.corner_of(index)
        patch, labels = dataset[index]
        assert np.array_equal(patch, np.pad(VOLUME, [(0, 0), *reach], mode=pad)[:, :, :, x : x + 5])
        assert np.array_equal(labels, np.pad(LABELS, reach, mode=pad)[:, :, x : x + 5])


@pytest.mark.slow
def test_patches_in_a_loader(store: Path) -> None:
    options: dict[str, Any] = {
        "patch_shape": (4, 4, 5),
        "stride": 3,
        "edges": "shift",
        "dtype": "float32",
    }
    plain = ZarrDataset(store, "volume", target_name="labels", direct=False, **options)
    for shuffle, workers in itertools.product((False, True, "block"), (0, 2)):
        dataset = ZarrDataset(store, "volume", target_name="labels", **options)
        loader = create_dataloader(
            dataset, batch_size=5, shuffle=shuffle, num_workers=workers, seed=4
        )
        found = list(loader)
        expected = list(
            create_dataloader(plain, batch_size=5, shuffle=shuffle, num_workers=0, seed=4)
        )
        assert (
            len(found) == 10
            and found[0][0].dtype == torch.float32
            and found[0][1].dtype == torch.uint8
        )
        assert all(
            torch.equal(a, b)
            for x, y in zip(found, expected, strict=True)
            for a, b in zip(x, y, strict=True)
        )
        loader.close()


def test_joint_transforms_get_both(store: Path) -> None:
    def flip(patch: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (patch.flip(-1), labels.flip(-1)) if torch.rand(()) < 0.5 else (patch, labels)

    dataset = ZarrDataset(
        store, "volume", target_name="labels", patch_shape=(4, 4, 5), transforms=flip
    )
    flipped = 0
    for index in range(len(dataset)):
        z, y, x = dataset.corner_of(index)
        patch, labels = dataset[index]
        plain = torch.from_numpy(VOLUME[:, z : z + 4, y : y + 4, x : x + 5].copy())
        is_flipped = not torch.equal(patch, plain)
        flipped += is_flipped
        told = torch.from_numpy(LABELS[z : z + 4, y : y + 4, x : x + 5].copy())
        assert torch.equal(patch, plain.flip(-1) if is_flipped else plain) and torch.equal(
            labels, told.flip(-1) if is_flipped else told
        )
    assert 0 < flipped < len(dataset)


def test_patches_of_whole_axes_and_of_boxes(store: Path) -> None:
    dataset = ZarrDataset(store, "volume", patch_shape=(1, -1, -1))
    assert len(dataset) == 9 and torch.equal(dataset[4], torch.from_numpy(VOLUME[:, 4:5]))
    dataset = ZarrDataset(store, "volume", patch_shape=(2, 2, 2), boxes=[((1, 1, 1), (3, 5, 3))])
    assert [dataset.corner_of(i) for i in range(len(dataset))] == [(1, 1, 1), (1, 3, 1)]
    assert torch.equal(dataset[1], torch.from_numpy(VOLUME[:, 1:3, 3:5, 1:3]))
    assert "patch 1 at [1, 3, 1]" in dataset.source_of(1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"patch_shape": (4, 4, 5, 2, 2)},
            r"has 5 extents, and .*'volume' has shape \[2, 9, 11, 13\]",
        ),
        (
            {"patch_shape": (40, 4, 5)},
            r"a\.zarr, volume: no patch of \[40, 4, 5\] fits into a volume of \[9, 11, 13\]: axis "
            r"0 has 9 of 40",
        ),
        (
            {"patch_shape": (40, 40, 5), "edges": "shift"},
            "axis 0 has 9 of 40, axis 1 has 11 of 40; use a smaller patch_shape, or edges='pad'",
        ),
        (
            {"patch_shape": (4, 4, 4), "boxes": [((0, 0, 0), (3, 9, 9)), ((0, 0, 0), (9, 3, 9))]},
            "fits into any of the boxes; use",
        ),
        ({"patch_shape": 64}, "no patch of \\[64, 64, 64\\] fits"),
        ({"patch_shape": 0}, "needs 3 extents of at least 1"),
        ({"patch_shape": (4, 0, 5)}, r"patch_shape=\[4, 0, 5\] needs 3 extents of at least 1"),
        ({"patch_shape": (4, 4, 5), "stride": (1, 1)}, r"stride=\[1, 1\] needs 3 extents"),
        (
            {"patch_shape": (4, 4, 5), "edges": "wrap"},
            "edges must be one of 'drop', 'pad', 'shift', not 'wrap'",
        ),
        ({"patch_shape": (4, 4, 5), "pad": "wrap"}, "pad must be one of"),
        ({"stride": 3}, "stride goes with patches: give patch_shape too"),
        ({"missing": "zero"}, "missing must be 'fill' or 'error'"),
        (
            {"patch_shape": (2, 4, 4, 5), "target_name": "labels"},
            r"'labels' has shape \[9, 11, 13\], which does not end in",
        ),
    ],
)
def test_options_that_make_no_sense(store: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ZarrDataset(store, "volume", **options)


def test_one_extent_means_all_axes_of_space(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    shapes = {"line": (30,), "image": (9, 11), "many": (2, 3, 9, 11, 13)}
    for name, shape in shapes.items():
        root.create_array(name, shape=shape, dtype="u1")
    named = root.create_array(
        "named", shape=(9, 11, 4), dtype="u1", dimension_names=["Y", "x", "channel"]
    )
    named[...] = np.random.default_rng(1).integers(0, 99, named.shape)
    found = {
        name: tuple(ZarrDataset(tmp_path / "a.zarr", name, patch_shape=4)[0].shape)
        for name in (*shapes, "named")
    }
    assert found == {"line": (4,), "image": (4, 4), "many": (2, 3, 4, 4, 4), "named": (4, 4, 4)}
    dataset = ZarrDataset(tmp_path / "a.zarr", "named", patch_shape=np.int64(5), stride=np.int64(3))
    assert len(dataset) == 2 * 3 and dataset[0].shape == (5, 5, 4)
    assert np.array_equal(dataset[4], named[3:8, 3:8])


@pytest.mark.parametrize("mode", ["lazy", "eager", "streaming"])
def test_patches_of_several_volumes(tmp_path: Path, mode: str) -> None:
    volumes = [
        np.random.default_rng(n).integers(0, 99, (2, 8 + 2 * n, 9, 10)).astype("i2")
        for n in range(3)
    ]
    for number, volume in enumerate(volumes):
        root = zarr.open_group(tmp_path / f"{number}.zarr", mode="w", zarr_format=2 + number % 2)
        root.create_array("raw", data=volume, chunks=(1, 4, 4, 4))
        root.create_array("labels", data=(volume[0] % 5).astype("u1"), chunks=(4, 4, 4))
    options: dict[str, Any] = {"patch_shape": 4, "stride": 3, "edges": "shift"}
    alone = [
        ZarrDataset(tmp_path / f"{n}.zarr", "raw", target_name="labels", **options)
        for n in range(3)
    ]
    dataset = ZarrDataset(
        str(tmp_path / "*.zarr"),
        "raw",
        target_name="labels",
        loading_mode=mode,
        progress=False,
        **options,
    )
    expected = [
        (n, one.corner_of(i), one[i]) for n, one in enumerate(alone) for i in range(len(one))
    ]
    assert len(dataset) == len(expected) and len(set(map(len, alone))) > 1
    if mode != "streaming":
        for index, (number, corner, (patch, labels)) in enumerate(expected):
            assert (dataset.volume_of(index), dataset.corner_of(index)) == (number, corner)
            assert torch.equal(dataset[index][0], patch) and torch.equal(dataset[index][1], labels)
    assert f"2.zarr, raw, patch {len(alone[2]) - 1} at" in dataset.source_of(-1)
    loader = create_dataloader(dataset, batch_size=7, shuffle="block", num_workers=0, seed=3)
    seen = sorted(patch.numpy().tobytes() for batch, _ in loader for patch in batch)
    assert seen == sorted(patch.numpy().tobytes() for _, _, (patch, _) in expected)
    dataset.close()


def test_volumes_that_are_of_different_kinds(tmp_path: Path) -> None:
    for number, (dtype, channels) in enumerate((("i2", 2), ("i2", 3), ("i4", 2))):
        zarr.create_array(tmp_path / f"{number}.zarr", shape=(channels, 8, 8, 8), dtype=dtype)
    paths = [tmp_path / f"{number}.zarr" for number in range(3)]
    for pair, said in (
        (paths[:2], r"int16 \[3, 4, 4, 4\] here, and of int16 \[2, 4, 4, 4\] there"),
        (paths[::2], r"int32 \[2, 4, 4, 4\] here"),
    ):
        with pytest.raises(FormatError, match=said):
            ZarrDataset(pair, patch_shape=4)
    with pytest.raises(
        ConfigError, match="boxes are parts of one volume, and data_path names 2 stores"
    ):
        ZarrDataset(paths[:2], patch_shape=4, boxes=[((0, 0, 0), (4, 4, 4))])
    with pytest.raises(ConfigError, match=r"2\.zarr, the array: no patch of \[9, 9, 9\] fits"):
        ZarrDataset(paths[2:], patch_shape=9)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("version", [2, 3])
def test_constant_padding_is_the_fill_value(tmp_path: Path, direct: bool, version: Any) -> None:
    array = zarr.create_array(
        tmp_path / "a.zarr",
        shape=(5, 5),
        chunks=(2, 2),
        dtype="f4",
        fill_value=-7.5,
        zarr_format=version,
    )
    array[:4, :4] = 1
    dataset = ZarrDataset(
        tmp_path / "a.zarr", patch_shape=(4, 4), edges="pad", pad="constant", direct=direct
    )
    expected = np.full((8, 8), -7.5, "f4")
    expected[:4, :4] = 1
    assert all(
        np.array_equal(dataset[i], expected[4 * (i // 2) :, 4 * (i % 2) :][:4, :4])
        for i in range(4)
    )


def test_random_crops_of_a_volume(store: Path) -> None:
    # every place where a patch fits
    dataset = ZarrDataset(store, "volume", target_name="labels", patch_shape=4, stride=1)
    assert len(dataset) == 6 * 8 * 10
    epochs = []
    for workers in (0, 2):
        with_workers = create_dataloader(
            dataset, batch_size=8, num_samples=32, seed=5, num_workers=workers
        )
        for epoch in (0, 1):
            with_workers.set_epoch(epoch)
            epochs.append(
                [
                    (patch, labels)
                    for batch in with_workers
                    for patch, labels in zip(*batch, strict=True)
                ]
            )
        with_workers.close()
    assert [len(epoch) for epoch in epochs] == [32] * 4
    for first, again in ((0, 2), (1, 3)):
        assert all(
            torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
            for a, b in zip(epochs[first], epochs[again], strict=True)
        )
    places = {
        VOLUME[:, z : z + 4, y : y + 4, x : x + 4].tobytes(): (z, y, x)
        for z, y, x in itertools.product(range(6), range(8), range(10))
    }
    drawn = [[places[patch.numpy().tobytes()] for patch, _ in epoch] for epoch in epochs[:2]]
    assert drawn[0] != drawn[1] and len({*drawn[0], *drawn[1]}) > 40
    for (z, y, x), (_, labels) in zip(drawn[0], epochs[0], strict=True):
        assert np.array_equal(labels, LABELS[z : z + 4, y : y + 4, x : x + 4])


# -- rows, and stores


class Doubled(ZarrDataset):
    def decode(self, record: Any) -> Any:
        return super().decode(record) * 2


class Negated(ZarrDataset):
    def to_input(self, value: Any) -> Any:
        return -super().to_input(value)


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached", "streaming"])
@pytest.mark.parametrize(("kind", "factor"), [(Doubled, 2), (Negated, -1)])
def test_batches_follow_what_a_subclass_overrides(
    tmp_path: Path, mode: str, kind: type[ZarrDataset], factor: int
) -> None:
    rows = np.arange(24, dtype="i4").reshape(8, 3)
    zarr.create_array(tmp_path / "a.zarr", data=rows)
    dataset = kind(tmp_path / "a.zarr", loading_mode=mode, progress=False)
    loader = create_dataloader(dataset, batch_size=4, shuffle=False, num_workers=0)
    assert np.array_equal(torch.cat(list(loader)).numpy(), rows * factor)
    dataset.close()


def test_rows_of_several_stores(tmp_path: Path) -> None:
    data = [np.random.default_rng(n).integers(0, 99, (n, 4)).astype("i4") for n in (5, 9)]
    for number, some in enumerate(data):
        root = zarr.open_group(tmp_path / f"{number}.zarr", mode="w", zarr_format=2 + number)
        root.create_array("x", shape=some.shape, dtype="i4", chunks=(2, 4))[...] = some
        root.create_array("y", shape=(len(some),), dtype="i8", chunks=(4,))[...] = np.arange(
            len(some)
        )
    dataset = ZarrDataset(str(tmp_path / "*.zarr"), "x", target_name="y")
    assert len(dataset) == 14 and dataset.targets.tolist() == [*range(5), *range(9)]
    assert all(np.array_equal(dataset[i][0], np.concatenate(data)[i]) for i in range(14))
    assert isinstance(open_dataset(tmp_path / "1.zarr", dataset_name="x"), ZarrDataset)
    both = ZarrDataset(tmp_path / "1.zarr", ["x", "y"])
    assert both[3]["y"] == 3 and both[3]["x"].tolist() == data[1][3].tolist()


def test_a_store_that_is_damaged_or_is_none(store: Path, tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="does not exist"):
        ZarrDataset(tmp_path / "none.zarr")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataNotFoundError, match=r"no file under .*empty ends in any of .zarr"):
        ZarrDataset(tmp_path / "empty")
    with pytest.raises(ConfigError, match="can't be opened"):
        ZarrDataset("nowhere://bucket/a.zarr")
    with pytest.raises(MissingNameError, match="has no array 'x'; it has: 'labels', 'volume'"):
        ZarrDataset(store, "x")
    shard = store / "volume" / "c" / "0" / "0" / "0" / "0"
    whole = shard.read_bytes()
    for damage, said in (
        (whole[:10], "no room for the index"),
        (whole[:-1] + b"\0", "index of the shard: wrong checksum"),
    ):
        shard.write_bytes(damage)
        dataset = ZarrDataset(store, "volume", patch_shape=(4, 4, 5))
        with pytest.raises(
            SampleError, match=rf"sample 0 can't be read: .*patch 0 at \[0, 0, 0\].*{said}"
        ):
            dataset[0]
    place = store / "volume" / "zarr.json"
    place.write_text(place.read_text()[:40])
    with pytest.raises(FormatError, match=r"volume/zarr\.json is damaged"):
        ZarrDataset(store, "volume")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("zipped", [False, True])
def test_strings_of_any_length(tmp_path: Path, version: Any, zipped: bool) -> None:
    words = np.array([f"{'ä' * (i % 7)}{i}" for i in range(12)], dtype=object)
    root = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version)
    root.create_array("words", shape=(12,), chunks=(5,), dtype="string")[...] = words
    root.create_array("pairs", shape=(6, 2), chunks=(4, 1), dtype="string")[...] = words.reshape(
        6, 2
    )
    root.create_array("fixed", data=words.astype("U9"), chunks=(5,))
    root.create_array("x", data=np.arange(12), chunks=(5,))
    path = tmp_path / "a.zarr"
    if zipped:
        path = Path(shutil.make_archive(str(tmp_path / "b"), "zip", path))
    dataset = ZarrDataset(path, "x", target_name="words")
    assert [dataset[i] for i in (11, 0)] == [(11, words[11]), (0, words[0])] and type(
        dataset[1][1]
    ) is str
    for name in ("words", "fixed"):
        alone = ZarrDataset(path, name, loading_mode="eager", progress=False)
        assert [alone[i] for i in range(12)] == words.tolist()
        alone.close()
    both = ZarrDataset(path, ["x", "words"])
    assert both.__getitems__([3, 3, 1]) == [{"x": i, "words": words[i]} for i in (3, 3, 1)]
    assert [ZarrDataset(path, "pairs")[i] for i in range(6)] == words.reshape(6, 2).tolist()
    loader = create_dataloader(
        ZarrDataset(path, "words"), batch_size=5, shuffle=False, num_workers=0
    )
    assert [word for batch in loader for word in batch] == words.tolist()
    with pytest.raises(ConfigError, match=r"missing='error' can't be had for .*: 'words'"):
        ZarrDataset(path, "words", missing="error")
    with pytest.raises(FormatError, match="of which samples can't be made"):
        ZarrDataset(path, "words", patch_shape=(2,))


@pytest.mark.slow
def test_strings_that_are_changed_are_an_error(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "a.zarr", shape=(12,), chunks=(5,), dtype="string")
    array[...] = "old"
    dataset = ZarrDataset(tmp_path / "a.zarr")
    time.sleep(0.02)
    array[...] = "new"
    with pytest.raises(FileChangedError):
        dataset[3]


def test_zips_with_a_folder_at_their_root(tmp_path: Path) -> None:
    rows = np.arange(24, dtype="i4").reshape(8, 3)
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    root.create_array("deep/x", data=rows, chunks=(2, 3))
    files = [file for file in (tmp_path / "a.zarr").rglob("*") if file.is_file()]
    for number, (method, before) in enumerate(
        itertools.product((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED), ("a.zarr", "some/where/a"))
    ):
        path = tmp_path / f"{number}.zip"
        with zipfile.ZipFile(path, "w", method) as file:
            file.writestr("__MACOSX/a.zarr/zarr.json", "junk")
            for one in files:
                file.write(one, f"{before}/{one.relative_to(tmp_path / 'a.zarr')}")
        dataset = ZarrDataset(path)
        assert np.array_equal(torch.stack([dataset[i] for i in range(8)]).numpy(), rows)
        assert isinstance(open_dataset(path, dataset_name="deep/x"), ZarrDataset)
        dataset.close()
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as file:
        file.writestr("a/zarr.json", "{}")
        file.writestr("b/.zgroup", "{}")
    with pytest.raises(
        FormatError,
        match=(
            r"two\.zip: it holds several Zarr stores, such as 'a' and 'b': pack one of them "
            r"alone"
        ),
    ):
        ZarrDataset(tmp_path / "two.zip")


@pytest.mark.parametrize("consolidated", [False, True])
def test_a_sibling_of_another_kind_does_not_matter(tmp_path: Path, consolidated: bool) -> None:
    rows = np.arange(24, dtype="i4").reshape(8, 3)
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    root.create_array("x", data=rows)
    root.create_array("other", data=rows)
    if consolidated:
        zarr.consolidate_metadata(tmp_path / "a.zarr")
    for place in (tmp_path / "a.zarr" / "other" / "zarr.json", tmp_path / "a.zarr" / "zarr.json"):
        place.write_text(
            place.read_text().replace(
                '"name": "zstd"', '"name": "of tomorrow"', 2 if place.parent.name == "other" else 1
            )
        )
    for direct in (True, False):
        assert ZarrDataset(tmp_path / "a.zarr", "x", direct=direct)[7].tolist() == rows[7].tolist()
    with pytest.raises(
        FormatError, match=r"'other' needs a codec that is not installed \(.*of tomorrow"
    ):
        ZarrDataset(tmp_path / "a.zarr", "other")


def test_the_array_of_a_root_has_no_name(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    zarr.create_array(path, data=np.ones((4, 2)), chunks=(2, 2))
    dataset = ZarrDataset(path)
    assert dataset.source_of(3) == f"{path}, row 3" and "\nrows: " in dataset.explain()
    metadata = json.loads((path / "zarr.json").read_text())
    metadata["codecs"] = [{"name": "of tomorrow"}]
    (path / "zarr.json").write_text(json.dumps(metadata))
    with pytest.raises(FormatError, match=r"a\.zarr needs a codec that is not installed"):
        ZarrDataset(path)


# -- stores that change


def write_rows(path: Path, value: int, layout: dict[str, Any], mode: str = "w") -> None:
    time.sleep(0.02)  # longer than a tick of the clock that files get their times from
    layout = {"chunks": (4, 6), **layout}
    array = (
        zarr.create_array(path, shape=(40, 6), dtype="i4", **layout)
        if mode == "w"
        else zarr.open_array(path, mode="r+")
    )
    array[...] = value


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "raw": ({"compressors": None, "fill_value": 9}, {}),
    "zstd": ({"fill_value": 9}, {}),
    "raw, 1 a chunk": ({"compressors": None, "chunks": (1, 6), "fill_value": 9}, {}),
    "shards": ({"shards": (20, 6), "fill_value": 9}, {}),
    "library": ({"fill_value": 9}, {"direct": False}),
    "sharded library": ({"shards": (20, 6), "fill_value": 9}, {"direct": False}),
}


@pytest.mark.quick_every(20)
@pytest.mark.product("each layout notices each change in another place")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", ["rewritten", "replaced", "moved", "emptied"])
def test_a_store_that_is_changed_is_an_error(tmp_path: Path, layout: str, change: str) -> None:
    path, (written, read) = tmp_path / "a.zarr", LAYOUTS[layout]
    write_rows(path, 1, written)
    before, between = (ZarrDataset(path, **read) for _ in range(2))
    assert sum(int(between[i].sum()) for i in range(0, 40, 10)) == 24
    if change == "moved":  # a copy with the times of the original
        shutil.copytree(path, tmp_path / "b.zarr", copy_function=shutil.copy2)
    if change in ("replaced", "moved"):
        shutil.rmtree(path)
    if change == "moved":
        os.rename(tmp_path / "b.zarr", path)
    elif change == "emptied":
        time.sleep(0.02)
        for chunk in [
            file for file in path.rglob("*") if file.is_file() and file.name != "zarr.json"
        ]:
            chunk.unlink()
    else:
        write_rows(path, 2, written, mode="w" if change == "replaced" else "r+")
    for dataset in (before, between):
        for index in (0, 13, 39):
            with pytest.raises(
                FileChangedError,
                match=r"changed after the dataset was opened.*open the dataset again",
            ):
                dataset[index]
        dataset.close()
    assert (
        int(ZarrDataset(path, **read)[5][0])
        == {"rewritten": 2, "replaced": 2, "moved": 1, "emptied": 9}[change]
    )


@pytest.mark.parametrize("chunks", [(1, 6), (4, 6), (4, 3), (1, 3)])
@pytest.mark.parametrize("compressors", [None, "auto"])
def test_systems_without_lookups_by_descriptor(
    tmp_path: Path, chunks: tuple[int, int], compressors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(5).integers(0, 9, (40, 6)).astype("i4")
    array = zarr.create_array(
        tmp_path / "a.zarr",
        shape=(40, 6),
        dtype="i4",
        chunks=chunks,
        compressors=compressors,
        fill_value=7,
    )
    array[:30] = rows[:30]  # the rest is never written
    rows[30:] = 7
    order = np.random.default_rng(6).permutation(40).tolist()
    found = []
    for way in (True, False):
        monkeypatch.setattr(ZarrFolder, "reads_files", way)
        dataset = ZarrDataset(tmp_path / "a.zarr")
        found.append(torch.stack(list(dataset.__getitems__(order))))
        dataset.close()
    assert torch.equal(found[0], found[1]) and np.array_equal(found[0].numpy(), rows[order])


def test_a_file_server_whose_clock_is_ahead(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.zarr", 1, {"compressors": None})
    later = time.time() + 60
    for file in [tmp_path / "a.zarr", *(tmp_path / "a.zarr").rglob("*")]:
        os.utime(file, (later, later))
    dataset = ZarrDataset(tmp_path / "a.zarr")
    assert [int(dataset[i][0]) for i in range(40)] == [1] * 40
    chunk = tmp_path / "a.zarr" / "c" / "3" / "0"
    os.utime(chunk, (later + 1, later + 1))
    with pytest.raises(FileChangedError, match="c/3/0 was changed"):
        dataset[13]


def test_a_zip_file_that_is_changed_is_an_error(tmp_path: Path) -> None:
    for compress in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = tmp_path / f"{compress}.zarr.zip"
        for value in (1, 2):
            with zarr.storage.ZipStore(path, mode="w", compression=compress) as store:
                zarr.create_array(store, data=np.full((8, 3), value, "i4"), chunks=(2, 3))
            if value == 1:
                dataset = ZarrDataset(path)
                assert dataset[0].tolist() == [1, 1, 1]
        with pytest.raises(FileChangedError):
            dataset[5]
        dataset.close()


@pytest.mark.falls_back
def test_workers_never_mix_two_versions(tmp_path: Path) -> None:
    path, layout = tmp_path / "a.zarr", {"compressors": None}
    write_rows(path, 1, layout)
    loader = create_dataloader(ZarrDataset(path), batch_size=4, num_workers=2, seed=1)
    assert {int(batch.sum()) for batch in loader} == {24}
    write_rows(path, 2, layout, mode="r+")
    with pytest.raises(FileChangedError):
        list(loader)
    loader.close()


@pytest.mark.parametrize("sharded", [False, True])
def test_checksums_find_flipped_bytes(tmp_path: Path, sharded: bool) -> None:
    data = np.random.default_rng(1).integers(0, 9, (12, 5)).astype("u1")
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    codecs = [zarr.codecs.ZstdCodec(checksum=True), zarr.codecs.Crc32cCodec()]
    shards = {"shards": (12, 5)} if sharded else {}
    root.create_array(
        "x", shape=data.shape, dtype="u1", chunks=(4, 5), compressors=codecs, **shards
    )[...] = data
    files = [
        Path(folder) / file
        for folder, _, files in os.walk(tmp_path / "a.zarr" / "x")
        for file in files
        if file != "zarr.json"
    ]
    assert len(files) == (1 if sharded else 3)
    for file in files:
        whole = file.read_bytes()
        for place in range(len(whole)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x04]) + whole[place + 1 :])
            with pytest.raises(SampleError), ZarrDataset(tmp_path / "a.zarr", "x") as dataset:
                for index in range(12):
                    dataset[index]
        file.write_bytes(whole)


# -- axes


AXIS_LAYOUTS: dict[str, dict[str, Any]] = {
    "zstd": {"chunks": (4, 5, 6)},
    "raw": {"chunks": (4, 5, 6), "compressors": None},
    "one chunk": {"chunks": (11, 13, 17), "compressors": None},
    "shards": {"chunks": (4, 5, 6), "shards": (8, 10, 12)},
    "v2": {"chunks": (4, 5, 6), "zarr_format": 2},
}


@pytest.mark.parametrize("layout", AXIS_LAYOUTS)
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_samples_along_any_axis(layout: str, axis: int, tmp_path: Path) -> None:
    rows = np.random.default_rng(3).integers(0, 99, (11, 13, 17))
    group = zarr.open_group(
        tmp_path / "a.zarr", mode="w", zarr_format=AXIS_LAYOUTS[layout].get("zarr_format", 3)
    )
    options = {name: value for name, value in AXIS_LAYOUTS[layout].items() if name != "zarr_format"}
    group.create_array("data", shape=rows.shape, dtype=rows.dtype, **options)[...] = rows
    whole = np.moveaxis(rows, axis, 0)
    for direct in (True, False):
        with ZarrDataset(tmp_path / "a.zarr", "data", axis=axis, direct=direct) as dataset:
            assert len(dataset) == len(whole) and (axis == 0 or "along axis" in dataset.explain())
            for indices in ([0], [len(whole) - 1, 3, 3, 0], list(range(len(whole)))):
                found = dataset.__getitems__(indices)
                assert all(
                    np.array_equal(one, whole[i]) for i, one in zip(indices, found, strict=True)
                ), indices


def test_axes_by_numpy_or_without_a_name(tmp_path: Path) -> None:
    """An empty name would be that of any axis without one."""
    rows = np.arange(24).reshape(2, 3, 4)
    zarr.open_group(tmp_path / "a.zarr", mode="w").create_array("data", data=rows)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = rows
    for kind, path in ((ZarrDataset, tmp_path / "a.zarr"), (HDF5Dataset, tmp_path / "a.h5")):
        with kind(path, "data", axis=np.int64(1)) as dataset:
            assert np.array_equal(dataset[2], rows[:, 2])
        with pytest.raises(
            ConfigError, match="axis must be the number of an axis, or its name, not ''"
        ):
            kind(path, "data", axis="")


def test_batches_along_a_named_axis(tmp_path: Path) -> None:
    rows = np.random.default_rng(4).normal(size=(6, 5, 40)).astype("f4")
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    array = group.create_array(
        "data", shape=rows.shape, dtype="f4", chunks=(6, 5, 8), dimension_names=("y", "x", "t")
    )
    array[...] = rows
    group.create_array("other", data=rows + 1, chunks=(6, 5, 8))
    group.create_array("label", data=np.arange(40))
    dataset = ZarrDataset(tmp_path / "a.zarr", "data", axis="t", target_name="label")
    for shuffle in (False, True, "block"):
        loader = create_dataloader(dataset, batch_size=8, shuffle=shuffle, num_workers=2, seed=1)
        for images, targets in loader:
            assert torch.equal(
                images, torch.from_numpy(rows[..., targets.numpy()].transpose(2, 0, 1))
            )
        loader.close()
    assert dataset.blocks().tolist() == [8] * 5
    last, first = (
        ZarrDataset(tmp_path / "a.zarr", "data", axis=-1),
        ZarrDataset(tmp_path / "a.zarr", "data"),
    )
    assert last.fingerprint == dataset.fingerprint != first.fingerprint
    loader = create_dataloader(dataset, batch_size=8, shuffle="block", num_workers=0, seed=1)
    list(loader)
    assert loader.get_stats()["chunks_decoded"] == 5
    with ZarrDataset(tmp_path / "a.zarr", ["data", "other"], axis=2) as both:
        assert np.array_equal(both[7]["other"], rows[..., 7] + 1) and len(both) == 40
    with HDF5Dataset(pack(last, tmp_path / "a.h5", workers=1, progress=False)) as packed:
        assert all(torch.equal(packed[i], last[i]) for i in range(40))


def test_axes_that_are_not_there(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    group.create_array("data", data=np.zeros((3, 4)))
    group.create_array("words", shape=(2, 2), dtype="str")[...] = "a"
    for axis, message in (
        (2, r"axis=2: .*'data' has shape \[3, 4\], and so the axes 0 to 1"),
        ("t", "no axis of that name.* none has"),
    ):
        with pytest.raises(ConfigError, match=message):
            ZarrDataset(tmp_path / "a.zarr", "data", axis=axis)
    with pytest.raises(ConfigError, match="elements of any size"):
        ZarrDataset(tmp_path / "a.zarr", ["words", "data"], axis=1)
    for options, message in (
        ({"axis": 1.0}, "axis must be the number"),
        ({"axis": 1, "patch_shape": (2, 2)}, "axis is for rows"),
    ):
        with pytest.raises(ConfigError, match=message):
            ZarrDataset(tmp_path / "a.zarr", "data", **options)


@pytest.mark.slow
class TestAnotherAxisKeepsTheLaws(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.getbasetemp() / "contract-axis.zarr"
        if not self.path.exists():
            zarr.create_array(
                self.path,
                data=np.random.default_rng(5).integers(0, 99, (3, 4, 37)),
                chunks=(3, 4, 5),
            )

    def make(self, **options: Any) -> ZarrDataset:
        return ZarrDataset(self.path, axis=2, **options)


@pytest.mark.parametrize(
    "options", [{"edges": "shift"}, {"edges": "nonsense"}, {"pad": "edge"}, {"stride": 2}]
)
def test_options_of_patches_need_a_patch_shape(options: Any, tmp_path: Path) -> None:
    zarr.create_array(str(tmp_path / "v.zarr"), shape=(8, 8, 8), chunks=(4, 4, 4), dtype="f4")
    with pytest.raises(
        ConfigError, match=f"{next(iter(options))} goes with patches: give patch_shape too"
    ):
        ZarrDataset(tmp_path / "v.zarr", **options)


@pytest.mark.parametrize(
    ("names", "options", "said"),
    [
        ([], {}, "dataset_name must be"),
        ([1], {}, "dataset_name must be"),
        ("x", {"target_name": ["y"]}, "target_name must be"),
    ],
)
def test_names_of_arrays_are_checked(names: Any, options: Any, said: str, tmp_path: Path) -> None:
    zarr.open_group(str(tmp_path / "g.zarr"), mode="w").create_array("x", data=np.zeros((4, 3)))
    with pytest.raises(ConfigError, match=said):
        ZarrDataset(tmp_path / "g.zarr", names, **options)
