"""Names of files from macOS, whose accents are decomposed, match labels that are written
otherwise.
"""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headrace import ConfigError, ImageDataset, TextDataset
from headrace.io.nearest_names import listed_names

NAMES = ["café", "naïve", "plain"]
FORMS = [("NFC", "NFD"), ("NFD", "NFC")]


def form(text: str, name: Any) -> str:
    return unicodedata.normalize(name, text)


def save(path: Path, level: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 3), level).save(path)


def labels_of(kind: str, folder: Path, written: str) -> Any:
    """Targets 0, 1, 2 of the names."""
    names = [form(f"{name}.png", written) for name in NAMES]
    if kind == "mapping":
        return {name: number for number, name in enumerate(names)}
    if kind == "coco":
        images = [
            {"id": number, "file_name": f"photos/{name}"} for number, name in enumerate(names)
        ]
        path = folder / "instances.json"
        path.write_text(json.dumps({"images": images, "annotations": [], "categories": []}))
        return path
    if kind == "table":
        path = folder / "labels.csv"
        path.write_text(
            "breed,file\n" + "".join(f"{number},{name}\n" for number, name in enumerate(names))
        )
        return path
    for number, name in enumerate(names):
        save(folder / "masks" / name, number)
    return folder / "masks"


@pytest.mark.parametrize(("stored", "written"), FORMS)
@pytest.mark.parametrize("kind", ["mapping", "table", "masks", "coco"])
def test_labels_of_another_form_match(kind: str, stored: str, written: str, tmp_path: Path) -> None:
    for name in NAMES:
        save(tmp_path / "images" / form(f"{name}.png", stored))
    dataset = ImageDataset(
        tmp_path / "images", image_size=None, targets=labels_of(kind, tmp_path, written)
    )
    targets = [target for _, target in dataset]
    if kind == "masks":
        assert [int(np.asarray(mask).max()) for mask in targets] == [0, 1, 2]
    else:
        assert [target["image_id"] if kind == "coco" else target for target in targets] == [0, 1, 2]


def test_an_exact_name_comes_first(tmp_path: Path) -> None:
    composed, decomposed = (form("é", name) for name in ("NFC", "NFD"))
    save(tmp_path / "images" / f"{composed}.png")
    save(tmp_path / "images" / f"{decomposed}.png")
    targets = {f"{composed}.png": 1, f"{decomposed}.png": 2}
    dataset = ImageDataset(tmp_path / "images", targets=targets)
    assert {Path(path).stem: target for path, target in dataset.samples} == {
        composed: 1,
        decomposed: 2,
    }
    with pytest.raises(
        ConfigError, match=r"the file name \\xe9\.png fits e\\u0301\.png and \\xe9\.png"
    ):
        ImageDataset(tmp_path / "images", targets={f"{composed}.png": 1})
    for number, name in enumerate((composed, decomposed)):
        save(tmp_path / "masks" / f"{name}.png", number)
    masks = ImageDataset(tmp_path / "images", image_size=None, targets=tmp_path / "masks")
    assert {
        Path(path).stem: int(mask.max())
        for (path, _), (_, mask) in zip(masks.samples, masks, strict=True)
    } == {
        composed: 0,
        decomposed: 1,
    }


def test_keys_that_look_the_same_are_refused(tmp_path: Path) -> None:
    three = ["\u1e69", "s\u0323\u0307", "s\u0307\u0323"]  # one letter with two dots
    save(tmp_path / f"{three[0]}.png")
    with pytest.raises(
        ConfigError,
        match=(
            r"s\\u0323\\u0307\.png and s\\u0307\\u0323\.png look the same, and none is "
            r"\\u1e69\.png"
        ),
    ):
        ImageDataset(tmp_path, targets={f"{three[1]}.png": 1, f"{three[2]}.png": 2})


def test_a_name_in_a_file_that_looks_like_the_missing_one_is_shown_in_ascii() -> None:
    assert listed_names(["other", "e\u0301"], "\xe9", repr) == r"'e\u0301', 'other'"


def test_classes_that_look_the_same_are_one(tmp_path: Path) -> None:
    composed, decomposed = (form("élan", name) for name in ("NFC", "NFD"))
    for folder in (composed, decomposed, "zebra"):
        save(tmp_path / "both" / folder / "1.png")
    both = ImageDataset(tmp_path / "both")
    assert both.targets.tolist() == [1, 0, 1] or both.targets.tolist() == [1, 1, 0]
    assert [form(name, "NFC") for name in both.classes] == ["zebra", composed]
    for number, folder in enumerate((composed, decomposed)):
        save(tmp_path / str(number) / folder / "1.png")
        save(tmp_path / str(number) / "zebra" / "1.png")
    numbers = [ImageDataset(tmp_path / number).class_to_idx for number in "01"]
    # by torchvision they would differ
    assert numbers == [{"zebra": 0, composed: 1}, {"zebra": 0, decomposed: 1}]


def test_texts_that_look_the_same_are_one_class(tmp_path: Path) -> None:
    composed, decomposed = (form("é", name) for name in ("NFC", "NFD"))
    for name in "ab":
        save(tmp_path / "images" / f"{name}.png")
    images = ImageDataset(tmp_path / "images", targets={"a.png": composed, "b.png": decomposed})
    (tmp_path / "a.csv").write_text(f"text,label\nx,{composed}\ny,{decomposed}\n")
    for dataset in (images, TextDataset(tmp_path / "a.csv", target_field="label")):
        assert dataset.targets.tolist() == [0, 0] and dataset.classes == [composed]
