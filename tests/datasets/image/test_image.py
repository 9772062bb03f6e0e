"""ImageDataset: folders become the samples that users of torchvision expect, and a bad one a
clear error.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from headrace import (
    ConfigError,
    DataNotFoundError,
    HeadraceError,
    HeadraceWarning,
    ImageDataset,
    RandomResizedCrop,
    SampleError,
    open_dataset,
)
from headrace.datasets.image.pixels import decode_image, normalize, resize_image
from headrace.errors import FormatError
from tests.data.make import READABLE, UNREADABLE, corners, make_bad, make_photos, noise

pytestmark = pytest.mark.quick_every(4)

MAP_MODES = ["lazy", "eager", "cached"]
FORMS = ["JPEG", "PNG", "BMP", "TIFF", "WEBP", "GIF"]


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_bad(tmp_path_factory.mktemp("bad"))


@pytest.fixture
def forms(tmp_path: Path) -> Path:
    """One image of each format, 20 x 14."""
    for form in FORMS:
        Image.fromarray(noise(np.random.default_rng(1), (20, 14))).save(
            tmp_path / f"x.{form.lower()}", form
        )
    return tmp_path


def paths_of(root: Path) -> list[Path]:
    return sorted(
        (p for p in root.rglob("*") if p.is_file()), key=lambda p: p.relative_to(root).parts
    )


def decoded(path: Path, color: str = "RGB") -> np.ndarray[Any, Any]:
    return decode_image(path.read_bytes(), color)


class TestSamples:
    def test_the_default(self, photos: Path) -> None:
        dataset, files = ImageDataset(photos), paths_of(photos)
        assert len(dataset) == len(files) == 24
        for index in (0, 1, 9, -1):
            image, target = dataset[index]
            assert (
                image.dtype is torch.float32
                and image.shape == (3, 224, 224)
                and image.is_contiguous()
            )
            assert type(target) is int and dataset.classes[target] == files[index].parent.name
            pixels = resize_image(decoded(files[index]), (224, 224))
            mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
            wanted = (torch.from_numpy(pixels).double() / 255 - mean) / std
            assert (image.double() - wanted.permute(2, 0, 1)).abs().max() < 1e-5

    def test_uint8(self, photos: Path) -> None:
        image, _ = ImageDataset(photos, normalize=False)[3]
        assert image.dtype is torch.uint8
        assert (
            image.permute(1, 2, 0).numpy() == resize_image(decoded(paths_of(photos)[3]), (224, 224))
        ).all()

    @pytest.mark.parametrize(
        ("size", "shape"),
        [
            (32, (32, 32)),
            ((20, 30), (20, 30)),
            ([5, 7], (5, 7)),
            (torch.Size([9, 8]), (9, 8)),
            (None, (48, 64)),
            (1, (1, 1)),
        ],
    )
    def test_image_size(self, photos: Path, size: Any, shape: tuple[int, int]) -> None:
        path = paths_of(photos)[2]
        for options, channels in (({}, 3), ({"color": "L"}, 1)):
            image, _ = ImageDataset(photos, image_size=size, normalize=False, **options)[2]
            assert image.shape == (channels, *shape)
            color = options.get("color", "RGB")
            pixels = decoded(path, color)
            difference = image.permute(1, 2, 0).numpy().astype(int) - (
                pixels if size is None else resize_image(pixels, shape)
            )
            # decoded at a fraction of its size
            is_scaled = color == "RGB" and 2 * shape[0] <= 48 and 2 * shape[1] <= 64
            assert np.abs(difference).mean() < 4 if is_scaled else not difference.any()

    @pytest.mark.parametrize(
        "size", [0, -1, (0, 5), (5, -5), (1, 2, 3), (5,), (), "224", "ab", 1.5, (None, 3), "x" * 2]
    )
    def test_an_image_size_that_makes_no_sense(self, photos: Path, size: Any) -> None:
        with pytest.raises(ConfigError, match=r"image_size must be \(height, width\)"):
            ImageDataset(photos, image_size=size)

    @pytest.mark.parametrize("size", [True, "22", (1.5, 2), {}, {0: 3, 1: 4}, (True, 5)], ids=repr)
    def test_other_image_sizes_that_make_no_sense(self, photos: Path, size: Any) -> None:
        with pytest.raises(ConfigError, match="image_size must be"):
            ImageDataset(photos, image_size=size)

    def test_numpys_integers(self, photos: Path) -> None:
        assert ImageDataset(photos, image_size=np.int64(12))[0][0].shape == (3, 12, 12)

    def test_color(self, photos: Path) -> None:
        image, _ = ImageDataset(photos, color="L")[4]
        assert image.shape == (1, 224, 224) and image.dtype is torch.float32
        pixels = resize_image(decoded(paths_of(photos)[4], "L"), (224, 224)).transpose(2, 0, 1)
        assert torch.equal(image, normalize(np.ascontiguousarray(pixels)))

    @pytest.mark.parametrize(
        "wrong", [{"color": "BGR"}, {"transform_input": "torch"}, {"color": None}, {"targets": 5}]
    )
    def test_arguments_that_make_no_sense(self, photos: Path, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ImageDataset(photos, **wrong)

    def test_the_users_own_is_writable(self, photos: Path, forms: Path) -> None:
        for options in (
            {},
            {"normalize": False},
            {"image_size": None, "normalize": False},
            {"image_size": (14, 20), "normalize": False},
        ):
            dataset = ImageDataset(forms, targets=None, **options)
            for index in range(len(dataset)):
                before = dataset[index][0]
                dataset[index][0].add_(1)
                assert torch.equal(dataset[index][0], before)

    def test_in_batches_of_a_plain_loader(self, photos: Path) -> None:
        dataset = ImageDataset(photos, image_size=32)
        images = torch.cat([i for i, _ in DataLoader(dataset, 7)])
        assert torch.equal(images, torch.stack([dataset[i][0] for i in range(24)]))
        shared = DataLoader(dataset, 7, num_workers=2, multiprocessing_context="fork")
        assert torch.equal(torch.cat([i for i, _ in shared]), images)


class TestTransforms:
    def test_get_what_transform_input_says(self, photos: Path) -> None:
        path = paths_of(photos)[5]
        for color, mode in (("RGB", "RGB"), ("L", "L")):
            pixels = decoded(path, color)
            pil, _ = ImageDataset(photos, transform=lambda x: x, color=color)[5]
            assert isinstance(pil, Image.Image) and pil.mode == mode and pil.size == (64, 48)
            assert (np.asarray(pil).reshape(pixels.shape) == pixels).all()
            tensor, _ = ImageDataset(
                photos, transform=lambda x: x, color=color, transform_input="tensor"
            )[5]
            assert (
                tensor.dtype is torch.uint8
                and (tensor.permute(1, 2, 0).numpy() == pixels).all()
                and tensor.is_contiguous()
            )
            array, _ = ImageDataset(
                photos, transform=lambda x: x, color=color, transform_input="numpy"
            )[5]
            assert array.dtype == np.uint8 and (array == pixels).all() and array.flags.c_contiguous

    def test_joint_transforms_get_it_too(self, photos: Path) -> None:
        dataset = ImageDataset(
            photos, transforms=lambda image, target: (image.size, f"class {target}")
        )
        assert dataset[0] == ((64, 48), "class 0") and dataset[-1] == ((64, 48), "class 2")

    @pytest.mark.parametrize("kind", ["pil", "tensor", "numpy"])
    def test_image_size_is_applied_first(self, photos: Path, kind: str) -> None:
        shape = ImageDataset(photos, image_size=(20, 30), transform=np.shape, transform_input=kind)[
            0
        ][0]
        assert (
            tuple(shape) == {"pil": (20, 30, 3), "tensor": (3, 20, 30), "numpy": (20, 30, 3)}[kind]
        )

    def test_a_target_transform_alone_leaves_the_image_as_it_is(self, photos: Path) -> None:
        image, target = ImageDataset(photos, target_transform=lambda t: t + 10)[-1]
        assert image.shape == (3, 224, 224) and image.dtype is torch.float32 and target == 12

    @pytest.mark.parametrize("mode", MAP_MODES)
    @pytest.mark.parametrize("hold", ["encoded", "decoded", None])
    @pytest.mark.parametrize("size", [None, (14, 20), (9, 9)])
    @pytest.mark.parametrize("kind", ["pil", "tensor"])
    def test_may_work_in_place(
        self, forms: Path, mode: str, hold: str | None, size: Any, kind: str
    ) -> None:
        def spoil(image: Any) -> Any:
            seen = np.asarray(image).copy()
            if kind == "pil":
                image.paste((0, 0, 0), (0, 0, 20, 14))
            else:
                image[:] = 0
            return seen

        with ImageDataset(
            forms,
            image_size=size,
            transform=spoil,
            loading_mode=mode,
            targets=None,
            transform_input=kind,
            hold=hold,
            progress=False,
        ) as dataset:
            first = [dataset[i][0] for i in range(6)]
            assert all((dataset[i][0] == first[i]).all() and first[i].any() for i in range(6))

    @pytest.mark.parametrize("mode", MAP_MODES)
    def test_on_arrays_may_work_in_place(self, forms: Path, mode: str) -> None:
        def spoil(image: Any) -> Any:
            seen = image.copy()
            image[:] = 0
            return seen

        with ImageDataset(
            forms,
            transform=spoil,
            loading_mode=mode,
            targets=None,
            transform_input="numpy",
            progress=False,
        ) as dataset:
            first = [dataset[i][0] for i in range(6)]
            assert all((dataset[i][0] == first[i]).all() for i in range(6))


class TestModes:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"normalize": False},
            {"image_size": None},
            {"image_size": (9, 7), "color": "L"},
            {"hold": "encoded"},
            {"hold": "decoded"},
        ],
        ids=str,
    )
    def test_are_bit_identical(self, tiny_photos: Path, options: dict[str, Any]) -> None:
        lazy = ImageDataset(tiny_photos, **options)
        wanted = [lazy[i] for i in range(4)]
        for mode in ("eager", "cached"):
            with ImageDataset(tiny_photos, loading_mode=mode, progress=False, **options) as dataset:
                for _ in range(2):
                    for (image, target), (image2, target2) in zip(wanted, dataset, strict=True):
                        assert torch.equal(image, image2) and target == target2
        with ImageDataset(
            tiny_photos, loading_mode="streaming", return_index=True, **options
        ) as dataset:
            seen = {index: (image, target) for image, target, index in dataset}
        assert set(seen) == set(range(4))
        assert all(
            torch.equal(seen[i][0], wanted[i][0]) and seen[i][1] == wanted[i][1] for i in seen
        )

    def test_what_is_held(self, photos: Path) -> None:
        for options, kind in (
            ({}, np.ndarray),
            ({"image_size": None}, bytes),
            ({"hold": "encoded"}, bytes),
            ({"image_size": None, "hold": "decoded"}, np.ndarray),
        ):
            with ImageDataset(photos, loading_mode="eager", progress=False, **options) as dataset:
                held = dataset.mode.get([0])[0]
                assert type(held) is kind
                nbytes = dataset.held_nbytes()
                assert nbytes is None or nbytes == sum(
                    len(bytes(dataset.mode.get([i])[0])) for i in range(24)
                )


class TestClasses:
    def test_as_torchvision_has_them(self, photos: Path) -> None:
        dataset = ImageDataset(photos)
        assert dataset.classes == ["circle", "gradient", "noise"]
        assert dataset.class_to_idx == {"circle": 0, "gradient": 1, "noise": 2}
        assert list(dataset.targets) == [0] * 8 + [1] * 8 + [2] * 8
        samples = [(str(p), dataset.class_to_idx[p.parent.name]) for p in paths_of(photos)]
        assert list(dataset.samples) == samples and len(dataset.samples) == 24
        assert dataset.samples[-1] == samples[-1] and dataset.samples[3:5] == samples[3:5]
        assert type(dataset.samples[0][1]) is int and all(
            os.path.isfile(p) for p, _ in dataset.samples
        )
        with pytest.raises(IndexError):
            dataset.samples[24]

    def test_of_a_view(self, photos: Path) -> None:
        view = ImageDataset(photos).subset([20, 0])
        assert [s[1] for s in view.samples] == [2, 0] and view.targets.tolist() == [2, 0]
        assert view.samples[0][0] == str(paths_of(photos)[20]) == view.source_of(0)
        assert [t for _, t in view] == [2, 0]

    def test_targets_of_the_users(self, photos: Path, tmp_path: Path) -> None:
        names = [str(p.relative_to(photos)) for p in paths_of(photos)]
        table = tmp_path / "targets.csv"
        table.write_text("file,label\n" + "".join(f"{n},{i}\n" for i, n in enumerate(names)))
        for targets in (
            {n: i for i, n in enumerate(names)},
            str(table),
            table,
            lambda p: names.index(os.path.relpath(p, photos)),
        ):
            dataset = ImageDataset(photos, image_size=8, targets=targets)
            assert [t for _, t in dataset] == list(range(24)) and dataset.classes == []
        assert ImageDataset(
            photos, image_size=8, targets=lambda p: Path(p).suffix.lower()
        ).classes == [".jpeg", ".jpg", ".png"]
        assert ImageDataset(photos, image_size=8, targets=lambda p: 0.5)[0][1] == 0.5

    def test_no_targets(self, photos: Path) -> None:
        dataset = ImageDataset(photos, image_size=8, targets=None)
        assert (
            dataset.targets is None
            and dataset[0][1] is None
            and dataset.classes == []
            and dataset.samples[0][1] is None
        )

    def test_images_flat_in_the_folder_are_said_once(self, photos: Path) -> None:
        with pytest.warns(HeadraceWarning, match="8 images lie flat.*targets=None") as caught:
            dataset = ImageDataset(photos / "noise", image_size=8)
            assert [t for _, t in dataset] == [None] * 8
            pickle.loads(pickle.dumps(dataset))[0]
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ImageDataset(photos / "noise", image_size=8, targets=None)[0][1] is None

    def test_that_warning_names_the_users_line(self, photos: Path) -> None:
        with pytest.warns(HeadraceWarning, match="lie flat") as caught:
            ImageDataset(photos / "noise", image_size=8)
            open_dataset(photos / "noise")
        assert [warning.filename for warning in caught] == [__file__] * 2

    def test_images_beside_class_folders(self, tmp_path: Path) -> None:
        shutil.copy(
            next(p for p in paths_of(make_photos(tmp_path, per_class=1))), tmp_path / "stray.jpg"
        )
        with pytest.raises(ConfigError, match=r"1 of 4 files lie beside.*stray\.jpg"):
            ImageDataset(tmp_path)
        assert len(ImageDataset(tmp_path, targets=None)) == 4


class TestPaths:
    def test_lists_and_globs_and_files(self, photos: Path) -> None:
        one = ImageDataset([photos / "noise", str(photos / "circle")], image_size=8, targets=None)
        assert len(one) == 16
        assert len(ImageDataset(str(photos / "*/*.PNG"), image_size=8)) == 6
        assert ImageDataset(str(photos / "*/*.PNG"), image_size=8).classes == [
            "circle",
            "gradient",
            "noise",
        ]
        assert ImageDataset(paths_of(photos)[0], image_size=8, targets=None)[0][0].shape == (
            3,
            8,
            8,
        )
        assert type(open_dataset(photos)) is ImageDataset

    @pytest.fixture
    def memory(self) -> Iterator[Any]:
        filesystem = fsspec.filesystem("memory")
        yield filesystem
        filesystem.store.clear()
        filesystem.pseudo_dirs[:] = [""]

    def test_by_url(self, photos: Path, memory: Any, tmp_path: Path) -> None:
        memory.put(f"{photos}/", "/photos/", recursive=True)
        shutil.make_archive(str(tmp_path / "photos"), "zip", photos)
        local = ImageDataset(photos, image_size=16)
        for url in ("memory://photos", f"zip::file://{tmp_path}/photos.zip"):
            remote = ImageDataset(url, image_size=16)
            assert remote.classes == local.classes and list(remote.targets) == list(local.targets)
            assert remote.fingerprint == local.fingerprint
            assert all(torch.equal(remote[i][0], local[i][0]) for i in (0, 5, 23))

    def test_a_fingerprint_does_not_depend_on_mode_or_transform(
        self, photos: Path, tmp_path: Path
    ) -> None:
        moved = shutil.copytree(photos, tmp_path / "elsewhere")
        wanted = ImageDataset(photos).fingerprint
        assert (
            ImageDataset(
                moved, image_size=32, transform=print, loading_mode="cached", targets=None
            ).fingerprint
            == wanted
        )
        assert ImageDataset(photos / "noise", targets=None).fingerprint != wanted


class TestBadInput:
    def test_a_missing_path(self, tmp_path: Path) -> None:
        with pytest.raises(DataNotFoundError, match="nowhere does not exist") as caught:
            ImageDataset(tmp_path / "nowhere")
        assert isinstance(caught.value, FileNotFoundError) and isinstance(
            caught.value, HeadraceError
        )

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").touch()
        for path in (tmp_path, str(tmp_path / "*"), [tmp_path]):
            with pytest.raises(
                DataNotFoundError,
                match=r"\.jpg, \.jpeg, \.png, \.bmp, \.tiff, \.tif, \.webp, \.gif",
            ) as caught:
                ImageDataset(path)
            assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)

    @pytest.mark.quick_every(8)
    @pytest.mark.parametrize("mode", MAP_MODES)
    @pytest.mark.parametrize("kind", UNREADABLE)
    def test_an_unreadable_file_is_one_clear_line(
        self, bad: dict[str, Path], kind: str, mode: str
    ) -> None:
        path = bad[kind]
        with pytest.raises(SampleError) as caught:
            ImageDataset(path, targets=None, loading_mode=mode, progress=False)[0]
        text = str(caught.value)
        assert (
            text.startswith(f"sample 0 can't be decoded: {path}: ") and text.count(str(path)) == 1
        )
        assert (
            'pass on_error="skip"' in text
            and "\n" not in text
            and isinstance(caught.value, OSError)
        )

    def test_a_folder_of_unreadable_files(self, tmp_path: Path) -> None:
        for name, write in UNREADABLE.values():
            write(tmp_path / name)
        dataset = ImageDataset(tmp_path, targets=None, on_error="skip")
        assert len(dataset) == 5
        with pytest.raises(
            SampleError, match="none of the 5 samples of a batch can be read; the first: sample 0"
        ):
            dataset.__getitems__(range(5))

    @pytest.mark.parametrize("mode", MAP_MODES)
    def test_a_folder_of_both(self, bad: dict[str, Path], mode: str) -> None:
        folder = bad["text_file"].parent
        with ImageDataset(
            folder,
            image_size=24,
            normalize=False,
            targets=None,
            loading_mode=mode,
            on_error="skip",
            progress=False,
        ) as dataset:
            # and the one in the loop of links, once
            assert len(dataset) == len(UNREADABLE) + len(READABLE) + 1
            names = [os.path.basename(path) for path, _ in dataset.samples]
            assert (
                "notes.txt" not in names
                and os.fsdecode(b"caf\xe9.jpg") in names
                and names.count("image.jpg") == 1
            )
            for _ in range(2):
                dataset.sample_reader.take_report()
                assert len(dataset.__getitems__(range(len(dataset)))) == len(READABLE) + 1
                skipped = dataset.sample_reader.take_report()["skipped_samples"]
                assert {os.path.basename(path) for _, path, _ in skipped} == {
                    name for name, _ in UNREADABLE.values()
                }

    def test_odd_files_that_are_read(self, bad: dict[str, Path]) -> None:
        for kind, path in bad.items():
            if kind in READABLE:
                image, _ = ImageDataset(path, image_size=None, normalize=False, targets=None)[0]
                assert (
                    image.shape == (3, 48, 64)
                    and (image.permute(1, 2, 0).numpy() == decoded(path)).all()
                )
        upright = (
            ImageDataset(bad["exif_6_jpeg"], image_size=None, normalize=False, targets=None)[0][0]
            .permute(1, 2, 0)
            .numpy()
        )
        assert np.abs(upright.astype(int) - corners()).mean() < 4

    def test_a_name_that_is_no_utf8_can_be_shown(self, tmp_path: Path) -> None:
        path = os.path.join(os.fsencode(tmp_path), b"caf\xe9.jpg")
        with open(path, "wb") as file:
            file.write(b"no image")
        dataset = ImageDataset(tmp_path, targets=None)
        with pytest.raises(SampleError, match=r"caf\\udce9\.jpg") as caught:
            dataset[0]
        str(caught.value).encode()
        assert os.path.exists(dataset.samples[0][0])

    def test_a_user_who_raises_pillows_limit_gets_the_image(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream = io.BytesIO()
        Image.new("RGB", (300, 200)).save(stream, "PNG")
        (tmp_path / "x.png").write_bytes(stream.getvalue())
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
        dataset = ImageDataset(tmp_path, image_size=8, targets=None)
        with pytest.raises(SampleError, match="MAX_IMAGE_PIXELS"):
            dataset[0]
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60_000)
        assert dataset[0][0].shape == (3, 8, 8)


class TestNoPackedFile:
    @pytest.mark.parametrize(
        "content", [b"<html>not found</html>", b"\x89HDX\r\n\x1a\n" + bytes(99), b""]
    )
    @pytest.mark.parametrize("several", [False, True])
    def test_damaged_hdf5_is_told(self, tmp_path: Path, content: bytes, several: bool) -> None:
        path = tmp_path / "x.h5"
        path.write_bytes(content)
        with pytest.raises(
            FormatError, match=r"x\.h5 is no HDF5 file, whatever its name says.*fetch it again"
        ):
            ImageDataset([path, path] if several else path)

    @pytest.mark.parametrize("name", ["data", "images"])
    def test_foreign_hdf5_names_the_dataset_to_use(self, tmp_path: Path, name: str) -> None:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file[name] = np.zeros((4, 8, 8, 3), np.uint8)
        with pytest.raises(
            FormatError,
            match=(
                r"holds no images that headrace packed: open it with HDF5Dataset\(path, "
                r"dataset_name\)"
            ),
        ):
            ImageDataset(tmp_path / "x.h5")


class TestExact:
    @pytest.mark.parametrize("crop", [False, True])
    def test_each_image_is_decoded_whole(self, photos: Path, crop: bool) -> None:
        options: dict[str, Any] = {"normalize": False}
        options |= (
            {"transform": [RandomResizedCrop(12, (1, 1), (4 / 3, 4 / 3))]}
            if crop
            else {"image_size": 12}
        )
        exact, fast = (
            ImageDataset(photos, decode=decode, **options) for decode in ("exact", "fast")
        )
        wanted = [resize_image(decoded(path), (12, 12)) for path in paths_of(photos)]
        assert all(
            (exact[i][0].permute(1, 2, 0).numpy() == pixels).all()
            for i, pixels in enumerate(wanted)
        )
        assert any(
            (fast[i][0].permute(1, 2, 0).numpy() != pixels).any() for i, pixels in enumerate(wanted)
        )
        assert exact.held_as() != fast.held_as()

    def test_is_part_of_what_ranks_share(self, photos: Path, tmp_path: Path) -> None:
        options: dict[str, Any] = {
            "image_size": 12,
            "normalize": False,
            "loading_mode": "cached",
            "shared": "machine",
            "cache_dir": tmp_path,
        }
        with (
            ImageDataset(photos, decode="fast", **options) as fast,
            ImageDataset(photos, decode="exact", **options) as exact,
        ):
            first = [fast[i][0] for i in range(len(fast))]
            with ImageDataset(photos, decode="fast", **options) as again:
                assert all(
                    torch.equal(again[i][0], image) for i, image in enumerate(first)
                ) and again.mode.stats()["hits"] == len(first)
            assert exact.mode.stats()["held"] == 0
            assert any(not torch.equal(exact[i][0], image) for i, image in enumerate(first))

    def test_other_words_are_refused(self, photos: Path) -> None:
        with pytest.raises(ConfigError, match="decode must be 'fast' or 'exact', not 'quick'"):
            ImageDataset(photos, decode="quick")
