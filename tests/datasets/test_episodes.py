"""EpisodeDataset: episodes and windows over time, compared with what h5py reads; and files that
are not as they should be.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any, ClassVar

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
    SampleError,
    create_dataloader,
    open_dataset,
    pack,
)
from headrace.inspecting.inspect import inspect
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.datasets.demonstrations import (
    LENGTHS,
    arrays_of,
    compare_batches,
    write_buffer,
    write_demos,
)
from tests.datasets.remote_contract import RemoteDatasetContract

pytestmark = pytest.mark.quick_every(8)

GZIP = {"chunks": (4, 6, 5, 3), "compression": "gzip"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "gzip": GZIP,
    "cut": {"chunks": (3, 4, 5, 3), "compression": "gzip", "shuffle": True},
    "raw": {"chunks": (4, 6, 5, 3)},
    "lzf": {"chunks": (4, 6, 5, 3), "compression": "lzf"},
}


@pytest.fixture
def demos(tmp_path: Path) -> Path:
    return write_demos(tmp_path / "demos.hdf5", **{"chunks": True, "compression": "gzip"})


def windows_of(
    arrays: dict[str, Any], window: int, before: int, after: int, stride: int, pad: str
) -> list[dict[str, Any]]:
    """The windows of an episode, by a plain loop."""
    length, found = len(arrays["actions"]), []
    for start in range(-before, length - window + after + 1, stride):
        steps = np.arange(start, start + window)
        inside = (steps >= 0) & (steps < length)
        sample = {}
        for key, values in arrays.items():
            rows = values[np.clip(steps, 0, length - 1)]
            if pad == "constant":
                rows[~inside] = 0
            sample[key] = torch.from_numpy(rows)
        found.append({**sample, "mask": torch.from_numpy(inside)})
    return found


# -- what samples are


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direct", [True, False])
def test_whole_episodes(tmp_path: Path, layout: str, direct: bool) -> None:
    path = write_demos(tmp_path / "a.hdf5", **LAYOUTS[layout])
    with EpisodeDataset(path, direct=direct) as dataset:
        # 10 behind 2
        assert dataset.episode_names == [f"data/demo_{number}" for number in range(len(LENGTHS))]
        assert dataset.episode_lengths.tolist() == list(LENGTHS) == dataset.lengths().tolist()
        for number, name in enumerate(dataset.episode_names):
            arrays = arrays_of(path, name)
            sample = dataset[number]
            assert list(sample) == ["actions", "dones", "obs/agentview_image", "obs/joint_pos"]
            assert all(same(sample[key], torch.from_numpy(arrays[key])) for key in arrays), number
        assert dataset.source_of(10).endswith("a.hdf5, data/demo_10")


@pytest.mark.quick_every(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "how", [(1, 0, 0, 1), (4, 0, 3, 1), (4, 3, 3, 2), (4, 0, 0, 4), (6, 5, 0, 3), (40, 1, 39, 7)]
)
@pytest.mark.parametrize("pad", ["edge", "constant"])
def test_windows_are_those_of_a_loop(
    tmp_path: Path, layout: str, how: tuple[int, int, int, int], pad: Any
) -> None:
    window, before, after, stride = how
    path = write_demos(tmp_path / "a.hdf5", **LAYOUTS[layout])
    with EpisodeDataset(
        path, window=window, stride=stride, pad_before=before, pad_after=after, pad=pad
    ) as dataset:
        expected = [
            one
            for name in dataset.episode_names
            for one in windows_of(arrays_of(path, name), window, before, after, stride, pad)
        ]
        assert len(dataset) == len(expected)
        found = dataset.__getitems__(list(range(len(dataset))))
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one.keys() == other.keys() and all(same(one[key], other[key]) for key in one), (
                number
            )
        assert all(same(dataset[number], found[number]) for number in (0, len(dataset) - 1))


def test_keys_may_have_windows_of_their_own(demos: Path) -> None:
    with EpisodeDataset(
        demos, ["actions", "obs/*"], window={"obs/*": 2, "actions": 8}, pad_before=1
    ) as dataset:
        whole = EpisodeDataset(demos, ["actions", "obs/*"], window=8, pad_before=1)
        assert len(dataset) == len(whole)
        for number in range(0, len(dataset), 3):
            one, other = dataset[number], whole[number]
            assert len(one["mask"]) == len(one["actions"]) == 8 and len(one["obs/joint_pos"]) == 2
            assert all(same(one[key], other[key][: len(one[key])]) for key in one)
        whole.close()


def test_a_batch_of_windows(demos: Path, make_loader: Any) -> None:
    dataset = EpisodeDataset(demos, window=4, dtype={"actions": "float32"})
    batch = next(iter(make_loader(dataset, batch_size=8, shuffle=True, num_workers=2, seed=1)))
    assert (
        batch["obs/agentview_image"].shape == (8, 4, 6, 5, 3) and batch["mask"].dtype == torch.bool
    )
    assert batch["actions"].dtype == torch.float32 and batch["obs/joint_pos"].dtype == torch.float32
    assert dataset.sample_nbytes() == sum(value[0].nbytes for value in batch.values())
    dataset.close()


@pytest.mark.parametrize("layout", ["contiguous", "gzip", "lzf"])
@pytest.mark.parametrize("mode", ["lazy", "eager", "cached", "streaming"])
def test_batches_are_those_of_single_samples(
    tmp_path: Path, make_loader: Any, layout: str, mode: str
) -> None:
    path = write_demos(tmp_path / "a.hdf5", **LAYOUTS[layout])
    compare_batches(
        path, make_loader, mode, keys=["actions", "obs/*"], dtype={"actions": "float32"}
    )


def test_steps_are_held_once(tmp_path: Path, make_loader: Any) -> None:
    """Windows of 20 steps take twenty times as much as the steps; ranks of a machine share these
    too.
    """
    path = write_demos(tmp_path / "a.hdf5", (300,) * 4)
    steps = 4 * 300 * (56 + 12 + 90 + 1)
    for options in (
        {"loading_mode": "eager"},
        {"loading_mode": "cached"},
        {"loading_mode": "eager", "shared": "machine", "cache_dir": tmp_path},
    ):
        with EpisodeDataset(path, window=20, progress=False, **options) as dataset:
            list(make_loader(dataset, batch_size=64, num_workers=0))
            held = dataset.mode.stats()
            assert steps <= held["held_bytes"] < 2 * steps < dataset.held_nbytes() / 5, held
            assert same(dataset[7], EpisodeDataset(path, window=20)[7])


@pytest.mark.falls_back
def test_a_damaged_window_is_skipped(tmp_path: Path, make_loader: Any) -> None:
    dataset = EpisodeDataset(damaged(tmp_path), window=2, pad_after=0, on_error="skip")
    loader = make_loader(dataset, batch_size=4, shuffle=False, num_workers=0)
    assert (
        sum(len(batch["mask"]) for batch in loader) == len(dataset) - 4
        and loader.get_stats()["skipped"] == 4
    )
    dataset.close()


def test_a_null_dataspace_is_no_static_value(demos: Path) -> None:
    with h5py.File(demos, "a") as file:
        for episode in file["data"].values():
            episode["empty"], episode.attrs["nothing"] = h5py.Empty("S3"), h5py.Empty("f4")
    for name in ("empty", "nothing"):
        with pytest.raises(MissingNameError, match=f"has no array and no attribute '{name}'"):
            EpisodeDataset(demos, ["actions"], static=[name])


def test_a_batch_of_whole_episodes_is_padded(demos: Path, make_loader: Any) -> None:
    dataset = EpisodeDataset(demos, ["actions", "obs/joint_pos"], static=["model_file"])
    batch = next(iter(make_loader(dataset, batch_size=4, shuffle=False, num_workers=0)))
    assert batch["actions"].shape == (4, 12, 7) and batch["lengths"].tolist() == [7, 12, 5, 1]
    assert batch["mask"].sum(1).tolist() == [7, 12, 5, 1] and batch["model_file"] == [
        f"<mujoco {number}>" for number in range(4)
    ]
    assert not batch["actions"][~batch["mask"]].any() and same(
        batch["obs/joint_pos"][1], dataset[1]["obs/joint_pos"]
    )
    dataset.close()


def test_some_episodes(demos: Path) -> None:
    with (
        EpisodeDataset(demos, episodes="mask/valid") as valid,
        EpisodeDataset(demos, episodes=["demo_10", "data/demo_2"]) as two,
    ):
        assert valid.episode_names == ["data/demo_0"] and two.episode_names == [
            "data/demo_2",
            "data/demo_10",
        ]
    with EpisodeDataset(demos, window=4, pad_after=0) as dataset:
        assert set(dataset.episode_numbers().tolist()) == {
            number for number, length in enumerate(LENGTHS) if length >= 4
        }
        train, test = dataset.split(0.7, groups=dataset.episode_numbers())
        assert not set(train.episode_numbers().tolist()) & set(test.episode_numbers().tolist())
        assert "2 are too short for one" in dataset.explain()


def test_a_file_for_each_episode(tmp_path: Path) -> None:
    """As ALOHA and ACT have them."""
    for number in range(3):
        with h5py.File(tmp_path / f"episode_{number}.hdf5", "w") as file:
            file["action"] = np.full((5 + number, 2), number)
            file["observations/qpos"] = np.zeros((5 + number, 14))
            file.create_dataset(
                "observations/images/top",
                data=np.full((5 + number, 4, 4, 3), number, np.uint8),
                chunks=(1, 4, 4, 3),
            )
            file["language"] = f"task {number}"
    with EpisodeDataset(tmp_path, static=["language"]) as dataset:
        assert (
            len(dataset) == 3
            and dataset.episode_names == ["", "", ""]
            and dataset[2]["language"] == "task 2"
        )
        assert list(dataset[1]) == [
            "action",
            "observations/images/top",
            "observations/qpos",
            "language",
        ]
        assert dataset.source_of(1).endswith("episode_1.hdf5, /")


def test_a_group_for_each_sample(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(30):
            group = file.create_group(f"{number}")
            group["image"], group["mask"] = (
                np.full((4, 5), number, "u1"),
                np.full((4, 5), number % 2, "u1"),
            )
            group.attrs["label"] = number % 3
            group.attrs["split"] = f"part {number % 2}"
    with EpisodeDataset(tmp_path / "a.h5", static=["label", "split"]) as dataset:
        assert (
            len(dataset) == 30
            and dataset[12]["image"][0, 0] == 12
            and dataset[13]["mask"].sum() == 20
        )
        assert (
            dataset[14]["label"] == 2
            and isinstance(dataset[14]["label"], torch.Tensor)
            and dataset[15]["split"] == "part 1"
        )


def test_time_series_of_neurophysiology(tmp_path: Path) -> None:
    """NWB: a group for each series, of its own length and rate."""
    with h5py.File(tmp_path / "a.nwb.h5", "w") as file:
        for name, length in (("probe", 90), ("wheel", 40)):
            series = file.create_group(f"acquisition/{name}")
            series.create_dataset(
                "data",
                data=np.arange(length * 2.0).reshape(length, 2),
                chunks=(16, 2),
                compression="gzip",
            )
            series["timestamps"] = np.arange(length) / 30
        file["general/session"] = "mouse 1"
    with EpisodeDataset(
        tmp_path / "a.nwb.h5", groups="acquisition/probe", window=30, stride=30, pad_after=29
    ) as dataset:
        assert (
            len(dataset) == 3
            and dataset[1]["data"][0, 0] == 60
            and dataset[2]["timestamps"][-1] == 89 / 30
        )
    with EpisodeDataset(
        tmp_path / "a.nwb.h5", groups="acquisition/*", window=30, stride=10, pad_after=0
    ) as dataset:
        assert (
            dataset.episode_names == ["acquisition/probe", "acquisition/wheel"]
            and len(dataset) == 7 + 2
        )


# -- NWB


def write_session(path: Path, dtype: str = "i2", channels: bool = True, **how: Any) -> Path:
    """Two series of electrodes, as NWB lays them out."""
    draws = np.random.default_rng(3)
    with h5py.File(path, "w") as file:
        for number, length in enumerate((50, 30)):
            series = file.create_group(f"acquisition/probe_{number}")
            series.create_dataset(
                "data", data=draws.integers(-120, 120, (length, 3)).astype(dtype), **how
            )
            series["data"].attrs.update(
                conversion=2.5e-6 * (number + 1), offset=0.125, resolution=-1.0, unit="volts"
            )
            series["timestamps"] = np.arange(length) / 30
            if channels:
                series["channel_conversion"] = np.array([1.0, 0.5, 3.0], "f4")
                series["channel_conversion"].attrs["axis"] = 1
    return path


def in_volts(path: Path, number: int) -> Any:
    """The values of a series in float64, as NWB defines them."""
    with h5py.File(path) as file:
        series = file[f"acquisition/probe_{number}"]
        data, channels = series["data"], series.get("channel_conversion")
        scale = data.attrs["conversion"] * (1 if channels is None else channels[...].astype("f8"))
        return data[...].astype("f8") * scale + data.attrs["offset"]


@pytest.mark.parametrize(
    "layout", [{}, {"chunks": (16, 2), "compression": "gzip"}, {"chunks": (8, 3)}]
)
@pytest.mark.parametrize(
    ("dtype", "made"),
    [("i2", "f4"), ("u1", "f4"), ("f4", "f4"), ("i4", "f8"), ("f8", "f8"), (">i2", "f4")],
)
def test_units_of_nwb(tmp_path: Path, layout: dict[str, Any], dtype: str, made: str) -> None:
    path = write_session(tmp_path / "a.nwb.h5", dtype, **layout)
    how: dict[str, Any] = {
        "keys": ["data", "timestamps"],
        "groups": "acquisition/*",
        "decode_nwb": True,
    }
    with (
        EpisodeDataset(path, **how) as dataset,
        EpisodeDataset(path, window=7, pad_before=3, direct=False, **how) as windows,
    ):
        for number in range(2):
            values = in_volts(path, number)
            found = dataset[number]["data"]
            assert found.dtype == (torch.float32 if made == "f4" else torch.float64)
            assert np.allclose(found, values, rtol=3e-7 if made == "f4" else 1e-15, atol=0)
            assert same(
                dataset[number]["timestamps"], torch.arange(len(values), dtype=torch.float64) / 30
            )
        assert same(windows[0]["data"][3:], dataset[0]["data"][:4]) and same(
            windows[-1]["data"][0], dataset[1]["data"][-1]
        )
        whole = np.concatenate([in_volts(path, 0), in_volts(path, 1)])
        one = dataset.statistics("data")["data"]
        assert one.mean.dtype == found.dtype and one.count == 80
        assert np.allclose(one.mean, whole.mean(0), rtol=1e-6) and np.allclose(
            one.std, whole.std(0), rtol=1e-3
        )
        with EpisodeDataset(path, **{**how, "decode_nwb": False}) as plain:
            assert plain.fingerprint != dataset.fingerprint
            with h5py.File(path) as file:
                stored = file["acquisition/probe_0/data"][...]
            assert np.array_equal(plain[0]["data"], stored)


def zarr_of(session: Path, zarr_format: int = 2) -> Path:
    """The same series as hdmf-zarr writes them: the timestamps of the second are a link to those
    of the first.
    """
    root = zarr.open_group(path := session.with_suffix(".zarr"), mode="w", zarr_format=zarr_format)  # type: ignore[arg-type]
    with h5py.File(session) as file:
        for number in range(2):
            name = f"acquisition/probe_{number}"
            group = root.create_group(name)
            group.attrs.update(
                {"neurodata_type": "ElectricalSeries", "description": f"probe {number}"}
            )
            for key, values in file[name].items():
                if (number, key) != (1, "timestamps"):
                    array = group.create_array(key, data=values[...], chunks=(16, 2)[: values.ndim])
                    array.attrs.update(
                        {
                            one: value.item() if hasattr(value, "item") else value
                            for one, value in values.attrs.items()
                        }
                    )
            start = group.create_array("starting_time", data=np.array([number / 4]))
            start.attrs.update({"rate": 30.0, "unit": "seconds", "zarr_dtype": "scalar"})
    link = {"name": "timestamps", "path": "/acquisition/probe_0/timestamps", "source": "."}
    root["acquisition/probe_1"].attrs["zarr_link"] = [
        link,
        {**link, "name": "away", "source": "../b.zarr"},
    ]
    if zarr_format == 2:
        zarr.consolidate_metadata(root.store)
    return path


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize(("place", "moved"), [("data/*", ""), ("*", "data/"), ("", "data/demo_4/")])
def test_episodes_of_zarr_are_found(
    tmp_path: Path, zarr_format: int, place: str, moved: str
) -> None:
    """The groups of a file of demonstrations, as they are, in the root, and one whose arrays lie
    in the root.
    """
    demos = write_demos(tmp_path / "a.hdf5", LENGTHS[:5])
    root = zarr.open_group(path := tmp_path / "a.zarr", mode="w", zarr_format=zarr_format)  # type: ignore[arg-type]
    with h5py.File(demos) as file:
        for name in (name for name in names_in(file) if name.startswith(moved or "data/")):
            root.create_array(
                name.removeprefix(moved), data=file[name][...], chunks=(1, *file[name].shape[1:])
            )
    groups = "data/demo_4" if place == "" else "data/*"
    with (
        EpisodeDataset(path, window=4) as found,
        EpisodeDataset(demos, window=4, groups=groups) as known,
    ):
        assert found.episode_names == [
            name.removeprefix(moved.rstrip("/")).strip("/") for name in known.episode_names
        ]
        assert len(found) == len(known) and all(
            same(found[index], known[index]) for index in range(len(known))
        )
    if place == "data/*":  # elsewhere it may be anything
        with open_dataset(path) as opened:
            assert isinstance(opened, EpisodeDataset)
        report = inspect(path)
        assert (
            report.samples == 5
            and "episodes 'data/*' of 1 to 12 steps (34 in all): actions float64 [7],"
            in str(report.samples_are)
        )


def names_in(file: h5py.File) -> list[str]:
    """The paths of all datasets."""
    names: list[str] = []
    file.visititems(
        lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None
    )
    return names


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("direct", [True, False])
def test_units_of_nwb_in_zarr(
    tmp_path: Path, make_loader: Any, zarr_format: int, direct: bool
) -> None:
    session = write_session(tmp_path / "a.h5")
    path, how = zarr_of(session, zarr_format), {"groups": "acquisition/*", "decode_nwb": True}
    static = ["starting_time", "description", "channel_conversion"]
    with (
        EpisodeDataset(path, ["data"], static=static, direct=direct, **how) as dataset,
        EpisodeDataset(session, "data", **how) as known,
    ):
        assert (
            dataset.episode_names
            == known.episode_names
            == ["acquisition/probe_0", "acquisition/probe_1"]
        )
        for number in range(2):
            assert same(dataset[number]["data"], known[number]["data"]) and np.allclose(
                dataset[number]["data"], in_volts(session, number)
            )
        assert dataset[1]["starting_time"] == 0.25 and dataset[1]["description"] == "probe 1"
        assert dataset[1]["channel_conversion"].tolist() == [1, 0.5, 3]
        assert same(dataset.statistics()["data"].mean, known.statistics()["data"].mean)
    for mode in ("lazy", "cached", "streaming"):
        epochs = []
        for one in (path, session):
            with EpisodeDataset(
                one, ["data"], window=6, loading_mode=mode, direct=direct, progress=False, **how
            ) as dataset:
                epochs.append(
                    list(make_loader(dataset, batch_size=8, shuffle=False, num_workers=0))
                )
        assert same(*epochs)
    with EpisodeDataset(path, ["data"], groups="acquisition/*", direct=direct) as plain:
        assert plain[0]["data"].dtype == torch.int16


def test_groups_of_zarr_that_are_wrong(tmp_path: Path) -> None:
    path = zarr_of(write_session(tmp_path / "a.h5"))
    with EpisodeDataset(path, "timestamps", groups="acquisition/probe_1") as dataset:
        assert len(dataset[0]["timestamps"]) == 50, "the link is followed"
    root = zarr.open_group(path, mode="r+", use_consolidated=False)
    for options, said in (
        (
            {},
            r"nobody knows which groups are episodes; pass groups=, .* it has: acquisition, "
            r"acquisition/probe_0, acquisition/probe_1",
        ),
        ({"groups": "acquisition"}, "its arrays have different lengths"),
        (
            {"groups": "acquisition/*", "keys": "starting_times"},
            r"probe_0 has no array 'starting_times'; it has: channel_conversion, data",
        ),
        (
            {"groups": "acquisition/probe_1", "keys": "away"},
            r"'acquisition/probe_1/away' is a link into '\.\./b\.zarr': open that store",
        ),
        (
            {"groups": "acquisition/*", "keys": "data", "static": ["weight"]},
            "has no array and no attribute 'weight'; it has: channel_conv",
        ),
    ):
        with pytest.raises((FormatError, MissingNameError), match=said):
            EpisodeDataset(path, **options)
    root["acquisition/probe_1/data"].attrs["conversion"] = "volts"
    zarr.consolidate_metadata(root.store)
    with pytest.raises(
        FormatError,
        match=r"probe_1/data': its attribute 'conversion' is 'volts', and must be a finite number",
    ):
        EpisodeDataset(path, "data", groups="acquisition/*", decode_nwb=True)


def test_units_of_nwb_in_batches(tmp_path: Path, make_loader: Any) -> None:
    path = write_session(tmp_path / "a.nwb.h5", chunks=(16, 3), compression="gzip")
    how: dict[str, Any] = {"groups": "acquisition/*", "window": 6, "decode_nwb": True}
    expected = EpisodeDataset(path, ["data"], **how)
    rows = expected.__getitems__(list(range(len(expected))))
    for mode in ("lazy", "eager", "cached", "streaming"):
        with EpisodeDataset(path, ["data"], loading_mode=mode, progress=False, **how) as dataset:
            batches = list(make_loader(dataset, batch_size=8, shuffle=False, num_workers=0))
            assert same(
                torch.cat([batch["data"] for batch in batches]),
                torch.stack([row["data"] for row in rows]),
            )
    expected.close()


def test_units_of_nwb_that_are_wrong(tmp_path: Path) -> None:
    def opened(**attributes: Any) -> None:
        path = write_session(tmp_path / "a.nwb.h5")
        with h5py.File(path, "r+") as file:
            if channels := attributes.pop("channels", None):
                del file["acquisition/probe_1/channel_conversion"]
                file["acquisition/probe_1/channel_conversion"] = np.array(channels)
            file["acquisition/probe_1/data"].attrs.update(attributes)
        EpisodeDataset(path, "data", groups="acquisition/*", decode_nwb=True)

    with pytest.raises(
        FormatError,
        match=r"probe_1/data': its attribute 'conversion' is 'volts', and must be a finite number",
    ):
        opened(conversion="volts")
    with pytest.raises(
        FormatError, match=r"its attribute 'offset' is .*nan.*, and must be a finite number"
    ):
        opened(offset=np.nan)
    with pytest.raises(
        FormatError, match=r"has shape \[30, 3\], and 'channel_conversion' is float64 \[2\]"
    ):
        opened(channels=[1.0, 2.0])
    with pytest.raises(ConfigError, match="decode_nwb"):
        EpisodeDataset(
            write_session(tmp_path / "b.h5"), "data", groups="acquisition/*", decode_nwb="yes"
        )
    with pytest.raises(
        ConfigError, match=r"decode_nwb is for time series of NWB, .* and this is a replay buffer"
    ):
        EpisodeDataset(write_buffer(tmp_path / "c.h5"), decode_nwb=True)


def test_elements_of_any_size(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(2):
            group = file.create_group(f"data/demo_{number}")
            group["words"] = [f"wort {number} {step}" for step in range(4)]
            group["x"] = np.arange(4)
            frames = group.create_dataset("frames", (4,), h5py.vlen_dtype("u1"))
            for step in range(4):
                frames[step] = np.arange(step)
    with EpisodeDataset(tmp_path / "a.h5", window=3) as dataset:
        sample = dataset[7]  # the last step of the second
        assert sample["words"] == ["wort 1 3"] * 3 and [
            len(frame) for frame in sample["frames"]
        ] == [3, 3, 3]
        assert sample["mask"].tolist() == [True, False, False]
        batch = next(
            iter(
                create_dataloader(
                    dataset.subset([0, 1]),
                    batch_size=2,
                    shuffle=False,
                    collate_fn="list",
                    num_workers=0,
                )
            )
        )
        assert batch[0]["words"] == ["wort 0 0", "wort 0 1", "wort 0 2"]
    with pytest.raises(ConfigError, match="pad='constant' has no value for 'frames'"):
        EpisodeDataset(tmp_path / "a.h5", window=3, pad="constant")


def test_several_files_are_one_dataset(tmp_path: Path) -> None:
    write_demos(tmp_path / "a.hdf5", (5, 4), seed=1, **GZIP)
    write_demos(tmp_path / "b.hdf5", (3,), seed=2)
    with EpisodeDataset(str(tmp_path / "*.hdf5"), window=2, pad_after=0) as dataset:
        assert len(dataset) == 4 + 3 + 2 and dataset.episode_numbers().tolist() == [
            0,
            0,
            0,
            0,
            1,
            1,
            1,
            2,
            2,
        ]
        assert same(
            dataset[8]["actions"],
            torch.from_numpy(arrays_of(tmp_path / "b.hdf5", "data/demo_0")["actions"][1:3]),
        )
        assert dataset.source_of(8).endswith("b.hdf5, data/demo_0, steps 1 to 2")
        assert dataset[8]["obs/agentview_image"].shape == (2, 6, 5, 3)


def test_episodes_behind_links(tmp_path: Path) -> None:
    """Groups and arrays of another file are read from that file."""
    write_demos(tmp_path / "b.hdf5", (5, 4), seed=2)
    write_demos(tmp_path / "a.hdf5", (5,), seed=1)
    with h5py.File(tmp_path / "a.hdf5", "r+") as file:
        file["data/demo_1"] = h5py.ExternalLink("b.hdf5", "/data/demo_1")
        del file["data/demo_0/actions"]
        file["data/demo_0/actions"] = h5py.ExternalLink("b.hdf5", "/data/demo_0/actions")
    with EpisodeDataset(tmp_path / "a.hdf5", ["actions", "obs/*"]) as dataset:
        for number, (actions, position) in enumerate((("b", "a"), ("b", "b"))):
            arrays = {
                name: arrays_of(tmp_path / f"{name}.hdf5", f"data/demo_{number}")
                for name in {actions, position}
            }
            assert same(dataset[number]["actions"], torch.from_numpy(arrays[actions]["actions"]))
            assert same(
                dataset[number]["obs/joint_pos"],
                torch.from_numpy(arrays[position]["obs/joint_pos"]),
            )


def test_blocks_are_episodes_or_chunks(tmp_path: Path) -> None:
    short = write_demos(tmp_path / "a.hdf5")
    with EpisodeDataset(short, window=2, pad_after=0) as dataset:
        assert dataset.blocks().tolist() == [length - 1 for length in LENGTHS if length > 1]
    with EpisodeDataset(write_demos(tmp_path / "b.hdf5", (10, 9), **GZIP), window=3) as dataset:
        assert (
            dataset.blocks().tolist() == [4, 4, 2, 4, 4, 1]
            and dataset.sample_source.block_nbytes >= 2 * 4 * 90
        )
        loader = create_dataloader(
            dataset, batch_size=4, shuffle="block", num_workers=0, seed=1, interleave=1, turns=1
        )
        list(loader)
        assert loader.get_stats()["chunks_decoded"] <= 2 * 6
        loader.close()
    with EpisodeDataset(short) as dataset:
        assert dataset.blocks() is None


def test_it_is_opened_by_content(demos: Path, tmp_path: Path) -> None:
    with open_dataset(demos) as dataset, open_dataset(demos, window=4) as windows:
        assert (
            isinstance(dataset, EpisodeDataset)
            and len(dataset) == len(LENGTHS)
            and len(windows) == sum(LENGTHS)
        )
    with open_dataset(demos, dataset_name="data/demo_0/actions") as rows:
        assert isinstance(rows, HDF5Dataset) and len(rows) == 7
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["data/train"] = np.arange(3)
    with open_dataset(tmp_path / "other.h5") as rows:
        assert isinstance(rows, HDF5Dataset)
    with pytest.raises(ConfigError, match="window is an option for episodes, and here are texts"):
        (tmp_path / "a.txt").write_text("a text")
        open_dataset(tmp_path / "a.txt", window=3)


def test_repr_and_pickle(demos: Path) -> None:
    with EpisodeDataset(demos, ["actions"], window=4) as dataset:
        assert repr(dataset) == (
            f"EpisodeDataset({str(demos)!r}, keys=['actions'], window=4)  # {sum(LENGTHS)} samples"
        )
        copy = pickle.loads(pickle.dumps(dataset))
        assert same(copy[3], dataset[3]) and copy.fingerprint == dataset.fingerprint
        copy.close()
        others = [
            EpisodeDataset(demos, ["actions"], window=4, **how)
            for how in ({"pad": "constant"}, {"stride": 2}, {"pad_before": 1})
        ]
        assert len({dataset.fingerprint, *(other.fingerprint for other in others)}) == 4
        for other in others:
            other.close()


def test_windows_are_packed_and_episodes_refused(demos: Path, tmp_path: Path) -> None:
    dataset = EpisodeDataset(demos, window=3)
    with HDF5Dataset(pack(dataset, tmp_path / "windows.h5", workers=1, progress=False)) as packed:
        assert len(packed) == len(dataset) and packed[5].keys() == dataset[5].keys()
        assert all(same(packed[5][key], dataset[5][key]) for key in packed[5])
    dataset.close()
    with EpisodeDataset(demos) as dataset:
        with pytest.raises(
            ConfigError, match=r"whole episodes of 1 to 20 steps can't be packed, .*window="
        ):
            pack(dataset, tmp_path / "episodes.h5", workers=1, progress=False)
        assert (
            len(
                HDF5Dataset(
                    pack(dataset.subset([4]), tmp_path / "one.h5", workers=1, progress=False)
                )
            )
            == 1
        )


# -- docs/episodes.md


def test_the_code_on_its_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "episodes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    draws = np.random.default_rng(0)
    with h5py.File(tmp_path / "demos.hdf5", "w") as file:
        for number in range(12):
            steps, demo = 20 + number, file.create_group(f"data/demo_{number}")
            demo["obs/agentview_image"] = draws.integers(0, 256, (steps, 84, 84, 3), np.uint8)
            demo["obs/robot0_eef_pos"], demo["actions"] = (
                np.zeros((steps, 3)),
                draws.normal(size=(steps, 7)),
            )
            demo.attrs["num_samples"] = steps
        file["mask/train"] = np.array([f"demo_{number}".encode() for number in range(10)])
    with h5py.File(tmp_path / "session.nwb.h5", "w") as file:
        file["acquisition/probe/data"], file["acquisition/probe/timestamps"] = (
            np.zeros((900, 4)),
            np.arange(900) / 30,
        )
        file["acquisition/electrodes/data"] = draws.integers(-999, 999, (900, 4), np.int16)
        file["acquisition/electrodes/data"].attrs.update(
            conversion=2.5e-7, offset=0.0, unit="volts"
        )
    root = zarr.open_group(tmp_path / "pusht.zarr", mode="w", zarr_format=2)
    for name, values in (
        ("data/img", np.zeros((30, 96, 96, 3), "u1")),
        ("data/action", np.zeros((30, 2), "f4")),
    ):
        root.create_array(name, data=values)
    root.create_array("meta/episode_ends", data=np.array([18, 30]))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "episodes"}
    try:
        for block in blocks:
            exec(compile(block, "docs/episodes.md", "exec"), names)
        assert (
            len(blocks) >= 5
            and abs(float(torch.stack([one["actions"] for one in names["train"]]).mean())) < 0.2
        )
    finally:
        for one in names.values():
            if hasattr(one, "close") and not isinstance(one, type):
                one.close()


# -- statistics


@pytest.mark.parametrize("part", [1, 200, 1 << 20])
def test_statistics_are_those_of_all_steps(
    demos: Path, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.datasets.episodes.statistics._PART", part)
    with EpisodeDataset(demos, window=6, pad_before=3) as dataset:
        found = dataset.statistics()
        assert list(found) == ["actions", "dones", "obs/agentview_image", "obs/joint_pos"]
        whole = {
            key: np.concatenate([arrays_of(demos, name)[key] for name in dataset.episode_names])
            for key in found
        }
        for key, one in found.items():
            axes = (0, 1, 2) if key.endswith("image") else 0
            values = whole[key].astype("f8")
            assert one.count == values.size // max(1, np.asarray(one.mean).size)
            assert one.mean.dtype == (torch.float64 if key == "actions" else torch.float32)
            for name in ("mean", "std", "min", "max"):
                expected = getattr(values, name)(axes)
                assert (
                    np.allclose(getattr(one, name), expected, rtol=1e-6)
                    and getattr(one, name).shape == expected.shape
                )


def test_statistics_of_a_view_are_of_its_steps(demos: Path) -> None:
    with EpisodeDataset(demos, window=3, pad_after=0) as dataset:
        view = dataset.subset([0, 1, 6])  # steps 0 to 3 of the first episode, 1 to 3 of the second
        arrays = [arrays_of(demos, f"data/demo_{number}")["actions"] for number in (0, 1)]
        rows = np.concatenate([arrays[0][:4], arrays[1][1:4]])
        found = view.statistics("actions")["actions"]
        assert (
            found.count == 7
            and np.allclose(found.mean, rows.mean(0))
            and np.allclose(found.std, rows.std(0))
        )
        with pytest.raises(
            ConfigError, match="there is no key 'action'; the keys are: actions, dones"
        ):
            dataset.statistics("action")
        with pytest.raises(ConfigError, match="there are no steps"):
            dataset.subset([]).statistics("actions")


# -- files that are not as they should be


def test_an_episode_that_lacks_a_key(demos: Path) -> None:
    with h5py.File(demos, "r+") as file:
        del file["data/demo_4/actions"]
    with pytest.raises(
        MissingNameError,
        match=(
            r"demos\.hdf5: data/demo_4 has no array 'actions'; it has: dones, "
            r"obs/agentview_image"
        ),
    ):
        EpisodeDataset(demos)
    with EpisodeDataset(demos, ["obs/*"]) as dataset:
        assert len(dataset) == len(LENGTHS)
    with pytest.raises(
        MissingNameError, match=r"has no array and no attribute 'goal'; it has: .*num_samples"
    ):
        EpisodeDataset(demos, ["obs/*"], static=["goal"])


def test_keys_of_different_lengths(demos: Path) -> None:
    with h5py.File(demos, "r+") as file:
        del file["data/demo_4/actions"]
        file["data/demo_4/actions"] = np.zeros((8, 7))
    with pytest.raises(
        FormatError,
        match=r"data/demo_4: its arrays have different lengths: 'actions' 8, 'dones' 9, .*static=",
    ):
        EpisodeDataset(demos)


def test_steps_of_different_shapes(demos: Path) -> None:
    with h5py.File(demos, "r+") as file:
        del file["data/demo_4/actions"]
        file["data/demo_4/actions"] = np.zeros((9, 6))
    with pytest.raises(
        FormatError,
        match=(
            r"data/demo_4: steps of 'actions' are float64 \[6\], and in .*data/demo_0 float64 "
            r"\[7\]"
        ),
    ):
        EpisodeDataset(demos)


def test_an_empty_episode_is_left_out(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "a.hdf5", (3, 0, 4))
    with pytest.warns(
        HeadraceWarning, match="data/demo_1: the episode has no steps, and is left out"
    ):
        dataset = EpisodeDataset(path, window=2)
    assert (
        dataset.episode_names == ["data/demo_0", "data/demo_2"]
        and len(dataset) == 7
        and "demo_1" in dataset.explain()
    )
    dataset.close()
    with pytest.warns(HeadraceWarning, match="data/demo_0 and 1 more"):
        dataset = EpisodeDataset(write_demos(tmp_path / "b.hdf5", (0, 0)))
    assert len(dataset) == 0 and not list(create_dataloader(dataset, num_workers=0))
    dataset.close()


def test_nothing_is_found(demos: Path, tmp_path: Path) -> None:
    with pytest.raises(
        MissingNameError,
        match=r"has no groups 'data/traj_\*', of which each would be an episode; it has: ",
    ):
        EpisodeDataset(demos, groups="data/traj_*")
    with pytest.raises(
        MissingNameError, match=r"has no arrays 'observations/\*'; it has: actions, dones"
    ):
        EpisodeDataset(demos, ["observations/*"])
    with pytest.raises(
        MissingNameError,
        match=(
            r"no file has an episode 'demo_99', which episodes= names; there are: .*data/demo_0, "
            r"data/demo_1"
        ),
    ):
        EpisodeDataset(demos, episodes=["demo_1", "demo_99"])
    with pytest.raises(MissingNameError, match=r"there are: .*data/demo_0, data/demo_1"):
        EpisodeDataset(demos, episodes=["demo_99"])
    with pytest.raises(ConfigError, match="episodes= names none"):
        EpisodeDataset(demos, episodes=[])
    with pytest.raises(
        ConfigError,
        match=(
            r"no window of 500 steps in any of \d+ episodes, of which the longest has \d+: use a "
            r"smaller"
        ),
    ):
        EpisodeDataset(demos, window=500, pad_after=0)
    with pytest.raises(MissingNameError, match="has no dataset 'mask/test'"):
        EpisodeDataset(demos, episodes="mask/test")
    with h5py.File(demos, "r+") as file:
        file["mask/wrong"] = np.array([b"demo_1", b"demo_12"])
    with pytest.raises(MissingNameError, match="'mask/wrong' lists 'demo_12', which is missing"):
        EpisodeDataset(demos, episodes="mask/wrong")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_group("train/images")
    with pytest.raises(
        MissingNameError,
        match=(
            r"nobody knows which groups are episodes; pass groups=, .* it has: train, "
            r"train/images"
        ),
    ):
        EpisodeDataset(tmp_path / "b.h5")
    with pytest.raises(FormatError, match="no array with an axis of time"):
        EpisodeDataset(tmp_path / "b.h5", groups="train/*")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be"),
        ({"window": {}}, "window={} has no key"),
        ({"window": {"obs/*": 2}}, "window= says nothing of 'actions'"),
        ({"window": {"*": 2, "reward": 2}}, "window= has 'reward', which is no key"),
        ({"window": 4, "stride": 0}, "stride must be"),
        ({"stride": 2}, "stride=2 goes with windows"),
        ({"window": 4, "pad_before": 4}, "pad_before=4 must be at least 0, and less than window=4"),
        ({"window": 4, "pad": "reflect"}, "pad must be one of 'edge', 'constant'"),
        ({"dtype": "floot"}, "is no NumPy dtype"),
        ({"dtype": {"reward": "f4"}}, "dtype= has 'reward', which is no key"),
        ({"keys": []}, "keys must be a list of names"),
        ({"static": "label"}, "static must be a list of names"),
        ({"windows": 4}, "did you mean window"),
        ({"dataset_name": "actions"}, "EpisodeDataset has no 'dataset_name'"),
    ],
)
def test_arguments_that_make_no_sense(demos: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EpisodeDataset(demos, **options)


def test_a_key_that_is_called_mask(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data/demo_0/mask"] = file["data/demo_0/x"] = np.arange(4)
    with pytest.raises(ConfigError, match="'mask', which is the mask of windows: leave it out"):
        EpisodeDataset(tmp_path / "a.h5", window=2)
    with EpisodeDataset(tmp_path / "a.h5") as dataset:
        assert dataset[0]["mask"].tolist() == [0, 1, 2, 3]


def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    path = damaged(tmp_path)
    with EpisodeDataset(path, window=2, pad_after=0) as dataset:
        assert dataset[0]["mask"].all()
        with pytest.raises(
            SampleError, match=r"sample 14 can't be read: .*data/demo_1.*fletcher32"
        ):
            dataset[14]


def test_a_file_that_changes(demos: Path) -> None:
    with EpisodeDataset(demos, window=2) as dataset:
        write_demos(demos, seed=9)
        with pytest.raises(FileChangedError):
            dataset[0]


def damaged(folder: Path) -> Path:
    """A file whose second episode has a damaged chunk: steps 8 to 11."""
    path = write_demos(folder / "damaged.hdf5", (7, 12, 5), **GZIP, fletcher32=True)
    with h5py.File(path) as file:
        place = file["data/demo_1/obs/agentview_image"].id.get_chunk_info(2).byte_offset
    with open(path, "r+b") as raw:
        raw.seek(place + 20)
        raw.write(b"damage")
    return path


# -- the laws


class _Contract(DatasetContract):
    options: ClassVar[dict[str, Any]]

    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.getbasetemp() / "contract-demos.hdf5"
        if not self.path.exists():
            write_demos(self.path, **GZIP)

    def make(self, **options: Any) -> EpisodeDataset:
        return EpisodeDataset(self.path, **self.options, **options)


@pytest.mark.quick_every(3)
class TestWindowsKeepTheLaws(_Contract):
    options: ClassVar[dict[str, Any]] = {"window": 4, "stride": 2}

    def make_bad(self, **options: Any) -> tuple[EpisodeDataset, list[int]]:
        path = self.path.parent / "contract-damaged" / "damaged.hdf5"
        if not path.exists():
            path.parent.mkdir()
            damaged(path.parent)
        return EpisodeDataset(path, window=2, stride=1, **options), [14, 15, 16, 17, 18]


@pytest.mark.quick_every(4)
class TestEpisodesKeepTheLaws(_Contract):
    options: ClassVar[dict[str, Any]] = {"keys": ["actions", "obs/*"]}

    def make(self, **options: Any) -> EpisodeDataset:
        return EpisodeDataset([self.path, self.path], **self.options, **options)


@pytest.mark.slow
class TestUnitsOfNWBKeepTheLaws(_Contract):
    options: ClassVar[dict[str, Any]] = {}

    def make(self, **options: Any) -> EpisodeDataset:
        path = self.path.parent / "contract.nwb.h5"
        if not path.exists():
            write_session(path, chunks=(16, 3), compression="gzip")
        return EpisodeDataset(
            path,
            ["data", "timestamps"],
            groups="acquisition/*",
            window=5,
            stride=2,
            decode_nwb=True,
            **options,
        )


@pytest.mark.slow
class TestRemoteWindows(RemoteDatasetContract):
    names = ("a.hdf5", "b.hdf5")

    def write(self, folder: Path) -> None:
        write_demos(folder / "a.hdf5", LENGTHS, 1, **GZIP, fletcher32=True)
        write_demos(folder / "b.hdf5", LENGTHS, 2, **GZIP, fletcher32=True)

    def make(self, paths: list[str], **options: Any) -> EpisodeDataset:
        return EpisodeDataset(paths, ["actions", "obs/*"], window=3, stride=2, **options)
