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


def written(folder: Path, tfds: Any) -> Any:
    """The builder of a data set of 9 episodes in two shards."""
    kinds = tfds.features
    observation = {
        "image": kinds.Image(shape=(16, 12, 3), encoding_format="jpeg"),
        "grey": kinds.Image(shape=(4, 5, 1), encoding_format="png"),
        "depth": kinds.Image(shape=(4, 4, 1), dtype=np.uint16, encoding_format="png"),
        "state": kinds.Tensor(shape=(3,), dtype=np.float64),
        "packed": kinds.Tensor(shape=(2, 2), dtype=np.int32, encoding="zlib"),
        "raw": kinds.Tensor(shape=(2, 2), dtype=np.float32, encoding="bytes"),
    }
    step = {"observation": observation, "action": kinds.Tensor(shape=(2, 3), dtype=np.float32)}
    step |= {"is_first": np.bool_, "small": np.uint8, "label": kinds.ClassLabel(num_classes=3)}
    step |= {"language_instruction": kinds.Text(), "any": kinds.Sequence(np.int64)}
    told = {"success": np.bool_, "box": kinds.Tensor(shape=(4,), dtype=np.float32)}
    draws = np.random.default_rng(0)

    def steps_of(number: int) -> Any:
        for at in range(3 + number % 4):
            seen: dict[str, Any] = {"image": np.full((16, 12, 3), 20 * number + at, np.uint8)}
            seen["grey"] = draws.integers(0, 256, (4, 5, 1), np.uint8)
            seen["depth"] = draws.integers(0, 65536, (4, 4, 1), np.uint16)
            seen |= {"state": draws.random(3), "packed": draws.integers(-9, 9, (2, 2), np.int32)}
            seen["raw"] = draws.random((2, 2)).astype("f4")
            one = {"observation": seen, "action": draws.random((2, 3)).astype("f4"), "small": at}
            one |= {"is_first": at == 0, "label": at % 3, "any": np.arange(at)}
            yield one | {"language_instruction": f"take {number}"}

    class Arm(tfds.core.GeneratorBasedBuilder):  # type: ignore[misc, name-defined]
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            features = {"steps": kinds.Dataset(step), "episode_metadata": told}
            return tfds.core.DatasetInfo(builder=self, features=kinds.FeaturesDict(features))

        def _split_generators(self, _: Any) -> Any:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Any:
            for number in range(9):
                about = {"success": number % 2 == 0, "box": draws.random(4).astype("f4")}
                yield number, {"steps": [*steps_of(number)], "episode_metadata": about}

    builder = Arm(data_dir=str(folder))
    config = tfds.download.DownloadConfig(num_shards=2)
    builder.download_and_prepare(download_config=config)
    return builder


def test_episodes_are_those_of_tfds(tmp_path: Path) -> None:
    tfds = pytest.importorskip("tensorflow_datasets", reason=HOW_TO_INSTALL)
    builder = written(tmp_path, tfds)
    static = ["language_instruction", "episode_metadata/success", "episode_metadata/box"]
    known: list[dict[str, Any]] = []
    for episode in tfds.as_numpy(builder.as_dataset("train", shuffle_files=False)):
        steps = list(episode["steps"])
        for step in steps:
            step |= {f"observation/{key}": one for key, one in step.pop("observation").items()}
        expected = {key: [step[key] for step in steps] for key in steps[0]}
        about = {f"episode_metadata/{key}": one for key, one in episode["episode_metadata"].items()}
        known.append(expected | about | {static[0]: steps[0][static[0]].decode()})
    with open_dataset(builder.data_dir, static=static) as dataset:
        assert isinstance(dataset, EpisodeDataset) and len(dataset) == len(known) == 9
        for sample, expected in zip(dataset, known, strict=True):
            assert sample.keys() == expected.keys() - {"any"}
            assert sample.pop(static[0]) == expected[static[0]]
            for key, value in sample.items():
                values = np.array(expected[key])
                assert value.numpy().dtype == values.dtype and value.shape == values.shape, key
                differences = np.abs(value.numpy().astype(float) - values.astype(float))
                # decoders of JPEG differ
                assert differences.max() <= (2 if key == "observation/image" else 0), key
    modes: list[Any] = ["lazy", "eager", "cached"]
    for mode in modes:
        windows = EpisodeDataset(builder.data_dir, "action", window=2, loading_mode=mode)
        loader = create_dataloader(windows, batch_size=64, shuffle=False, num_workers=2)
        actions = [np.stack([*one["action"], one["action"][-1]]) for one in known]
        cut = [one[at : at + 2] for one in actions for at in range(len(one) - 1)]
        assert np.array_equal(next(iter(loader))["action"], cut)


def test_examples_are_those_of_tensorflow(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow", reason=HOW_TO_INSTALL)
    draws = np.random.default_rng(0)
    known: list[dict[str, Any]] = []
    examples: list[bytes] = []
    for number in range(50):
        ids = draws.integers(-(2**63), 2**63 - 1, number)
        x = draws.normal(size=1 + number).astype("f4")
        known.append({"name": b"wheel %d" % number, "several": [b"", b"\xff"], "ids": ids, "x": x})
        features = {
            "name": tf.train.Feature(bytes_list=tf.train.BytesList(value=[known[-1]["name"]])),
            "several": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"", b"\xff"])),
            "ids": tf.train.Feature(int64_list=tf.train.Int64List(value=ids)),
            "x": tf.train.Feature(float_list=tf.train.FloatList(value=x)),
        }
        example = tf.train.Example(features=tf.train.Features(feature=features))
        examples.append(example.SerializeToString())
    for compression in ("GZIP", "ZLIB", ""):
        path = tmp_path / f"{compression}.tfrecord"
        with tf.io.TFRecordWriter(str(path), compression) as writer:
            for data in examples:
                writer.write(data)
        with open_dataset(path, cache_dir=tmp_path / "cache") as dataset:
            for sample, values in zip(dataset, known, strict=True):
                assert sample["name"] == values["name"] and sample["several"] == values["several"]
                assert np.array_equal(sample["ids"], values["ids"])
                assert np.array_equal(sample["x"], values["x"])
