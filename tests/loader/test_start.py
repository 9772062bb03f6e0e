"""How workers are started, and why."""

import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from headrace.loader import start
from headrace.loader.start import choose_context, other_threads
from headrace.testing.contract import unusual_defaults
from tests.testing.test_contract import SquareDataset


@pytest.fixture
def another_thread() -> Iterator[str]:
    """A thread of the user's."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="of-the-user")
    thread.start()
    yield thread.name
    end.set()
    thread.join()


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes a script the main module."""

    def make(text: str | None) -> None:
        module = SimpleNamespace(__spec__=None)
        if text is not None:
            (tmp_path / "script.py").write_text(text)
            module.__file__ = str(tmp_path / "script.py")
        start._names_in.cache_clear()
        monkeypatch.setitem(sys.modules, "__main__", module)

    return make


class Slow(Dataset[int]):
    """Takes its time to be pickled."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def __reduce__(self) -> Any:
        return list, ([torch.zeros(1 << 20) for _ in range(8)],)


class Local(Dataset[int]):
    """Has what can't be pickled."""

    def __init__(self) -> None:
        self.made = lambda: 1


def test_only_threads_of_others_count(another_thread: str) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    queue.put(1)  # starts its feeder
    end = threading.Event()
    ours = threading.Thread(target=end.wait, name="headrace-samples_0")
    ours.start()
    found = set(other_threads())
    end.set()
    ours.join()
    queue.get()
    queue.close()
    queue.join_thread()
    assert another_thread in found
    assert not {"headrace-samples_0", "QueueFeederThread", "MainThread"} & found


@pytest.mark.parametrize(
    ("dataset", "method", "said"),
    [
        (SquareDataset(), "forkserver", "pickles fast"),
        (Slow(), "fork", "0.1 s or 16 MiB"),
        (Local(), "fork", "can't be pickled"),
    ],
)
def test_beside_threads_what_pickles_fast_is_not_forked(
    another_thread: str, dataset: Any, method: str, said: str
) -> None:
    context, reason = choose_context(None, dataset, [])
    assert context.get_start_method() == method and reason.startswith(f"{method}: ")
    assert re.search(f"{another_thread}.*{said}", reason), reason


def test_without_threads_and_as_given(another_thread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_context("fork", SquareDataset(), [])[0].get_start_method() == "fork"
    monkeypatch.setattr(start, "other_threads", list)
    context, reason = choose_context(None, SquareDataset(), [])
    assert context.get_start_method() == "fork" and reason == "fork: the dataset is fork-safe"


def test_a_script_without_a_guard_is_not_imported_again(another_thread: str, main: Any) -> None:
    main("import headrace\nheadrace.create_dataloader('photos')\n")
    context, reason = choose_context(None, SquareDataset(), [])
    assert context.get_start_method() == "fork" and '`if __name__ == "__main__":`' in reason
    main("def f(): ...\nif __name__ == '__main__':\n    f()\n")
    assert choose_context(None, SquareDataset(), [])[0].get_start_method() == "forkserver"


def transform(value: Any) -> Any:
    return value


def test_what_only_the_running_script_has_is_not_sent(
    another_thread: str, main: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transform, "__module__", "__main__")
    for text, method in [
        (None, "fork"),  # a notebook
        ("if __name__ == '__main__':\n    def transform(value): ...\n", "fork"),
        ("def transform(value): ...\nif __name__ == '__main__':\n    pass\n", "forkserver"),
    ]:
        main(text)
        sys.modules["__main__"].transform = transform  # type: ignore[attr-defined]
        assert choose_context(None, SquareDataset(), [transform])[0].get_start_method() == method


def test_a_thread_that_comes_later_counts(
    make_loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "other_threads", list)
    loader = make_loader(SquareDataset(), batch_size=4, num_workers=1, persistent_workers=False)
    assert "= fork " in loader.explain()
    monkeypatch.setattr(start, "other_threads", lambda: ["pt_gloo_runloop"])
    iter(loader)
    assert loader.multiprocessing_context.get_start_method() == "forkserver"
    assert loader.config.multiprocessing_context.get_start_method() == "forkserver"
    assert "pt_gloo_runloop" in loader.explain()


def test_forkserver_socket_fits_beside_a_long_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    config = vars(multiprocessing.current_process())["_config"]
    monkeypatch.delitem(config, "tempdir", raising=False)
    start.forkserver_context()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(connection.arbitrary_address("AF_UNIX"))
    assert tempfile.gettempdir() == str(folder)


SERVED = """
import os, signal, time
from headrace.loader.start import choose_context

if __name__ == "__main__":
    process = choose_context("forkserver", [], [])[0].Process(target=time.sleep, args=(100,))
    process.start()
    process.terminate()
    process.join()
    print(process.exitcode, os.listdir(os.environ["TMPDIR"]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_fork_server(tmp_path: Path) -> None:
    """Also where its process was killed; and what it forks gets the signals that it does not."""
    (tmp_path / "script.py").write_text(SERVED)
    folder = tmp_path / "made"
    folder.mkdir()
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)},
        timeout=100,
    )
    assert done.stdout.startswith("-15 "), done.stderr
    assert "pymp-" in done.stdout or len(str(folder)) > 70
    until = time.monotonic() + 30
    while os.listdir(folder) and time.monotonic() < until:
        time.sleep(0.05)
    assert os.listdir(folder) == []


def test_threads_of_arrow_do_not_count() -> None:
    """Those that read, and the one of its allocator, survive a fork as the allocator has it."""
    arrow = pytest.importorskip("pyarrow")
    assert arrow.chunked_array([[1, 2], [3]]).take(arrow.array([2, 0])).to_pylist() == [3, 1]
    assert not [name for name in other_threads() if "jemalloc" in name]


class Halves(Dataset[torch.Tensor]):
    """Makes tensors of torch's default dtype, on its default device."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 2])


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_workers_have_the_default_dtype_and_the_cpu(make_loader: Any, method: str) -> None:
    options = {"batch_size": 1, "shuffle": False, "num_workers": 1, "persistent_workers": False}
    loader = make_loader(Halves(), multiprocessing_context=method, **options)
    with unusual_defaults():
        batches = list(loader)
    assert [batch.item() for batch in batches] == [0, 0.5, 1, 1.5]
    assert {(batch.dtype, batch.device.type) for batch in batches} == {(torch.float64, "cpu")}
