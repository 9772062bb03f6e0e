"""Each record is its file's bytes, wherever the files lie, and a fingerprint says what they are."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import shutil
import threading
import tracemalloc
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest

from headrace import BaseDataset, DataNotFoundError, ImageDataset, SampleError
from headrace.errors import AccessError, ConfigError, RemoteError
from headrace.io.local.files import LocalFiles
from headrace.io.packed_strings import PackedNames
from headrace.storage.files import FilesSource, fingerprint_names
from headrace.storage.source import Source
from tests.data.make import make_photos
from tests.servers.plain import plain_server

pytestmark = pytest.mark.quick_every(2)

ENDINGS = (".jpg", ".png")
NAMES = ["a/1.jpg", "a/2.PNG", "b/1.jpg"]


def fill(root: Path, names: list[str] = NAMES) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"content of {name}".encode())
    return root


def contents(names: list[str] = NAMES) -> list[bytes]:
    return [f"content of {name}".encode() for name in names]


class TestReading:
    def test_local(self, tmp_path: Path) -> None:
        source = FilesSource(fill(tmp_path), ENDINGS)
        assert isinstance(source, Source) and len(source) == 3
        assert source.read([0, 1, 2]) == contents()
        assert source.read([2, 0, 2]) == [contents()[i] for i in (2, 0, 2)]
        assert source.read([]) == [] and source.read(np.array([1])) == contents()[1:2]
        assert [source.location(i) for i in range(3)] == [str(tmp_path / n) for n in NAMES]
        assert (
            source.sizes().tolist() == [len(c) for c in contents()]
            and source.sizes().dtype == np.int64
        )
        assert source.blocks() is None

    @pytest.mark.parametrize("kind", ["memory", "file", "zip"])
    def test_by_url(self, memory: Any, tmp_path: Path, kind: str) -> None:
        fill(tmp_path / "d")
        memory.put(str(tmp_path / "d") + "/", "/d/", recursive=True)
        shutil.make_archive(str(tmp_path / "d"), "zip", tmp_path / "d")
        url, shown = {
            "memory": ("memory://d", "memory://d/a/1.jpg"),
            "file": (f"file://{tmp_path}/d", f"file://{tmp_path}/d/a/1.jpg"),
            "zip": (f"zip://::file://{tmp_path}/d.zip", f"zip://a/1.jpg::file://{tmp_path}/d.zip"),
        }[kind]
        source = FilesSource(url, ENDINGS)
        assert source.read([0, 1, 2]) == contents()
        assert source.read([2, 0, 2]) == [contents()[i] for i in (2, 0, 2)]
        assert source.read([1]) == contents()[1:2] and source.read([]) == []
        assert source.location(0) == shown
        assert source.sizes().tolist() == [len(c) for c in contents()]
        assert source.fingerprint() == FilesSource(tmp_path / "d", ENDINGS).fingerprint()

    def test_names_with_the_characters_of_a_glob(self, memory: Any) -> None:
        for name in ("img[1].jpg", "img1.jpg", "img?.jpg", "img*.jpg"):
            memory.pipe(f"/d/{name}", name.encode())
        source = FilesSource("memory://d", ENDINGS)
        wanted = [b"img*.jpg", b"img1.jpg", b"img?.jpg", b"img[1].jpg"]
        assert list(source.listing.names) == source.read(range(4)) == wanted
        assert [source.read([i])[0] for i in range(4)] == wanted

    @pytest.mark.parametrize(
        "name",
        [
            b"caf\xe9.jpg",
            "naïve 日本.jpg".encode(),
            b"new\nline.jpg",
            b" .jpg",
            b"-rf.jpg",
            b"a\\b.jpg",
        ],
    )
    def test_odd_names(self, tmp_path: Path, name: bytes) -> None:
        path = os.path.join(os.fsencode(tmp_path), name)
        with open(path, "wb") as file:
            file.write(b"odd")
        source = FilesSource(tmp_path, ENDINGS)
        assert source.read([0]) == [b"odd"]
        source.location(0).encode()

    def test_an_empty_file_is_an_empty_record(self, tmp_path: Path) -> None:
        (tmp_path / "x.jpg").touch()
        source = FilesSource(tmp_path, ENDINGS)
        assert source.read([0]) == [b""] and source.sizes().tolist() == [0]

    @pytest.mark.parametrize("where", ["local", "memory"])
    def test_in_many_threads_and_processes(self, tmp_path: Path, memory: Any, where: str) -> None:
        fill(tmp_path)
        memory.put(f"{tmp_path}/", "/d/", recursive=True)
        source = FilesSource(tmp_path if where == "local" else "memory://d", ENDINGS)
        seen: list[list[bytes]] = []
        threads = [
            threading.Thread(target=lambda: seen.append(source.read([0, 1, 2]))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [contents()] * 8
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(source.read, [[0, 1, 2]] * 4) == [contents()] * 4
            pool.close()
            pool.join()
        assert pickle.loads(pickle.dumps(source)).read([0, 1, 2]) == contents()


class TestErrors:
    def test_urls_and_paths_together(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="mixes"):
            FilesSource([str(tmp_path), "memory://d"], ENDINGS)

    @pytest.mark.parametrize(
        "urls",
        [
            ["memory://a", "file:///tmp"],
            ["zip::memory://a.zip", "zip::memory://b.zip"],
            ["ftp://alice:hunter2@one.org/d", "ftp://alice:hunter2@two.org/d"],
        ],
    )
    def test_more_than_one_file_system(
        self, memory: Any, urls: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would be read from the first one only: files of the others would be missing, or be
        taken for others.
        """
        filesystem = fsspec.get_filesystem_class(urls[0].split(":")[0])
        monkeypatch.setattr("headrace.io.remote.client.open_filesystem", lambda *_: filesystem)
        with pytest.raises(ConfigError, match="more than one") as caught:
            FilesSource(urls, ENDINGS)
        assert "hunter2" not in str(caught.value)

    def test_several_folders_of_one_file_system(self, memory: Any) -> None:
        memory.pipe({"/a/1.jpg": b"a1", "/b/2.jpg": b"b2"})
        assert FilesSource(["memory://a", "memory://b"], ENDINGS).read([0, 1]) == [b"a1", b"b2"]

    @pytest.mark.parametrize("mode", ["lazy", "cached", "streaming"])
    def test_a_file_that_vanishes_is_a_sample_error(self, tmp_path: Path, mode: str) -> None:
        dataset = BaseDataset(FilesSource(fill(tmp_path), ENDINGS), loading_mode=mode)
        (tmp_path / NAMES[1]).unlink()
        with pytest.raises(SampleError, match="sample 1 can't be read") as caught:
            list(dataset.__getitems__([0, 1, 2]))
        text = str(caught.value)
        assert (
            str(tmp_path / NAMES[1]) in text
            and "No such file" in text
            and "\n" not in text
            and "on_error" in text
        )
        assert isinstance(caught.value.__cause__, FileNotFoundError)
        assert dataset.__getitems__([0, 2]) == [contents()[0], contents()[2]]
        dataset.close()

    def test_a_file_that_vanishes_before_sizes_are_asked_for(self, tmp_path: Path) -> None:
        photos = make_photos(tmp_path, per_class=1)
        dataset = ImageDataset(photos, image_size=None, loading_mode="cached", on_error="skip")
        copy = pickle.loads(pickle.dumps(dataset))  # its cache is made at the first use
        os.unlink(copy.samples[0][0])
        assert len(copy.__getitems__([0, 1, 2])) == 2

    def test_a_file_that_may_not_be_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(_: LocalFiles, path: str) -> bytes:
            raise PermissionError(13, "Permission denied", path)

        monkeypatch.setattr(LocalFiles, "_read_whole", refused)
        dataset = BaseDataset(FilesSource(fill(tmp_path), ENDINGS))
        with pytest.raises(SampleError, match="Permission denied") as caught:
            dataset[0]
        assert str(tmp_path / NAMES[0]) in str(caught.value)

    def test_a_remote_file_that_vanishes(self, memory: Any) -> None:
        memory.pipe({f"/d/{i}.jpg": bytes([i]) for i in range(4)})
        dataset = BaseDataset(FilesSource("memory://d", ENDINGS), on_error="skip")
        memory.rm("/d/2.jpg")
        assert dataset.__getitems__([0, 1, 2, 3]) == [b"\0", b"\1", b"\3"]
        assert dataset.sample_reader.take_report()["skipped_samples"][0][:2] == (
            2,
            "memory://d/2.jpg",
        )


class TestSignedURLs:
    def test_are_read_and_never_shown(self, tmp_path: Path) -> None:
        fill(tmp_path)
        with plain_server(tmp_path, signature="sig=s3cr3t") as host:
            source = FilesSource(
                [f"{host}/a/1.jpg?sig=s3cr3t", f"{host}/b/1.jpg?x=/y&sig=s3cr3t"], ENDINGS
            )
            assert source.read([0, 1]) == [contents()[0], contents()[2]]
            assert source.location(0) == f"{host}/a/1.jpg"
            dataset = BaseDataset(source)
            (tmp_path / "a/1.jpg").unlink()
            with pytest.raises(SampleError, match=r"a/1\.jpg") as caught:
                dataset[0]
        for error in (caught.value, caught.value.__cause__, caught.value.__context__):
            assert "s3cr3t" not in f"{error} {error!r}"
        assert "s3cr3t" not in repr(dataset) + dataset.fingerprint

    def test_that_are_refused(self, tmp_path: Path) -> None:
        with (
            plain_server(fill(tmp_path), signature="sig=s3cr3t") as host,
            pytest.raises((AccessError, DataNotFoundError, SampleError)) as caught,
        ):
            FilesSource(f"{host}/a/1.jpg?sig=wr0ng", ENDINGS)
        assert "wr0ng" not in f"{caught.value} {caught.value.__cause__}" and "a/1.jpg" in str(
            caught.value
        )


class TestFingerprint:
    def test_does_not_depend_on_place_time_or_content(self, tmp_path: Path) -> None:
        one = FilesSource(fill(tmp_path / "one"), ENDINGS).fingerprint()
        two = fill(tmp_path / "elsewhere" / "two")
        for number, path in enumerate(two.rglob("*.*")):
            path.write_bytes(b"other")
            os.utime(path, (number, number))
        (two / "notes.txt").write_text("no sample")
        assert FilesSource(two, ENDINGS).fingerprint() == one
        assert FilesSource(str(two / "*/*.*"), ENDINGS).fingerprint() == one
        # other names: 1.jpg instead of a/1.jpg
        assert FilesSource([two / "a", two / "b"], ENDINGS).fingerprint() != one
        assert BaseDataset(FilesSource(two, ENDINGS)).fingerprint == one

    @pytest.mark.parametrize(
        "names",
        [
            NAMES[:2],
            [*NAMES, "c/1.jpg"],
            ["a/1.jpg", "a/2.PNG", "b/2.jpg"],
            ["a/1.jpg", "a/2.png", "b/1.jpg"],
            ["A/1.jpg", "A/2.PNG", "b/1.jpg"],
            ["a/1.jpg", "a2.PNG", "b/1.jpg"],
        ],
    )
    def test_differs_where_the_names_do(self, tmp_path: Path, names: list[str]) -> None:
        one = FilesSource(fill(tmp_path / "one"), ENDINGS).fingerprint()
        assert FilesSource(fill(tmp_path / "two", names), ENDINGS).fingerprint() != one

    def test_knows_where_a_name_ends(self) -> None:
        lists = [
            [b"ab", b"c"],
            [b"a", b"bc"],
            [b"abc"],
            [b"abc", b""],
            [b"", b"abc"],
            [b"c", b"ab"],
        ]
        assert len({fingerprint_names(*PackedNames(names).arrays) for names in lists}) == len(lists)

    def test_is_the_same_for_ever(self) -> None:
        assert (
            fingerprint_names(*PackedNames([b"a/1.jpg", b"b/2.png"]).arrays)
            == "7d3c31252c619afbceb3ec9890352f88"
        )

    def test_is_the_same_for_long_lists_and_needs_no_copy_of_them(self) -> None:
        packed = PackedNames(b"%040d" % i for i in range(200_000))
        data, offsets = packed.arrays
        whole = hashlib.blake2b(
            b"".join([np.int64(200_000).tobytes(), np.diff(offsets).tobytes(), data.tobytes()]),
            digest_size=16,
        )
        tracemalloc.start()
        assert fingerprint_names(data, offsets) == whole.hexdigest()
        assert tracemalloc.get_traced_memory()[1] < 2_000_000 < data.nbytes
        tracemalloc.stop()


class _Cloud(fsspec.AbstractFileSystem):
    """Remembers what it has listed, as those of object stores do, and counts what it is asked."""

    protocol = "cloud"
    cachable = False
    asked: ClassVar[list[str]] = []

    def find(
        self,
        path: str,
        maxdepth: Any = None,
        withdirs: bool = False,
        detail: bool = False,
        **kwargs: Any,
    ) -> Any:
        type(self).asked.append(f"find {path}")
        infos = {
            f"{path}/{i}.jpg": {
                "name": f"{path}/{i}.jpg",
                "type": "file",
                "size": i if i != 7 else None,
            }
            for i in range(10)
        }
        self.dircache[path] = list(infos.values())
        return infos if detail else list(infos)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        type(self).asked.append(f"info {path}")
        return {"name": path, "type": "file" if path.endswith(".jpg") else "directory", "size": 70}

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> type[_Cloud]:
    monkeypatch.setattr("headrace.io.remote.client.open_filesystem", lambda *_: _Cloud())
    monkeypatch.setattr(_Cloud, "asked", [])
    return _Cloud


class TestListingsOfRemoteFileSystems:
    def test_are_not_kept_by_the_file_system(self, cloud: Any) -> None:
        """One entry of s3fs's takes a kilobyte, and each worker would have them all."""
        source = FilesSource("cloud://bucket", ENDINGS)
        assert len(source) == 10 and source._server is not None
        assert not source._server.filesystem.dircache
        source.sizes()
        assert not source._server.filesystem.dircache

    def test_give_the_sizes_of_what_was_searched_through(self, cloud: Any) -> None:
        source = FilesSource("cloud://bucket", ENDINGS)
        cloud.asked.clear()
        assert source.sizes().tolist() == [0, 1, 2, 3, 4, 5, 6, 70, 8, 9]
        # of one the listing does not know
        assert cloud.asked == ["find bucket", "info bucket/7.jpg"]

    def test_are_not_asked_for_where_files_were_named(self, cloud: Any) -> None:
        source = FilesSource(["cloud://bucket/3.jpg", "cloud://bucket/5.jpg"], ENDINGS)
        cloud.asked.clear()
        assert source.sizes().tolist() == [70, 70]
        assert cloud.asked == ["info bucket/3.jpg", "info bucket/5.jpg"]

    def test_show_no_secret_when_they_fail(
        self, cloud: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = FilesSource("cloud://bucket", ENDINGS)

        def fail(*_: Any, **__: Any) -> Any:
            raise OSError("403 for https://alice:hunter2@host/bucket?sig=s3cr3t")

        monkeypatch.setattr(cloud, "find", fail)
        with pytest.raises(RemoteError, match="403 for https://host/bucket") as caught:
            source.sizes()
        assert caught.value.__suppress_context__


class TestIndex:
    def test_is_packed(self, tmp_path: Path) -> None:
        source = FilesSource(fill(tmp_path, [f"c/{i:04d}.jpg" for i in range(500)]), ENDINGS)
        data, offsets = source.listing.names.arrays
        assert (data.nbytes, offsets.nbytes) == (500 * 10, 501 * 8)
        assert source.listing.root_of is None
        assert len(pickle.dumps(source)) < 500 * 18 + 2000
