"""EpisodeDataset over replay buffers: flat arrays of all steps in HDF5 and Zarr, compared with
what h5py and zarr-python read.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import pytest
import torch
import zarr

from headrace import (
    BudgetError,
    ConfigError,
    EpisodeDataset,
    FileChangedError,
    FormatError,
    HDF5Dataset,
    MissingNameError,
    SampleError,
    ZarrDataset,
    open_dataset,
    pack,
)
from headrace.inspecting.hdf5 import inspect_hdf5
from headrace.inspecting.zarr import inspect_zarr
from headrace.io.remote.options import RemoteOptions
from headrace.storage.hdf5.files import HDF5Files
from headrace.storage.sparse.hdf5 import HDF5Groups
from headrace.storage.sparse.zarr import ZarrGroups
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.datasets.demonstrations import LENGTHS, compare_batches, write_buffer, write_demos
from tests.datasets.remote_contract import RemoteDatasetContract

pytestmark = pytest.mark.quick_every(8)

KINDS = [
    ("a.h5", "gzip"),
    ("a.h5", "raw"),
    ("a.h5", "contiguous"),
    ("a.zarr", "2"),
    ("a.zarr", "3"),
]
ENDS = np.cumsum(LENGTHS)
STARTS = ENDS - LENGTHS


def stored(path: Path) -> dict[str, Any]:
    """The arrays of steps, as h5py or zarr-python read them."""
    keys = ("action", "img", "obs/state")
    if path.suffix == ".zarr":
        root = zarr.open_group(path, mode="r")
        return {key: np.asarray(root[f"data/{key}"][...]) for key in keys}
    with h5py.File(path) as file:
        return {key: file[f"data/{key}"][...] for key in keys}


def windows_of(
    arrays: dict[str, Any], first: int, end: int, how: tuple[int, int, int, int], pad: str
) -> list[dict[str, Any]]:
    """The windows of an episode, by a plain loop."""
    window, before, after, stride = how
    length, found = end - first, []
    for start in range(-before, length - window + after + 1, stride):
        steps = np.arange(start, start + window)
        inside = (steps >= 0) & (steps < length)
        sample = {}
        for key, values in arrays.items():
            rows = values[first + np.clip(steps, 0, length - 1)]
            if pad == "constant":
                rows[~inside] = 0
            sample[key] = torch.from_numpy(rows)
        found.append({**sample, "mask": torch.from_numpy(inside)})
    return found


# -- what samples are


@pytest.mark.parametrize(("name", "kind"), KINDS)
@pytest.mark.parametrize("direct", [True, False])
def test_whole_episodes_of_a_buffer(tmp_path: Path, name: str, kind: str, direct: bool) -> None:
    path = write_buffer(tmp_path / name, kind=kind)
    arrays = stored(path)
    with EpisodeDataset(path, direct=direct) as dataset:
        assert dataset.episode_names == [f"episode_{number}" for number in range(len(LENGTHS))]
        assert dataset.episode_lengths.tolist() == list(LENGTHS) == dataset.lengths().tolist()
        found = dataset.__getitems__(list(range(len(dataset))))
        for number, (first, end) in enumerate(zip(STARTS, ENDS, strict=True)):
            assert list(found[number]) == ["action", "img", "obs/state"]
            assert all(
                same(found[number][key], torch.from_numpy(values[first:end]))
                for key, values in arrays.items()
            ), number
        assert same(dataset[4], found[4]) and dataset.source_of(10).endswith(f"{name}, episode_10")


@pytest.mark.quick_every(4)
@pytest.mark.parametrize(("name", "kind"), KINDS)
@pytest.mark.parametrize(
    "how", [(1, 0, 0, 1), (4, 3, 3, 2), (4, 0, 0, 4), (6, 5, 0, 3), (40, 1, 39, 7)]
)
@pytest.mark.parametrize("pad", ["edge", "constant"])
def test_windows_of_a_buffer(
    tmp_path: Path, name: str, kind: str, how: tuple[int, int, int, int], pad: Any
) -> None:
    path = write_buffer(tmp_path / name, kind=kind)
    arrays, (window, before, after, stride) = stored(path), how
    with EpisodeDataset(
        path, window=window, stride=stride, pad_before=before, pad_after=after, pad=pad
    ) as dataset:
        expected = [
            one
            for place in zip(STARTS, ENDS, strict=True)
            for one in windows_of(arrays, *place, how, pad)
        ]
        found = dataset.__getitems__(list(range(len(dataset))))
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one.keys() == other.keys() and all(same(one[key], other[key]) for key in one), (
                number
            )


@pytest.mark.parametrize(
    ("name", "kind"), [("a.h5", "gzip"), ("a.h5", "contiguous"), ("a.zarr", "2")]
)
@pytest.mark.parametrize("mode", ["lazy", "eager", "cached", "streaming"])
def test_batches_of_a_buffer(
    tmp_path: Path, make_loader: Any, name: str, kind: str, mode: str
) -> None:
    path = write_buffer(tmp_path / name, kind=kind)
    compare_batches(path, make_loader, mode, keys=["action", "obs/*"], dtype={"obs/*": "float32"})


def test_a_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens: list[str] = []
    original = HDF5Files.open
    monkeypatch.setattr(
        HDF5Files, "open", lambda self, path: opens.append(path) or original(self, path)
    )
    for path in (write_buffer(tmp_path / "a.h5"), write_demos(tmp_path / "b.h5", (3, 4))):
        with EpisodeDataset([path, path], window=2) as dataset:
            assert len(dataset) and opens == [str(path)] * 2
        opens.clear()


def test_static_values_are_measured_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.storage.episodes.look._STATIC_BYTES", 1000)
    with h5py.File(write_buffer(tmp_path / "a.h5"), "r+") as file:
        file["meta/goal"] = np.zeros((len(LENGTHS), 30))
    with h5py.File(write_demos(tmp_path / "b.h5", (3, 4)), "r+") as file:
        file["data/demo_1/goal"], file["data/demo_0/goal"] = np.zeros(200), np.zeros(200)
    zarr.open_group(write_buffer(tmp_path / "a.zarr", kind="2"), mode="r+").create_array(
        "meta/goal", data=np.zeros((len(LENGTHS), 30))
    )

    def refuse(self: Any, name: Any) -> Any:
        assert name in ("meta/episode_ends", "/"), "it was read"
        return columns[type(self)](self, name)

    columns = {kind: kind.column for kind in (HDF5Groups, ZarrGroups)}
    for kind in columns:
        monkeypatch.setattr(kind, "column", refuse)
    monkeypatch.setattr(h5py.Dataset, "__getitem__", refuse)
    for name, static in (("a.h5", "meta/goal"), ("b.h5", "goal"), ("a.zarr", "meta/goal")):
        with pytest.raises(
            BudgetError,
            match=rf"static='{static}' takes [\d,]+ bytes, which would be held in memory",
        ):
            EpisodeDataset(tmp_path / name, static=[static])


@pytest.mark.parametrize(("name", "kind"), [("a.h5", "gzip"), ("a.zarr", "3")])
def test_workers_read_a_buffer(tmp_path: Path, make_loader: Any, name: str, kind: str) -> None:
    dataset = EpisodeDataset(write_buffer(tmp_path / name, kind=kind), window=4)
    batches = [
        list(make_loader(dataset, batch_size=8, shuffle=True, num_workers=workers, seed=1))
        for workers in (0, 2)
    ]
    assert all(
        same(one[key], other[key]) for one, other in zip(*batches, strict=True) for key in one
    )
    dataset.close()


def test_episodes_of_a_buffer_are_chosen(tmp_path: Path) -> None:
    path = write_buffer(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file["meta/train"], file["meta/odd"] = np.array([9, 1]), np.array([1.5])
        file["meta/wrong"] = np.array([3, 12])
    arrays = stored(path)
    for episodes, numbers in (
        (["episode_10", "episode_2"], [2, 10]),
        ("meta/train", [1, 9]),
        ("meta/success", list(range(0, 12, 2))),
    ):
        with EpisodeDataset(
            path, ["action"], episodes=episodes, static=["meta/success", "meta/task"]
        ) as dataset:
            assert dataset.episode_names == [f"episode_{number}" for number in numbers]
            for at, number in enumerate(numbers):
                sample = dataset[at]
                assert same(
                    sample["action"],
                    torch.from_numpy(arrays["action"][STARTS[number] : ENDS[number]]),
                )
                assert (
                    bool(sample["meta/success"]) == (number % 2 == 0)
                    and sample["meta/task"] == f"task {number}"
                )
        with EpisodeDataset(path, episodes=episodes, window=3) as dataset:
            assert (
                dataset.blocks().sum() == len(dataset) == sum(LENGTHS[number] for number in numbers)
            )
    with pytest.raises(
        MissingNameError, match="no file has an episode 'demo_1', which episodes= names"
    ):
        EpisodeDataset(path, episodes=["demo_1"])
    with pytest.raises(
        MissingNameError, match="'meta/wrong' lists episode 12, which is missing; there are 0 to 11"
    ):
        EpisodeDataset(path, episodes="meta/wrong")
    with pytest.raises(FormatError, match="'meta/odd', which episodes= names, holds float64"):
        EpisodeDataset(path, episodes="meta/odd")
    with pytest.raises(MissingNameError, match="has no array 'meta/valid', which episodes= names"):
        EpisodeDataset(path, episodes="meta/valid")
    with pytest.raises(
        FormatError,
        match=r"'data/action' has shape \[96, 2\], and static= takes arrays with one value",
    ):
        EpisodeDataset(path, static=["data/action"])


def test_a_buffer_is_split_by_episodes(tmp_path: Path) -> None:
    path = write_buffer(tmp_path / "a.zarr")
    with EpisodeDataset(path, window=4, pad_after=0) as dataset:
        train, test = dataset.split(0.7, groups=dataset.episode_numbers())
        assert not set(train.episode_numbers().tolist()) & set(test.episode_numbers().tolist())
        values = np.concatenate(
            [
                stored(path)["action"][STARTS[n] : ENDS[n]]
                for n in sorted(set(train.episode_numbers().tolist()))
            ]
        )
        found = train.statistics("action")["action"]
        assert found.count == len(values) and found.mean.dtype == torch.float32
        assert np.allclose(found.mean, values.mean(0), rtol=1e-5) and np.allclose(
            found.std, values.std(0), rtol=1e-5
        )
        assert same(found.min, torch.from_numpy(values.min(0))) and same(
            found.max, torch.from_numpy(values.max(0))
        )


@pytest.mark.parametrize(
    ("names", "kind"), [(("a.h5", "b.h5"), "gzip"), (("a.zarr", "b.zarr"), "3")]
)
def test_several_buffers_are_one_dataset(tmp_path: Path, names: tuple[str, str], kind: str) -> None:
    paths = [
        write_buffer(tmp_path / name, lengths, seed, kind)
        for seed, (name, lengths) in enumerate(zip(names, ((9, 4), (3, 8)), strict=True))
    ]
    with EpisodeDataset(tmp_path, window=2, pad_after=0) as dataset:
        assert (
            dataset.episode_names == ["episode_0", "episode_1"] * 2
            and len(dataset) == 8 + 3 + 2 + 7
        )
        assert dataset.blocks().sum() == len(dataset)
        assert same(dataset[19]["img"], torch.from_numpy(stored(paths[1])["img"][9:11]))
        assert dataset.source_of(19).endswith(f"{names[1]}, episode_1, steps 6 to 7")


def test_blocks_of_a_buffer_are_its_chunks(tmp_path: Path, make_loader: Any) -> None:
    """Chunks of 8 rows, whatever episodes lie in them: each is decoded once in an epoch, or
    twice where a window crosses its end.
    """
    path = write_buffer(tmp_path / "a.h5")
    with EpisodeDataset(path, ["img"], window=3, pad_before=1) as dataset:
        firsts = np.concatenate(
            [
                start + np.maximum(0, np.arange(-1, length))
                for start, length in zip(STARTS, LENGTHS, strict=True)
            ]
        )
        assert dataset.blocks().tolist() == np.unique(firsts // 8, return_counts=True)[1].tolist()
        loader = make_loader(
            dataset, batch_size=4, shuffle="block", num_workers=0, seed=1, interleave=1, turns=1
        )
        assert sum(len(batch["mask"]) for batch in loader) == len(dataset)
        assert loader.get_stats()["chunks_decoded"] <= 2 * 12
    with EpisodeDataset(path, ["img"]) as dataset:
        assert dataset.blocks().tolist() == np.unique(STARTS // 8, return_counts=True)[1].tolist()
        assert dataset.sample_source.block_nbytes >= 20 * 90
    with EpisodeDataset(
        write_buffer(tmp_path / "b.h5", kind="contiguous"), window=2, pad_after=0
    ) as dataset:
        assert dataset.blocks().tolist() == [length - 1 for length in LENGTHS if length > 1]


def test_strings_of_a_buffer(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data/words"], file["data/x"] = [f"wort {step}" for step in range(7)], np.arange(7)
        file["meta/episode_ends"] = np.array([3, 7])
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr-python says that strings have no specification yet
        root.create_array("data/words", shape=(7,), dtype=str)[...] = np.array(
            [f"wort {step}" for step in range(7)], object
        )
    root.create_array("data/x", shape=(7,), dtype="i8")[...] = np.arange(7)
    root.create_array("meta/episode_ends", shape=(2,), dtype="i8")[...] = [3, 7]
    for name in ("a.h5", "a.zarr"):
        with EpisodeDataset(tmp_path / name, window=3) as dataset:
            assert (
                dataset[4]["words"] == ["wort 4", "wort 5", "wort 6"]
                and dataset[2]["words"] == ["wort 2"] * 3
            )
        with EpisodeDataset(tmp_path / name) as dataset:
            assert dataset[1]["words"] == [f"wort {step}" for step in range(3, 7)]
        with pytest.raises(ConfigError, match="pad='constant' has no value for 'words'"):
            EpisodeDataset(tmp_path / name, window=3, pad="constant")


def test_a_buffer_is_opened_by_content(tmp_path: Path) -> None:
    for name, rows in (("a.h5", HDF5Dataset), ("a.zarr", ZarrDataset)):
        path = write_buffer(tmp_path / name)
        with open_dataset(path) as dataset, open_dataset(path, window=4) as windows:
            assert (
                isinstance(dataset, EpisodeDataset)
                and len(dataset) == len(LENGTHS)
                and len(windows) == sum(LENGTHS)
            )
        with open_dataset(path, dataset_name="data/action") as dataset:
            assert isinstance(dataset, rows) and len(dataset) == sum(LENGTHS)
        report = (inspect_hdf5 if name == "a.h5" else inspect_zarr)(path, RemoteOptions())
        assert (
            report.samples == len(LENGTHS)
            and report.opens_as == f"headrace.EpisodeDataset({str(path)!r}, window=16)"
        )
        told = (
            "episodes of a replay buffer, of 1 to 20 steps (96 in all): action float32 [2], img "
            "uint8 [6, 5, 3], obs/state float64 [3]"
        )
        assert report.samples_are == told
        assert {one.name for one in report.access} == {"data/action", "data/img", "data/obs/state"}
    zarr.open_group(tmp_path / "a.zarr", mode="r+")["meta/episode_ends"][...] = 5
    report = inspect_zarr(tmp_path / "a.zarr", RemoteOptions())
    assert report.samples == sum(LENGTHS) and any(
        "meta/episode_ends must rise" in note for note in report.notes
    )


def test_pickle_and_pack_of_a_buffer(tmp_path: Path) -> None:
    with EpisodeDataset(write_buffer(tmp_path / "a.zarr"), ["action"], window=4) as dataset:
        copy = pickle.loads(pickle.dumps(dataset))
        assert same(copy[3], dataset[3]) and copy.fingerprint == dataset.fingerprint
        copy.close()
        with HDF5Dataset(
            pack(dataset, tmp_path / "windows.h5", workers=1, progress=False)
        ) as packed:
            assert same(packed[5]["action"], dataset[5]["action"])


# -- files that are not as they should be


def spoil(path: Path, name: str, values: Any) -> Path:
    """Replaces an array; None: removes it."""
    root: Any = (
        zarr.open_group(path, mode="r+") if path.suffix == ".zarr" else h5py.File(path, "r+")
    )
    del root[name]
    if values is not None and path.suffix == ".zarr":
        root.create_array(name, shape=values.shape, dtype=values.dtype)[...] = values
    elif values is not None:
        root[name] = values
    if path.suffix == ".zarr":
        zarr.consolidate_metadata(root.store)
    else:
        root.close()
    return path


@pytest.mark.parametrize("name", ["a.h5", "a.zarr"])
@pytest.mark.parametrize(
    ("array", "values", "message"),
    [
        (
            "meta/episode_ends",
            np.array([5, 9, 7, 12]),
            r"must rise, and episode 2 begins at row 9 and ends at 7",
        ),
        (
            "meta/episode_ends",
            np.array([5, 5, 12]),
            r"must rise, and episode 1 begins at row 5 and ends at 5",
        ),
        (
            "meta/episode_ends",
            np.array([0, 12]),
            r"must rise, and episode 0 begins at row 0 and ends at 0",
        ),
        (
            "meta/episode_ends",
            np.array([5, -3, 12]),
            r"episode_ends\[1\] is -3, and no row is negative",
        ),
        (
            "meta/episode_ends",
            np.array([5, 11]),
            r"ends at row 11, by meta/episode_ends, and the arrays of 'data' have 12 rows",
        ),
        (
            "meta/episode_ends",
            np.array([5, 13]),
            r"ends at row 13, by meta/episode_ends, and the arrays of 'data' have 12 rows",
        ),
        (
            "meta/episode_ends",
            np.array([5.0, 12.0]),
            r"holds float64 \[2\], and must hold integers",
        ),
        (
            "meta/episode_ends",
            np.array([[5, 12]]),
            r"has shape \[1, 2\], and must have one number an episode",
        ),
        (
            "meta/episode_ends",
            np.zeros(0, np.int64),
            r"meta/episode_ends is empty, so the file has no episodes",
        ),
        (
            "meta/episode_ends",
            np.array([5, 2**64 - 1], np.uint64),
            r"has 18446744073709551615, more than there can be rows",
        ),
        (
            "data/action",
            np.zeros((11, 2)),
            r"the arrays of 'data' have different lengths: 'action' 11, 'img' 12, 'obs/state' 12",
        ),
        (
            "data/action",
            np.zeros((0, 2)),
            r"the arrays of 'data' have different lengths: 'action' 0, 'img' 12",
        ),
    ],
)
def test_a_buffer_that_is_wrong(
    tmp_path: Path, name: str, array: str, values: Any, message: str
) -> None:
    path = spoil(write_buffer(tmp_path / name, (5, 7)), array, values)
    with pytest.raises(FormatError, match=message):
        EpisodeDataset(path)


@pytest.mark.parametrize("name", ["a.h5", "a.zarr"])
def test_names_that_a_buffer_lacks(tmp_path: Path, name: str) -> None:
    path = write_buffer(tmp_path / name, (5, 7))
    for keys in (["actions"], ["act?"]):
        with pytest.raises(
            MissingNameError, match=r"'data' has no array 'act.*; it has: action, img, obs/state"
        ):
            EpisodeDataset(path, keys)
    with pytest.raises(MissingNameError, match="has no array 'meta/goal', which static= names"):
        EpisodeDataset(path, static=["meta/goal"])
    for key in ("action", "img", "obs/state"):
        spoil(path, f"data/{key}", None)
    with pytest.raises(
        FormatError, match="meta/episode_ends has 2 episodes, and 'data' no arrays with their steps"
    ):
        EpisodeDataset(path)


def test_stores_that_are_no_buffers(tmp_path: Path) -> None:
    path = write_buffer(tmp_path / "a.zarr", (5, 7))
    with pytest.raises(
        MissingNameError,
        match=(
            r"has no groups 'data/x\*', of which each would be an episode; it has: data, "
            r"data/obs, meta"
        ),
    ):
        EpisodeDataset(path, groups="data/x*")
    with pytest.raises(
        MissingNameError,
        match=r"pass groups=, .*a replay buffer has an array 'meta/episode_ends' beside",
    ):
        EpisodeDataset(spoil(path, "meta/episode_ends", None))
    with pytest.raises(FormatError, match=r"b\.h5 is no replay buffer"):
        with h5py.File(tmp_path / "b.h5", "w") as file:
            file["data"] = np.arange(3)
        EpisodeDataset([write_buffer(tmp_path / "a.h5"), tmp_path / "b.h5"])


def test_buffers_that_differ(tmp_path: Path) -> None:
    paths = [write_buffer(tmp_path / name, (5, 7)) for name in ("a.h5", "b.h5")]
    spoil(paths[1], "data/action", np.zeros((12, 3)))
    with pytest.raises(
        FormatError,
        match=r"b\.h5: steps of 'action' are float64 \[3\], and in .*a\.h5 float32 \[2\]",
    ):
        EpisodeDataset(paths)
    spoil(paths[1], "data/action", None)
    with pytest.raises(
        MissingNameError, match=r"b\.h5: 'data' has no array 'action', which other files have"
    ):
        EpisodeDataset(paths)
    with EpisodeDataset(paths, ["img"]) as dataset:
        assert len(dataset) == 4


@pytest.mark.parametrize("name", ["a.h5", "a.zarr"])
def test_a_buffer_that_changes(tmp_path: Path, name: str) -> None:
    with EpisodeDataset(write_buffer(tmp_path / name), window=2) as dataset:
        write_buffer(tmp_path / name, seed=9)
        with pytest.raises(FileChangedError):
            dataset[0]


def damaged(path: Path) -> Path:
    """A buffer whose second chunk of images is damaged: rows 8 to 15."""
    with h5py.File(write_buffer(path, (10, 12, 18))) as file:
        place = file["data/img"].id.get_chunk_info(1).byte_offset
    with open(path, "r+b") as raw:
        raw.seek(place + 20)
        raw.write(b"\0damage\0" * 4)
    return path


def test_a_damaged_chunk_of_a_buffer(tmp_path: Path) -> None:
    with EpisodeDataset(damaged(tmp_path / "a.h5"), window=2, pad_after=0) as dataset:
        assert dataset[0]["mask"].all() and dataset[15]["mask"].all()
        with pytest.raises(SampleError, match=r"sample 9 can't be read: .*episode_1"):
            dataset[9]


# -- the laws


class _Contract(DatasetContract):
    options: ClassVar[dict[str, Any]]
    name, kind = "contract.h5", "gzip"

    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.getbasetemp() / self.name
        if not self.path.exists():
            write_buffer(self.path, kind=self.kind)

    def make(self, **options: Any) -> EpisodeDataset:
        return EpisodeDataset(self.path, **self.options, **options)


@pytest.mark.quick_every(3)
class TestWindowsOfBuffersKeepTheLaws(_Contract):
    options: ClassVar[dict[str, Any]] = {"window": 4, "stride": 2, "pad_before": 1}

    def make_bad(self, **options: Any) -> tuple[EpisodeDataset, list[int]]:
        path = self.path.parent / "contract-damaged-buffer.h5"
        return EpisodeDataset(
            path if path.exists() else damaged(path), window=2, stride=1, **options
        ), list(range(7, 16))


@pytest.mark.quick_every(4)
class TestEpisodesOfBuffersKeepTheLaws(_Contract):
    options: ClassVar[dict[str, Any]] = {}

    def make(self, **options: Any) -> EpisodeDataset:
        return EpisodeDataset([self.path, self.path], **self.options, **options)


@pytest.mark.slow
class TestWindowsOfStoresKeepTheLaws(_Contract):
    name, kind = "contract-buffer.zarr", "2"
    options: ClassVar[dict[str, Any]] = {"window": 4, "stride": 2}


@pytest.mark.slow
class TestRemoteBuffers(RemoteDatasetContract):
    names = ("a.hdf5", "b.hdf5")

    def write(self, folder: Path) -> None:
        write_buffer(folder / "a.hdf5", LENGTHS, 1)
        write_buffer(folder / "b.hdf5", LENGTHS, 2)

    def make(self, paths: list[str], **options: Any) -> EpisodeDataset:
        return EpisodeDataset(paths, ["action", "obs/*"], window=3, stride=2, **options)


@pytest.mark.slow
class TestRemoteStores(RemoteDatasetContract):
    names = ("a.zarr",)
    data = tuple(f"a.zarr/data/action/c/{number}/0" for number in range(12))
    has_index = False
    is_versioned = False

    def write(self, folder: Path) -> None:
        write_buffer(folder / "a.zarr", LENGTHS, 1, "3")

    def make(self, paths: list[str], **options: Any) -> EpisodeDataset:
        return EpisodeDataset(paths, ["action"], window=3, stride=2, **options)
