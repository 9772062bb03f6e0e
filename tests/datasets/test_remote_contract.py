"""Remote datasets read by ranges, as whole files and as shards; and what a server denies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import (
    AccessError,
    ConfigError,
    DataNotFoundError,
    HDF5Dataset,
    ImageDataset,
    RemoteError,
    SampleError,
    StreamingDataset,
    TextDataset,
)
from tests.data.make import make_tar
from tests.datasets.remote_contract import RemoteDatasetContract, RemoteFaultContract
from tests.datasets.shards.test_streaming import IN_MODE
from tests.servers.plain import plain_server
from tests.servers.ranges import RangeServer

ROWS = np.random.default_rng(0).integers(0, 99, (60, 40), np.int32)


@pytest.mark.slow
class TestTextFiles(RemoteFaultContract):
    """Whole files."""

    names = tuple(f"{number}.txt" for number in range(8))
    has_index = asks_when_opened = is_versioned = False

    def write(self, folder: Path) -> None:
        for number, name in enumerate(self.names):
            (folder / name).write_text(f"the mill wheel {number}\n" * (number + 1))

    def make(self, paths: list[str], **options: Any) -> TextDataset:
        return TextDataset(paths, unit="file", **options)


@pytest.mark.slow
class TestRecords(RemoteDatasetContract):
    names = ("a.jsonl", "b.csv")
    has_index_beside = False

    @pytest.fixture(autouse=True)
    def _small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.formats.source.LONGEST", 100)

    def write(self, folder: Path) -> None:
        lines = [f'{{"text": "row {n}", "n": {n}}}\n' for n in range(30)]
        (folder / "a.jsonl").write_text("".join(lines))
        fields = [f'{n},"a ""{n}""\n{n}"\n' for n in range(15)]
        (folder / "b.csv").write_text("n,text\n" + "".join(fields))

    def make(self, paths: list[str], **options: Any) -> TextDataset:
        return TextDataset(paths, unit="record", **{"progress": False, **options})


class TestHDF5(RemoteFaultContract):
    """Rows that are decoded here, beside such that h5py reads."""

    names = ("a.h5", "b.h5")

    def write(self, folder: Path) -> None:
        for name in self.names:
            with h5py.File(folder / name, "w") as file:
                file.create_dataset("direct", data=ROWS, chunks=(8, 40), compression="gzip")
                file.create_dataset("library", data=ROWS, chunks=(8, 40), compression="lzf")
                file["targets"] = np.arange(60)

    def make(self, paths: list[str], **options: Any) -> HDF5Dataset:
        return HDF5Dataset(paths, ["direct", "library"], target_name="targets", **options)


@pytest.mark.slow
class TestTarShards(RemoteDatasetContract):
    names = ("0.tar", "1.tar", "2.tar")

    @pytest.fixture(autouse=True)
    def _small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.formats.source.LONGEST", 8 << 10)

    def write(self, folder: Path) -> None:
        for name in self.names:
            kinds = itertools.product(range(20), ("cls", "txt"))
            members = [(f"{name[0]}{n:02d}.{kind}", b"%d" % n) for n, kind in kinds]
            make_tar(folder / name, members)

    def make(self, paths: list[str], **options: Any) -> StreamingDataset:
        mode = options.pop("loading_mode", "streaming")
        return IN_MODE[mode](paths, **options)


LONG = [f"line {number} {'x' * 5000}" for number in range(2000)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_photos: Path) -> Path:
    folder = tmp_path_factory.mktemp("served")
    (folder / "lines.txt").write_text("\n".join(LONG))
    photos = sorted(tiny_photos.rglob("*.jpg")) * 3
    for number, path in enumerate(photos):
        (folder / f"{number}.jpg").write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def denied(server: RangeServer) -> Iterator[None]:
    yield
    server.set(denied=[])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "workers", "on_error"),
    [("lazy", 0, "raise"), ("streaming", 0, "skip"), ("streaming", 2, "skip")],
)
def test_credentials_that_expire_in_the_middle(
    server: RangeServer, tmp_path: Path, make_loader: Any, mode: str, workers: int, on_error: str
) -> None:
    """Nothing is left out: all samples of the shard are behind what is denied."""
    server.set(bandwidth=4e6)  # else all of it has been asked for when the first batch is there
    dataset = TextDataset(
        f"{server.url}/lines.txt",
        unit="line",
        loading_mode=mode,
        on_error=on_error,
        cache_dir=tmp_path,
    )
    options = {"num_workers": workers, "prefetch_factor": 1 if workers else None}
    loader = make_loader(dataset, batch_size=20, shuffle=False, **options)
    batches = iter(loader)
    assert len(next(batches)["input_ids"]) == 20
    server.set(faults={"403": 1})
    with pytest.raises(AccessError, match=r"lines\.txt"):
        list(batches)
    assert loader.get_stats()["skipped"] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("denied")
def test_one_file_that_is_denied_is_a_bad_sample(server: RangeServer, folder: Path) -> None:
    names = sorted(path.name for path in folder.glob("*.jpg"))
    options: dict[str, Any] = {"image_size": 8, "targets": None}
    urls = [f"{server.url}/{name}" for name in names]
    with ImageDataset(urls, **options) as dataset:
        server.set(denied=[names[3]])
        with pytest.raises(SampleError, match=rf"sample 3 .*{names[3]}"):
            dataset.__getitems__([3, 0, 2])
    server.set(denied=[])
    with ImageDataset(urls, on_error="skip", **options) as dataset:
        server.set(denied=[names[3]])
        assert len(dataset.__getitems__([3, 0, 2])) == 2
        assert dataset.sample_reader.take_report()["skipped_samples"][0][0] == 3
        server.set(denied=names)
        with pytest.raises(AccessError):
            dataset.__getitems__([*range(len(dataset))])


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the web, which shows a folder as a page."""
    folder = tmp_path_factory.mktemp("web")
    for name in ("texts/cat/1.txt", "texts/dog/2.txt", "shards/0.jsonl", "empty/page.htm"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "a line"}\n')
    with plain_server(folder) as url:
        yield url


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "/"])
def test_a_folder_of_the_web(web: str, end: str, tmp_path: Path) -> None:
    with TextDataset(f"{web}/texts{end}", labels="folders") as texts:
        assert [texts.text_of(number) for number in range(2)] == ['{"text": "a line"}\n'] * 2
        assert [texts.classes[target] for target in texts.targets] == ["cat", "dog"]
    with pytest.raises(RemoteError, match=r"0\.jsonl"):
        StreamingDataset(f"{web}/shards{end}", cache_dir=tmp_path)
    for name in ("empty", "nothing"):
        with pytest.raises(DataNotFoundError, match=name):
            TextDataset(f"{web}/{name}{end}")
    with TextDataset(f"{web}/empty/page.htm") as page:
        assert page.text_of(0) == '{"text": "a line"}\n'


@pytest.mark.slow
def test_what_is_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("Install it")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    for protocol, extra in (("https", "http"), ("s3", "s3"), ("hf", "hf")):
        with pytest.raises(ConfigError, match=rf"pip install 'headrace\[{extra}\]'"):
            ImageDataset(f"{protocol}://bucket/a")
