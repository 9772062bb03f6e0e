"""Fixtures that all tests share, the choice of those that run, and the check that each leaves
nothing behind (law 7).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import psutil
import pytest
from hypothesis import settings

from tests.covering import covering
from tests.data.make import make_photos
from tests.servers.ranges import RangeServer

# The same examples each time, so that a failure is the change's own; `--hypothesis-profile fuzz`
# looks for new ones. No deadline, since on a busy machine everything takes longer.
settings.register_profile("headrace", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, max_examples=2000)
settings.load_profile("headrace")

# Workers started by forkserver then fork from a process that has torch loaded: tenths of a second
# each, instead of seconds.
multiprocessing.set_forkserver_preload(["headrace.testing"])

# --- which tests run ------------------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thins products of parameters, and leaves out what `-m` doesn't choose.

    Without `-m` the quick tests run. What needs a GPU is skipped where there is none.
    """
    _keep(config, items, without=_beyond_pairs(items))
    met: Counter[str] = Counter()
    for item in items:
        if _is_slow(item, met):
            item.add_marker(pytest.mark.slow)
    if not config.option.markexpr:
        marks = ("cuda", "integration", "nightly", "slow")
        left_out = {item for item in items if any(map(item.get_closest_marker, marks))}
        _keep(config, items, without=left_out)
    needs_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if needs_gpu:
        import torch  # here, since most runs never ask

        if not torch.cuda.is_available():
            for item in needs_gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _keep(config: pytest.Config, items: list[pytest.Item], without: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=list(without))
    items[:] = [item for item in items if item not in without]


MOST_COMBINATIONS = 8
"""A product of parameters that has more is thinned to pairs of values; of two, to each value."""


def _beyond_pairs(items: list[pytest.Item]) -> set[pytest.Item]:
    """The items of products that are not needed: each pair of values runs, unless a test is
    marked `product`.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("product") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    beyond: set[pytest.Item] = set()
    for cases in tests.values():
        values = [tuple(item.callspec._idlist) for item in cases]  # type: ignore[attr-defined]
        factors = len(values[0])
        if factors > 1 and len(cases) > MOST_COMBINATIONS:
            chosen = set(covering(values, min(2, factors - 1)))
            beyond |= {item for item, ids in zip(cases, values, strict=True) if ids not in chosen}
    return beyond


def _is_slow(item: pytest.Item, met: Counter[str]) -> bool:
    """True if a test is marked `slow`, or left out by `quick_every`: what is said of a case counts,
    else of its function, class, module.

    By a case's place in its product, so that each worker of xdist says the same; `met` counts those
    of each test.
    """
    for node in reversed(item.listchain()):
        if any(mark.name == "slow" for mark in node.own_markers):
            return True
        for mark in node.own_markers:
            if mark.name == "quick_every":
                test = item.nodeid.partition("[")[0]
                met[test] += 1
                return (met[test] - 1) % int(mark.args[0]) > 0
    return False


def pytest_collection_finish() -> None:
    """Takes what is imported and collected, some million objects, out of the garbage collections of
    the tests: 0.4 s each, of which the look at what a test leaves behind needs two.
    """
    gc.collect()
    gc.freeze()


# --- what they share ------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 24 images, 64 x 48, in three class folders. Shared by all tests: read only."""
    return make_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture
def make_loader() -> Iterator[Callable[..., Any]]:
    """`create_dataloader`, which ends the workers of all its loaders after the test."""
    from headrace import create_dataloader  # here, since many tests never ask

    made: list[Any] = []

    def make(dataset: Any, **options: Any) -> Any:
        made.append(create_dataloader(dataset, **options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


@pytest.fixture
def loader_of(make_loader: Callable[..., Any]) -> Callable[..., Any]:
    """`make_loader` of small batches in this process, without monitoring: a look at memory costs
    more than such an epoch.
    """
    return lambda dataset, **options: make_loader(
        dataset,
        **{"batch_size": 4, "num_workers": 0, "seed": 5, "enable_monitoring": False, **options},
    )


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, here and in programs that are started here.

    A shell that is not interactive has the jobs in its background ignore it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a script of benchmarks/, examples/ or tools/, which import each other by their bare
    names; afterwards they are forgotten, and Ctrl-C is as before.
    """
    before, handler = set(sys.modules), signal.getsignal(signal.SIGINT)
    folders = [Path(__file__).parents[1] / name for name in ("benchmarks", "examples", "tools")]

    def load(name: str) -> Any:
        (folder,) = [one for one in folders if (one / f"{name}.py").exists()]
        monkeypatch.syspath_prepend(folder)
        return importlib.import_module(name)

    yield load
    signal.signal(signal.SIGINT, handler)
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent in folders:
            del sys.modules[name]


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cached stays out of the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def deterministic_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a script in this process that calls `seed_everything(deterministic=True)`: torch is as
    before afterwards.
    """
    import torch  # here, since most runs never ask

    # what it would set itself
    for name, value in (("OMP_WAIT_POLICY", "passive"), ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")):
        monkeypatch.setenv(name, value)
    strict, cudnn = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(strict)
    cudnn.deterministic, cudnn.benchmark = before


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[RangeServer]:
    """A server of the module's fixture `folder`; for `server`."""
    with RangeServer(folder) as server:
        yield server


@pytest.fixture
def server(running: RangeServer) -> RangeServer:
    """The same, fast and without faults, that has counted nothing."""
    running.set(latency=0, bandwidth=0, faults={}, seed=1)
    running.counts()
    return running


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's file system in memory, emptied afterwards."""
    import fsspec

    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


@pytest.fixture(scope="session")
def tiny_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 4 images, 16 x 12, in two class folders. Shared by all tests: read only."""
    folder, classes = tmp_path_factory.mktemp("tiny_photos"), ("circle", "noise")
    return make_photos(folder, classes, per_class=2, size=(16, 12))


# --- what takes long and shows nothing ------------------------------------------------------------


_FSYNC = os.fsync


def _not_synced(fd: int) -> None:
    os.fstat(fd)  # an error, as of a file that is closed


@pytest.fixture(autouse=True, scope="session")
def _nothing_waits_for_the_disk() -> Iterator[None]:
    """Since no test cuts the power: the quick tests would ask 9,000 times."""
    with mock.patch("os.fsync", _not_synced):
        yield


@pytest.fixture
def synced() -> Iterator[None]:
    """The real fsync, for a test that counts on the pace of writers."""
    with mock.patch("os.fsync", _FSYNC):
        yield


def _resident(pid: int) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


@pytest.fixture(autouse=True, scope="module")
def _loaders_walk_no_pages(request: pytest.FixtureRequest) -> Iterator[None]:
    """But in the tests that measure memory: to share out the pages of this process takes a
    hundredth of a second, twice a loader.
    """
    if "monitor" in request.path.parts or request.path.name == "test_benchmarks.py":
        yield
        return
    with mock.patch("headrace.monitor.stats.pss_of", _resident):
        yield


# --- what each leaves behind ----------------------------------------------------------------------

_GRACE = 3.0  # seconds for processes and threads on their way out
_POLL = 0.02
_SHM = Path("/dev/shm")
_FDS = Path("/proc/self/fd")
# Pools that zarr's and fsspec's event loops start once and keep for the life of the process,
# whoever uses them.
_KEPT_THREADS = ("zarr_pool", "asyncio_")
_failed = pytest.StashKey[bool]()


class _Held(NamedTuple):
    """What this process holds that outlives a careless test."""

    processes: set[psutil.Process]
    threads: set[threading.Thread]
    shm: set[str]
    memfds: list[str]

    def beyond(self, before: _Held) -> list[str]:
        """Says in words what has come since `before`."""
        left = [f"process {_describe(process)}" for process in self.processes - before.processes]
        left += [f"thread {thread.name}" for thread in self.threads - before.threads]
        left += [
            f"{_SHM / name}" for name in self.shm - before.shm if not mapped_elsewhere(_SHM / name)
        ]
        if len(self.memfds) > len(before.memfds):  # numbers are reused: count, don't compare
            left.append(
                f"{len(self.memfds) - len(before.memfds)} more memory files, now "
                f"{sorted(self.memfds)}"
            )
        return left


# The semaphores of this process and its children have names of their own: multiprocessing's have
# one for a moment, which stays if their process is killed just then, as those of other tests are.
_SEMAPHORES = f"/headrace-{os.getpid()}"
multiprocessing.current_process()._config["semprefix"] = _SEMAPHORES


_KINDS = ("torch_", "psm_", "headrace", f"sem.{_SEMAPHORES[1:]}-")
"""How names begin that torch, Python and headrace make; others are of other programs."""


def names_in_shm() -> set[str]:
    """Names in the system's shared memory that tests may have left."""
    if not _SHM.is_dir():
        return set()
    return {name for name in os.listdir(_SHM) if name.startswith(_KINDS)}


def _held() -> _Held:
    return _Held(
        processes=living_children(),
        threads={
            t
            for t in threading.enumerate()
            if not t.daemon and not t.name.startswith(_KEPT_THREADS)
        },
        shm=names_in_shm(),
        memfds=_memfds(),
    )


def living_children() -> set[psutil.Process]:
    """Of this process. (`multiprocessing.active_children` never forgets one that somebody else
    has waited for.)
    """
    return {process for process in _descendants(psutil.Process()) if _counts(process)}


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    """Children, and theirs; where the kernel lists them in a hundredth of the time that psutil
    takes, which looks at all processes.
    """
    tasks = f"/proc/{process.pid}/task"
    if not os.path.exists(f"{tasks}/{process.pid}/children"):
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.children(recursive=True)
        return []
    pids: set[int] = set()
    for _ in range(2):  # a list leaves one out when another one exits just then
        with contextlib.suppress(OSError):  # the process has ended
            for thread in os.listdir(tasks):
                with (
                    contextlib.suppress(OSError),
                    open(f"{tasks}/{thread}/children", "rb", buffering=0) as listed,
                ):
                    pids.update(map(int, listed.read().split()))
    found: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found + [one for child in found for one in _descendants(child)]


def _counts(process: psutil.Process) -> bool:
    """False for the two helpers that multiprocessing keeps, and for what has exited.

    The helpers are told by their ids: a worker of the forkserver is a fork of it, and has its
    command line.
    """
    helpers = (
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(forkserver._forkserver, "_forkserver_pid", None),
    )
    try:
        return process.pid not in helpers and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _memfds() -> list[str]:
    links = []
    for fd in _FDS.iterdir() if _FDS.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor is in the list
            links.append(os.readlink(fd))
    return [link for link in links if "memfd:headrace" in link]


def mapped_elsewhere(path: Path) -> bool:
    """True if a process that is none of ours has the file: /dev/shm is the whole machine's.

    Told by its inode: the one who makes a semaphore maps it under another name, before it gets its
    own.
    """
    try:
        inode = f" {path.stat().st_ino} ".encode()
    except FileNotFoundError:
        return True  # it is gone by now
    ours = {os.getpid(), *(process.pid for process in _descendants(psutil.Process()))}
    for pid in set(psutil.pids()) - ours:
        with contextlib.suppress(OSError):  # gone, or another user's
            lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
            if any(inode in line and os.fsencode(_SHM) in line for line in lines):
                return True
    return False


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} ({process.status()}): {' '.join(process.cmdline())}"
    return str(process.pid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    module = item.getparent(pytest.Module)
    if module is not None and (report.failed or hasattr(report, "wasxfail")):
        module.stash[_failed] = True
    return report


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a module whose tests leave a process, a thread, a name in shared memory or a memory
    file.

    Set up before the other fixtures of the module, so it looks after all of them are gone. A module
    with a failed test is not looked at: the traceback keeps its objects alive.
    """
    before = _held()
    yield
    if request.node.stash.get(_failed, False) or not _held().beyond(before):
        return
    for item in request.session.items:  # pytest holds the fixtures' values of the last test
        if getattr(item, "funcargs", None):
            item.funcargs.clear()  # type: ignore[attr-defined]
    gc.collect()
    deadline = time.monotonic() + _GRACE
    while left := _held().beyond(before):
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + "; ".join(left), pytrace=False)
        multiprocessing.active_children()  # reaps those that have exited
        time.sleep(_POLL)
        gc.collect()


class _FallbackCounter(logging.Handler):
    """Counts fast ways of making batches that fail, in forked workers too."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._shared = mmap.mmap(-1, 8)

    @property
    def count(self) -> int:
        return int.from_bytes(self._shared[:8], "little")

    def emit(self, record: logging.LogRecord) -> None:
        self._shared[:8] = (self.count + 1).to_bytes(8, "little")


_FALLBACKS = _FallbackCounter()
_WAYS = logging.getLogger("headrace.core.batcher")
_WAYS.addHandler(_FALLBACKS)
_WAYS.setLevel(logging.DEBUG)
_WAYS.propagate = False


@pytest.fixture(autouse=True)
def _fast_ways_work(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test in which a fast way of making batches fails, unless it is marked
    `falls_back`.
    """
    before = _FALLBACKS.count
    yield
    if _FALLBACKS.count > before and request.node.get_closest_marker("falls_back") is None:
        pytest.fail(f"{_FALLBACKS.count - before} batches fell back to a slower way", pytrace=False)
