"""Names of files from macOS, whose accents are decomposed, match labels written otherwise."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from headrace import ConfigError, ImageDataset, TextDataset
from headrace.io.paths import listed_names

NAMES = ["café", "naïve", "plain"]


def form(text: str, name: Any) -> str:
    return unicodedata.normalize(name, text)


def both_forms(text: str) -> tuple[str, str]:
    return form(text, "NFC"), form(text, "NFD")


def save(path: Path, level: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 3), level).save(path)


@pytest.mark.parametrize(("stored", "written"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_labels_of_another_form_match(stored: str, written: str, tmp_path: Path) -> None:
    for name in NAMES:
        save(tmp_path / "images" / form(f"{name}.png", stored))
    names = [form(f"{name}.png", written) for name in NAMES]
    table = tmp_path / "labels.csv"
    table.write_text("breed,file\n" + "".join(f"{n},{name}\n" for n, name in enumerate(names)))
    images = [{"id": n, "file_name": f"photos/{name}"} for n, name in enumerate(names)]
    coco = tmp_path / "instances.json"
    coco.write_text(json.dumps({"images": images, "annotations": [], "categories": []}))
    for number, name in enumerate(names):
        save(tmp_path / "masks" / name, number)

    def targets_by(targets: Any) -> list[Any]:
        dataset = ImageDataset(tmp_path / "images", image_size=None, targets=targets)
        return [target for _, target in dataset]

    assert targets_by({name: number for number, name in enumerate(names)}) == [0, 1, 2]
    assert targets_by(table) == [0, 1, 2]
    assert [target["image_id"] for target in targets_by(coco)] == [0, 1, 2]
    assert [int(mask.max()) for mask in targets_by(tmp_path / "masks")] == [0, 1, 2]


def test_an_exact_name_comes_first(tmp_path: Path) -> None:
    names = both_forms("é")
    for number, name in enumerate(names):
        save(tmp_path / "images" / f"{name}.png")
        save(tmp_path / "masks" / f"{name}.png", number)
    wanted = {name: number for number, name in enumerate(names)}
    targets = {f"{name}.png": number for name, number in wanted.items()}
    dataset = ImageDataset(tmp_path / "images", targets=targets)
    assert {Path(path).stem: target for path, target in dataset.samples} == wanted
    masks = ImageDataset(tmp_path / "images", image_size=None, targets=tmp_path / "masks")
    found = {Path(masks.samples[i][0]).stem: int(masks[i][1].max()) for i in range(2)}
    assert found == wanted
    with pytest.raises(ConfigError, match=r"\\xe9\.png fits e\\u0301\.png and \\xe9\.png"):
        ImageDataset(tmp_path / "images", targets={f"{names[0]}.png": 1})


def test_names_that_look_the_same_are_shown_in_ascii(tmp_path: Path) -> None:
    three = ["\u1e69", "s\u0323\u0307", "s\u0307\u0323"]  # one letter with two dots
    save(tmp_path / f"{three[0]}.png")
    shown = r"s\\u0323\\u0307\.png and s\\u0307\\u0323\.png .* \\u1e69\.png"
    with pytest.raises(ConfigError, match=shown):
        ImageDataset(tmp_path, targets={f"{three[1]}.png": 1, f"{three[2]}.png": 2})
    assert listed_names(["other", "e\u0301"], "\xe9", repr) == r"'e\u0301', 'other'"


def test_classes_that_look_the_same_are_one(tmp_path: Path) -> None:
    composed, decomposed = both_forms("élan")
    for folder in (composed, decomposed, "zebra"):
        save(tmp_path / "both" / folder / "1.png")
    both = ImageDataset(tmp_path / "both")
    assert sorted(both.targets.tolist()) == [0, 1, 1]
    assert [form(name, "NFC") for name in both.classes] == ["zebra", composed]
    for folder in (composed, decomposed):  # by torchvision their numbers would differ
        root = tmp_path / str(len(folder))
        save(root / folder / "1.png")
        save(root / "zebra" / "1.png")
        assert ImageDataset(root).class_to_idx == {"zebra": 0, folder: 1}


def test_texts_that_look_the_same_are_one_class(tmp_path: Path) -> None:
    composed, decomposed = both_forms("é")
    for name in "ab":
        save(tmp_path / "images" / f"{name}.png")
    images = ImageDataset(tmp_path / "images", targets={"a.png": composed, "b.png": decomposed})
    (tmp_path / "a.csv").write_text(f"text,label\nx,{composed}\ny,{decomposed}\n")
    for dataset in (images, TextDataset(tmp_path / "a.csv", target_field="label")):
        assert dataset.targets.tolist() == [0, 0]
        assert dataset.classes == [composed]
