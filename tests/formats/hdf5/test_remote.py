"""h5py reads remote files, what it reads is cached, and errors of the server come out of it as
they are.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest

from headrace import HDF5Dataset, create_dataloader, pack
from headrace.errors import (
    AccessError,
    DataNotFoundError,
    FileChangedError,
    FormatError,
    MissingNameError,
    RemoteError,
)
from headrace.formats.hdf5 import tree as hdf5_tree
from headrace.formats.hdf5.remote import RemoteFile
from headrace.formats.hdf5.rows import HDF5Source
from headrace.formats.hdf5.tree import OpenHDF5
from headrace.io.ranges import ByteRanges
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from headrace.testing.contract import same
from tests.servers.ranges import RangeServer

N = 300
BY_H5PY = ("library", "group/texts")


def write(path: Path) -> None:
    draws = np.random.default_rng(0)
    packed = draws.integers(0, 9, (N, 700), np.int32)
    with h5py.File(path, "w") as file:
        file["raw"] = draws.integers(0, 256, (N, 700), np.uint8)
        how: Any = {"compression": "gzip", "shuffle": True}
        file.create_dataset("packed", data=packed, chunks=(7, 700), **how)
        file.create_dataset("library", data=packed[:, :70], chunks=(7, 70), compression="lzf")
        file["group/texts"] = [f"text {number}" for number in range(N)]
        file["targets"] = np.arange(N)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    write(made / "a.h5")
    (made / "words.h5").write_bytes(b"no HDF5 file" * 1000)
    return made


@pytest.fixture
def opened_of(server: RangeServer, tmp_path: Path) -> Iterator[Callable[..., OpenHDF5]]:
    made: list[OpenHDF5] = []

    def make(**options: Any) -> OpenHDF5:
        usual = {"cache_dir": tmp_path / "cache", "retries": 1, "deadline": 20}
        reach = RemoteOptions(**{**usual, **options})
        made.append(OpenHDF5(RemoteFiles(server.url + "/a.h5", reach)))
        return made[-1]

    yield make
    for opened in made:
        opened.close()


def source_of(opened: OpenHDF5, url: str, name: Any, **options: Any) -> HDF5Source:
    def open_one(one: str) -> HDF5Source:
        return HDF5Source(one, name, opened=opened, **options)

    return opened.each([url], open_one)[0]


def test_rows_in_stored_order_are_fetched_once(server: RangeServer, tmp_path: Path) -> None:
    options: Any = {"loading_mode": "streaming", "cache_dir": tmp_path}
    with HDF5Dataset(server.url + "/a.h5", "raw", **options) as far:
        server.counts()
        assert sum(map(len, create_dataloader(far, batch_size=30, shuffle=False))) == N
    assert server.counts()["bytes"] < 1.1 * N * 700


# -- many files


@pytest.fixture
def shards(server: RangeServer, folder: Path, tmp_path: Path) -> list[str]:
    made = folder / tmp_path.name
    made.mkdir()
    for number in range(5):
        with h5py.File(made / f"{number}.h5", "w") as file:
            rows = np.full((60, 40), number, np.int32)
            file.create_dataset("raw", data=rows)
            file.create_dataset("packed", data=rows, chunks=(8, 40), compression="gzip")
            file["targets"] = np.arange(60)
    return [f"{server.url}/{made.name}/{number}.h5" for number in range(5)]


def test_many_files_are_opened_at_once(
    server: RangeServer, shards: list[str], tmp_path: Path
) -> None:
    """In threads, while garbage is not collected: it would need h5py's lock."""
    server.set(latency=0.05)
    options: Any = {"target_name": "targets", "cache_dir": tmp_path / "cache"}
    with HDF5Dataset(shards * 2, "packed", **options) as far:
        assert [int(far[60 * number][0][0]) for number in range(10)] == [0, 1, 2, 3, 4] * 2
    assert gc.isenabled()


def test_files_with_an_index_are_not_opened_by_h5py(
    server: RangeServer, folder: Path, shards: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    """Until they are replaced."""
    home = folder / tmp_path.name
    options: Any = {"target_name": "targets", "cache_dir": home / "cache"}
    pack(HDF5Dataset(folder / "a.h5", "packed", target_name="targets"), home / "p.h5", workers=1)
    opened = mock.create_autospec(RemoteFile.opened, side_effect=RemoteFile.opened)
    monkeypatch.setattr(RemoteFile, "opened", opened)
    jobs: Any = [(shards, "raw"), (shards, ["packed", "raw"])]
    for urls, names in [*jobs, ([f"{server.url}/{home.name}/p.h5"], None)]:
        found = []
        for count in (len(urls), 0):
            opened.reset_mock()
            server.counts()
            with HDF5Dataset(urls, names, **options) as far:
                assert opened.call_count == count
                requests = server.counts()["requests"]
                samples = [far[number] for number in range(0, len(far), 7)]
                found.append([samples, far.fingerprint, far.explain()])
        assert requests == len(urls)  # for their versions
        assert same(*found)
    with HDF5Dataset(shards, "raw", **options) as far:
        with h5py.File(home / "3.h5", "r+") as file:
            file["raw"][:] = 9
        with pytest.raises(FileChangedError, match=r"3\.h5"):
            far[200]
    with HDF5Dataset(shards, "raw", **options) as far:
        assert far[200][0].unique().tolist() == [9]
    assert opened.call_count == 1


def test_a_bad_file_among_others_leaves_nothing_running(
    folder: Path, shards: list[str], tmp_path: Path
) -> None:
    """The index of the one before it is kept."""
    (folder / tmp_path.name / "1.h5").write_bytes(b"no HDF5 file" * 100)
    with pytest.raises(FormatError, match=r"http://.*/1\.h5"):
        HDF5Dataset(shards[:2], "raw", cache_dir=tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("headrace-index-*"))) == 1
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("headrace-open")]


def test_rows_of_many_files_are_read_at_once_and_checked(
    server: RangeServer, folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    home = folder / tmp_path.name
    with HDF5Dataset(folder / "a.h5", "raw") as near:
        pack(near, home, shard_size="50KB", workers=1)  # 60 samples each
        content = bytearray((home / "part-00002-of-00005.h5").read_bytes())
        content[content.index(near[170].numpy().tobytes())] ^= 1
        (home / "part-00002-of-00005.h5").write_bytes(content)
        urls = [f"{server.url}/{home.name}/{path.name}" for path in sorted(home.glob("*.h5"))]
        order = np.random.default_rng(0).permutation(N)
        rows = np.empty((N, 700), np.uint8)
        with HDF5Dataset(urls, cache_dir=tmp_path / "cache") as far:
            source = far.sample_source
            read_into = mock.Mock(side_effect=source.files.read_into)
            monkeypatch.setattr(source.files, "read_into", read_into)
            source.read_into(order[order != 170].tolist(), rows[: N - 1])
            assert same(rows[: N - 1], near.sample_source.column("raw")[order[order != 170]])
            assert read_into.call_count == 1
            with pytest.raises(FormatError, match=r"part-00002-of-00005\.h5, data, row 50: wrong"):
                source.read_into(order.tolist(), rows)


# -- errors


@pytest.mark.parametrize(("fault", "kind"), [("503", RemoteError), ("403", AccessError)])
def test_errors_of_the_server_come_out_of_h5py(
    server: RangeServer, opened_of: Any, monkeypatch: Any, tmp_path: Path, fault: str, kind: Any
) -> None:
    monkeypatch.setattr("headrace.io.remote.client._WAIT", 0.002)
    monkeypatch.setattr(hdf5_tree, "ENDS", 0)  # else nothing is left to be read
    url = server.url + "/a.h5"
    for name in ("packed", *BY_H5PY):
        opened = opened_of(cache_dir=tmp_path / name.replace("/", "-"))
        opened.learn([url])
        server.set(faults={fault: 1})
        for _ in range(2):
            with pytest.raises(kind, match=r"a\.h5, bytes .*"):
                source_of(opened, url, name)
        server.set(faults={})
        far = source_of(opened, url, name)
        server.set(faults={fault: 1})
        for _ in range(2):
            with pytest.raises(kind, match=r"a\.h5, bytes .*"):
                far.read([17])
        server.set(faults={})
        assert len(far.read([17])) == 1


def test_what_is_no_hdf5_file_and_what_is_not_there(server: RangeServer, opened_of: Any) -> None:
    for name, error, said in (
        ("words.h5", FormatError, r"/words\.h5 "),
        ("none.h5?key=secret", DataNotFoundError, r"/none\.h5 does not exist"),
        ("a.h5?key=secret", MissingNameError, r"/a\.h5 .*'data'.*group/texts, library"),
    ):
        with pytest.raises(error, match=said) as caught:
            source_of(opened_of(), f"{server.url}/{name}", "data")
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("disk", [None, "10MB"])
def test_damaged_metadata_are_fetched_again(
    server: RangeServer, opened_of: Any, folder: Path, monkeypatch: Any, disk: str | None
) -> None:
    url, opened = server.url + "/a.h5", opened_of(disk_cache_size=disk)
    remote, damaged = opened.files, [0, 9]
    fetch = remote.fetch

    async def wrong(ranges: ByteRanges, *args: Any) -> list[memoryview]:
        """Once for each of `damaged` that byte of the file's head is another one."""
        found = await fetch(ranges, *args)
        for number, (_, start, stop) in enumerate(ranges.each()):
            if start <= 0 < stop and damaged:
                content = bytearray(found[number])
                content[damaged.pop()] = 0xFF
                found[number] = memoryview(content)
        return found

    monkeypatch.setattr(remote, "fetch", wrong)
    with pytest.raises(FormatError):
        source_of(opened, url, "raw")  # twice wrong
    damaged[:] = [9]
    assert len(source_of(opened, url, "raw").read([1])) == 1
    monkeypatch.undo()
    again = source_of(opened_of(disk_cache_size=disk), url, "raw")
    np.testing.assert_equal(again.read([9]), HDF5Source(folder / "a.h5", "raw").read([9]))


def test_what_leads_to_other_files(server: RangeServer, opened_of: Any, folder: Path) -> None:
    with h5py.File(folder / "links.h5", "w") as file:
        file["raw"] = np.arange(N)
        file["away"] = h5py.ExternalLink("a.h5", "raw")
        file["folder/soft"] = h5py.SoftLink("/away")
        file["near"] = h5py.SoftLink("raw")
        file.create_dataset("external", (N,), "u1", external=[("bytes.bin", 0, N)])
        for name, place in (("other", "a.h5"), ("same", ".")):
            layout = h5py.VirtualLayout((N,), "i8")
            layout[:] = h5py.VirtualSource(place, "raw", (N,))
            file.create_virtual_dataset(name, layout)
    url = server.url + "/links.h5"
    for name in ("away", "folder/soft", "external", "other"):
        with pytest.raises(FormatError, match=r"links\.h5: .*(a\.h5|bytes\.bin)"):
            source_of(opened_of(), url, name)
    for name in ("near", "same"):
        assert [int(row) for row in source_of(opened_of(), url, name).read([5, 250])] == [5, 250]
