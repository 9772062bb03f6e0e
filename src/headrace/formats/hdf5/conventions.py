"""Packed numbers of netCDF-4 and CF."""

from __future__ import annotations

from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from headrace.formats.arrays.chunks import Chunks, DirectChunks, Grid, Rechunked

# -- CF: https://cfconventions.org, chapters 2.5 and 8.1


class Packing(NamedTuple):
    """How the values of a netCDF variable are stored; xarray's rules decide about dtypes.

    Attributes:
        stored: the dtype before it is unpacked: that of the file, or unsigned where the attribute
            ``_Unsigned`` says so.
        dtype: of the values.
        missing: stored values that stand for none; these become NaN.
        scale, offset: values are ``stored * scale + offset``.
        joins: True if the last axis counts the characters of strings.
    """

    stored: np.dtype[Any]
    dtype: np.dtype[Any]
    missing: tuple[Any, ...] = ()
    scale: Any = None
    offset: Any = None
    joins: bool = False

    def decode(self, raw: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The values of an array, or of a part of it."""
        if self.joins:
            joined: npt.NDArray[Any] = np.ascontiguousarray(raw).view(self.dtype)[..., 0]
            return joined
        if raw.dtype.kind != self.stored.kind:
            raw = raw.view(self.stored)
        values = raw.astype(self.dtype)
        nothing = np.zeros(raw.shape, bool)
        for missing in self.missing:
            nothing |= raw == missing
        if self.scale is not None:
            values *= self.scale
        if self.offset is not None:
            values += self.offset
        if self.missing:
            values[nothing] = np.nan
        return values


def packing_of(dataset: h5py.Dataset) -> Packing | None:
    """How a variable is packed; None: its values are what is stored."""
    dtype: np.dtype[Any] = dataset.dtype
    if dtype.kind == "S" and dtype.itemsize == 1 and dataset.ndim > 1:
        length = dataset.shape[-1]
        is_whole = dataset.chunks is None or dataset.chunks[-1] == length
        if not (length and is_whole):
            return None
        return Packing(dtype, np.dtype(f"S{length}"), joins=True)
    if dtype.kind not in "iuf":
        return None
    attributes = {
        name: _single(dataset.attrs[name])
        for name in ("scale_factor", "add_offset", "_Unsigned")
        if name in dataset.attrs
    }
    stored = dtype
    if dtype.kind in "iu" and isinstance(attributes.get("_Unsigned"), str):
        sign = "u" if attributes["_Unsigned"].lower() == "true" else "i"
        stored = np.dtype(f"{dtype.byteorder}{sign}{dtype.itemsize}")
    missing = list[Any]()
    for name in ("_FillValue", "missing_value"):
        values = dataset.attrs.get(name)
        if values is not None and not isinstance(values, h5py.Empty):
            missing += np.atleast_1d(values).tolist()
    missing = [value for value in dict.fromkeys(missing) if value == value]  # NaN stays NaN
    if stored.kind != dtype.kind:
        missing = [np.array(value).astype(dtype).view(stored)[()].item() for value in missing]
    scale, offset = attributes.get("scale_factor"), attributes.get("add_offset")
    if scale is None and offset is None:
        if not missing and stored == dtype:
            return None
        if not missing:
            return Packing(stored, stored.newbyteorder("="))
        return Packing(stored, _promoted(stored), tuple(missing))
    return Packing(stored, _float_for(stored, scale, offset), tuple(missing), scale, offset)


class UnpackedChunks(Rechunked):
    """Chunks of the values of an array that is packed."""

    def __init__(self, whole: Chunks, packing: Packing) -> None:
        if isinstance(whole, DirectChunks):
            whole = whole.by_row()
        grid = whole.grid
        if packing.joins:
            grid = Grid(grid.shape[:-1], grid.chunks[:-1])
        fill = packing.decode(np.full(whole.grid.shape[-1:], whole.fill, whole.dtype))
        how = f"{whole.how}, decoded to {packing.dtype}"
        super().__init__(whole, grid, packing.dtype, how, fill.flat[0])
        self.decodes = True
        self._packing = packing

    def decode(self, number: int, data: Any) -> npt.NDArray[Any] | None:
        chunk = self.whole.decode(number, data)
        if chunk is None:
            return None
        return self._packing.decode(chunk)


def _single(value: Any) -> Any:
    """An attribute of one value, which netCDF writes as an array; None: of a null dataspace,
    which has no value.
    """
    if isinstance(value, h5py.Empty):
        return None
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(())[()]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value


def _promoted(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that has NaN, and all values of another one."""
    if dtype.kind == "f":
        return dtype.newbyteorder("=")
    return np.dtype("f4" if dtype.itemsize <= 2 else "f8")


def _float_for(dtype: np.dtype[Any], scale: Any, offset: Any) -> np.dtype[Any]:
    """The dtype of unpacked values: that of scale and offset where both have one, which CF asks
    for; else one that loses nothing.
    """
    scale_type = None if scale is None else np.dtype(type(scale))
    offset_type = None if offset is None else np.dtype(type(offset))
    if (
        scale_type is not None
        and scale_type == offset_type
        and scale_type in (np.dtype("f4"), np.dtype("f8"))
    ):
        if dtype.itemsize == 4 and dtype.kind in "iu":
            return np.dtype("f8")
        return scale_type
    if offset_type is not None or scale_type is None or scale_type.kind != "f":
        return np.dtype("f8")
    return scale_type
