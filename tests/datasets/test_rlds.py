"""Episodes of RLDS in TFRecord files, compared with the same steps in HDF5."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import (
    ConfigError,
    EpisodeDataset,
    FormatError,
    HeadraceWarning,
    MissingNameError,
    SampleError,
    open_dataset,
)
from headrace.cli.main import main
from headrace.datasets.columns import ColumnsDataset
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.data.make import image_bytes, make_tfrecord
from tests.datasets.demonstrations import LENGTHS, buffer_arrays, write_buffer
from tests.datasets.remote_contract import RemoteDatasetContract

SHARDS = [f"arm-train.tfrecord-0000{number}-of-00002" for number in range(2)]
KEYS = {"action": "action", "img": "observation/img", "obs/state": "observation/state"}
"""The keys of a replay buffer, and what they are called here."""


def tensor(dtype: str, *shape: int, **options: str) -> dict[str, Any]:
    """A tensor as `features.json` describes it."""
    said = {"dtype": dtype, "encoding": "none", "shape": {"dimensions": [*map(str, shape)]}}
    return {"pythonClassName": "tfds.Tensor", "tensor": said | options}


def node(**features: Any) -> dict[str, Any]:
    return {"pythonClassName": "tfds.FeaturesDict", "featuresDict": {"features": features}}


def features(**steps: Any) -> dict[str, Any]:
    shape = {"dimensions": ["6", "5", "3"]}
    image = {"pythonClassName": "tfds.Image", "image": {"dtype": "uint8", "shape": shape}}
    observation = node(img=image, state=tensor("float64", 3), depth=tensor("int16", 2, 2))
    observation["featuresDict"]["features"]["depth"]["tensor"]["encoding"] = "zlib"
    label = {"pythonClassName": "tfds.ClassLabel", "classLabel": {"numClasses": "9"}}
    told = {"pythonClassName": "tfds.Text", "text": {}}
    known = {"action": tensor("float32", 2), "is_first": tensor("bool"), "label": label}
    known |= {"observation": observation, "told": told, **steps}
    sequence = {"feature": node(**known), "length": "-1"}
    return node(
        steps={"pythonClassName": "tfds.Dataset", "sequence": sequence},
        episode_metadata=node(number=tensor("int32"), box=tensor("float32", 4), path=told),
    )


def write(folder: Path, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Path:
    """Two shards of the episodes of a replay buffer."""
    folder.mkdir(exist_ok=True)
    arrays = buffer_arrays(lengths, seed)
    rows: list[dict[str, Any]] = []
    first = 0
    for number, length in enumerate(lengths):
        steps = slice(first, first + length)
        first += length
        row: dict[str, Any] = {"episode_metadata/path": b"/a/%d" % number}
        row["episode_metadata/number"] = np.array([number])
        row["episode_metadata/box"] = np.float32([number, 0, 0, 1])
        row["steps/observation/img"] = [image_bytes(image) for image in arrays["img"][steps]]
        row["steps/observation/state"] = arrays["obs/state"][steps].astype("f4").reshape(-1)
        depth = [np.full((2, 2), step, "<i2") for step in range(length)]
        row["steps/observation/depth"] = [zlib.compress(values.tobytes()) for values in depth]
        row["steps/is_first"] = (np.arange(length) == 0).astype(int)
        row["steps/told"] = [b"take %d" % number] * length
        row["steps/label"] = np.arange(length) % 9
        row["steps/action"] = arrays["action"][steps].reshape(-1)
        rows.append(row)
    for shard, some in zip(SHARDS, (rows[:5], rows[5:]), strict=True):
        make_tfrecord(folder / shard, some)
    (folder / "features.json").write_text(json.dumps(features()))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_windows_are_those_of_hdf5(tmp_path: Path) -> None:
    folder, buffer = write(tmp_path / "arm"), write_buffer(tmp_path / "a.h5")
    for how in (
        {},
        {"window": 4, "stride": 2, "pad_before": 1},
        {"window": 6, "pad": "constant", "pad_after": 3},
        {"window": {"*action": 8, "*img": 2, "*state": 3}, "episodes": ["episode_2", "episode_10"]},
    ):
        with (
            EpisodeDataset(folder, [*KEYS.values()], **how) as dataset,  # type: ignore[arg-type]
            EpisodeDataset(buffer, [*KEYS], **how) as other,  # type: ignore[arg-type]
        ):
            assert dataset.episode_names == other.episode_names
            assert same(dataset.episode_lengths, other.episode_lengths)
            for sample, known in zip(dataset, other, strict=True):
                known["obs/state"] = known["obs/state"].float().double()  # as they are stored
                expected = {KEYS.get(key, key): value for key, value in known.items()}
                assert sample.keys() == expected.keys()
                assert all(same(sample[key], expected[key]) for key in sample), how


def test_other_features_and_static_values(tmp_path: Path) -> None:
    static = ["told", "episode_metadata/number", "episode_metadata/box", "episode_metadata/path"]
    with open_dataset(write(tmp_path / "arm"), window=3, static=static) as dataset:
        assert isinstance(dataset, EpisodeDataset)
        sample = dataset[sum(LENGTHS[:7]) + 2]
        assert dataset.source_of(5).endswith(f"{SHARDS[0]}, episode_0, steps 5 to 7")
        assert "observation/img: pread, a record at a time" in dataset.explain()
    assert sample["observation/depth"].tolist() == [[[n, n], [n, n]] for n in (2, 3, 4)]
    assert sample["observation/depth"].dtype == torch.int16
    assert sample["label"].tolist() == [2, 3, 4] and sample["is_first"].tolist() == [False] * 3
    assert [sample[name] for name in (static[0], static[3])] == ["take 7", "/a/7"]
    assert sample[static[1]] == 7 and sample[static[2]].tolist() == [7, 0, 0, 1]
    with open_dataset(tmp_path / "arm") as episodes:
        assert isinstance(episodes, EpisodeDataset) and len(episodes) == len(LENGTHS)
    assert main(["info", str(tmp_path / "arm")]) == 0
    with open_dataset(tmp_path / "arm", columns=["steps/told"]) as records:
        assert isinstance(records, ColumnsDataset) and len(records[2]["steps/told"]) == LENGTHS[2]


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached", "streaming"])
def test_records_are_read_once_a_block(tmp_path: Path, make_loader: Any, mode: Any) -> None:
    folder = write(tmp_path / "arm")
    plain = EpisodeDataset(folder, window=3)
    with EpisodeDataset(folder, window=3, loading_mode=mode, progress=False) as dataset:
        assert dataset.blocks().tolist() == list(LENGTHS)
        options = {"shuffle": "block", "interleave": 1, "turns": 1, "seed": 3, "batch_size": 7}
        loader = make_loader(dataset, num_workers=0, **options)
        for batch, other in zip(loader, make_loader(plain, num_workers=2, **options), strict=True):
            assert batch.keys() == other.keys()
            assert all(same(batch[key], other[key]) for key in batch)
        # streaming: several batches are read at once, and two may decode the same record
        if mode != "streaming":
            assert loader.get_stats().get("chunks_decoded", 0) <= len(LENGTHS)


def test_features_that_do_not_fit(tmp_path: Path) -> None:
    folder = write(tmp_path / "arm", (4, 1))
    path = folder / "features.json"
    for changed, named in (
        ({"action": tensor("float32", 3)}, r"'action' has 8 values.*4 steps of the shape \[3\]"),
        ({"told": tensor("float32")}, "'told' has 4 values"),
        ({"observation": node(img=features()["featuresDict"])}, "KeyError"),
        ({"observation": node(img=tensor("uint8", 5, encoding="bytes"))}, "'observation/img': a"),
        ({"action": tensor("float32", -1)}, r"\[-1\].* static="),
        ({"goal": tensor("float32")}, "'goal' has 0 values"),
    ):
        path.write_text(json.dumps(features(**changed)))
        key = next(iter(changed))
        key = "observation/img" if key == "observation" else key
        with pytest.raises((FormatError, MissingNameError, SampleError), match=named):
            EpisodeDataset(folder, key)[0]
    for content in (b'{"steps"', json.dumps({"type": "steps"}).encode()):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"features\.json .*copy or write it again"):
            open_dataset(folder)
    path.unlink()
    with pytest.raises(FormatError, match=r"features\.json in this folder"):
        EpisodeDataset(folder)
    assert isinstance(open_dataset(folder), ColumnsDataset)


@pytest.mark.filterwarnings("ignore:.*no steps")
def test_arguments_and_records_that_are_wrong(tmp_path: Path) -> None:
    folder = write(tmp_path / "arm", (4, 0, 3))
    for options, error, named in (
        ({"groups": "data/*"}, ConfigError, "groups="),
        ({"episodes": "mask/train"}, ConfigError, "list of names"),
        ({"episodes": ["episode_3"]}, MissingNameError, "'episode_3'"),
        ({"keys": ["told"]}, MissingNameError, r"it holds Text: pass it in static="),
        ({"keys": ["reward"]}, MissingNameError, "'reward'.* action"),
        ({"static": ["goal"]}, MissingNameError, "record 0 has no 'goal'"),
    ):
        with pytest.raises(error, match=named):
            EpisodeDataset(folder, **options)  # type: ignore[arg-type]
    with pytest.warns(HeadraceWarning, match=r"record 1: the episode has no steps, and is left"):
        assert EpisodeDataset(folder).episode_names == ["episode_0", "episode_2"]
    shard = write(folder, (4, 3)) / SHARDS[0]
    data = bytearray(shard.read_bytes())
    data[data.index(b"take 1")] ^= 1
    shard.write_bytes(data)
    with EpisodeDataset(folder, "action", window=2) as dataset:
        assert len(dataset[3]["action"]) == 2
        with pytest.raises(SampleError, match=r"episode_1.*checksum"):
            dataset[4]
    data = bytearray(write(folder, (4, 3)).joinpath(SHARDS[0]).read_bytes())
    data[12] ^= 0x42
    shard.write_bytes(data)
    with pytest.raises(FormatError, match="record 0 is damaged"):
        EpisodeDataset(folder)
    other = write(tmp_path / "other") / "features.json"
    other.write_text(json.dumps(features(action=tensor("float32", 9))))
    with pytest.raises(FormatError, match=r"other features than .*: open the folders one by one"):
        EpisodeDataset([write(folder), other.parent])


@pytest.mark.slow
class TestRecordsKeepTheLaws(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path: Path) -> None:
        self.folder = write(tmp_path / "arm")

    def make(self, **options: Any) -> EpisodeDataset:
        return EpisodeDataset(self.folder, window=4, stride=2, **options)

    def make_bad(self, **options: Any) -> tuple[EpisodeDataset, list[int]]:
        shard = write(self.folder) / SHARDS[0]
        data = bytearray(shard.read_bytes())
        data[data.index(b"take 2")] ^= 1
        shard.write_bytes(data)
        dataset = self.make(**options)
        return dataset, np.flatnonzero(dataset.episode_numbers() == 2).tolist()


@pytest.mark.slow
class TestRemoteRecords(RemoteDatasetContract):
    names = (*SHARDS, "features.json")
    data = tuple(SHARDS)

    def write(self, folder: Path) -> None:
        write(folder)

    def test_a_server_that_denies_what_it_lacks(self, server: Any, tmp_path: Path) -> None:
        """As S3 does without the right to list."""
        server.set(denied=["features.json"])
        with open_dataset(f"{server.url}/{SHARDS[0]}", cache_dir=tmp_path) as records:
            assert isinstance(records, ColumnsDataset) and len(records) == 5

    def make(self, paths: list[str], **options: Any) -> EpisodeDataset:
        return EpisodeDataset(paths[:2], ["action", "observation/*"], window=3, **options)
