"""Damages files, and compares what headrace makes of them with h5py and zarr-python: the same, or
an error of its own.

Both read in a process that may crash, hang or run out of memory.
"""

from __future__ import annotations

import contextlib
import ctypes
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

import h5py
import numpy as np
import psutil
import zarr

from headrace import HDF5Dataset, ZarrDataset
from headrace.errors import HeadraceError
from tests.storage.specimens import FOLDER, HDF5, NAME, ZIP, Files, Specimen, source_of, write

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


# -- reading, in a process of its own

Row = tuple[str, Any]
"""("value", plain terms), ("error", class and message), or ("escaped", the same of an error that
is none of headrace's).
"""
Outcome = dict[Any, Row]
"""Rows by number, and their number under "length"; or "open" alone, where it can't be opened."""
MORE = 1 << 30  # bytes of address space that a case may take beyond what the process has
_PERTURB = -6  # mallopt's number for what fresh memory holds


def _rows_of(length: int, row_bytes: int) -> list[int]:
    """Those that are compared."""
    if row_bytes > 16 << 20:
        return [0][:length]
    return sorted({*range(min(length, 12)), *([length - 1] if length else [])})


def _plain(value: Any) -> Any:
    """A row in terms that can be compared and sent."""
    if not isinstance(value, np.generic | np.ndarray):
        return value.numpy() if hasattr(value, "numpy") else value
    array = np.asarray(value)
    if array.dtype.names is not None:
        return [(name, _plain(array[name])) for name in array.dtype.names]
    if array.dtype.hasobject:
        return (array.shape, [_plain(item) for item in array.reshape(-1).tolist()])
    native = array.astype(array.dtype.newbyteorder("="))
    return (native.dtype.str, native.shape, native.tobytes())


def _row(read: Callable[[], Any], ours: bool) -> Row:
    try:
        return "value", read()
    except Exception as error:
        kind = "escaped" if ours and not isinstance(error, HeadraceError) else "error"
        return kind, f"{type(error).__name__}: {error}"[:300]


def _library_array(path: Path, kind: str, stack: contextlib.ExitStack) -> Any:
    if kind == HDF5:
        return stack.enter_context(h5py.File(path, "r", locking=False))[NAME]
    store: Any = path
    if kind == ZIP:
        store = stack.enter_context(zarr.storage.ZipStore(path, mode="r"))
    try:
        return zarr.open_array(store, path=NAME, mode="r")
    except Exception:
        return zarr.open(store, mode="r")[NAME]  # which is less strict


def _by_library(path: Path, kind: str) -> Outcome:
    outcome: Outcome = {}
    with contextlib.suppress(Exception), contextlib.ExitStack() as stack:
        opened = _row(lambda: _library_array(path, kind, stack), ours=False)
        if opened[0] == "error":
            return {"open": opened}
        array = opened[1]
        row_bytes = int(np.prod(array.shape[1:], dtype=object)) * array.dtype.itemsize
        outcome["length"] = ("value", array.shape[0])
        outcome["missed"] = ("value", kind == HDF5 and _misses(array))
        for row in _rows_of(array.shape[0], row_bytes):
            outcome[row] = _row(lambda row=row: _plain(array[row]), ours=False)
    return outcome or {"open": ("error", "it has no rows")}


def _misses(dataset: h5py.Dataset) -> bool:
    """True if HDF5 lists chunks that it does not find when they are asked for: their keys in its
    index are damaged.
    """
    listed: list[Any] = []
    if dataset.chunks is not None and not dataset.is_virtual:
        with contextlib.suppress(Exception):
            dataset.id.chunk_iter(listed.append)
    try:
        for info in listed:
            dataset.id.read_direct_chunk(info.chunk_offset)
    except Exception:
        return True
    return False


def _by_library_twice(path: Path, kind: str, way: int) -> Outcome:
    """Rows that h5py does not fill, and which hold what lay in memory, are known by memory that
    held something else.
    """
    libc, found = ctypes.CDLL(None), []
    for pattern in (0x11, 0x77):
        libc.mallopt(_PERTURB, pattern)
        found.append(_by_library(path, kind))
    libc.mallopt(_PERTURB, 0)
    for key, row in found[1].items():
        if found[0].get(key) != row:
            found[1][key] = ("unstable", row[1])
    return found[1]


def _by_headrace(path: Path, kind: str, way: int) -> Outcome:
    """Through a dataset or a source, with and without held chunks."""
    with contextlib.ExitStack() as stack:
        opened = _row(lambda: _opened(path, kind, way == 3, stack), ours=True)
        if opened[0] != "value":
            return {"open": opened}
        source, outcome = opened[1], dict[Any, Row]()
        source.hold_chunks(way % 2 << 20)
        outcome["length"] = ("value", len(source))
        outcome["how"] = ("value", source.how()[NAME])
        rows = _rows_of(len(source), getattr(source, "_row_bytes", 0))
        for row in rows:
            outcome[row] = _row(lambda row=row: _plain(source.read([row])[0]), ours=True)
        together = _row(lambda: [_plain(row) for row in source.read(rows)], ours=True)
        if together[0] == "value" and together[1] != [outcome[row][1] for row in rows]:
            together = ("differs", together[1])
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


def _work(pipe: Any, folder: str, trace: Any) -> None:
    """Answers cases until there are no more, first for the library and then for headrace."""
    address_space = psutil.Process().memory_info().vms + MORE
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
    warnings.simplefilter("ignore")
    faulthandler.enable(trace, all_threads=False)
    with contextlib.suppress(EOFError):
        while True:
            kind, files, way = pipe.recv()
            for read, patience in ((_by_library_twice, 10), (_by_headrace, 60)):
                # a path of its own: HDF5 shares what is still open
                place = Path(tempfile.mkdtemp(dir=folder))
                faulthandler.dump_traceback_later(patience, exit=True, file=trace)
                pipe.send(read(write(kind, files, place), kind, way))
                faulthandler.cancel_dump_traceback_later()


class Asker:
    """Asks a worker process about files; starts another where one has crashed or hangs. A
    context manager.
    """

    def __enter__(self) -> Asker:
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-fuzz-")
        self._process: Any = None
        self._original: dict[str, Outcome] = {}
        return self

    def __exit__(self, *_: Any) -> None:
        self._end()
        self._folder.cleanup()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._trace, self._left = tempfile.TemporaryFile("w+"), 400  # noqa: SIM115  # libraries leak
        arguments = (theirs, self._folder.name, self._trace)
        self._process = context.Process(target=_forked, args=(self._pipe, *arguments))
        self._process.start()
        theirs.close()

    def _end(self) -> str:
        """Where the process was that ended, the innermost call first."""
        if self._process is None:
            return ""
        self._pipe.close()
        self._process.join()
        self._process = None
        with self._trace as trace:
            trace.seek(0)
            return " < ".join(line.strip() for line in trace if line.startswith("  File"))[:900]

    def ask(self, kind: str, files: Files, way: int) -> list[Outcome | str]:
        """What the library makes of the files and what headrace does; or, at last, where the
        process ended that was to tell.
        """
        if self._process is None or self._left == 0:
            self._end()
            self._start()
        self._left -= 1
        self._pipe.send((kind, files, way))
        found: list[Outcome | str] = []
        try:
            for _ in range(2):
                found.append(self._pipe.recv())
        except EOFError:
            found.append(self._end())
        return found

    def original(self, specimen: Specimen) -> Outcome:
        """What the library makes of the undamaged file, which headrace must make of it too."""
        if specimen.name not in self._original:
            for way in range(4):
                library, ours = self.ask(specimen.kind, specimen.files, way)
                assert isinstance(library, dict) and isinstance(ours, dict)
                rows = {key: row for key, row in ours.items() if key not in ABOUT}
                assert rows == {key: library[key] for key in library if key not in ABOUT}
                assert library["length"] == ours["length"] and ours["batch"][0] == "value"
            self._original[specimen.name] = library
        return self._original[specimen.name]

    def defect(self, specimen: Specimen, mutations: list[Mutation], way: int) -> str:
        """How headrace breaks the law with a damaged file; empty if it doesn't."""
        original = self.original(specimen)
        files = damaged(specimen.kind, specimen.files, mutations)
        library, *rest = self.ask(specimen.kind, files, way)
        if isinstance(library, str):
            return ""  # it crashed or hung alone
        (ours,) = rest
        if isinstance(ours, str):
            calls = " < ".join(ours.split(" < ")[:2])
            is_library = f"{os.sep}h5py{os.sep}" in calls or f"{os.sep}zarr{os.sep}" in calls
            return "" if is_library else f"headrace crashed or hung: {ours}"
        return judged(library, ours, original, len(mutations) > 1)


def _forked(other_end: Any, *arguments: Any) -> None:
    other_end.close()
    _work(*arguments)


# -- the law

ABOUT = ("length", "how", "missed", "batch")  # what an outcome holds beside rows


def judged(library: Outcome, ours: Outcome, original: Outcome, several: bool = False) -> str:
    """How headrace breaks the law; empty if it doesn't. Of `several` damages the library may mind
    one that headrace does not read.
    """
    by_h5py = str(ours.get("how", ("", ""))[1]).startswith("h5py")
    for key, (kind, what) in ours.items():
        if kind == "escaped":
            return f"{key}: an error that is not headrace's: {what}"
        if kind == "differs" and not by_h5py:
            return f"a batch differs from its rows: {what}"
    if "open" in ours:
        return ""
    if "open" not in library and ours["length"] != library["length"]:
        return f"another length: {ours['length']}, and the library has {library['length']}"
    for key, row in ours.items():
        theirs = library.get("open") or library.get(key, ("error", "no such row"))
        is_the_same = row in (theirs, original.get(key))
        if key in ABOUT or row[0] == "error" or is_the_same or theirs[0] == "unstable":
            continue
        if by_h5py and theirs[0] == "value":
            continue  # what lay in memory, both times
        if theirs[0] == "error" and not several:
            return f"row {key} is {row[1]!r:.300}, which the library refuses: {theirs[1]}"
        if theirs[0] == "value" and not library["missed"][1]:
            return f"row {key} is {row[1]!r:.300}, and {theirs[1]!r:.300} in the library"
    return ""
