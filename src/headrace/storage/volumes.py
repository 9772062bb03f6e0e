"""How are patches of a volume read, and of the labels that belong to it?"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.storage.chunks import ArrayReader, ChunkCache
from headrace.storage.patches import PatchGrid, padded_places
from headrace.storage.paths import redact
from headrace.storage.source import Source

PADS = ("reflect", "edge", "constant")


class Opened(Protocol):
    """What a process has open."""

    chunks: ChunkCache

    def close(self) -> None:
        """Closes and forgets it all."""


@dataclass(frozen=True)
class Volume:
    """An array that patches are taken from, along its last axes.

    Attributes:
        name: for messages.
        reader: reads it.
        pad: what patches have beyond its end: "reflect", "edge" or "constant".
        value: the constant.
    """

    name: str
    reader: ArrayReader
    pad: str
    value: Any


class PatchSource(Source):
    """Patches of one volume, or tuples of patches of several that lie at the same place.

    Args:
        path: of the store.
        volumes: the array, and its labels if there are any.
        grid: where patches begin, along the last axes.
        opened: what the volumes' readers have open.
    """

    def __init__(self, path: str, volumes: Sequence[Volume], grid: PatchGrid, opened: Opened) -> None:
        self.path, self.volumes, self.grid, self._opened = redact(path), list(volumes), grid, opened

    def __len__(self) -> int:
        return len(self.grid)

    def _shape(self, volume: Volume) -> tuple[int, ...]:
        return (*volume.reader.shape[: len(volume.reader.shape) - len(self.grid.shape)], *self.grid.patch)

    def sample_bytes(self, dtype: np.dtype[Any] | None) -> int:
        """Bytes of a sample, the first volume's patch being cast to a dtype."""
        kinds = [volume.reader.dtype if number or dtype is None else dtype for number, volume in enumerate(self.volumes)]
        return sum(math.prod(self._shape(volume)) * kind.itemsize for volume, kind in zip(self.volumes, kinds, strict=True))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the first volume."""
        return self.volumes[0].reader.dtype

    def rows_like(self) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        return (self._shape(self.volumes[0]), self.dtype) if len(self.volumes) == 1 and self.dtype.isnative else None

    def read_into(self, indices: Sequence[int], rows: Sequence[npt.NDArray[Any]]) -> None:
        self._read_volume(self.volumes[0], [self.grid.corner(index) for index in indices], rows)

    def read(self, indices: Sequence[int]) -> list[Any]:
        corners, columns = [self.grid.corner(index) for index in indices], []
        for volume in self.volumes:
            patches = [np.empty(self._shape(volume), volume.reader.dtype) for _ in indices]
            self._read_volume(volume, corners, patches)
            columns.append(patches)
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def _read_volume(self, volume: Volume, corners: Sequence[tuple[int, ...]], outs: Sequence[npt.NDArray[Any]]) -> None:
        before = len(volume.reader.shape) - len(self.grid.shape)
        beyond = [self.grid.reaches_beyond(corner) for corner in corners]
        whole = [number for number, is_beyond in enumerate(beyond) if not is_beyond]
        places = [(*[0] * before, *corners[number]) for number in whole]
        volume.reader.read_boxes(places, [outs[number] for number in whole], self.run)
        for number, is_beyond in enumerate(beyond):
            if is_beyond:
                self._read_padded(volume, corners[number], before, outs[number])

    def _read_padded(self, volume: Volume, corner: tuple[int, ...], before: int, out: npt.NDArray[Any]) -> None:
        """A patch that reaches beyond the end of the volume, made of a part of it that has all that is needed."""
        shape = volume.reader.shape
        starts = (*[0] * before, *corner)
        axes = [padded_places(*sizes, volume.pad) for sizes in zip(starts, out.shape, shape, strict=True)]
        first = [int(places[places >= 0].min()) for places in axes]
        part = np.empty([int(places.max()) - start + 1 for places, start in zip(axes, first, strict=True)], out.dtype)
        volume.reader.read_boxes([first], [part], self.run)
        inside = [places >= 0 for places in axes]
        if not all(some.all() for some in inside):
            out[...] = volume.value
        out[np.ix_(*inside)] = part[np.ix_(*(places[places >= 0] - start for places, start in zip(axes, first, strict=True)))]

    # -- the rest

    def blocks(self) -> npt.NDArray[np.int64]:
        """Patches along the last axis."""
        lines = [np.full(math.prod(counts[:-1]), counts[-1], np.int64) for counts in self.grid.counts if math.prod(counts)]
        return np.concatenate(lines) if lines else np.zeros(0, np.int64)

    @property
    def block_nbytes(self) -> int:
        total = 0
        for volume in self.volumes:
            grid, before = volume.reader.chunks.grid, len(volume.reader.shape) - len(self.grid.shape)
            crossed = [*grid.counts[:before]]
            crossed += [-(-patch // chunk) + 1 for patch, chunk in zip(self.grid.patch[:-1], grid.chunks[before:-1], strict=True)]
            crossed.append(grid.counts[-1])
            chunks = math.prod(min(some, all_) for some, all_ in zip(crossed, grid.counts, strict=True))
            total += chunks * volume.reader.chunks.nbytes if volume.reader.chunks.decodes else 0
        return total

    def hold_chunks(self, nbytes: int) -> None:
        self._opened.chunks.resize(nbytes)

    def take_counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for volume in self.volumes:
            counts.update(volume.reader.counts)
            volume.reader.counts.clear()
        return counts

    def how(self) -> dict[str, str]:
        return {volume.name or "the array": volume.reader.how for volume in self.volumes}

    def fingerprint(self) -> str:
        """A hash of names, shapes, dtypes, chunks and of where patches begin."""
        arrays = [[v.name, v.reader.shape, v.reader.dtype.str, v.reader.chunks.grid.chunks, v.pad] for v in self.volumes]
        boxes = [[box.start, box.stop] for box in self.grid.boxes]
        said = json.dumps([arrays, self.grid.patch, self.grid.stride, self.grid.edges, boxes])
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    def location(self, index: int) -> str:
        return f"{self.path}, {self.volumes[0].name or 'the array'}, patch {index} at {list(self.grid.corner(index))}"

    def close(self) -> None:
        """Closes what this process has open; decoded chunks are forgotten."""
        self._opened.close()
