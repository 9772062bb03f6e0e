"""EpisodeDataset of groups and of replay buffers, compared with what h5py reads."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
import torch
import zarr

from headrace import (
    ConfigError,
    EpisodeDataset,
    FileChangedError,
    FormatError,
    HDF5Dataset,
    HeadraceWarning,
    MissingNameError,
    ZarrDataset,
    create_dataloader,
    open_dataset,
    pack,
)
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.datasets.demonstrations import (
    LENGTHS,
    arrays_of,
    buffer_arrays,
    damage_chunk,
    spoil,
    write_buffer,
    write_demos,
)
from tests.datasets.remote_contract import RemoteDatasetContract

GZIP = {"chunks": (4, 6, 5, 3), "compression": "gzip"}
DEMOS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "gzip": GZIP,
    "lzf": {"chunks": (4, 6, 5, 3), "compression": "lzf"},
    "cut": {"chunks": (3, 4, 5, 3), "compression": "gzip", "shuffle": True},
    "raw": {"chunks": (4, 6, 5, 3)},
}
BUFFERS = {
    "buffer, Zarr 2": ("a.zarr", "2"),
    "buffer, gzip": ("a.h5", "gzip"),
    "buffer, raw": ("a.h5", "raw"),
    "buffer, contiguous": ("a.h5", "contiguous"),
    "buffer, Zarr 3": ("a.zarr", "3"),
}
Steps = dict[str, Any]
"""The arrays of an episode."""


@pytest.fixture
def demos(tmp_path: Path) -> Path:
    return write_demos(tmp_path / "demos.hdf5", compression="gzip")


def written(folder: Path, layout: str) -> tuple[Path, dict[str, Steps]]:
    """A file of a layout, and its episodes by their names."""
    if layout in DEMOS:
        path = write_demos(folder / "a.hdf5", **DEMOS[layout])
        names = [f"data/demo_{number}" for number in range(len(LENGTHS))]  # 10 behind 2
        return path, {name: arrays_of(path, name) for name in names}
    name, kind = BUFFERS[layout]
    arrays, episodes, first = buffer_arrays(), {}, 0
    for number, length in enumerate(LENGTHS):
        steps = {key: values[first : first + length] for key, values in arrays.items()}
        episodes[f"episode_{number}"] = steps
        first += length
    return write_buffer(folder / name, kind=kind), episodes


def windows_of(
    arrays: Steps, window: int, before: int, after: int, stride: int, pad: str
) -> list[Steps]:
    """The windows of an episode, by a plain loop."""
    length, found = len(next(iter(arrays.values()))), []
    for start in range(-before, length - window + after + 1, stride):
        steps = np.arange(start, start + window)
        inside = (steps >= 0) & (steps < length)
        sample = {"mask": torch.from_numpy(inside)}
        for key, values in arrays.items():
            rows = values[np.clip(steps, 0, length - 1)]
            if pad == "constant":
                rows[~inside] = 0
            sample[key] = torch.from_numpy(rows)
        found.append(sample)
    return found


# -- what samples are


@pytest.mark.quick_every(6)
@pytest.mark.parametrize("layout", [*DEMOS, *BUFFERS])
def test_episodes_and_windows_are_those_of_a_loop(tmp_path: Path, layout: str) -> None:
    path, episodes = written(tmp_path, layout)
    expected = [
        {key: torch.from_numpy(values) for key, values in arrays.items()}
        for arrays in episodes.values()
    ]
    for direct in (True, False):
        with EpisodeDataset(path, direct=direct) as dataset:
            assert dataset.episode_names == list(episodes)
            assert dataset.episode_lengths.tolist() == list(LENGTHS) == dataset.lengths().tolist()
            assert same([dataset[number] for number in range(len(dataset))], expected)
            assert dataset.source_of(10).endswith(f", {list(episodes)[10]}")
    for number, how in enumerate(
        [(1, 0, 0, 1), (4, 0, 3, 1), (4, 3, 3, 2), (4, 0, 0, 4), (6, 5, 0, 3), (40, 1, 39, 7)]
    ):
        window, before, after, stride = how
        options: dict[str, Any] = {"pad": ("edge", "constant")[number % 2], "stride": stride}
        options |= {"window": window, "pad_before": before, "pad_after": after}
        with EpisodeDataset(path, **options) as dataset:
            windows: list[Steps] = []
            for arrays in episodes.values():
                windows += windows_of(arrays, *how, options["pad"])
            found = dataset.__getitems__(list(range(len(dataset))))
            for one, other in zip(found, windows, strict=True):
                assert one.keys() == other.keys(), how
                assert all(same(one[key], other[key]) for key in one), how
            assert same(dataset[len(dataset) - 1], found[-1])


@pytest.mark.parametrize(
    ("mode", "layout"),
    [("lazy", "contiguous"), ("eager", "gzip"), ("cached", "buffer, Zarr 2"), ("streaming", "lzf")],
)
@pytest.mark.quick_every(2)
def test_batches_are_those_of_single_samples(
    tmp_path: Path, make_loader: Any, layout: str, mode: Any
) -> None:
    path, _ = written(tmp_path, layout)
    action = "actions" if layout in DEMOS else "action"
    how: dict[str, Any] = {"keys": [action, "obs/*"], "dtype": {action: "bfloat16"}}
    how |= {"window": {"obs/*": 2, "*": 5}, "pad_before": 1}
    options = {"batch_size": 7, "shuffle": "block", "num_workers": 0, "seed": 3}
    with (
        EpisodeDataset(path, loading_mode=mode, progress=False, **how) as dataset,
        EpisodeDataset(path, return_index=True, **how) as single,
    ):
        loader, plain = make_loader(dataset, **options), make_loader(single, **options)
        for _ in range(2):  # the second from memory
            for batch, other in zip(loader, plain, strict=True):
                other.pop("index")
                assert batch.keys() == other.keys()
                assert all(same(batch[key], other[key]) for key in batch)
        assert dataset.sample_nbytes() == sum(value[0].nbytes for value in batch.values())
        assert ("windows straight from storage" in loader.explain()) == (mode == "lazy")


def test_keys_may_have_windows_of_their_own(demos: Path) -> None:
    own: dict[str, Any] = {"window": {"obs/*": 2, "actions": 8}}
    with (
        EpisodeDataset(demos, ["actions", "obs/*"], pad_before=1, **own) as dataset,
        EpisodeDataset(demos, ["actions", "obs/*"], pad_before=1, window=8) as whole,
    ):
        assert len(dataset) == len(whole)
        for number in range(0, len(dataset), 3):
            one, other = dataset[number], whole[number]
            assert len(one["mask"]) == len(one["actions"]) == 8 and len(one["obs/joint_pos"]) == 2
            assert all(same(one[key], other[key][: len(one[key])]) for key in one)


def test_steps_are_held_once(tmp_path: Path, make_loader: Any) -> None:
    """Windows of 20 steps would take twenty times as much as the steps."""
    path = write_demos(tmp_path / "a.hdf5", (300,) * 4)
    steps = 4 * 300 * (56 + 12 + 90 + 1)
    for options in (
        {"loading_mode": "cached"},
        {"loading_mode": "eager", "shared": "machine", "cache_dir": tmp_path},
    ):
        with EpisodeDataset(path, window=20, progress=False, **options) as dataset:
            list(make_loader(dataset, batch_size=64, num_workers=0))
            held = dataset.held.stats()
            assert steps <= held["held_bytes"] < 2 * steps < dataset.held_nbytes() / 5, held
            assert same(dataset[7], EpisodeDataset(path, window=20)[7])


def test_a_batch_of_whole_episodes_is_padded(demos: Path, make_loader: Any) -> None:
    dataset = EpisodeDataset(demos, ["actions", "obs/joint_pos"], static=["model_file"])
    batch = next(iter(make_loader(dataset, batch_size=4, shuffle=False, num_workers=0)))
    assert batch["actions"].shape == (4, 12, 7) and batch["lengths"].tolist() == [7, 12, 5, 1]
    assert batch["mask"].sum(1).tolist() == [7, 12, 5, 1]
    assert batch["model_file"] == [f"<mujoco {number}>" for number in range(4)]
    assert not batch["actions"][~batch["mask"]].any()
    assert same(batch["obs/joint_pos"][1], dataset[1]["obs/joint_pos"])


class Made(NamedTuple):
    """What a transform may make of an episode."""

    inside: dict[str, Any]
    steps: Any


@dataclasses.dataclass
class Acted:
    """As `Made`, with the name of a key."""

    actions: torch.Tensor


def test_padded_fields_of_transforms(demos: Path, make_loader: Any) -> None:
    def step(sample: dict[str, Any]) -> Made:
        return Made({"actions": sample["actions"]}, Acted(sample["actions"]))

    dataset = EpisodeDataset(demos, "actions", static="model_file", transform=step)
    batch = next(iter(make_loader(dataset, batch_size=4, shuffle=False, num_workers=0)))
    assert batch.inside["lengths"].tolist() == [7, 12, 5, 1]
    assert batch.inside["mask"].shape == (4, 12)
    assert same(batch.steps.actions, batch.inside["actions"])


def test_some_episodes(demos: Path) -> None:
    with EpisodeDataset(demos, episodes="mask/valid") as valid:
        assert valid.episode_names == ["data/demo_0"]
    with EpisodeDataset(demos, episodes=["demo_10", "data/demo_2"]) as two:
        assert two.episode_names == ["data/demo_2", "data/demo_10"]
    with EpisodeDataset(demos, window=4, pad_after=0) as dataset:
        long = {number for number, length in enumerate(LENGTHS) if length >= 4}
        assert set(dataset.episode_numbers().tolist()) == long
        train, test = dataset.split(0.7, groups=dataset.episode_numbers())
        assert not set(train.episode_numbers().tolist()) & set(test.episode_numbers().tolist())


def test_a_file_for_each_episode(tmp_path: Path) -> None:
    """As ALOHA and ACT have them."""
    for number in range(3):
        with h5py.File(tmp_path / f"episode_{number}.hdf5", "w") as file:
            file["action"] = np.full((5 + number, 2), number)
            file["observations/images/top"] = np.full((5 + number, 4, 4, 3), number, np.uint8)
            file["language"] = f"task {number}"
            file.attrs["label"] = number % 2
    with EpisodeDataset(tmp_path, static=["language", "label"]) as dataset:
        assert dataset.episode_names == ["", "", ""] and dataset[2]["language"] == "task 2"
        assert same(dataset[1].pop("label"), torch.tensor(1))
        assert list(dataset[1]) == ["action", "observations/images/top", "language", "label"]
        assert dataset.source_of(1).endswith("episode_1.hdf5, /")


def test_elements_of_any_size_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(2):
            group = file.create_group(f"data/demo_{number}")
            group["words"] = [f"wort {number} {step}" for step in range(4)]
            group["x"] = np.arange(4)
    with pytest.raises(FormatError, match=r"'data/demo_0/words' .*: leave it out of keys="):
        EpisodeDataset(tmp_path / "a.h5", window=3)
    assert len(EpisodeDataset(tmp_path / "a.h5", "x", window=3)) == 8


def test_several_files_are_one_dataset(tmp_path: Path) -> None:
    write_demos(tmp_path / "a.hdf5", (5, 4), seed=1, **GZIP)
    path = write_demos(tmp_path / "b.hdf5", (3,), seed=2)
    with EpisodeDataset(str(tmp_path / "*.hdf5"), window=2, pad_after=0) as dataset:
        assert dataset.episode_numbers().tolist() == [0] * 4 + [1] * 3 + [2] * 2
        actions = arrays_of(path, "data/demo_0")["actions"]
        assert same(dataset[8]["actions"], torch.from_numpy(actions[1:3]))
        assert dataset.source_of(8).endswith("b.hdf5, data/demo_0, steps 1 to 2")


def test_blocks_are_episodes_or_chunks(tmp_path: Path, make_loader: Any) -> None:
    short = write_demos(tmp_path / "a.hdf5")
    with EpisodeDataset(short, window=2, pad_after=0) as dataset:
        assert dataset.blocks().tolist() == [length - 1 for length in LENGTHS if length > 1]
    with EpisodeDataset(write_demos(tmp_path / "b.hdf5", (10, 9), **GZIP), window=4) as dataset:
        assert dataset.blocks().tolist() == [4, 4, 2, 4, 4, 1]
        assert dataset.sample_source.block_nbytes >= 2 * 4 * 90
        options = {"shuffle": "block", "interleave": 1, "turns": 1}
        loader = make_loader(dataset, batch_size=4, num_workers=0, seed=1, **options)
        list(loader)
        assert loader.get_stats()["chunks_decoded"] == 6
    with EpisodeDataset(short) as dataset:
        assert dataset.blocks() is None


def test_it_is_opened_by_content(demos: Path, tmp_path: Path) -> None:
    with open_dataset(demos) as dataset, open_dataset(demos, window=4) as windows:
        assert isinstance(dataset, EpisodeDataset) and len(dataset) == len(LENGTHS)
        assert len(windows) == sum(LENGTHS)
    with open_dataset(demos, dataset_name="data/demo_0/actions") as rows:
        assert isinstance(rows, HDF5Dataset) and len(rows) == 7
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["data/train"] = np.arange(3)
    with open_dataset(tmp_path / "other.h5") as rows:
        assert isinstance(rows, HDF5Dataset)
    (tmp_path / "a.txt").write_text("a text")
    with pytest.raises(ConfigError, match="window"):
        open_dataset(tmp_path / "a.txt", window=3)


def test_repr_and_fingerprint(demos: Path) -> None:
    options: list[dict[str, Any]] = [{}, {"pad": "constant"}, {"stride": 2}, {"pad_before": 1}]
    fingerprints = set()
    for how in options:
        with EpisodeDataset(demos, ["actions"], window=4, **how) as dataset:
            fingerprints.add(dataset.fingerprint)
    assert len(fingerprints) == 4
    with EpisodeDataset(demos, ["actions"], window=4) as dataset:
        assert repr(dataset) == (
            f"EpisodeDataset({str(demos)!r}, keys=['actions'], window=4)  # {sum(LENGTHS)} samples"
        )
        with pickle.loads(pickle.dumps(dataset)) as copy:
            assert same(copy[3], dataset[3]) and copy.fingerprint == dataset.fingerprint


def test_windows_are_packed_and_episodes_refused(demos: Path, tmp_path: Path) -> None:
    with EpisodeDataset(demos, window=3) as dataset:
        path = pack(dataset, tmp_path / "windows.h5", workers=1, progress=False)
        with HDF5Dataset(path) as packed:
            assert len(packed) == len(dataset) and packed[5].keys() == dataset[5].keys()
            assert all(same(packed[5][key], dataset[5][key]) for key in packed[5])
    with EpisodeDataset(demos) as dataset:
        with pytest.raises(ConfigError, match="same dtype and shape"):
            pack(dataset, tmp_path / "episodes.h5", workers=1, progress=False)
        one = pack(dataset.subset([4]), tmp_path / "one.h5", workers=1, progress=False)
        assert len(HDF5Dataset(one)) == 1


# -- episodes of Zarr


@pytest.mark.parametrize(
    ("place", "moved", "zarr_format"),
    [("data/*", "", 2), ("*", "data/", 3), ("", "data/demo_4/", 3)],
)
def test_episodes_of_zarr_are_found(
    tmp_path: Path, place: str, moved: str, zarr_format: Any
) -> None:
    """The groups of demonstrations, as they are and in the root; and arrays in the root."""
    demos, path = write_demos(tmp_path / "a.hdf5", LENGTHS[:5]), tmp_path / "a.zarr"
    root = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    for number in range(5):
        for key, values in arrays_of(demos, f"data/demo_{number}").items():
            name = f"data/demo_{number}/{key}"
            if name.startswith(moved):
                chunks = (1, *values.shape[1:])
                root.create_array(name.removeprefix(moved), data=values, chunks=chunks)
    groups = "data/*" if place else "data/demo_4"
    with (
        EpisodeDataset(path, window=4) as found,
        EpisodeDataset(demos, window=4, groups=groups) as known,
    ):
        kept = [name.removeprefix(moved.rstrip("/")).strip("/") for name in known.episode_names]
        assert found.episode_names == kept
        everything = list(range(len(known)))
        assert same(found.__getitems__(everything), known.__getitems__(everything))
    if place == "data/*":  # elsewhere it may be anything
        with open_dataset(path) as opened:
            assert isinstance(opened, EpisodeDataset)
            assert "5, of 1 to 12 steps" in opened.describe().facts["episodes"]


def test_groups_of_zarr_that_are_wrong(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    for number, length in enumerate((50, 30)):
        group = root.create_group(f"runs/{number}", attributes={"label": f"run {number}"})
        group.create_array("data", data=np.full((length, 3), number), chunks=(16, 2))
        group.create_array("start", data=np.array(number / 4))
    path = tmp_path / "a.zarr"
    with EpisodeDataset(path, ["data"], groups="runs/*", static=["start", "label"]) as dataset:
        assert dataset.episode_names == ["runs/0", "runs/1"]
        assert dataset[1]["start"] == 0.25 and dataset[1]["label"] == "run 1"
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "runs/0, runs/1"),
        ({"groups": "runs"}, "lengths"),
        ({"groups": "runs/*", "keys": "date"}, "'date'; it has: 'data'"),
        ({"groups": "runs/*", "keys": "start"}, "'runs/0/start' is a single"),
        ({"groups": "runs/*", "keys": "data", "static": ["weight"]}, "'weight'"),
    ]
    for options, named in cases:
        with pytest.raises((FormatError, MissingNameError), match=named):
            EpisodeDataset(path, **options)


# -- files that are not as they should be


def test_episodes_that_differ(demos: Path) -> None:
    for values, error, named in (
        (None, MissingNameError, r"demos\.hdf5: data/demo_4 .*'actions'; it has: 'dones'"),
        (np.zeros((8, 7)), FormatError, "data/demo_4: .* 'actions' 8, 'dones' 9"),
        (
            np.zeros((9, 6)),
            FormatError,
            r"data/demo_4: .*\[6\], and in .*data/demo_0 float64 \[7\]",
        ),
    ):
        spoil(write_demos(demos), "data/demo_4/actions", values)
        with pytest.raises(error, match=named):
            EpisodeDataset(demos)
    with EpisodeDataset(demos, ["obs/*"]) as dataset:
        assert len(dataset) == len(LENGTHS)


def test_an_empty_episode_is_left_out(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "a.hdf5", (3, 0, 4))
    with pytest.warns(HeadraceWarning, match="data/demo_1"):
        dataset = EpisodeDataset(path, window=2)
    assert dataset.episode_names == ["data/demo_0", "data/demo_2"] and len(dataset) == 7
    dataset.close()
    with pytest.warns(HeadraceWarning, match="data/demo_0 and 1 more"):
        dataset = EpisodeDataset(write_demos(tmp_path / "b.hdf5", (0, 0)))
    assert len(dataset) == 0 and not list(create_dataloader(dataset, num_workers=0))
    dataset.close()


def test_names_that_are_not_there(demos: Path, tmp_path: Path) -> None:
    with h5py.File(demos, "a") as file:
        file["mask/wrong"] = np.array([b"demo_1", b"demo_12"])
        for episode in file["data"].values():
            episode["empty"] = episode.attrs["nothing"] = h5py.Empty("f4")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"groups": "data/traj_*"}, r"data/traj_\*"),
        ({"keys": ["observations/*"]}, r"observations/\*'; it has: 'actions', 'dones'"),
        ({"episodes": ["demo_1", "demo_99"]}, "'demo_99'.* data/demo_0, data/demo_1"),
        ({"episodes": "mask/test"}, "'mask/test'"),
        ({"episodes": "mask/wrong"}, "'mask/wrong' lists 'demo_12'"),
        ({"keys": ["obs/*"], "static": ["goal"]}, "'goal'; it has: .*num_samples"),
        ({"keys": ["actions"], "static": ["nothing"]}, "'nothing'"),
    ]
    for options, named in cases:
        with pytest.raises(MissingNameError, match=named):
            EpisodeDataset(demos, **options)
    with pytest.raises(FormatError, match="empty' has a null dataspace"):
        EpisodeDataset(demos, ["actions"], static=["empty"])
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_group("train/images")
    with pytest.raises(MissingNameError, match="it has: train, train/images"):
        EpisodeDataset(tmp_path / "b.h5")
    with pytest.raises(FormatError):
        EpisodeDataset(tmp_path / "b.h5", groups="train/*")


def test_arguments_that_make_no_sense(demos: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"episodes": []}, "episodes"),
        ({"window": 500, "pad_after": 0}, "500"),
        ({"window": 0}, "window"),
        ({"window": {}}, "window={}"),
        ({"window": {"obs/*": 2}}, "'actions'"),
        ({"window": {"*": 2, "reward": 2}}, "'reward'"),
        ({"window": 4, "stride": 0}, "stride"),
        ({"stride": 2}, "stride=2"),
        ({"window": 4, "pad_before": 4}, "pad_before=4"),
        ({"window": 4, "pad": "reflect"}, "pad"),
        ({"dtype": "floot"}, "floot"),
        ({"dtype": {"reward": "f4"}}, "'reward'"),
        ({"keys": []}, "keys"),
        ({"static": 5}, "static"),
        ({"windows": 4}, "did you mean window"),
        ({"dataset_name": "actions"}, "'dataset_name'"),
    ]
    for options, named in cases:
        with pytest.raises(ConfigError, match=named):
            EpisodeDataset(demos, **options)


def test_a_key_that_is_called_mask(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data/demo_0/mask"] = file["data/demo_0/x"] = np.arange(4)
    with pytest.raises(ConfigError, match="'mask'"):
        EpisodeDataset(tmp_path / "a.h5", window=2)
    with EpisodeDataset(tmp_path / "a.h5") as dataset:
        assert dataset[0]["mask"].tolist() == [0, 1, 2, 3]


def test_a_file_that_changes(demos: Path, tmp_path: Path) -> None:
    for path, write in ((demos, write_demos), (tmp_path / "a.zarr", write_buffer)):
        with EpisodeDataset(write(path), window=2) as dataset:
            write(path, seed=9)
            with pytest.raises(FileChangedError):
                dataset[0]


# -- the laws


@pytest.mark.slow
class TestWindowsKeepTheLaws(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path: Path) -> None:
        self.path = write_demos(tmp_path / "a.hdf5", **GZIP)
        bad = write_demos(tmp_path / "bad.hdf5", (7, 12, 5), **GZIP, fletcher32=True)
        self.bad = damage_chunk(bad, "data/demo_1/obs/agentview_image", 2)  # steps 8 to 11

    def make(self, **options: Any) -> EpisodeDataset:
        return EpisodeDataset(self.path, window=4, stride=2, **options)

    def make_bad(self, **options: Any) -> tuple[EpisodeDataset, list[int]]:
        return EpisodeDataset(self.bad, window=2, stride=1, **options), [14, 15, 16, 17, 18]


@pytest.mark.slow
class TestEpisodesKeepTheLaws(TestWindowsKeepTheLaws):
    def make(self, **options: Any) -> EpisodeDataset:
        return EpisodeDataset([self.path, self.path], ["actions", "obs/*"], **options)

    def make_bad(self, **options: Any) -> Any:
        return None


@pytest.mark.slow
class TestRemoteWindows(RemoteDatasetContract):
    names = ("a.hdf5", "b.hdf5")

    def write(self, folder: Path) -> None:
        for seed, name in enumerate(self.names):
            write_demos(folder / name, LENGTHS, seed, **GZIP, fletcher32=True)

    def make(self, paths: list[str], **options: Any) -> EpisodeDataset:
        return EpisodeDataset(paths, ["actions", "obs/*"], window=3, stride=2, **options)


ENDS = np.cumsum(LENGTHS)
STARTS = ENDS - LENGTHS


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
        ({"episodes": "meta/wrong"}, MissingNameError, "'meta/wrong' lists 12"),
        ({"episodes": "meta/odd"}, FormatError, "'meta/odd'.*float64"),
        ({"episodes": "meta/valid"}, MissingNameError, "'meta/valid'"),
        ({"static": ["data/action"]}, FormatError, r"'data/action' has shape \[96, 2\]"),
    ]
    for options, error, named in refused:
        with pytest.raises(error, match=named):
            EpisodeDataset(path, **options)


def test_blocks_of_a_buffer_are_its_chunks(tmp_path: Path, make_loader: Any) -> None:
    """Of 8 rows, whatever episodes lie in them; a window may cross the end of one."""
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


def test_a_buffer_is_opened_by_content(tmp_path: Path) -> None:
    for name, rows in (("a.h5", HDF5Dataset), ("a.zarr", ZarrDataset)):
        path = write_buffer(tmp_path / name)
        with open_dataset(path, window=4) as dataset:
            assert isinstance(dataset, EpisodeDataset) and len(dataset) == sum(LENGTHS)
        with open_dataset(path, dataset_name="data/action") as dataset:
            assert isinstance(dataset, rows) and len(dataset) == sum(LENGTHS)
        with open_dataset(path) as dataset:
            columns = dataset.describe().columns
        assert {column.name for column in columns} == {"action", "img", "obs/state"}


# -- files that are not as they should be


WRONG_ENDS: list[tuple[Any, str]] = [
    (np.array([5, 9, 7, 12]), "episode 2 begins at row 9 and ends at 7"),
    (np.array([5, 5, 12]), "episode 1 begins at row 5 and ends at 5"),
    (np.array([0, 12]), "episode 0 begins at row 0 and ends at 0"),
    (np.array([5, -3, 12]), "episode 1 begins at row 5 and ends at -3"),
    (np.array([5, 11]), "ends at row 11.*12 rows"),
    (np.array([5, 13]), "ends at row 13.*12 rows"),
    (np.array([5.0, 12.0]), r"float64 \[2\]"),
    (np.array([[5, 12]]), r"int64 \[1, 2\]"),
    (np.zeros(0, np.int64), r"int64 \[0\]"),
    (np.array([5, 2**64 - 1], np.uint64), "18,446,744,073,709,551,615"),
]


def test_a_buffer_that_is_wrong(tmp_path: Path) -> None:
    path = write_buffer(tmp_path / "a.zarr", (5, 7))
    for ends, named in WRONG_ENDS:
        with pytest.raises(FormatError, match=named):
            EpisodeDataset(spoil(path, "meta/episode_ends", ends))
    spoil(path, "meta/episode_ends", np.array([5, 12]))
    for key in ("actions", "act?"):
        with pytest.raises(MissingNameError, match=r"'act.*; it has: 'action', 'img', 'obs/state'"):
            EpisodeDataset(path, [key])
    with pytest.raises(MissingNameError, match="'meta/goal'"):
        EpisodeDataset(path, static=["meta/goal"])
    for length in (11, 0):
        with pytest.raises(FormatError, match=f"'action' {length}, 'img' 12"):
            EpisodeDataset(spoil(path, "data/action", np.zeros((length, 2))))
    for key in ("action", "img", "obs/state"):
        spoil(path, f"data/{key}", None)
    with pytest.raises(FormatError, match="no array"):
        EpisodeDataset(path)


def test_stores_that_are_no_buffers(tmp_path: Path) -> None:
    path = write_buffer(tmp_path / "a.zarr", (5, 7))
    with pytest.raises(MissingNameError, match=r"'data/x\*'.*; it has: 'data', 'data/obs', 'meta'"):
        EpisodeDataset(path, groups="data/x*")
    with pytest.raises(MissingNameError, match="'meta/episode_ends'"):
        EpisodeDataset(spoil(path, "meta/episode_ends", None))
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["data"] = np.arange(3)
    with pytest.raises(FormatError, match=r"b\.h5"):
        EpisodeDataset([write_buffer(tmp_path / "a.h5"), tmp_path / "b.h5"])


# -- the laws
