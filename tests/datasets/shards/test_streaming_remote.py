"""Shards behind URLs: the samples of those on a disk, and what each costs in requests."""

from __future__ import annotations

import gzip
import io
import math
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import ConfigError, StreamingDataset, TarSource
from headrace.errors import AccessError, DataNotFoundError, FormatError, HeadraceWarning
from headrace.io.remote.options import RemoteOptions
from headrace.storage.text import source as texts
from headrace.testing.contract import same
from tests.data.make import make_shards, make_tar
from tests.datasets.shards.test_streaming import IN_MODE
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.slow

COUNTS = (40, 0, 7, 61, 1, 90, 33)
N = sum(COUNTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    large = np.random.default_rng(0).bytes(3_000_000)
    make_tar(made / "large.tar", [(f"{n}.bin", large[n * 10 :]) for n in range(6)])
    return make_shards(made, COUNTS)


@pytest.fixture
def stream(server: RangeServer, tmp_path: Path) -> Iterator[Any]:
    made: list[StreamingDataset] = []

    def make(urls: str = "part-{000..006}.tar", **options: Any) -> StreamingDataset:
        made.append(
            StreamingDataset(
                f"{server.url}/{urls}",
                **{"cache_dir": tmp_path / "cache", "retries": 20, "deadline": 20, **options},
            )
        )
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


def without_url(samples: Any) -> list[Any]:
    return [
        {name: value for name, value in sample.items() if name != "__url__"} for sample in samples
    ]


def numbers(loader: Any) -> list[list[int]]:
    return [batch["cls"].tolist() for batch in loader]


@pytest.mark.quick_every(1)
def test_samples_and_order_are_those_of_local_shards(stream: Any, folder: Path) -> None:
    far, near = stream(), StreamingDataset(str(folder / "part-*.tar"), buffer_size=1000)
    assert (
        far.fingerprint == near.fingerprint
        and np.array_equal(far.blocks(), near.blocks())
        and len(far) == N
    )
    samples = list(far)
    assert same(without_url(samples), without_url(near))
    assert all(
        re.fullmatch(r"http://127\.0\.0\.1:\d+/part-00\d\.tar", sample["__url__"])
        for sample in samples
    )


@pytest.mark.parametrize("world", [1, 4])
def test_each_block_is_fetched_once(
    stream: Any, server: RangeServer, make_loader: Any, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ranks with two workers each, one after the other; what the lanes' ends cut, twice."""
    monkeypatch.setattr("headrace.storage.blocks.LONGEST", 8 << 10)
    dataset, seen, requests = stream(buffer_size=24), Counter[int](), 0
    blocks = dataset.blocks()
    order = dataset.epoch_order("block", 42, 0, 16)
    assert len(blocks) > 80 and order.interleave == 8
    server.counts()
    for rank in range(world):
        loader = make_loader(
            stream(buffer_size=24),
            batch_size=16 // world,
            num_workers=2,
            rank=rank,
            world_size=world,
        )
        assert server.counts()["ranges"] == []  # the index is kept
        seen.update(number for batch in numbers(loader) for number in batch)
        loader.close()
        requests += len(server.counts()["ranges"])
    assert set(seen) == set(range(N)) and sum(seen.values()) == N + -N % world
    assert (
        len(blocks) <= requests <= len(blocks) + order.interleave * order.turns - 1 + (-N % world)
    )


@pytest.mark.parametrize(("world", "workers"), [(3, 0), (1, 5)])
def test_what_shared_lanes_cost_is_said(
    stream: Any,
    server: RangeServer,
    make_loader: Any,
    world: int,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By arithmetic, before anything is fetched. The server counts fewer where both parts of a
    cut block fall to one process.
    """
    monkeypatch.setattr("headrace.storage.blocks.LONGEST", 8 << 10)
    fetches, said = 0, ""
    for rank in range(world):
        loader = make_loader(
            stream(buffer_size=24), batch_size=6, num_workers=workers, rank=rank, world_size=world
        )
        said = loader.explain()
        server.counts()
        list(loader)
        loader.close()
        fetches += len(server.counts()["ranges"])
    assert "each fetched as a whole" in said
    reason = (
        r"interleave=8 is no multiple of world_size=3"
        if world == 3
        else r"turns=\d+ is no multiple of num_workers=5"
    )
    found = re.search(
        r"processes on average: (\d+) fetches at most an epoch over all ranks and workers", said
    )
    assert (
        re.search(reason, said) is not None
        and found is not None
        and 0.8 * int(found[1]) < fetches <= int(found[1])
    )


@pytest.mark.slow
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_workers_that_are_no_forks_go_on_with_the_index(
    stream: Any, server: RangeServer, make_loader: Any, start: str
) -> None:
    dataset = stream()
    server.counts()
    loader = make_loader(dataset, batch_size=16, num_workers=1, multiprocessing_context=start)
    assert sorted(number for batch in numbers(loader) for number in batch) == list(range(N))
    blocks, counts = dataset.blocks(), server.counts()
    # nobody asks for versions again
    assert blocks is not None and counts["requests"] == len(counts["ranges"])
    assert (
        len(blocks) <= counts["requests"] <= len(blocks) + math.prod(dataset.lanes(len(blocks))) - 1
    )


def test_the_index_is_kept_in_the_users_cache_folder(
    stream: Any, server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    for _ in range(2):
        server.counts()
        stream("part-003.tar", cache_dir=None)
    assert server.counts()["ranges"] == []


def test_headers_of_large_members_are_hopped_to(stream: Any, server: RangeServer) -> None:
    dataset = stream("large.tar")
    found = server.counts()
    assert len(dataset) == 6 and found["bytes"] < 2 << 20
    assert sum(sample["bin"].__len__() for sample in dataset) == 6 * 3_000_000 - 150


def test_small_members_take_few_requests(tmp_path: Path) -> None:
    """Of a tar of 6 MB: 1, 2 and then 4 MiB, whatever the number of members."""
    data = np.random.default_rng(0).bytes(20_000)
    make_tar(tmp_path / "a.tar", [(f"{n}.bin", data) for n in range(300)])
    with RangeServer(tmp_path) as server:
        source = TarSource(f"{server.url}/a.tar", reach=RemoteOptions(cache_dir=tmp_path / "cache"))
        assert len(source) == 300 and [
            stop - start for _, start, stop in server.counts()["ranges"]
        ][:2] == [1 << 20, 2 << 20]
        source.close()


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
def test_samples_are_the_same_in_every_mode(
    server: RangeServer, folder: Path, tmp_path: Path, mode: str
) -> None:
    near = IN_MODE["lazy"](folder / "part-003.tar")
    with IN_MODE[mode](f"{server.url}/part-003.tar", cache_dir=tmp_path, progress=False) as far:
        for some in ([5, 0, 60], [0, 1], range(61)):
            assert same(
                without_url(far.__getitems__(list(some))),
                without_url(near.__getitems__(list(some))),
            )


def test_four_ranks_are_gone_on_from_by_two(stream: Any, make_loader: Any) -> None:
    def loaders(ranks: int) -> list[Any]:
        options: dict[str, Any] = {"batch_size": 16 // ranks, "num_workers": 0, "world_size": ranks}
        return [make_loader(stream(), rank=rank, **options) for rank in range(ranks)]

    whole = [number for batch in numbers(loaders(1)[0]) for number in batch]
    states = []
    for loader in loaders(4):
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        states.append(loader.state_dict())
        del iterator
    rest = []
    for loader in loaders(2):
        loader.load_state_dict(states[0])
        rest.append(numbers(loader))
    together = [
        number
        for parts in zip(*rest, strict=True)
        for pair in zip(*parts, strict=True)
        for number in pair
    ]
    assert together == whole[5 * 16 :] and sorted(whole) == list(range(N))


def test_what_was_fetched_is_kept_on_disk(stream: Any, server: RangeServer) -> None:
    first = list(stream(disk_cache_size="50MB"))
    server.counts()
    assert same(list(stream(disk_cache_size="50MB")), first) and server.counts()["ranges"] == []


def test_damaged_shards_are_named(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "part-002.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:5000])
    (tmp_path / "flipped.tar").write_bytes(whole[:100] + b"\xff" + whole[101:])
    (tmp_path / "empty.tar").write_bytes(b"")
    with RangeServer(tmp_path) as server:
        for name, said in (
            ("cut", "ends at byte 5,000"),
            ("flipped", "the header at byte 0 is none"),
            ("empty", r"is empty \(0 bytes\)"),
        ):
            with pytest.raises(
                FormatError,
                match=rf"http://127.0.0.1:\d+/{name}\.tar.* {said}|{name}\.tar.* {said}",
            ):
                StreamingDataset(f"{server.url}/{name}.tar", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("ending", ["jsonl", "txt", "jsonl.gz"])
def test_lines(
    stream: Any,
    folder: Path,
    server: RangeServer,
    make_loader: Any,
    ending: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(texts, "block_length", lambda _: 200)
    for number in range(3):
        data = "".join(f'{{"n": {number * 100 + n}}}\n' for n in range(40 * number)).encode()
        (folder / f"rows-{number}.{ending}").write_bytes(
            gzip.compress(data) if ending.endswith("gz") else data
        )
    far, near = (
        stream(f"rows-{{0..2}}.{ending}", buffer_size=30),
        StreamingDataset(str(folder / f"rows-*.{ending}"), buffer_size=30),
    )
    assert (
        far.fingerprint == near.fingerprint
        and np.array_equal(far.blocks(), near.blocks())
        and len(far) == 120
    )
    assert list(far) == list(near)
    server.counts()
    lanes: Any = {"interleave": 2, "turns": 2}
    assert same(
        [*make_loader(far, batch_size=8, num_workers=2, **lanes)],
        [*make_loader(near, batch_size=8, num_workers=0, **lanes)],
    )
    assert len(server.counts()["ranges"]) <= (
        0 if ending.endswith("gz") else len(far.blocks()) + 2 * 2 - 1
    )
    for path in folder.glob("rows-*"):
        path.unlink()


def test_what_is_missing_is_said(stream: Any, server: RangeServer) -> None:
    with pytest.raises(DataNotFoundError, match=r"none-\d\.tar"):
        stream("none-{0..2}.tar")
    server.set(faults={"403": 1.0})
    with pytest.raises(AccessError, match="storage_options"):
        stream()


def test_kinds_and_servers_are_not_mixed(folder: Path, server: RangeServer) -> None:
    with pytest.raises(ConfigError, match="mixes URLs and local paths"):
        StreamingDataset([f"{server.url}/part-000.tar", str(folder / "part-001.tar")])
    with pytest.raises(ConfigError, match="several kinds"):
        StreamingDataset([f"{server.url}/part-000.tar", f"{server.url}/a.jsonl"])
    with pytest.raises(ConfigError, match="more than one file system"):
        StreamingDataset([f"{server.url}/part-000.tar", "memory://part-001.tar"])


def test_folders_and_globs_of_a_bucket_are_listed(
    memory: Any, folder: Path, tmp_path: Path
) -> None:
    for path in folder.glob("part-*.tar"):
        memory.pipe(f"/bucket/train/{path.name}", path.read_bytes())
    near = StreamingDataset(str(folder / "part-*.tar"))
    for urls in (
        "memory://bucket/train",
        "memory://bucket/train/*.tar",
        "memory://bucket/train/part-{000..006}.tar",
    ):
        dataset = StreamingDataset(urls, cache_dir=tmp_path / "cache")
        assert dataset.fingerprint == near.fingerprint
        samples = list(dataset)
        assert same(without_url(samples), without_url(near))
        assert {sample["__url__"].rpartition("/")[0] for sample in samples} == {
            "memory://bucket/train"
        }
        dataset.close()
    memory.pipe("/bucket/train/more.jsonl", b"{}")
    with pytest.raises(ConfigError, match="several kinds"):
        StreamingDataset("memory://bucket/train")


def test_file_urls_are_files(folder: Path, tmp_path: Path) -> None:
    near, far = (
        StreamingDataset(folder / "part-003.tar"),
        StreamingDataset((folder / "part-003.tar").as_uri(), cache_dir=tmp_path),
    )
    assert far.fingerprint == near.fingerprint and same(without_url(far), without_url(near))
    far.close()


def test_links_in_shards_that_are_far_away(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        info, link = tarfile.TarInfo("0.cls"), tarfile.TarInfo("1.cls")
        info.size, link.type, link.linkname = 1, tarfile.SYMTYPE, "0.cls"
        file.addfile(info, io.BytesIO(b"4"))
        file.addfile(link)
    with RangeServer(tmp_path) as server:
        for _ in range(2):  # made, and kept
            with pytest.warns(HeadraceWarning, match="1 members are links"):
                dataset = StreamingDataset(f"{server.url}/a.tar", cache_dir=tmp_path / "cache")
            dataset.close()
