"""Built-in crops and flips draw what they say, and the same wherever they are applied."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headrace import ConfigError, ImageDataset, RandomHorizontalFlip, RandomResizedCrop
from headrace.datasets.image.augment import Drawn
from headrace.datasets.pixels import decode_image
from headrace.datasets.resizing import IMAGENET, Box, resize_image
from headrace.order.seeding import sample_seeds
from tests.data.make import make_photos

RECIPE = [RandomResizedCrop(24), RandomHorizontalFlip()]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 images, JPEG and PNG, of which many crops are more than twice as large as 24 x 24."""
    return make_photos(tmp_path_factory.mktemp("large"), per_class=4, size=(96, 128))


def images_of(dataset: Any) -> list[Any]:
    return [dataset[index][0] for index in range(len(dataset))]


def applied(pixels: Any, drawn: Drawn) -> Any:
    """The plain twin: a part of [H, W, C], resized to 24 x 24, and mirrored."""
    assert drawn.box is not None
    top, left, height, width = drawn.box
    part = np.ascontiguousarray(pixels[top : top + height, left : left + width])
    made = resize_image(part, (24, 24))
    return made[:, ::-1] if drawn.flip else made


def pixels_of(dataset: ImageDataset, index: int) -> Any:
    """The decoded, resized image before any transform: uint8 [H, W, C]."""
    pixels = decode_image(Path(dataset.samples[index][0]).read_bytes(), dataset.color)
    return resize_image(pixels, dataset.image_size)


def drawn_of(dataset: ImageDataset, index: int) -> Drawn:
    """What the recipe draws for a sample of epoch 0."""
    random.seed(sample_seeds(42, 0, index)[0])
    augment = dataset._decoder.augment
    assert augment is not None
    return augment.draw(*pixels_of(dataset, index).shape[:2])


class TestSteps:
    def test_crops_lie_inside_with_given_scale_and_ratio(self) -> None:
        crop = RandomResizedCrop(8, scale=(0.2, 0.6), ratio=(0.5, 2.0))
        random.seed(3)
        for shape in ((100, 200), (300, 50), (1, 1), (1, 40)):
            for _ in range(300):
                top, left, height, width = crop.draw(*shape)
                assert top >= 0 and height > 0 and top + height <= shape[0], shape
                assert left >= 0 and width > 0 and left + width <= shape[1], shape
                if min(shape) >= 50:
                    assert 0.15 < height * width / (shape[0] * shape[1]) < 0.65
                    assert 0.45 < width / height < 2.2
        # where nothing fits, the middle is taken
        assert RandomResizedCrop(8, scale=(1, 1), ratio=(1, 1)).draw(30, 100) == (0, 35, 30, 30)
        assert RandomResizedCrop(8, scale=(1, 1), ratio=(2, 2)).draw(100, 30) == (42, 0, 15, 30)

    def test_areas_aspects_and_flips_are_drawn_evenly(self) -> None:
        crop = RandomResizedCrop(8)
        random.seed(0)
        boxes = np.array([crop.draw(1000, 1000) for _ in range(4000)], float)
        areas = boxes[:, 2] * boxes[:, 3] / 1e6
        aspects = np.log(boxes[:, 3] / boxes[:, 2])
        small = areas < 0.7  # above, not every aspect fits
        assert abs(np.mean(areas[small]) - (0.08 + 0.7) / 2) < 0.02
        assert abs(np.mean(aspects)) < 0.02
        assert abs(np.std(aspects[small]) - 2 * math.log(4 / 3) / math.sqrt(12)) < 0.01
        flips = [RandomHorizontalFlip(0.3).draw() for _ in range(5000)]
        assert abs(np.mean(flips) - 0.3) < 0.03
        assert not any(RandomHorizontalFlip(0).draw() for _ in range(100))
        assert all(RandomHorizontalFlip(1).draw() for _ in range(100))

    def test_any_type_of_image_is_cropped_and_mirrored(self, large: Path) -> None:
        data = next(large.rglob("*.jpg")).read_bytes()
        pixels = decode_image(data, "RGB")
        grey = decode_image(data, "L")
        for array, image in (
            (pixels, Image.fromarray(pixels)),
            (pixels, pixels),
            (pixels, torch.from_numpy(pixels).permute(2, 0, 1)),
            (grey, Image.fromarray(grey[:, :, 0])),
        ):
            random.seed(5)
            box = RandomResizedCrop((24, 24)).draw(*array.shape[:2])
            wanted = applied(array, Drawn(Box(*box), False))
            random.seed(5)
            found = RandomResizedCrop((24, 24))(image)
            flipped = RandomHorizontalFlip(1)(found)
            assert isinstance(found, Image.Image) or type(found) is type(image)
            if isinstance(found, torch.Tensor):
                found, flipped = found.permute(1, 2, 0), flipped.permute(1, 2, 0)
            assert np.array_equal(np.asarray(found).reshape(wanted.shape), wanted), type(image)
            assert np.array_equal(np.asarray(flipped).reshape(wanted.shape), wanted[:, ::-1])
        several = torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16)
        several[..., 0] = 1
        assert torch.equal(RandomHorizontalFlip(1)(several), several.flip(-1))
        with pytest.raises(TypeError):
            RandomResizedCrop(8)("picture")

    def test_bad_arguments(self) -> None:
        wrong: dict[str, list[Any]] = {"size": [0, "3"], "ratio": [(2, 1)]}
        wrong["scale"] = [(0, 1), (0.5, 0.1), (1, 2)]
        for name, values in wrong.items():
            for value in values:
                with pytest.raises(ConfigError, match=f"{name} must be"):
                    RandomResizedCrop(**{"size": 8, name: value})
        for p in (-0.1, 1.1, float("nan")):
            with pytest.raises(ConfigError):
                RandomHorizontalFlip(p)


class TestInADataset:
    def test_only_the_head_of_a_list_is_built_in(self, large: Path) -> None:
        class Own(RandomResizedCrop):
            def __call__(self, image: Any) -> Any:
                return self

        own, (crop, flip) = Own(8), RECIPE
        given: list[Any] = [own, [own], [flip, own], [crop, flip, own], [np.asarray, own]]
        for steps in given:
            assert ImageDataset(large, transform=steps)[0][0] is own
        steps = [RandomHorizontalFlip(1), crop]
        dataset = ImageDataset(large, transform=steps)
        random.seed(sample_seeds(42, 0, 0)[0])
        image: Any = Image.fromarray(pixels_of(dataset, 0))
        for step in steps:
            image = step(image)
        assert np.array_equal(dataset[0][0], image)
        with pytest.raises(ConfigError, match="'crop'"):
            ImageDataset(large, transform=[RandomHorizontalFlip(), "crop"])

    def test_the_sample_is_the_part_that_was_drawn(self, large: Path) -> None:
        dataset = ImageDataset(large, transform=RECIPE)
        for index in range(len(dataset)):
            drawn = drawn_of(dataset, index)
            pixels = applied(pixels_of(dataset, index), drawn)
            wanted = IMAGENET.normalized(torch.from_numpy(pixels.copy()).permute(2, 0, 1))
            image, target = dataset[index]
            assert target == dataset.targets[index]
            assert image.dtype == torch.float32
            assert drawn.box is not None
            is_png = Path(dataset.samples[index][0]).suffix.lower() == ".png"
            if is_png or drawn.box.height < 48 or drawn.box.width < 48:
                assert torch.equal(image, wanted)
            else:  # decoded at half its size
                assert (image - wanted).abs().mean() < 0.3  # noise, shifted by up to half a pixel

    def test_decoded_images_are_cropped(self, large: Path, make_loader: Callable[..., Any]) -> None:
        assert ImageDataset(large, transform=RECIPE).holds_encoded
        for options in (
            {"hold": "decoded"},
            {"image_size": (40, 50)},
            {"image_size": 40, "hold": "encoded"},
        ):
            dataset = ImageDataset(
                large, transform=RECIPE, normalize=False, loading_mode="eager", **options
            )
            assert dataset.holds_encoded == (options.get("hold") == "encoded")
            whole = ImageDataset(large, image_size=options.get("image_size"), normalize=False)
            wanted = [
                applied(image.permute(1, 2, 0).numpy(), drawn_of(dataset, index))
                for index, image in enumerate(images_of(whole))
            ]
            loader = make_loader(dataset, batch_size=12, shuffle=False, num_workers=0)
            images, _ = next(iter(loader))
            assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), np.stack(wanted)), options
            dataset.close()
