"""Damaged files give an error of headrace's own, or the rows that zarr-python gives. (h5py may give
what lay in memory for damaged chunks, so it is no judge.)
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import zarr
from hypothesis import HealthCheck, given, settings, strategies as st

from headrace import HDF5Dataset, ZarrDataset
from headrace.errors import HeadraceError
from tests.formats.specimens import (
    FOLDER,
    HDF5,
    NAME,
    ZIP,
    Files,
    Specimen,
    source_of,
    specimens,
    write as write_files,
)

# -- damage


class Mutation(NamedTuple):
    """One damage: `file` and `at` say where, `what` with which value, all modulo what there is."""

    name: str
    file: int
    at: int
    what: int


_JSON_VALUES = json.loads(
    """[0, 1, 2, 3, 7, -1, 2147483647, 1099511627776, 4611686018427387904, 9223372036854775808,
    1e400, 0.5, 3.0, NaN, null, true, "", "x", "/", "../", "\\u0000", "NaN", "0x7fc00000", "AAAA",
    [], {}, [0], [1, 2], [[]], {"name": "x"}, "<i4", ">i4", "<f4", "|u1", "|O", "<M8[s]", "<U2",
    "int32", "float32", "uint8", "string", "C", "F", "start", "end", "little", "big", "zlib",
    "gzip", "zstd", "blosc", "crc32c", "bytes", "v2", "array", "group", [7, 3], [3, 2], [1, 1],
    [4611686018427387904, 3], [7, 1099511627776], [0, 3], [7], [7, 3, 1], [7, -3], [3.0, 2],
    {"name": "bytes"}, {"id": "zlib", "level": 1}, {"id": "shuffle", "elementsize": 0}]"""
)
_INTEGERS = (0, 1, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def _damaged_bytes(data: bytes, mutation: Mutation) -> bytes:
    name, _, at, what = mutation
    if name == "append":
        return data + random.Random(what).randbytes(1 + at % 40)
    at %= max(1, len(data))
    if name == "cut" or not data:
        return data[:at]
    new = bytes(1 + what % 200)
    if name == "flip":
        new = bytes([data[at] ^ (1 << what % 8)])
    elif name == "overwrite":
        new = bytes([(0, 255, what >> 8 & 255)[what % 3]])
    elif name == "integer":  # an aligned one becomes an extreme one
        width, extremes = (4, 8)[what & 1], (*_INTEGERS, len(data), len(data) - 1, len(data) + 1)
        at = at // width * width
        new = (extremes[(what >> 1) % len(extremes)] % (1 << 8 * width)).to_bytes(width, "little")
    elif name == "copy":
        new = data[what % len(data) :][: 1 + what % 64]
    return (data[:at] + new + data[at + len(new) :])[: len(data)]


def _edited(data: bytes, mutation: Mutation) -> bytes:
    """Another value somewhere in the metadata; or a key that is deleted, or a member that comes
    twice.
    """
    try:
        metadata = json.loads(data)
        holders = _places(metadata)
        holder, key = holders[mutation.at % len(holders)]
    except (ValueError, ZeroDivisionError, RecursionError):
        return data
    action = mutation.what % 8
    if action == 0 and isinstance(holder, dict):
        del holder[key]
    elif action == 1 and isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[key] = _JSON_VALUES[(mutation.what >> 3) % len(_JSON_VALUES)]
    return json.dumps(metadata).encode()


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Each container in a tree, with each of its keys."""
    keys: Any = ()
    if isinstance(value, dict):
        keys = [key for key in value if key != "attributes"]
    elif isinstance(value, list):
        keys = range(len(value))
    found = []
    for key in keys:
        found += [(value, key), *_places(value[key])]
    return found


IN_FOLDERS = ("delete", "replace", "empty", "edit")
NAMES = ("flip", "overwrite", "integer", "cut", "append", "copy", "zero", *IN_FOLDERS)


def damaged(kind: str, files: Files, mutations: list[Mutation]) -> Files:
    """The files after some mutations."""
    for mutation in mutations:
        names = sorted(files)
        if mutation.name in IN_FOLDERS:
            metadata = ("zarr.json", ".zarray", ".zgroup") if kind == FOLDER else ()
            is_edit = mutation.name == "edit"
            names = [name for name in names if metadata and name.endswith(metadata) == is_edit]
        if not names:
            continue
        name = names[mutation.file % len(names)]
        files = dict(files)
        if mutation.name == "delete":
            del files[name]
        elif mutation.name == "replace":
            files[name] = files[names[mutation.at % len(names)]]
        elif mutation.name == "empty":
            files[name] = b""
        elif mutation.name == "edit":
            files[name] = _edited(files[name], mutation)
        else:
            files[name] = _damaged_bytes(files[name], mutation)
    return files


# -- reading


def _plain(value: Any) -> Any:
    """A row in terms that can be compared."""
    if isinstance(value, np.ndarray) and value.dtype.names is None and not value.dtype.hasobject:
        native = value.astype(value.dtype.newbyteorder("="))
        return (native.dtype.str, native.shape, native.tobytes())
    return repr(value)


def _tried(read: Callable[[], Any], allowed: type[Exception]) -> tuple[bool, Any]:
    """True and what it gives, or False and an error that is allowed."""
    try:
        return True, read()
    except allowed as error:
        return False, error


def _by_zarr(kind: str, path: Path) -> Any:
    store: Any = zarr.storage.ZipStore(path, mode="r") if kind == ZIP else path
    try:
        return zarr.open_array(store, path=NAME, mode="r")
    except Exception:
        return zarr.open(store, mode="r")[NAME]  # which is less strict


def _by_headrace(kind: str, path: Path, as_dataset: bool) -> Any:
    if not as_dataset:
        return source_of(kind, path)
    dataset: Any = (HDF5Dataset if kind == HDF5 else ZarrDataset)(path, NAME)
    if len(dataset) < 1 << 20:
        dataset.blocks()
    return dataset.sample_source


def check(kind: str, path: Path, way: int, several: bool) -> None:
    """Fails where headrace breaks the law: through a dataset or a source, with and without held
    chunks. Of `several` damages zarr-python may mind one that headrace does not read.
    """
    is_open, source = _tried(lambda: _by_headrace(kind, path, way == 3), HeadraceError)
    if not is_open:
        return
    source.hold_chunks(way % 2 << 20)
    rows = [0][: len(source)]
    if getattr(source, "_row_bytes", 0) <= 16 << 20:
        rows = sorted({*range(min(len(source), 12)), *([len(source) - 1] if len(source) else [])})
    alone = []
    for row in rows:
        alone.append(_tried(lambda row=row: _plain(source.read([row])[0]), HeadraceError))
    is_read, together = _tried(lambda: list(map(_plain, source.read(rows))), HeadraceError)
    if is_read and not source.describe().ways[NAME].startswith("h5py"):
        assert together == [found for _, found in alone], "a batch differs from its rows"
    if kind == HDF5:
        return
    is_open, array = _tried(lambda: _by_zarr(kind, path), Exception)
    assert is_open or several, array
    if is_open:
        assert len(source) == array.shape[0]
        for row, (is_value, found) in zip(rows, alone, strict=True):
            knows, expected = _tried(lambda row=row: _plain(np.asarray(array[row])), Exception)
            assert not is_value or found == expected or (several and not knows), row


def checked_in_a_child(*arguments: Any) -> str:
    """What fails in a process of its own, which may crash, hang or run out of memory."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            signal.alarm(60)
            address_space = psutil.Process().memory_info().vms + (1 << 30)
            resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            warnings.simplefilter("ignore")
            try:
                check(*arguments)
            except BaseException as error:
                os.write(theirs, f"{type(error).__name__}: {error}".encode()[:1000])
            os._exit(0)
        os._exit(1)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        said = pipe.read().decode()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # HDF5 itself crashes over some files
    is_of_hdf5 = arguments[0] == HDF5 and ended < 0 and ended != -signal.SIGALRM
    return said if not ended or is_of_hdf5 else f"{said} ended with {ended}"


ANY = st.integers(0, 2**32 - 1)
MUTATIONS = st.lists(st.builds(Mutation, st.sampled_from(NAMES), ANY, ANY, ANY), max_size=4)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    "examples",
    [pytest.param(200, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.nightly)],
)
def test_damaged_files(examples: int) -> None:
    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from([*specimens().values()]), MUTATIONS, st.integers(0, 3))
    def check_one(specimen: Specimen, mutations: list[Mutation], way: int) -> None:
        files = damaged(specimen.kind, specimen.files, mutations)
        with tempfile.TemporaryDirectory() as folder:
            path = write_files(specimen.kind, files, Path(folder))
            said = checked_in_a_child(specimen.kind, path, way, len(mutations) > 1)
        assert not said, specimen.name

    check_one()
