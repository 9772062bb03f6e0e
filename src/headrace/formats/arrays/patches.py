"""The corners of patches: which part of a volume is sample i.

Patches of one shape stand on a grid of corners, `stride` apart; or on one grid in each of some
boxes. Corners follow from indices by arithmetic: there is no list of patches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError

EDGES = ("drop", "pad", "shift")


@dataclass(frozen=True)
class Box:
    """A part of a volume: along each axis from `start` to before `stop`."""

    start: tuple[int, ...]
    stop: tuple[int, ...]


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
        self.shape, self.patch, self.stride, self.edges = (
            tuple(shape),
            tuple(patch),
            tuple(stride),
            edges,
        )
        if edges not in EDGES:
            raise ConfigError(f"edges must be one of {', '.join(map(repr, EDGES))}, not {edges!r}")
        for name, extents in (("patch_shape", self.patch), ("stride", self.stride)):
            if len(extents) != len(self.shape) or min(extents, default=1) < 1:
                raise ConfigError(
                    f"{name}={list(extents)} needs {len(self.shape)} extents of at least 1, for a "
                    f"volume of {list(shape)}"
                )
        if 0 in self.shape:
            raise ConfigError(f"a volume of {list(shape)} has no voxels, and so no patches")
        self.boxes = [Box((0,) * len(self.shape), self.shape)] if boxes is None else list(boxes)
        for box in self.boxes:
            inside = all(
                0 <= a < b <= s for a, b, s in zip(box.start, box.stop, self.shape, strict=True)
            )
            if len(box.start) != len(self.shape) or not inside:
                raise ConfigError(
                    f"the box from {list(box.start)} to {list(box.stop)} does not lie inside of a "
                    f"volume of {list(shape)}"
                )
        self.counts: list[tuple[int, ...]] = [
            tuple(map(self._count, box.start, box.stop, self.patch, self.stride))
            for box in self.boxes
        ]
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
        if len(self._ends):
            return int(self._ends[-1])
        return 0

    def too_short(self) -> list[int]:
        """The axes along which no patch fits into any box."""
        return [
            axis
            for axis in range(len(self.shape))
            if not any(counts[axis] for counts in self.counts)
        ]

    def corner(self, index: int) -> tuple[int, ...]:
        """The lowest corner of a patch."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        box, first = self.boxes[number], int(self._ends[number - 1]) if number else 0
        places = np.unravel_index(index - first, self.counts[number])
        corner = [
            a + int(place) * stride
            for a, place, stride in zip(box.start, places, self.stride, strict=True)
        ]
        if self.edges == "shift":
            corner = [
                min(c, stop - patch)
                for c, stop, patch in zip(corner, box.stop, self.patch, strict=True)
            ]
        return tuple(corner)

    def reaches_beyond(self, corner: Sequence[int]) -> bool:
        """True if the patch at a corner ends outside of the volume."""
        return any(
            at + patch > extent
            for at, patch, extent in zip(corner, self.patch, self.shape, strict=True)
        )


def padded_places(start: int, extent: int, size: int, how: str) -> npt.NDArray[np.int64]:
    """Where along an axis of `size` elements those of a patch come from that begins at `start` and
    may reach beyond the end.

    Args:
        how: "edge": the last element again; "reflect": mirrored at it, and at the first one, as
            often as need be (as `numpy.pad` does); "constant": -1 for what lies beyond.
    """
    places = np.arange(start, start + extent, dtype=np.int64)
    if how == "constant":
        return np.where(places < size, places, -1)
    if how == "edge" or size == 1:
        return np.minimum(places, size - 1)
    places = places % (2 * size - 2)
    return np.minimum(places, 2 * size - 2 - places)
