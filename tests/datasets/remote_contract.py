"""What every dataset promises of URLs: a contract that each format's tests subclass, and what
becomes of each fault on the way, which is the same for all formats.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import write_index
from headrace.errors import AccessError, FileChangedError, RemoteError, SampleError
from headrace.testing.contract import same
from tests.servers.ranges import RangeServer

FAULTS = ("500", "503", "429", "reset", "short", "less")
SECRET = "hunter2"


class RemoteDatasetContract:
    """Compares a dataset of URLs with its twin of local files.

    Attributes:
        names: of the files, below a folder or a server's URL.
        data: those that samples are read from, where it is not all of `names`.
    """

    names: tuple[str, ...]
    data: tuple[str, ...] = ()
    has_index = True
    """True if what lies where is found once, and a later start fetches no data."""
    has_index_beside = True
    """True if `write_index` writes this index beside each file."""
    is_versioned = True
    """True if all reads are of the version that a file had when the dataset was opened."""

    def write(self, folder: Path) -> None:
        """Writes the files."""
        raise NotImplementedError

    def make(self, paths: list[str], **options: Any) -> Any:
        """A dataset of these files: local paths or URLs of `names`, in that order."""
        raise NotImplementedError

    # -- fixtures

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("served")
        self.write(folder)
        return folder

    @pytest.fixture(scope="class")
    def running(self, folder: Path) -> Iterator[RangeServer]:
        with RangeServer(folder) as server:
            yield server

    @pytest.fixture
    def server(self, running: RangeServer, monkeypatch: pytest.MonkeyPatch) -> RangeServer:
        monkeypatch.setattr("headrace.io.remote.client._WAIT", 0.002)
        running.set(latency=0, bandwidth=0, faults={}, denied=[], seed=1)
        running.counts()
        return running

    @pytest.fixture
    def remote(self, server: RangeServer, tmp_path: Path) -> Iterator[Callable[..., Any]]:
        """The dataset of the server's URLs; `at` and `query` are added to each."""
        made: list[Any] = []

        def make(at: str = "", query: str = "", **options: Any) -> Any:
            options = {"cache_dir": tmp_path / "cache", "retries": 3, "deadline": 20, **options}
            urls = [f"{server.url}/{at}{name}{query}" for name in self.names]
            made.append(self.make(urls, **options))
            return made[-1]

        yield make
        for dataset in made:
            dataset.close()

    @pytest.fixture
    def local(self, folder: Path) -> Iterator[Any]:
        with self.make([str(folder / name) for name in self.names]) as dataset:
            yield dataset

    @pytest.fixture
    def copied(self, folder: Path) -> Iterator[Path]:
        """The folder `copied/` below the server's, which may be changed."""
        for name in self.names:
            source, target = folder / name, folder / "copied" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        yield folder / "copied"
        shutil.rmtree(folder / "copied")

    @staticmethod
    def epoch(loader_of: Any, dataset: Any, **options: Any) -> list[Any]:
        """Copies: a batch lies in a buffer that is used again. Without the URLs of shards."""
        loader = loader_of(dataset, **{"shuffle": "block", "interleave": 2, "turns": 2, **options})
        batches = [pickle.loads(pickle.dumps(batch)) for batch in loader]
        loader.close()
        for batch in batches:
            if isinstance(batch, dict):
                batch.pop("__url__", None)
        return batches

    # -- one value, one order

    def test_samples_are_those_of_local_files(
        self, remote: Any, local: Any, server: RangeServer, loader_of: Any
    ) -> None:
        dataset = remote(loading_mode="streaming")
        assert len(dataset) == len(local) > 3 and dataset.fingerprint == local.fingerprint
        assert np.array_equal(dataset.blocks(), local.blocks())
        expected = self.epoch(loader_of, local)
        assert same(self.epoch(loader_of, dataset), expected)
        in_order = self.epoch(loader_of, local, shuffle=False)
        assert same(self.epoch(loader_of, remote(), shuffle=False), in_order)
        server.counts()
        if self.has_index:
            remote()
            counts = server.counts()
            asked = {name for name, _, _ in counts["ranges"] if not name.endswith(".json")}
            assert not asked, "data were fetched by a later start"
            assert counts["requests"] <= 12 * len(self.names)

    def test_an_index_beside_is_used(
        self, remote: Any, server: RangeServer, copied: Path, local: Any, loader_of: Any
    ) -> None:
        if not (self.has_index and self.has_index_beside):
            pytest.skip("there is none")
        assert all(
            map(
                os.path.exists,
                write_index([str(copied / name) for name in self.data or self.names]),
            )
        )
        server.counts()
        dataset = remote("copied/")
        kinds = {name.rpartition(".")[2] for name, _, _ in server.counts()["ranges"]}
        assert kinds <= {"index", "json"}
        assert same(self.epoch(loader_of, dataset), self.epoch(loader_of, local))

    @pytest.mark.falls_back
    def test_a_file_that_is_replaced_ends_the_epoch(
        self, remote: Any, copied: Path, loader_of: Any
    ) -> None:
        """Whatever is done with bad samples: the rest would be of another file."""
        modes = (("streaming", "skip"), ("lazy", "raise"))
        datasets = [remote("copied/", loading_mode=mode, on_error=how) for mode, how in modes]
        for name in self.data or self.names:
            os.utime(copied / name, (1, 1))  # another version of it
        for dataset in datasets:
            if self.is_versioned:
                with pytest.raises(FileChangedError):
                    self.epoch(loader_of, dataset)
            else:
                assert self.epoch(loader_of, dataset)
        assert self.epoch(loader_of, remote("copied/"))


class RemoteFaultContract(RemoteDatasetContract):
    """Every fault on the way: of one format that is read by ranges, and of one of whole files."""

    asks_when_opened = True
    """True if opening the dataset takes requests."""

    def test_copies_and_workers_read_the_same(
        self, remote: Any, local: Any, loader_of: Any
    ) -> None:
        dataset = remote()
        dataset.__getitems__([0])
        with pickle.loads(pickle.dumps(dataset)) as copy:
            assert same(copy.__getitems__([2, 1]), local.__getitems__([2, 1]))
        batches = self.epoch(loader_of, remote(loading_mode="streaming"), num_workers=2)
        assert same(batches, self.epoch(loader_of, local))

    def test_the_disk_cache_serves_the_next_start(
        self, remote: Any, server: RangeServer, local: Any, loader_of: Any
    ) -> None:
        for attempt in range(2):
            server.counts()
            dataset = remote(disk_cache_size="50MB")
            assert same(self.epoch(loader_of, dataset), self.epoch(loader_of, local))
            assert bool(server.counts()["ranges"]) != bool(attempt)

    def test_a_third_of_all_requests_fail(
        self, remote: Any, server: RangeServer, local: Any, loader_of: Any
    ) -> None:
        # nobody knows how long a whole file should be
        kinds = FAULTS if self.is_versioned else FAULTS[:-1]
        server.set(faults={kind: 0.33 / len(kinds) for kind in kinds})
        for mode in ("lazy", "streaming"):
            dataset = remote(retries=30, deadline=60, loading_mode=mode)
            assert same(self.epoch(loader_of, dataset), self.epoch(loader_of, local))
        assert server.counts()["faults"]

    @pytest.mark.falls_back
    @pytest.mark.usefixtures("own_cache")
    def test_what_does_not_pass_is_an_error(
        self, remote: Any, server: RangeServer, loader_of: Any
    ) -> None:
        for fault, error, named in (
            ("503", RemoteError, "503"),
            ("short", RemoteError, r"\d attempts?"),
            ("403", AccessError, "denied"),
        ):
            for mode in ("lazy", "streaming"):
                server.set(faults={})
                dataset = remote(retries=1, loading_mode=mode)
                server.set(faults={fault: 1})
                with pytest.raises((error, SampleError), match=named):
                    self.epoch(loader_of, dataset)
        server.set(faults={"503": 1})
        if self.asks_when_opened:
            with pytest.raises(RemoteError, match="503"):
                remote(retries=0, cache_dir=None)

    @pytest.mark.falls_back
    def test_secrets_are_never_shown(
        self, remote: Any, server: RangeServer, tmp_path: Path, loader_of: Any
    ) -> None:
        options = {"storage_options": {"headers": {"x": SECRET}}, "retries": 0}
        dataset = remote(query=f"?key={SECRET}", disk_cache_size="10MB", **options)
        shown = [repr(dataset), dataset.explain(), str(dataset.source_of(0)), dataset.fingerprint]
        self.epoch(loader_of, dataset)
        again = remote(query=f"?key={SECRET}", cache_dir=tmp_path / "other", **options)
        server.set(faults={"403": 1})
        with pytest.raises((AccessError, SampleError)) as caught:
            self.epoch(loader_of, again)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        shown += [str(caught.value), *(path.read_bytes().decode("latin-1") for path in files)]
        assert [text for text in shown if SECRET in text] == []
