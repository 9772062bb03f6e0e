"""EpisodeDataset over replay buffers, flat arrays of all steps in HDF5 and Zarr: what sets them
apart from groups of episodes (test_episodes.py has what both share).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr

from headrace import (
    BudgetError,
    ConfigError,
    EpisodeDataset,
    FormatError,
    HDF5Dataset,
    MissingNameError,
    ZarrDataset,
    open_dataset,
)
from headrace.inspecting.inspect import inspect
from headrace.storage.hdf5.files import HDF5Files
from headrace.storage.sparse.hdf5 import HDF5Groups
from headrace.storage.sparse.zarr import ZarrGroups
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.datasets.demonstrations import (
    LENGTHS,
    buffer_arrays,
    damage_chunk,
    spoil,
    write_buffer,
    write_demos,
)
from tests.datasets.remote_contract import RemoteDatasetContract

ENDS = np.cumsum(LENGTHS)
STARTS = ENDS - LENGTHS


def test_a_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens: list[str] = []
    original = HDF5Files.open

    def counted(self: Any, path: str) -> Any:
        opens.append(path)
        return original(self, path)

    monkeypatch.setattr(HDF5Files, "open", counted)
    for path in (write_buffer(tmp_path / "a.h5"), write_demos(tmp_path / "b.h5", (3, 4))):
        with EpisodeDataset([path, path], window=2) as dataset:
            assert len(dataset) and opens == [str(path)] * 2
        opens.clear()


def test_static_values_are_measured_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.storage.episodes.look._STATIC_BYTES", 1000)
    goals = np.zeros((len(LENGTHS), 30))
    with h5py.File(write_buffer(tmp_path / "a.h5"), "r+") as file:
        file["meta/goal"] = goals
    with h5py.File(write_demos(tmp_path / "b.h5", (3, 4)), "r+") as file:
        file["data/demo_1/goal"] = file["data/demo_0/goal"] = np.zeros(200)
    store = zarr.open_group(write_buffer(tmp_path / "a.zarr", kind="2"), mode="r+")
    store.create_array("meta/goal", data=goals)
    columns = {kind: kind.column for kind in (HDF5Groups, ZarrGroups)}

    def refuse(self: Any, name: Any) -> Any:
        assert name in ("meta/episode_ends", "/"), "it was read"
        return columns[type(self)](self, name)

    for kind in columns:
        monkeypatch.setattr(kind, "column", refuse)
    monkeypatch.setattr(h5py.Dataset, "__getitem__", refuse)
    for name, static in (("a.h5", "meta/goal"), ("b.h5", "goal"), ("a.zarr", "meta/goal")):
        with pytest.raises(BudgetError, match=static):
            EpisodeDataset(tmp_path / name, static=[static])


def test_episodes_of_a_buffer_are_chosen(tmp_path: Path) -> None:
    path, actions = write_buffer(tmp_path / "a.h5"), buffer_arrays()["action"]
    with h5py.File(path, "r+") as file:
        file["meta/train"], file["meta/odd"] = np.array([9, 1]), np.array([1.5])
        file["meta/wrong"] = np.array([3, 12])
    choices: list[tuple[Any, list[int]]] = [
        (["episode_10", "episode_2"], [2, 10]),
        ("meta/train", [1, 9]),
        ("meta/success", list(range(0, 12, 2))),
    ]
    static = ["meta/success", "meta/task"]
    for episodes, numbers in choices:
        with EpisodeDataset(path, ["action"], episodes=episodes, static=static) as dataset:
            assert dataset.episode_names == [f"episode_{number}" for number in numbers]
            for sample, number in zip(dataset, numbers, strict=True):
                steps = torch.from_numpy(actions[STARTS[number] : ENDS[number]])
                assert same(sample["action"], steps)
                assert bool(sample["meta/success"]) == (number % 2 == 0)
                assert sample["meta/task"] == f"task {number}"
        with EpisodeDataset(path, episodes=episodes, window=3) as dataset:
            assert dataset.blocks().sum() == len(dataset)
            assert len(dataset) == sum(LENGTHS[number] for number in numbers)
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"episodes": ["demo_1"]}, MissingNameError, "'demo_1'"),
        ({"episodes": "meta/wrong"}, MissingNameError, "'meta/wrong' lists episode 12"),
        ({"episodes": "meta/odd"}, FormatError, "'meta/odd'.*float64"),
        ({"episodes": "meta/valid"}, MissingNameError, "'meta/valid'"),
        ({"static": ["data/action"]}, FormatError, r"'data/action' has shape \[96, 2\]"),
    ]
    for options, error, named in refused:
        with pytest.raises(error, match=named):
            EpisodeDataset(path, **options)


@pytest.mark.parametrize("ending", ["h5", "zarr"])
def test_several_buffers_are_one_dataset(tmp_path: Path, ending: str) -> None:
    write_buffer(tmp_path / f"a.{ending}", (9, 4))
    write_buffer(tmp_path / f"b.{ending}", (3, 8), seed=1)
    with EpisodeDataset(tmp_path, window=2, pad_after=0) as dataset:
        assert dataset.episode_names == ["episode_0", "episode_1"] * 2
        assert len(dataset) == 8 + 3 + 2 + 7 == dataset.blocks().sum()
        assert same(dataset[19]["img"], torch.from_numpy(buffer_arrays((3, 8), 1)["img"][9:11]))
        assert dataset.source_of(19).endswith(f"b.{ending}, episode_1, steps 6 to 7")


def test_blocks_of_a_buffer_are_its_chunks(tmp_path: Path, make_loader: Any) -> None:
    """Chunks of 8 rows, whatever episodes lie in them: each is decoded once in an epoch, or
    twice where a window crosses its end.
    """
    path, firsts = write_buffer(tmp_path / "a.h5"), []
    for start, length in zip(STARTS, LENGTHS, strict=True):
        firsts += [start + max(0, step) for step in range(-1, length)]
    with EpisodeDataset(path, ["img"], window=3, pad_before=1) as dataset:
        sizes = np.unique(np.array(firsts) // 8, return_counts=True)[1]
        assert dataset.blocks().tolist() == sizes.tolist()
        options = {"shuffle": "block", "interleave": 1, "turns": 1}
        loader = make_loader(dataset, batch_size=4, num_workers=0, seed=1, **options)
        assert sum(len(batch["mask"]) for batch in loader) == len(dataset)
        assert loader.get_stats()["chunks_decoded"] <= 2 * 12
    with EpisodeDataset(path, ["img"]) as dataset:
        assert dataset.blocks().tolist() == np.unique(STARTS // 8, return_counts=True)[1].tolist()
        assert dataset.sample_source.block_nbytes >= 20 * 90
    contiguous = write_buffer(tmp_path / "b.h5", kind="contiguous")
    with EpisodeDataset(contiguous, window=2, pad_after=0) as dataset:
        assert dataset.blocks().tolist() == [length - 1 for length in LENGTHS if length > 1]


def test_strings_of_a_buffer(tmp_path: Path) -> None:
    words = [f"wort {step}" for step in range(7)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data/words"], file["meta/episode_ends"] = words, np.array([3, 7])
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr-python says that strings have no specification yet
        array = root.create_array("data/words", shape=(7,), dtype=str)
        array[...] = np.array(words, object)
    root.create_array("meta/episode_ends", data=np.array([3, 7]))
    for name in ("a.h5", "a.zarr"):
        with EpisodeDataset(tmp_path / name, window=3) as dataset:
            assert dataset[4]["words"] == words[4:7] and dataset[2]["words"] == ["wort 2"] * 3
        with EpisodeDataset(tmp_path / name) as dataset:
            assert dataset[1]["words"] == words[3:]
        with pytest.raises(ConfigError, match="'words'"):
            EpisodeDataset(tmp_path / name, window=3, pad="constant")


def test_a_buffer_is_opened_by_content(tmp_path: Path) -> None:
    for name, rows in (("a.h5", HDF5Dataset), ("a.zarr", ZarrDataset)):
        path = write_buffer(tmp_path / name)
        with open_dataset(path, window=4) as dataset:
            assert isinstance(dataset, EpisodeDataset) and len(dataset) == sum(LENGTHS)
        with open_dataset(path, dataset_name="data/action") as dataset:
            assert isinstance(dataset, rows) and len(dataset) == sum(LENGTHS)
        report = inspect(path)
        assert report.samples == len(LENGTHS)
        assert report.opens_as == f"headrace.EpisodeDataset({str(path)!r}, window=16)"
        assert "of 1 to 20 steps (96 in all): action float32 [2]" in str(report.samples_are)
        assert {one.name for one in report.access} == {"data/action", "data/img", "data/obs/state"}
    zarr.open_group(tmp_path / "a.zarr", mode="r+")["meta/episode_ends"][...] = 5
    report = inspect(tmp_path / "a.zarr")
    assert report.samples == sum(LENGTHS)
    assert any("meta/episode_ends" in note for note in report.notes)


# -- files that are not as they should be


WRONG_ENDS: list[tuple[Any, str]] = [
    (np.array([5, 9, 7, 12]), "episode 2 begins at row 9 and ends at 7"),
    (np.array([5, 5, 12]), "episode 1 begins at row 5 and ends at 5"),
    (np.array([0, 12]), "episode 0 begins at row 0 and ends at 0"),
    (np.array([5, -3, 12]), r"episode_ends\[1\] is -3"),
    (np.array([5, 11]), "ends at row 11.*12 rows"),
    (np.array([5, 13]), "ends at row 13.*12 rows"),
    (np.array([5.0, 12.0]), r"float64 \[2\]"),
    (np.array([[5, 12]]), r"shape \[1, 2\]"),
    (np.zeros(0, np.int64), "empty"),
    (np.array([5, 2**64 - 1], np.uint64), "18446744073709551615"),
]


@pytest.mark.parametrize("name", ["a.h5", "a.zarr"])
def test_a_buffer_that_is_wrong(tmp_path: Path, name: str) -> None:
    path = write_buffer(tmp_path / name, (5, 7))
    for ends, named in WRONG_ENDS:
        with pytest.raises(FormatError, match=named):
            EpisodeDataset(spoil(path, "meta/episode_ends", ends))
    spoil(path, "meta/episode_ends", np.array([5, 12]))
    for key in ("actions", "act?"):
        with pytest.raises(MissingNameError, match=r"'act.*; it has: action, img, obs/state"):
            EpisodeDataset(path, [key])
    with pytest.raises(MissingNameError, match="'meta/goal'"):
        EpisodeDataset(path, static=["meta/goal"])
    for length in (11, 0):
        with pytest.raises(FormatError, match=f"'action' {length}, 'img' 12"):
            EpisodeDataset(spoil(path, "data/action", np.zeros((length, 2))))
    for key in ("action", "img", "obs/state"):
        spoil(path, f"data/{key}", None)
    with pytest.raises(FormatError, match="2 episodes"):
        EpisodeDataset(path)


def test_stores_that_are_no_buffers(tmp_path: Path) -> None:
    path = write_buffer(tmp_path / "a.zarr", (5, 7))
    with pytest.raises(MissingNameError, match=r"'data/x\*'.*; it has: data, data/obs, meta"):
        EpisodeDataset(path, groups="data/x*")
    with pytest.raises(MissingNameError, match="'meta/episode_ends'"):
        EpisodeDataset(spoil(path, "meta/episode_ends", None))
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["data"] = np.arange(3)
    with pytest.raises(FormatError, match=r"b\.h5"):
        EpisodeDataset([write_buffer(tmp_path / "a.h5"), tmp_path / "b.h5"])


def test_buffers_that_differ(tmp_path: Path) -> None:
    paths = [write_buffer(tmp_path / name, (5, 7)) for name in ("a.h5", "b.h5")]
    spoil(paths[1], "data/action", np.zeros((12, 3)))
    with pytest.raises(FormatError, match=r"b\.h5: .*'action' are float64 \[3\].*a\.h5 float32"):
        EpisodeDataset(paths)
    spoil(paths[1], "data/action", None)
    with pytest.raises(MissingNameError, match=r"b\.h5: .*'action'"):
        EpisodeDataset(paths)
    with EpisodeDataset(paths, ["img"]) as dataset:
        assert len(dataset) == 4


# -- the laws


@pytest.mark.slow
class TestWindowsOfBuffersKeepTheLaws(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path: Path) -> None:
        self.path = write_buffer(tmp_path / "a.zarr", kind="2")
        bad = write_buffer(tmp_path / "bad.h5", (10, 12, 18))
        self.bad = damage_chunk(bad, "data/img", 1)  # rows 8 to 15

    def make(self, **options: Any) -> EpisodeDataset:
        return EpisodeDataset(self.path, window=4, stride=2, pad_before=1, **options)

    def make_bad(self, **options: Any) -> tuple[EpisodeDataset, list[int]]:
        return EpisodeDataset(self.bad, window=2, **options), list(range(7, 16))


@pytest.mark.slow
class TestRemoteStores(RemoteDatasetContract):
    names = ("a.zarr",)
    data = tuple(f"a.zarr/data/action/c/{number}/0" for number in range(12))
    has_index = is_versioned = False

    def write(self, folder: Path) -> None:
        write_buffer(folder / "a.zarr", LENGTHS, 1, "3")

    def make(self, paths: list[str], **options: Any) -> EpisodeDataset:
        return EpisodeDataset(paths[0], ["action"], window=3, stride=2, **options)
