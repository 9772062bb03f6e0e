"""Packs of images with masks, and with boxes: what is opened is what was packed, and other
programs read it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from PIL import Image

from headrace import (
    HDF5Dataset,
    ImageDataset,
    RandomHorizontalFlip,
    RandomResizedCrop,
    create_dataloader,
    open_dataset,
    pack,
)
from headrace.cli.main import main
from headrace.errors import (
    ConfigError,
    FileChangedError,
    FormatError,
    HeadraceWarning,
    SampleError,
    TargetExistsError,
)
from headrace.packing import pack_status, verify
from headrace.storage.hdf5.packed import packed_info
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.data.labelled import make_coco, make_pair, save_mask
from tests.packing.shared import contents, kill_four_times
from tests.servers.ranges import RangeServer
from tests.servers.s3 import S3Server

pytestmark = pytest.mark.quick_every(12)

SHARD, COUNT, SIZE = 6000, 24, (32, 24)
MODES = ("lazy", "eager", "cached", "streaming")
WAYS: dict[str, dict[str, Any]] = {
    "file": {},
    "parts": {"shard_size": SHARD},
    "zarr": {"shard_size": SHARD, "format": "zarr"},
    "header": {"check": "header"},
    "decoded": {"store": "decoded"},
    "decoded zarr": {"store": "decoded", "shard_size": SHARD, "format": "zarr"},
    "decoded chunks": {
        "store": "decoded",
        "shard_size": SHARD,
        "format": "zarr",
        "compression": "lz4",
        "chunks": 2,
    },
    "decoded parts": {"store": "decoded", "shard_size": SHARD, "compression": "gzip", "chunks": 2},
}


def make_folder(folder: Path, mode: str = "", count: int = COUNT) -> Path:
    """Writes images/ and masks/; masks of one mode of Pillow's, or of palette, grey and 16 bits
    in turn.
    """
    for number in range(count):
        image, mask, _ = make_pair(number, SIZE)
        name = f"{'ab'[number % 2]}/{number:03d}"
        for part in ("images", "masks"):
            (folder / part / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(
            folder / "images" / f"{name}.{('png', 'jpg')[number % 4 == 3]}", quality=95
        )
        save_mask(
            folder / "masks" / f"{name}.{'tif' if mode == 'I' else 'png'}",
            mask,
            mode or ("P", "L", "I;16")[number % 3],
        )
    return folder


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("masks"), "P")


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_coco(tmp_path_factory.mktemp("coco"))


def with_masks(folder: Path, **options: Any) -> ImageDataset:
    return ImageDataset(folder / "images", targets=folder / "masks", **options)


def with_boxes(folder: Path, **options: Any) -> ImageDataset:
    return ImageDataset(folder / "images", targets=folder / "instances.json", masks=True, **options)


@pytest.fixture(scope="module", params=["masks", "boxes"])
def source(request: pytest.FixtureRequest, masks: Path, coco: Path) -> Any:
    """Opens images with their targets."""
    if request.param == "masks":
        return lambda **options: with_masks(masks, **options)
    return lambda **options: with_boxes(coco, **options)


def samples_of(dataset: Any) -> list[Any]:
    """Those of one pass, in the order of their indices."""
    return [sample[:2] for sample in sorted(dataset, key=lambda sample: sample[-1])]


def joint(image: Any, target: Any) -> Any:
    """A transform of both that draws."""
    return np.asarray(image) + random.randrange(5), target


class TestEquality:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("way", WAYS)
    def test_samples_are_those_of_the_source(
        self, source: Any, way: str, mode: Any, tmp_path: Path
    ) -> None:
        with source(image_size=20) as dataset:
            out = pack(dataset, tmp_path / "out", **WAYS[way])
        assert verify(out).ok
        crop = [RandomResizedCrop(16, scale=(0.3, 1)), RandomHorizontalFlip()]
        for options in (
            {"image_size": 20},
            {"image_size": 20, "transform": crop, "normalize": False},
            *(
                {"image_size": 20, "transforms": [*crop, joint], "transform_input": kind}
                for kind in ("numpy", "pil")
            ),
            *([{"image_size": None}, {"transform": crop}] if "decoded" not in way else []),
        ):
            with (
                source(return_index=True, **options) as one,
                ImageDataset(out, loading_mode=mode, return_index=True, **options) as other,
            ):
                one.set_epoch(2)
                other.set_epoch(2)
                assert same(samples_of(one), samples_of(other)), options
                assert (
                    one.fingerprint == other.fingerprint
                    and one.class_to_idx == other.class_to_idx
                    and one.classes == other.classes
                )

    @pytest.mark.parametrize("mode", ["P", "L", "1", "I;16", "I"])
    def test_any_depth_of_masks(self, mode: str, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "in", mode, 6)
        decoded: dict[str, Any] = {"store": "decoded", "shard_size": 2000}
        for how in (
            {},
            {"store": "decoded"},
            decoded,
            {**decoded, "format": "zarr"},
            {"store": "jpeg"},
        ):
            with with_masks(folder, image_size=(24, 32)) as dataset:
                out = pack(dataset, tmp_path / "-".join(map(str, ["out", *how.values()])), **how)
            options: dict[str, Any] = {
                "transforms": lambda image, mask: (0, mask),
                "transform_input": "pil",
                "image_size": (24, 32),
            }
            for (_, ours), (_, theirs) in zip(
                ImageDataset(out, **options), with_masks(folder, **options), strict=True
            ):
                assert ours.mode == theirs.mode and np.array_equal(ours, theirs)

    def test_batches_of_loaders(self, source: Any, tmp_path: Path) -> None:
        with source(image_size=20) as dataset:
            out = pack(dataset, tmp_path / "out", shard_size=SHARD)
            ours, theirs = (
                list(create_dataloader(one, batch_size=5, shuffle=True, seed=3, num_workers=2))
                for one in (ImageDataset(out, image_size=20), dataset)
            )
        assert same(ours, theirs)

    def test_a_pack_is_packed_again(self, source: Any, tmp_path: Path) -> None:
        with source(image_size=20) as dataset:
            out = pack(dataset, tmp_path / "out", shard_size=SHARD)
            plain = list(dataset)
        decoded: dict[str, Any] = {"store": "decoded", "format": "zarr"}
        for number, how in enumerate(
            (
                {},
                {"shard_size": 9000},
                {"store": "decoded"},
                {"shard_size": 9000, "format": "zarr"},
                decoded,
            )
        ):
            with open_dataset(out, image_size=20) as dataset:
                again = pack(dataset, tmp_path / f"again{number}", **how)
            with open_dataset(again, image_size=20) as dataset:
                assert same(list(dataset), plain)
        for number, how in ((2, {}), (4, {"store": "decoded"}), (2, decoded)):
            with ImageDataset(tmp_path / f"again{number}", image_size=20) as dataset:
                last = pack(dataset, tmp_path / f"last{number}{len(how)}", **how)
                with ImageDataset(last) as packed:
                    assert same(list(packed), plain)

    def test_views(self, source: Any, tmp_path: Path) -> None:
        with source(image_size=20) as dataset:
            for how in ({}, {"store": "decoded"}, {"store": "decoded", "format": "zarr"}):
                out = pack(
                    dataset.subset([7, 3, 11]), tmp_path / "-".join(["out", *how.values()]), **how
                )
                with ImageDataset(out, image_size=20) as packed:
                    assert same(list(packed), [dataset[7], dataset[3], dataset[11]]) and same(
                        packed[2:][0], dataset[11]
                    )

    @pytest.mark.parametrize(
        "how",
        [
            {},
            {"store": "decoded"},
            {"shard_size": SHARD, "format": "zarr"},
            {"store": "decoded", "format": "zarr"},
        ],
    )
    def test_images_alone(self, masks: Path, how: dict[str, Any], tmp_path: Path) -> None:
        with (
            with_masks(masks, image_size=20) as dataset,
            ImageDataset(masks / "images", targets=None, image_size=20) as images,
        ):
            out = pack(dataset, tmp_path / "out", **how)
            with ImageDataset(out, targets=None, image_size=20) as alone:
                assert same(list(alone), list(images))
                again = pack(alone, tmp_path / "again")
            with ImageDataset(again, image_size=20) as packed:
                assert same(list(packed), list(images)) and packed_info(again).version == 1  # type: ignore[union-attr]

    @pytest.mark.parametrize("how", [{}, {"store": "decoded", "format": "zarr"}])
    def test_through_a_server(self, source: Any, how: dict[str, Any], tmp_path: Path) -> None:
        with source(image_size=20) as dataset:
            plain = list(dataset)
            pack(dataset, tmp_path / "out", shard_size=SHARD, **how)
        with RangeServer(tmp_path / "out") as server:
            for mode in ("lazy", "streaming"):
                path = f"{server.url}/manifest.json"
                with ImageDataset(
                    path, image_size=20, loading_mode=mode, return_index=True
                ) as remote:  # type: ignore[arg-type]
                    assert same(samples_of(remote), plain)


class TestLayout:
    def test_h5py_alone_reads_images_and_masks(self, masks: Path, tmp_path: Path) -> None:
        with with_masks(masks) as dataset:
            out, files = pack(dataset, tmp_path / "out.h5"), dataset.samples
        with h5py.File(out) as file:
            data, offsets, starts = file["data"], file["offsets"], file["mask_starts"]
            for number, (image, mask) in enumerate(files):
                assert data[offsets[number] : starts[number]].tobytes() == Path(image).read_bytes()
                assert (
                    data[starts[number] : offsets[number + 1]].tobytes() == Path(mask).read_bytes()
                )
            assert json.loads(file.attrs["headrace"])["version"] == 4, "earlier versions refuse it"

    def test_h5py_alone_reads_pixels(self, masks: Path, tmp_path: Path) -> None:
        with with_masks(masks, image_size=(10, 14), normalize=False) as dataset:
            out = pack(dataset, tmp_path / "out.h5", store="decoded")
            with h5py.File(out) as file:
                rows = file["data"][:]
                assert rows["image"].shape == (COUNT, 10, 14, 3) and rows["mask"].dtype == np.uint8
                for row, (image, mask) in zip(rows, dataset, strict=True):
                    assert np.array_equal(row["image"], image.permute(1, 2, 0)) and np.array_equal(
                        row["mask"], mask
                    )

    def test_h5py_alone_reads_boxes(self, coco: Path, tmp_path: Path) -> None:
        with with_boxes(coco) as dataset:
            out, targets = pack(dataset, tmp_path / "out.h5"), dataset.targets
        said = json.loads((coco / "instances.json").read_text())
        with h5py.File(out) as file:
            edges, names = file["object_offsets"], json.loads(file.attrs["headrace"])
            for number, target in enumerate(targets):
                objects = slice(edges[number], edges[number + 1])
                for name in ("boxes", "labels", "area", "iscrowd"):
                    assert np.array_equal(file[name][objects], target[name])
                assert file["image_id"][number] == target["image_id"] and file["image_size"][
                    number
                ].tolist() == [24, 32]
                outlines = file["segmentations"][
                    file["segmentation_offsets"][number] : file["segmentation_offsets"][number + 1]
                ]
                wanted = [
                    one["segmentation"]
                    for one in said["annotations"]
                    if one["image_id"] == target["image_id"]
                ]
                assert json.loads(outlines.tobytes()) == wanted
            assert dict(zip(names["classes"], names["image"]["class_ids"], strict=True)) == {
                "mill": 3,
                "wheel": 7,
            }

    def test_zarr_alone_reads_images_and_masks(self, masks: Path, tmp_path: Path) -> None:
        with with_masks(masks) as dataset:
            out, files = (
                pack(dataset, tmp_path / "out", shard_size=SHARD, format="zarr"),
                dataset.samples,
            )
        group: Any = zarr.open_group(Path(out) / "data.zarr", mode="r")
        starts, stops, masks_at = group["starts"][:], group["stops"][:], group["mask_starts"][:]
        assert pack_status(out).parts > 2
        for number, (image, mask) in enumerate(files):
            assert (
                group["data"][starts[number] : masks_at[number]].tobytes()
                == Path(image).read_bytes()
            )
            assert (
                group["data"][masks_at[number] : stops[number]].tobytes() == Path(mask).read_bytes()
            )

    def test_zarr_alone_reads_pixels_and_masks(self, masks: Path, tmp_path: Path) -> None:
        with with_masks(masks, image_size=(10, 14), normalize=False) as dataset:
            out = pack(dataset, tmp_path / "out", store="decoded", shard_size=SHARD, format="zarr")
            group: Any = zarr.open_group(Path(out) / "data.zarr", mode="r")
            images, numbers = group["data"][:], group["mask"][:]
            assert (
                images.shape == (COUNT, 10, 14, 3)
                and numbers.dtype == np.uint8
                and pack_status(out).parts > 2
            )
            for at, (image, mask) in enumerate(dataset):
                assert np.array_equal(images[at], image.permute(1, 2, 0)) and np.array_equal(
                    numbers[at], mask
                )
                assert group["crc32"][at] == zlib.crc32(
                    images[at].tobytes() + numbers[at].tobytes()
                )
        assert json.loads(group.attrs["headrace"])["version"] == 6, "earlier versions refuse it"

    def test_zarr_alone_reads_boxes(self, coco: Path, tmp_path: Path) -> None:
        with with_boxes(coco) as dataset:
            out, targets = (
                pack(dataset, tmp_path / "out", shard_size=SHARD, format="zarr"),
                dataset.targets,
            )
        group: Any = zarr.open_group(Path(out) / "data.zarr", mode="r")
        assert pack_status(out).parts > 2
        for number, target in enumerate(targets):
            objects = slice(int(group["object_starts"][number]), int(group["object_stops"][number]))
            for name in ("boxes", "labels", "area", "iscrowd"):
                assert np.array_equal(group[name][objects], target[name])
            assert group["image_id"][number] == target["image_id"]


class TestReencoding:
    def test_masks_lose_nothing(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "in", count=8)
        for path in sorted((folder / "images").rglob("*.*")):  # large ones, which become smaller
            Image.open(path).resize((320, 240)).save(path)
            Image.open(mask := folder / "masks" / path.parent.name / f"{path.stem}.png").resize(
                (320, 240), Image.Resampling.NEAREST
            ).save(mask)
        with with_masks(folder, image_size=None) as dataset:
            for how in ({}, {"max_size": 100}):
                out = pack(dataset, tmp_path / f"out{len(how)}", store="jpeg", quality=70, **how)  # type: ignore[arg-type]
                with ImageDataset(out, image_size=None, normalize=False) as packed:
                    for (image, mask), (_, plain) in zip(packed, dataset, strict=True):
                        if how:
                            assert image.shape[1:] == mask.shape == (75, 100)
                            rows, columns = (
                                (2 * np.arange(75) + 1) * 240 // 150,
                                (2 * np.arange(100) + 1) * 320 // 200,
                            )
                            assert np.array_equal(mask, plain.numpy()[rows[:, None], columns])
                        else:
                            assert torch.equal(mask, plain)
                assert Path(out).stat().st_size < sum(
                    path.stat().st_size for path in folder.rglob("*.*")
                )

    def test_boxes_are_scaled_with_their_image(self, coco: Path, tmp_path: Path) -> None:
        with (
            with_boxes(coco, image_size=None) as dataset,
            with_boxes(coco, image_size=20) as resized,
        ):
            out = pack(dataset, tmp_path / "out", store="jpeg", max_size=16, quality=60)
            with ImageDataset(out, image_size=20) as packed:
                assert all(
                    same(ours[1], theirs[1]) for ours, theirs in zip(packed, resized, strict=True)
                )
            with ImageDataset(out, image_size=None) as packed:
                scales = set()
                for (image, target), (plain, known) in zip(packed, dataset, strict=True):
                    scale = image.shape[2] / plain.shape[2]
                    assert (
                        torch.allclose(target["boxes"], known["boxes"] * scale)
                        and target["masks"].shape[1:] == image.shape[1:]
                    )
                    scales.add(scale)
                assert 0.5 in scales

    def test_sizes_that_annotations_lack_are_looked_up(self, coco: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(coco, tmp_path / "in"))
        said = json.loads((folder / "instances.json").read_text())
        for entry in said["images"]:
            del entry["width"]
        (folder / "instances.json").write_text(json.dumps(said))
        with with_boxes(folder, image_size=20) as dataset:
            for how in ({"store": "jpeg", "max_size": 16}, {"store": "decoded"}, {}):
                out = pack(dataset, tmp_path / f"out{len(how)}", **how)  # type: ignore[call-overload]
                with ImageDataset(out, image_size=20) as packed:
                    assert all(
                        same(ours[1], theirs[1])
                        for ours, theirs in zip(packed, dataset, strict=True)
                    )


class TestJobs:
    @pytest.mark.parametrize(
        "how",
        [
            {},
            {"store": "decoded"},
            {"store": "jpeg", "max_size": 20},
            {"format": "zarr"},
            {"store": "decoded", "format": "zarr"},
        ],
    )
    def test_same_bytes_whoever_packs(
        self, source: Any, how: dict[str, Any], tmp_path: Path
    ) -> None:
        with source(image_size=20) as dataset:
            whole = pack(dataset, tmp_path / "whole", shard_size=SHARD, **how)
            for number in range(3):
                pack(dataset, tmp_path / "shares", shard_size=SHARD, part=f"{number}/3", **how)
            pack(dataset, tmp_path / "two", shard_size=SHARD, processes=2, **how)
        assert (
            contents(tmp_path / "shares") == contents(tmp_path / "two") == contents(Path(whole))
            and pack_status(whole).parts > 2
        )

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("store", "format"),
        [("encoded", None), ("decoded", None), ("decoded", "zarr"), ("jpeg", None)],
    )
    def test_kills_lose_nothing(
        self, masks: Path, store: str, format: str | None, tmp_path: Path
    ) -> None:
        with with_masks(masks, image_size=20) as dataset:
            whole = pack(dataset, tmp_path / "whole", shard_size=SHARD, store=store, format=format)  # type: ignore[call-overload]
        kill_four_times(
            _JOB,
            [masks, tmp_path / "out", store, format or "hdf5"],
            tmp_path / "out",
            random.Random(store),
        )
        assert contents(tmp_path / "out") == contents(whole)

    def test_a_killed_job_goes_on(self, source: Any, tmp_path: Path) -> None:
        with source(image_size=20) as dataset:
            whole, out = pack(dataset, tmp_path / "whole", shard_size=SHARD), tmp_path / "out"
            pack(dataset, out, shard_size=SHARD, parts="0:2")
            (out / ".part-00002-of-00009.h5.0123abcd.part").write_bytes(b"of a job that was killed")
            before = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
            pack(dataset, out, shard_size=SHARD)
        assert {name: (out / name).stat().st_mtime_ns for name in before} == before and len(
            before
        ) == 4
        assert {name: one for name, one in contents(out).items() if name[0] != "."} == contents(
            Path(whole)
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("how", [{}, {"store": "decoded", "format": "zarr"}])
    def test_to_an_object_store(self, source: Any, how: dict[str, Any], tmp_path: Path) -> None:
        with S3Server() as server, source(image_size=20) as dataset:
            server.client().create_bucket(Bucket="bucket")
            out = pack(
                dataset,
                "s3://bucket/packed",
                shard_size=SHARD,
                storage_options=server.options,
                **how,
            )
            assert verify(out, storage_options=server.options).ok
            with open_dataset(
                f"{out}/manifest.json", storage_options=server.options, image_size=20
            ) as packed:
                assert same(list(packed), list(dataset))

    def test_other_annotations_are_another_plan(self, coco: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(coco, tmp_path / "in"))
        pack(with_boxes(folder), tmp_path / "out", shard_size=SHARD, parts="0:1")
        said = (folder / "instances.json").read_text().replace('"iscrowd": 1', '"iscrowd": 0')
        (folder / "instances.json").write_text(said)
        with pytest.raises(TargetExistsError, match="annotations: "):
            pack(with_boxes(folder), tmp_path / "out", shard_size=SHARD)

    def test_other_labels_are_another_plan(self, coco: Path, tmp_path: Path) -> None:
        names = [path.name for path in (coco / "images").iterdir()]
        labels = dict(zip(names, range(COUNT), strict=True))
        pack(
            ImageDataset(coco / "images", targets=labels),
            tmp_path / "out",
            shard_size=SHARD,
            parts="0:1",
        )
        with pytest.raises(TargetExistsError, match="annotations: "):
            pack(
                ImageDataset(coco / "images", targets={**labels, names[5]: 99}),
                tmp_path / "out",
                shard_size=SHARD,
            )
        pack(ImageDataset(coco / "images", targets=labels), tmp_path / "out", shard_size=SHARD)

    def test_a_changed_mask_is_an_error(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "in", "L")
        pack(with_masks(folder), tmp_path / "out", shard_size=SHARD, parts="0:1")
        save_mask(folder / "masks/b/023.png", np.zeros((24, 32)), "L")
        with pytest.raises(
            FileChangedError,
            match=(
                r"images/b/023\.jpg with .*masks/b/023\.png \(sample 23\) has another name or "
                r"size"
            ),
        ):
            pack(with_masks(folder), tmp_path / "out", shard_size=SHARD, part="0/1")
        with pytest.raises(TargetExistsError, match="names or sizes of samples"):
            pack(with_masks(folder), tmp_path / "out", shard_size=SHARD)

    @pytest.mark.parametrize(
        "how", [{}, {"store": "decoded"}, {"store": "decoded", "format": "zarr"}, {"store": "jpeg"}]
    )
    def test_dry_run(self, source: Any, how: dict[str, Any], tmp_path: Path) -> None:
        with source(image_size=20) as dataset:
            plan = pack(dataset, tmp_path / "out", shard_size=SHARD, dry_run=True, **how)
            assert (plan.samples, plan.kind) == (COUNT, "image") and not (tmp_path / "out").exists()
            assert (
                plan.parts
                == pack_status(pack(dataset, tmp_path / "out", shard_size=SHARD, **how)).parts
            )


_JOB = """
import sys
from headrace import ImageDataset, pack
dataset = ImageDataset(sys.argv[1] + "/images", targets=sys.argv[1] + "/masks", image_size=20)
pack(dataset, sys.argv[2], shard_size=6000, store=sys.argv[3], format=sys.argv[4], progress=False)
"""


class TestBadInput:
    @pytest.fixture
    def bad(self, tmp_path: Path) -> Path:
        """A mask of another size, and a broken one."""
        folder = make_folder(tmp_path / "bad", "L")
        save_mask(folder / "masks/a/002.png", np.zeros((9, 8)), "L")
        (folder / "masks/b/001.png").write_bytes(b"nothing")
        return folder

    @pytest.mark.parametrize(
        "how",
        [
            *(
                {},
                {"check": "header"},
                {"store": "decoded"},
                {"store": "jpeg"},
                {"format": "zarr", "shard_size": SHARD},
            ),
            {"format": "zarr", "shard_size": SHARD, "store": "decoded"},
        ],
    )
    def test_masks_that_don_t_fit_are_named(
        self, bad: Path, how: dict[str, Any], tmp_path: Path
    ) -> None:
        with pytest.raises(
            SampleError,
            match=(
                r"sample 1 .*images/a/002\.png with .*the image is 32 x 24 pixels, and its mask 8 "
                r"x 9"
            ),
        ):
            pack(with_masks(bad, image_size=20), tmp_path / "out", **how)
        with pytest.warns(HeadraceWarning, match="2 .*samples can't be read and were left out"):
            out = pack(
                with_masks(bad, image_size=20, on_error="skip"),
                tmp_path / "out",
                **{**how, **({"overwrite": True} if "format" in how else {})},
            )
        with ImageDataset(out, image_size=20) as packed:
            assert len(packed) == COUNT - 2 and verify(out).ok
            with with_masks(bad, image_size=20) as dataset:
                assert [
                    path
                    for path in map(packed.source_of, range(22))
                    if "002" in path or "001" in path
                ] == []
                if "jpeg" not in how.values():
                    assert same(packed[0], dataset[0]) and same(packed[21], dataset[23])

    def test_masks_of_several_depths_have_no_rows(self, tmp_path: Path) -> None:
        with with_masks(make_folder(tmp_path / "in"), image_size=20) as dataset:
            for on_error in ("raise", "skip"):
                dataset.on_error = on_error  # type: ignore[assignment]
                with pytest.raises(
                    ConfigError, match=r"the mask of .*002\.png is uint16, and the first one uint8"
                ):
                    pack(dataset, tmp_path / "out", store="decoded")
                with pytest.raises(
                    ConfigError, match=r"the mask of .*002\.png is uint16, and the first one uint8"
                ):
                    pack(dataset, tmp_path / "zarr", store="decoded", format="zarr", overwrite=True)
            pack(dataset, tmp_path / "out")

    @pytest.mark.parametrize(
        "how", [{}, {"check": "header"}, {"store": "decoded"}, {"store": "jpeg"}]
    )
    def test_boxes_of_another_size_are_named(
        self, coco: Path, how: dict[str, Any], tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(coco, tmp_path / "in"))
        (folder / "instances.json").write_text(
            (folder / "instances.json").read_text().replace('"width": 32', '"width": 33', 1)
        )
        with pytest.raises(
            SampleError,
            match=r"sample 0 .*the image is 32 x 24 pixels, and .*instances\.json says 33 x 24",
        ):
            pack(with_boxes(folder, image_size=20), tmp_path / "out", **how)

    def test_targets_of_a_pack_stay(self, masks: Path, coco: Path, tmp_path: Path) -> None:
        one, other = (
            pack(with_masks(masks), tmp_path / "one"),
            pack(
                ImageDataset(coco / "images", targets=coco / "instances.json"), tmp_path / "other"
            ),
        )
        with pytest.raises(ConfigError, match="can't be changed for a packed file"):
            ImageDataset(one, targets=masks / "masks")
        for path in (one, other):
            with pytest.raises(
                ConfigError,
                match=(
                    "holds no outlines of objects: pack a dataset that was opened with masks=True"
                ),
            ):
                ImageDataset(path, masks=True)
        with pytest.raises(ConfigError, match="holds images with masks: open it with ImageDataset"):
            pack(HDF5Dataset(one), tmp_path / "out")

    def test_another_store_is_another_plan(self, masks: Path, tmp_path: Path) -> None:
        with with_masks(masks, image_size=20, on_error="skip") as dataset:
            how: dict[str, Any] = {"format": "zarr", "shard_size": SHARD}
            pack(dataset, tmp_path / "out", store="decoded", part="0/2", **how)
            with pytest.raises(TargetExistsError, match="store: decoded there, encoded now"):
                pack(dataset, tmp_path / "out", part="1/2", **how)
            with (
                with_masks(masks, image_size=(20, 21)) as other,
                pytest.raises(TargetExistsError, match="holds the plan of another pack"),
            ):
                pack(other, tmp_path / "out", store="decoded", part="1/2", **how)
            out = pack(dataset, tmp_path / "out", store="decoded", part="1/2", **how)
            with ImageDataset(out, image_size=20) as packed:
                assert same(list(packed), list(dataset))

    @pytest.mark.parametrize(
        "how",
        [
            {},
            {"shard_size": 1 << 20, "format": "zarr"},
            {"store": "decoded"},
            {"store": "decoded", "format": "zarr"},
        ],
    )
    def test_each_flipped_byte_is_found(
        self, source: Any, how: dict[str, Any], tmp_path: Path
    ) -> None:
        """One in the middle of each array."""
        with source(image_size=8) as dataset:
            out = Path(pack(dataset, tmp_path / "out", **how))
        places: list[tuple[Path, int]] = []
        if out.is_file():
            with h5py.File(out) as file:
                places = [
                    (out, file[name].id.get_offset() + file[name].nbytes // 2) for name in file
                ]
        else:
            places = [
                (path, path.stat().st_size // 2)
                for path in sorted((out / "data.zarr").rglob("c.*"))
            ]
        assert len(places) >= 5
        for path, place in places:
            whole = path.read_bytes()
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            with contextlib.suppress(FormatError):
                assert not verify(out).ok, path
            path.write_bytes(whole)
        assert verify(out).ok


class TestCommand:
    def test_packs_masks_and_boxes(
        self, masks: Path, coco: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        one, other = tmp_path / "one.h5", tmp_path / "other.h5"
        assert (
            main(
                [
                    "pack",
                    str(masks / "images"),
                    str(one),
                    "--targets",
                    str(masks / "masks"),
                    "--store",
                    "decoded",
                    "--size",
                    "20",
                ]
            )
            == 0
        )
        assert (
            main(
                [
                    "pack",
                    str(coco / "images"),
                    str(other),
                    "--targets",
                    str(coco / "instances.json"),
                    "--masks",
                ]
            )
            == 0
        )
        assert same(list(ImageDataset(one)), list(with_masks(masks, image_size=20)))
        assert same(list(ImageDataset(other, image_size=20)), list(with_boxes(coco, image_size=20)))
        assert main(["verify", str(one), "--no-progress"]) == 0
        capsys.readouterr()
        for path, told in (
            (one, "24 (images with masks, stored decoded)"),
            (other, "24 (images with boxes, stored encoded)"),
        ):
            assert main(["info", str(path)]) == 0 and told in capsys.readouterr().out
            assert main(["preview", str(path), "-o", str(tmp_path / "sheet.png")]) == 0

    def test_info_counts_objects(
        self, coco: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        counts = {"mill": 0, "wheel": 0}
        with with_boxes(coco) as dataset:
            for label in itertools.chain.from_iterable(
                target["labels"].tolist() for target in dataset.targets
            ):
                counts[{3: "mill", 7: "wheel"}[label]] += 1
            outs = [
                pack(dataset, tmp_path / "parts", shard_size=SHARD),
                pack(dataset, tmp_path / "zarr", shard_size=SHARD, format="zarr"),
            ]
        for path in (outs[0], Path(outs[1]) / "data.zarr"):
            assert main(["info", "--json", str(path)]) == 0
            assert json.loads(capsys.readouterr().out)["classes"] == counts


class TestContractOfMasks(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, masks: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        out = tmp_path_factory.getbasetemp() / "contract-masks"
        self.path = out if out.exists() else Path(pack(with_masks(masks), out, shard_size=SHARD))

    def make(self, **options: Any) -> ImageDataset:
        return ImageDataset(self.path, image_size=8, **options)


class TestContractOfBoxes(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, coco: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        out = tmp_path_factory.getbasetemp() / "contract-boxes"
        self.path = (
            out
            if out.exists()
            else Path(pack(with_boxes(coco, image_size=8), out, store="decoded"))
        )

    def make(self, **options: Any) -> ImageDataset:
        return ImageDataset(self.path, **options)
