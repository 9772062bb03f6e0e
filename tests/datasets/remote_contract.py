"""What every dataset promises of URLs: a contract that each format's tests subclass."""

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
SLOW = pytest.mark.slow


class RemoteDatasetContract:
    """Compares a dataset of URLs with its twin of local files, and looks at what becomes of what
    goes wrong on the way.

    Attributes:
        names: of the files, below a folder or a server's URL.
        data: those that samples are read from, where it is not all of `names`.
    """

    names: tuple[str, ...]
    data: tuple[str, ...] = ()
    has_index = True
    """True if `write_index` writes an index beside each file, and a later start fetches no data."""
    asks_when_opened = True
    """True if opening the dataset takes requests."""
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
            made.append(
                self.make([f"{server.url}/{at}{name}{query}" for name in self.names], **options)
            )
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

    def _files(self) -> tuple[str, ...]:
        return self.data or self.names

    @staticmethod
    def epoch(loader_of: Any, dataset: Any, **options: Any) -> list[Any]:
        """Copies: a batch lies in a buffer that is used again. Without the URLs of shards."""
        loader = loader_of(dataset, **{"shuffle": "block", "interleave": 2, "turns": 2, **options})
        found = [pickle.loads(pickle.dumps(batch)) for batch in loader]
        loader.close()
        return [
            {name: value for name, value in batch.items() if name != "__url__"}
            if isinstance(batch, dict)
            else batch
            for batch in found
        ]

    # -- one value, one order

    @pytest.mark.parametrize(
        "mode",
        [
            "lazy",
            pytest.param("eager", marks=SLOW),
            pytest.param("cached", marks=SLOW),
            "streaming",
        ],
    )
    def test_samples_and_order_are_those_of_local_files(
        self, mode: str, remote: Any, local: Any, loader_of: Any
    ) -> None:
        dataset = remote(loading_mode=mode)
        assert len(dataset) == len(local) > 3 and dataset.fingerprint == local.fingerprint
        assert (dataset.blocks() is None) == (local.blocks() is None) and np.array_equal(
            dataset.blocks(), local.blocks()
        )
        for shuffle in (False, "block"):
            assert same(
                self.epoch(loader_of, dataset, shuffle=shuffle),
                self.epoch(loader_of, local, shuffle=shuffle),
            )

    def test_workers_give_the_same(self, remote: Any, local: Any, loader_of: Any) -> None:
        assert same(
            self.epoch(loader_of, remote(loading_mode="streaming"), num_workers=2),
            self.epoch(loader_of, local),
        )

    def test_a_copy_by_pickle_reads_on(self, remote: Any, local: Any) -> None:
        dataset = remote()
        dataset.__getitems__([0])
        with pickle.loads(pickle.dumps(dataset)) as copy:
            assert same(
                [*map(self._bare, copy.__getitems__([2, 1]))],
                [*map(self._bare, local.__getitems__([2, 1]))],
            )

    @staticmethod
    def _bare(sample: Any) -> Any:
        return (
            {name: value for name, value in sample.items() if name != "__url__"}
            if isinstance(sample, dict)
            else sample
        )

    # -- what is asked for

    def test_a_later_start_is_cheap(self, remote: Any, server: RangeServer) -> None:
        if self.has_index:
            remote().close()
            server.counts()
            remote()
            counts = server.counts()
            # the metadata of a store
            assert all(name.endswith(".json") for name, _, _ in counts["ranges"])
            assert counts["requests"] <= 12 * len(self.names)

    def test_an_index_beside_is_used(
        self, remote: Any, server: RangeServer, copied: Path, local: Any, loader_of: Any
    ) -> None:
        if self.has_index:
            for path in write_index([str(copied / name) for name in self.names]):
                assert os.path.exists(path)
            server.counts()
            dataset = remote("copied/")
            assert {name.rpartition(".")[2] for name, _, _ in server.counts()["ranges"]} <= {
                "index",
                "json",
            }
            assert same(self.epoch(loader_of, dataset), self.epoch(loader_of, local))

    def test_the_disk_cache_serves_the_next_start(
        self, remote: Any, server: RangeServer, local: Any, loader_of: Any
    ) -> None:
        expected = self.epoch(loader_of, local)
        for attempt in range(2):
            server.counts()
            assert same(self.epoch(loader_of, remote(disk_cache_size="50MB")), expected)
            ranges = [
                name for name, _, _ in server.counts()["ranges"] if not name.endswith(".json")
            ]
            assert bool(ranges) != bool(attempt)

    # -- what goes wrong

    @pytest.mark.parametrize("mode", [pytest.param("lazy", marks=SLOW), "streaming"])
    def test_a_third_of_all_requests_fail(
        self, mode: str, remote: Any, server: RangeServer, local: Any, loader_of: Any
    ) -> None:
        # nobody knows how long a whole file should be
        kinds = FAULTS if self.is_versioned else FAULTS[:-1]
        server.set(faults={kind: 0.33 / len(kinds) for kind in kinds})
        assert same(
            self.epoch(loader_of, remote(retries=30, deadline=60, loading_mode=mode)),
            self.epoch(loader_of, local),
        )
        assert server.counts()["faults"]

    @pytest.mark.falls_back
    @pytest.mark.parametrize("mode", [pytest.param("lazy", marks=SLOW), "streaming"])
    def test_a_server_that_is_gone_is_an_error(
        self, mode: str, remote: Any, server: RangeServer, loader_of: Any
    ) -> None:
        dataset = remote(retries=1, loading_mode=mode)
        server.set(faults={"503": 1})
        with pytest.raises(
            (RemoteError, SampleError), match=r"\d attempts? .* the server says 503"
        ):
            self.epoch(loader_of, dataset)
        if self.asks_when_opened:
            with pytest.raises(RemoteError, match="the server says 503"):
                remote(retries=0, cache_dir=None)

    @pytest.mark.falls_back
    @pytest.mark.usefixtures("own_cache")
    def test_what_comes_cut_short_is_an_error(
        self, remote: Any, server: RangeServer, loader_of: Any
    ) -> None:
        dataset = remote(retries=1)
        server.set(faults={"short": 1})
        with pytest.raises((RemoteError, SampleError), match=r"\d attempts?"):
            self.epoch(loader_of, dataset)

    @pytest.mark.falls_back
    def test_a_file_that_is_denied_is_an_error(
        self, remote: Any, server: RangeServer, loader_of: Any
    ) -> None:
        dataset = remote()
        server.set(faults={"403": 1})
        with pytest.raises((AccessError, SampleError), match="access is denied"):
            self.epoch(loader_of, dataset)

    @pytest.mark.parametrize("on_error", ["raise", "skip"])
    @pytest.mark.parametrize("mode", [pytest.param("lazy", marks=SLOW), "streaming"])
    @pytest.mark.falls_back
    def test_a_file_that_is_replaced_ends_the_epoch(
        self, mode: str, on_error: str, remote: Any, copied: Path, loader_of: Any
    ) -> None:
        """Whatever is done with bad samples: the rest would be of another file."""
        dataset = remote("copied/", loading_mode=mode, on_error=on_error)
        for name in self._files():
            os.utime(copied / name, (1, 1))  # another version of it
        if self.is_versioned:
            with pytest.raises(FileChangedError, match="replaced since it was opened"):
                self.epoch(loader_of, dataset)
        else:
            assert self.epoch(loader_of, dataset)
        assert self.epoch(loader_of, remote("copied/"))

    # -- what is shown

    @pytest.mark.falls_back
    def test_secrets_are_never_shown(
        self, remote: Any, server: RangeServer, tmp_path: Path, loader_of: Any
    ) -> None:
        options = {
            "storage_options": {"headers": {"x": SECRET}},
            "retries": 0,
            "disk_cache_size": "10MB",
        }
        dataset = remote(query=f"?key={SECRET}", **options)
        shown = [repr(dataset), dataset.explain(), str(dataset.source_of(0)), dataset.fingerprint]
        self.epoch(loader_of, dataset)
        again = remote(
            query=f"?key={SECRET}",
            **{**options, "cache_dir": tmp_path / "other", "disk_cache_size": None},
        )
        server.set(faults={"403": 1})
        with pytest.raises((AccessError, SampleError)) as caught:
            self.epoch(loader_of, again)
        shown += [
            str(caught.value),
            *(
                path.read_bytes().decode("latin-1")
                for path in tmp_path.rglob("*")
                if path.is_file()
            ),
        ]
        assert [text for text in shown if SECRET in text] == []
