"""Collating images: normalised once, and what lies beside them is left alone."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from headrace import CollateError, ConfigError, VisionCollator
from headrace.collate.vision import STATISTICS
from headrace.testing.contract import same

MEAN, STD = STATISTICS["imagenet"]


class Pair(NamedTuple):
    picture: Any
    label: int


@dataclasses.dataclass
class Scene:
    image: Any
    mask: Any


def scene(index: int) -> dict[str, Any]:
    return {
        "image": picture(3, 5, 7, seed=index),
        "boxes": torch.arange(4.0 * index).reshape(-1, 4),
        "labels": torch.arange(index),
        "mask": np.full((5, 7), index, np.uint8),
    }


def picture(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def exact(image: torch.Tensor, mean: Any = MEAN, std: Any = STD) -> torch.Tensor:
    """[C, H, W], in double precision."""
    mean, std = (torch.tensor(n, dtype=torch.float64).reshape(-1, 1, 1) for n in (mean, std))
    return (image.double() / 255 - mean) / std


def near(batch: torch.Tensor, *images: torch.Tensor, atol: float = 1e-6) -> bool:
    return torch.allclose(batch.double(), torch.stack(images), atol=atol)


@given(
    st.integers(1, 3),
    st.integers(4, 9),
    st.integers(4, 9),
    st.sampled_from(["imagenet", "cifar10"]),
    st.sampled_from([1, 3]),
    st.sampled_from(["first", "last", None]),
    st.booleans(),
)
def test_any_layout_gives_the_same(
    count: int,
    height: int,
    width: int,
    statistics: str,
    colours: int,
    channels: str | None,
    array: bool,
) -> None:
    images = [picture(colours, height, width, seed=seed) for seed in range(count)]
    mean, std = STATISTICS[statistics]
    if colours == 1:
        mean, std = [sum(mean) / 3], [sum(std) / 3]
    collate = VisionCollator(statistics, channels=channels)
    laid = [image if channels == "first" else image.permute(1, 2, 0) for image in images]
    batch = collate([image.numpy() if array else image for image in laid])
    assert batch.shape == (count, colours, height, width)
    assert near(batch, *(exact(image, mean, std) for image in images))


def test_floats_from_0_to_1_are_normalised() -> None:
    image = picture(3, 8, 6)
    for dtype, atol in ((torch.float32, 1e-5), (torch.float64, 1e-5), (torch.float16, 5e-3)):
        floats = (image.double() / 255).to(dtype)
        for form in (floats, floats.permute(1, 2, 0).numpy()):
            batch = VisionCollator()([form])
            assert batch.dtype == torch.float32 and near(batch, exact(image), atol=atol)
    assert VisionCollator()([torch.zeros(3, 0, 6)]).shape == (1, 3, 0, 6)


def test_without_normalising_values_stay() -> None:
    collate = VisionCollator(normalize=False)
    grey, image = picture(8, 6), picture(3, 8, 6)
    assert same(collate([grey, grey])[0], grey[None])
    for one in (image, image.to(torch.int16), torch.full((3, 8, 6), -1.5)):
        assert same(collate([one, one])[1], one)
        assert same(collate([one.permute(1, 2, 0).numpy()])[0], one)


def test_structures() -> None:
    image = picture(3, 4, 5)
    batch = VisionCollator()([(image, 1), (image, 2)])
    assert type(batch) is tuple and batch[0].dtype == torch.float32 and batch[1].tolist() == [1, 2]
    pair = VisionCollator()([Pair(image, 3)])
    assert type(pair) is Pair and pair.picture.dtype == torch.float32 and pair.label.tolist() == [3]
    assert same(VisionCollator(fields="picture")([Pair(image, 3)]), pair)
    listed = VisionCollator()([[image, "a"]])
    assert type(listed) is list and listed[0].dtype == torch.float32 and listed[1] == ["a"]
    for name in ("image", "images", "pixel_values", "img"):
        found = VisionCollator()([{"label": 1, name: image, "path": "x"}])
        assert list(found) == ["label", name, "path"] and found["path"] == ["x"]
        assert found[name].dtype == torch.float32
    nested = VisionCollator()([({"id": 3, "image": image}, 1)])
    assert nested[0]["image"].dtype == torch.float32 and nested[0]["id"].tolist() == [3]


def test_several_images() -> None:
    one, two = picture(3, 4, 5), picture(3, 4, 5, seed=1)
    views = VisionCollator()([([one, two], 7)])  # all that lies where the image should be
    assert same(views[0][1], VisionCollator()([two])) and views[1].tolist() == [7]
    views = VisionCollator(fields=("left", "right"))([{"left": one, "right": two, "mask": one}])
    expected = [torch.float32, torch.float32, torch.uint8]
    assert [view.dtype for view in views.values()] == expected
    views = VisionCollator(fields=[0, 1])([(one, two, one)])
    assert [view.dtype for view in views] == expected
    deep = {"views": (one, picture(3, 8, 8)), "depth": one}
    views = VisionCollator(fields="scene.views")([{"scene": deep}])["scene"]
    assert [view.shape[2] for view in views["views"]] == [4, 8]
    assert views["depth"].dtype == torch.uint8


def test_targets_of_detection() -> None:
    def target(count: int) -> dict[str, Any]:
        return {
            "boxes": np.zeros((count, 4), np.float32),
            "labels": np.arange(count),
            "masks": torch.zeros(count, 4, 5, dtype=torch.bool),
            "area": [1.0] * count,
            "image_id": count,
            "size": (4, 5),
        }

    for counts in ((2, 2), (0, 3)):  # of equal numbers too: it is the same kind of batch each time
        _, targets = VisionCollator()([(picture(3, 4, 5), target(count)) for count in counts])
        assert [boxes.shape for boxes in targets["boxes"]] == [(count, 4) for count in counts]
        assert [masks.dtype for masks in targets["masks"]] == [torch.bool] * 2
        assert targets["labels"][1].tolist() == list(range(counts[1]))
        assert targets["area"] == [[1.0] * count for count in counts]
        assert targets["image_id"].tolist() == list(counts)
        assert [side.tolist() for side in targets["size"]] == [[4, 4], [5, 5]]
    # without boxes they are stacked
    alone = VisionCollator()([(picture(3, 4, 5), {"labels": torch.zeros(2)})] * 2)
    assert alone[1]["labels"].shape == (2, 2)


def test_statistics_of_one_s_own() -> None:
    image, three = picture(5, 8, 6), picture(3, 8, 6)
    mean, std = [0.1, 0.2, 0.3, 0.4, 0.5], [0.5, 0.4, 0.3, 0.2, 0.1]
    arrays = {"mean": np.array(mean), "std": torch.tensor(std, dtype=torch.float64)}
    for collate in (VisionCollator(mean=mean, std=std), VisionCollator(**arrays)):
        assert near(collate([image]), exact(image, mean, std))
        assert same(collate([image.permute(1, 2, 0)]), collate([image]))
    for one in (three[:1], three):
        assert near(VisionCollator(mean=0.5, std=0.25)([one]), exact(one, [0.5], [0.25]))
    assert torch.allclose(VisionCollator(mean=0, std=1, channels="first")([image])[0], image / 255)
    grey = picture(8, 6)
    assert same(VisionCollator()([grey, grey.numpy()])[0], VisionCollator()([grey[None]])[0])
    array = three.permute(1, 2, 0).numpy()
    array.flags.writeable = False
    assert near(VisionCollator()([array[:, ::-1]]), exact(three.flip(2)))


def test_masks_boxes_and_labels_stay_with_their_image() -> None:
    samples = [scene(index) for index in range(3)]
    batch = VisionCollator()(samples)
    assert batch["image"].shape == (3, 3, 5, 7) and batch["image"].dtype == torch.float32
    assert np.array_equal(batch["mask"].numpy(), np.stack([sample["mask"] for sample in samples]))
    for name in ("boxes", "labels"):
        assert same(batch[name], [sample[name] for sample in samples])
    batch["boxes"][2].fill_(9)
    assert samples[2]["boxes"].max() < 9  # a copy
    made = VisionCollator()([Scene(picture(3, 4, 5), picture(4, 5))])
    assert type(made) is Scene
    assert (made.image.dtype, made.mask.dtype) == (torch.float32, torch.uint8)


REFUSED: list[tuple[dict[str, Any], list[Any], str]] = [
    ({}, [torch.full((3, 4, 5), -1.2)], "normalize=False"),
    ({}, [picture(3, 4, 5), torch.zeros(3, 4, 5)], "sample 1 is float32 [3, 4, 5]"),
    ({}, [{"image": picture(3, 4, 5).long()}], "sample 0 at ['image'] is int64"),
    ({}, [picture(3, 4, 5), picture(3, 4, 6)], "sample 1 is uint8 [3, 4, 6]"),
    ({}, [picture(4, 8, 9)], "[4, 8, 9]"),
    ({}, [torch.full((3, 4, 5), 254.0)], "254"),
    ({}, [picture(3, 8, 3)], "channels="),
    ({"channels": "first"}, [picture(4, 8, 9)], "4 channels"),
    ({}, [picture(3, 4, 5), None], "sample 1 is 'NoneType'"),
    ({}, [{"picture": picture(3, 4, 5)}], "'pixel_values'"),
    ({}, [()], "tuple"),
    ({"fields": "photo"}, [{"image": picture(3, 4, 5)}], "'photo'"),
    ({}, [{"image": picture(3, 4, 5), "n": 1}, {"image": picture(3, 4, 5)}], "sample 1"),
    ({}, [], ""),
]


def test_what_can_not_be_collated() -> None:
    for options, samples, named in REFUSED:
        with pytest.raises((CollateError, ConfigError)) as refused:
            VisionCollator(**options)(samples)
        assert named in str(refused.value) and "\n" not in str(refused.value)


BAD_OPTIONS: list[dict[str, Any]] = [
    {"statistics": "imagenett"},
    {"statistics": [0]},
    {"std": [0.5]},
    {"mean": 123.7, "std": 58.4},
    {"std": [0.5, 0], "mean": 0.5},
    {"mean": [], "std": []},
    {"mean": float("nan"), "std": 0.5},
    {"mean": ["a"], "std": 0.5},
    {"mean": [0.5] * 3, "std": [0.5] * 2},
    {"channels": "middle"},
    {"normalize": 1},
    {"normalize": False, "mean": 0.5, "std": 0.5},
    {"fields": [None]},
]


def test_bad_arguments() -> None:
    for options in BAD_OPTIONS:
        with pytest.raises(ConfigError, match=next(iter(options))):
            VisionCollator(**options)
