"""Fetching: the right bytes, or an error in time, whatever the server does."""

import hashlib
import multiprocessing
import os
import pickle
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import ConfigError
from headrace.errors import AccessError, DataNotFoundError, FileChangedError, RemoteError
from headrace.io.cache.blocks import BLOCK, block_key, version_hash
from headrace.io.cache.disk_cache import DiskCache
from headrace.io.files import Version
from headrace.io.ranges import WHOLE
from headrace.io.remote import client as module
from headrace.io.remote import http as http_ranges
from headrace.io.remote import timeouts as attempts
from headrace.io.remote.client import Remote
from headrace.io.remote.concurrency import FEWEST, MOST, Flow
from headrace.io.remote.errors import retry_after
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from tests.io.remote.reading import Range, read, remote_of_url, versions_of
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.quick_every(3)

SIZE = 3_000_000
CONTENT = {name: random.Random(name).randbytes(SIZE) for name in ("a.bin", "b.bin")}

FAULTS = ("500", "503", "429", "reset", "short", "less", "more", "whole")


@pytest.fixture
def remote_of(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(module, "_WAIT", 0.002)
    made: list[Remote] = []

    def make(**options: Any) -> Remote:
        made.append(remote_of_url(server.url + "/a.bin", **{"deadline": 30, **options}))
        return made[-1]

    yield make
    for remote in made:
        remote.close()


def some(
    server: RangeServer, seed: int, count: int = 40, version: Version | None = None
) -> list[Range]:
    draws = random.Random(seed)
    starts = [draws.randrange(SIZE) for _ in range(count)]
    return [
        Range(
            f"{server.url}/{draws.choice(list(CONTENT))}",
            start,
            min(SIZE, start + draws.choice([0, 1, 700, 90_000])),
            version,
        )
        for start in starts
    ]


def right(ranges: list[Range]) -> list[bytes]:
    return [CONTENT[one.path.rpartition("/")[2]][one.start : one.stop] for one in ranges]


def test_bytes_are_those_of_the_file(server: RangeServer, remote_of: Any) -> None:
    remote = remote_of()
    versions = versions_of(remote, [f"{server.url}/{name}" for name in CONTENT])
    assert [version.size for version in versions] == [SIZE, SIZE] and len(
        {version.tag for version in versions}
    ) == 2
    wanted = some(server, 1)
    assert read(remote, wanted) == right(wanted)
    assert read(remote, []) == [] and read(remote, [Range(f"{server.url}/a.bin", 5, 5)]) == [b""]
    counts = remote.take_counts()
    assert counts["requests"] < 40 and counts["retries"] == 0 and not remote.take_counts()


def test_close_ranges_are_one_request(server: RangeServer, remote_of: Any) -> None:
    wanted = [Range(f"{server.url}/a.bin", at, at + 100) for at in range(0, 50_000, 1_000)]
    assert read(remote_of(), wanted) == right(wanted)
    assert server.counts()["requests"] == 1


def test_a_long_range_is_several(
    server: RangeServer, remote_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", 700_000)
    wanted = [Range(f"{server.url}/a.bin", 0, SIZE)]
    assert read(remote_of(), wanted) == [CONTENT["a.bin"]]
    assert server.counts()["requests"] == 5


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_passes(server: RangeServer, remote_of: Any, fault: str) -> None:
    server.set(faults={fault: 0.5})
    remote, wanted = remote_of(retries=30), some(server, 2, 25)
    assert read(remote, wanted) == right(wanted)
    seen = sum(server.counts()["faults"].values())
    # after a reset aiohttp asks once more by itself
    assert remote.take_counts()["retries"] >= seen / 3 > 0


def test_a_third_of_all_requests_fail(server: RangeServer, remote_of: Any) -> None:
    server.set(faults=dict.fromkeys(FAULTS, 0.3 / len(FAULTS)))
    remote = remote_of(retries=12)
    version = versions_of(remote, [f"{server.url}/a.bin"])[0]
    for seed in range(5):
        wanted = [one for one in some(server, seed, 60, version) if one.path.endswith("a.bin")]
        assert read(remote, wanted) == right(wanted)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("500", "the server says 500"),
        ("reset", "Disconnected|Reset"),
        ("less", "the answer has"),
        ("whole", "whole files"),
    ],
)
def test_when_all_fail_it_says_so(
    server: RangeServer, remote_of: Any, fault: str, said: str
) -> None:
    server.set(faults={fault: 1})
    with pytest.raises(
        RemoteError,
        match=rf"a\.bin, bytes 10 to 90: 4 attempts in .*{said}.*retries=3, deadline=30",
    ):
        read(remote_of(retries=3), [Range(f"{server.url}/a.bin", 10, 90)])
    assert 4 <= server.counts()["requests"] <= 8  # after a reset aiohttp asks once more by itself


@pytest.mark.parametrize("fault", ["500", "reset", "429"])
def test_sizes_survive_faults_too(server: RangeServer, remote_of: Any, fault: str) -> None:
    server.set(faults={fault: 0.5})
    assert [
        version.size for version in versions_of(remote_of(retries=20), [f"{server.url}/a.bin"] * 5)
    ] == [SIZE] * 5
    server.set(faults={fault: 1})
    with pytest.raises(RemoteError, match=r"a\.bin: 3 attempts"):
        versions_of(remote_of(retries=2), [f"{server.url}/a.bin"])


def test_a_server_that_never_answers(server: RangeServer, remote_of: Any) -> None:
    server.set(faults={"hang": 1})
    with pytest.raises(RemoteError, match="nothing came in time"):
        read(remote_of(retries=2, deadline=0.4), some(server, 1, 3))


def test_a_slow_line_is_no_fault(
    server: RangeServer, remote_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes takes longer than an attempt is given, and than all of them are; nothing of it
    is thrown away.
    """
    monkeypatch.setattr(http_ranges, "PART", 4 << 10)
    server.set(bandwidth=400_000)
    remote, wanted = remote_of(retries=3, deadline=0.6), [Range(f"{server.url}/a.bin", 0, 600_000)]
    assert read(remote, wanted) == right(wanted)
    assert remote.take_counts() == {"requests": 1, "bytes_fetched": 600_000}


@pytest.mark.slow
def test_a_line_that_is_too_slow(
    server: RangeServer, remote_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_ranges, "PART", 1 << 10)
    monkeypatch.setattr(attempts, "SLOWEST", 1 << 20)
    server.set(bandwidth=200_000)
    with pytest.raises(RemoteError, match=r"only [\d,]+ bytes came in time"):
        read(remote_of(retries=0, deadline=3), [Range(f"{server.url}/a.bin", 0, SIZE)])


def test_a_server_that_is_gone(folder: Path) -> None:
    with RangeServer(folder) as gone:
        url = gone.url
    remote = remote_of_url(url, retries=1, deadline=5)
    with pytest.raises(RemoteError, match="2 attempts"):
        read(remote, [Range(f"{url}/a.bin", 0, 5)])
    remote.close()


@pytest.mark.parametrize(
    "ask", [lambda r, url: read(r, [Range(url, 0, 5)]), lambda r, url: versions_of(r, [url])]
)
def test_a_file_that_is_missing(server: RangeServer, remote_of: Any, ask: Any) -> None:
    with pytest.raises(DataNotFoundError, match=r"nothing\.bin.*there is no such file") as caught:
        ask(remote_of(), f"{server.url}/nothing.bin?token=secret")
    assert "secret" not in str(caught.value)


def test_no_leave_to_read(server: RangeServer, remote_of: Any) -> None:
    server.set(faults={"403": 1})
    with pytest.raises(AccessError, match=r"access is denied.*storage_options.*expired"):
        read(remote_of(), some(server, 1, 3))
    assert server.counts()["requests"] <= 3  # asked once each


def test_a_file_that_was_replaced(server: RangeServer, remote_of: Any, folder: Path) -> None:
    remote, url = remote_of(), f"{server.url}/c.bin"
    (folder / "c.bin").write_bytes(b"old" * 1_000)
    version = versions_of(remote, [url])[0]
    assert read(remote, [Range(url, 0, 3, version)]) == [b"old"]
    (folder / "c.bin").write_bytes(b"new" * 1_000)
    with pytest.raises(FileChangedError, match=r"c\.bin.*has been replaced"):
        read(remote, [Range(url, 0, 3, version)])
    assert read(remote, [Range(url, 0, 3)]) == [b"new"]


def test_the_first_error_ends_the_fetch(server: RangeServer, remote_of: Any) -> None:
    remote = remote_of()
    wanted = [*some(server, 1, 20), Range(f"{server.url}/nothing.bin", 0, 5), *some(server, 2, 20)]
    with pytest.raises(DataNotFoundError):
        read(remote, wanted)
    wanted = some(server, 3)
    assert read(remote, wanted) == right(wanted)  # nothing of it is left in the way


def test_many_threads(server: RangeServer, remote_of: Any) -> None:
    remote, wrong = remote_of(), []

    def work(seed: int) -> None:
        for number in range(5):
            wanted = some(server, 100 * seed + number, 10)
            if read(remote, wanted) != right(wanted):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def _read_in_child(remote: Remote, url: str, out: Any) -> None:
    out.send(read(remote, [Range(f"{url}/a.bin", 7, 700)]) == [CONTENT["a.bin"][7:700]])
    remote.close()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_worker_has_connections_of_its_own(
    server: RangeServer, remote_of: Any, method: str
) -> None:
    remote = remote_of()
    read(remote, some(server, 1, 5))
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=_read_in_child, args=(remote, server.url, there))
    process.start()
    there.close()
    assert here.poll(60) and here.recv()
    process.join(30)
    assert process.exitcode == 0
    process.close()
    here.close()
    wanted = some(server, 2, 5)
    assert read(remote, wanted) == right(wanted)


def _count_in_child(remote: Remote, out: Any) -> None:
    out.send(remote.take_counts())


def test_a_worker_counts_what_it_asked_for_itself(server: RangeServer, remote_of: Any) -> None:
    remote = remote_of()
    read(remote, some(server, 1, 5))
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_count_in_child, args=(remote, there))
    process.start()
    there.close()
    assert here.poll(60) and here.recv() == {}
    process.join(30)
    process.close()
    here.close()
    assert remote.take_counts()["requests"] > 0


def test_a_copy_is_the_same_server(server: RangeServer, remote_of: Any) -> None:
    copied, wanted = pickle.loads(pickle.dumps(remote_of(retries=2))), some(server, 1, 5)
    assert copied.retries == 2 and read(copied, wanted) == right(wanted)
    copied.close()


def test_a_file_system_that_is_not_asynchronous(memory: Any) -> None:
    memory.pipe("/x/a.bin", CONTENT["a.bin"])
    remote = remote_of_url("memory://x/a.bin")
    assert versions_of(remote, ["memory://x/a.bin"])[0].size == SIZE
    assert read(remote, [Range("memory://x/a.bin", 5, 50)]) == [CONTENT["a.bin"][5:50]]
    with pytest.raises(DataNotFoundError):
        read(remote, [Range("memory://x/b.bin", 5, 50)])
    remote.close()


@pytest.mark.parametrize(
    "options", [{"retries": -1}, {"retries": True}, {"deadline": 0}, {"deadline": float("inf")}]
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        remote_of_url("memory://x", **options)


# -- concurrency


def test_the_flow_follows_the_server() -> None:
    flow = Flow(1_000)
    for _ in range(3_000):
        flow.went_well()
    assert int(flow._limit) == MOST
    for _ in range(20):
        flow.went_badly()
    assert flow._limit == FEWEST


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("3", 3.0), ("0.5", 0.5), ("-2", 0.0), ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0), ("soon", None)],
)
def test_retry_after(said: str, seconds: float | None) -> None:
    assert (
        retry_after({"Retry-After": said}) == seconds
        and retry_after({}) is None
        and retry_after(None) is None
    )


# -- through the disk cache


class TestCached:
    @pytest.fixture
    def cached(self, server: RangeServer, tmp_path: Path) -> Iterator[RemoteFiles]:
        files = RemoteFiles(
            server.url + "/a.bin",
            RemoteOptions(deadline=30, cache_dir=tmp_path, disk_cache_size=20 * BLOCK),
        )
        yield files
        files.close()

    def test_each_block_is_fetched_once(self, server: RangeServer, cached: RemoteFiles) -> None:
        version = versions_of(cached._remote, [f"{server.url}/a.bin"])[0]
        for seed in range(4):
            wanted = [one for one in some(server, seed, 30, version) if one.path.endswith("a.bin")]
            assert read(cached, wanted) == right(wanted)
        ranges = [tuple(one) for one in server.counts()["ranges"]]
        assert (
            len(ranges) == len(set(ranges))
            and sum(stop - start for _, start, stop in ranges) == SIZE
        )
        assert cached.take_counts()["disk_hits"] > 0

    def test_a_damaged_block_is_fetched_again(
        self, server: RangeServer, cached: RemoteFiles
    ) -> None:
        version = versions_of(cached._remote, [f"{server.url}/a.bin"])[0]
        wanted = [Range(f"{server.url}/a.bin", 0, SIZE, version)]
        read(cached, wanted)
        assert cached.cache is not None
        for path in Path(cached.cache.folder).rglob("*.blk"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert read(cached, wanted) == right(wanted)
        assert cached.take_counts()["disk_damaged"] == 3

    def test_without_a_version_nothing_is_kept(
        self, server: RangeServer, cached: RemoteFiles
    ) -> None:
        wanted = some(server, 1)
        assert (
            read(cached, wanted) == right(wanted)
            and cached.cache is not None
            and not os.path.exists(cached.cache.folder)
        )

    def test_two_readers_fetch_a_block_once(self, server: RangeServer, cached: RemoteFiles) -> None:
        server.set(latency=0.1)
        version = versions_of(cached._remote, [f"{server.url}/a.bin"])[0]
        server.counts()
        wanted, got = [Range(f"{server.url}/a.bin", 0, SIZE, version)], []
        threads = [
            threading.Thread(target=lambda: got.append(read(cached, wanted))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert got == [right(wanted)] * 4 and server.counts()["bytes"] == SIZE

    def test_other_servers_are_other_files(self) -> None:
        one, other = (
            remote_of_url("s3://a/b", {"endpoint_url": url}).place
            for url in ("http://one", "http://other")
        )
        version = Version(5, '"x"')
        for number in (0, WHOLE):
            assert block_key(one, ("s3://a/b", number), version) != block_key(
                other, ("s3://a/b", number), version
            )

    def test_names_of_blocks_are_those_of_version_0_1(self) -> None:
        version, url = Version(5, '"x"'), "s3://a/b"
        assert block_key("place", (url, 3), version) == DiskCache.key(url, ("place", 5, '"x"'), 3)
        digest = hashlib.blake2b(b"(5, '\"x\"')", digest_size=8).digest()
        whole = DiskCache.key(url, ("place", "whole", int.from_bytes(digest, "little")), 0)
        assert (
            block_key("place", (url, WHOLE), version)
            == block_key("place", (url, WHOLE), version_hash(version))
            == whole
        )


def test_time_is_that_of_the_monotonic_clock(
    server: RangeServer, remote_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = iter(range(0, 10**9, 10**5))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))
    server.set(faults={"500": 0.5})
    wanted = some(server, 9, 10)
    assert read(remote_of(retries=20), wanted) == right(wanted)
