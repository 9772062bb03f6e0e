"""Damages files, and looks at what headrace makes of them: an error of its own, or the rows that
zarr-python gives. (h5py may give what lay in memory for damaged chunks, so it is no judge.)
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import resource
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import zarr

from headrace import HDF5Dataset, ZarrDataset
from headrace.errors import HeadraceError
from tests.storage.specimens import FOLDER, HDF5, NAME, ZIP, Files, source_of, write

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


def _put(data: bytes, at: int, new: bytes) -> bytes:
    """New bytes over old ones; the length stays."""
    return (data[:at] + new + data[at + len(new) :])[: len(data)]


def _damaged_bytes(data: bytes, mutation: Mutation) -> bytes:
    name, _, at, what = mutation
    at %= max(1, len(data))
    if name == "flip" and data:
        return _put(data, at, bytes([data[at] ^ (1 << what % 8)]))
    if name == "overwrite":
        return _put(data, at, bytes([(0, 255, what >> 8 & 255)[what % 3]]))
    if name == "integer":  # an aligned one becomes an extreme one
        width, extremes = (4, 8)[what & 1], (*_INTEGERS, len(data), len(data) - 1, len(data) + 1)
        new = extremes[(what >> 1) % len(extremes)] % (1 << 8 * width)
        return _put(data, at // width * width, new.to_bytes(width, "little"))
    if name == "cut":
        return data[:at]
    if name == "append":
        return data + random.Random(what).randbytes(1 + at % 40)
    if name == "copy":
        return _put(data, at, data[what % max(1, len(data)) :][: 1 + what % 64])
    return _put(data, at, bytes(1 + what % 200))


def _is_metadata(name: str) -> bool:
    return name.endswith(("zarr.json", ".zarray", ".zgroup"))


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
        in_folder = mutation.name in IN_FOLDERS
        names = sorted(files)
        if in_folder:
            names = [name for name in names if _is_metadata(name) == (mutation.name == "edit")]
        if not names or (in_folder and kind != FOLDER):
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


# -- reading, in a process of its own, which may crash, hang or run out of memory

Row = tuple[str, Any]
"""("value", plain terms), ("error", class and message), or ("escaped", the same of an error that
is none of headrace's).
"""
Outcome = dict[Any, Row]
"""Rows by number, and their number under "length"; or "open" alone, where it can't be opened."""
MORE = 1 << 30  # bytes of address space that a case may take beyond what the process has
PATIENCE = 60  # seconds


def _rows_of(length: int, row_bytes: int) -> list[int]:
    """Those that are compared."""
    if row_bytes > 16 << 20:
        return [0][:length]
    return sorted({*range(min(length, 12)), *([length - 1] if length else [])})


def _plain(value: Any) -> Any:
    """A row in terms that can be compared and sent."""
    if isinstance(value, np.ndarray) and value.dtype.names is None and not value.dtype.hasobject:
        native = value.astype(value.dtype.newbyteorder("="))
        return (native.dtype.str, native.shape, native.tobytes())
    return repr(value)


def _row(read: Callable[[], Any], ours: bool) -> Row:
    try:
        return "value", read()
    except Exception as error:
        kind = "escaped" if ours and not isinstance(error, HeadraceError) else "error"
        return kind, f"{type(error).__name__}: {error}"[:300]


def _by_zarr(path: Path, kind: str) -> Outcome:
    def opened() -> Any:
        store: Any = zarr.storage.ZipStore(path, mode="r") if kind == ZIP else path
        try:
            return zarr.open_array(store, path=NAME, mode="r")
        except Exception:
            return zarr.open(store, mode="r")[NAME]  # which is less strict

    def size() -> tuple[int, int]:
        return array.shape[0], int(np.prod(array.shape[1:], dtype=object)) * array.dtype.itemsize

    kind, array = _row(opened, ours=False)
    if kind == "value":
        kind, found = _row(size, ours=False)
    if kind == "error":
        return {"open": (kind, array)}
    outcome: Outcome = {"length": ("value", found[0])}
    for row in _rows_of(*found):
        outcome[row] = _row(lambda row=row: _plain(np.asarray(array[row])), ours=False)
    return outcome


def _by_headrace(path: Path, kind: str, way: int) -> Outcome:
    """Through a dataset or a source, with and without held chunks."""
    with contextlib.ExitStack() as stack:
        found, source = _row(lambda: _opened(path, kind, way == 3, stack), ours=True)
        if found != "value":
            return {"open": (found, source)}
        source.hold_chunks(way % 2 << 20)
        outcome: Outcome = {"length": ("value", len(source))}
        rows = _rows_of(len(source), getattr(source, "_row_bytes", 0))
        for row in rows:
            outcome[row] = _row(lambda row=row: _plain(source.read([row])[0]), ours=True)
        together = _row(lambda: [_plain(row) for row in source.read(rows)], ours=True)
        is_direct = not source.how()[NAME].startswith("h5py")
        alone = [outcome[row][1] for row in rows]
        if is_direct and together[0] == "value" and together[1] != alone:
            together = ("escaped", "a batch differs from its rows")
        outcome["batch"] = together
        return outcome


def _opened(path: Path, kind: str, as_dataset: bool, stack: contextlib.ExitStack) -> Any:
    if not as_dataset:
        return stack.enter_context(contextlib.closing(source_of(kind, path)))
    cls: Any = HDF5Dataset if kind == HDF5 else ZarrDataset
    dataset = stack.enter_context(cls(path, NAME))
    if len(dataset) < 1 << 20:
        dataset.blocks()
    return dataset.sample_source


def _work(other_end: Any, pipe: Any, folder: str, trace: Any) -> None:
    """Answers cases until there are no more."""
    other_end.close()
    address_space = psutil.Process().memory_info().vms + MORE
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
    warnings.simplefilter("ignore")
    faulthandler.enable(trace, all_threads=False)
    with contextlib.suppress(EOFError):
        while True:
            kind, files, way = pipe.recv()
            # a path of its own: HDF5 shares what is still open
            path = write(kind, files, Path(tempfile.mkdtemp(dir=folder)))
            faulthandler.dump_traceback_later(PATIENCE, exit=True, file=trace)
            theirs = {} if kind == HDF5 else _by_zarr(path, kind)
            pipe.send((theirs, _by_headrace(path, kind, way)))
            faulthandler.cancel_dump_traceback_later()


class Asker:
    """Asks a worker process about files; starts another where one has crashed or hangs. A
    context manager.
    """

    def __enter__(self) -> Asker:
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-fuzz-")
        self._process: Any = None
        return self

    def __exit__(self, *_: Any) -> None:
        self._end()
        self._folder.cleanup()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._trace, self._left = tempfile.TemporaryFile("w+"), 400  # noqa: SIM115  # they leak
        arguments = (self._pipe, theirs, self._folder.name, self._trace)
        self._process = context.Process(target=_work, args=arguments)
        self._process.start()
        theirs.close()

    def _end(self) -> str:
        """Where the process was that ended: the two innermost calls."""
        if self._process is None:
            return ""
        self._pipe.close()
        self._process.join()
        self._process = None
        with self._trace as trace:
            trace.seek(0)
            calls = trace.read().rpartition("(most recent call first)")[2]  # of the main thread
        return "".join(calls.splitlines(keepends=True)[:3])

    def defect(self, kind: str, files: Files, way: int, several: bool) -> str:
        """How headrace breaks the law with these files; empty if it doesn't. Of `several` damages
        zarr-python may mind one that headrace does not read.
        """
        if self._process is None or self._left == 0:
            self._end()
            self._start()
        self._left -= 1
        self._pipe.send((kind, files, way))
        try:
            theirs, ours = self._pipe.recv()
        except EOFError:
            calls = self._end()
            is_library = f"{os.sep}h5py{os.sep}" in calls or f"{os.sep}zarr{os.sep}" in calls
            return "" if is_library else f"headrace crashed or hung:\n{calls}"
        return judged(theirs, ours, several)


def judged(theirs: Outcome, ours: Outcome, several: bool) -> str:
    """How headrace breaks the law; empty if it doesn't."""
    for key, (kind, what) in ours.items():
        if kind == "escaped":
            return f"{key}: {what}"
    for key, row in ours.items() if theirs else ():
        expected = theirs.get("open") or theirs.get(key, ("error", "no such row"))
        if key == "batch" or row[0] == "error" or row == expected:
            continue
        if expected[0] == "error" and several:
            continue
        return f"{key} is {row[1]!r:.300}, and {expected[1]!r:.300} by zarr-python"
    return ""
