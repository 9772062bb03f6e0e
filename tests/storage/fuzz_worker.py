"""Reads a file by h5py or zarr-python, and by headrace, in a process that may crash, hang or run
out of memory.

Run by `fuzz.py` with the number of a descriptor: a socket, over which cases come and outcomes go.
Each case is answered twice, first for the library, then for headrace, so that the one who asks
knows who crashed. A parent that has imported everything forks the process that does the work, and
forks another when that one ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import hashlib
import os
import resource
import shutil
import signal
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401  # registers its filters
import numpy as np
import psutil
import zarr

from headrace import HDF5Dataset, ZarrDataset
from headrace.errors import HeadraceError
from headrace.storage.hdf5.rows import HDF5Source
from headrace.storage.zarr.rows import ZarrSource
from tests.storage.specimens import HDF5, NAME, ZIP, write

MORE = 1 << 30
"""Bytes of address space that a case may take beyond what the process has."""
_ROWS = 12
_LARGE_ROW = 16 << 20
_PERTURB = -6  # mallopt's number for what fresh memory holds
_DONE = 77  # how a process ends that nobody asks any more
_CASES = 400  # of one process: libraries leak what they could not open

Row = tuple[str, Any]
"""("value", plain terms) or ("error", class and message) or ("escaped", the same of an error
that is none of headrace's).
"""
Outcome = dict[Any, Row]
"""Rows by number; or "open" alone, where it can't be opened; the number of rows is under
"length".
"""


def rows_of(length: int, row_bytes: int) -> list[int]:
    """Those that are compared."""
    if row_bytes > _LARGE_ROW:
        return [0][:length]
    return sorted({*range(min(length, _ROWS)), *([length - 1] if length else [])})


def plain(value: Any) -> Any:
    """A row in terms that can be compared and sent."""
    if isinstance(value, np.generic | np.ndarray):
        array = np.asarray(value)
        if array.dtype.names is not None:
            return [(name, plain(array[name])) for name in array.dtype.names]
        if array.dtype.hasobject:
            return (array.shape, [plain(item) for item in array.reshape(-1).tolist()])
        data = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).tobytes()
        return (
            array.dtype.newbyteorder("=").str,
            array.shape,
            data if len(data) < 4096 else hashlib.sha256(data).hexdigest(),
        )
    return value


def _failure(error: BaseException, kind: str = "error") -> Row:
    return kind, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _by_library(path: Path, kind: str) -> Outcome:
    outcome: Outcome = {}
    with contextlib.ExitStack() as stack:
        try:
            if kind == HDF5:
                array: Any = stack.enter_context(h5py.File(path, "r", locking=False))[NAME]
            else:
                store = zarr.storage.ZipStore(path, mode="r") if kind == ZIP else path
                if kind == ZIP:
                    stack.callback(_close, store)
                array = _zarr_array(store)
            shape = tuple(array.shape)
            length, row_bytes = (
                shape[0],
                int(np.prod(shape[1:], dtype=object)) * array.dtype.itemsize,
            )
        except Exception as error:
            return {"open": _failure(error)}
        outcome["length"], outcome["missed"] = (
            ("value", length),
            ("value", kind == HDF5 and _misses(array)),
        )
        for row in rows_of(length, row_bytes):
            try:
                outcome[row] = ("value", plain(array[row]))
            except Exception as error:
                outcome[row] = _failure(error)
    return outcome


def _misses(dataset: h5py.Dataset) -> bool:
    """Does HDF5 list chunks that it does not find when they are asked for? So it is where their
    keys in its index are damaged.
    """
    listed: list[Any] = []
    if dataset.chunks is not None and not dataset.is_virtual:
        with contextlib.suppress(Exception):
            dataset.id.chunk_iter(listed.append)
    for info in listed:
        try:
            dataset.id.read_direct_chunk(info.chunk_offset)
        except Exception:
            return True
    return False


def _close(store: Any) -> None:
    with contextlib.suppress(Exception):  # it could not even be opened
        store.close()


def _zarr_array(store: Any) -> Any:
    try:
        return zarr.open_array(store, path=NAME, mode="r")
    except Exception:
        return zarr.open(store, mode="r")[NAME]  # which is less strict


def _by_library_twice(path: Path, kind: str) -> Outcome:
    """Rows that h5py does not fill, and which hold what lay in memory, are known by memory that
    held something else.
    """
    libc = ctypes.CDLL(None)
    found = []
    for pattern in (0x11, 0x77)[: 1 + (kind == HDF5)]:
        libc.mallopt(_PERTURB, pattern)
        found.append(_by_library(path, kind))
    libc.mallopt(_PERTURB, 0)
    return {
        key: row if row == found[-1].get(key) else ("unstable", row[1])
        for key, row in found[0].items()
    }


def _by_headrace(path: Path, kind: str, number: int) -> Outcome:
    """Through a source or a dataset, rows alone and in a batch, with and without held chunks: by
    the number of the case.
    """
    try:
        return (
            _by_dataset(path, kind) if number % 4 == 3 else _by_source(path, kind, hold=number % 2)
        )
    except HeadraceError as error:
        return {"open": _failure(error)}
    except Exception as error:
        return {"open": _failure(error, "escaped")}


def _by_source(path: Path, kind: str, hold: int) -> Outcome:
    source: Any = HDF5Source(path, NAME) if kind == HDF5 else ZarrSource(path, NAME)
    try:
        source.hold_chunks(hold << 20)
        outcome: Outcome = {"length": ("value", len(source)), "how": ("value", source.how()[NAME])}
        rows = rows_of(len(source), source._row_bytes)
        for row in rows:
            outcome[row] = _row(lambda row=row: source.read([row])[0])
        together = _row(lambda: source.read(rows), whole=True)
        alone = [outcome[row][1] for row in rows]
        if together[0] == "escaped" or (together[0] == "value" and together[1] != alone):
            kind = "differs" if together[0] == "value" else together[0]
            outcome["batch"] = (kind, f"another one than alone: {str(together[1])[:300]}")
        return outcome
    finally:
        source.close()


def _by_dataset(path: Path, kind: str) -> Outcome:
    with HDF5Dataset(path, NAME) if kind == HDF5 else ZarrDataset(path, NAME) as dataset:
        source = dataset.sample_source
        outcome: Outcome = {"length": ("value", len(dataset)), "how": ("value", source.how()[NAME])}
        for row in rows_of(len(dataset), getattr(source, "_row_bytes", 0)):
            outcome[row] = _row(
                lambda row=row: (
                    source.read([row])[0] if _is_object(source) else _numpy(dataset[row])
                )
            )
        dataset.blocks() if len(dataset) < 1 << 20 else None
    return outcome


def _is_object(source: Any) -> bool:
    return bool(source.holds_objects or source.dtype.names or source.dtype.kind not in "biufc")


def _numpy(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else value


def _row(read: Any, whole: bool = False) -> Row:
    try:
        found = read()
        return "value", [plain(one) for one in found] if whole else plain(found)
    except HeadraceError as error:
        return _failure(error)
    except Exception as error:
        return _failure(error, "escaped")


def _work(pipe: Connection, folder: Path) -> None:
    """Answers cases until there are no more, or enough."""
    address_space = psutil.Process().memory_info().vms + MORE
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    h5py._errors.silence_errors()
    trace = open(folder / f"{os.getpid()}.trace", "w")  # noqa: SIM115  # until the end
    faulthandler.enable(trace, all_threads=False)
    faulthandler.register(signal.SIGUSR1, trace, all_threads=False)
    pipe.send(os.getpid())
    for number in range(_CASES):
        case = pipe.recv()
        if case is None:
            os._exit(_DONE)
        kind, files, seed = case
        for whose in (0, 1):
            # a path of its own: HDF5 shares what is still open
            place = folder / f"{os.getpid()}-{number}-{whose}"
            place.mkdir()
            try:
                path = write(kind, files, place)
                pipe.send(
                    _by_headrace(path, kind, seed) if whose else _by_library_twice(path, kind)
                )
            finally:
                shutil.rmtree(place, ignore_errors=True)
    pipe.send(None)


def main() -> None:
    folder, pipe = Path(sys.argv[2]), Connection(int(sys.argv[1]))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    warnings.simplefilter("ignore")
    while True:
        pid = os.fork()
        if not pid:
            try:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                _work(pipe, folder)
            except (EOFError, BrokenPipeError, KeyboardInterrupt):
                os._exit(_DONE)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _DONE:
            return  # nobody asks any more
        if os.WIFSIGNALED(status):
            pipe.send(f"killed by {signal.Signals(os.WTERMSIG(status)).name}")
        elif status:
            pipe.send(f"exit status {os.WEXITSTATUS(status)}")


if __name__ == "__main__":
    main()
