"""Each record is its file's bytes, wherever the files lie, and a fingerprint says what they are."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest

from headrace import BaseDataset, DataNotFoundError, ImageDataset, SampleError
from headrace.errors import AccessError, RemoteError
from headrace.formats.files import FilesSource, fingerprint_names
from headrace.formats.resolve.file_set import PackedNames
from tests.data.make import make_photos
from tests.io.remote.reading import in_threads
from tests.servers.plain import plain_server

ENDINGS = (".jpg", ".png")
CLIENT = "headrace.io.remote.requests.open_filesystem"
NAMES = ["a/1.jpg", "a/2.PNG", "b/1.jpg"]
CONTENTS = [f"content of {name}".encode() for name in NAMES]


def fill(root: Path, names: list[str] = NAMES) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"content of {name}".encode())
    return root


# -- reading


@pytest.mark.parametrize("kind", ["local", "memory", "file", "zip"])
def test_records_are_the_bytes_of_files(memory: Any, tmp_path: Path, kind: str) -> None:
    """Also in several threads at once, and in a pickled copy."""
    fill(tmp_path / "d")
    memory.put(f"{tmp_path}/d/", "/d/", recursive=True)
    shutil.make_archive(str(tmp_path / "d"), "zip", tmp_path / "d")
    url, shown = {
        "local": (str(tmp_path / "d"), f"{tmp_path}/d/a/1.jpg"),
        "memory": ("memory://d", "memory://d/a/1.jpg"),
        "file": (f"file://{tmp_path}/d", f"file://{tmp_path}/d/a/1.jpg"),
        "zip": (f"zip://::file://{tmp_path}/d.zip", f"zip://a/1.jpg::file://{tmp_path}/d.zip"),
    }[kind]
    source = FilesSource(url, ENDINGS)
    assert len(source) == 3 and source.read([0, 1, 2]) == CONTENTS
    assert source.read([2, 0, 2]) == [CONTENTS[i] for i in (2, 0, 2)]
    assert source.read([]) == [] and source.read(np.array([1])) == CONTENTS[1:2]
    assert source.location(0) == shown and source.blocks() is None
    assert source.sizes().tolist() == [len(content) for content in CONTENTS]
    assert source.fingerprint() == FilesSource(tmp_path / "d", ENDINGS).fingerprint()
    assert in_threads(8, lambda _: source.read([0, 1, 2])) == [CONTENTS] * 8
    assert pickle.loads(pickle.dumps(source)).read([0, 1, 2]) == CONTENTS


# -- errors


def test_a_file_that_vanishes_is_a_sample_error(tmp_path: Path, memory: Any) -> None:
    for mode in ("lazy", "cached", "streaming"):
        dataset = BaseDataset(FilesSource(fill(tmp_path / mode), ENDINGS), loading_mode=mode)
        path = tmp_path / mode / NAMES[1]
        path.unlink()
        with pytest.raises(SampleError, match="sample 1") as caught:
            list(dataset.__getitems__([0, 1, 2]))
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
        assert isinstance(caught.value.__cause__, FileNotFoundError)
        assert dataset.__getitems__([0, 2]) == [CONTENTS[0], CONTENTS[2]]
        dataset.close()
    memory.pipe({f"/d/{i}.jpg": bytes([i]) for i in range(4)})
    dataset = BaseDataset(FilesSource("memory://d", ENDINGS), on_error="skip")
    memory.rm("/d/2.jpg")
    assert dataset.__getitems__([0, 1, 2, 3]) == [b"\0", b"\1", b"\3"]
    skipped = dataset.sample_reader.take_report()["skipped_samples"]
    assert skipped[0][:2] == (2, "memory://d/2.jpg")


def test_a_file_that_vanishes_before_sizes_are_asked_for(tmp_path: Path) -> None:
    photos = make_photos(tmp_path, per_class=1)
    dataset = ImageDataset(photos, image_size=None, loading_mode="cached", on_error="skip")
    copy = pickle.loads(pickle.dumps(dataset))  # its cache is made at the first use
    os.unlink(copy.samples[0][0])
    assert len(copy.__getitems__([0, 1, 2])) == 2


def test_signatures_of_urls_are_never_shown(tmp_path: Path) -> None:
    fill(tmp_path)
    with plain_server(tmp_path, signature="sig=s3cr3t") as host:
        urls = [f"{host}/a/1.jpg?sig=s3cr3t", f"{host}/b/1.jpg?x=/y&sig=s3cr3t"]
        source = FilesSource(urls, ENDINGS)
        assert source.read([0, 1]) == [CONTENTS[0], CONTENTS[2]]
        assert source.location(0) == f"{host}/a/1.jpg"
        dataset = BaseDataset(source)
        (tmp_path / "a/1.jpg").unlink()
        with pytest.raises(SampleError, match=r"a/1\.jpg") as caught:
            dataset[0]
        with pytest.raises((AccessError, DataNotFoundError, SampleError)) as refused:
            FilesSource(f"{host}/b/1.jpg?sig=wr0ng", ENDINGS)
    for error in (caught.value, caught.value.__cause__, caught.value.__context__):
        assert "s3cr3t" not in f"{error} {error!r}"
    assert "s3cr3t" not in repr(dataset) + dataset.fingerprint
    assert "wr0ng" not in f"{refused.value} {refused.value.__cause__}"
    assert "b/1.jpg" in str(refused.value)


# -- fingerprints


def test_a_fingerprint_is_of_the_names_alone(tmp_path: Path) -> None:
    one = FilesSource(fill(tmp_path / "one"), ENDINGS).fingerprint()
    two = fill(tmp_path / "elsewhere" / "two")
    for number, path in enumerate(two.rglob("*.*")):
        path.write_bytes(b"other")
        os.utime(path, (number, number))
    (two / "notes.txt").write_text("no sample")
    assert FilesSource(two, ENDINGS).fingerprint() == one
    assert FilesSource(str(two / "*/*.*"), ENDINGS).fingerprint() == one
    assert BaseDataset(FilesSource(two, ENDINGS)).fingerprint == one
    # other names: 1.jpg instead of a/1.jpg
    assert FilesSource([two / "a", two / "b"], ENDINGS).fingerprint() != one
    for number, names in enumerate(
        [
            NAMES[:2],
            ["a/1.jpg", "a/2.PNG", "b/2.jpg"],
            ["a/1.jpg", "a/2.png", "b/1.jpg"],
            ["a/1.jpg", "a2.PNG", "b/1.jpg"],
        ]
    ):
        other = fill(tmp_path / str(number), names)
        assert FilesSource(other, ENDINGS).fingerprint() != one


def test_a_fingerprint_is_the_same_for_ever() -> None:
    found = fingerprint_names(*PackedNames([b"a/1.jpg", b"b/2.png"]).arrays)
    assert found == "7d3c31252c619afbceb3ec9890352f88"


# -- listings of remote file systems


class _Cloud(fsspec.AbstractFileSystem):
    """Notes what it is asked."""

    protocol = "cloud"
    cachable = False
    asked: ClassVar[list[str]] = []
    is_denied = False

    def find(self, path: str, *_: Any, **__: Any) -> Any:
        type(self).asked.append(f"find {path}")
        if type(self).is_denied:
            raise OSError("403 for https://alice:hunter2@host/bucket?sig=s3cr3t")
        names = [f"{path}/{i}.jpg" for i in range(10)]
        sizes = [*range(7), None, 8, 9]
        each = zip(names, sizes, strict=True)
        return {name: {"name": name, "type": "file", "size": size} for name, size in each}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        type(self).asked.append(f"info {path}")
        return {"name": path, "type": "file" if path.endswith(".jpg") else "directory", "size": 70}


def test_sizes_are_those_of_the_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is asked for where the listing does not say."""
    monkeypatch.setattr(CLIENT, lambda *_: _Cloud())
    monkeypatch.setattr(_Cloud, "asked", [])
    source = FilesSource("cloud://bucket", ENDINGS)
    assert len(source) == 10
    _Cloud.asked.clear()
    assert source.sizes().tolist() == [0, 1, 2, 3, 4, 5, 6, 70, 8, 9]
    assert _Cloud.asked == ["find bucket", "info bucket/7.jpg"]
    source = FilesSource("cloud://bucket", ENDINGS)
    monkeypatch.setattr(_Cloud, "is_denied", True)
    with pytest.raises(RemoteError, match="403 for https://host/bucket") as caught:
        source.sizes()
    assert caught.value.__suppress_context__
