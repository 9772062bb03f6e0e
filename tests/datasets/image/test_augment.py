"""Built-in crops and flips draw what they say, and the same wherever they are applied."""

from __future__ import annotations

import math
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from headrace import (
    CollateError,
    ConfigError,
    ImageDataset,
    MemoryEfficientDataset,
    RandomHorizontalFlip,
    RandomResizedCrop,
    SampleError,
    pack,
)
from headrace.datasets.core.format import Chain
from headrace.datasets.image.augment import split_augment
from headrace.datasets.image.pixels import decode_image, normalize, resize_image
from headrace.errors import EmptyBatchError
from headrace.order.seeding import sample_seeds
from tests.data.make import make_photos

pytestmark = pytest.mark.quick_every(3)

RECIPE = [RandomResizedCrop(24), RandomHorizontalFlip()]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 images, JPEG and PNG, of which many crops are more than twice as large as 24 x 24."""
    return make_photos(tmp_path_factory.mktemp("large"), per_class=4, size=(96, 128))


class TestCrop:
    @pytest.mark.parametrize("shape", [(100, 200), (300, 50), (7, 7), (1, 1), (1, 40)])
    def test_crops_lie_inside_with_given_scale_and_ratio(self, shape: tuple[int, int]) -> None:
        crop = RandomResizedCrop(8, scale=(0.2, 0.6), ratio=(0.5, 2.0))
        random.seed(3)
        for _ in range(500):
            top, left, height, width = crop.draw(*shape)
            assert (
                top >= 0
                and left >= 0
                and height > 0
                and width > 0
                and top + height <= shape[0]
                and left + width <= shape[1]
            )
            if min(shape) >= 50:
                assert (
                    0.15 < height * width / (shape[0] * shape[1]) < 0.65
                    and 0.45 < width / height < 2.2
                )

    def test_areas_and_aspects_are_drawn_evenly(self) -> None:
        crop = RandomResizedCrop(8)
        random.seed(0)
        boxes = np.array([crop.draw(1000, 1000) for _ in range(4000)], float)
        areas, aspects = boxes[:, 2] * boxes[:, 3] / 1e6, np.log(boxes[:, 3] / boxes[:, 2])
        small = areas < 0.7  # above, not every aspect fits
        assert abs(np.mean(areas[small]) - (0.08 + 0.7) / 2) < 0.02
        assert (
            abs(np.mean(aspects)) < 0.02
            and abs(np.std(aspects[small]) - 2 * math.log(4 / 3) / math.sqrt(12)) < 0.01
        )

    def test_where_nothing_fits_the_middle_is_taken(self) -> None:
        assert RandomResizedCrop(8, scale=(1, 1), ratio=(1, 1)).draw(30, 100) == (0, 35, 30, 30)
        assert RandomResizedCrop(8, scale=(1, 1), ratio=(2, 2)).draw(100, 30) == (42, 0, 15, 30)

    @pytest.mark.parametrize("kind", ["pil", "numpy", "tensor", "grey"])
    def test_it_is_a_callable_for_any_type_of_image(self, large: Path, kind: str) -> None:
        pixels = decode_image(
            next(large.rglob("*.jpg")).read_bytes(), "L" if kind == "grey" else "RGB"
        )
        image: Any = {
            "pil": lambda: Image.fromarray(pixels),
            "grey": lambda: Image.fromarray(pixels[:, :, 0]),
            "numpy": lambda: pixels,
            "tensor": lambda: torch.from_numpy(pixels).permute(2, 0, 1),
        }[kind]()
        random.seed(5)
        box = RandomResizedCrop((24, 30)).draw(*pixels.shape[:2])
        wanted = resize_image(
            np.ascontiguousarray(
                pixels[box.top : box.top + box.height, box.left : box.left + box.width]
            ),
            (24, 30),
        )
        random.seed(5)
        found = RandomResizedCrop((24, 30))(image)
        assert type(found) is (Image.Image if kind in ("pil", "grey") else type(image))
        array = found.permute(1, 2, 0).numpy() if kind == "tensor" else np.asarray(found)
        assert (array.reshape(wanted.shape) == wanted).all()

    @pytest.mark.parametrize(
        "wrong",
        [
            {"size": 0},
            {"size": "3"},
            {"scale": (0, 1)},
            {"scale": (0.5, 0.1)},
            {"ratio": (2, 1)},
            {"scale": (1, 2)},
        ],
    )
    def test_arguments_that_make_no_sense(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
            RandomResizedCrop(**{"size": 8, **wrong})

    def test_what_is_no_image(self) -> None:
        with pytest.raises(TypeError, match="a PIL image, an array"):
            RandomResizedCrop(8)("picture")

    def test_the_repr_is_a_call(self) -> None:
        assert (
            repr(eval(repr(RandomResizedCrop(8, ratio=(1, 2)))))
            == "RandomResizedCrop((8, 8), scale=(0.08, 1.0), ratio=(1.0, 2.0))"
        )


class TestFlip:
    def test_as_often_as_was_said(self) -> None:
        random.seed(1)
        flips = [RandomHorizontalFlip(0.3).draw() for _ in range(5000)]
        assert abs(np.mean(flips) - 0.3) < 0.03
        assert not any(RandomHorizontalFlip(0).draw() for _ in range(100)) and all(
            RandomHorizontalFlip(1).draw() for _ in range(100)
        )

    def test_every_type_is_mirrored(self) -> None:
        pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
        flip = RandomHorizontalFlip(1)
        assert (flip(pixels) == pixels[:, ::-1]).all()
        assert (np.asarray(flip(Image.fromarray(pixels))) == pixels[:, ::-1]).all()
        tensor = torch.from_numpy(pixels).permute(2, 0, 1)
        assert torch.equal(flip(tensor), tensor.flip(2))

    @pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan")])
    def test_no_probability(self, wrong: float) -> None:
        with pytest.raises(ConfigError, match="p must be a probability"):
            RandomHorizontalFlip(wrong)


class TestSplit:
    def test_only_the_head_is_taken(self) -> None:
        crop, flip = RECIPE
        for given, taken, left in (
            (None, (None, None), None),
            (str, (None, None), str),
            (crop, (crop, None), None),
            ([flip], (None, flip), None),
            ([crop, flip], (crop, flip), None),
            ([crop, str], (crop, None), str),
            ([flip, crop], (None, flip), crop),
            ([str, crop], (None, None), "chain"),
            ([], (None, None), None),
        ):
            augment, rest = split_augment(given)
            assert ((augment.crop, augment.flip) if augment else (None, None)) == taken
            assert isinstance(rest, Chain) if left == "chain" else rest is left

    def test_a_subclass_may_do_something_else(self) -> None:
        class Own(RandomResizedCrop):
            pass

        assert split_augment(Own(8))[0] is None

    def test_what_cannot_be_called(self) -> None:
        with pytest.raises(ConfigError, match="'crop' is none"):
            split_augment([RandomHorizontalFlip(), "crop"])


def drawn(dataset: ImageDataset, index: int, epoch: int = 0, seed: int = 42) -> Any:
    """What the recipe draws for a sample."""
    random.seed(sample_seeds(seed, epoch, index)[0])
    augment = dataset._format.augment
    assert augment is not None
    return augment.draw(*dataset.pixels_of(index).shape[:2])


class TestInADataset:
    def test_the_sample_is_the_part_that_was_drawn(self, large: Path) -> None:
        dataset = ImageDataset(large, transform=RECIPE)
        for index in range(len(dataset)):
            (top, left, height, width), flip = drawn(dataset, index)
            part = np.ascontiguousarray(
                dataset.pixels_of(index)[top : top + height, left : left + width]
            )
            pixels = resize_image(part, (24, 24))
            image, target = dataset[index]
            assert (
                image.dtype == torch.float32
                and image.shape == (3, 24, 24)
                and target == dataset.targets[index]
            )
            wanted = normalize(
                np.ascontiguousarray((pixels[:, ::-1] if flip else pixels).transpose(2, 0, 1))
            )
            if height < 48 or width < 48 or Path(dataset.samples[index][0]).suffix == ".png":
                assert torch.equal(image, wanted)
            else:  # decoded at half its size
                assert (image - wanted).abs().mean() < 0.3  # noise, shifted by up to half a pixel

    def test_epochs_differ_and_come_again(self, large: Path) -> None:
        dataset = ImageDataset(large, transform=RECIPE, normalize=False)
        first = dataset[0][0]
        assert first.dtype == torch.uint8
        dataset.set_epoch(1)
        assert not torch.equal(dataset[0][0], first)
        dataset.set_epoch(0)
        assert torch.equal(dataset[0][0], first)

    @pytest.mark.quick_every(12)
    @pytest.mark.parametrize("mode", ["lazy", "eager", "cached", "streaming"])
    @pytest.mark.parametrize("workers", [0, 1, 3])
    @pytest.mark.parametrize(
        "transform", [RECIPE, [RandomHorizontalFlip()]], ids=["crop and flip", "flip"]
    )
    def test_law_1(
        self, large: Path, make_loader: Callable[..., Any], mode: str, workers: int, transform: Any
    ) -> None:
        """The same in every mode, with any number of workers, in a batch and alone."""
        size = None if len(transform) == 2 else 24
        alone = ImageDataset(large, image_size=size, transform=transform, return_index=False)
        loader = make_loader(
            ImageDataset(large, image_size=size, transform=transform, loading_mode=mode),
            batch_size=5,
            num_workers=workers,
            shuffle=False,
        )
        for epoch in range(2):
            loader.set_epoch(epoch)
            alone.set_epoch(epoch)
            position = 0
            order = loader.dataset.epoch_order(False, 42, epoch, 5)
            for images, targets in loader:
                for image, target in zip(images, targets, strict=True):
                    wanted = alone[int(order[position])]
                    assert torch.equal(image, wanted[0]) and target == wanted[1]
                    position += 1
            assert position == len(alone)

    def test_what_is_held(self, large: Path) -> None:
        assert ImageDataset(large, transform=RECIPE).holds_encoded
        assert not ImageDataset(large, transform=RECIPE, hold="decoded").holds_encoded
        assert not ImageDataset(large, image_size=48, transform=RECIPE).holds_encoded
        assert not ImageDataset(
            large, image_size=48, transform=[RandomHorizontalFlip()]
        ).holds_encoded

    @pytest.mark.parametrize(
        "options",
        [{"hold": "decoded"}, {"image_size": (40, 50)}, {"image_size": 40, "hold": "encoded"}],
    )
    def test_decoded_images_are_cropped_too(
        self, large: Path, make_loader: Callable[..., Any], options: dict[str, Any]
    ) -> None:
        dataset = ImageDataset(
            large, transform=RECIPE, normalize=False, loading_mode="eager", **options
        )
        whole = ImageDataset(large, image_size=options.get("image_size"), normalize=False)
        wanted = []
        for index in range(len(dataset)):
            pixels = whole[index][0].permute(1, 2, 0).numpy()
            random.seed(sample_seeds(42, 0, index)[0])
            (top, left, height, width), flip = dataset._format.augment.draw(*pixels.shape[:2])  # type: ignore[union-attr]
            made = resize_image(
                np.ascontiguousarray(pixels[top : top + height, left : left + width]), (24, 24)
            )
            wanted.append(made[:, ::-1] if flip else made)
        images, _ = next(
            iter(make_loader(dataset, batch_size=len(dataset), shuffle=False, num_workers=0))
        )
        assert (images.permute(0, 2, 3, 1).numpy() == np.stack(wanted)).all()

    @pytest.mark.parametrize("kind", ["pil", "numpy", "tensor"])
    def test_what_follows_gets_the_part(self, large: Path, kind: str) -> None:
        seen: list[Any] = []

        def note(image: Any) -> Any:
            seen.append(image)
            return torch.zeros(1)

        plain = ImageDataset(large, transform=RECIPE, normalize=False)
        assert ImageDataset(large, transform=[*RECIPE, note], transform_input=kind)[2][0].shape == (
            1,
        )
        array = seen[-1].permute(1, 2, 0).numpy() if kind == "tensor" else np.asarray(seen[-1])
        assert (array == plain[2][0].permute(1, 2, 0).numpy()).all()

    def test_a_packed_file(self, large: Path, tmp_path: Path) -> None:
        pack(ImageDataset(large), tmp_path / "x.h5")
        folder, packed = (
            ImageDataset(large, transform=RECIPE),
            ImageDataset(tmp_path / "x.h5", transform=RECIPE),
        )
        assert all(torch.equal(folder[i][0], packed[i][0]) for i in range(len(folder)))

    def test_of_a_file_of_decoded_images(self, large: Path, tmp_path: Path) -> None:
        pack(ImageDataset(large, image_size=40), tmp_path / "x.h5", store="decoded")
        folder, packed = (
            ImageDataset(large, image_size=40, transform=RECIPE),
            ImageDataset(tmp_path / "x.h5", transform=RECIPE),
        )
        assert all(torch.equal(folder[i][0], packed[i][0]) for i in range(len(folder)))

    @pytest.mark.parametrize("whole", ["a path", "a dataset"])
    def test_inside_of_a_memory_efficient_dataset(
        self, large: Path, make_loader: Callable[..., Any], whole: str
    ) -> None:
        plain = ImageDataset(large, transform=RECIPE)
        wrapped = MemoryEfficientDataset(
            large if whole == "a path" else plain,
            **({"transform": RECIPE} if whole == "a path" else {}),
        )
        images, _ = next(iter(make_loader(wrapped, batch_size=12, shuffle=False, num_workers=0)))
        assert all(
            torch.equal(images[i], plain[i][0]) and torch.equal(wrapped[i][0], plain[i][0])
            for i in range(12)
        )

    def test_a_plain_dataloader_and_a_pickle(self, large: Path) -> None:
        dataset = ImageDataset(large, transform=RECIPE)
        images, _ = next(iter(DataLoader(pickle.loads(pickle.dumps(dataset)), batch_size=12)))
        assert all(torch.equal(images[i], dataset[i][0]) for i in range(12))

    def test_the_main_process_keeps_its_random_numbers(
        self, large: Path, make_loader: Callable[..., Any]
    ) -> None:
        random.seed(7)
        wanted = random.random()
        random.seed(7)
        list(make_loader(ImageDataset(large, transform=RECIPE), batch_size=4, num_workers=0))
        assert random.random() == wanted

    @pytest.mark.parametrize("workers", [0, 1])
    @pytest.mark.parametrize("direct", [True, False], ids=["in its buffer", "one by one"])
    def test_a_bad_sample(
        self, tmp_path: Path, make_loader: Callable[..., Any], workers: int, direct: bool
    ) -> None:
        """Its error is the one of every other dataset, though it is found late (law 6)."""
        root = make_photos(tmp_path / "p", per_class=4, size=(96, 128))
        paths = [Path(path) for path, _ in ImageDataset(root).samples]
        paths[1].write_bytes(paths[1].read_bytes()[:500])  # a header, and no more
        paths[2].write_bytes(b"")
        transform = RECIPE if direct else [*RECIPE, np.asarray]
        with pytest.raises(SampleError, match=rf"sample 1 can't be decoded: .*{paths[1].name}"):
            list(
                make_loader(
                    ImageDataset(root, transform=transform),
                    batch_size=12,
                    shuffle=False,
                    num_workers=workers,
                )
            )
        loader = make_loader(
            ImageDataset(root, transform=transform, on_error="skip"),
            batch_size=6,
            shuffle=False,
            num_workers=workers,
        )
        assert [len(images) for images, _ in loader] == [4, 6]
        assert [entry["index"] for entry in loader.get_stats()["skipped_samples"]] == [1, 2]
        good = ImageDataset(root, transform=transform)
        first = next(iter(loader))[0]
        loader.set_epoch(0)
        for image, index in zip(next(iter(loader))[0], (0, 3, 4, 5), strict=True):
            assert (torch.as_tensor(image) == torch.as_tensor(np.asarray(good[index][0]))).all()
        assert len(first) == 4

        def stand_in(index: int, path: str, error: Exception) -> Any:
            like = good[0][0]
            return (
                torch.full_like(torch.as_tensor(like), 7) if direct else np.full_like(like, 7)
            ), -1

        loader = make_loader(
            ImageDataset(root, transform=transform, on_error=stand_in),
            batch_size=12,
            shuffle=False,
            num_workers=workers,
        )
        images, targets = next(iter(loader))
        assert (
            targets.tolist()[1:3] == [-1, -1]
            and (images[1:3] == 7).all()
            and (images[3] == torch.as_tensor(np.asarray(good[3][0]))).all()
        )


def test_a_transform_that_lacks_its_last_step_is_told(photos: Path, make_loader: Any) -> None:
    steps = [RandomResizedCrop(8), RandomHorizontalFlip(), lambda image: image]
    with pytest.raises(CollateError, match=r"at \[0\] is a PIL image \(RGB, 8 x 8\).*ToImage"):
        next(iter(make_loader(ImageDataset(photos, transform=steps), batch_size=2, num_workers=0)))
    with pytest.raises(CollateError, match=r"at \[0\] is None.*the transform .* returned nothing"):
        next(
            iter(
                make_loader(
                    ImageDataset(photos, transform=lambda image: None), batch_size=2, num_workers=0
                )
            )
        )


def test_packed_images_are_cropped_in_batches(
    photos: Path, make_loader: Any, tmp_path: Path
) -> None:
    pack(ImageDataset(photos), tmp_path / "photos.h5")
    images, _ = next(
        iter(
            make_loader(
                ImageDataset(tmp_path / "photos.h5", transform=RECIPE), batch_size=4, num_workers=0
            )
        )
    )
    assert images.shape == (4, 3, 24, 24)


def test_a_collate_function_of_ones_own_gets_pil_images(photos: Path, make_loader: Any) -> None:
    dataset = ImageDataset(photos, transform=[RandomResizedCrop(8), lambda image: image])
    for collate in ("list", lambda samples: samples):
        batch = next(iter(make_loader(dataset, batch_size=2, num_workers=0, collate_fn=collate)))
        assert [image.size for image, _ in batch] == [(8, 8)] * 2


@pytest.mark.parametrize("steps", [RECIPE, [*RECIPE, np.asarray]], ids=["filled", "one by one"])
@pytest.mark.parametrize("kind", ["dds", "a warning raised"])
def test_what_a_decoder_raises_is_skipped_and_named(
    tmp_path: Path, make_loader: Any, steps: Any, kind: str
) -> None:
    folder = make_photos(tmp_path / "photos", classes=("noise",), per_class=6)
    image = Image.new("RGB", (16, 16) if kind == "dds" else (160, 120))
    image.save(folder / "noise" / "bad.png", "DDS" if kind == "dds" else "PNG")
    dataset = ImageDataset(folder, transform=steps, on_error="skip")
    loader = make_loader(dataset, batch_size=7, num_workers=0)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
        images, _ = next(iter(loader))
    assert len(images) == 6
    (skipped,) = loader.get_stats()["skipped_samples"]
    assert skipped["path"].endswith("bad.png") and "bad.png: " in skipped["error"]


def test_a_batch_of_which_no_crop_can_be_decoded_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"no image")
    options: dict[str, Any] = {"targets": None, "on_error": "skip"}
    for transform in ([RandomResizedCrop(8)], [RandomResizedCrop(8), np.asarray]):
        with pytest.raises(EmptyBatchError, match="none of the 1 samples of a batch can be read"):
            ImageDataset(tmp_path, transform=transform, **options)[0]
