"""Finds what may be labels of images beside them: annotations of COCO, and folders of masks."""

from __future__ import annotations

import os

from headrace.inspecting.report import Report
from headrace.io.paths import redact
from headrace.io.resolve.file_set import FileSet
from headrace.storage.class_folders import coco_beside, is_coco, mask_folders


def tell_annotations(report: Report, path: str) -> None:
    """Notes that a JSON file holds annotations of images, and no texts."""
    if path.lower().endswith(".json") and is_coco(path):
        report.notes.append(
            "it looks like annotations of COCO: pass it with its images, "
            f"headrace.ImageDataset(images, targets={redact(path)!r})"
        )


def tell_labels(report: Report, files: FileSet) -> None:
    """Notes what lies beside local images and may be their labels, and how it is passed."""
    if files.is_remote or len(files.roots) != 1 or not os.path.isdir(root := files.roots[0]):
        return
    shown = redact(root)
    for path in coco_beside(files):
        report.notes.append(
            f"{redact(os.path.relpath(path, root))} looks like annotations of COCO: "
            f"headrace.ImageDataset({shown!r}, "
            f"targets={redact(path)!r}) gives boxes"
        )
    if (pair := mask_folders(files)) is not None:
        one, other = (redact(os.path.join(root, name)) for name in pair)
        report.notes.append(
            f"the folders {pair[0]} and {pair[1]} hold files of the same names: masks are passed "
            "as targets, "
            f"headrace.ImageDataset({one!r}, targets={other!r})"
        )
