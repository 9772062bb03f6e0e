"""Patches of a volume, and of the labels that belong to it.

Patches of one shape stand on a grid of corners, `stride` apart; or on one grid in each of some
boxes. Corners follow from indices by arithmetic: there is no list of patches.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.arguments import check_choice
from headrace.dtypes import AnyArray, ArraySpec, IntArray
from headrace.errors import ConfigError
from headrace.formats.arrays.reader import ArrayReader, OpenArrays
from headrace.formats.arrays.rows import ReadersSource, layout_fingerprint
from headrace.formats.source import Description, Rows
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges

PADS = ("reflect", "edge", "constant")
EDGES = ("drop", "pad", "shift")


Box = tuple[Sequence[int], Sequence[int]]
"""A part of a volume: along each axis from the first number to before the second."""


class PatchGrid:
    """The corners of patches.

    Args:
        shape: of the volume.
        patch: extents of a patch.
        stride: from one corner to the next, along each axis.
        edges: what becomes of the rest at the end of an axis. "drop": it is in no patch; "pad": the
            last patch reaches beyond it; "shift": the last patch ends there, and overlaps the one
            before. An axis that is shorter than a patch has none with "drop" and "shift", and one
            with "pad". Every patch has some of the volume.
        boxes: patches lie inside of these; None: of the whole volume.

    Raises:
        ConfigError: extents that make no sense; a box that is not inside of the volume.
    """

    def __init__(
        self,
        shape: Sequence[int],
        patch: Sequence[int],
        stride: Sequence[int],
        edges: str = "drop",
        boxes: Sequence[Box] | None = None,
    ) -> None:
        self.shape: tuple[int, ...] = tuple(shape)
        self.patch: tuple[int, ...] = tuple(patch)
        self.stride: tuple[int, ...] = tuple(stride)
        self.edges = edges
        check_choice("edges", edges, EDGES)
        for name, extents in (("patch_shape", self.patch), ("stride", self.stride)):
            if len(extents) != len(self.shape) or min(extents, default=1) < 1:
                raise ConfigError(
                    f"{name}={list(extents)} needs {len(self.shape)} extents of at least 1, for a "
                    f"volume of {list(shape)}"
                )
        if 0 in self.shape:
            raise ConfigError(f"a volume of {list(shape)} has no voxels, and so no patches")
        self.boxes: list[Box] = [((0,) * len(self.shape), self.shape)]
        if boxes is not None:
            self.boxes = [(tuple(map(int, start)), tuple(map(int, stop))) for start, stop in boxes]
        self.counts: list[tuple[int, ...]] = []
        for start, stop in self.boxes:
            is_inside = len(start) == len(stop) == len(self.shape) and all(
                0 <= a < b <= s for a, b, s in zip(start, stop, self.shape, strict=True)
            )
            if not is_inside:
                raise ConfigError(
                    f"the box from {list(start)} to {list(stop)} does not lie inside of a volume "
                    f"of {list(shape)}"
                )
            self.counts.append(tuple(map(self._count, start, stop, self.patch, self.stride)))
        self._ends = np.cumsum([math.prod(counts) for counts in self.counts], dtype=np.int64)

    def _count(self, start: int, stop: int, patch: int, stride: int) -> int:
        room = stop - start - patch
        # a stride beyond the patch leads past the end; what begins there would have nothing of the
        # volume
        if self.edges == "pad":
            return min(max(0, -(-room // stride)) + 1, -(-(stop - start) // stride))
        if room < 0:
            return 0
        if self.edges == "drop":
            return room // stride + 1
        return -(-room // stride) + 1

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def corner(self, index: int) -> tuple[int, ...]:
        """The lowest corner of a patch."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        start, stop = self.boxes[number]
        inner = index - int(self._ends[number]) + math.prod(self.counts[number])
        places = np.unravel_index(inner, self.counts[number])
        corner = np.multiply(places, self.stride) + start
        if self.edges == "shift":
            corner = np.minimum(corner, np.subtract(stop, self.patch))
        return tuple(corner.tolist())


@dataclass(frozen=True)
class Volume:
    """An array that patches are taken from.

    Attributes:
        name: for messages.
        reader: reads it.
        pad: what patches have beyond its end: "reflect", "edge" or "constant".
        value: the constant, and what lies where a table has nothing.
        axes: for each axis of the array the axis of patches that goes along it; None: it is whole
            in every patch.
        tables: of an array with other voxels than those that patches are counted in: by axis of
            patches, the array's nearest voxel for each of these, or -1.
    """

    name: str
    reader: ArrayReader
    pad: str
    value: Any
    axes: tuple[int | None, ...]
    tables: Mapping[int, IntArray] = field(default_factory=dict)

    def shape(self, patch: Sequence[int]) -> tuple[int, ...]:
        """That of this array's part in a patch."""
        return tuple(
            extent if axis is None else patch[axis]
            for axis, extent in zip(self.axes, self.reader.shape, strict=True)
        )

    def corner(self, corner: Sequence[int]) -> tuple[int, ...]:
        """Where in this array a patch begins that lies inside of it, side by side."""
        return tuple(0 if axis is None else corner[axis] for axis in self.axes)

    def places(self, corner: Sequence[int], grid: PatchGrid) -> list[IntArray] | None:
        """Along each axis of this array, which of its elements are in a patch; -1: none is. None:
        they lie side by side, from `corner` on.
        """
        ends = np.add(corner, grid.patch)
        if not self.tables and (ends <= grid.shape).all():
            return None
        axes = []
        for axis, extent in zip(self.axes, self.reader.shape, strict=True):
            if axis is None:
                axes.append(np.arange(extent))
                continue
            places = np.arange(grid.shape[axis])
            beyond = int(ends[axis]) - len(places)
            if beyond > 0:
                how: dict[str, Any] = {"mode": self.pad}
                if self.pad == "constant":
                    how["constant_values"] = -1
                places = np.pad(places, (0, beyond), **how)
            places = places[corner[axis] : ends[axis]]
            table = self.tables.get(axis)
            axes.append(places if table is None else np.where(places < 0, -1, table[places]))
        return axes


class PatchSource(ReadersSource):
    """Patches of one volume, or tuples of patches of several that lie at the same place.

    Args:
        path: of the store.
        volumes: the array, and its labels if there are any.
        grid: where patches begin, in voxels of the array.
        opened: what the volumes' readers have open.
    """

    def __init__(
        self, path: str, volumes: Sequence[Volume], grid: PatchGrid, opened: OpenArrays[Any]
    ) -> None:
        super().__init__(redact(path), opened, [volume.reader for volume in volumes])
        self.volumes: list[Volume] = list(volumes)
        self.grid: PatchGrid = grid
        self.dtype: np.dtype[Any] = volumes[0].reader.dtype
        self._shapes = [volume.shape(grid.patch) for volume in volumes]

    def __len__(self) -> int:
        return len(self.grid)

    def sample_bytes(self, dtype: np.dtype[Any] | None) -> int:
        """Bytes of a sample, the first volume's patch being cast to a dtype."""
        kinds = [dtype or self.dtype, *(volume.reader.dtype for volume in self.volumes[1:])]
        each = zip(self._shapes, kinds, strict=True)
        return sum(math.prod(shape) * kind.itemsize for shape, kind in each)

    @property
    def patches_are(self) -> str:
        """Dtype and shape of the parts of a sample, in words."""
        each = zip(self.volumes, self._shapes, strict=True)
        return ", ".join(f"{volume.reader.dtype} {list(shape)}" for volume, shape in each)

    @property
    def array_spec(self) -> ArraySpec | None:
        if len(self.volumes) > 1 or not self.dtype.isnative:
            return None
        return ArraySpec(self._shapes[0], self.dtype)

    def read_into(self, indices: Sequence[int], rows: Rows) -> None:
        self._read_volume(self.volumes[0], [self.grid.corner(index) for index in indices], rows)

    def read(self, indices: Sequence[int]) -> list[Any]:
        corners = [self.grid.corner(index) for index in indices]
        columns: list[list[AnyArray]] = []
        for volume, shape in zip(self.volumes, self._shapes, strict=True):
            patches = [np.empty(shape, volume.reader.dtype) for _ in indices]
            self._read_volume(volume, corners, patches)
            columns.append(patches)
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def _read_volume(self, volume: Volume, corners: Sequence[tuple[int, ...]], outs: Rows) -> None:
        plain: list[int] = []
        for number, corner in enumerate(corners):
            axes = volume.places(corner, self.grid)
            if axes is None:
                plain.append(number)
            else:
                self._read_places(volume, axes, outs[number])
        volume.reader.read_boxes(
            [volume.corner(corners[number]) for number in plain],
            [outs[number] for number in plain],
            self.run,
        )

    def _read_places(self, volume: Volume, axes: Sequence[IntArray], out: AnyArray) -> None:
        """A patch whose elements don't lie side by side, taken out of a box that has all of
        them.
        """
        out[...] = volume.value
        inside = [places >= 0 for places in axes]
        for start, extents in _box_of(axes):
            part = np.empty(extents, out.dtype)
            volume.reader.read_boxes([start], [part], self.run)
            each = zip(axes, inside, start, strict=True)
            taken = [places[mask] - first for places, mask, first in each]
            out[np.ix_(*inside)] = part[np.ix_(*taken)]

    def _located(self, indices: IntArray, missing: bool) -> list[ByteRanges]:
        corners = [self.grid.corner(index) for index in indices.tolist()]
        located: list[ByteRanges] = []
        for volume, shape in zip(self.volumes, self._shapes, strict=True):
            boxes: list[Box] = []
            for corner in corners:
                axes = volume.places(corner, self.grid)
                if axes is None:
                    boxes.append((volume.corner(corner), shape))
                else:
                    boxes += _box_of(axes)
            located.append(volume.reader.box_ranges(boxes, missing))
        return located

    @property
    def stored_nbytes(self) -> int:
        """As if nothing were compressed; chunks count for each line of patches that they are in."""
        return len(self.blocks_of(0)) * sum(map(self._line_nbytes, self.volumes))

    def blocks_of(self, nbytes: int) -> IntArray:
        """Patches along the last axis."""
        lines = [math.prod(counts[:-1]) for counts in self.grid.counts]
        sizes = np.repeat([counts[-1] for counts in self.grid.counts], lines).astype(np.int64)
        return sizes[sizes > 0]

    @property
    def block_nbytes(self) -> int:
        return sum(
            self._line_nbytes(volume) for volume in self.volumes if volume.reader.chunks.decodes
        )

    def _line_nbytes(self, volume: Volume) -> int:
        """Bytes of the decoded chunks that patches along the last axis are in, at most."""
        grid = volume.reader.chunks.grid
        chunks = 1
        for axis, chunk, count in zip(volume.axes, grid.chunks, grid.counts, strict=True):
            if axis is None or axis == len(self.grid.shape) - 1:  # whole, or gone along
                chunks *= count
                continue
            # how many elements a patch needs at most, padding aside
            reach = self.grid.patch[axis]
            if axis in volume.tables:
                covered = volume.tables[axis][volume.tables[axis] >= 0]
                width = min(reach, len(covered))
                spans = covered[width - 1 :] - covered[: len(covered) - width + 1]
                reach = int(spans.max(initial=0)) + 1
            chunks *= min(count, -(-reach // chunk) + 1)
        return chunks * volume.reader.chunks.nbytes

    def describe(self) -> Description:
        found = Description()
        for volume, shape in zip(self.volumes, self._shapes, strict=True):
            column = volume.reader.describe(volume.name or "the array", shape)
            if volume.tables:
                column.read_by += "; each voxel of a patch has the nearest one"
            found.columns.append(column)
            found.stored += column.stored
        return found

    def fingerprint(self) -> str:
        """A hash of names, shapes, dtypes, chunks, of where patches begin and of how labels lie
        to them.
        """
        arrays = [
            [v.name, v.reader.shape, v.reader.dtype.str, v.reader.chunks.grid.chunks, v.pad, v.axes]
            for v in self.volumes
        ]
        tables = [
            [axis, zlib.crc32(table.tobytes())]
            for volume in self.volumes
            for axis, table in sorted(volume.tables.items())
        ]
        grid = self.grid
        return layout_fingerprint([arrays, tables, grid.patch, grid.stride, grid.edges, grid.boxes])

    def location(self, index: int) -> str:
        return (
            f"{self.path}, {self.volumes[0].name or 'the array'}, patch {index} at "
            f"{list(self.grid.corner(index))}"
        )


def _box_of(axes: Sequence[IntArray]) -> list[Box]:
    """Lowest corner and extents of the box that has all of these places along each axis (-1:
    none); []: there are none.
    """
    inside = [places[places >= 0] for places in axes]
    if not all(map(len, inside)):
        return []
    start = [int(places.min()) for places in inside]
    return [(start, [int(np.ptp(places)) + 1 for places in inside])]
