"""Finds what may be labels of images beside them: annotations of COCO, and folders of masks."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.inspecting.report import Report
from headrace.io.paths import redact
from headrace.io.resolve.file_set import FileSet
from headrace.storage.class_folders import mask_folders

_ENDS = 64 << 10  # bytes of a JSON file that are looked at, at its beginning and at its end
_KEYS = (b'"images"', b'"annotations"', b'"categories"')
_MOST_FILES = 16


def tell_annotations(report: Report, path: str) -> None:
    """Notes that a JSON file holds annotations of images, and no texts."""
    if path.lower().endswith(".json") and _is_coco(Path(path)):
        report.notes.append(
            f"it looks like annotations of COCO: pass it with its images, headrace.ImageDataset(images, targets={redact(path)!r})"
        )


def tell_labels(report: Report, files: FileSet) -> None:
    """Notes what lies beside local images and may be their labels, and how it is passed."""
    if files.is_remote or len(files.roots) != 1 or not os.path.isdir(root := files.roots[0]):
        return
    shown = redact(root)
    for path in sorted(Path(root).glob("*.json"))[:_MOST_FILES]:
        if _is_coco(path):
            report.notes.append(
                f"{redact(path.name)} looks like annotations of COCO: headrace.ImageDataset({shown!r}, targets={redact(path)!r}) gives "
                "boxes"
            )
    if (pair := mask_folders(files)) is not None:
        one, other = (redact(os.path.join(root, name)) for name in pair)
        report.notes.append(
            f"the folders {pair[0]} and {pair[1]} hold files of the same names: masks are passed as targets, "
            f"headrace.ImageDataset({one!r}, targets={other!r})"
        )


def _is_coco(path: Path) -> bool:
    """Told by the keys at both ends: the file may be large."""
    try:
        with open(path, "rb") as file:
            head = file.read(_ENDS)
            file.seek(max(0, os.fstat(file.fileno()).st_size - _ENDS))
            ends = head + file.read()
    except OSError:
        return False
    return head.lstrip()[:1] == b"{" and sum(key in ends for key in _KEYS) >= 2
