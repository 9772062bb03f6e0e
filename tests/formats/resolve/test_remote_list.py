"""Listing a server gets over its hiccups, and says so when it can't."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import fsspec
import h5py
import numpy as np
import pytest
import zarr
from fsspec.implementations.memory import MemoryFileSystem

from headrace import (
    AccessError,
    DataNotFoundError,
    FormatError,
    HDF5Dataset,
    ImageDataset,
    TextDataset,
    ZarrDataset,
)
from headrace.errors import RemoteError
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from tests.servers.plain import plain_server

pytestmark = pytest.mark.slow
Make = Callable[..., Any]


class _Flaky(MemoryFileSystem):
    """Keeps files in memory; some of its answers to questions for what is there are errors."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False
    error: Callable[[], Exception] = ConnectionResetError
    fails: Any = None
    asked: ClassVar[Counter[str]] = Counter()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("flaky://", "memory://")))

    def _answer(self, question: str, path: str, *args: Any, **options: Any) -> Any:
        if next(type(self).fails):
            type(self).asked[question] += 1
            raise type(self).error()
        return getattr(super(), question)(path, *args, **options)

    def info(self, path: str, **options: Any) -> Any:
        return self._answer("info", path, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self._answer("ls", path, detail=detail, **options)

    def find(self, path: str, *args: Any, **options: Any) -> Any:
        return self._answer("find", path, *args, **options)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> type[_Flaky]:
    fsspec.register_implementation("flaky", _Flaky, clobber=True)
    monkeypatch.setattr("headrace.io.remote.client._WAIT", 0.002)
    monkeypatch.setattr(_Flaky, "store", {})
    monkeypatch.setattr(_Flaky, "pseudo_dirs", [""])
    monkeypatch.setattr(_Flaky, "fails", itertools.repeat(False))
    monkeypatch.setattr(_Flaky, "error", ConnectionResetError)
    monkeypatch.setattr(_Flaky, "asked", Counter())
    return _Flaky


def _put(folder: Path) -> None:
    filesystem = _Flaky()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            filesystem.pipe_file(f"/top/{path.relative_to(folder)}", path.read_bytes())


def _photos(photos: Path, folder: Path) -> tuple[Path, Make]:
    return photos, lambda url, **options: ImageDataset(url, image_size=8, **options)


def _store(photos: Path, folder: Path) -> tuple[Path, Make]:
    """Without consolidated metadata: its arrays are found by listing."""
    group = zarr.open_group(str(folder / "a.zarr"), mode="w")
    group.create_array("images", data=np.arange(24, dtype="u1").reshape(6, 4), chunks=(2, 4))
    return folder, lambda url, **options: ZarrDataset(url, **options)


class Served(NamedTuple):
    """What opens a dataset of files that the server has, under which URL, and its samples."""

    make: Make
    url: str
    samples: list[str]

    def opened(self) -> list[str]:
        with self.make(self.url) as dataset:
            return [repr(sample) for sample in dataset]


FOLDERS = [(_photos, "top"), (_photos, "top/*/*")]


@pytest.fixture(params=[*FOLDERS, (_store, "top/a.zarr")])
def served(request: pytest.FixtureRequest, tiny_photos: Path, tmp_path: Path, flaky: Any) -> Served:
    kind, path = request.param
    (tmp_path / "data").mkdir()
    folder, make = kind(tiny_photos, tmp_path / "data")
    _put(folder)
    with make(str(folder) + path.removeprefix("top")) as dataset:
        return Served(make, f"flaky://{path}", [repr(sample) for sample in dataset])


def test_a_server_that_fails(served: Served, flaky: Any) -> None:
    flaky.fails = itertools.cycle([True, False])
    with served.make(served.url) as dataset:
        flaky.fails = itertools.repeat(False)
        assert [repr(sample) for sample in dataset] == served.samples
    assert flaky.asked.total() > 0
    flaky.fails = itertools.repeat(True)
    with pytest.raises(RemoteError, match=r"flaky:///?top.*: 3 attempts in "):
        served.make(served.url, retries=2)
    flaky.error = PermissionError
    flaky.asked.clear()
    with pytest.raises(AccessError, match=r"flaky:///?top"):
        served.make(served.url)
    # what it is, and what lies below it: asking again changes nothing
    assert flaky.asked.total() <= 2


@pytest.mark.parametrize("error", [PermissionError, NotImplementedError, KeyError])
@pytest.mark.parametrize("served", FOLDERS, indirect=True)
def test_a_folder_may_be_listed_though_nobody_says_what_it_is(
    served: Served, flaky: Any, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = flaky.info

    def refusing(self: Any, path: str, **options: Any) -> Any:
        if path.endswith(served.url.removeprefix("flaky://")):
            raise error
        return info(self, path, **options)

    monkeypatch.setattr(flaky, "info", refusing)
    assert served.opened() == served.samples
    monkeypatch.setattr(flaky, "find", lambda *_, **__: [])
    monkeypatch.setattr(flaky, "glob", lambda *_, **__: [])
    with pytest.raises((AccessError, RemoteError, DataNotFoundError), match=r"flaky:///?top"):
        served.make(served.url)


def test_a_question_that_nobody_answers(flaky: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec calls a file missing where no answer came in time."""
    url = "flaky://top/a.jpg"
    flaky().pipe_file("/top/a.jpg", b"x")
    are_slow = itertools.chain([True] * 5, itertools.repeat(False))  # of 3 attempts, and of 2

    def timing_out(*_: Any, **__: Any) -> Any:
        if next(are_slow):
            raise FileNotFoundError("/top/a.jpg") from TimeoutError()
        return {"name": "/top/a.jpg", "size": 1, "type": "file"}

    monkeypatch.setattr(flaky, "info", timing_out)
    remote = RemoteFiles("flaky://top", RemoteOptions(retries=2, deadline=20))
    with pytest.raises(RemoteError, match=r"3 attempts.*nothing came in time"):
        remote.ask("info", url)
    remote.close()
    remote = RemoteFiles("flaky://top", RemoteOptions(retries=2, deadline=20))
    assert remote.ask("info", url)["size"] == 1
    assert remote.take_counts()["retries"] == 2
    remote.close()


def test_links_that_lead_out_of_a_web_folder(tmp_path: Path) -> None:
    """A website below the files: its pages link to themselves, and upwards."""
    (tmp_path / "site" / "deep").mkdir(parents=True)
    for name in ("a.txt", "site/b.txt", "site/deep/c:1.txt", "site/deep/d e.txt"):
        (tmp_path / name).write_text(name)
    links = ["./", ".", "../", "../site/", "..", "#/", "?page=/", "./b.txt", "x/../deep/"]
    page = "".join(f'<a href="{link}">{link}</a>' for link in links)
    (tmp_path / "site" / "index.html").write_text(page)
    with plain_server(tmp_path) as url:
        for root in (url, f"{url}/"):
            with TextDataset(root) as dataset:
                assert len(dataset) == 4
        with TextDataset(f"{url}/site") as dataset:
            assert len(dataset) == 3
        with TextDataset(f"{url}/**/*.txt") as dataset:
            assert len(dataset) == 4


def test_a_servers_root_is_a_folder(tmp_path: Path) -> None:
    """Where its name has a dot, as files have; and nothing is asked for beside it."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = np.zeros(2_000_000, np.uint8)
    with plain_server(tmp_path) as url:
        for root in (url, f"{url}/"):
            with pytest.raises(RemoteError, match=r"a\.h5.*sends whole files"):
                HDF5Dataset(root)
        (tmp_path / "index.html").write_text("nothing")
        for root in (url, f"{url}/"):
            with pytest.raises(FormatError, match="is a web page that lists no files"):
                HDF5Dataset(root)
