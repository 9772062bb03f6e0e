"""Images with annotations as COCO has them: read whole, and moved with their images."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headrace import (
    CollateError,
    ConfigError,
    DataNotFoundError,
    DetectionCollator,
    HeadraceError,
    HeadraceWarning,
    ImageDataset,
    MemoryEfficientDataset,
    RandomHorizontalFlip,
    RandomResizedCrop,
    SampleError,
)
from headrace.datasets.image.augment import Drawn
from headrace.datasets.image.boxes import place_boxes
from headrace.datasets.image.sizing import Box
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.data.labelled import coco_of, make_coco

pytestmark = pytest.mark.quick_every(4)

SIZE = (32, 24)


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_coco(tmp_path_factory.mktemp("coco"))


def opened(folder: Path, **options: Any) -> ImageDataset:
    return ImageDataset(folder / "images", targets=folder / "instances.json", **options)


def change(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """Edits the annotations."""
    path = folder / "instances.json"
    said = json.loads(path.read_text())
    edit(said)
    path.write_text(json.dumps(said))
    return folder


class TestTargets:
    def test_are_what_the_file_says(self, coco: Path) -> None:
        said, dataset = (
            json.loads((coco / "instances.json").read_text()),
            opened(coco, image_size=None),
        )
        assert (
            len(dataset) == 24
            and dataset.classes == ["mill", "wheel"]
            and dataset.class_to_idx == {"mill": 3, "wheel": 7}
        )
        ids = {entry["file_name"]: entry["id"] for entry in said["images"]}
        for (path, known), (_, target) in zip(dataset.samples, dataset, strict=True):
            wanted = [one for one in said["annotations"] if one["image_id"] == ids[Path(path).name]]
            boxes = [[x, y, x + w, y + h] for x, y, w, h in (one["bbox"] for one in wanted)]
            assert target["boxes"].dtype is torch.float32 and target["boxes"].shape == (
                len(wanted),
                4,
            )
            assert target["boxes"].tolist() == boxes and target["labels"].tolist() == [
                one["category_id"] for one in wanted
            ]
            assert (
                target["area"].tolist() == [one["area"] for one in wanted]
                and target["area"].dtype is torch.float32
            )
            assert (
                target["iscrowd"].tolist() == [one["iscrowd"] for one in wanted]
                and target["image_id"] == ids[Path(path).name]
            )
            assert target["labels"].dtype is target["iscrowd"].dtype is torch.int64 and same(
                target, known
            )
        assert [len(target["boxes"]) for _, target in dataset][4] == 0

    def test_boxes_are_where_the_image_shows_them(self, coco: Path) -> None:
        """The first object of each image is a bright rectangle."""
        for options in ({"image_size": None}, {"image_size": (60, 50)}):
            for image, target in opened(coco, normalize=False, **options):
                if len(target["boxes"]):
                    left, top, right, bottom = target["boxes"][0].round().int().tolist()
                    inside = image[:, top + 1 : bottom - 1, left + 1 : right - 1].float()
                    assert inside.numel() == 0 or inside.min() > 120

    def test_are_scaled_with_the_image(self, coco: Path) -> None:
        own, scaled = opened(coco, image_size=None), opened(coco, image_size=(12, 64))
        for (_, one), (image, other) in zip(own, scaled, strict=True):
            assert image.shape == (3, 12, 64)
            assert torch.allclose(other["boxes"], one["boxes"] * torch.tensor([2.0, 0.5, 2.0, 0.5]))
            assert torch.allclose(other["area"], one["area"])

    @pytest.mark.parametrize("mode", ["eager", "cached"])
    def test_modes_views_and_copies_give_the_same(self, coco: Path, mode: Any) -> None:
        plain = [*opened(coco, image_size=16)]
        with opened(coco, image_size=16, loading_mode=mode) as dataset:
            assert same([dataset[i] for i in range(24)], plain) and same(
                [*dataset[5:9]], plain[5:9]
            )
            assert same([*pickle.loads(pickle.dumps(dataset))], plain)
        with MemoryEfficientDataset(opened(coco, image_size=16)[4:], loading_mode=mode) as wrapped:
            assert same(wrapped[0], plain[4]) and wrapped.class_to_idx == {"mill": 3, "wheel": 7}

    def test_names_may_have_folders_before_them(self, coco: Path, tmp_path: Path) -> None:
        said = json.loads((coco / "instances.json").read_text())
        for entry in said["images"]:
            entry["file_name"] = f"train2017/{entry['file_name']}"
        (tmp_path / "labels.txt").write_text(json.dumps(said))
        dataset = ImageDataset(coco / "images", targets=tmp_path / "labels.txt", image_size=8)
        assert same([*dataset], [*opened(coco, image_size=8)])

    def test_sizes_may_be_left_out(self, coco: Path, tmp_path: Path) -> None:
        said = json.loads((coco / "instances.json").read_text())
        for entry in said["images"]:
            del entry["width"], entry["height"]
        (tmp_path / "labels.json").write_text(json.dumps(said))
        assert same(
            [*ImageDataset(coco / "images", targets=tmp_path / "labels.json")], [*opened(coco)]
        )


class TestBatches:
    def test_images_are_stacked_and_targets_listed(self, coco: Path, loader_of: Any) -> None:
        dataset = opened(coco, image_size=16)
        images, targets = next(iter(loader_of(dataset, shuffle=False)))
        assert images.shape == (4, 3, 16, 16) and isinstance(targets, list)
        assert same(
            [(image, target) for image, target in zip(images, targets, strict=True)],
            [dataset[i] for i in range(4)],
        )

    def test_images_of_their_own_sizes_are_a_list(self, coco: Path, loader_of: Any) -> None:
        dataset = opened(coco, image_size=None, return_index=True)
        for images, targets, indices in loader_of(dataset, num_workers=1):
            assert isinstance(images, list) and indices.dtype is torch.int64
            assert same(
                [*zip(images, targets, indices.tolist(), strict=True)],
                [dataset[i] for i in indices.tolist()],
            )

    def test_other_samples_are_refused(self) -> None:
        with pytest.raises(CollateError, match="pairs of an image and a dict are needed"):
            DetectionCollator()([(torch.zeros(1), 3)])
        with pytest.raises(CollateError, match="Give images one shape"):
            DetectionCollator()([(torch.zeros(1), {}), (torch.zeros(2), {})])


def place(
    boxes: Any, drawn: Drawn | None = None, crop: Any = None, frame: Any = (24, 32)
) -> list[list[float]]:
    return place_boxes(np.array(boxes, np.float32).reshape(-1, 4), (24, 32), frame, drawn, crop)[
        0
    ].tolist()


class TestGeometry:
    def test_a_flip_mirrors_boxes(self) -> None:
        assert place([[2, 3, 10, 20]], Drawn(None, True)) == [[22, 3, 30, 20]]

    def test_a_crop_moves_scales_and_clips_boxes(self) -> None:
        drawn = Drawn(Box(6, 8, 12, 16), False)
        assert place([[2, 3, 10, 20], [8, 6, 24, 18], [10, 8, 12, 9]], drawn, (24, 32)) == [
            [0, 0, 4, 24],
            [0, 0, 32, 24],
            [4, 4, 8, 6],
        ]

    def test_boxes_of_which_less_than_a_pixel_is_left_go(self) -> None:
        drawn = Drawn(Box(6, 8, 12, 16), False)
        assert place([[0, 0, 8, 6], [0, 0, 8.9, 20], [0, 0, 9, 7], [23.5, 7, 30, 9]], drawn) == [
            [0, 0, 1, 1]
        ]
        assert place([[3, 3, 3.25, 3.5]]) == [[3, 3, 3.25, 3.5]]

    @given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([None, (10, 11), (40, 33)]))
    def test_a_box_covers_the_same_pixels_as_its_mask(
        self, seed: int, flip: bool, crop: Any
    ) -> None:
        """Against a mask that is cropped, resized and mirrored pixel by pixel."""
        rng = np.random.default_rng(seed)
        left, top = rng.integers(0, 28), rng.integers(0, 20)
        right, bottom = rng.integers(left + 1, 33), rng.integers(top + 1, 25)
        y, x = int(rng.integers(0, 16)), int(rng.integers(0, 20))
        part = Box(y, x, int(rng.integers(4, 25 - y)), int(rng.integers(4, 33 - x)))
        found = place([[left, top, right, bottom]], Drawn(part, flip), crop)
        fine = np.zeros((24 * 8, 32 * 8), bool)
        fine[top * 8 : bottom * 8, left * 8 : right * 8] = True
        fine = fine[
            part.top * 8 : (part.top + part.height) * 8,
            part.left * 8 : (part.left + part.width) * 8,
        ]
        fine = fine[:, ::-1] if flip else fine
        height, width = crop or part[2:]
        rows, columns = np.flatnonzero(fine.any(1)), np.flatnonzero(fine.any(0))
        if not found:
            assert (
                not len(rows)
                or min(len(rows) * height / len(fine), len(columns) * width / fine.shape[1])
                < 1 + 1e-5
            )
            return
        edges = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
        scales = [width / fine.shape[1], height / fine.shape[0]] * 2
        assert np.allclose(found[0], np.multiply(edges, scales), atol=1e-3)

    @pytest.mark.parametrize("size", [None, (40, 40)])
    @pytest.mark.parametrize("hold", [None, "decoded"])
    def test_crops_and_flips_move_boxes_with_their_image(
        self, tmp_path: Path, size: Any, hold: Any
    ) -> None:
        (tmp_path / "images").mkdir()
        for number in range(8):
            image = np.zeros((24, 32), np.uint8)
            image[8:16, 10:26] = 255
            Image.fromarray(image).save(tmp_path / "images" / f"{number}.png")
        said = coco_of({f"{number}.png": [(10, 8, 26, 16)] for number in range(8)}, SIZE)
        (tmp_path / "instances.json").write_text(json.dumps(said))
        steps = [RandomResizedCrop(48, scale=(0.2, 0.9)), RandomHorizontalFlip()]
        dataset, seen = (
            opened(
                tmp_path, transform=steps, normalize=False, color="L", image_size=size, hold=hold
            ),
            set(),
        )
        for image, target in dataset:
            bright = (image[0] > 127).numpy()
            rows, columns = np.flatnonzero(bright.any(1)), np.flatnonzero(bright.any(0))
            if not len(target["boxes"]):
                assert len(rows) <= 3 or len(columns) <= 3
                continue
            edges = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            assert np.abs(target["boxes"][0].numpy() - edges).max() < 3
            seen.add(tuple(edges))
        assert len(seen) > 3

    def test_a_joint_transform_gets_image_and_boxes(self, coco: Path) -> None:
        def joint(image: Any, target: dict[str, Any]) -> Any:
            return image.size, {**target, "count": len(target["boxes"])}

        size, target = opened(coco, image_size=(10, 20), transforms=joint)[2]
        assert size == (20, 10) and target["count"] == len(target["labels"]) == 3


class TestMasks:
    def test_are_where_the_boxes_are(self, coco: Path) -> None:
        pytest.importorskip("pycocotools")
        for options in (
            {"image_size": None},
            {"image_size": (48, 64)},
            {"transform": [RandomResizedCrop(40), RandomHorizontalFlip()]},
        ):
            dataset = opened(coco, masks=True, **options)
            for image, target in dataset:
                masks = target["masks"]
                assert masks.dtype is torch.uint8 and masks.shape == (
                    len(target["boxes"]),
                    *image.shape[1:],
                )
                for mask, box in zip(masks.numpy(), target["boxes"].tolist(), strict=True):
                    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
                    edges = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
                    assert np.abs(np.subtract(edges, box)).max() < 2.5
        assert "masks" not in opened(coco)[0][1]

    def test_are_those_of_pycocotools(self, coco: Path) -> None:
        library = pytest.importorskip("pycocotools.coco")
        with contextlib.redirect_stdout(io.StringIO()):
            theirs = library.COCO(str(coco / "instances.json"))
        for _, target in opened(coco, masks=True, image_size=None):
            annotations = theirs.loadAnns(theirs.getAnnIds(imgIds=[target["image_id"]]))
            assert [one["category_id"] for one in annotations] == target["labels"].tolist()
            assert all(
                np.array_equal(theirs.annToMask(one), mask)
                for one, mask in zip(annotations, target["masks"].numpy(), strict=True)
            )

    def test_run_lengths_are_read(self, tmp_path: Path) -> None:
        pytest.importorskip("pycocotools")
        make_coco(tmp_path, 3)
        counts = [5 * 24 + 3, 4, 20, 4, 32 * 24 - 5 * 24 - 31]

        def edit(said: dict[str, Any]) -> None:
            said["annotations"][0]["segmentation"] = {"counts": counts, "size": [24, 32]}

        mask = opened(change(tmp_path, edit), masks=True, image_size=None)[0][1]["masks"][0]
        assert mask.sum() == 8 and mask[3:7, 5:7].all()

        def edit_size(said: dict[str, Any]) -> None:
            said["annotations"][0]["segmentation"]["size"] = [23, 32]

        with pytest.raises(
            SampleError,
            match=r"000\.png: the image is 32 x 24 pixels, and the size of a segmentation",
        ):
            opened(change(tmp_path, edit_size), masks=True)[0]

    def test_without_pycocotools_it_says_what_to_install(
        self, coco: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pycocotools", None)
        assert len(opened(coco)[0][1]["boxes"]) == 1
        with pytest.raises(
            ConfigError,
            match=r"masks=True needs the package pycocotools: pip install 'headrace\[coco\]'",
        ):
            opened(coco, masks=True)

    def test_are_for_annotations_alone(self, coco: Path, tmp_path: Path) -> None:
        pytest.importorskip("pycocotools")
        with pytest.raises(ConfigError, match="masks=True is for annotations of COCO"):
            ImageDataset(coco / "images", targets=lambda path: 1, masks=True)


def drop(name: str, field: str) -> Callable[[dict[str, Any]], Any]:
    return lambda said: said[name][0].pop(field)


def put(name: str, field: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda said: said[name][0].__setitem__(field, value)


@pytest.mark.quick_every(1)
def test_ids_of_categories_are_exact(tmp_path: Path) -> None:
    large = (1 << 53) + 1

    def enlarge(said: dict[str, Any]) -> None:
        old = said["categories"][0]["id"]
        said["categories"][0]["id"] = large
        for one in said["annotations"]:
            if one["category_id"] == old:
                one["category_id"] = large

    dataset = opened(change(make_coco(tmp_path, 6), enlarge))
    labels = {label for _, target in dataset for label in target["labels"].tolist()}
    assert large in labels and labels <= set(dataset.class_to_idx.values())


class TestBadAnnotations:
    @pytest.fixture
    def made(self, tmp_path: Path) -> Path:
        return make_coco(tmp_path, 6)

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (
                drop("annotations", "bbox"),
                r"annotations\[0\]: bbox must be four numbers \(left, top, width, height\), not "
                r"None",
            ),
            (put("annotations", "bbox", [1, 2, 3]), "bbox must be four numbers"),
            (put("annotations", "bbox", [1, 2, 3, float("nan")]), "bbox must be four numbers"),
            (
                put("annotations", "image_id", 999),
                r"annotations\[0\]: its image_id 999 is that of no image",
            ),
            (
                put("annotations", "category_id", 5),
                r"annotations\[0\]: its category_id 5 is not among the categories",
            ),
            (
                put("annotations", "category_id", "mill"),
                "category_id must be an integer, not 'mill'",
            ),
            (
                put("annotations", "category_id", 1 << 63),
                "category_id is an integer of more than 64 bits",
            ),
            (put("images", "id", "007"), r"images\[0\]: id must be an integer, not '007'"),
            (put("annotations", "area", "large"), "area must be a number, not 'large'"),
            (drop("images", "file_name"), r"images\[0\]: file_name must be a text, not None"),
            (put("images", "id", 13), r"images\[0\] and images\[1\] have the same id 13"),
            (put("images", "file_name", "001.png"), "2 images have the file_name '001.png'"),
            (put("categories", "id", 3), "two categories have the same id or name"),
            (
                lambda said: said.pop("categories"),
                "has no categories: are these annotations of objects",
            ),
            (
                lambda said: said["annotations"].append(7),
                r"annotations\[\d+\]: image_id must be an integer, not None",
            ),
        ],
    )
    def test_are_named(self, made: Path, edit: Any, message: str) -> None:
        with pytest.raises(HeadraceError, match=rf"instances\.json.*{message}"):
            opened(change(made, edit))

    def test_an_image_that_is_not_annotated(self, made: Path) -> None:
        Image.new("RGB", SIZE).save(made / "images" / "999.png")
        with pytest.raises(ConfigError, match=r"instances\.json has no entry for 999\.png"):
            opened(made)

    def test_annotations_of_an_image_that_is_missing(self, made: Path) -> None:
        whole = opened(made, image_size=8)
        known = [whole[index][1] for index in (0, 2, 3, 4, 5)]
        (made / "images" / "001.png").unlink()
        message = r"1 \(001\.png\) of 6 images of .* are not among the 5 files"
        with pytest.raises(DataNotFoundError, match=rf"{message}: is the download complete"):
            opened(made)
        with pytest.warns(HeadraceWarning, match=f"{message}: left out"):
            assert same(
                [target for _, target in opened(made, image_size=8, unused_targets="skip")], known
            )

    def test_an_image_of_another_size(self, made: Path) -> None:
        Image.new("RGB", (30, 24)).save(made / "images" / "001.png")
        for options in ({}, {"image_size": None}, {"transform": [RandomResizedCrop(8)]}):
            with pytest.raises(
                SampleError,
                match=r"001\.png: the image is 30 x 24 pixels, and .*instances\.json says 32 x 24",
            ):
                opened(made, **options)[1]
        assert len([*opened(made, on_error="skip")]) == 5
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.new("RGB", SIZE).save(made / "images" / "001.png", exif=exif)
        with pytest.raises(SampleError, match="says 32 x 24; is it turned by its EXIF orientation"):
            opened(made)[1]

    def test_boxes_without_area_are_left_out_and_told(self, made: Path) -> None:
        def edit(said: dict[str, Any]) -> None:
            for number, box in enumerate(([3, 3, 0, 5], [40, 3, 2, 2])):
                said["annotations"].append(
                    {**said["annotations"][0], "id": 90 + number, "bbox": box}
                )

        with pytest.warns(
            HeadraceWarning,
            match=r"2 \(90, 91\) annotations have boxes without area, or outside of their image",
        ):
            assert len(opened(change(made, edit))[0][1]["boxes"]) == 1

    def test_columns_are_refused(self, made: Path) -> None:
        with pytest.raises(
            ConfigError,
            match=(
                "target_name is for the columns of a table of labels, and annotations of COCO "
                "have none"
            ),
        ):
            opened(made, target_name="bbox")


class TestContract(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, coco: Path) -> None:
        self.folder = coco

    def make(self, **options: Any) -> ImageDataset:
        return opened(self.folder, image_size=8, **options)

    def make_bad(self, **options: Any) -> tuple[ImageDataset, list[int]]:
        bad = self.folder.parent / f"{self.folder.name}_bad"
        if not bad.exists():
            make_coco(bad)
            (bad / "images" / "001.png").write_bytes(b"nothing")
            Image.new("RGB", (9, 9)).save(bad / "images" / "009.png")
        return opened(bad, image_size=8, **options), [1, 9]


@pytest.mark.slow
class TestCropContract(TestContract):
    def make(self, **options: Any) -> ImageDataset:
        steps = [
            RandomResizedCrop(8),
            RandomHorizontalFlip(),
            *([options.pop("transform")] if "transform" in options else []),
        ]
        return opened(self.folder, transform=steps, **options)

    def make_bad(self, **options: Any) -> tuple[ImageDataset, list[int]]:
        dataset, bad = super().make_bad()
        return opened(
            Path(dataset.data_path).parent, transform=[RandomResizedCrop(8)], **options
        ), bad
