"""Listing a server gets over its hiccups, and says so when it can't."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import zarr
from fsspec.implementations.memory import MemoryFileSystem

from headrace import (
    AccessError,
    DataNotFoundError,
    ImageDataset,
    StreamingDataset,
    TextDataset,
    ZarrDataset,
)
from headrace.errors import RemoteError
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles

pytestmark = pytest.mark.slow


class _Flaky(MemoryFileSystem):
    """Keeps files in memory; of its answers to questions for what is there, each second one is
    an error.
    """

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
    for name, value in (
        ("store", {}),
        ("pseudo_dirs", [""]),
        ("fails", itertools.repeat(False)),
        ("asked", Counter()),
    ):
        monkeypatch.setattr(_Flaky, name, value)
    return _Flaky


def _put(folder: Path, flaky: type[_Flaky]) -> None:
    filesystem = flaky()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            filesystem.pipe_file(f"/top/{path.relative_to(folder)}", path.read_bytes())


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _photos(photos: Path, tmp_path: Path) -> tuple[Path, Callable[..., Any]]:
    return photos, lambda url, **options: ImageDataset(url, image_size=8, **options)


def _text_files(photos: Path, tmp_path: Path) -> tuple[Path, Callable[..., Any]]:
    (tmp_path / "a").mkdir()
    for name in ("a/1.txt", "2.txt"):
        (tmp_path / name).write_text(f"of {name}\nand more\n")
    return tmp_path, lambda url, **options: TextDataset(
        url, max_length=None, cache_dir=tmp_path / "kept", **options
    )


def _lines(photos: Path, tmp_path: Path) -> tuple[Path, Callable[..., Any]]:
    _text_files(photos, tmp_path)
    return tmp_path, lambda url, **options: TextDataset(
        url, unit="line", max_length=None, cache_dir=tmp_path / "kept", **options
    )


def _shards(photos: Path, tmp_path: Path) -> tuple[Path, Callable[..., Any]]:
    for name in ("0.jsonl", "1.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n{"text": "b"}\n')
    return tmp_path, lambda url, **options: StreamingDataset(
        url, cache_dir=tmp_path / "kept", **options
    )


def _shards_by_glob(photos: Path, tmp_path: Path) -> tuple[Path, Callable[..., Any]]:
    folder, make = _shards(photos, tmp_path)
    return folder, lambda url, **options: make(f"{url}/*.jsonl", **options)


def _store(photos: Path, tmp_path: Path) -> tuple[Path, Callable[..., Any]]:
    """Without consolidated metadata: its arrays are found by listing."""
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w")
    group.create_array("images", data=np.arange(24, dtype="u1").reshape(6, 4), chunks=(2, 4))
    return tmp_path, lambda url, **options: ZarrDataset(f"{url}/a.zarr", **options)


_KINDS = [_photos, _text_files, _lines, _shards, _shards_by_glob, _store]


@pytest.mark.parametrize("kind", _KINDS)
def test_each_second_answer_is_an_error(
    tiny_photos: Path, tmp_path: Path, flaky: Any, kind: Any
) -> None:
    folder, make = kind(tiny_photos, _made(tmp_path / "data"))
    with make(str(folder)) as dataset:
        wanted = [repr(sample) for sample in dataset]
    _put(folder, flaky)
    flaky.fails = itertools.cycle([True, False])
    with make("flaky://top") as dataset:
        flaky.fails = itertools.repeat(False)
        assert [repr(sample) for sample in dataset] == wanted
    assert flaky.asked.total() > 0


@pytest.mark.parametrize("kind", _KINDS)
def test_no_answer_at_all(tiny_photos: Path, tmp_path: Path, flaky: Any, kind: Any) -> None:
    folder, make = kind(tiny_photos, _made(tmp_path / "data"))
    _put(folder, flaky)
    flaky.fails = itertools.repeat(True)
    with pytest.raises(RemoteError, match=r"flaky:///?top.*: 3 attempts in .*ConnectionResetError"):
        make("flaky://top", retries=2)


@pytest.mark.parametrize("kind", _KINDS)
def test_what_may_not_be_listed(
    tiny_photos: Path, tmp_path: Path, flaky: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, make = kind(tiny_photos, _made(tmp_path / "data"))
    _put(folder, flaky)
    flaky.fails = itertools.repeat(True)
    monkeypatch.setattr(flaky, "error", PermissionError)
    with pytest.raises(AccessError, match=r"flaky:///?top"):
        make("flaky://top")
    # what it is, and what lies below it: asking again changes nothing
    assert flaky.asked.total() <= 2


@pytest.mark.parametrize("error", [PermissionError, NotImplementedError, KeyError])
@pytest.mark.parametrize("kind", [_photos, _text_files, _lines, _shards, _shards_by_glob])
def test_a_folder_may_be_listed_though_nobody_says_what_it_is(
    tiny_photos: Path,
    tmp_path: Path,
    flaky: Any,
    kind: Any,
    error: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, make = kind(tiny_photos, _made(tmp_path / "data"))
    with make(str(folder)) as dataset:
        wanted = [repr(sample) for sample in dataset]
    _put(folder, flaky)
    info = flaky.info

    def refusing(self: Any, path: str, **options: Any) -> Any:
        if path.endswith("*.jsonl" if kind is _shards_by_glob else "top"):
            raise error
        return info(self, path, **options)

    monkeypatch.setattr(flaky, "info", refusing)
    with make("flaky://top") as dataset:
        assert [repr(sample) for sample in dataset] == wanted
    monkeypatch.setattr(flaky, "find", lambda *_, **__: [])
    monkeypatch.setattr(flaky, "glob", lambda *_, **__: [])
    with pytest.raises((AccessError, RemoteError, DataNotFoundError), match=r"flaky:///?top"):
        make("flaky://top")


def test_sizes_that_no_server_says(
    tiny_photos: Path, flaky: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put(tiny_photos, flaky)
    # a name that looks like a URL in another
    flaky().pipe_file("/top/x::y.jpg", flaky().cat_file(flaky().find("/top")[0]))
    info = flaky.info
    for known in (True, False):
        monkeypatch.setattr(
            flaky,
            "info",
            lambda *args, known=known, **how: {
                **info(*args, **how),
                **({} if known else {"size": None}),
            },
        )
        with ImageDataset(
            "flaky://top/**/*.jpg", image_size=8, loading_mode="eager", targets=None
        ) as dataset:
            assert (dataset.sample_source.sizes() > 0).all() == known and len(list(dataset)) == len(
                dataset
            ) > 1


def test_a_question_that_nobody_answers(flaky: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at the deadline; fsspec calls a file missing where no answer came in time."""
    flaky().pipe_file("/top/a.jpg", b"x")
    is_slow, waiting = itertools.repeat(True), threading.Event()
    monkeypatch.setattr(flaky, "info", lambda *_, **__: waiting.wait(30))
    for ask in (
        lambda remote: remote.ask("info", "flaky://top/a.jpg"),
        lambda remote: remote.is_folder("flaky://top/a.jpg"),
    ):
        remote = RemoteFiles("flaky://top", RemoteOptions(retries=1, deadline=0.2))
        with pytest.raises(RemoteError, match="nothing came in time"):
            ask(remote)
        remote.close()
    waiting.set()

    def timing_out(*_: Any, **__: Any) -> Any:
        try:
            raise TimeoutError
        except TimeoutError as error:
            if next(is_slow):
                raise FileNotFoundError("/top/a.jpg") from error
        return {"name": "/top/a.jpg", "size": 1, "type": "file"}

    monkeypatch.setattr(flaky, "info", timing_out)
    remote = RemoteFiles("flaky://top", RemoteOptions(retries=2, deadline=20))
    with pytest.raises(RemoteError, match=r"3 attempts.*nothing came in time"):
        remote.ask("info", "flaky://top/a.jpg")
    remote.close()
    remote, is_slow = (
        RemoteFiles("flaky://top", RemoteOptions(retries=2, deadline=20)),
        itertools.chain([True, True], itertools.repeat(False)),
    )
    assert (
        remote.ask("info", "flaky://top/a.jpg")["size"] == 1
        and remote.take_counts()["retries"] == 2
    )
    remote.close()
