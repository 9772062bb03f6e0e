"""headrace info tells what may be labels beside images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace import HeadraceWarning, ImageDataset
from headrace.inspecting import inspect
from tests.data.labelled import make_coco, make_masks


def test_annotations_of_coco_are_told(tmp_path: Path) -> None:
    folder = make_coco(tmp_path / "street", 6)
    (folder / "other.json").write_text('{"images": 3}')
    (folder / "list.json").write_text('["images", "annotations"]')
    notes = [note for note in inspect(folder).notes if "COCO" in note]
    call = f"headrace.ImageDataset({str(folder)!r}, targets={str(folder / 'instances.json')!r})"
    assert notes == [f"instances.json looks like annotations of COCO: {call} gives boxes"]
    assert len(ImageDataset(folder, targets=str(folder / "instances.json"))) == 6


def test_annotations_are_told_by_both_ends_of_a_large_file(tmp_path: Path) -> None:
    folder = make_coco(tmp_path / "street", 6)
    said = json.loads((folder / "instances.json").read_text())
    said["licenses"] = ["x" * 300_000]
    order = ("images", "licenses", "annotations", "info", "categories")
    (folder / "instances.json").write_text(json.dumps({name: said[name] for name in order}))
    assert any("COCO" in note for note in inspect(folder).notes)


def test_folders_of_images_and_masks_are_told(tmp_path: Path) -> None:
    folder = make_masks(tmp_path, 6)
    notes = [note for note in inspect(folder).notes if "masks" in note]
    call = f"headrace.ImageDataset({str(folder / 'images')!r}, targets={str(folder / 'masks')!r})"
    assert notes == [
        "the folders images and masks hold files of the same names: masks are passed as targets, "
        f"{call}"
    ]
    (folder / "images").rename(folder / "pictures")
    with pytest.warns(
        HeadraceWarning,
        match=(
            "the folders pictures and masks hold files of the same names, and count as two classes"
        ),
    ):
        ImageDataset(folder)
    assert (
        f"headrace.ImageDataset({str(folder / 'pictures')!r}, targets={str(folder / 'masks')!r})"
        in "".join(inspect(folder).notes)
    )


def test_a_file_of_annotations_is_no_text(tmp_path: Path) -> None:
    folder = make_coco(tmp_path / "street", 6)
    assert [
        note
        for note in inspect(folder / "instances.json").notes
        if "annotations of COCO: pass it with its images" in note
    ]
    (tmp_path / "texts.json").write_text('["images", "annotations"]')
    assert not inspect(tmp_path / "texts.json").notes


def test_classes_are_not_taken_for_masks(
    photos: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    make_masks(tmp_path, 6)
    (tmp_path / "images").rename(tmp_path / "cat")
    (tmp_path / "masks").rename(tmp_path / "dog")
    assert not [
        note for path in (photos, tmp_path) for note in inspect(path).notes if "masks" in note
    ]
    assert ImageDataset(tmp_path).classes == ["cat", "dog"] and not recwarn
