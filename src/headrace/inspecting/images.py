"""Inspects folders of images, and single ones."""

from __future__ import annotations

import io
import shlex
from collections import Counter
from pathlib import PurePosixPath
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from headrace.errors import ConfigError, DataNotFoundError
from headrace.inspecting import advice
from headrace.inspecting.labels import tell_labels
from headrace.inspecting.report import Access, Advice, Report
from headrace.inspecting.sizes import ASKED, evenly, sizes_of, spread_of, stored_in
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.file_set import FileSet
from headrace.storage.class_folders import folder_targets, refuse_other_folders
from headrace.storage.files import FilesSource, fingerprint_names
from headrace.storage.image_formats import BY_PLUGIN, is_readable
from headrace.storage.kinds import EXTENSIONS

_HEADS = 64  # images whose headers are read; remote ones are fetched
_SIDE, _MAX_SIDE = 224, 512
_FASTER = 0.35  # of the gain in pixels, what is left in time at least: a header, a resize


class _Look(NamedTuple):
    """What the headers of some images say."""

    formats: Counter[str]
    modes: Counter[str]
    sizes: list[tuple[int, int]]
    unreadable: list[str]


def inspect_images(data_path: Any, reach: RemoteOptions) -> Report:
    """What image files there are.

    Args:
        data_path: as `ImageDataset` takes it.
        reach: how URLs are reached.

    Raises:
        DataNotFoundError, AccessError, RemoteError: see `ImageDataset`.
    """
    source = FilesSource(data_path, EXTENSIONS, reach)
    files = source.listing
    try:
        report = Report(
            redact(data_path),
            "images",
            files=len(files),
            samples=len(files),
            samples_are="one image a file",
        )
        sizes = sizes_of(source)
        report.stored, report.is_estimate = stored_in(len(files), sizes)
        endings = Counter(
            PurePosixPath(name.decode("utf-8", "replace")).suffix.lower() for name in files.names
        )
        report.details["endings"] = dict(endings.most_common(8))
        report.details["file sizes"] = spread_of(sizes)
        tell_labels(report, files)
        _tell_classes(report, files)
        look = _looked_at(source, evenly(len(files), ASKED if files.is_remote else _HEADS).tolist())
    finally:
        if files.server is not None:
            files.server.close()
    _tell_pixels(report, look, int(np.median(sizes)), files)
    report.fingerprint = fingerprint_names(*files.names.arrays)
    return report


def _tell_classes(report: Report, files: FileSet) -> None:
    are_labels_told = bool(report.notes)
    try:
        refuse_other_folders(files)
    except ConfigError as error:
        if not are_labels_told:
            report.notes.append(" ".join(str(error).split()))
        return
    try:
        targets, classes = folder_targets(files)
    except (ConfigError, DataNotFoundError) as error:
        report.notes.append(" ".join(str(error).split()))
        return
    report.opens_as = f"headrace.ImageDataset({report.path!r})"
    if targets is None:
        report.details["targets"] = "none: all files lie in one folder"
        return
    counts = np.bincount(targets, minlength=len(classes)).tolist()
    report.classes, report.classes_are = dict(zip(classes, counts, strict=True)), "folders"


def _looked_at(source: FilesSource, picked: list[int]) -> _Look:
    look = _Look(Counter(), Counter(), [], [])
    for wanted in BY_PLUGIN:
        is_readable(wanted)  # loads its plugin
    records = source.read(picked) if source.listing.is_remote else [None] * len(picked)
    for number, record in zip(picked, records, strict=True):
        place = source.listing.path(number) if record is None else io.BytesIO(record)
        try:
            with Image.open(place) as image:
                look.formats[str(image.format)] += 1
                look.modes[image.mode] += 1
                look.sizes.append(image.size)
        except (
            OSError,
            UnidentifiedImageError,
            ValueError,
            SyntaxError,
            Image.DecompressionBombError,
        ) as error:
            look.unreadable.append(f"{source.location(number)}: {' '.join(str(error).split())}")
    return look


def _tell_pixels(report: Report, look: _Look, nbytes: int, files: FileSet) -> None:
    """Formats, modes and sizes of the images that were looked at, what a random one costs, and
    what would make that less.
    """
    if look.unreadable:
        few = (
            f"{len(look.unreadable):,} of {len(look.sizes) + len(look.unreadable):,} images that "
            "were looked at can't be opened"
        )
        report.notes.append(f"{few}; the first: {look.unreadable[0]}")
    report.details["looked at"] = f"{len(look.sizes) + len(look.unreadable):,} images"
    if not look.sizes:
        return
    report.details["formats"], report.details["modes"] = (
        dict(look.formats.most_common()),
        dict(look.modes.most_common()),
    )
    widths, heights = zip(*look.sizes, strict=True)
    report.details["pixels"] = {
        "least": f"{min(widths)} x {min(heights)}",
        "median": f"{median(widths):.0f} x {median(heights):.0f}",
        "most": f"{max(widths)} x {max(heights)}",
    }
    pixels = int(median(width * height for width, height in look.sizes))
    way = "files fetched whole" if files.is_remote else "a file each"
    report.access = [
        Access("", "an image", f"{way} + decode", 3 * pixels, 1, 3 * pixels, nbytes, 1)
    ]
    report.advice = _advice(report, look, pixels, files)


def _advice(report: Report, look: _Look, pixels: int, files: FileSet) -> list[Advice]:
    """Of images that are much larger than what most train on; JPEGs are decoded at a half, a
    quarter or an eighth of their size.
    """
    source, target = shlex.quote(report.path), shlex.quote(advice.packed_name(report.path))
    found: list[Advice] = []
    longest = median(max(size) for size in look.sizes)
    if longest > 1.5 * _MAX_SIDE and pixels:
        ratio = _FASTER * _decoded(look) / (pixels * (_MAX_SIDE / longest) ** 2)
        gain = max(1.0, int(ratio * 2) / 2)
        why = f"an image has {pixels / 1e6:.1f} megapixels to decode"
        nbytes = int(len(files) * 0.25 * pixels * (_MAX_SIDE / longest) ** 2)
        command = f"headrace pack {source} {target} --store jpeg --max-size {_MAX_SIDE}"
        found.append(Advice(why, command, gain=gain if gain > 1 else None, nbytes=nbytes))
    elif files.is_remote and len(files) > 1:
        found.append(
            Advice(
                "each image is a request", f"headrace pack {source} {target}", nbytes=report.stored
            )
        )
    return found


def _decoded(look: _Look) -> float:
    """Pixels of an image that are decoded for a sample of 224 x 224, in the middle."""
    share = look.formats["JPEG"] / max(1, sum(look.formats.values()))
    counts = []
    for width, height in look.sizes:
        scale = 1
        while share > 0.5 and scale < 8 and min(width, height) / (2 * scale) >= 2 * _SIDE:
            scale *= 2
        counts.append(width * height / scale**2)
    return median(counts)
