"""Finds episodes in HDF5 files, groups of arrays of equal length."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from typing import Any

import h5py
import numpy as np

from headrace.storage.arrays.chunks import DirectChunks
from headrace.storage.arrays.reader import ArrayReader
from headrace.storage.episodes.look import (
    ARRAY,
    EPISODES,
    GROUP,
    Episode,
    EpisodeArray,
    EpisodeLook,
    EpisodeOptions,
    check_static,
)
from headrace.storage.hdf5.chunks import ObjectRows, rows_of
from headrace.storage.hdf5.probe import is_as_stored, place_of
from headrace.storage.hdf5.rows import OpenHDF5

# -- groups


def _groups_in(file: h5py.File) -> list[str]:
    names: list[str] = []
    file.visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Group) else None)
    return names


def arrays_of(group: h5py.Group) -> dict[str, h5py.Dataset]:
    """The datasets below a group that have an axis, by their path in it."""
    found: dict[str, h5py.Dataset] = {}

    def note(key: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.shape:
            found[key] = item

    group.visititems(note)
    return found


# -- one file


class HDF5Look(EpisodeLook[h5py.File, h5py.Group]):
    """Looks into HDF5 files.

    Args:
        opened: what is open of them.
        options: what is read.
    """

    def __init__(self, opened: OpenHDF5, options: EpisodeOptions) -> None:
        super().__init__(options)
        self._opened = opened
        self._is_checked, self._file_number = False, -1

    def __call__(self, file: h5py.File, path: str) -> list[Episode]:
        self._is_checked = False
        self._file_number = h5py.h5o.get_info(file["/"].id).fileno
        return super().__call__(file, path)

    def children(self, file: h5py.File, parent: str) -> list[str]:
        group = file[parent or "/"]
        return list(group) if isinstance(group, h5py.Group) else []

    def kind(self, file: h5py.File, name: str) -> str | None:
        return {h5py.Group: GROUP, h5py.Dataset: ARRAY}.get(file.get(name, getclass=True))

    def group_names(self, file: h5py.File) -> list[str]:
        return _groups_in(file)

    def listed(self, file: h5py.File, path: str, name: str) -> list[str]:
        values = np.asarray(self._opened.hdf5.dataset(file, name, path)).reshape(-1).tolist()
        return [one.decode() if isinstance(one, bytes) else str(one) for one in values]

    def group(self, file: h5py.File, name: str) -> h5py.Group:
        return file[name or "/"]

    def arrays(self, group: h5py.Group) -> Collection[str]:
        return arrays_of(group)

    def attributes(self, group: h5py.Group) -> Mapping[str, Any]:
        return {
            name: value for name, value in group.attrs.items() if not isinstance(value, h5py.Empty)
        }

    def array(self, group: h5py.Group, path: str, name: str, key: str) -> EpisodeArray:
        opened, options = self._opened, self.options
        if self._is_checked and (plain := self._plain_array(group, path, key)) is not None:
            return plain
        self._is_checked = options.direct and hasattr(os, "preadv") and not group.file.swmr_mode
        dataset, place = group.get(key), f"{name}/{key}".lstrip("/")
        if not isinstance(dataset, h5py.Dataset):
            raise self.absent(group, path, name, key)
        rows = rows_of(
            dataset,
            path,
            place,
            opened.hdf5,
            opened.library,
            direct=options.direct,
            cache_dir=options.cache_dir,
        )
        if isinstance(rows, ObjectRows):
            return EpisodeArray(rows.shape, rows.dtype, path, -1, rows)
        grid = rows.grid
        if isinstance(rows, DirectChunks) and rows.is_raw and grid.chunks == grid.shape:
            ranges = rows.raw_ranges(np.zeros(1, np.int64))
            if ranges.start[0] >= 0:
                return EpisodeArray(
                    grid.shape,
                    rows.dtype,
                    ranges.paths[int(ranges.file[0])],
                    int(ranges.start[0]),
                    None,
                )
        return EpisodeArray(
            grid.shape, rows.dtype, path, -1, ArrayReader(rows, opened.chunks, f"{path}\0{place}")
        )

    def _plain_array(self, group: h5py.Group, path: str, key: str) -> EpisodeArray | None:
        """An array of numbers that lies in one piece in this very file, which takes a tenth of the
        time to find out; None: it is another.

        The first array of each file goes the long way, which compares the file with its version.
        """
        try:
            found = h5py.h5d.open(group.id, key.encode())
        except (KeyError, TypeError):  # who opens it in the other way says what is wrong
            return None
        plist, shape, dtype = found.get_create_plist(), found.shape, found.dtype
        if (
            plist.get_layout() != h5py.h5d.CONTIGUOUS
            or plist.get_external_count()
            or not shape
            or dtype.kind not in "biufc"
        ):
            return None
        if (
            not is_as_stored(found.get_type(), dtype)
            or h5py.h5o.get_info(found).fileno != self._file_number
        ):
            return None
        begin, nbytes = place_of(found), math.prod(shape) * dtype.itemsize
        if (
            begin is None
            or not nbytes
            or begin + nbytes > self._opened.hdf5.files.version(path).size
        ):
            return None
        return EpisodeArray(tuple(shape), dtype, path, begin, None)

    def value(self, group: h5py.Group, key: str) -> Any:
        dataset = group.get(key)
        if not isinstance(dataset, h5py.Dataset) or dataset.shape is None:
            return None
        check_static(key, dataset.nbytes)
        return dataset[()]


def kind_of_file(path: str, opened: OpenHDF5) -> str:
    """`EPISODES` if a file unmistakably holds such; else ""."""
    with opened.hdf5.reading(path) as file:
        return (
            "" if HDF5Look(opened, EpisodeOptions()).unmistakable_groups(file) is None else EPISODES
        )
