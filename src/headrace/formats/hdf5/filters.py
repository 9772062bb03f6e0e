"""The filters of HDF5 datasets: which of them headrace decodes, and which h5py lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from headrace.errors import ConfigError, FormatError
from headrace.formats.arrays.codecs import Blosc, Codec, Fletcher32, Inflate, Unshuffle, Zstd
from headrace.formats.arrays.compressors import LEVELS, codec_versions, shuffles

_CODECS: dict[int, Callable[[], Codec]] = {
    1: Inflate,
    3: Fletcher32,
    32001: Blosc,
    32015: Zstd,
}


def name_of(filter_: tuple[int, int, tuple[int, ...], bytes]) -> str:
    """The name of a filter, as the file says it, or its number."""
    return filter_[3].decode("utf-8", "replace").partition(";")[0] or f"filter {filter_[0]}"


def codecs_of(dataset: h5py.Dataset) -> list[Codec]:
    """The filters, in the order in which they encode.

    Raises:
        ValueError: there is one that we have not.
    """
    plist = dataset.id.get_create_plist()
    codecs: list[Codec] = []
    for number in range(plist.get_nfilters()):
        filter_ = plist.get_filter(number)
        code, _, values, _ = filter_
        if code == 2:
            codecs.append(Unshuffle(values[0] if values else dataset.dtype.itemsize))
        elif code in _CODECS:
            codecs.append(_CODECS[code]())
        else:
            raise ValueError(f"filter {name_of(filter_)}")
    return codecs


def add_filters(plist: h5py.h5p.PropDCID, compression: str, dtype: np.dtype[Any]) -> None:
    """Puts the filters of chunks that `headrace.formats.arrays.compressors` encodes into the
    properties of a dataset to be made.
    """
    if shuffles(dtype):
        plist.set_shuffle()
    if compression == "gzip":
        plist.set_deflate(LEVELS["gzip"])
        return
    plugin_version()
    plist.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (LEVELS["zstd"],))


def plugin_version() -> str:
    """The version of hdf5plugin, whose filters h5py knows from then on: HDF5 writes the names of
    filters that it knows into files.

    Raises:
        ConfigError: it is missing.
    """
    try:
        import hdf5plugin
    except ImportError:
        raise ConfigError(
            "compression='zstd' needs the package hdf5plugin: pip install 'headrace[hdf5]', or "
            "use 'gzip'"
        ) from None
    return str(hdf5plugin.version)


def filter_versions(compression: str) -> dict[str, str]:
    """The versions of what decides the bytes of compressed chunks, and of what a file says of
    them; by name.
    """
    versions = codec_versions(compression)
    if compression == "gzip":
        return versions
    return versions | {"hdf5plugin": plugin_version()}


def check_filters(dataset: h5py.Dataset, where: str) -> None:
    """Looks whether h5py has all filters of a dataset that it is to read.

    Raises:
        FormatError: it lacks one; the message says where that is to be had.
    """
    plist = dataset.id.get_create_plist()
    filters = [plist.get_filter(number) for number in range(plist.get_nfilters())]
    missing = [one for one in filters if not h5py.h5z.filter_avail(one[0])]
    if missing:
        raise FormatError(
            f"{where} is packed with {', '.join(map(name_of, missing))}, which h5py lacks: pip "
            "install hdf5plugin, and import it; or register the filter with HDF5 "
            "(HDF5_PLUGIN_PATH), or repack the file (h5repack)"
        )
