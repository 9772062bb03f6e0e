"""Chooses how worker processes are started.

NOTE [ fork and threads ]

A fork copies the locks of all threads, but only the forking thread: a lock that another thread
holds at that moment stays locked in the child for ever. So if other threads run, workers are
started by forkserver, if nothing prevents it: the dataset must pickle fast, and the main script
must be importable, since a process that is not forked imports it again (without ``if __name__ ==
"__main__"`` the script would run once more in each worker).

These threads don't count, since they hold no lock that a worker takes while they are idle: those of
headrace and of the event loops that it drives, of torch's loaders, of CUDA's driver, the pools of
OpenBLAS, OpenMP and Arrow (which have the name of the process), and that of jemalloc, which comes
with pyarrow and handles forks. Forked workers that hang nevertheless are replaced (see
`processes.py`).
"""

from __future__ import annotations

import ast
import functools
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from types import FunctionType
from typing import Any

from headrace.core.views import parts_of
from headrace.errors import ConfigError
from headrace.loader.signals import OF_THE_JOB
from headrace.memory.anonymous import AnonymousMemory, SharedArray

_OURS = (
    "headrace-",
    "fsspecIO",
    "zarr_",
    "asyncio_",
    "QueueFeederThread",
    "cuda",
    "jemalloc_bg_thd",
)
_OF_TORCH = "_pin_memory_loop"
_SHOWN = 3  # names of threads
# of a pickle that each worker is sent
_MOST_SECONDS = 0.1
_MOST_BYTES = 16 << 20
_SERVED = "headrace.loader.served"  # imported by nothing but the fork server
_PRELOADED = ["headrace.datasets.open", "headrace.loader.loader"]
"""What the fork server imports once, for all workers that are forked from it."""
# bytes; the address, with "/pymp-12345678/listener-12345678", may have 103 on macOS, 107 on Linux
_LONGEST_TMPDIR = 71
_PICKLED_AT_START = tuple(
    f"multiprocessing.{name}" for name in ("heap", "queues", "sharedctypes", "synchronize")
)
"""Modules whose objects are pickled only while a process is started."""
_server: Any = forkserver._forkserver
_INSTEAD = "pass multiprocessing_context='fork', or num_workers=0"


def choose_context(given: Any, dataset: Any, parts: list[Any]) -> tuple[Any, str]:
    """The context that workers are started by, and why: the user's, or one that suits the
    dataset and what else travels to a worker.
    """
    if given is not None:
        context = multiprocessing.get_context(given) if isinstance(given, str) else given
        if context.get_start_method() == "forkserver":
            forkserver_context()
        return context, f"{context.get_start_method()}, as given"
    if "fork" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn"), "spawn: this system has no fork"
    if not all(getattr(part, "fork_safe", True) for part in parts_of(dataset)):
        return forkserver_context(), "forkserver: the dataset says fork_safe = False"
    reason = "the dataset is fork-safe"
    if threads := other_threads():
        names = ", ".join(list(dict.fromkeys(threads))[:_SHOWN])
        why_not = obstacle([dataset, *parts])
        if why_not is None:
            reason = f"other threads run ({names}), whose locks a fork would copy"
            return forkserver_context(), f"forkserver: {reason}; the dataset pickles fast"
        reason += f"; other threads run ({names}), but {why_not}"
    return multiprocessing.get_context("fork"), f"fork: {reason}"


def forkserver_context() -> Any:
    """The context of a fork server, which imports headrace once for all workers, beside what the
    user has it import.
    """
    context = multiprocessing.get_context("forkserver")
    _shorten_socket_path()
    # `multiprocessing` starts its tracker beside the server: it must outlive the signals too. It
    # sees to SIGINT and SIGTERM, and hands on what else is blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_JOB)
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    preloaded = _server._preload_modules
    if _SERVED not in preloaded:
        context.set_forkserver_preload([_SERVED, *preloaded, *_PRELOADED])
    return context


def _shorten_socket_path() -> None:
    """Has `multiprocessing` make its folder in /tmp where TMPDIR is too long for the address of
    the server's socket, as Python 3.14 does by itself.
    """
    if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_TMPDIR:
        return
    before = tempfile.tempdir
    tempfile.tempdir = "/tmp"
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = before


def other_threads() -> list[str]:
    """The names of the threads that run beside this one, and are not headrace's; see NOTE [ fork
    and threads ].
    """
    threads = threading.enumerate()
    apart = (threading.current_thread(), threading.main_thread())
    names = [thread.name for thread in threads if thread not in apart]
    tasks = Path("/proc/self/task")
    # Linux: threads that Python does not know, which have given themselves a name
    if tasks.is_dir():
        known = {thread.native_id for thread in threads}
        unnamed = ("", _name_of(tasks / str(os.getpid())))
        native = [_name_of(task) for task in tasks.iterdir() if int(task.name) not in known]
        names += [name for name in native if name not in unnamed]
    return [name for name in names if not name.startswith(_OURS) and _OF_TORCH not in name]


def _name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it has ended
        return ""


def obstacle(parts: list[Any]) -> str | None:
    """Why these parts can only be sent to forked workers, or None."""
    path = _path_of_main()
    known = frozenset[str]() if path is None else _names_in(path)
    if known is None:
        return (
            'the main script has no `if __name__ == "__main__":`, and a worker that is not forked '
            "would run it again"
        )
    if _is_server_inherited():
        return "this process was forked from one that has a fork server"
    trial = _Trial(_MOST_SECONDS, _MOST_BYTES)
    try:
        trial.dump(parts)
    except Exception as error:
        name = type(error).__name__
        return f"the dataset, or what goes with it, can't be pickled for workers ({name}: {error})"
    for name in trial.of_main:
        if name.split(".")[0] not in known:
            return f"{name} is defined in the main module, where no worker can import it"
    return None


def _is_server_inherited() -> bool:
    """True if this process was forked from one whose fork server it can't use."""
    if (pid := _server._forkserver_pid) is None:
        return False
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _path_of_main() -> str | None:
    """The file that `multiprocessing` has a process import that is not forked; None: it imports
    none.
    """
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None and name.split(".")[-1] == "__main__":
        return None
    return getattr(main, "__file__", None)


@functools.cache
def _names_in(path: str) -> frozenset[str] | None:
    """The functions and classes that a script defines when it is imported; None if it has no
    guard, or can't be read.
    """
    try:
        statements = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None
    tests = [statement.test for statement in statements if isinstance(statement, ast.If)]
    words = [node for test in tests for node in ast.walk(test) if isinstance(node, ast.Name)]
    if not any(word.id == "__name__" for word in words):
        return None
    kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    return frozenset(each.name for each in statements if isinstance(each, kinds))


class _Bounded:
    """A file that keeps nothing, with a limit on seconds and bytes."""

    def __init__(self, seconds: float, nbytes: float) -> None:
        self._until = time.perf_counter() + seconds
        self._left = nbytes

    def write(self, data: Any) -> int:
        # of a large array no bytes come, but a buffer without a length
        nbytes = memoryview(data).nbytes
        self._left -= nbytes
        if self._left < 0 or time.perf_counter() > self._until:
            raise pickle.PicklingError(
                f"it takes more than {_MOST_SECONDS:g} s or {_MOST_BYTES >> 20} MiB for each worker"
            )
        return nbytes


class _Trial(pickle.Pickler):
    """Pickles to nowhere, without what workers map, and lists the functions and classes of the
    main module that were met.
    """

    def __init__(self, seconds: float = math.inf, nbytes: float = math.inf) -> None:
        super().__init__(_Bounded(seconds, nbytes), protocol=5)
        self.of_main: list[str] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, SharedArray | AnonymousMemory):
            return object, ()
        if _is_shared(value):
            # without a name: it was removed as the lock was made
            is_nameless = getattr(getattr(value, "_semlock", None), "name", "") is None
            if is_nameless and sys.platform != "win32":
                raise pickle.PicklingError(
                    f"a {type(value).__name__} of multiprocessing was made for forked processes; "
                    "make it by multiprocessing.get_context('spawn')"
                )
            return list, ([part for part in vars(value).values() if _is_shared(part)],)
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            self.of_main.append(value.__qualname__)
        return NotImplemented


def _is_shared(value: Any) -> bool:
    return type(value).__module__ in _PICKLED_AT_START


def check_picklable(context: Any, parts: dict[str, Any]) -> None:
    """Raises a ConfigError, before the first worker starts, for the first part (by name) that
    can't travel to it.
    """
    if context is None or context.get_start_method() == "fork":
        return
    start = context.get_start_method()
    for name, part in parts.items():
        trial = _Trial()
        try:
            trial.dump(part)
        except Exception as error:
            remedy = (
                f"Use functions and classes of a module instead of lambdas and local ones, or "
                f"{_INSTEAD}"
            )
            if not getattr(part, "fork_safe", True):
                remedy = (
                    "Nor may it be forked (fork_safe = False): give it a path instead of an open "
                    "object, or pass num_workers=0"
                )
            raise ConfigError(
                f"the {name} can't be pickled, and workers started by {start} need that: {error}. "
                f"{remedy}"
            ) from error
        if trial.of_main and _path_of_main() is None:
            raise ConfigError(
                f"the {name} needs {trial.of_main[0]}, which is defined in a notebook or an "
                f"interactive session, and workers started by {start} can't import it from there: "
                f"put it in a module (a .py file that you import), or {_INSTEAD}"
            )
