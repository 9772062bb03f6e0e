"""Opens HDF5 files and Zarr stores as trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headrace.formats.arrays.reader import OpenArrays
from headrace.formats.hdf5.kind import HDF5
from headrace.formats.hdf5.tree import open_files
from headrace.formats.resolve.file_set import FileSet, Format
from headrace.formats.resolve.resolver import DataPath, look_for, resolve
from headrace.formats.tree import Tree
from headrace.formats.zarr.rows import OpenZarr
from headrace.formats.zarr.stores import ZARR
from headrace.io.remote.options import RemoteOptions

T = TypeVar("T")


def tree_kind(data_path: DataPath, reach: RemoteOptions) -> Format:
    """`ZARR` or `HDF5`: what a path means; anything else counts as HDF5, which says what is wrong.

    Raises:
        ConfigError: both lie there.
    """
    kind, _ = look_for(data_path, (HDF5, ZARR), reach)
    return kind or HDF5


def look_into(
    data_path: DataPath | FileSet,
    reach: RemoteOptions,
    kind: Format,
    look: Callable[[Tree], T],
    *,
    nodes: Sequence[str] = (),
    first: int | None = None,
    direct: bool = True,
    keeps: bool = False,
) -> tuple[list[T], OpenArrays[Any]]:
    """What a function finds in each file, and what is open of them.

    Args:
        data_path: HDF5 files or Zarr stores.
        reach: how URLs are reached.
        kind: `HDF5` or `ZARR`.
        look: of a remote file it may be called again.
        nodes: groups and arrays that it looks at, whose metadata a server is asked for together.
        first: how many files; None: all.
        direct: False: arrays are read by h5py and zarr-python alone.
        keeps: True if what is found reads the files later; else all is closed, but what a `FileSet`
            shares.

    Raises:
        ConfigError, DataNotFoundError, AccessError, RemoteError, FormatError: a file is missing, or
            can't be read; and what `look` raises.
    """
    stays_open = isinstance(data_path, FileSet) and data_path.is_remote
    opened: OpenArrays[Any]
    if kind == ZARR:
        files = resolve(data_path, ZARR, reach)
        opened = stores = OpenZarr(files.server, direct=direct)
        paths = files.urls()[:first]
    else:
        paths, hdf5 = open_files(data_path, reach, direct)
        opened = hdf5
        if stays_open:
            hdf5.learn(paths)  # what the others take is asked for at once
        paths = paths[:first]
    try:
        if kind == ZARR:
            found = [look(tree) for tree in [stores.tree(path, nodes) for path in paths]]
        else:

            def look_at(path: str) -> T:
                with hdf5.tree(path) as tree:
                    return look(tree)

            found = hdf5.each(paths, look_at)
    except BaseException:
        if not stays_open:
            opened.close()
        raise
    if not (keeps or stays_open):
        opened.close()
    return found, opened
