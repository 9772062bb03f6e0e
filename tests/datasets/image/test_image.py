"""ImageDataset: folders become samples as torchvision has them, and a bad one an error."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from headrace import (
    ConfigError,
    HeadraceWarning,
    ImageDataset,
    RandomResizedCrop,
    SampleError,
    open_dataset,
)
from headrace.datasets.pixels import decode_image
from headrace.datasets.resizing import IMAGENET_MEAN, IMAGENET_STD, resize_image
from headrace.errors import FormatError
from headrace.testing.contract import same
from tests.data.make import READABLE, UNREADABLE, make_bad, noise


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_bad(tmp_path_factory.mktemp("bad"))


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    image = Image.fromarray(noise(np.random.default_rng(1), (20, 14)))
    for form in ("JPEG", "PNG", "BMP", "TIFF", "WEBP", "GIF"):
        image.save(folder / f"x.{form.lower()}", form)
    return folder


def paths_of(root: Path) -> list[Path]:
    paths = [path for path in root.rglob("*") if path.is_file()]
    return sorted(paths, key=lambda path: path.relative_to(root).parts)


def decoded(path: Path, color: str = "RGB") -> np.ndarray[Any, Any]:
    return decode_image(path.read_bytes(), color)


def array_of(image: torch.Tensor) -> np.ndarray[Any, Any]:
    return image.permute(1, 2, 0).numpy()


class TestSamples:
    def test_are_float_tensors_of_normalized_pixels(self, photos: Path) -> None:
        files = paths_of(photos)
        means, stds = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
        for color, mean, std in (("RGB", means, stds), ("L", means.mean(), stds.mean())):
            options: dict[str, Any] = {"color": color}
            dataset, whole = (
                ImageDataset(photos, normalize=normalize, **options) for normalize in (True, False)
            )
            for index in (0, 9, -1):
                image, target = dataset[index]
                pixels = torch.from_numpy(resize_image(decoded(files[index], color), (224, 224)))
                wanted = (pixels.double() / 255 - mean) / std
                assert image.dtype is torch.float32 and image.is_contiguous()
                assert (image.double() - wanted.permute(2, 0, 1)).abs().max() < 1e-5
                assert type(target) is int
                assert dataset.classes[target] == files[index].parent.name
                assert same(whole[index][0], pixels.permute(2, 0, 1))

    def test_image_size(self, photos: Path) -> None:
        path = paths_of(photos)[2]
        for size, shape in (
            (32, (32, 32)),
            (np.int64(12), (12, 12)),
            ([5, 7], (5, 7)),
            (torch.Size([9, 8]), (9, 8)),
            (None, (48, 64)),
        ):
            for color, channels in (("RGB", 3), ("L", 1)):
                options: dict[str, Any] = {"normalize": False, "color": color}
                image = ImageDataset(photos, image_size=size, **options)[2][0]
                assert image.shape == (channels, *shape)
                wanted = resize_image(decoded(path, color), shape)
                difference = array_of(image).astype(int) - wanted
                # decoded at a fraction of its size
                is_scaled = color == "RGB" and 2 * shape[0] <= 48 and 2 * shape[1] <= 64
                assert np.abs(difference).mean() < 4 if is_scaled else not difference.any()

    def test_bad_arguments(self, photos: Path) -> None:
        for size in (0, -1, (0, 5), (1, 2, 3), (), "22", 1.5, (None, 3), True, (1.5, 2), {0: 3}):
            with pytest.raises(ConfigError, match="image_size"):
                ImageDataset(photos, image_size=size)  # type: ignore[arg-type]
        for option, value in (
            ("color", "BGR"),
            ("color", None),
            ("transform_input", "torch"),
            ("targets", 5),
            ("decode", "quick"),
        ):
            with pytest.raises(ConfigError, match=option):
                ImageDataset(photos, **{option: value})


class TestTransforms:
    def test_get_what_transform_input_says(self, photos: Path) -> None:
        whole, grey = (decoded(paths_of(photos)[5], color) for color in ("RGB", "L"))
        for kind in ("pil", "tensor", "numpy"):
            options: dict[str, Any] = {"transform": [lambda image: image], "transform_input": kind}
            for color, wanted in (("RGB", whole), ("L", grey)):
                image = ImageDataset(photos, color=color, **options)[5][0]
                assert isinstance(image, Image.Image) == (kind == "pil")
                array = array_of(image) if kind == "tensor" else np.asarray(image)
                assert array.dtype == np.uint8
                assert np.array_equal(array.reshape(wanted.shape), wanted), (color, kind)
            image = ImageDataset(photos, image_size=(20, 30), **options)[0][0]  # applied first
            assert np.shape(image) == ((3, 20, 30) if kind == "tensor" else (20, 30, 3))

    def test_may_work_in_place(self, forms: Path) -> None:
        def spoil(image: Any) -> Any:
            before = np.asarray(image).copy()
            if isinstance(image, Image.Image):
                image.paste((0, 0, 0), (0, 0, 20, 14))
            else:
                image[:] = 0
            return before

        for mode in ("lazy", "eager", "cached"):
            for kind, hold in (("pil", "decoded"), ("tensor", "encoded"), ("numpy", "decoded")):
                how: Any = {"loading_mode": mode, "transform_input": kind, "hold": hold}
                how |= {"transform": spoil, "targets": None, "progress": False}
                with ImageDataset(forms, **how) as dataset:
                    first = [image for image, _ in dataset]
                    assert all(image.any() for image in first)
                    assert same([image for image, _ in dataset], first), (mode, kind)


def test_what_is_held(tiny_photos: Path) -> None:
    for options, kind in (
        ({"normalize": False}, np.ndarray),
        ({"image_size": None}, bytes),
        ({"hold": "encoded"}, bytes),
        ({"image_size": None, "hold": "decoded"}, np.ndarray),
    ):
        with ImageDataset(tiny_photos, loading_mode="eager", progress=False, **options) as dataset:
            assert same([*dataset], [*ImageDataset(tiny_photos, **options)])
            held = [dataset.held.get([index])[0] for index in range(4)]
            assert type(held[0]) is kind
            assert dataset.held_nbytes() in (None, sum(len(bytes(one)) for one in held))


class TestClasses:
    def test_as_torchvision_has_them(self, photos: Path) -> None:
        dataset = ImageDataset(photos)
        assert dataset.classes == ["circle", "gradient", "noise"]
        assert dataset.class_to_idx == {"circle": 0, "gradient": 1, "noise": 2}
        assert list(dataset.targets) == [0] * 8 + [1] * 8 + [2] * 8
        samples = [(str(path), dataset.class_to_idx[path.parent.name]) for path in paths_of(photos)]
        assert list(dataset.samples) == samples
        assert dataset.samples[-1] == samples[-1]
        assert dataset.samples[3:5] == samples[3:5]
        assert type(dataset.samples[0][1]) is int
        with pytest.raises(IndexError):
            dataset.samples[24]
        view = dataset.subset([20, 0])
        assert [target for _, target in view.samples] == view.targets.tolist() == [2, 0]
        assert view.samples[0][0] == samples[20][0] == view.source_of(0)
        assert [target for _, target in view] == [2, 0]

    def test_images_flat_in_the_folder_are_said_once(self, photos: Path) -> None:
        with pytest.warns(HeadraceWarning, match="8 files") as caught:
            dataset = ImageDataset(photos / "noise", image_size=8)
            assert [target for _, target in dataset] == [None] * 8
            pickle.loads(pickle.dumps(dataset))[0]
            open_dataset(photos / "noise")
        # once each, with the user's line
        assert [warning.filename for warning in caught] == [__file__] * 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ImageDataset(photos / "noise", image_size=8, targets=None)[0][1] is None


class TestBadInput:
    def test_a_folder_of_both(self, bad: dict[str, Path]) -> None:
        folder = bad["text_file"].parent
        dataset = ImageDataset(folder, image_size=24, targets=None, on_error="skip")
        names = [os.path.basename(path) for path, _ in dataset.samples]
        # and the one in the loop of links, once
        assert len(names) == len(UNREADABLE) + len(READABLE) + 1
        assert "notes.txt" not in names
        assert os.fsdecode(b"caf\xe9.jpg") in names
        assert names.count("image.jpg") == 1
        assert len(dataset.__getitems__(range(len(dataset)))) == len(READABLE) + 1
        skipped = dataset.sample_reader.take_report()["skipped_samples"]
        paths = {os.path.basename(path) for _, path, _ in skipped}
        assert paths == {name for name, _ in UNREADABLE.values()}

    def test_a_name_that_is_no_utf8_can_be_shown(self, tmp_path: Path) -> None:
        path = os.path.join(os.fsencode(tmp_path), b"caf\xe9.jpg")
        with open(path, "wb") as file:
            file.write(b"no image")
        dataset = ImageDataset(tmp_path, targets=None)
        with pytest.raises(SampleError, match=r"caf\\udce9\.jpg") as caught:
            dataset[0]
        str(caught.value).encode()
        assert os.path.exists(dataset.samples[0][0])

    def test_hdf5_files_that_are_no_packs(self, tmp_path: Path) -> None:
        path = tmp_path / "x.h5"
        for content in (b"<html>not found</html>", b"\x89HDX\r\n\x1a\n" + bytes(99), b""):
            path.write_bytes(content)
            for paths in (path, [path, path]):
                with pytest.raises(FormatError, match=r"x\.h5"):
                    ImageDataset(paths)
        for name in ("data", "images"):
            with h5py.File(path, "w") as file:
                file[name] = np.zeros((4, 8, 8, 3), np.uint8)
            with pytest.raises(FormatError, match="HDF5Dataset"):
                ImageDataset(path)


class TestExact:
    def test_each_image_is_decoded_whole(self, photos: Path) -> None:
        wanted = [resize_image(decoded(path), (12, 12)) for path in paths_of(photos)]
        whole = [RandomResizedCrop(12, (1, 1), (4 / 3, 4 / 3))]
        for options in ({"transform": whole}, {"image_size": 12}):
            exact = ImageDataset(photos, decode="exact", normalize=False, **options)
            fast = ImageDataset(photos, normalize=False, **options)  # type: ignore[arg-type]
            for (image, _), pixels in zip(exact, wanted, strict=True):
                assert np.array_equal(array_of(image), pixels)
            assert not same([*fast], [*exact])
            assert exact.held_as() != fast.held_as()
