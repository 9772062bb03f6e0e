"""headrace info tells what may be labels beside images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace import HeadraceWarning, ImageDataset
from headrace.inspecting import inspect
from tests.data.labelled import make_coco, make_masks


def notes_of(path: Path, word: str) -> list[str]:
    return [note for note in inspect(path).notes if word in note]


def test_annotations_of_coco_are_told(tmp_path: Path) -> None:
    folder = make_coco(tmp_path / "street", 6)
    file = folder / "instances.json"
    (folder / "other.json").write_text('{"images": 3}')
    (folder / "list.json").write_text('["images", "annotations"]')
    assert not inspect(folder / "list.json").notes
    call = f"headrace.ImageDataset({str(folder)!r}, targets={str(file)!r})"
    wanted = [f"instances.json looks like annotations of COCO: {call} gives boxes"]
    assert notes_of(folder, "COCO") == wanted
    assert len(ImageDataset(folder, targets=str(file))) == 6
    assert notes_of(file, "annotations of COCO: pass it with its images")
    said = json.loads(file.read_text())  # a large one is known by both of its ends
    said["licenses"] = ["x" * 300_000]
    order = ("images", "licenses", "annotations", "info", "categories")
    file.write_text(json.dumps({name: said[name] for name in order}))
    assert notes_of(folder, "COCO") == wanted


def test_folders_of_images_and_masks_are_told(tmp_path: Path) -> None:
    folder = make_masks(tmp_path, 6)
    masks = folder / "masks"
    for name in ("images", "pictures"):
        if name == "pictures":
            (folder / "images").rename(folder / name)
            with pytest.warns(HeadraceWarning, match="pictures and masks"):
                ImageDataset(folder)
        (note,) = notes_of(folder, "masks")
        assert f"the folders {name} and masks" in note
        call = f"headrace.ImageDataset({str(folder / name)!r}, targets={str(masks)!r})"
        assert note.endswith(call)


def test_classes_are_not_taken_for_masks(
    photos: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    make_masks(tmp_path, 6)
    (tmp_path / "images").rename(tmp_path / "cat")
    (tmp_path / "masks").rename(tmp_path / "dog")
    assert not notes_of(photos, "masks") + notes_of(tmp_path, "masks")
    assert ImageDataset(tmp_path).classes == ["cat", "dog"]
    assert not recwarn
