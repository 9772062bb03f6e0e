"""Fetching: the right bytes, or an error in time, whatever the server does."""

import functools
import random
import time
from typing import Any

import pytest

from headrace import ConfigError
from headrace.errors import DataNotFoundError, RemoteError
from headrace.io.remote import client as module, requests
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote.requests import retry_after
from tests.io.remote import reading
from tests.io.remote.reading import Range, in_threads, read, versions_of
from tests.servers.ranges import RangeServer

SIZE = 3_000_000
CONTENT = {name: random.Random(name).randbytes(SIZE) for name in ("a.bin", "b.bin")}


@pytest.fixture
def remote_of(server: RangeServer, remote_of: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "_WAIT", 0.002)
    return functools.partial(remote_of, server.url + "/a.bin")


def some(server: RangeServer, seed: int, count: int = 40) -> list[Range]:
    return reading.some([f"{server.url}/{name}" for name in CONTENT], SIZE, seed, count)


def right(ranges: list[Range]) -> list[bytes]:
    return [CONTENT[one.path.rpartition("/")[2]][one.start : one.stop] for one in ranges]


def test_bytes_are_those_of_the_file(server: RangeServer, remote_of: Any) -> None:
    remote = remote_of()
    versions = versions_of(remote, [f"{server.url}/{name}" for name in CONTENT])
    assert [version.size for version in versions] == [SIZE, SIZE]
    assert versions[0].tag != versions[1].tag
    wanted = some(server, 1)
    assert read(remote, wanted) == right(wanted)
    assert read(remote, []) == []
    assert read(remote, [Range(f"{server.url}/a.bin", 5, 5)]) == [b""]
    counts = remote.take_counts()
    assert counts["requests"] < 40
    assert counts["retries"] == 0
    assert not remote.take_counts()


def test_requests_join_close_ranges_and_split_long_ones(
    server: RangeServer, remote_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [Range(f"{server.url}/a.bin", at, at + 100) for at in range(0, 50_000, 1_000)]
    assert read(remote_of(), wanted) == right(wanted)
    assert server.counts()["requests"] == 1
    monkeypatch.setattr(module, "MOST", 700_000)
    assert read(remote_of(), [Range(f"{server.url}/a.bin", 0, SIZE)]) == [CONTENT["a.bin"]]
    assert server.counts()["requests"] == 5


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("fault", ["500", "503", "429", "reset", "short", "less", "more", "whole"])
def test_every_fault_passes(
    server: RangeServer, remote_of: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = iter(range(0, 10**9, 10**5))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))  # no clock that is read
    server.set(faults={fault: 0.5})
    remote, wanted = remote_of(retries=30), some(server, 2, 25)
    assert read(remote, wanted) == right(wanted)
    seen = sum(server.counts()["faults"].values())
    # after a reset aiohttp asks once more by itself
    assert remote.take_counts()["retries"] >= seen / 3 > 0
    versions = versions_of(remote, [f"{server.url}/a.bin"] * 5)
    assert [version.size for version in versions] == [SIZE] * 5


def test_when_all_fail_it_says_so(server: RangeServer, remote_of: Any) -> None:
    url = f"{server.url}/a.bin"
    for fault, said in {
        "500": "the server says 500",
        "reset": "Disconnected|Reset",
        "less": "the answer has",
        "whole": "whole files",
    }.items():
        server.set(faults={fault: 1})
        wanted = rf"a\.bin, bytes 10 to 90: 4 attempts in .*({said}).*retries=3, deadline=30"
        with pytest.raises(RemoteError, match=wanted):
            read(remote_of(retries=3), [Range(url, 10, 90)])
        assert 4 <= server.counts()["requests"] <= 8, fault  # aiohttp asks again after a reset
    server.set(faults={"500": 1})
    with pytest.raises(RemoteError, match=r"a\.bin: 3 attempts"):
        versions_of(remote_of(retries=2), [url])


def test_a_server_that_never_answers(server: RangeServer, remote_of: Any) -> None:
    server.set(faults={"hang": 1})
    with pytest.raises(RemoteError, match="nothing came in time"):
        read(remote_of(retries=2, deadline=0.4), some(server, 1, 3))


@pytest.mark.slow
def test_a_slow_line_is_no_fault(
    server: RangeServer, remote_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes takes longer than an attempt is given, and than all of them are; nothing of it
    is thrown away.
    """
    monkeypatch.setattr(requests, "PART", 4 << 10)
    server.set(bandwidth=400_000)
    remote, wanted = remote_of(retries=3, deadline=0.6), [Range(f"{server.url}/a.bin", 0, 600_000)]
    assert read(remote, wanted) == right(wanted)
    assert remote.take_counts() == {"requests": 1, "bytes_fetched": 600_000}


@pytest.mark.slow
def test_a_line_that_is_too_slow(
    server: RangeServer, remote_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "PART", 1 << 10)
    monkeypatch.setattr(requests, "SLOWEST", 1 << 20)
    server.set(bandwidth=200_000)
    with pytest.raises(RemoteError, match=r"only [\d,]+ bytes came in time"):
        read(remote_of(retries=0, deadline=3), [Range(f"{server.url}/a.bin", 0, SIZE)])


def test_a_file_that_is_missing_ends_the_fetch(server: RangeServer, remote_of: Any) -> None:
    remote, missing = remote_of(), f"{server.url}/nothing.bin?token=secret"
    wanted = [*some(server, 1, 20), Range(missing, 0, 5), *some(server, 2, 20)]
    for ask in (lambda: read(remote, wanted), lambda: versions_of(remote, [missing])):
        with pytest.raises(DataNotFoundError, match=r"nothing\.bin") as caught:
            ask()
        assert "secret" not in str(caught.value)
    wanted = some(server, 3)
    assert read(remote, wanted) == right(wanted)  # nothing of it is left in the way


def test_many_threads(server: RangeServer, remote_of: Any) -> None:
    remote = remote_of()

    def work(seed: int) -> bool:
        chosen = [some(server, 100 * seed + number, 10) for number in range(5)]
        return all(read(remote, wanted) == right(wanted) for wanted in chosen)

    assert in_threads(6, work) == [True] * 6


def test_options_that_make_no_sense() -> None:
    for name, value in (("retries", -1), ("retries", True), ("deadline", 0)):
        with pytest.raises(ConfigError, match=name):
            RemoteOptions(**{name: value})
    with pytest.raises(ConfigError, match="deadline"):
        RemoteOptions(deadline=float("inf"))


def test_retry_after() -> None:
    past = "Thu, 01 Jan 1970 00:00:00 GMT"
    for said, seconds in {"3": 3.0, "0.5": 0.5, "-2": 0.0, past: 0.0, "soon": None}.items():
        assert retry_after({"Retry-After": said}) == seconds, said
    assert retry_after({}) is None
    assert retry_after(None) is None
