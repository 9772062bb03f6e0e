"""Packs with masks, boxes, and dicts of targets: re-encoding, wrong sizes, other labels.

That samples are those of the source: test_round_trips.py.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from headrace import HDF5Dataset, ImageDataset, TextDataset, open_dataset, pack
from headrace.cli.main import main
from headrace.errors import (
    ConfigError,
    FileChangedError,
    FormatError,
    HeadraceWarning,
    SampleError,
    TargetExistsError,
)
from headrace.formats.hdf5.files import packed_info
from headrace.packing import verify
from headrace.packing.stored import StoredContents
from headrace.testing.contract import same
from tests.data.labelled import make_coco, make_pair, save_mask
from tests.data.make import make_photos
from tests.packing.cases import COLUMNS, COUNT, make_labels
from tests.packing.shared import samples_of

pytestmark = pytest.mark.quick_every(2)

SHARD = 6000
ENCODED = [{}, {"check": "header"}, {"store": "jpeg"}, {"shard_size": SHARD}]
DECODED = [{"store": "decoded"}, {"store": "decoded", "shard_size": 5000}]


def make_folder(folder: Path, mode: str, size: tuple[int, int] = (32, 24)) -> Path:
    """Writes images/ and masks/, of one of Pillow's modes."""
    for number in range(COUNT):
        image, mask, _ = make_pair(number, size)
        (folder / "images").mkdir(parents=True, exist_ok=True)
        (folder / "masks").mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / f"images/{number:03d}.png")
        save_mask(folder / f"masks/{number:03d}.{'tif' if mode == 'I' else 'png'}", mask, mode)
    return folder


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("masks"), "P")


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    return make_coco(tmp_path / "coco", COUNT)


def with_masks(folder: Path, **options: Any) -> ImageDataset:
    return ImageDataset(folder / "images", targets=folder / "masks", **options)


def with_boxes(folder: Path, **options: Any) -> ImageDataset:
    return ImageDataset(folder / "images", targets=folder / "instances.json", masks=True, **options)


def test_mask_that_begins_elsewhere(masks: Path, tmp_path: Path) -> None:
    """Image and mask changed meanwhile, and have as many bytes together as before."""
    read = StoredContents._encoded

    def moved(self: Any, *given: Any) -> Any:
        image, mask = read(self, *given)
        return bytes(image) + b"!", bytes(mask)[:-1]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SampleError, match="changed while"):
        patch.setattr(StoredContents, "_encoded", moved)
        pack(with_masks(masks), tmp_path / "out.h5")


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("mode", ["P", "L", "1", "I;16", "I"])
def test_any_depth_of_masks(mode: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in", mode)
    options: dict[str, Any] = {"transform_input": "pil", "image_size": (24, 32)}
    options["transforms"] = lambda image, mask: (0, mask)
    with with_masks(folder, **options) as source:
        wanted = [mask for _, mask in source]
    for number, how in enumerate([{}, *DECODED, {"store": "jpeg"}]):
        with with_masks(folder, image_size=(24, 32)) as source:
            out = pack(source, tmp_path / f"out{number}", **how)
        with ImageDataset(out, **options) as packed:
            for (_, mask), plain in zip(packed, wanted, strict=True):
                assert mask.mode == plain.mode and np.array_equal(mask, plain), how


@pytest.mark.parametrize("how", [{}, *DECODED])
def test_images_without_their_masks(masks: Path, how: Any, tmp_path: Path) -> None:
    images = partial(ImageDataset, targets=None, image_size=20)
    with with_masks(masks, image_size=20) as source:
        out = pack(source, tmp_path / "out", **how)
    with images(masks / "images") as plain, images(out) as alone:
        assert same(samples_of(alone), samples_of(plain))
        again = pack(alone, tmp_path / "again")
    info = packed_info(again)
    assert info is not None and info.version == 1


@pytest.mark.slow
def test_masks_lose_nothing_in_re_encoding(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in", "L", (320, 240))
    rows = (2 * np.arange(75) + 1) * 240 // 150
    columns = (2 * np.arange(100) + 1) * 320 // 200
    with with_masks(folder, image_size=None) as source:
        whole = pack(source, tmp_path / "whole", store="jpeg", quality=70)
        small = pack(source, tmp_path / "small", store="jpeg", quality=70, max_size=100)
        for number, (_, mask) in enumerate(source):
            with ImageDataset(whole, image_size=None) as packed:
                assert torch.equal(packed[number][1], mask)
            with ImageDataset(small, image_size=None) as packed:
                image, smaller = packed[number]
                assert image.shape[1:] == smaller.shape == (75, 100)
                assert np.array_equal(smaller, mask.numpy()[rows[:, None], columns])
    sizes = [path.stat().st_size for path in folder.rglob("*.*")]
    assert small.stat().st_size < whole.stat().st_size < sum(sizes)


@pytest.mark.parametrize("has_sizes", [False, True])
def test_boxes_are_scaled_with_their_image(has_sizes: bool, coco: Path, tmp_path: Path) -> None:
    """Also where the sizes of images must be looked up, since annotations lack them."""
    if not has_sizes:
        said = json.loads((coco / "instances.json").read_text())
        for entry in said["images"]:
            del entry["width"]
        (coco / "instances.json").write_text(json.dumps(said))
    with with_boxes(coco, image_size=None) as source, with_boxes(coco, image_size=20) as resized:
        out = pack(source, tmp_path / "out", store="jpeg", max_size=16, quality=60)
        with ImageDataset(out, image_size=20) as packed:
            targets = [target for _, target in resized]
            assert same([target for _, target in packed], targets)
        with ImageDataset(out, image_size=None) as packed:
            image, target = packed[0]
            assert image.shape == (3, 12, 16) == (3, *target["masks"].shape[1:])
            assert torch.allclose(target["boxes"], source[0][1]["boxes"] / 2)
        with ImageDataset(pack(resized, tmp_path / "rows", store="decoded")) as packed:
            assert same([target for _, target in packed], targets)


# --- another plan ---------------------------------------------------------------------------------


def test_other_annotations_are_another_plan(coco: Path, tmp_path: Path) -> None:
    path = coco / "instances.json"
    pack(with_boxes(coco), tmp_path / "out", shard_size=SHARD, part="0/99")
    path.write_text(path.read_text().replace('"iscrowd": 1', '"iscrowd": 0'))
    with pytest.raises(TargetExistsError, match="annotations"):
        pack(with_boxes(coco), tmp_path / "out", shard_size=SHARD)
    labels = {path.name: number for number, path in enumerate((coco / "images").iterdir())}
    labelled = partial(ImageDataset, coco / "images")
    pack(labelled(targets=labels), tmp_path / "labels", shard_size=SHARD, part="0/99")
    with pytest.raises(TargetExistsError, match="annotations"):
        others = {**labels, "005.jpg": 99}
        pack(labelled(targets=others), tmp_path / "labels", shard_size=SHARD)
    pack(labelled(targets=labels), tmp_path / "labels", shard_size=SHARD)


@pytest.mark.quick_every(1)
@pytest.mark.parametrize("kind", ["arrays", "records", "packed images"])
def test_other_targets_are_another_plan(kind: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["data"] = np.zeros((20, 2), np.float32)
        file["a"], file["b"] = np.arange(20), np.arange(20)[::-1]
    rows = [{"text": f"line {n}", "a": n, "b": -n} for n in range(20)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    photos = make_photos(tmp_path / "photos", ("circle", "noise"), 3)
    images = partial(ImageDataset, photos, targets={path.name: 7 for path in photos.rglob("*.*")})
    arrays = partial(HDF5Dataset, tmp_path / "in.h5", "data")
    made: dict[str, Any] = {
        "arrays": lambda name: arrays(target_name=name),
        "records": lambda name: TextDataset(tmp_path / "in.jsonl", target_field=name),
        "packed images": lambda name: ImageDataset(
            pack(photos if name == "a" else images(), tmp_path / f"{name}.h5", overwrite=True)
        ),
    }
    how: dict[str, Any] = {"shard_size": 40}
    out = pack(made[kind]("a"), tmp_path / "out", part="0/2", **how)
    with pytest.raises(TargetExistsError, match="annotations"):
        pack(made[kind]("b"), out, part="1/2", **how)
    pack(made[kind]("a"), out, part="1/2", **how)
    assert verify(out).ok


def test_a_changed_mask_is_an_error(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in", "L")
    pack(with_masks(folder), tmp_path / "out", shard_size=SHARD, part="0/99")
    save_mask(folder / "masks/011.png", np.zeros((24, 32)), "L")
    with pytest.raises(FileChangedError, match=r"samples .* to 11 has another name or size"):
        pack(with_masks(folder), tmp_path / "out", shard_size=SHARD, part="0/1")
    with pytest.raises(TargetExistsError):
        pack(with_masks(folder), tmp_path / "out", shard_size=SHARD)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("how", [*ENCODED, *DECODED], ids=str)
def test_masks_that_do_not_fit_are_named(how: dict[str, Any], tmp_path: Path) -> None:
    """One of another size, and a broken one."""
    folder = make_folder(tmp_path / "in", "L")
    save_mask(folder / "masks/002.png", np.zeros((9, 8)), "L")
    (folder / "masks/007.png").write_bytes(b"nothing")
    out = tmp_path / "out"
    with pytest.raises(SampleError, match=r"images/002\.png with .* 32 x 24 .* 8 x 9"):
        pack(with_masks(folder, image_size=20), out, workers=1, **how)
    source = with_masks(folder, image_size=20, on_error="skip")
    with pytest.warns(HeadraceWarning, match="2 .*can't be read and were left out"):
        pack(source, out, overwrite=out.exists(), **how)
    with ImageDataset(out, image_size=20) as packed:
        assert len(packed) == COUNT - 2 and verify(out).ok
        names = [packed.source_of(index)[-8:-1] for index in range(COUNT - 2)]
        assert not {"002.png", "007.png"} & set(names)
        if how.get("store") != "jpeg":
            assert same(packed[9], source[11]) and same(packed[2], source[3])


def test_boxes_of_another_size_are_named(coco: Path, tmp_path: Path) -> None:
    path = coco / "instances.json"
    path.write_text(path.read_text().replace('"width": 32', '"width": 33', 1))
    for number, how in enumerate([*ENCODED, *DECODED]):
        with pytest.raises(SampleError, match=r"sample 0 .* 32 x 24 .*instances\.json .*33 x 24"):
            pack(with_boxes(coco, image_size=20), tmp_path / f"out{number}", **how)


def test_masks_of_several_depths_have_no_rows(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in", "L")
    save_mask(folder / "masks/002.png", np.zeros((24, 32)), "I;16")
    for on_error in ("raise", "skip"):
        with with_masks(folder, image_size=20, on_error=on_error) as source:
            for number, how in enumerate(DECODED):
                with pytest.raises(ConfigError, match=r"002\.png is uint16, .* uint8"):
                    pack(source, tmp_path / f"out{number}", overwrite=True, **how)
    with with_masks(folder) as source:
        pack(source, tmp_path / "out")
    for path in (folder / "masks").iterdir():
        path.write_bytes(b"no mask")
    with pytest.raises(SampleError, match=r"masks can be read.* the first: .*000\.png"):
        pack(with_masks(folder, image_size=20, on_error="skip"), tmp_path / "none", **DECODED[0])


def test_targets_of_a_pack_stay(masks: Path, coco: Path, tmp_path: Path) -> None:
    one = pack(with_masks(masks), tmp_path / "one")
    boxes = ImageDataset(coco / "images", targets=coco / "instances.json")
    other = pack(boxes, tmp_path / "other")
    with pytest.raises(ConfigError):
        ImageDataset(one, targets=masks / "masks")
    for path in (one, other):
        with pytest.raises(ConfigError, match="masks=True"):
            ImageDataset(path, masks=True)
    with pytest.raises(ConfigError, match="ImageDataset"):
        pack(HDF5Dataset(one), tmp_path / "out")


# --- columns --------------------------------------------------------------------------------------


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    photos = make_photos(tmp_path / "photos", per_class=COUNT // 3, size=(32, 24))
    make_labels(photos, tmp_path / "labels.jsonl")
    return tmp_path


def labelled(folder: Path, **options: Any) -> ImageDataset:
    options = {"target_name": COLUMNS, "targets": folder / "labels.jsonl", **options}
    return ImageDataset(folder / "photos", **options)


@pytest.mark.parametrize("how", [{}, {"shard_size": 30}])
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


def test_packs_of_other_columns_are_no_dataset(trees: Path) -> None:
    for chosen in ("kind", "sound"):
        with labelled(trees, target_name=["height/m", chosen]) as source:
            pack(source, trees / f"{chosen}.h5")
    with pytest.raises(FormatError, match="can't be one dataset"):
        ImageDataset(str(trees / "*.h5"))


@pytest.mark.slow
def test_commands_with_targets(masks: Path, coco: Path, trees: Path, tmp_path: Path) -> None:
    small: Any = {"image_size": 20}
    boxes = [coco / "images", "--targets", coco / "instances.json", "--masks"]
    boxes += ["--shard-size", str(SHARD)]
    of_masks = [masks / "images", "--targets", masks / "masks", "--store", "decoded", "--size", 20]
    columns = [trees / "photos", "--targets", trees / "labels.jsonl"]
    two = ["--target-name", "kind", "--target-name", "sound"]
    jobs: list[tuple[ImageDataset, list[Any]]] = [
        (with_masks(masks, **small), of_masks),
        (with_boxes(coco, **small), boxes),
        (labelled(trees, **small), columns),
        (labelled(trees, target_name=["kind", "sound"], **small), [*columns, *two]),
    ]
    for number, (source, options) in enumerate(jobs):
        out = str(tmp_path / f"{number}")
        images, *others = map(str, options)
        assert main(["pack", images, out, *others, "--no-progress"]) == 0
        with source, ImageDataset(out, **small) as packed:
            assert same(samples_of(packed), samples_of(source))
        assert main(["preview", out, "-o", str(tmp_path / "sheet.png")]) == 0
