"""Images with masks: found by name, read as they are, and moved with their images."""

from __future__ import annotations

import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headrace import (
    ConfigError,
    DataNotFoundError,
    HeadraceWarning,
    ImageDataset,
    MemoryEfficientDataset,
    RandomHorizontalFlip,
    RandomResizedCrop,
    SampleError,
    open_dataset,
)
from headrace.datasets.image.masks import decode_mask, resize_nearest
from headrace.errors import FormatError
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.data.labelled import make_masks, make_pair, save_mask
from tests.data.make import noise

pytestmark = pytest.mark.quick_every(4)

CLASSES = np.arange(20 * 30, dtype=np.int32).reshape(20, 30)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_masks(tmp_path_factory.mktemp("pairs"))


def opened(pairs: Path, **options: Any) -> ImageDataset:
    return ImageDataset(pairs / "images", targets=str(pairs / "masks"), **options)


class TestDecoding:
    @pytest.mark.parametrize(
        ("mode", "form", "dtype"),
        [
            *[("L", form, np.uint8) for form in ("PNG", "TIFF", "BMP", "GIF")],
            *[("P", form, np.uint8) for form in ("PNG", "TIFF", "BMP", "GIF")],
            *[("1", form, np.uint8) for form in ("PNG", "TIFF")],
            *[("I;16", form, np.uint16) for form in ("PNG", "TIFF")],
            ("I", "TIFF", np.int32),
        ],
    )
    def test_class_numbers_are_those_that_were_saved(
        self, mode: str, form: str, dtype: Any, tmp_path: Path
    ) -> None:
        numbers = CLASSES % {"L": 256, "P": 256, "1": 2, "I;16": 65536, "I": 1 << 30}[mode]
        path = tmp_path / f"mask.{form.lower()}"
        save_mask(path, numbers, mode)
        mask = decode_mask(path.read_bytes())
        assert mask.dtype == dtype and np.array_equal(mask, numbers) and mask.flags.writeable

    @pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "CMYK", "F"])
    def test_colours_are_refused(self, mode: str) -> None:
        with pytest.raises(
            FormatError, match=rf"a mask holds class numbers .* mode '{mode}': convert it once"
        ):
            decode_mask(encoded(Image.new(mode, (4, 3)), "TIFF"))

    def test_exif_does_not_turn_a_mask(self) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        numbers = (CLASSES % 256).astype(np.uint8)
        assert np.array_equal(decode_mask(encoded(Image.fromarray(numbers), exif=exif)), numbers)

    @pytest.mark.parametrize(
        "data",
        [b"", b"no image", encoded(Image.fromarray(noise(np.random.default_rng(0))[..., 0]))[:900]],
    )
    def test_what_is_broken_is_an_error(self, data: bytes) -> None:
        with pytest.raises(FormatError):
            decode_mask(data)

    def test_a_mask_that_is_too_large_for_the_budget(self) -> None:
        data = encoded(Image.new("L", (4000, 3000)))
        assert decode_mask(data, lambda: 1 << 30).shape == (3000, 4000)
        with pytest.raises(FormatError, match=r"the memory budget leaves 1\.0 MB"):
            decode_mask(data, lambda: 1_000_000)

    @pytest.mark.parametrize("size", [(20, 30), (10, 15), (40, 60), (8, 16), (1, 1), (33, 4)])
    def test_resizing_takes_the_nearest_pixel_as_pillow_does(self, size: tuple[int, int]) -> None:
        resized = resize_nearest(CLASSES, size)
        wanted = Image.fromarray(CLASSES).resize(size[::-1], Image.Resampling.NEAREST)
        assert resized.shape == size and np.array_equal(resized, np.asarray(wanted))


class TestSamples:
    def test_masks_are_int64_and_of_the_images_size(self, pairs: Path) -> None:
        dataset = opened(pairs, image_size=None, normalize=False)
        assert len(dataset) == 24 and dataset.targets is None and dataset.classes == []
        for path, (image, mask), (image_path, mask_path) in zip(
            dataset.sample_source.files.listing.urls(), dataset, dataset.samples, strict=True
        ):
            number = int(Path(path).stem)
            wanted = make_pair(number, (32, 24))
            assert mask.dtype is torch.int64 and np.array_equal(mask.numpy(), wanted[1])
            assert (
                image.shape == (3, 24, 32)
                and (image.permute(1, 2, 0).numpy().astype(int) - wanted[0]).std() < 60
            )
            assert (
                path == image_path
                and Path(mask_path).stem == Path(path).stem
                and "masks" in mask_path
            )

    def test_masks_are_resized_to_the_nearest_pixel(self, pairs: Path) -> None:
        own, resized = opened(pairs, image_size=None), opened(pairs, image_size=(40, 20))
        for index in range(len(own)):
            image, mask = resized[index]
            assert image.shape == (3, 40, 20)
            assert np.array_equal(mask.numpy(), resize_nearest(own[index][1].numpy(), (40, 20)))

    @pytest.mark.parametrize(
        "given", ["masks", "masks/", "masks/*/*", "masks/{a,b}", Path("masks")]
    )
    def test_masks_may_be_named_in_several_ways(
        self, pairs: Path, given: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(pairs)
        images = (
            "images"
            if given != "masks/*/*" and given != "masks/{a,b}"
            else str(given).replace("masks", "images")
        )
        by_name = {}
        for dataset in (
            ImageDataset(images, targets=given, image_size=8),
            opened(pairs, image_size=8),
        ):
            for (path, _), sample in zip(dataset.samples, dataset, strict=True):
                assert same(by_name.setdefault(Path(path).name, sample), sample)
        assert len(by_name) == 24

    @pytest.mark.parametrize(
        ("images", "masks"),
        [
            ("{}.png", "{}_mask.png"),
            ("{}_leftImg8bit.png", "{}_gtFine_labelIds.png"),
            ("a/{}.png", "a/{}-seg.tif"),
            ("im {}.jpg", "im {} m.png"),
        ],
    )
    def test_masks_may_have_a_word_more(self, tmp_path: Path, images: str, masks: str) -> None:
        for number in (1, 11, 21, 31):
            for part, name in (("images", images), ("masks", masks)):
                path = tmp_path / part / name.format(number)
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("L", (4, 4), number).save(path)
        dataset = opened(tmp_path, image_size=None, color="L", normalize=False)
        assert sorted(mask.unique().tolist() for _, mask in dataset) == [[1], [11], [21], [31]]
        assert all((image - mask).abs().max() < 2 for image, mask in dataset)

    def test_images_and_masks_may_lie_in_one_folder(self, tmp_path: Path) -> None:
        for number in (1, 2):
            Image.new("L", (4, 4), number).save(tmp_path / f"{number}.png")
            Image.new("L", (4, 4), number).save(tmp_path / f"{number}_mask.png")
        dataset = ImageDataset(
            str(tmp_path / "?.png"), targets=str(tmp_path / "*_mask.png"), image_size=None
        )
        assert [mask.unique().tolist() for _, mask in dataset] == [[1], [2]]

    def test_urls(self, pairs: Path, memory: Any, loader_of: Any) -> None:
        memory.put(str(pairs), "/street", recursive=True)
        wanted = [*opened(pairs, image_size=8)]
        for images, masks in (
            ("memory://street/images", "memory://street/masks"),
            (pairs / "images", "memory://street/masks/"),
        ):
            with ImageDataset(
                images, targets=masks, image_size=8, loading_mode="cached"
            ) as dataset:
                assert same([dataset[index] for index in range(len(dataset))], wanted)
                assert len([*loader_of(dataset, shuffle="block")]) == 6
        memory.rm("/street/masks/a/000.png")
        with pytest.raises(
            DataNotFoundError, match=r"1 \(a/000\.png\) of 24 images have no mask in .*street/masks"
        ):
            ImageDataset("memory://street/images", targets="memory://street/masks")

    def test_a_batch_stacks_both(self, pairs: Path, loader_of: Any) -> None:
        images, masks = next(iter(loader_of(opened(pairs, image_size=16))))
        assert (
            images.shape == (4, 3, 16, 16)
            and masks.shape == (4, 16, 16)
            and masks.dtype is torch.int64
        )

    def test_open_dataset_and_other_modes_give_the_same(self, pairs: Path) -> None:
        plain = [*opened(pairs, image_size=16)]
        for mode in ("eager", "cached", "streaming"):
            with opened(pairs, image_size=16, loading_mode=mode) as dataset:
                order = [index for index, *_ in sorted(enumerate(plain))]
                if mode != "streaming":
                    assert same([dataset[index] for index in order], plain)
                    assert same([dataset[index] for index in order], plain)
        with open_dataset(pairs / "images", targets=pairs / "masks", image_size=16) as dataset:
            assert same([*dataset], plain)
        with MemoryEfficientDataset(opened(pairs, image_size=16)) as dataset:
            assert same(
                [dataset[index] for index in (3, 1, 3)], [plain[index] for index in (3, 1, 3)]
            )
            assert same([*pickle.loads(pickle.dumps(dataset))], plain)

    def test_views_and_pixels(self, pairs: Path) -> None:
        dataset = opened(pairs, image_size=16, normalize=False)
        view = dataset.subset([5, 2])
        assert (
            same([*view], [dataset[5], dataset[2]])
            and "masks" in view.source_of(0)
            and view.source_of(0) == dataset.source_of(5)
        )
        assert np.array_equal(view.pixels_of(1), dataset[2][0].permute(1, 2, 0).numpy())
        assert dataset.fingerprint != ImageDataset(pairs / "images", targets=None).fingerprint


class TestTransforms:
    @pytest.mark.parametrize(
        ("transform_input", "kinds"),
        [
            ("pil", (Image.Image, Image.Image)),
            ("tensor", (torch.Tensor, torch.Tensor)),
            ("numpy", (np.ndarray, np.ndarray)),
        ],
    )
    def test_a_joint_transform_gets_both_alike(
        self, pairs: Path, transform_input: Any, kinds: Any
    ) -> None:
        met: list[Any] = []

        def joint(image: Any, mask: Any) -> tuple[int, int]:
            met.append((image, mask))
            return 1, 2

        dataset = opened(
            pairs, image_size=(12, 16), transforms=joint, transform_input=transform_input
        )
        assert dataset[4] == (1, 2)
        image, mask = met[-1]
        assert isinstance(image, kinds[0]) and isinstance(mask, kinds[1])
        assert np.asarray(mask).shape == (12, 16) and np.array_equal(
            np.asarray(mask), opened(pairs, image_size=(12, 16))[4][1].numpy()
        )

    def test_a_joint_transform_draws_once_for_both(self, pairs: Path) -> None:
        def joint(image: Any, mask: Any) -> tuple[Any, Any]:
            flip = random.random() < 0.5
            return (image.flip(-1), mask.flip(-1)) if flip else (image, mask)

        dataset = opened(pairs, image_size=None, transforms=joint, transform_input="tensor")
        plain = opened(pairs, image_size=None, normalize=False)
        flipped = 0
        for index, (image, mask) in enumerate(dataset):
            is_flipped = not torch.equal(image, plain[index][0])
            flipped += is_flipped
            assert torch.equal(mask.flip(-1) if is_flipped else mask, plain[index][1])
        assert 0 < flipped < len(dataset)

    def test_built_in_steps_come_before_joint_ones(self, pairs: Path) -> None:
        def turn(image: Any, mask: Any) -> tuple[Any, Any]:
            return image.rot90(1, (-2, -1)), mask.rot90(1, (-2, -1))

        crop, flip = RandomResizedCrop(12), RandomHorizontalFlip()
        plain = opened(pairs, transform=[crop, flip], normalize=False)
        for steps, times in (
            ([crop, flip, turn], 1),
            ([crop, flip, turn, turn], 2),
            ([crop, flip], 0),
        ):
            dataset = opened(pairs, transforms=steps, transform_input="tensor", normalize=False)
            for index in range(4):
                assert same(
                    dataset[index], tuple(one.rot90(times, (-2, -1)) for one in plain[index])
                )
        views = [
            opened(pairs, transforms=turn, image_size=8).with_transform(steps)
            for steps in ([], [crop, flip], None)
        ]
        for view in views:
            image, mask = view[0]
            assert (
                image.dtype is torch.float32
                and mask.dtype is torch.int64
                and image.shape[1:] == mask.shape
            )
        twice = opened(pairs, transforms=[crop], transform_input="tensor").with_transform(
            [turn, turn]
        )
        assert twice[0][0].shape[1:] == twice[0][1].shape
        with pytest.raises(
            ConfigError,
            match="transforms must be a callable, or a list of callables, and 3 is none",
        ):
            opened(pairs, transforms=[turn, 3])

    def test_other_transforms_get_one_of_them(self, pairs: Path) -> None:
        options: dict[str, Any] = {
            "transform": lambda image: torch.zeros(1),
            "transform_input": "tensor",
            "image_size": 8,
        }
        image, mask = opened(pairs, target_transform=lambda mask: (mask > 0).float(), **options)[0]
        assert (
            image.shape == (1,)
            and mask.dtype is torch.float32
            and set(mask.unique().tolist()) == {0.0, 1.0}
        )

    @pytest.mark.parametrize("hold", [None, "decoded", "encoded"])
    @pytest.mark.parametrize("size", [None, (18, 26)])
    def test_built_in_crops_and_flips_move_both(self, tmp_path: Path, hold: Any, size: Any) -> None:
        """The mask is a grey image's own values, so that pixel by pixel both must agree."""
        for part in ("images", "masks"):
            (tmp_path / part).mkdir()
        ramp = (np.add.outer(np.arange(48) * 2, np.arange(64) * 2)).astype(np.uint8)
        for number in range(6):
            Image.fromarray(ramp).save(tmp_path / "images" / f"{number}.png")
            Image.fromarray(ramp).save(tmp_path / "masks" / f"{number}.png")
        steps = [RandomResizedCrop(24, scale=(0.3, 0.9)), RandomHorizontalFlip()]
        dataset = opened(
            tmp_path, transform=steps, color="L", normalize=False, image_size=size, hold=hold
        )
        seen = []
        again = [*dataset]
        dataset.set_epoch(1)
        for image, mask in [*again, *dataset]:
            assert image.shape == (1, 24, 24) and mask.shape == (24, 24)
            inner = (image[0].long() - mask)[1:-1, 1:-1]
            assert inner.abs().max() <= (6 if size is None else 12)
            seen.append(mask)
        assert len({mask.numpy().tobytes() for mask in seen}) > 3
        plain = dataset.with_transform([])
        assert plain[0][1].shape == plain[0][0].shape[1:]

    def test_epochs_draw_anew_and_modes_agree(self, pairs: Path) -> None:
        steps = [RandomResizedCrop(16), RandomHorizontalFlip()]
        datasets = [
            opened(pairs, transform=steps, loading_mode=mode)
            for mode in ("lazy", "eager", "cached")
        ]
        epochs = []
        for epoch in (0, 1):
            for dataset in datasets:
                dataset.set_epoch(epoch)
            samples = [[dataset[index] for index in range(6)] for dataset in datasets]
            assert same(samples[0], samples[1]) and same(samples[0], samples[2])
            epochs.append(samples[0])
        assert not same(epochs[0], epochs[1])
        for dataset in datasets:
            dataset.close()


class TestBadPairs:
    @pytest.fixture
    def made(self, tmp_path: Path) -> Path:
        return make_masks(tmp_path, 8)

    def test_a_mask_of_another_size(self, made: Path) -> None:
        save_mask(made / "masks" / "a" / "002.png", np.zeros((24, 31)), "L")
        for options in ({}, {"image_size": None}, {"transform": [RandomResizedCrop(8)]}):
            with pytest.raises(
                SampleError,
                match=(
                    r"images/a/002\.png with .*masks/a/002\.png: the image is 32 x 24 .* its mask "
                    r"31 x 24"
                ),
            ):
                opened(made, **options)[1]
        kept = opened(made, on_error="skip")
        assert len([*kept]) == 7

    def test_a_mask_as_large_as_the_image_lies_says_so(self, made: Path) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(noise(np.random.default_rng(0), (32, 24))).save(
            made / "images" / "a" / "002.png", exif=exif
        )
        with pytest.raises(
            SampleError,
            match=(
                "the image is 24 x 32 pixels, and its mask 32 x 24; its EXIF orientation turns "
                "the image"
            ),
        ):
            opened(made)[1]

    def test_a_broken_mask_is_named(self, made: Path) -> None:
        (made / "masks" / "b" / "001.png").write_bytes(b"nothing")
        with pytest.raises(
            SampleError, match=r"masks/b/001\.png: the mask: the content is no image"
        ):
            opened(made)[4]

    def test_images_without_masks(self, made: Path) -> None:
        (made / "masks" / "a" / "000.png").unlink()
        (made / "masks" / "b" / "001.png").unlink()
        (made / "masks" / "c.png").write_bytes(b"")
        message = (
            r"2 \(a/000\.png, b/001\.png\) of 8 images have no mask in .*masks, and 1 \(c\.png\) "
            r"of 7 masks belong to none"
        )
        with pytest.raises(DataNotFoundError, match=message):
            opened(made)

    def test_masks_without_images(self, made: Path) -> None:
        for path in list((made / "images" / "a").iterdir()):
            path.unlink()
        message = (
            r"4 \(a/000\.png, a/002\.png, a/004\.\w+, \.\.\.\) of 8 masks belong to no image in "
            r".*images"
        )
        with pytest.raises(DataNotFoundError, match=rf"{message}.*: is the download complete"):
            opened(made)
        with (
            pytest.warns(HeadraceWarning, match=rf"{message}.*: left out"),
            opened(made, unused_targets="skip", image_size=8) as dataset,
        ):
            assert len(dataset) == len(list(dataset)) == 4 and dataset.samples[0][1].endswith(
                "masks/b/001.png"
            )

    def test_some_of_the_images_of_named_masks(self, tmp_path: Path) -> None:
        for number in range(4):
            for part, ending in (("images", "_rgb"), ("masks", "_ids"))[number % 2 :]:
                (tmp_path / part).mkdir(exist_ok=True)
                save_mask(tmp_path / part / f"{number}{ending}.png", np.full((4, 4), number), "L")
        with pytest.raises(DataNotFoundError, match="images have no mask"):
            opened(tmp_path)
        with (
            pytest.warns(HeadraceWarning, match="2 .* of 4 masks"),
            opened(tmp_path, unused_targets="skip", image_size=4) as dataset,
        ):
            assert [int(mask[0, 0]) for _, mask in dataset] == [0, 2]

    def test_two_masks_of_one_name(self, made: Path) -> None:
        save_mask(made / "masks" / "a" / "000.tif", np.zeros((24, 32)), "L")
        with pytest.raises(
            ConfigError,
            match=r"the masks .*000\.png and .*000\.tif have the same name but for their endings",
        ):
            opened(made)

    def test_masks_in_the_folder_of_the_images(self, made: Path) -> None:
        with pytest.raises(
            ConfigError,
            match=r"which is in the folder of the images .*: pass the images' own folder",
        ):
            ImageDataset(made, targets=made / "masks")

    def test_a_folder_that_is_missing_or_empty(self, made: Path) -> None:
        with pytest.raises(DataNotFoundError, match="nothing/ does not exist"):
            ImageDataset(made / "images", targets=f"{made}/nothing/")
        (made / "empty").mkdir()
        with pytest.raises(DataNotFoundError, match="empty"):
            ImageDataset(made / "images", targets=made / "empty")

    def test_masks_as_jpegs_are_warned_of(self, tmp_path: Path) -> None:
        for part in ("images", "masks"):
            (tmp_path / part).mkdir()
            Image.new("L", (8, 8)).save(tmp_path / part / "1.jpg")
        with pytest.warns(HeadraceWarning, match=r"masks such as 1\.jpg are JPEGs"):
            assert opened(tmp_path)[0][1].unique().tolist() == [0]

    @pytest.mark.parametrize(
        "option", [{"target_name": "label"}, {"label_separator": ";"}, {"masks": True}]
    )
    def test_options_of_labels_are_refused(self, made: Path, option: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            opened(made, **option)


class TestContract(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, pairs: Path) -> None:
        self.folder = pairs

    def make(self, **options: Any) -> ImageDataset:
        return opened(self.folder, image_size=8, **options)

    def make_bad(self, **options: Any) -> tuple[ImageDataset, list[int]]:
        bad = self.folder.parent / f"{self.folder.name}_bad"
        if not bad.exists():
            make_masks(bad)
            (bad / "masks" / "a" / "002.png").write_bytes(b"nothing")
            save_mask(bad / "masks" / "b" / "001.png", np.zeros((9, 9)), "L")
        return opened(bad, image_size=8, **options), [1, 12]


@pytest.mark.slow
class TestCropContract(TestContract):
    """Image and mask are cropped by one draw, in whatever mode."""

    def make(self, **options: Any) -> ImageDataset:
        steps = [RandomResizedCrop(8), RandomHorizontalFlip()]
        if "transform" in options:
            steps.append(options.pop("transform"))
        return opened(self.folder, transform=steps, **options)

    def make_bad(self, **options: Any) -> tuple[ImageDataset, list[int]]:
        dataset, bad = super().make_bad()
        return opened(
            Path(dataset.data_path).parent, transform=[RandomResizedCrop(8)], **options
        ), bad
