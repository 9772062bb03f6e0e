"""An index beside a shard spares the first run most round trips, and is refused elsewhere."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import ConfigError, HDF5Dataset, StreamingDataset, WriteError, write_index
from headrace.cli.main import main
from headrace.errors import DataNotFoundError, HeadraceWarning
from headrace.testing.contract import same
from tests.data.make import make_tar
from tests.datasets.remote_contract import RemoteDatasetContract
from tests.servers.ranges import RangeServer

ENDINGS = {"a": "tar", "b": "h5"}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    rows = np.arange(1200.0).reshape(40, 30)
    for shard in range(3):
        members = [(f"{shard}-{n}.cls", b"%d" % (n % 3)) for n in range(40)]
        make_tar(folder / f"a{shard}.tar", members)
        with h5py.File(folder / f"b{shard}.h5", "w") as file:
            file["data"], file["labels"] = rows, np.arange(40)
    return folder


@pytest.fixture
def server(shards: Path) -> Any:
    with RangeServer(shards) as server:
        yield server


def test_a_folder_of_shards(
    shards: Path, server: RangeServer, tmp_path: Path, loader_of: Any
) -> None:
    written = {Path(path).name for path in write_index(shards)}
    names = {f"{kind}{shard}.{end}" for kind, end in ENDINGS.items() for shard in range(3)}
    assert written == {f"{name}.index" for name in names}
    for kind, ending in ENDINGS.items():
        options: dict[str, Any] = {"dataset_name": "data"} if kind == "b" else {}
        pattern = f"{kind}{{0..2}}.{ending}"
        server.counts()
        cache = tmp_path / f"cache-{kind}"
        with StreamingDataset(f"{server.url}/{pattern}", cache_dir=cache, **options) as far:
            assert server.counts()["requests"] == 3 * 2  # the version of each shard, and its index
            with StreamingDataset(str(shards / pattern), **options) as near:
                epoch = RemoteDatasetContract.epoch
                assert same(epoch(loader_of, far), epoch(loader_of, near)), kind
            assert server.counts()["requests"] <= 3 * 5
    for name in ("data", "labels"):  # one index for all datasets of a file
        server.counts()
        with HDF5Dataset(f"{server.url}/b0.h5", name, cache_dir=tmp_path / "cache") as dataset:
            assert len(dataset) == 40 and server.counts()["requests"] <= 3


def test_an_index_of_another_file_is_not_used(
    shards: Path, server: RangeServer, tmp_path: Path
) -> None:
    write_index([shards / "a0.tar", f"{shards}/b0*.h5"])
    make_tar(shards / "a0.tar", [(f"{n}.cls", b"%d" % n) for n in range(61)])
    with pytest.warns(HeadraceWarning, match="the index next to it is not used"):
        members = StreamingDataset(f"{server.url}/a0.tar", cache_dir=tmp_path / "cache")
    assert len(members) == 61
    members.close()


def test_what_has_no_index(server: RangeServer, tmp_path: Path) -> None:
    for name in ("a.txt.gz", "a.jpg"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(ConfigError, match=name):
            write_index(tmp_path / name)
    with pytest.raises(DataNotFoundError, match="nothing"):
        write_index(tmp_path / "nothing")
    with pytest.raises(WriteError):
        write_index(f"{server.url}/a0.tar")


def test_the_command(shards: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["index", str(shards / "a0.tar"), str(shards / "b0.h5")]) == 0
    written = [Path(line).name for line in capsys.readouterr().out.split()]
    assert written == ["a0.tar.index", "b0.h5.index"]
    assert main(["index", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.startswith("headrace index: error: ")
