"""Finds out what a path or URL holds, without reading more of it than that takes."""

from __future__ import annotations

import glob
import itertools
import os
import stat
from collections import Counter

from headrace.errors import AccessError, ConfigError, DataNotFoundError, FormatError
from headrace.inspecting.formats import head_of, sniffed
from headrace.inspecting.hdf5 import inspect_hdf5
from headrace.inspecting.images import inspect_images
from headrace.inspecting.labels import tell_annotations
from headrace.inspecting.report import Report
from headrace.inspecting.shards import inspect_tars
from headrace.inspecting.tables import inspect_tables
from headrace.inspecting.texts import inspect_texts
from headrace.inspecting.zarr import inspect_zarr
from headrace.io.paths import check_regular, is_url, redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.contents import names_below, summary_of
from headrace.io.resolve.file_set import Kind
from headrace.io.resolve.packs import is_pack
from headrace.io.resolve.resolver import kind_of
from headrace.storage.hdf5.kind import HDF5, is_hdf5
from headrace.storage.image_formats import format_by_content
from headrace.storage.kinds import IMAGES, TEXTS
from headrace.storage.table.files import TABLES
from headrace.storage.tar.source import TARS
from headrace.storage.zarr.kind import ZARR, is_zarr

KINDS = (IMAGES, TARS, TEXTS, HDF5, ZARR, TABLES)
"""In the order in which `headrace.open_dataset` takes them, where several lie side by side."""
_PACKED = ("gzip", "zstd", "bzip2", "xz")
_MOST = 20_000  # files that are counted by their endings
_REMEDIES = {
    "netCDF-3": "nccopy -k nc4 IN OUT makes netCDF-4 of it, which is HDF5",
    "MATLAB 5": "save it with -v7.3, which is HDF5",
}


def inspect(
    path: str | os.PathLike[str],
    *,
    dataset_name: str | None = None,
    reach: RemoteOptions | None = None,
) -> Report:
    """What a path holds: format, samples, arrays, classes; by which path it is read, what a random
    sample costs, and what helps.

    Args:
        path: a file, a folder, a glob or a URL, of training data or of anything else.
        dataset_name: of files of arrays, the one that is of interest; None: the one that headrace
            opens, or the largest.
        reach: how URLs are reached.

    Returns:
        What is known; of a format that headrace doesn't read at least its name.

    Raises:
        DataNotFoundError, AccessError, RemoteError: it is not there; it may not be read; a server
            does not answer.
        FormatError: it is damaged, empty, or not what its name says.
        MissingNameError: there is no array of that name.
    """
    reach = reach or RemoteOptions()
    place = os.fsdecode(path)
    if is_url(place):
        return _of_kind(kind_of(place, KINDS, reach, searches=True), place, dataset_name, reach)
    place = os.path.expanduser(place)
    _check(place)
    if os.path.isfile(place):
        return _of_file(place, dataset_name, reach)
    if os.path.isdir(place) and not is_pack(place) and not is_zarr(place):
        if next(names_below(place), None) is None:
            return Report(
                redact(place),
                "an empty folder",
                files=0,
                stored=0,
                notes=["there is nothing in it but what is hidden"],
            )
        kind = kind_of(place, KINDS, reach, searches=True)
        report = _of_kind(kind, place, dataset_name, reach)
        _tell_others(report, place, kind)
        if kind is not None and kind.holds_arrays:
            try:
                kind_of(place, KINDS, reach, searches=True, is_alone=True)
            except ConfigError as error:  # what `open_dataset` says
                report.notes.append(str(error))
        return report
    return _of_kind(kind_of(place, KINDS, reach, searches=True), place, dataset_name, reach)


def _check(place: str) -> None:
    """Raises an error for what is not there, may not be read, or would never end."""
    try:
        mode = os.stat(place).st_mode
    except OSError as error:
        if isinstance(error, PermissionError):
            raise AccessError(f"{redact(place)}: this user may not look at it") from error
        if glob.has_magic(place) or "{" in place:
            return
        raise DataNotFoundError(
            f"{redact(place)} does not exist (working folder: {os.getcwd()})"
        ) from error
    if not os.access(place, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        raise AccessError(f"{redact(place)}: this user may not read it")
    check_regular(place)


def _of_file(place: str, dataset_name: str | None, reach: RemoteOptions) -> Report:
    """Of one local file its content counts, and then its name."""
    head = head_of(place)
    if not head:
        raise FormatError(f"{redact(place)} is empty (0 bytes): fetch or write it again")
    by_plugin = format_by_content(head)
    found = sniffed(head) if by_plugin is None else f"{by_plugin.name} image"
    named = next((kind for kind in KINDS if kind.fits(place)), None)
    if is_hdf5(place):
        report = inspect_hdf5(place, reach, dataset_name)
        if named is not None and named is not HDF5:
            report.notes.append(
                f"its name says {named.name}, by which headrace.open_dataset goes: rename it, or "
                "use HDF5Dataset"
            )
        return report
    is_image = found is not None and found.endswith("image")
    if (
        is_image
        and named is not IMAGES
        and (named is not None or found not in ("DICOM image", "NIfTI image", "BigTIFF image"))
    ):
        what = (
            "is an image" if named is None else f"is a {found}, though its name says {named.name}"
        )
        raise FormatError(f"{redact(place)} {what}: give it an ending such as .png, .jpg or .tif")
    wrong = named in (IMAGES, HDF5) and not is_image
    wrong = (
        wrong
        or (named is TARS and found not in ("tar", *_PACKED))
        or (named is TEXTS and found not in (None, *_PACKED[:2]))
    )
    if wrong:
        is_what, said = f"a {found}" if found else "something else", named.name if named else ""
        raise FormatError(
            f"{redact(place)} is {is_what}, though its name says {said}: is it damaged, or a page "
            "of a server?"
        )
    kind = named if named is not None else kind_of(place, KINDS, reach, searches=True)
    if kind is not None:
        return _of_kind(kind, place, dataset_name, reach)
    report = Report(
        redact(place), found or "a file of no known format", stored=os.path.getsize(place)
    )
    if remedy := _REMEDIES.get(found or ""):
        report.notes.append(f"headrace does not read it: {remedy}")
    else:
        readable = "images, texts, HDF5, Zarr, .tar, Parquet, Arrow and .npy"
        report.notes.append(f"headrace does not read it; it reads {readable}")
    return report


def _of_kind(
    kind: Kind | None, place: str, dataset_name: str | None, reach: RemoteOptions
) -> Report:
    if kind is HDF5:
        return inspect_hdf5(place, reach, dataset_name)
    if kind is ZARR:
        return inspect_zarr(place, reach, dataset_name)
    if kind is TARS:
        return inspect_tars(place, reach)
    if kind is TABLES:
        return inspect_tables(place, reach)
    if kind is TEXTS:
        report = inspect_texts(place, reach)
        tell_annotations(report, place)
        return report
    if kind is IMAGES or is_url(place):
        return inspect_images(place, reach)
    if not os.path.isdir(place):
        raise DataNotFoundError(
            f"nothing matches {redact(place)} (working folder: {os.getcwd()}): is the path right?"
        )
    names = list(itertools.islice(names_below(place), _MOST))
    report = Report(redact(place), "a folder of no known format", files=len(names))
    report.notes.append(f"headrace finds nothing that it reads: {summary_of(names)}")
    return report


def _tell_others(report: Report, folder: str, kind: Kind | None) -> None:
    """What else lies in a folder."""
    if kind is None:
        return
    others: Counter[str] = Counter()
    for name in itertools.islice(names_below(folder), _MOST):
        if not kind.fits(name):
            others[os.path.splitext(name.lower())[1] or "no ending"] += 1
    if others:
        report.details["other files"] = dict(others.most_common(8))
