"""Images with annotations as COCO has them: read whole, and moved with their images."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from headrace import (
    ConfigError,
    DataNotFoundError,
    HeadraceError,
    HeadraceWarning,
    ImageDataset,
    RandomHorizontalFlip,
    RandomResizedCrop,
    SampleError,
)
from headrace.datasets.image.augment import Drawn
from headrace.datasets.image.coco import place_boxes
from headrace.datasets.resizing import Box
from headrace.testing.contract import same
from tests.data.labelled import coco_of, make_coco
from tests.data.make import turned

SIZE = (32, 24)


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_coco(tmp_path_factory.mktemp("coco"))


def opened(folder: Path, **options: Any) -> ImageDataset:
    return ImageDataset(folder / "images", targets=folder / "instances.json", **options)


def change(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    path = folder / "instances.json"
    annotations = json.loads(path.read_text())
    edit(annotations)
    path.write_text(json.dumps(annotations))
    return folder


def extent(picture: Any) -> list[int]:
    """Left, top, right and bottom of what is not 0 in an array [H, W]."""
    rows, columns = np.flatnonzero(picture.any(1)), np.flatnonzero(picture.any(0))
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


class TestTargets:
    def test_are_what_the_file_says(self, coco: Path) -> None:
        annotated = json.loads((coco / "instances.json").read_text())
        dataset = opened(coco, image_size=None)
        assert dataset.classes == ["mill", "wheel"]
        assert dataset.class_to_idx == {"mill": 3, "wheel": 7}
        ids = {entry["file_name"]: entry["id"] for entry in annotated["images"]}
        assert len(dataset) == len(ids) == 24
        for (path, known), (_, target) in zip(dataset.samples, dataset, strict=True):
            number = ids[Path(path).name]
            wanted = [one for one in annotated["annotations"] if one["image_id"] == number]
            boxes = [[x, y, x + w, y + h] for x, y, w, h in (one["bbox"] for one in wanted)]
            labels = [one["category_id"] for one in wanted]
            expected = {
                "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
                "labels": torch.tensor(labels, dtype=torch.int64),
                "image_id": number,
                "area": torch.tensor([one["area"] for one in wanted], dtype=torch.float32),
                "iscrowd": torch.tensor([one["iscrowd"] for one in wanted], dtype=torch.int64),
            }
            assert target.keys() == expected.keys()
            for name, value in expected.items():
                assert same(target[name], value), name
            assert same(target, known)
        assert len(dataset[4][1]["boxes"]) == 0

    def test_names_with_folders_and_entries_without_sizes(self, coco: Path, tmp_path: Path) -> None:
        annotated = json.loads((coco / "instances.json").read_text())
        for entry in annotated["images"]:
            entry["file_name"] = f"train2017/{entry['file_name']}"
            del entry["width"], entry["height"]
        (tmp_path / "labels.txt").write_text(json.dumps(annotated))
        dataset = ImageDataset(coco / "images", targets=tmp_path / "labels.txt", image_size=8)
        assert same([*dataset], [*opened(coco, image_size=8)])

    def test_ids_of_categories_are_exact(self, tmp_path: Path) -> None:
        large = (1 << 53) + 1

        def enlarge(annotated: dict[str, Any]) -> None:
            old = annotated["categories"][0]["id"]
            annotated["categories"][0]["id"] = large
            for one in annotated["annotations"]:
                if one["category_id"] == old:
                    one["category_id"] = large

        dataset = opened(change(make_coco(tmp_path, 6), enlarge))
        labels = {label for _, target in dataset for label in target["labels"].tolist()}
        assert large in labels
        assert labels <= set(dataset.class_to_idx.values())


def place(boxes: Any, drawn: Drawn | None = None, crop: Any = None) -> list[list[float]]:
    """Where boxes of an image of 24 x 32 are after a draw."""
    given = np.array(boxes, np.float32).reshape(-1, 4)
    return place_boxes(given, (24, 32), (24, 32), drawn, crop)[0].tolist()


class TestGeometry:
    @given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([None, (10, 11), (40, 33)]))
    def test_a_box_covers_the_pixels_of_its_mask(self, seed: int, flip: bool, crop: Any) -> None:
        """Against a mask that is cropped, resized and mirrored pixel by pixel."""
        rng = np.random.default_rng(seed)
        left, top = rng.integers(0, 28), rng.integers(0, 20)
        right, bottom = rng.integers(left + 1, 33), rng.integers(top + 1, 25)
        y, x = int(rng.integers(0, 16)), int(rng.integers(0, 20))
        part = Box(y, x, int(rng.integers(4, 25 - y)), int(rng.integers(4, 33 - x)))
        found = place([[left, top, right, bottom]], Drawn(part, flip), crop)
        fine = np.zeros((24 * 8, 32 * 8), bool)
        fine[top * 8 : bottom * 8, left * 8 : right * 8] = True
        fine = fine[y * 8 : (y + part.height) * 8, x * 8 : (x + part.width) * 8]
        fine = fine[:, ::-1] if flip else fine
        height, width = crop or part[2:]
        scales = [width / fine.shape[1], height / fine.shape[0]] * 2
        edges = np.multiply(extent(fine), scales) if fine.any() else np.zeros(4)
        if found:
            assert np.allclose(found[0], edges, atol=1e-3)
        else:
            assert min(edges[2:] - edges[:2]) < 1 + 1e-5

    def test_crops_and_flips_move_boxes_and_masks_with_their_image(self, tmp_path: Path) -> None:
        pytest.importorskip("pycocotools")
        (tmp_path / "images").mkdir()
        picture = np.zeros((24, 32), np.uint8)
        picture[8:16, 10:26] = 255
        for number in range(8):
            Image.fromarray(picture).save(tmp_path / "images" / f"{number}.png")
        annotated = coco_of({f"{number}.png": [(10, 8, 26, 16)] for number in range(8)}, SIZE)
        (tmp_path / "instances.json").write_text(json.dumps(annotated))
        common: dict[str, Any] = {"normalize": False, "color": "L", "masks": True}
        steps = [RandomResizedCrop(48, scale=(0.2, 0.9)), RandomHorizontalFlip()]
        for options in ({}, {"image_size": 40}, {"hold": "decoded"}):
            seen = set()
            for image, target in opened(tmp_path, transform=steps, **common, **options):
                bright = (image[0] > 127).numpy()
                if len(target["boxes"]):
                    edges = extent(bright)
                    assert np.abs(target["boxes"][0].numpy() - edges).max() < 3, options
                    mask = target["masks"][0].numpy()
                    assert np.abs(np.subtract(extent(mask), edges)).max() < 4, options
                    assert mask.shape == (48, 48)
                    seen.add(tuple(edges))
                else:
                    assert min(bright.any(1).sum(), bright.any(0).sum()) <= 3
            assert len(seen) > 3


class TestMasks:
    def test_are_those_of_pycocotools(self, coco: Path) -> None:
        library = pytest.importorskip("pycocotools.coco")
        with contextlib.redirect_stdout(io.StringIO()):
            theirs = library.COCO(str(coco / "instances.json"))
        for _, target in opened(coco, masks=True, image_size=None):
            annotations = theirs.loadAnns(theirs.getAnnIds(imgIds=[target["image_id"]]))
            assert [one["category_id"] for one in annotations] == target["labels"].tolist()
            for one, mask in zip(annotations, target["masks"].numpy(), strict=True):
                assert np.array_equal(theirs.annToMask(one), mask)

    def test_run_lengths_are_read(self, tmp_path: Path) -> None:
        pytest.importorskip("pycocotools")
        make_coco(tmp_path, 3)
        counts = [5 * 24 + 3, 4, 20, 4, 32 * 24 - 5 * 24 - 31]
        segmentation = {"counts": counts, "size": [24, 32]}
        change(tmp_path, put("annotations", "segmentation", segmentation))
        mask = opened(tmp_path, masks=True, image_size=None)[0][1]["masks"][0]
        assert mask.sum() == 8
        assert mask[3:7, 5:7].all()
        segmentation["size"] = [23, 32]
        change(tmp_path, put("annotations", "segmentation", segmentation))
        with pytest.raises(SampleError, match=r"000\.png: .*\[23, 32\], not \[24, 32\]"):
            opened(tmp_path, masks=True)[0]

    def test_where_there_can_be_none(self, coco: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("pycocotools")
        with pytest.raises(ConfigError):
            ImageDataset(coco / "images", targets=lambda path: 1, masks=True)
        monkeypatch.setitem(sys.modules, "pycocotools", None)
        assert len(opened(coco)[0][1]["boxes"]) == 1
        with pytest.raises(ConfigError, match=r"pip install 'headrace\[coco\]'"):
            opened(coco, masks=True)


def drop(name: str, field: str) -> Callable[[dict[str, Any]], Any]:
    return lambda annotated: annotated[name][0].pop(field)


def put(name: str, field: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda annotated: annotated[name][0].__setitem__(field, value)


class TestBadAnnotations:
    @pytest.fixture
    def made(self, tmp_path: Path) -> Path:
        return make_coco(tmp_path, 6)

    def test_are_named(self, made: Path) -> None:
        whole = (made / "instances.json").read_text()
        for edit, named in (
            (drop("annotations", "bbox"), r"annotations\[0\].*None"),
            (put("annotations", "bbox", [1, 2, 3, float("nan")]), "bbox"),
            (put("annotations", "image_id", 999), r"annotations\[0\].* 999"),
            (put("annotations", "category_id", 5), r"annotations\[0\].* 5"),
            (put("annotations", "category_id", "mill"), "category_id.*'mill'"),
            (put("annotations", "category_id", 1 << 63), "category_id.*int64"),
            (put("annotations", "bbox", [1, 2, 10**400, 3]), "bbox"),
            (put("annotations", "area", 10**400), "area"),
            (put("images", "id", "007"), r"images\[0\].*'007'"),
            (put("annotations", "area", "large"), "area.*'large'"),
            (drop("images", "file_name"), r"images\[0\].*file_name"),
            (put("images", "id", 13), r"images\[1\].* 13"),
            (put("images", "file_name", "001.png"), r"'001\.png'"),
            (put("categories", "id", 3), "categories"),
            (lambda annotated: annotated.pop("categories"), "categories"),
            (lambda annotated: annotated["annotations"].append(7), r"annotations\[\d+\].*image_id"),
        ):
            (made / "instances.json").write_text(whole)
            with pytest.raises(HeadraceError, match=rf"instances\.json.*{named}"):
                opened(change(made, edit))

    def test_of_images_that_are_others(self, made: Path) -> None:
        Image.new("RGB", SIZE).save(made / "images" / "999.png")
        with pytest.raises(ConfigError, match=r"999\.png"):
            opened(made)
        (made / "images" / "999.png").unlink()
        whole = opened(made, image_size=8)
        known = [whole[index][1] for index in (0, 2, 3, 4, 5)]
        (made / "images" / "001.png").unlink()
        with pytest.raises(DataNotFoundError, match=r"1 \(001\.png\) of 6 targets .* 5,"):
            opened(made)
        with pytest.warns(HeadraceWarning, match=r"1 \(001\.png\) of 6 targets"):
            dataset = opened(made, image_size=8, unused_targets="skip")
        assert same([target for _, target in dataset], known)

    def test_an_image_of_another_size(self, made: Path) -> None:
        Image.new("RGB", (30, 24)).save(made / "images" / "001.png")
        for options in ({}, {"image_size": None}, {"transform": [RandomResizedCrop(8)]}):
            with pytest.raises(SampleError, match=r"001\.png: .* 30 x 24 .*json says 32 x 24"):
                opened(made, **options)[1]
        Image.new("RGB", SIZE).save(made / "images" / "001.png", exif=turned(6))
        with pytest.raises(SampleError, match=r"24 x 32 .*EXIF.* says 32 x 24"):
            opened(made)[1]

    def test_boxes_without_area_are_left_out_and_told(self, made: Path) -> None:
        def add(annotated: dict[str, Any]) -> None:
            first = annotated["annotations"][0]
            for number, box in ((90, [3, 3, 0, 5]), (91, [40, 3, 2, 2])):
                annotated["annotations"].append({**first, "id": number, "bbox": box})

        with pytest.warns(HeadraceWarning, match=r"2 \(90, 91\) annotations"):
            assert len(opened(change(made, add))[0][1]["boxes"]) == 1
        with pytest.raises(ConfigError, match="target_name"):
            opened(made, target_name="bbox")
