"""An index beside a shard spares the first run all but a few round trips, and is refused where
it does not fit.
"""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from headrace import (
    ConfigError,
    HDF5Dataset,
    StreamingDataset,
    TextDataset,
    WriteError,
    ZarrDataset,
    create_dataloader,
    write_index,
)
from headrace.errors import DataNotFoundError, HeadraceWarning
from tests.servers.ranges import RangeServer
from tools.write_index import main


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(3):
        with tarfile.open(folder / f"a{shard}.tar", "w") as tar:
            for sample in range(40):
                content = b"%d" % (sample % 3)
                member = tarfile.TarInfo(f"{shard}-{sample}.cls")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        with h5py.File(folder / f"b{shard}.h5", "w") as file:
            file["data"], file["labels"] = np.arange(1200.0).reshape(40, 30), np.arange(40)
        with h5py.File(folder / f"f{shard}.h5", "w") as file:
            file["data"] = np.arange(1200.0).reshape(40, 30)
        (folder / f"c{shard}.jsonl").write_text(
            "".join(json.dumps({"i": i, "shard": shard}) + "\n" for i in range(40))
        )
        (folder / f"d{shard}.txt").write_text("".join(f"line {i} of {shard}\n" for i in range(40)))
    array = zarr.create_array(
        store=folder / "e.zarr", shape=(64, 8), shards=(16, 8), chunks=(4, 8), dtype="f4"
    )
    array[:] = np.arange(512.0).reshape(64, 8)
    return folder


def test_a_folder_of_shards(shards: Path, tmp_path: Path) -> None:
    written = write_index(shards)
    assert sorted(Path(path).name for path in written if ".zarr" not in path) == sorted(
        f"{kind}{shard}.{ending}.index"
        for kind, ending in zip("abcdf", ("tar", "h5", "jsonl", "txt", "h5"), strict=True)
        for shard in range(3)
    )
    with RangeServer(shards) as server:
        for number, (pattern, options) in enumerate(
            [
                *(
                    ("a{0..2}.tar", {}),
                    ("b{0..2}.h5", {"dataset_name": "data"}),
                    ("c{0..2}.jsonl", {}),
                    ("d{0..2}.txt", {}),
                ),
                ("f{0..2}.h5", {}),
            ]
        ):
            url, near = (
                f"{server.url}/{pattern}",
                StreamingDataset(str(shards / pattern), **options),
            )
            server.counts()
            with StreamingDataset(url, cache_dir=tmp_path / f"cache-{number}", **options) as far:
                # the version of each shard, and its index
                assert server.counts()["requests"] == 3 * 2
                loader = create_dataloader(
                    far, batch_size=8, num_workers=0, collate_fn="list", shuffle=False
                )
                expected = create_dataloader(
                    near, batch_size=8, num_workers=0, collate_fn="list", shuffle=False
                )
                for batch, right in zip(loader, expected, strict=True):
                    for sample, same in zip(batch, right, strict=True):
                        assert (
                            np.array_equal(sample, same)
                            if isinstance(same, np.ndarray)
                            else _same(sample, same)
                        )
                assert server.counts()["requests"] <= 3 * 5
            near.close()


def _same(sample: Any, same: Any) -> bool:
    if isinstance(same, dict) and "__url__" in same:
        return {**sample, "__url__": ""} == {**same, "__url__": ""}
    return bool(np.all(np.asarray(sample) == np.asarray(same)))


def test_a_store_of_shards(shards: Path, tmp_path: Path) -> None:
    assert [Path(path).name for path in write_index(shards / "e.zarr")] == ["zarr.json.index"]
    near = ZarrDataset(shards / "e.zarr")
    with RangeServer(shards) as server:
        server.counts()
        with ZarrDataset(f"{server.url}/e.zarr", cache_dir=tmp_path / "cache") as far:
            assert all(np.array_equal(a, b) for a, b in zip(far, near, strict=True))
    near.close()


def test_an_index_of_another_file_is_not_used(shards: Path, tmp_path: Path) -> None:
    write_index([shards / "a0.tar", f"{shards}/c0*.jsonl"])
    with tarfile.open(shards / "a0.tar", "a") as tar:
        member = tarfile.TarInfo("more.cls")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"2"))
    with open(shards / "a0.tar", "ab") as file:
        file.write(bytes(10240))
    with open(shards / "c0.jsonl", "a") as file:
        file.write('{"i": 40}\n')
    with RangeServer(shards) as server:
        with pytest.warns(HeadraceWarning, match="the index beside it is not used"):
            tar_shards = StreamingDataset(f"{server.url}/a0.tar", cache_dir=tmp_path / "cache")
        with pytest.warns(HeadraceWarning, match="the index beside it is not used"):
            lines = TextDataset(
                f"{server.url}/c0.jsonl",
                unit="record",
                cache_dir=tmp_path / "cache",
                text_field="i",
            )
        assert len(tar_shards) == len(lines) == 41
        tar_shards.close()
        lines.close()


def test_what_has_no_index(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(b"")
    (tmp_path / "a.jpg").write_bytes(b"")
    with pytest.raises(
        ConfigError,
        match=r"a\.txt\.gz is compressed, and is unpacked on each machine: it has no index",
    ):
        write_index(tmp_path / "a.txt.gz")
    with pytest.raises(ConfigError, match=r"a\.jpg has no index: those of \.tar"):
        write_index(tmp_path / "a.jpg")
    with pytest.raises(DataNotFoundError, match="does not exist"):
        write_index(tmp_path / "nothing")
    zarr.create_array(store=tmp_path / "plain.zarr", shape=(4,), chunks=(2,), dtype="f4")
    with pytest.raises(ConfigError, match="has no array with shards"):
        write_index(tmp_path / "plain.zarr")
    with (
        RangeServer(shards) as server,
        pytest.raises(WriteError, match="write the index of a local copy, and upload it"),
    ):
        write_index(f"{server.url}/a0.tar")


def test_the_command(shards: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([str(shards / "a0.tar"), str(shards / "b0.h5")]) == 0
    assert [Path(line).name for line in capsys.readouterr().out.split()] == [
        "a0.tar.index",
        "b0.h5.index",
    ]
    assert main([str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_packed_file_of_hdf5_datasets(shards: Path, tmp_path: Path) -> None:
    """One index for all datasets of the file."""
    write_index(shards / "b0.h5")
    with RangeServer(shards) as server:
        for name in ("data", "labels"):
            server.counts()
            with HDF5Dataset(f"{server.url}/b0.h5", name, cache_dir=tmp_path / "cache") as dataset:
                assert len(dataset) == 40 and server.counts()["requests"] <= 3
