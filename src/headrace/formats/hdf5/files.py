"""Opens HDF5 files, and lists what they hold."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import h5py
import numpy as np

from headrace.errors import AccessError, DataNotFoundError, FormatError, MissingNameError
from headrace.formats.arrays.packed import PackedInfo, info_in
from headrace.io.files import Files
from headrace.io.library_errors import OF_THE_MACHINE, asking, unreadable
from headrace.io.local.files import LocalFiles
from headrace.io.nearest_names import listed_names
from headrace.io.paths import redact

_LINKS, _LINKS_OUT = 1000, 32
_CAN_NOT_LOCK = "unable to lock file"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_LOCKED = (errno.EAGAIN, errno.EACCES)

T = TypeVar("T")


class _NoGC:
    """The threads that need the garbage collector to be off."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.threads = 0
        self.was_on = False


_no_gc = _NoGC()


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Garbage is not collected inside, in any thread."""
    with _no_gc.lock:
        if not _no_gc.threads:
            _no_gc.was_on = gc.isenabled()
            gc.disable()
        _no_gc.threads += 1
    try:
        yield
    finally:
        with _no_gc.lock:
            _no_gc.threads -= 1
            if not _no_gc.threads and _no_gc.was_on:
                gc.enable()


class HDF5Files:
    """HDF5 files of this machine; those of a server are `headrace.formats.hdf5.remote.RemoteHDF5`.

    Args:
        files: by which their bytes are read, where that is not h5py.
    """

    def __init__(self, files: Files | None = None) -> None:
        self.files: Files = files or LocalFiles()

    def learn(self, paths: Sequence[str]) -> None:
        """Asks at once for what opening these files takes; of files of this machine nothing."""

    def open(self, path: str) -> h5py.File:
        """The file, opened for reading.

        Raises:
            DataNotFoundError, AccessError, FormatError: not there; not readable for this user, or
                being written; no (whole) HDF5 file.
        """
        try:
            file = _open(path)
        except FileNotFoundError as error:
            raise DataNotFoundError(
                f"{redact(path)} does not exist (working folder: {os.getcwd()})"
            ) from error
        except OSError as error:
            if _CAN_NOT_LOCK in str(error):
                raise _locked(path, error) from error
            if isinstance(error, PermissionError):
                raise AccessError(f"{redact(path)}: this user may not read the file") from error
            if (failure := unreadable(redact(path), error)) is not None:
                raise failure from error
            if "already open for" in str(error):
                return _open_beside_its_writer(path)
            if error.errno in OF_THE_MACHINE:
                raise
            raise not_whole(path, error) from error
        if file.mode != "r":  # HDF5 gives the very file that is open already
            file.close()
            raise AccessError(f"{redact(path)} is open for writing in this process: close it first")
        return file

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[h5py.File]:
        """The file, open for reading: whatever h5py raises becomes an error that names the file.

        Raises:
            DataNotFoundError, AccessError, FormatError: as `open`.
            FormatError, BudgetError: something inside is damaged.
        """
        with self.open(path) as file, asking("h5py", redact(path)):
            yield file

    def dataset(self, file: h5py.File, name: str, path: str, steps: int = 0) -> h5py.Dataset:
        """A dataset of the file, or of one that its links lead into.

        Args:
            file, path: open, and its path or URL.
            name: of the dataset.
            steps: links that led here out of other files.

        Raises:
            MissingNameError: there is none; the message lists those there are, of many the nearest.
            DataNotFoundError, AccessError, FormatError: a link leads into a file that is missing,
                or can't be opened.
        """
        dataset = file.get(name)
        if isinstance(dataset, h5py.Dataset):
            return with_ordered_fields(dataset)
        out = leads_out(file, name)
        if out is None:
            raise MissingNameError(
                f"{redact(path)} has no dataset {name!r}; it has: "
                f"{listed_names(dataset_names(file), name)}"
            )
        part, link, rest = out
        where = f"{redact(path)}: the link {part!r} leads into {redact(link.filename)!r}"
        target = found_from(link.filename, path, "HDF5_EXT_PREFIX")
        if target is None:
            raise DataNotFoundError(f"{where}, which is missing")
        if steps < _LINKS_OUT:
            with self.open(target) as there:
                self.dataset(there, rest, target, steps + 1)
        raise FormatError(
            f"{where}, which h5py can't open from there; or it leads back to itself: open that "
            "file itself"
        )

    def read_each(
        self, paths: Sequence[str], function: Callable[[str], T], in_threads: bool = False
    ) -> list[T]:
        """What a function makes of each file. What it reads of a remote file through h5py is
        cached as the file's index.

        Args:
            paths: of the files.
            function: called with a path.
            in_threads: True if several threads may call it, once it was called for the first file.
        """
        return [function(path) for path in paths]

    def doubt(self, path: str, name: str, find: Callable[[], str | None]) -> str | None:
        """What speaks against decoding a dataset here: as `find` finds out, or as a remote
        file's index says.
        """
        return find()


def not_whole(path: str, error: OSError) -> FormatError:
    """The error of what h5py can't open."""
    return FormatError(
        f"{redact(path)} is no HDF5 file, or not a whole one: {' '.join(str(error).split())}"
    )


_locked_here: set[str] = set()


@contextlib.contextmanager
def locked_by_caller(path: str) -> Iterator[None]:
    """Inside of it a file is opened without HDF5's lock: the caller has locked it, and HDF5
    would take that for another writer's.
    """
    path = os.path.abspath(path)
    _locked_here.add(path)
    try:
        yield
    finally:
        _locked_here.discard(path)


def _open(path: str, **options: Any) -> h5py.File:
    """With HDF5's lock, which is the default; without it on a disk that has none; or as this
    process has it open already.
    """
    if os.path.abspath(path) not in _locked_here:
        for locking in (None, True):
            try:
                return h5py.File(path, "r", locking=locking, **options)
            except OSError as error:
                if (
                    locking is None
                    and _CAN_NOT_LOCK in str(error)
                    and _errno_of(error) in _NO_LOCKS
                ):
                    break
                if "flag values don't match" not in str(error):
                    raise
    return h5py.File(path, "r", locking=False, **options)


def _errno_of(error: OSError) -> int | None:
    """The system's error number, of which h5py gives the words at least."""
    match = re.search(r"errno = (\d+)", str(error))
    return error.errno or (int(match[1]) if match else None)


def _locked(path: str, error: OSError) -> AccessError:
    number = _errno_of(error)
    if number in _LOCKED:
        return AccessError(
            f"{redact(path)} is locked: another process has it open for writing: wait until it "
            "has closed the file (the "
            "environment variable HDF5_USE_FILE_LOCKING=FALSE opens it all the same, and what is "
            "being written may be read wrongly)"
        )
    return AccessError(
        f"{redact(path)} can't be locked: {os.strerror(number or 0)}: HDF5_USE_FILE_LOCKING=FALSE "
        "opens it without a lock"
    )


def _open_beside_its_writer(path: str) -> h5py.File:
    try:
        return _open(path, swmr=True)
    except OSError as error:
        raise AccessError(
            f"{redact(path)} is being written by another process, which allows no readers "
            "(file.swmr_mode = True): wait for its end; if it "
            f"has died, `h5clear -s {redact(path)}` says so to the file"
        ) from error


def only_dataset(file: h5py.File, path: str, usual: str, targets: str | None) -> str:
    """The dataset that holds the samples where nobody has named it: the usual one, AnnData's matrix
    X, or the only one with an axis beside the targets. Coordinates of netCDF (dimension scales) and
    what MATLAB keeps in ``#refs#`` count only where there is nothing else.
    """
    if isinstance(file.get(usual), h5py.Dataset):
        return usual
    if file.attrs.get("encoding-type") == "anndata" and isinstance(file.get("X"), h5py.Dataset):
        return "X"
    names = [name for name in dataset_names(file) if name != (targets or "").strip("/")]
    likely = [
        name
        for name in names
        if not (name.startswith("#refs#/") or h5py.h5ds.is_scale(file[name].id))
    ]
    shown: dict[str, str] = {}
    for name in likely or names:
        dataset = file[name]
        if dataset.shape:
            shown[name] = f"{name} {list(dataset.shape)} {_dtype_name(dataset)}"
    if len(shown) == 1:
        return next(iter(shown))
    what = "no dataset of samples"
    if shown:
        what = f"{len(shown):,} datasets: name one of them as dataset_name"
    raise MissingNameError(
        f"{redact(path)} has {what}: {listed_names(shown, show=lambda name: shown[name])}"
    )


def _dtype_name(dataset: h5py.Dataset) -> str:
    try:
        return str(dataset.dtype)
    except TypeError:  # h5py has none for some, such as times
        return "of a type that h5py can't read"


def dataset_names(file: h5py.File) -> list[str]:
    """The paths of all datasets inside the file; what links lead to is left out."""
    names: list[str] = []
    file.visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Dataset) else None)
    return names


def leads_out(file: h5py.File, name: str) -> tuple[str, h5py.ExternalLink, str] | None:
    """The first link on the way to a name that leads into another file: its own name, the link, and
    what is looked for there; None: there is none.
    """
    parts, group, steps = [part for part in name.split("/") if part], file, 0
    while parts:
        part, steps = parts.pop(0), steps + 1
        link = (
            group.get(part, getlink=True)
            if isinstance(group, h5py.Group) and steps <= _LINKS
            else None
        )
        if isinstance(link, h5py.ExternalLink):
            return part, link, "/".join([link.path.rstrip("/"), *parts])
        if isinstance(link, h5py.SoftLink):
            parts = [one for one in link.path.split("/") if one] + parts
            group = file if link.path.startswith("/") else group
        elif link is not None:
            group = group[part] if parts else None  # what it leads to is not opened
        else:
            return None  # there is no such thing: whoever opens it will say so
    return None


def found_from(name: str, path: str, variable: str) -> str | None:
    """Where HDF5 finds a file that the one at `path` names; None: nowhere. It looks first in
    folders of a variable of the environment.
    """
    folder, places = os.path.dirname(path), list[str]()
    if os.path.isabs(name):
        places, name = [name], os.path.basename(name)
    prefix = os.environ.get(variable, "")
    own = [
        prefix.replace("${ORIGIN}", folder, 1),
        folder,
        "",
        os.path.dirname(os.path.realpath(path)),
    ]
    places += [os.path.join(one, name) for one in [*filter(None, prefix.split(":")), *own]]
    return next((place for place in places if os.path.exists(place)), None)


# -- datasets


class OrderedDataset(h5py.Dataset):  # type: ignore[misc]
    """A dataset of compounds, whose fields are in the order of their bytes.

    HDF5 sorts the fields of a type so when it first reads a dataset, for all who have it open: the
    order that h5py gives depends on who has read before.

    Args:
        dataset: as h5py opens it.
        ordered: its dtype, with sorted fields.
    """

    def __init__(self, dataset: h5py.Dataset, ordered: np.dtype[Any]) -> None:
        super().__init__(dataset.id)
        self._ordered = ordered

    @property
    def dtype(self) -> np.dtype[Any]:
        """With fields in the order of their bytes."""
        return self._ordered

    def __getitem__(self, part: Any, new_dtype: Any = None) -> Any:
        return super().__getitem__(part, self._ordered if new_dtype is None else new_dtype)


def with_ordered_fields(dataset: h5py.Dataset) -> h5py.Dataset:
    """A dataset with the fields of compounds in the order of their bytes."""
    if isinstance(dataset, OrderedDataset):
        return dataset
    ordered = _ordered(dataset.dtype)
    if ordered is dataset.dtype:
        return dataset
    return OrderedDataset(dataset, ordered)


def _ordered(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same dtype with the fields of compounds in the order of their bytes; itself if they
    are.
    """
    if dtype.subdtype is not None:
        base = _ordered(dtype.base)
        if base is dtype.base:
            return dtype
        return np.dtype((base, dtype.shape))
    if dtype.fields is None:
        return dtype
    fields = sorted(dtype.fields.items(), key=lambda field: field[1][1])
    names = [name for name, _ in fields]
    formats = [_ordered(of_field[0]) for _, of_field in fields]
    if names == list(dtype.names or ()) and all(
        inner is dtype[name] for name, inner in zip(names, formats, strict=True)
    ):
        return dtype
    offsets = [of_field[1] for _, of_field in fields]
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": dtype.itemsize}
    )


def check_has_values(dataset: h5py.Dataset, where: str) -> None:
    """Raises a FormatError for a dataset of a null dataspace."""
    if dataset.shape is None:
        raise FormatError(f"{where} has a null dataspace, and so no values: name another dataset")


def packed_info(path: str | os.PathLike[Any], hdf5: HDF5Files | None = None) -> PackedInfo | None:
    """What a packed file says about itself; None for any other HDF5 file.

    Raises:
        FormatError: the file is of a later version of headrace, or damaged.
    """
    with (hdf5 or HDF5Files()).reading(os.fspath(path)) as file:
        return info_in(file.attrs, path)
