"""The level and the labels that an image of OME-NGFF gives lie where its metadata say."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import ConfigError, FormatError, MissingNameError, ZarrDataset, create_dataloader
from headrace.cli.main import main
from headrace.storage.zarr.ome import image_at, nearest
from headrace.storage.zarr.stores import open_store

pytestmark = pytest.mark.quick_every(3)

KINDS = {"t": "time", "c": "channel"}
SIZES = [(0.4, 0.2, 0.2), (0.8, 0.4, 0.4), (1.6, 0.8, 0.8)]
SHAPE = (2, 8, 12, 16)
VOLUME = np.random.default_rng(1).integers(-500, 500, SHAPE).astype("i2")
LABELS = np.random.default_rng(2).integers(0, 50, SHAPE[1:]).astype("u2")


def described(
    axes: str,
    levels: list[tuple[str, list[dict[str, Any]]]],
    version: str,
    after: Any = None,
    unit: str = "micrometer",
) -> Any:
    """The attributes of a group."""
    named = [
        {"name": a, "type": KINDS.get(a, "space"), **({} if a in KINDS else {"unit": unit})}
        for a in axes
    ]
    said: dict[str, Any] = {
        "axes": named,
        "datasets": [{"path": p, "coordinateTransformations": t} for p, t in levels],
    }
    if after is not None:
        said["coordinateTransformations"] = after
    if version == "0.4":
        return {"multiscales": [{"version": "0.4", **said}]}
    return {"ome": {"version": version, "multiscales": [said]}}


def lie(scale: Any, translation: Any = None) -> list[dict[str, Any]]:
    found = [{"type": "scale", "scale": list(scale)}]
    return (
        found
        if translation is None
        else [*found, {"type": "translation", "translation": list(translation)}]
    )


def write_image(
    root: Any, version: str, volume: np.ndarray[Any, Any] = VOLUME, after: Any = None
) -> None:
    """Three levels; every voxel of a coarser one is the first of eight, and lies in their midst."""
    levels = []
    for number, size in enumerate(SIZES):
        array = volume[:, :: 2**number, :: 2**number, :: 2**number]
        chunks = tuple(max(1, extent // 2) for extent in array.shape)
        root.create_array(str(number), shape=array.shape, dtype=array.dtype, chunks=chunks)[...] = (
            array
        )
        shift = [(have - finest) / 2 for have, finest in zip(size, SIZES[0], strict=True)]
        levels.append((str(number), lie((1, *size), (0, *shift))))
    root.attrs.update(described("czyx", levels, version, after))


def write_labels(
    root: Any,
    name: str,
    axes: str,
    array: np.ndarray[Any, Any],
    lies: Any,
    version: str,
    **more: Any,
) -> None:
    group = root.require_group("labels")
    said = {
        "labels": [*group.attrs.get("labels", group.attrs.get("ome", {}).get("labels", [])), name]
    }
    group.attrs.update(said if version == "0.4" else {"ome": said})
    one = group.create_group(name)
    one.create_array(
        "0",
        shape=array.shape,
        dtype=array.dtype,
        chunks=tuple(min(5, extent) for extent in array.shape),
    )[...] = array
    one.attrs.update(described(axes, [("0", lies)], version, **more))


@pytest.fixture(params=["0.4", "0.5"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(tmp_path: Path, version: str) -> Any:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2 if version == "0.4" else 3)
    write_image(root, version)
    write_labels(root, "cells", "zyx", LABELS, lie(SIZES[0]), version)
    return root


def path_of(root: Any) -> Path:
    return Path(root.store.root)


@pytest.mark.parametrize(
    ("scale", "level"),
    [
        (None, 0),
        (0.2, 0),
        (0.25, 0),
        (0.5, 1),
        (0.8, 2),
        (1.5, 2),
        ((0.8, 0.4, 0.4), 1),
        ({"x": 0.7}, 2),
        ({"z": 0.8}, 1),
    ],
)
def test_the_level_whose_voxels_are_nearest_in_size(root: Any, scale: Any, level: int) -> None:
    dataset = ZarrDataset(path_of(root), patch_shape=(2, 3, 4), scale=scale)
    step = 2**level
    assert dataset.voxel_size == pytest.approx((1, *SIZES[level])) and dataset.axes == (
        "c",
        "z",
        "y",
        "x",
    )
    assert torch.equal(
        dataset[0], torch.from_numpy(VOLUME[:, ::step, ::step, ::step][:, :2, :3, :4].copy())
    )
    assert (
        f"level '{level}' of 3: voxels of c 1, z {SIZES[level][0]:g} micrometer"
        in dataset.explain()
    )
    rows = ZarrDataset(path_of(root), scale=scale)
    assert len(rows) == 2 and rows[1].shape == VOLUME[1, ::step, ::step, ::step].shape


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (
            4,
            r"no level of .*a\.zarr is within a factor of 2; voxels have, along the same axes: "
            r"'0' \[0\.4, 0\.2, 0\.2\]; '1'",
        ),
        ((0.4, 0.2), r"needs 3 extents, along z, y, x"),
        ({"w": 1}, r"must name some of the axes c, z, y, x"),
        ({}, r"must name some of the axes c, z, y, x"),
        (-1, r"are positive numbers"),
        (float("nan"), r"are positive numbers"),
    ],
)
def test_scales_that_there_are_not(root: Any, scale: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ZarrDataset(path_of(root), patch_shape=(2, 3, 4), scale=scale)


def test_labels_go_with_patches(root: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cells", "labels/cells"):
        with pytest.raises(
            ConfigError,
            match=(
                rf"a\.zarr: '{name}' are labels of an image, and go with its patches: pass "
                r"patch_shape="
            ),
        ):
            ZarrDataset(path_of(root), target_name=name)
    assert (
        main(
            [
                "preview",
                str(path_of(root)),
                "--target-name",
                "cells",
                "-o",
                str(path_of(root) / "sheet.png"),
            ]
        )
        == 2
    )
    assert "go with its patches: pass --patch-shape 64" in capsys.readouterr().err


def test_scale_needs_an_image(root: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"picks a level of an image of OME-NGFF, and '0' of .* is none"
    ):
        ZarrDataset(path_of(root), "0", patch_shape=(2, 3, 4), scale=0.2)
    with pytest.raises(ConfigError, match="goes with one dataset_name"):
        ZarrDataset(path_of(root), ["0", "1"], scale=0.2)


def test_positions_are_those_of_the_voxels_centres(tmp_path: Path, version: str) -> None:
    root = zarr.open_group(tmp_path / "b.zarr", mode="w", zarr_format=2 if version == "0.4" else 3)
    image = root.create_group("plate/A")
    write_image(image, version, after=lie((1, 10, 10, 10), (0, 5, 6, 7)))
    dataset = ZarrDataset(
        tmp_path / "b.zarr", "plate/A", patch_shape={"y": 3, "x": 4}, stride={"y": 2}, scale=4
    )
    assert dataset.voxel_size == pytest.approx((1, 8, 4, 4)) and dataset[0].shape == (2, 4, 3, 4)
    index = len(dataset) - 1
    assert dataset.corner_of(index) == (2, 4)
    assert dataset.position_of(index) == pytest.approx(
        (6 + 10 * (0.1 + 0.4 * 2), 7 + 10 * (0.1 + 0.4 * 4))
    )
    plain = ZarrDataset(tmp_path / "b.zarr", "plate/A/0", patch_shape=(3, 4))
    assert plain.axes is None and plain.voxel_size is None
    with pytest.raises(ConfigError, match="is no image of OME-NGFF"):
        plain.position_of(0)


def test_names_of_axes_without_ome(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    root.create_array(
        "x",
        shape=VOLUME.shape,
        dtype="i2",
        chunks=VOLUME.shape,
        dimension_names=["c", "z", "y", "x"],
    )[...] = VOLUME
    dataset = ZarrDataset(tmp_path / "a.zarr", patch_shape={"z": 2, "x": 4})
    assert dataset[1].shape == (2, 2, 12, 4)
    with pytest.raises(ConfigError, match=r"patch_shape=\{'w': 1\}: the axes have c, z, y, x"):
        ZarrDataset(tmp_path / "a.zarr", patch_shape={"w": 1})
    with pytest.raises(ConfigError, match=r"stride=\{'c': 1\}: the axes have z, y, x"):
        ZarrDataset(tmp_path / "a.zarr", patch_shape={"z": 2}, stride={"c": 1})


# -- labels


def expected_labels(
    labels: Any, lies: tuple[Any, Any], size: Any, shift: Any, corner: Any, patch: Any
) -> np.ndarray[Any, Any]:
    """Voxel by voxel: the label whose centre is nearest, 0 where none covers it."""
    found = np.zeros(patch, labels.dtype)
    for place in np.ndindex(*patch):
        at = []
        for axis in range(3):
            centre = size[axis] * (corner[axis] + place[axis]) + shift[axis]
            at.append(int(np.floor((centre - lies[1][axis]) / lies[0][axis] + 0.5 + 1e-6)))
        if all(0 <= a < extent for a, extent in zip(at, labels.shape, strict=True)):
            found[place] = labels[tuple(at)]
    return found


@pytest.mark.quick_every(12)
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize(
    ("size", "shift"),
    [
        (SIZES[0], (0, 0, 0)),  # the image's own voxels
        ((0.8, 0.4, 0.4), (0.2, 0.1, 0.1)),  # of 2 x 2 x 2
        # their first voxel in the place of the image's: every second one is halfway
        ((0.8, 0.4, 0.4), (0, 0, 0)),
        ((0.2, 0.1, 0.1), (-0.1, -0.05, -0.05)),  # finer ones
        ((0.5, 0.3, 0.7), (0.3, -0.4, 1.1)),  # others, that cover a part
        ((0.4, 0.2, 0.2), (40, 0, 0)),  # none is there
    ],
)
def test_labels_are_those_of_the_nearest_voxel(
    root: Any, version: str, level: int, size: Any, shift: Any
) -> None:
    write_labels(root, "other", "zyx", LABELS, lie(size, shift), version)
    dataset = ZarrDataset(
        path_of(root), target_name="other", patch_shape=(2, 3, 4), scale=SIZES[level], edges="shift"
    )
    own = SIZES[level]
    begin = [(have - finest) / 2 for have, finest in zip(own, SIZES[0], strict=True)]
    for index in range(len(dataset)):
        patch, labels = dataset[index]
        corner = dataset.corner_of(index)
        assert patch.shape == (2, 2, 3, 4) and labels.dtype == torch.uint16
        assert np.array_equal(
            labels.numpy(), expected_labels(LABELS, (size, shift), own, begin, corner, (2, 3, 4))
        ), corner
    assert ("has the nearest one" in dataset.explain()) == (
        level > 0 or (size, shift) != (SIZES[0], (0, 0, 0))
    )
    loader = create_dataloader(dataset, batch_size=4, shuffle="block", num_workers=0)
    assert sum(len(batch) for batch, _ in loader) == len(dataset)


@pytest.mark.parametrize("pad", ["reflect", "edge", "constant"])
def test_padding_of_labels_follows_the_image(root: Any, version: str, pad: Any) -> None:
    coarse = LABELS[::2, ::2, ::2]
    write_labels(root, "coarse", "zyx", coarse, lie((0.8, 0.4, 0.4), (0.2, 0.1, 0.1)), version)
    dataset = ZarrDataset(
        path_of(root), target_name="coarse", patch_shape=(3, 5, 7), edges="pad", pad=pad
    )
    reach = [(0, 1), (0, 3), (0, 5)]
    expected = np.pad(coarse.repeat(2, 0).repeat(2, 1).repeat(2, 2), reach, mode=pad)
    image = np.pad(VOLUME, [(0, 0), *reach], mode=pad)
    for index in range(len(dataset)):
        z, y, x = dataset.corner_of(index)
        patch, labels = dataset[index]
        assert np.array_equal(patch, image[:, z : z + 3, y : y + 5, x : x + 7])
        assert np.array_equal(labels, expected[z : z + 3, y : y + 5, x : x + 7])


def test_the_level_of_labels_is_the_nearest(root: Any, version: str) -> None:
    group = root["labels"].create_group("levels")
    levels = []
    for number, size in enumerate(SIZES):
        array = LABELS[:: 2**number, :: 2**number, :: 2**number]
        group.create_array(str(number), shape=array.shape, dtype="u2", chunks=array.shape)[...] = (
            array
        )
        levels.append(
            (
                str(number),
                lie(
                    size, [(have - finest) / 2 for have, finest in zip(size, SIZES[0], strict=True)]
                ),
            )
        )
    group.attrs.update(described("zyx", levels, version))
    for number, size in enumerate(SIZES):
        dataset = ZarrDataset(
            path_of(root), target_name="levels", patch_shape=(2, 3, 4), scale=size
        )
        assert np.array_equal(
            dataset[0][1], LABELS[:: 2**number, :: 2**number, :: 2**number][:2, :3, :4]
        )
        assert (
            f"labels/levels/{number}: pread" in dataset.explain()
            and "nearest one" not in dataset.explain()
        )


def test_axes_that_only_one_of_both_has(root: Any, version: str) -> None:
    one = LABELS[None]
    write_labels(root, "one", "czyx", one, lie((1, *SIZES[0])), version)
    write_labels(
        root, "timed", "tzyx", np.stack([LABELS, LABELS + 1]), lie((1, *SIZES[0])), version
    )
    for name, expected in (
        ("one", one),
        ("timed", np.stack([LABELS, LABELS + 1])),
        ("cells", LABELS),
    ):
        dataset = ZarrDataset(path_of(root), target_name=name, patch_shape=(2, 3, 4))
        assert np.array_equal(dataset[0][1], expected[..., :2, :3, :4])
    channels = ZarrDataset(path_of(root), target_name="cells", patch_shape=(1, 2, 3, 4))
    assert channels[0][0].shape == (1, 2, 3, 4) and np.array_equal(
        channels[0][1], LABELS[:2, :3, :4]
    )
    both = ZarrDataset(path_of(root), target_name="one", patch_shape=(1, 2, 3, 4))
    assert np.array_equal(both[len(both) - 1][1], one[:, -2:, -3:, -4:])


@pytest.mark.parametrize(
    ("axes", "more", "said"),
    [
        ("yxz", {}, "has its axes in another order, y, x, z, than the image: z, y, x"),
        ("czy", {}, "patches of the image go along x too"),
        (
            "zyx",
            {"unit": "nanometer"},
            "measured in nanometer along 'z', and the image in micrometer: write both in one unit",
        ),
    ],
)
def test_labels_that_do_not_fit(root: Any, version: str, axes: str, more: Any, said: str) -> None:
    write_labels(root, "odd", axes, LABELS, lie((1, 1, 1)), version, **more)
    with pytest.raises(ConfigError, match=said):
        ZarrDataset(path_of(root), target_name="odd", patch_shape=(2, 3, 4))


def test_labels_that_there_are_not(root: Any) -> None:
    with pytest.raises(
        MissingNameError, match="has no labels 'nuclei'; its image '/' lists: 'cells'"
    ):
        ZarrDataset(path_of(root), target_name="nuclei", patch_shape=(2, 3, 4))


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_nearest_is_nearest(data: Any) -> None:
    extents, steps = st.integers(1, 30), st.sampled_from([0.1, 0.25, 0.3, 0.5, 1.0, 1.7])
    here = data.draw(steps), data.draw(st.sampled_from([-3.3, 0.0, 0.05, 2.0]))
    there = data.draw(steps), data.draw(st.sampled_from([-1.0, 0.0, 0.125, 4.2]))
    extent, size = data.draw(extents), data.draw(extents)
    found = nearest(here, extent, there, size)
    centres = there[0] * np.arange(size) + there[1]
    for place, number in enumerate(found.tolist()):
        off = np.abs(centres - (here[0] * place + here[1]))
        if number < 0:
            assert off.min() > there[0] * (0.5 - 1e-5)
        else:
            assert off[number] <= off.min() + 1e-5 * there[0]


# -- metadata that are not as they should be


def broken(number: int) -> tuple[dict[str, Any], str]:
    good = described("zyx", [("0", lie((1, 1, 1)))], "0.5")
    one = good["ome"]["multiscales"][0]
    cases: list[tuple[str, Any, str]] = [
        ("multiscales", [], "IndexError"),
        ("multiscales", {"a": 1}, "KeyError"),
        ("multiscales", [{**one, "datasets": []}], "it has no levels"),
        (
            "multiscales",
            [{**one, "datasets": [{"path": "0", "coordinateTransformations": lie((1, 1))}]}],
            r"scale of \[1, 1\] for 3 axes",
        ),
        (
            "multiscales",
            [{**one, "datasets": [{"path": "0", "coordinateTransformations": lie((1, 0, 1))}]}],
            "which is not positive",
        ),
        (
            "multiscales",
            [{**one, "coordinateTransformations": [{"type": "affine"}]}],
            "a transformation of type 'affine'",
        ),
        (
            "multiscales",
            [{**one, "axes": ["z", "y", "x"]}],
            "0.4 and 0.5 are read: give the path of an array",
        ),
        (
            "multiscales",
            [{"datasets": one["datasets"]}],
            "0.4 and 0.5 are read: give the path of an array",
        ),
        ("multiscales", [{**one, "axes": [{"name": "z"}] * 3}], "two axes of one name"),
        (
            "multiscales",
            [{**one, "datasets": [{"path": "9", "coordinateTransformations": lie((1, 1, 1))}]}],
            "there is no such array",
        ),
        ("multiscales", [{**one, "datasets": [{"path": "../b.zarr/0"}]}], "leads out of the store"),
        (
            "multiscales",
            [{**one, "axes": one["axes"][1:], "datasets": [{"path": "0"}]}],
            r"has 2 axes, and '0' has shape \[8, 12, 16\]",
        ),
    ]
    key, value, said = cases[number]
    return {"ome": {"version": "0.5", key: value}}, said


@pytest.mark.parametrize("number", range(12))
def test_damaged_metadata(tmp_path: Path, number: int) -> None:
    said, message = broken(number)
    root = zarr.open_group(tmp_path / "a.zarr", mode="w", attributes=said)
    root.create_array("0", shape=LABELS.shape, dtype="u2", chunks=LABELS.shape)
    with pytest.raises(FormatError, match=message):
        ZarrDataset(tmp_path / "a.zarr", patch_shape=(2, 3))


@pytest.mark.parametrize("version", ["0.6", "0.6.dev1", "1.0"])
def test_a_later_version_is_not_supported_yet(tmp_path: Path, version: str) -> None:
    said = described("zyx", [("0", lie((1, 1, 1)))], "0.5")
    said["ome"]["version"] = version
    said["ome"]["multiscales"][0]["coordinateSystems"] = [
        {"name": "physical", "axes": said["ome"]["multiscales"][0].pop("axes")}
    ]
    root = zarr.open_group(tmp_path / "a.zarr", mode="w", attributes=said)
    root.create_array("0", data=LABELS)
    with pytest.raises(
        FormatError,
        match=(
            rf"OME-NGFF {version}, which is not supported yet; .*pass the path of an array as "
            r"dataset_name"
        ),
    ):
        ZarrDataset(tmp_path / "a.zarr", patch_shape=2)
    assert ZarrDataset(tmp_path / "a.zarr", "0", patch_shape=2)[0].shape == (2, 2, 2)


def test_one_extent_means_the_axes_of_space(root: Any) -> None:
    dataset = ZarrDataset(path_of(root), target_name="cells", patch_shape=3)
    assert dataset[0][0].shape == (2, 3, 3, 3) and dataset[0][1].shape == (3, 3, 3)


def test_no_image_at_all(tmp_path: Path) -> None:
    zarr.open_group(
        tmp_path / "a.zarr", mode="w", attributes={"ome": {"version": "0.5", "labels": []}}
    )
    assert image_at(open_store(tmp_path / "a.zarr"), "") is None


@pytest.mark.slow
def test_all_modes_and_workers_agree(root: Any, version: str) -> None:
    write_labels(
        root, "coarse", "zyx", LABELS[::2, ::2, ::2], lie((0.8, 0.4, 0.4), (0.2, 0.1, 0.1)), version
    )
    options: dict[str, Any] = {
        "target_name": "coarse",
        "patch_shape": (2, 3, 4),
        "stride": 2,
        "edges": "shift",
    }
    expected: list[Any] | None = None
    for mode, workers in itertools.product(("lazy", "eager", "cached", "streaming"), (0, 2)):
        dataset = ZarrDataset(path_of(root), loading_mode=mode, **options)
        loader = create_dataloader(
            dataset, batch_size=7, shuffle="block", seed=3, num_workers=workers
        )
        found = list(loader)
        loader.close()
        expected = expected or found
        assert all(
            torch.equal(a, b)
            for x, y in zip(found, expected, strict=True)
            for a, b in zip(x, y, strict=True)
        ), (mode, workers)
