"""Shards behind URLs: the samples of those on a disk, and what each costs in requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import ConfigError, StreamingDataset
from headrace.formats.tar import TarSource
from headrace.io.remote.options import RemoteOptions
from tests.data.make import make_shards, make_tar
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.slow

COUNTS = (40, 0, 7, 61, 1, 90, 33)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    large = np.random.default_rng(0).bytes(3_000_000)
    make_tar(made / "large.tar", [(f"{n}.bin", large[n * 10 :]) for n in range(6)])
    make_tar(made / "small.tar", [(f"{n}.bin", large[:20_000]) for n in range(300)])
    return make_shards(made, COUNTS)


@pytest.fixture
def stream(server: RangeServer, tmp_path: Path) -> Iterator[Any]:
    reach: Any = {"cache_dir": tmp_path / "cache", "retries": 20, "deadline": 20}
    with ExitStack() as stack:
        yield lambda urls, **options: stack.enter_context(
            StreamingDataset(f"{server.url}/{urls}", **reach, **options)
        )


def test_what_an_index_costs(stream: Any, server: RangeServer, tmp_path: Path) -> None:
    """Headers of large members are hopped to; of small ones 1, 2 and then 4 MiB are read."""
    dataset = stream("large.tar")
    assert len(dataset) == 6
    assert server.counts()["bytes"] < 2 << 20
    assert sum(len(sample["bin"]) for sample in dataset) == 6 * 3_000_000 - 150
    server.counts()
    source = TarSource(f"{server.url}/small.tar", reach=RemoteOptions(cache_dir=tmp_path / "cache"))
    assert len(source) == 300
    lengths = [stop - start for _, start, stop in server.counts()["ranges"]]
    assert lengths[:2] == [1 << 20, 2 << 20]
    source.close()


def test_kinds_and_servers_are_not_mixed(server: RangeServer) -> None:
    first = f"{server.url}/part-000.tar"
    for other, said in (
        (f"{server.url}/a.jsonl", "reads one kind"),
        ("memory://part-001.tar", "file system"),
    ):
        with pytest.raises(ConfigError, match=said):
            StreamingDataset([first, other])
