"""TFRecord files of TensorFlow, and RLDS episodes that TensorFlow Datasets writes, compared with
what these libraries read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import EpisodeDataset, create_dataloader, open_dataset

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
HOW_TO_INSTALL = "pip install tensorflow-cpu tensorflow-datasets"


def written(folder: Path) -> Any:
    """A data set of 9 episodes in two shards, and its builder."""
    tfds = pytest.importorskip("tensorflow_datasets", reason=HOW_TO_INSTALL)
    kinds = tfds.features
    step = {
        "observation": {
            "image": kinds.Image(shape=(16, 12, 3), encoding_format="jpeg"),
            "wrist": kinds.Image(shape=(4, 4, 3), encoding_format="png"),
            "grey": kinds.Image(shape=(4, 5, 1), encoding_format="png"),
            "depth": kinds.Image(shape=(4, 4, 1), dtype=np.uint16, encoding_format="png"),
            "state": kinds.Tensor(shape=(3,), dtype=np.float64),
            "packed": kinds.Tensor(shape=(2, 2), dtype=np.int32, encoding="zlib"),
            "raw": kinds.Tensor(shape=(2, 2), dtype=np.float32, encoding="bytes"),
        },
        "action": kinds.Tensor(shape=(2, 3), dtype=np.float32),
        "reward": kinds.Scalar(dtype=np.float32),
        "is_first": np.bool_,
        "small": kinds.Tensor(shape=(2,), dtype=np.uint8),
        "label": kinds.ClassLabel(num_classes=3),
        "language_instruction": kinds.Text(),
        "any": kinds.Sequence(np.int64),
    }
    metadata = {"success": np.bool_, "box": kinds.Tensor(shape=(4,), dtype=np.float32)}
    draws = np.random.default_rng(0)

    def episode(number: int) -> dict[str, Any]:
        steps: list[Any] = []
        for at in range(3 + number % 4):
            observation = {
                "image": np.full((16, 12, 3), 20 * number + at, np.uint8),
                "wrist": draws.integers(0, 256, (4, 4, 3), np.uint8),
                "grey": draws.integers(0, 256, (4, 5, 1), np.uint8),
                "depth": draws.integers(0, 65536, (4, 4, 1), np.uint16),
                "state": draws.random(3),
                "packed": draws.integers(-9, 9, (2, 2), np.int32),
                "raw": draws.random((2, 2)).astype("f4"),
            }
            one = {"observation": observation, "action": draws.random((2, 3)).astype("f4")}
            one |= {"reward": np.float32(at), "is_first": at == 0, "label": at % 3}
            one |= {"small": draws.integers(0, 256, 2, np.uint8), "any": np.arange(at)}
            steps.append(one | {"language_instruction": f"take {number}"})
        told = {"success": number % 2 == 0, "box": draws.random(4).astype("f4")}
        return {"steps": steps, "episode_metadata": told}

    class Arm(tfds.core.GeneratorBasedBuilder):  # type: ignore[misc, name-defined]
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            features = {"steps": kinds.Dataset(step), "episode_metadata": metadata}
            return tfds.core.DatasetInfo(builder=self, features=kinds.FeaturesDict(features))

        def _split_generators(self, _: Any) -> Any:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Any:
            return ((number, episode(number)) for number in range(9))

    builder = Arm(data_dir=str(folder))
    config = tfds.download.DownloadConfig(num_shards=2)
    builder.download_and_prepare(download_config=config)
    return builder


def test_episodes_are_those_of_tfds(tmp_path: Path) -> None:
    builder = written(tmp_path)
    static = ["language_instruction", "episode_metadata/success", "episode_metadata/box"]
    known: list[dict[str, Any]] = []
    tfds = pytest.importorskip("tensorflow_datasets", reason=HOW_TO_INSTALL)
    for episode in tfds.as_numpy(builder.as_dataset("train", shuffle_files=False)):
        steps = list(episode["steps"])
        flat = {f"observation/{key}": [one["observation"][key] for one in steps]
                for key in steps[0]["observation"]}  # fmt: skip
        flat |= {key: [one[key] for one in steps] for key in steps[0] if key != "observation"}
        told = {f"episode_metadata/{key}": one for key, one in episode["episode_metadata"].items()}
        known.append({**flat, **told, static[0]: flat[static[0]][0].decode()})
    with open_dataset(builder.data_dir, static=static) as dataset:
        assert isinstance(dataset, EpisodeDataset) and len(dataset) == len(known) == 9
        for sample, expected in zip(dataset, known, strict=True):
            assert sample.keys() == expected.keys() - {"any"}
            for key, value in sample.items():
                if isinstance(value, str):
                    assert value == expected[key]
                    continue
                values = np.array(expected[key])
                assert value.numpy().dtype == values.dtype and value.shape == values.shape, key
                slack = 2 if key == "observation/image" else 0  # decoders of JPEG differ
                differences = np.abs(value.numpy().astype(float) - values.astype(float))
                assert differences.max() <= slack, key
    for mode in ("lazy", "eager", "cached"):
        windows = EpisodeDataset(builder.data_dir, "action", window=2, loading_mode=mode)  # type: ignore[arg-type]
        loader = create_dataloader(windows, batch_size=64, shuffle=False, num_workers=2)
        batch = next(iter(loader))["action"].numpy()
        actions = [np.stack([*one["action"], one["action"][-1]]) for one in known]
        expected = [one[at : at + 2] for one in actions for at in range(len(one) - 1)]
        assert np.array_equal(batch, expected)


def test_examples_are_those_of_tensorflow(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow", reason=HOW_TO_INSTALL)
    draws = np.random.default_rng(0)
    kinds = {"bytes": tf.train.BytesList, "int64": tf.train.Int64List, "float": tf.train.FloatList}
    known: list[dict[str, Any]] = []
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(50):
            values: dict[str, Any] = {"name": [b"wheel %d" % number], "several": [b"", b"\xff"]}
            values["ids"] = draws.integers(-(2**63), 2**63 - 1, number)
            values["x"] = draws.normal(size=1 + number).astype("f4")
            known.append(values)
            features = {}
            for name, value in values.items():
                kind = {"ids": "int64", "x": "float"}.get(name, "bytes")
                features[name] = tf.train.Feature(**{f"{kind}_list": kinds[kind](value=value)})
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
    for compression in ("GZIP", "ZLIB", ""):
        read = tf.data.TFRecordDataset([str(path)])
        packed = tmp_path / f"{compression}.tfrecord"
        with tf.io.TFRecordWriter(str(packed), compression) as writer:
            for record in read:
                writer.write(record.numpy())
        with open_dataset(packed, cache_dir=tmp_path / "cache") as dataset:
            for sample, values in zip(dataset, known, strict=True):
                assert sample["name"] == values["name"][0]
                assert sample["several"] == values["several"]
                assert np.array_equal(sample["ids"], values["ids"])
                assert np.array_equal(sample["x"], values["x"])
