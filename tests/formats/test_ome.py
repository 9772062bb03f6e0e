"""The level and the labels that an image of OME-NGFF gives lie where its metadata say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from headrace import ConfigError, FormatError, MissingNameError, ZarrDataset
from headrace.cli.main import main

KINDS = {"t": "time", "c": "channel"}
SIZES = [(0.4, 0.2, 0.2), (0.8, 0.4, 0.4), (1.6, 0.8, 0.8)]
SHAPE = (2, 8, 12, 16)
VOLUME = np.random.default_rng(1).integers(-500, 500, SHAPE).astype("i2")
LABELS = np.random.default_rng(2).integers(0, 50, SHAPE[1:]).astype("u2")


def described(axes: str, levels: Any, version: str, after: Any = None, unit: str = "µm") -> Any:
    """The attributes of a group: `levels` are paths and how they lie."""
    named = []
    for axis in axes:
        one = {"name": axis, "type": KINDS.get(axis, "space")}
        named.append(one if axis in KINDS else {**one, "unit": unit})
    datasets = [{"path": path, "coordinateTransformations": lies} for path, lies in levels]
    image: dict[str, Any] = {"axes": named, "datasets": datasets}
    if after is not None:
        image["coordinateTransformations"] = after
    if version == "0.4":
        return {"multiscales": [{"version": "0.4", **image}]}
    return {"ome": {"version": version, "multiscales": [image]}}


def lie(scale: Any, translation: Any = None) -> list[dict[str, Any]]:
    transformations = [{"type": "scale", "scale": list(scale)}]
    if translation is not None:
        transformations.append({"type": "translation", "translation": list(translation)})
    return transformations


def shift_of(size: Any) -> list[float]:
    """Where the first voxel of a level lies, in the midst of those of the finest that it covers."""
    return [(have - finest) / 2 for have, finest in zip(size, SIZES[0], strict=True)]


def write_levels(group: Any, axes: str, version: str, finest: Any, after: Any = None) -> None:
    """Three levels; every voxel of a coarser one is the first of eight."""
    levels, more = [], [1] * (len(axes) - 3)
    for number, size in enumerate(SIZES):
        array = finest[..., :: 2**number, :: 2**number, :: 2**number]
        chunks = tuple(max(1, extent // 2) for extent in array.shape)
        how: Any = {"shape": array.shape, "dtype": array.dtype, "chunks": chunks}
        group.create_array(str(number), **how)[...] = array
        levels.append((str(number), lie([*more, *size], [*[0] * len(more), *shift_of(size)])))
    group.attrs.update(described(axes, levels, version, after))


def write_labels(
    root: Any, name: str, axes: str, array: Any, lies: Any, version: str, **more: Any
) -> None:
    """Labels of one level."""
    group = root.require_group(f"labels/{name}")
    names = sorted({"cells", name})
    root["labels"].attrs.update(
        {"labels": names} if version == "0.4" else {"ome": {"labels": names}}
    )
    how: Any = {"chunks": tuple(min(5, extent) for extent in array.shape), "dtype": array.dtype}
    group.create_array("0", shape=array.shape, **how)[...] = array
    group.attrs.update(described(axes, [("0", lies)], version, **more))


BOTH_VERSIONS = pytest.mark.parametrize("version", ["0.4", "0.5"])


@pytest.fixture
def version() -> str:
    return "0.5"


@pytest.fixture
def root(tmp_path: Path, version: str) -> Any:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2 if version == "0.4" else 3)
    write_levels(root, "czyx", version, VOLUME)
    write_labels(root, "cells", "zyx", LABELS, lie(SIZES[0]), version)
    return root


def of(root: Any, **options: Any) -> ZarrDataset:
    return ZarrDataset(Path(root.store.root), **{"patch_shape": (2, 3, 4), **options})


@BOTH_VERSIONS
def test_the_level_whose_voxels_are_nearest_in_size(root: Any) -> None:
    scales: list[tuple[Any, int]] = [
        (None, 0),
        (0.2, 0),
        (0.25, 0),
        (0.5, 1),
        (0.8, 2),
        (1.5, 2),
        ((0.8, 0.4, 0.4), 1),
        ({"x": 0.7}, 2),
        ({"z": 0.8}, 1),
    ]
    for scale, level in scales:
        dataset, step = of(root, scale=scale), 2**level
        assert dataset.voxel_size == pytest.approx((1, *SIZES[level])), scale
        assert dataset.axes == ("c", "z", "y", "x")
        volume = VOLUME[:, ::step, ::step, ::step]
        assert np.array_equal(dataset[0], volume[:, :2, :3, :4])
        rows = of(root, scale=scale, patch_shape=None)
        assert len(rows) == 2 and rows[1].shape == volume[1].shape
    both = of(root, target_name="cells", patch_shape=3)  # one extent means the axes of space
    assert both[0][0].shape == (2, 3, 3, 3) and both[0][1].shape == (3, 3, 3)


def test_scales_that_there_are_not(root: Any) -> None:
    for scale in (4, (0.4, 0.2), {"w": 1}, {}, -1, float("nan")):
        with pytest.raises(ConfigError):
            of(root, scale=scale)
    for name in ("0", ["0", "1"]):
        with pytest.raises(ConfigError):
            ZarrDataset(Path(root.store.root), name, patch_shape=(2, 3, 4), scale=0.2)


def test_labels_go_with_patches(root: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cells", "labels/cells"):
        with pytest.raises(ConfigError, match=rf"'{name}'.*patch_shape="):
            of(root, target_name=name, patch_shape=None)
    path = Path(root.store.root)
    sheet = ["-o", str(path.with_name("sheet.png"))]
    assert main(["preview", str(path), "--target-name", "cells", *sheet]) == 2
    assert "--patch-shape 64" in capsys.readouterr().err
    with pytest.raises(MissingNameError, match=r"'nuclei'.*'cells'"):
        of(root, target_name="nuclei")


@BOTH_VERSIONS
def test_positions_are_those_of_the_voxels_centres(tmp_path: Path, version: str) -> None:
    root = zarr.open_group(tmp_path / "b.zarr", mode="w", zarr_format=2 if version == "0.4" else 3)
    after = lie((1, 10, 10, 10), (0, 5, 6, 7))
    write_levels(root.create_group("plate/A"), "czyx", version, VOLUME, after)
    patches: Any = {"patch_shape": {"y": 3, "x": 4}, "stride": {"y": 2}}
    dataset = ZarrDataset(tmp_path / "b.zarr", "plate/A", scale=4, **patches)
    assert dataset.voxel_size == pytest.approx((1, 8, 4, 4)) and dataset[0].shape == (2, 4, 3, 4)
    index = len(dataset) - 1
    assert dataset.corner_of(index) == (2, 4)
    position = (6 + 10 * (0.1 + 0.4 * 2), 7 + 10 * (0.1 + 0.4 * 4))
    assert dataset.position_of(index) == pytest.approx(position)
    plain = ZarrDataset(tmp_path / "b.zarr", "plate/A/0", patch_shape=(3, 4))
    assert plain.axes is None and plain.voxel_size is None
    with pytest.raises(ConfigError):
        plain.position_of(0)


def test_names_of_axes_without_ome(tmp_path: Path) -> None:
    how: Any = {"dimension_names": ["c", "z", "y", "x"], "chunks": SHAPE}
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    root.create_array("x", shape=SHAPE, dtype="i2", **how)[...] = VOLUME
    dataset = ZarrDataset(tmp_path / "a.zarr", patch_shape={"z": 2, "x": 4})
    assert dataset[1].shape == (2, 2, 12, 4)
    with pytest.raises(ConfigError, match=r"'w': 1.*c, z, y, x"):
        ZarrDataset(tmp_path / "a.zarr", patch_shape={"w": 1})
    with pytest.raises(ConfigError, match=r"'c': 1.*z, y, x"):
        ZarrDataset(tmp_path / "a.zarr", patch_shape={"z": 2}, stride={"c": 1})


# -- labels


def expected_labels(labels: Any, size: Any, shift: Any, level: int, corner: Any) -> Any:
    """Voxel by voxel of a patch: the label whose centre is nearest, 0 where none covers it."""
    own, patch = SIZES[level], (2, 3, 4)
    begin, found = shift_of(own), np.zeros(patch, labels.dtype)
    for place in np.ndindex(*patch):
        at = []
        for axis in range(3):
            centre = own[axis] * (corner[axis] + place[axis]) + begin[axis]
            at.append(int(np.floor((centre - shift[axis]) / size[axis] + 0.5 + 1e-6)))
        if all(0 <= a < extent for a, extent in zip(at, labels.shape, strict=True)):
            found[place] = labels[tuple(at)]
    return found


def test_labels_are_those_of_the_nearest_voxel(root: Any, version: str) -> None:
    cases: list[tuple[Any, Any]] = [
        (SIZES[0], (0, 0, 0)),  # the image's own voxels
        ((0.8, 0.4, 0.4), (0.2, 0.1, 0.1)),  # of 2 x 2 x 2
        # their first voxel in the place of the image's: every second one is halfway
        ((0.8, 0.4, 0.4), (0, 0, 0)),
        ((0.2, 0.1, 0.1), (-0.1, -0.05, -0.05)),  # finer ones
        ((0.5, 0.3, 0.7), (0.3, -0.4, 1.1)),  # others, that cover a part
        ((0.4, 0.2, 0.2), (40, 0, 0)),  # none is there
    ]
    for number, (size, shift) in enumerate(cases):
        write_labels(root, f"{number}", "zyx", LABELS, lie(size, shift), version)
        for level, own in enumerate(SIZES):
            dataset = of(root, target_name=f"{number}", scale=own, edges="shift")
            for index in range(0, len(dataset), 1 if level else 5):
                (patch, labels), corner = dataset[index], dataset.corner_of(index)
                assert patch.shape == (2, 2, 3, 4) and labels.dtype == torch.uint16
                expected = expected_labels(LABELS, size, shift, level, corner)
                assert np.array_equal(labels, expected), (size, shift, level, corner)
            assert ("has the nearest one" in dataset.explain()) == (level + number > 0)


def test_padding_of_labels_follows_the_image(root: Any, version: str) -> None:
    coarse = LABELS[::2, ::2, ::2]
    write_labels(root, "coarse", "zyx", coarse, lie(SIZES[1], shift_of(SIZES[1])), version)
    for pad in ("reflect", "edge", "constant"):
        options = {"patch_shape": (3, 5, 7), "edges": "pad", "pad": pad}
        dataset = of(root, target_name="coarse", **options)
        reach = [(0, 1), (0, 3), (0, 5)]
        expected = np.pad(coarse.repeat(2, 0).repeat(2, 1).repeat(2, 2), reach, mode=pad)
        image = np.pad(VOLUME, [(0, 0), *reach], mode=pad)
        for index in range(len(dataset)):
            z, y, x = dataset.corner_of(index)
            patch, labels = dataset[index]
            assert np.array_equal(patch, image[:, z : z + 3, y : y + 5, x : x + 7])
            assert np.array_equal(labels, expected[z : z + 3, y : y + 5, x : x + 7])


@BOTH_VERSIONS
def test_axes_that_only_one_of_both_has(root: Any, version: str) -> None:
    one, timed = LABELS[None], np.stack([LABELS, LABELS + 1])
    write_labels(root, "one", "czyx", one, lie((1, *SIZES[0])), version)
    write_labels(root, "timed", "tzyx", timed, lie((1, *SIZES[0])), version)
    for name, expected in (("one", one), ("timed", timed), ("cells", LABELS)):
        assert np.array_equal(of(root, target_name=name)[0][1], expected[..., :2, :3, :4])
    image, labels = of(root, target_name="cells", patch_shape=(1, 2, 3, 4))[0]
    assert image.shape == (1, 2, 3, 4) and np.array_equal(labels, LABELS[:2, :3, :4])
    both = of(root, target_name="one", patch_shape=(1, 2, 3, 4))
    assert np.array_equal(both[len(both) - 1][1], one[:, -2:, -3:, -4:])


def test_labels_that_do_not_fit(root: Any, version: str) -> None:
    for axes, unit, said in (
        ("yxz", "µm", "y, x, z"),
        ("czy", "µm", "go along z, y, x"),
        ("zyx", "nm", "nm along 'z'"),
    ):
        write_labels(root, axes, axes, LABELS, lie((1, 1, 1)), version, unit=unit)
        with pytest.raises(ConfigError, match=said):
            of(root, target_name=axes)


# -- metadata that are not as they should be


def test_damaged_metadata(tmp_path: Path) -> None:
    one = described("zyx", [("0", lie((1, 1, 1)))], "0.5")["ome"]["multiscales"][0]

    def at(path: str, *scale: int) -> Any:
        return {"datasets": [{"path": path, "coordinateTransformations": lie(scale)}]}

    for multiscales, said in (
        ([], "IndexError"),
        ({"a": 1}, "KeyError"),
        ([{**one, "datasets": []}], "no levels"),
        ([{**one, **at("0", 1, 1)}], r"\[1, 1\]"),
        ([{**one, **at("0", 1, 0, 1)}], "neither a positive scale"),
        ([{**one, "coordinateTransformations": [{"type": "affine"}]}], "'affine'"),
        ([{**one, "axes": ["z", "y", "x"]}], "path of an array"),
        ([{"datasets": one["datasets"]}], "path of an array"),
        ([{**one, "axes": [{"name": "z"}] * 3}], "two axes"),
        ([{**one, **at("9", 1, 1, 1)}], "which is missing"),
        ([{**one, "datasets": [{"path": "../b.zarr/0"}]}], "out of the store"),
        ([{**one, "axes": one["axes"][1:], "datasets": [{"path": "0"}]}], r"\[8, 12, 16\]"),
    ):
        attributes = {"ome": {"version": "0.5", "multiscales": multiscales}}
        root = zarr.open_group(tmp_path / "a.zarr", mode="w", attributes=attributes)
        root.create_array("0", shape=LABELS.shape, dtype="u2", chunks=LABELS.shape)
        with pytest.raises(FormatError, match=said):
            ZarrDataset(tmp_path / "a.zarr", patch_shape=(2, 3))


def test_a_later_version_is_not_supported_yet(tmp_path: Path) -> None:
    attributes = described("zyx", [("0", lie((1, 1, 1)))], "0.5")
    image = attributes["ome"]["multiscales"][0]
    image["coordinateSystems"] = [{"name": "physical", "axes": image.pop("axes")}]
    for version in ("0.6", "0.6.dev1", "1.0"):
        attributes["ome"]["version"] = version
        root = zarr.open_group(tmp_path / "a.zarr", mode="w", attributes=attributes)
        root.create_array("0", data=LABELS)
        with pytest.raises(FormatError, match=rf"OME-NGFF {version}"):
            ZarrDataset(tmp_path / "a.zarr", patch_shape=2)
        assert ZarrDataset(tmp_path / "a.zarr", "0", patch_shape=2)[0].shape == (2, 2, 2)
