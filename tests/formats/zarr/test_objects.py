"""Store objects of zarr-python in place of paths."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore, MemoryStore, ZipStore

from headrace import (
    ConfigError,
    MemoryEfficientDataset,
    MissingNameError,
    ZarrDataset,
    create_dataloader,
    read_rows,
)

ROWS = np.arange(120, dtype="f4").reshape(20, 6)
VOLUME = np.arange(512, dtype="u2").reshape(8, 8, 8)
WORDS = [f"word {row}" for row in range(20)]


def filled(store: Any, version: Any = 3) -> Any:
    root = zarr.open_group(store, mode="w", zarr_format=version)
    root.create_array("x", data=ROWS, chunks=(4, 6))
    root.create_array("inner/y", data=np.arange(20), chunks=(20,))
    root.create_array("volume", data=VOLUME, chunks=(4, 4, 4))
    root.create_array("words", data=np.array(WORDS, np.dtypes.StringDType()))
    return store


def made(kind: str, folder: Path, version: int = 3) -> Any:
    if kind == "memory":
        return filled(MemoryStore(), version)
    if kind == "local":
        return filled(LocalStore(folder / "local.zarr"), version)
    filled(ZipStore(folder / "a.zip", mode="w"), version).close()
    return ZipStore(folder / "a.zip", mode="r")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("kind", ["memory", "zip", "local"])
@pytest.mark.quick_every(3)
def test_samples_are_those_of_the_folder(tmp_path: Path, kind: str, version: int) -> None:
    store = made(kind, tmp_path, version)
    filled(tmp_path / "a.zarr", version)
    for options in ({"dataset_name": "x", "target_name": "inner/y"}, {"dataset_name": "words"},
                    {"dataset_name": "volume", "patch_shape": (4, 4, 4)}):  # fmt: skip
        dataset: Any = ZarrDataset(store, **options)
        folder = ZarrDataset(tmp_path / "a.zarr", **options)
        assert str([*dataset]) == str([*folder])
        assert dataset.fingerprint == folder.fingerprint
        assert str([*pickle.loads(pickle.dumps(dataset))]) == str([*folder])
    twice = ZarrDataset([store, store], "x")
    assert len(twice) == 40
    assert (twice[39].numpy() == ROWS[19]).all()
    assert (read_rows(store, "x", [3, 1]) == ROWS[[3, 1]]).all()
    # it stays open for its owner
    assert (zarr.open_array(store, path="x", mode="r")[:] == ROWS).all()


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("memory", "lazy"), ("memory", "eager"), ("memory", "cached"), ("memory", "streaming"),
     ("zip", "lazy")],
)  # fmt: skip
def test_all_modes_and_workers(tmp_path: Path, kind: str, mode: Any) -> None:
    dataset = ZarrDataset(made(kind, tmp_path), "x", loading_mode=mode, progress=False)
    for workers in (0, 2):
        loader = create_dataloader(dataset, batch_size=5, num_workers=workers, shuffle=False)
        assert (np.concatenate([batch.numpy() for batch in loader]) == ROWS).all()


def test_what_it_says_of_itself(tmp_path: Path) -> None:
    store = made("memory", tmp_path)
    dataset = ZarrDataset(store, "x")
    assert repr(dataset) == f"ZarrDataset({store!r}, dataset_name='x')  # 20 samples"
    assert dataset.source_of(3) == f"{store}, x, row 3"
    assert "x: zarr-python: a store object" in dataset.explain()
    assert not dataset.fork_safe
    assert not MemoryEfficientDataset(dataset).fork_safe
    local = ZarrDataset(made("local", tmp_path), "x")
    assert local.fork_safe
    assert "x: pread + zstd" in local.explain()


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    store = made("memory", tmp_path)
    with pytest.raises(MissingNameError, match="it has: 'inner/y', 'volume', 'words', 'x'"):
        ZarrDataset(store, "z")
    with pytest.raises(MissingNameError, match="has 4 arrays"):
        ZarrDataset(store)
    with pytest.raises(MissingNameError, match="has no array 'x'"):
        ZarrDataset(MemoryStore(), "x")
    with pytest.raises(ConfigError, match=r"missing=.error.* a store object"):
        ZarrDataset(store, "x", missing="error")


class Unpicklable(MemoryStore):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("it holds a connection")


def test_an_unpicklable_store_takes_no_workers() -> None:
    dataset = ZarrDataset(filled(Unpicklable()), "x")
    assert len(list(create_dataloader(dataset, batch_size=5, num_workers=0))) == 4
    with pytest.raises(ConfigError, match=r"holds a connection.* a path .* num_workers=0"):
        iter(create_dataloader(dataset, batch_size=5, num_workers=2))
