"""Images with masks: found by name, read as they are, and moved with their images."""

from __future__ import annotations

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
    RandomHorizontalFlip,
    RandomResizedCrop,
    SampleError,
)
from headrace.datasets.image.masks import decode_mask, resize_nearest
from headrace.errors import FormatError
from headrace.testing.contract import same
from tests.data.labelled import make_masks, make_pair, save_mask
from tests.data.make import image_bytes as encoded, noise, turned

CLASSES = np.arange(20 * 30, dtype=np.int32).reshape(20, 30)
CROP = [RandomResizedCrop(12), RandomHorizontalFlip()]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_masks(tmp_path_factory.mktemp("pairs"))


def opened(pairs: Path, **options: Any) -> ImageDataset:
    return ImageDataset(pairs / "images", targets=str(pairs / "masks"), **options)


class TestDecoding:
    def test_class_numbers_are_those_that_were_saved(self, tmp_path: Path) -> None:
        for mode, forms, dtype, count in (
            ("L", ("PNG", "TIFF", "BMP", "GIF"), np.uint8, 256),
            ("P", ("PNG", "TIFF", "BMP", "GIF"), np.uint8, 256),
            ("1", ("PNG", "TIFF"), np.uint8, 2),
            ("I;16", ("PNG", "TIFF"), np.uint16, 65536),
            ("I", ("TIFF",), np.int32, 1 << 30),
        ):
            for form in forms:
                path = tmp_path / f"mask.{form.lower()}"
                save_mask(path, CLASSES % count, mode)
                mask = decode_mask(path.read_bytes())
                assert mask.dtype == dtype, (mode, form)
                assert np.array_equal(mask, CLASSES % count), (mode, form)
                assert mask.flags.writeable
        numbers = (CLASSES % 256).astype(np.uint8)  # EXIF does not turn a mask
        data = encoded(Image.fromarray(numbers), exif=turned(6))
        assert np.array_equal(decode_mask(data), numbers)

    def test_colours_broken_and_large_files_are_refused(self) -> None:
        for mode in ("RGB", "RGBA", "LA", "CMYK", "F"):
            with pytest.raises(FormatError, match=f"'{mode}'"):
                decode_mask(encoded(Image.new(mode, (4, 3)), "TIFF"))
        cut = encoded(Image.fromarray(noise(np.random.default_rng(0))[..., 0]))[:900]
        for data in (b"", b"no image", cut):
            with pytest.raises(FormatError):
                decode_mask(data)
        data = encoded(Image.new("L", (4000, 3000)))
        assert decode_mask(data, lambda: 1 << 30).shape == (3000, 4000)
        with pytest.raises(FormatError, match=r"1\.0 MB"):
            decode_mask(data, lambda: 1_000_000)

    def test_resizing_takes_the_nearest_pixel_as_pillow_does(self) -> None:
        for size in ((20, 30), (10, 15), (40, 60), (8, 16), (1, 1), (33, 4)):
            wanted = Image.fromarray(CLASSES).resize(size[::-1], Image.Resampling.NEAREST)
            assert np.array_equal(resize_nearest(CLASSES, size), np.asarray(wanted)), size


class TestSamples:
    def test_masks_are_int64_and_of_the_images_size(self, pairs: Path) -> None:
        dataset = opened(pairs, image_size=None, normalize=False)
        resized = opened(pairs, image_size=(40, 20))
        assert len(dataset) == 24
        assert dataset.targets is None
        assert dataset.classes == []
        for index, (image_path, mask_path) in enumerate(dataset.samples):
            image, mask = dataset[index]
            wanted = make_pair(int(Path(image_path).stem), (32, 24))
            assert same(mask, torch.from_numpy(wanted[1]).long())
            assert (image.permute(1, 2, 0).numpy().astype(int) - wanted[0]).std() < 60
            assert Path(mask_path).stem == Path(image_path).stem
            assert "masks" in mask_path
            image, mask = resized[index]
            assert image.shape == (3, 40, 20)
            assert np.array_equal(mask.numpy(), resize_nearest(wanted[1], (40, 20)))
        assert dataset.fingerprint != ImageDataset(pairs / "images", targets=None).fingerprint

    def test_masks_may_have_a_word_more(self, tmp_path: Path) -> None:
        for images, masks in (
            ("1/images/{}_leftImg8bit.png", "1/masks/{}_gtFine_labelIds.png"),
            ("2/images/a/{}.png", "2/masks/a/{}-seg.tif"),
            ("3/images/im {}.jpg", "3/masks/im {} m.png"),
        ):
            for number in (1, 11, 21, 31):
                for name in (images, masks):
                    path = tmp_path / name.format(number)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    Image.new("L", (4, 4), number).save(path)
            dataset = opened(tmp_path / images[0], image_size=None, color="L", normalize=False)
            assert sorted(mask.unique().tolist() for _, mask in dataset) == [[1], [11], [21], [31]]
            assert all((image - mask).abs().max() < 2 for image, mask in dataset), masks

    def test_masks_may_lie_behind_a_url(self, pairs: Path, memory: Any) -> None:
        memory.put(str(pairs / "masks"), "/masks", recursive=True)
        far = ImageDataset(pairs / "images", targets="memory://masks", image_size=8)
        assert same([*far], [*opened(pairs, image_size=8)])

    def test_images_and_masks_may_lie_in_one_folder(self, tmp_path: Path) -> None:
        for number in (1, 2):
            Image.new("L", (4, 4), number).save(tmp_path / f"{number}.png")
            Image.new("L", (4, 4), number).save(tmp_path / f"{number}_mask.png")
        masks = tmp_path / "*_mask.png"
        dataset = ImageDataset(str(tmp_path / "?.png"), targets=str(masks), image_size=None)
        assert [mask.unique().tolist() for _, mask in dataset] == [[1], [2]]


class TestTransforms:
    def test_a_joint_transform_gets_both_alike(self, pairs: Path) -> None:
        def joint(image: Any, mask: Any) -> Any:
            return mask, image

        wanted = opened(pairs, image_size=(12, 16))[4][1].numpy()
        for kind, cls in (("pil", Image.Image), ("tensor", torch.Tensor), ("numpy", np.ndarray)):
            dataset = opened(pairs, image_size=(12, 16), transforms=joint, transform_input=kind)
            mask, image = dataset[4]
            assert isinstance(image, cls)
            assert isinstance(mask, cls)
            assert np.array_equal(np.asarray(mask), wanted)

    def test_built_in_steps_come_before_joint_ones(self, pairs: Path) -> None:
        def turn(image: Any, mask: Any) -> tuple[Any, Any]:
            return image.rot90(1, (-2, -1)), mask.rot90(1, (-2, -1))

        plain = opened(pairs, transform=CROP, normalize=False)
        for times in range(3):
            steps = [*CROP, *[turn] * times]
            dataset = opened(pairs, transforms=steps, transform_input="tensor", normalize=False)
            for index in range(4):
                wanted = tuple(one.rot90(times, (-2, -1)) for one in plain[index])
                assert same(dataset[index], wanted), times
        with pytest.raises(ConfigError, match="callables, not 3"):
            opened(pairs, transforms=[turn, 3])

    def test_crops_and_flips_move_both(self, tmp_path: Path) -> None:
        """The mask is a grey image's own values, so that pixel by pixel both must agree."""
        ramp = (np.add.outer(np.arange(48) * 2, np.arange(64) * 2)).astype(np.uint8)
        for part in ("images", "masks"):
            (tmp_path / part).mkdir()
            for number in range(6):
                Image.fromarray(ramp).save(tmp_path / part / f"{number}.png")
        steps = [RandomResizedCrop(24, scale=(0.3, 0.9)), RandomHorizontalFlip()]
        for options in ({}, {"image_size": (18, 26)}, {"hold": "decoded"}):
            dataset = opened(tmp_path, transform=steps, color="L", normalize=False, **options)
            epochs = [[*dataset]]
            dataset.set_epoch(1)
            epochs.append([*dataset])
            for image, mask in [*epochs[0], *epochs[1]]:
                assert image.shape == (1, 24, 24)
                inner = (image[0].long() - mask)[1:-1, 1:-1]
                assert inner.abs().max() <= (12 if "image_size" in options else 6), options
            assert not same(*epochs)
            plain = dataset.with_transform([])
            assert plain[0][1].shape == plain[0][0].shape[1:]


class TestBadPairs:
    @pytest.fixture
    def made(self, tmp_path: Path) -> Path:
        return make_masks(tmp_path, 8)

    def test_a_mask_of_another_size(self, made: Path) -> None:
        save_mask(made / "masks" / "a" / "002.png", np.zeros((24, 31)), "L")
        message = r"images/a/002\.png with .*masks/a/002\.png: .*32 x 24 .* 31 x 24"
        for options in ({}, {"image_size": None}, {"transform": [RandomResizedCrop(8)]}):
            with pytest.raises(SampleError, match=message):
                opened(made, **options)[1]
        Image.fromarray(noise(np.random.default_rng(0), (32, 24))).save(
            made / "images" / "a" / "004.png", exif=turned(6)
        )
        with pytest.raises(SampleError, match=r"24 x 32 .*EXIF.* 32 x 24"):
            opened(made)[2]
        (made / "masks" / "b" / "001.png").write_bytes(b"nothing")
        with pytest.raises(SampleError, match=r"masks/b/001\.png"):
            opened(made)[4]

    def test_images_without_masks(self, made: Path) -> None:
        (made / "masks" / "a" / "000.png").unlink()
        (made / "masks" / "b" / "001.png").unlink()
        (made / "masks" / "c.png").write_bytes(b"")
        message = r"masks: 2 \(a/000\.png, b/001\.png\) of 8 files .*, and 1 \(c\) of 7 targets"
        with pytest.raises(DataNotFoundError, match=message):
            opened(made)

    def test_masks_without_images(self, made: Path) -> None:
        for path in list((made / "images" / "a").iterdir()):
            path.unlink()
        message = r"masks: 4 \(a/000, a/002, a/004, \.\.\.\) of 8 targets"
        with pytest.raises(DataNotFoundError, match=message):
            opened(made)
        with (
            pytest.warns(HeadraceWarning, match=message),
            opened(made, unused_targets="skip", image_size=8) as dataset,
        ):
            assert len(list(dataset)) == 4
            assert dataset.samples[0][1].endswith("masks/b/001.png")

    def test_folders_that_can_t_be_those_of_masks(self, made: Path) -> None:
        with pytest.raises(DataNotFoundError, match=r"16 files .* not be inside the"):
            ImageDataset(made, targets=made / "masks")
        (made / "empty").mkdir()
        for name in ("nothing/", "empty"):
            with pytest.raises(DataNotFoundError, match=name):
                ImageDataset(made / "images", targets=f"{made}/{name}")
        for option in ({"target_name": "label"}, {"label_separator": ";"}, {"masks": True}):
            with pytest.raises(ConfigError, match=next(iter(option))):
                opened(made, **option)
        save_mask(made / "masks" / "a" / "000.tif", np.zeros((24, 32)), "L")
        with pytest.raises(ConfigError, match=r"000\.png and .*000\.tif"):
            opened(made)

    def test_masks_as_jpegs_are_warned_of(self, tmp_path: Path) -> None:
        for part in ("images", "masks"):
            (tmp_path / part).mkdir()
            Image.new("L", (8, 8)).save(tmp_path / part / "1.jpg")
        with pytest.warns(HeadraceWarning, match=r"1\.jpg"):
            assert opened(tmp_path)[0][1].unique().tolist() == [0]
