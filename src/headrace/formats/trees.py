"""Opens HDF5 files and Zarr stores as trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headrace.formats.hdf5 import HDF5
from headrace.formats.hdf5.tree import OpenHDF5
from headrace.formats.resolve.file_set import FileSet, Format
from headrace.formats.resolve.resolver import look_for, resolve
from headrace.formats.tree import OpenTrees, Tree
from headrace.formats.zarr.stores import ZARR
from headrace.formats.zarr.tree import OpenZarr, objects_in
from headrace.io.remote.options import RemoteOptions

T = TypeVar("T")


def open_trees(
    data_path: Any,
    kind: Format | None,
    reach: RemoteOptions,
    *,
    direct: bool = True,
    **options: Any,
) -> tuple[list[str], OpenTrees[Any]]:
    """The paths or URLs of HDF5 files or Zarr stores, and what is open of them.

    Args:
        data_path: what `resolve` takes, or what `objects_in` finds.
        kind: `HDF5` or `ZARR`; None: what lies there. Anything else counts as HDF5, which says what
            is wrong.
        reach: how URLs are reached.
        direct: False: arrays are read by h5py and zarr-python alone.
        **options: others of `OpenZarr`.

    Raises:
        ConfigError: HDF5 files and Zarr stores lie there.
        ConfigError, DataNotFoundError, AccessError, RemoteError: see `resolve`.
    """
    if kind in (None, ZARR) and objects_in(data_path):
        stores = OpenZarr(direct=direct, **options)
        return [stores.take(store) for store in objects_in(data_path)], stores
    files = None
    if kind is None:
        files = look_for(data_path, (HDF5, ZARR), reach)
    if files is None:
        files = resolve(data_path, kind or HDF5, reach)
    if files.kind == ZARR:
        return files.urls(), OpenZarr(files.server, direct=direct, **options)
    return files.urls(), OpenHDF5(files.server, direct=direct)


def look_into(
    data_path: Any,
    reach: RemoteOptions,
    kind: Format | None,
    look: Callable[[Tree], T],
    *,
    nodes: Sequence[str] = (),
    first: int | None = None,
    direct: bool = True,
    keeps: bool = False,
) -> tuple[list[T], OpenTrees[Any]]:
    """What a function finds in each file, and what is open of them.

    Args:
        data_path, reach, kind, direct: see `open_trees`.
        look: of a remote file it may be called again.
        nodes: groups and arrays that it looks at, whose metadata a server is asked for together.
        first: how many files; None: all.
        keeps: True if what is found reads the files later; else all is closed, but what a `FileSet`
            shares.

    Raises:
        ConfigError, DataNotFoundError, AccessError, RemoteError, FormatError: a file is missing, or
            can't be read; and what `look` raises.
    """
    stays_open = isinstance(data_path, FileSet) and data_path.is_remote
    paths, opened = open_trees(data_path, kind, reach, direct=direct)

    def look_at(path: str) -> T:
        with opened.tree(path, nodes) as tree:
            return look(tree)

    try:
        if stays_open:
            opened.learn(paths)  # what the others take is asked for at once
        found = opened.each(paths[:first], look_at)
    except BaseException:
        if not stays_open:
            opened.close()
        raise
    if not (keeps or stays_open):
        opened.close()
    return found, opened
