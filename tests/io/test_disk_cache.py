"""The disk cache: what it keeps, and what it does when the disk, the folder or another process
fails.
"""

import errno
import multiprocessing
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from headrace import ConfigError, HeadraceWarning
from headrace.io import disk_cache
from headrace.io.disk_cache import DiskCache
from tests.io.cache_soak import claimed, nbytes_of, soak
from tests.io.remote.reading import in_threads

DATA = b"water" * 1_000


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(str(tmp_path), 100_000)


def key(number: int, url: str = "s3://a/b", version: object = "1") -> str:
    return DiskCache.key(url, version, number)


def fill(cache: DiskCache, numbers: range) -> None:
    for number in numbers:
        assert cache.put(key(number), DATA)


def test_what_is_put_is_got(cache: DiskCache, tmp_path: Path) -> None:
    assert cache.get(key(1)) is None
    for number, data in ((1, DATA), (2, b"")):
        assert cache.put(key(number), data)
        assert cache.get(key(number)) == data
    assert cache.take_counts() == {"disk_puts": 2, "disk_hits": 2}
    assert not cache.take_counts()
    assert "5.0 kB of 100.0 kB" in cache.explain()
    assert pickle.loads(pickle.dumps(cache)).get(key(1)) == DATA
    assert DiskCache(str(tmp_path), 10**9).get(key(1)) == DATA


def test_names_tell_files_versions_and_places_apart() -> None:
    names = {
        key(number, url, version)
        for number in (0, 1)
        for url in ("s3://a/b", "s3://b/b")
        for version in ("1", "2", None, ("1", 2))
    }
    assert len(names) == 16


def test_a_damaged_block_is_none(cache: DiskCache) -> None:
    cache.put(key(1), DATA)
    path = Path(cache._path(key(1)))
    whole = path.read_bytes()
    for damaged in (whole[:-3] + b"x" + whole[-2:], whole[:-1], whole + b"x", b"", whole[:10]):
        path.write_bytes(damaged)
        assert cache.get(key(1)) is None
        assert not path.exists()
        assert cache.take_counts()["disk_damaged"] == 1
        assert cache.put(key(1), DATA)
        assert cache.get(key(1)) == DATA


def test_links_and_blocks_of_others_are_not_trusted(cache: DiskCache, tmp_path: Path) -> None:
    path = Path(cache._path(key(1)))
    cache.put(key(1), DATA)
    path.chmod(0o666)
    assert cache.get(key(1)) is None
    cache.put(key(1), DATA)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.get(key(1)) is None


class TestLimit:
    def test_what_was_not_used_for_longest_goes(self, cache: DiskCache, tmp_path: Path) -> None:
        for number in range(19):
            assert cache.put(key(number), DATA)
            os.utime(cache._path(key(number)), (1_000 + number, 1_000 + number))
        assert cache.get(key(0)) == DATA  # used now
        fill(cache, range(19, 21))
        held = [number for number in range(21) if os.path.exists(cache._path(key(number)))]
        assert {0, 18, 19, 20} <= set(held)
        assert 1 not in held
        assert nbytes_of(cache.folder)[0] <= cache.limit
        # larger than the limit
        assert not cache.put(key(99), bytes(100_000))
        assert cache.get(key(20)) == DATA
        # a smaller limit counts at the next block
        assert DiskCache(str(tmp_path), 20_000).put(key(99), DATA)
        assert nbytes_of(cache.folder)[0] <= 20_000

    def test_a_lost_ledger_is_made_anew(self, cache: DiskCache) -> None:
        for ledger in [b"", b"nonsense", b"%32d" % (1 << 50)]:
            fill(cache, range(15))
            Path(cache.folder, "ledger").write_bytes(ledger)
            fill(cache, range(15, 60))
            assert nbytes_of(cache.folder)[0] <= cache.limit

    def test_the_part_of_a_dead_writer_goes_with_the_next_eviction(self, cache: DiskCache) -> None:
        cache.put(key(1), DATA)
        dead = Path(f"{cache._path(key(1))}.1-1-50000.part")
        dead.write_bytes(bytes(40_000))
        Path(cache.folder, "ledger").unlink()
        cache.put(key(2), DATA)
        assert not dead.exists()

    def test_the_part_of_a_living_writer_counts(self, cache: DiskCache) -> None:
        cache._make_folder()
        fd = cache._reserve(f"{cache._path(key(1))}.1-1-80000.part", 80_000)
        assert fd is not None
        for number in range(10, 30):
            cache.put(key(number), DATA)
            Path(cache.folder, "ledger").write_bytes(b"")  # each looks at the folder
            assert nbytes_of(cache.folder)[0] <= 20_000
        os.close(fd)


class TestTrouble:
    def test_a_full_disk(self, cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
        cache.put(key(0), DATA)

        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(disk_cache, "write_full", full)
        with pytest.warns(HeadraceWarning, match="the disk is full"):
            assert not cache.put(key(1), DATA)
        assert not cache.put(key(2), DATA)  # said once, and not tried again for a while
        assert nbytes_of(cache.folder) == (len(DATA) + 20, 0)
        assert cache.get(key(0)) == DATA
        with cache._ledger() as ledger:
            assert disk_cache._read_ledger(ledger) == len(DATA) + 20

    def test_a_folder_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        cache = DiskCache(str(tmp_path / "file"), 1_000)
        with pytest.warns(HeadraceWarning, match="nothing is written to the disk cache"):
            assert not cache.put(key(1), b"x")
        assert cache.get(key(1)) is None
        assert "nothing of" in cache.explain()
        with claimed(cache, [key(1)], 1):
            pass
        for limit in (0, -5):
            with pytest.raises(ConfigError):
                DiskCache(str(tmp_path), limit)

    def test_a_folder_that_others_may_write_to(self, cache: DiskCache) -> None:
        os.makedirs(cache.folder)
        os.chmod(cache.folder, 0o777)
        with pytest.warns(HeadraceWarning, match="others may write to it"):
            assert not cache.put(key(1), DATA)

    def test_somebody_who_holds_the_ledger_for_ever(
        self, cache: DiskCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(disk_cache, "_PATIENCE_S", 0.05)
        cache.put(key(1), DATA)
        with cache._ledger(), pytest.warns(HeadraceWarning, match="does not go on"):
            assert not cache.put(key(2), DATA)


class TestClaims:
    def test_one_at_a_time_in_whatever_order(self, cache: DiskCache) -> None:
        keys, inside, most = [key(number) for number in range(40)], [0], [0]

        def fetch(number: int) -> None:
            with claimed(cache, keys if number % 2 else keys[::-1], 30):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.01)
                inside[0] -= 1

        in_threads(6, fetch)
        assert most == [1]

    def test_patience_ends(self, cache: DiskCache) -> None:
        def wait(_: int) -> bool:
            with claimed(cache, [key(1)], 0.05):
                return True

        with claimed(cache, [key(1)], 5):
            assert in_threads(1, wait) == [True]

    def test_a_killed_process_holds_nothing(self, cache: DiskCache) -> None:
        context = multiprocessing.get_context("fork")
        has_it = context.Event()

        def hold() -> None:
            with claimed(cache, [key(1)], 5):
                has_it.set()
                time.sleep(600)

        process = context.Process(target=hold)
        process.start()
        assert has_it.wait(30)
        process.kill()
        process.join(30)
        process.close()
        began = time.monotonic()
        with claimed(cache, [key(1)], 60):
            pass
        assert time.monotonic() - began < 59  # it had it, and did not give up


@pytest.mark.usefixtures("synced")
@pytest.mark.parametrize(
    ("kills", "processes"),
    [
        pytest.param(12, 3, marks=pytest.mark.slow),
        pytest.param(1000, 4, marks=[pytest.mark.nightly, pytest.mark.timeout(900)]),
    ],
)
def test_killed_over_and_over(tmp_path: Path, kills: int, processes: int) -> None:
    soak(str(tmp_path), kills, processes, seed=4)
