"""Opens HDF5 files, lists what they hold, and finds the other files that a dataset's values lie in.

HDF5 gives the fill value for a part of a virtual dataset whose source is missing, and follows
sources that lead back to where they came from until its stack ends. Both are errors here. Of remote
files nothing may lead to another file: HDF5 would look for it in the very same bytes, or on this
machine's disk.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import h5py
import numpy as np

from headrace.dtypes import AnyArray
from headrace.errors import AccessError, DataNotFoundError, FormatError, MissingNameError, one_line
from headrace.formats.arrays.packed import DATA, PackedInfo, info_in
from headrace.io.files import Files
from headrace.io.library_errors import OF_THE_MACHINE, asking, unreadable
from headrace.io.local_files import LocalFiles, changed
from headrace.io.paths import listed_names, redact

_LINKS = 1000
_DEPTH = 32
"""Files that links, or virtual datasets, lead through."""
_CLASSIC = (b"CDF\x01", b"CDF\x02", b"CDF\x05")
"""What netCDF files begin with that are no HDF5 files."""
_CAN_NOT_LOCK = "unable to lock file"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


_gc_lock = threading.Lock()
_gc_was_on: list[bool] = []  # for each thread inside of `without_gc`: False, but for the first


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Turns the garbage collector off inside, for all threads."""
    with _gc_lock:
        _gc_was_on.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _gc_lock:
            if _gc_was_on.pop():
                gc.enable()


# -- files


def open_file(path: str) -> h5py.File:
    """Opens a local file for reading.

    Raises:
        DataNotFoundError, AccessError, FormatError: not there; not readable for this user, or being
            written; no (whole) HDF5 file.
    """
    shown = redact(path)
    try:
        file = _open(path)
    except FileNotFoundError as error:
        raise DataNotFoundError(
            f"{shown} does not exist (working folder: {os.getcwd()})"
        ) from error
    except OSError as error:
        if _CAN_NOT_LOCK in str(error):
            why = os.strerror(_errno_of(error) or 0)
            raise AccessError(
                f"{shown} is locked, or can't be locked ({why}): if another process has it open "
                "for writing, wait until it closes the file (the environment variable "
                "HDF5_USE_FILE_LOCKING=FALSE opens it anyway, but may read half-written data)"
            ) from error
        if isinstance(error, PermissionError):
            raise AccessError(f"{shown}: this user may not read the file") from error
        failure = unreadable(shown, error)
        if failure is not None:
            raise failure from error
        if "already open for" in str(error):
            raise AccessError(
                f"{shown} is being written by another process: wait for its end; if it has died, "
                f"`h5clear -s {shown}` clears the file's mark"
            ) from error
        if error.errno in OF_THE_MACHINE:
            raise
        raise not_whole(path, error) from error
    if file.mode != "r":  # HDF5 gives the very file that is open already
        file.close()
        raise AccessError(f"{shown} is open for writing in this process: close it first")
    return file


@contextlib.contextmanager
def reading(path: str) -> Iterator[h5py.File]:
    """A local file, open for reading inside: whatever h5py raises becomes an error that names the
    file.

    Raises:
        DataNotFoundError, AccessError, FormatError: as `open_file`.
        FormatError, BudgetError: something inside is damaged.
    """
    with open_file(path) as file, asking("h5py", redact(path)):
        yield file


def find_dataset(
    file: h5py.File, name: str, path: str, is_remote: bool, steps: int = 0
) -> h5py.Dataset:
    """A dataset of a file, or of one that its links lead into.

    Args:
        file, path: open, and its path or URL.
        name: of the dataset.
        is_remote: True if other files are not followed.
        steps: links that led here out of other files.

    Raises:
        MissingNameError: there is none; the message lists those there are, of many the nearest.
        DataNotFoundError, AccessError, FormatError: a link leads into a file that is missing, or
            can't be opened; or out of a remote file.
    """
    out = leads_out(file, name) if is_remote else None
    if out is None:
        dataset = file.get(name)
        if isinstance(dataset, h5py.Dataset):
            return dataset
        out = leads_out(file, name)
    if out is None:
        raise MissingNameError(
            f"{redact(path)} has no dataset {name!r}; it has: "
            f"{listed_names(dataset_names(file), name)}"
        )
    part, link, rest = out
    where = f"{redact(path)}: the link {part!r} leads into {redact(link.filename)!r}"
    if is_remote:
        raise _other_file(where)
    target = _found_from(link.filename, path, "HDF5_EXT_PREFIX")
    if target is None:
        raise DataNotFoundError(f"{where}, which is missing")
    if steps < _DEPTH:
        with open_file(target) as there:
            find_dataset(there, rest, target, False, steps + 1)
    raise FormatError(
        f"{where}, which h5py can't open from there; or it leads back to itself: open that file "
        "itself"
    )


def not_whole(path: str, error: OSError) -> FormatError:
    """The error of a file that h5py can't open."""
    shown = redact(path)
    if os.path.isfile(path):
        with open(path, "rb", buffering=0) as file:
            if file.read(4) in _CLASSIC:
                return FormatError(
                    f"{shown} is a netCDF-3 file, not an HDF5 file: convert it to netCDF-4 with "
                    "nccopy -k nc4 or xarray"
                )
    return FormatError(
        f"{shown} is not an HDF5 file, or is incomplete ({one_line(error)}): it may be damaged, "
        "or a server's error page: fetch it again"
    )


_locked_here: set[str] = set()


@contextlib.contextmanager
def locked_by_caller(path: str) -> Iterator[None]:
    """Inside, a file is opened without HDF5's lock, since the caller has locked it."""
    path = os.path.abspath(path)
    _locked_here.add(path)
    try:
        yield
    finally:
        _locked_here.discard(path)


def _open(path: str) -> h5py.File:
    """Opens a file with HDF5's lock, or without it on a disk that has no locks; or as this process
    has it open already.
    """
    if os.path.abspath(path) not in _locked_here:
        for locking in (None, True):
            try:
                return h5py.File(path, "r", locking=locking)
            except OSError as error:
                is_unlockable = _CAN_NOT_LOCK in str(error) and _errno_of(error) in _NO_LOCKS
                if locking is None and is_unlockable:
                    break
                if "flag values don't match" not in str(error):
                    raise
    return h5py.File(path, "r", locking=False)


def _errno_of(error: OSError) -> int | None:
    """The system's error number, which h5py may give in the message only."""
    match = re.search(r"errno = (\d+)", str(error))
    return error.errno or (int(match[1]) if match else None)


def packed_info(path: str | os.PathLike[Any]) -> PackedInfo | None:
    """Describes a local pack; None for any other HDF5 file.

    Raises:
        FormatError: the file is of a later version of headrace, or damaged.
    """
    with reading(os.fspath(path)) as file:
        return info_in(file.attrs, path)


# -- datasets


def only_dataset(file: h5py.File, path: str, targets: str | None) -> str:
    """The dataset that holds the samples if the user names none: "data", AnnData's matrix X,
    or the only one with an axis beside the targets. Coordinates of netCDF (dimension scales) and
    what MATLAB keeps in ``#refs#`` count only where there is nothing else.
    """
    if isinstance(file.get(DATA), h5py.Dataset):
        return DATA
    if file.attrs.get("encoding-type") == "anndata" and isinstance(file.get("X"), h5py.Dataset):
        return "X"
    names = [name for name in dataset_names(file) if name != (targets or "").strip("/")]
    likely = [
        name
        for name in names
        if not (name.startswith("#refs#/") or h5py.h5ds.is_scale(file[name].id))
    ]
    shapes = {name: file[name].shape for name in likely or names}
    shown = {name: f"{name} {list(shape)}" for name, shape in shapes.items() if shape}
    if len(shown) == 1:
        return next(iter(shown))
    what = "no dataset of samples"
    if shown:
        what = f"{len(shown):,} datasets: name one of them as dataset_name"
    raise MissingNameError(
        f"{redact(path)} has {what}: {listed_names(shown, show=lambda name: shown[name])}"
    )


def dataset_names(file: h5py.File) -> list[str]:
    """The paths of all datasets inside the file, without those behind links."""
    names: list[str] = []
    file.visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Dataset) else None)
    return names


def read_part(dataset: h5py.Dataset, part: Any) -> AnyArray:
    """A part of a dataset, with the fields of compounds in the order of their bytes.

    HDF5 sorts the fields of a type so when it first reads a dataset, for all who have it open: the
    order that h5py gives depends on who has read before.
    """
    dtype = ordered(dataset.dtype)
    if dtype is dataset.dtype:
        return np.asarray(dataset[part])
    return np.asarray(dataset.__getitem__(part, dtype))


def ordered(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same dtype with the fields of compounds in the order of their bytes; itself if they
    are.
    """
    if dtype.subdtype is not None:
        base = ordered(dtype.base)
        if base is dtype.base:
            return dtype
        return np.dtype((base, dtype.shape))
    if dtype.fields is None:
        return dtype
    fields = sorted(dtype.fields.items(), key=lambda field: field[1][1])
    names = [name for name, _ in fields]
    formats = [ordered(of_field[0]) for _, of_field in fields]
    offsets = [of_field[1] for _, of_field in fields]
    if names == list(dtype.names or ()) and formats == [dtype[name] for name in names]:
        return dtype
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": dtype.itemsize}
    )


def check_has_values(dataset: h5py.Dataset, where: str) -> None:
    """Raises a FormatError for a dataset of a null dataspace."""
    if dataset.shape is None:
        raise FormatError(
            f"{where} has a null dataspace, so it has no values: name another dataset"
        )


# -- other files that a dataset needs


def leads_out(file: h5py.File, name: str) -> tuple[str, h5py.ExternalLink, str] | None:
    """The first link on the way to a name that leads into another file: its own name, the link, and
    what is looked for there; None: there is none.
    """
    parts = [part for part in name.split("/") if part]
    group = file
    for _ in range(_LINKS):
        if not parts or not isinstance(group, h5py.Group):
            return None
        part = parts.pop(0)
        link = group.get(part, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            return part, link, "/".join([link.path.rstrip("/"), *parts])
        if isinstance(link, h5py.SoftLink):
            parts = [one for one in link.path.split("/") if one] + parts
            if link.path.startswith("/"):
                group = file
        elif link is None or not parts:  # what it leads to is not opened
            return None
        else:
            group = group[part]
    return None


def _found_from(name: str, path: str, variable: str) -> str | None:
    """Where HDF5 finds a file that the one at `path` names; None: nowhere. It searches the folders
    of an environment variable first.
    """
    folder = os.path.dirname(path)
    places: list[str] = []
    if os.path.isabs(name):
        places.append(name)
        name = os.path.basename(name)
    prefix = os.environ.get(variable, "")
    folders = [*filter(None, prefix.split(":")), prefix.replace("${ORIGIN}", folder, 1)]
    folders += [folder, "", os.path.dirname(os.path.realpath(path))]
    places += [os.path.join(one, name) for one in folders]
    return next((place for place in places if os.path.exists(place)), None)


def _other_file(what: str) -> FormatError:
    """The error of a remote file that needs another file."""
    return FormatError(
        f"{what}: a remote file's links to other files are not supported: open that file itself, "
        "or copy all of them to this machine"
    )


def files_behind(dataset: h5py.Dataset, path: str, files: Files) -> list[str]:
    """The file that holds a dataset, perhaps behind a link, and all others that its values come
    from. They must not change from now on.

    Args:
        dataset: open.
        path: of the file in which it was looked for; or its URL.
        files: by which they are read.

    Raises:
        DataNotFoundError: a file that a virtual or external dataset is made of is missing; the
            message names it.
        FormatError: a source is missing in its file, or a virtual dataset leads back to itself; or,
            of a remote file, to another.
        FileChangedError: the file has been changed since it was opened.
    """
    if not files.is_remote:  # what is remote leads nowhere else
        path = os.path.abspath(dataset.file.filename)
    behind = {path: None}
    _follow(dataset, path, files.is_remote, [], set(), behind)
    for one in behind:
        files.version(one)
    check_files(files, path, behind)
    return list(behind)


def check_files(files: Files, path: str, behind: Iterable[str]) -> None:
    """Compares the files that a dataset's values come from with their versions.

    Raises:
        FileChangedError, DataNotFoundError: one has been changed; or is gone, for which HDF5 would
            give the fill value.
    """
    if not isinstance(files, LocalFiles):
        return
    for one in behind:
        if not os.path.exists(one):
            if one != path:
                raise DataNotFoundError(
                    f"{redact(one)}, which holds rows of {redact(path)}, is missing"
                )
        elif not files.is_same(one):
            raise changed(one)


def _follow(
    dataset: h5py.Dataset,
    path: str,
    is_remote: bool,
    way: list[tuple[str, str]],
    seen: set[tuple[str, str]],
    behind: dict[str, None],
) -> None:
    """Notes the files of external storage, and of all sources of a virtual dataset.

    Args:
        dataset, path: where this step of the way is.
        way: the steps before.
        seen: steps that have been followed.
        behind: where files are noted.
    """
    here = (path if is_remote else os.path.realpath(path), str(dataset.name))
    where = f"{redact(path)}: {dataset.name!r}"
    if here in way or len(way) > _DEPTH:
        raise FormatError(
            f"{where}, a virtual dataset, leads back to itself, or through more than {_DEPTH} "
            "others"
        )
    if here in seen:
        return
    seen.add(here)
    for name, _, _ in dataset.external or ():
        external = f"{where} lies in the external file {redact(name)!r}"
        if is_remote:
            raise _other_file(external)
        # HDF5 looks below the prefix that is set, or else in the working folder
        prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "")
        if prefix.startswith("${ORIGIN}"):
            prefix = os.path.dirname(path) + prefix.removeprefix("${ORIGIN}")
        place = os.path.join("" if prefix == "." else prefix, name)
        if not os.path.exists(place):
            raise DataNotFoundError(
                f"{external}, which does not exist (working folder: {os.getcwd()})"
            )
        behind[place] = None
    for source in dataset.virtual_sources() if dataset.is_virtual else ():
        if is_remote and source.file_name != ".":
            raise _other_file(f"{where}, a virtual dataset, needs {redact(source.file_name)!r}")
        file_name = path
        if source.file_name != ".":
            name = _plain(source.file_name, where)
            found = _found_from(name, path, "HDF5_VDS_PREFIX")
            if found is None:
                raise DataNotFoundError(f"{where} needs {redact(name)!r}, which is missing")
            file_name = found
        with contextlib.ExitStack() as stack:
            file = dataset.file
            if file_name != path:
                behind[file_name] = None
                file = stack.enter_context(reading(file_name))
            target = file.get(_plain(source.dset_name, where))
            if not isinstance(target, h5py.Dataset):
                raise FormatError(
                    f"{where}, a virtual dataset, needs {source.dset_name!r} of "
                    f"{redact(file_name)}, which is missing"
                )
            _follow(target, file_name, is_remote, [*way, here], seen, behind)


def _plain(name: str, where: str) -> str:
    """The name of a source as HDF5 reads it: "%%" is a percent sign."""
    if "%b" in name.replace("%%", ""):
        raise FormatError(
            f"{where}, a virtual dataset, names its sources by the pattern {redact(name)!r}, which "
            "is not supported: read the files one by one"
        )
    return name.replace("%%", "%")
