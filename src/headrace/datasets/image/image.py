"""Images in folders, or packed into one file, with class numbers as targets."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.checks import check_arguments
from headrace.datasets.core.options import PathOptions, split_options
from headrace.datasets.image.augment import Augment, Drawn, Whole, image_sides, split_augment
from headrace.datasets.image.labels import FOLDERS, Targets, TargetsArgument, checked_targets, folder_targets, given_targets
from headrace.datasets.image.pixels import (
    EXTENSIONS,
    decode_image,
    normalize,
    normalize_into,
    resize_image,
    to_channels_first,
    to_channels_last,
    writable,
)
from headrace.datasets.image.sizing import image_shape, load_image
from headrace.datasets.kinds import IMAGES
from headrace.errors import ConfigError, FormatError, MissingNameError, warn
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.file_set import FileSet
from headrace.io.resolve.resolver import kind_of
from headrace.modes import LoadingMode, ModeName
from headrace.storage.concat import ConcatSource
from headrace.storage.files import FilesSource
from headrace.storage.hdf5.files import HDF5
from headrace.storage.hdf5.packed import TARGETS
from headrace.storage.hdf5.rows import HDF5Source, OpenHDF5, open_files

DEFAULT_SIZE = (224, 224)
_UNSET: Any = "default"
ImageSource = FilesSource | HDF5Source | ConcatSource[HDF5Source]


class ImageDataset(BaseDataset):
    """Samples ``(image, target)`` of the images under a path.

    By default an image is resized to 224 x 224, scaled to [0, 1] and normalised with the ImageNet statistics: float32 [3, H, W].

    Args:
        data_path: a folder (searched through, sorted, .jpg .jpeg .png .bmp .tiff .tif .webp .gif in any case), a file, a glob, a
            pattern in braces, fsspec URLs, or a list of these. Or HDF5 files that `headrace.pack` wrote, named in any of these ways but a
            folder (.h5, .hdf5, .he5).
        image_size: (height, width), or one int for both; aspect not kept, bilinear, antialiased. None: the image's own size.
            Default: (224, 224) without transforms (a packed file of decoded images: their own size), else None. Applied before
            the transform.
        transform: called with what `transform_input` says; its result is the sample's image. Or a list of callables: a
            `RandomResizedCrop`, a `RandomHorizontalFlip`, or the one and then the other at its head work on the encoded image, and
            where nothing follows, their result is scaled and normalised as above.
        loading_mode: see `LoadingMode`.
        targets: "folders": class numbers from the first-level folders; or a mapping from relative path or file name to target, a
            CSV file (file, target), a callable of the path; None: every target is None. Texts become class numbers, so names of files,
            such as masks, are refused. A file name alone may fit one file only.
        color: "RGB" ([3, H, W]) or "L" ([1, H, W], grey). Grey of more than 8 bits is scaled (`decode_image`).
        normalize: False gives uint8 [C, H, W] where there is no transform.
        transform_input: "pil" (as torchvision), "tensor" (uint8 [C, H, W]) or "numpy" (uint8 [H, W, C]).
        decode: "fast": a JPEG that is at least twice, 4 or 8 times as large as what is wanted of it is decoded at a half, a quarter or an
            eighth of its size, so its pixels differ a little (372 photographs of 400 x 533 at 128 x 128: by 0.7 grey levels in the mean,
            the worst has a PSNR of 32 dB; see docs/images.md); "exact": each is decoded whole, and then resized.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Attributes:
        classes: names of the classes, sorted; [] without.
        class_to_idx: their numbers.
        samples: ``(path, target)`` of each sample, as torchvision has them.
        targets: [n] int64 class numbers (or what was given), or None.

    Raises:
        DataNotFoundError: the path is missing, or there is no image under it.
        ConfigError: an argument makes no sense; the message names it.
    """

    reads_urls = True
    always_pairs = True
    names_warnings = True

    def __init__(
        self,
        data_path: DataPath,
        *,
        image_size: int | tuple[int, int] | None = _UNSET,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        targets: TargetsArgument = FOLDERS,
        color: Literal["RGB", "L"] = "RGB",
        normalize: bool = True,
        transform_input: Literal["pil", "tensor", "numpy"] = "pil",
        decode: Literal["fast", "exact"] = "fast",
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        self.data_path, targets = data_path, checked_targets(targets, data_path)
        if color not in ("RGB", "L"):
            raise ConfigError(f"color must be 'RGB' or 'L', not {color!r}")
        if transform_input not in ("pil", "tensor", "numpy"):
            raise ConfigError(f"transform_input must be 'pil', 'tensor' or 'numpy', not {transform_input!r}")
        if decode not in ("fast", "exact"):
            raise ConfigError(f"decode must be 'fast' or 'exact', not {decode!r}")
        reach, common = split_options(options)
        self.classes: list[str]
        source, found, self.classes = _open(data_path, targets, reach)
        self.class_to_idx: dict[str, int] = {name: number for number, name in enumerate(self.classes)}
        self.normalize: bool = normalize
        self.color, self.transform_input = color, transform_input
        self._is_exact = decode == "exact"
        self._augment, transform = split_augment(transform)
        transformed = transform is not None or options.get("transforms") is not None
        packed = _first_packed(source)
        self._stored_decoded = packed is not None and packed.info is not None and packed.info.store == "decoded"
        self.image_size: tuple[int, int] | None = self._size(image_size, transformed or self._crop_size is not None, packed)
        self._is_encoded_until_drawn = self._crops_encoded(options.get("hold"))
        self._transformed = transformed
        self._channels_first = self._augment is None and self._shows_channels_first
        super().__init__(source, targets=found, transform=transform, loading_mode=loading_mode, **common)

    def _replace_transform(self, transform: Any) -> None:
        """What is held stays as it is, so it may be held in another layout than the one that is shown."""
        size = self._crop_size or DEFAULT_SIZE
        self._augment, transform = split_augment(transform)
        super()._replace_transform(transform)
        self._transformed = self.transform is not None or self.transforms is not None
        if not self._transformed and self._augment is None and self.image_size is None and "image_size" not in self._arguments:
            self._augment = Augment(Whole(size), None)
        self._is_encoded_until_drawn = self._crops_encoded(self._hold)

    @property
    def _crop_size(self) -> tuple[int, int] | None:
        return None if self._augment is None or self._augment.crop is None else self._augment.crop.size

    def _crops_encoded(self, hold: str | None) -> bool:
        """Is an image decoded only when it is known which part of it is wanted?"""
        return self._crop_size is not None and self.image_size is None and not self._stored_decoded and hold != "decoded"

    @property
    def _shows_channels_first(self) -> bool:
        return not self._transformed or self.transform_input == "tensor"

    def _size(self, image_size: Any, transformed: bool, packed: HDF5Source | None) -> tuple[int, int] | None:
        if self._stored_decoded:
            assert packed is not None
            stored = packed.info.image.get("color") if packed.info is not None else None
            if stored != self.color:
                raise ConfigError(f"color={self.color!r}: {packed.path} was packed with color={stored!r}; pack it again")
            if image_size is _UNSET:
                return int(packed.shape[1]), int(packed.shape[2])
        if image_size is _UNSET:
            return None if transformed else DEFAULT_SIZE
        if image_size is None:
            return None
        return image_sides(image_size, "image_size", ", or None")

    @property
    def samples(self) -> Sequence[tuple[str, Any]]:
        """``(path, target)`` of each sample, made when it is asked for."""
        return _Samples(self)

    @property
    def holds_encoded(self) -> bool:
        """Encoded bytes are held where images keep their own size, if `hold` says nothing."""
        return self._hold == "encoded" if self._hold is not None else self.image_size is None

    def held_as(self) -> str:
        how = " exact" if self._is_exact else ""
        return f"ImageDataset {self.color} {self.image_size} {self._channels_first} {self._stored_decoded}{how}"

    def decode(self, record: Any) -> Any:
        """uint8 [C, H, W], or [H, W, C] where built-in augmentations or transforms of PIL images or arrays come next; the record
        itself where it is to be cropped as it is decoded."""
        if self._is_encoded_until_drawn:
            return record.tobytes() if isinstance(record, np.ndarray) else record  # no array: those are taken for pixels
        if self.image_size is not None and not self._stored_decoded:
            return load_image(record, self.color, self.image_size, self._channels_first, exact=self._is_exact, left=self.left_of_budget)
        pixels = record if self._stored_decoded else decode_image(record, self.color, self.left_of_budget)
        if self.image_size is not None:
            pixels = resize_image(pixels, self.image_size)
        return to_channels_first(pixels) if self._channels_first else pixels

    def draw(self, value: Any) -> Drawn | None:
        if self._augment is None:
            return None
        first = 1 if self._channels_first else 0
        height, width = self.image_size or (
            image_shape(value, self.left_of_budget) if self._is_encoded_until_drawn else value.shape[first : first + 2]
        )
        return self._augment.draw(height, width)

    def _pixels(self, value: Any, drawn: Drawn | None) -> np.ndarray[Any, Any]:
        """What a value becomes by its draws: uint8 in the layout that is to be shown."""
        if drawn is None and self._channels_first == self._shows_channels_first:
            return value  # type: ignore[no-any-return]
        box, flip = (None, False) if drawn is None else drawn
        size = self._crop_size
        if self._is_encoded_until_drawn:
            assert size is not None
            return load_image(value, self.color, size, self._shows_channels_first, box, flip, self._is_exact, self.left_of_budget)
        value = value.transpose(1, 2, 0) if self._channels_first else value  # a view may show what is held for another transform
        if box is not None and size is not None:
            value = resize_image(np.ascontiguousarray(box.of(value)), size)
        value = value[:, ::-1] if flip else value
        return to_channels_first(value) if self._shows_channels_first else np.ascontiguousarray(value)

    def present(self, value: Any) -> Any:
        pixels = self._pixels(value, self.draw(value))
        if not self._transformed:
            return normalize(pixels) if self.normalize else _tensor(pixels)
        if self.transform_input == "pil":
            return Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
        return _tensor(pixels) if self.transform_input == "tensor" else writable(pixels)

    @property
    def _copies(self) -> bool:
        return self._augment is None and self._channels_first and not self.normalize and not self._transformed

    def present_into(self, value: Any, drawn: Drawn | None, out: np.ndarray[Any, Any]) -> None:
        pixels = self._pixels(value, drawn)
        if self.normalize:
            normalize_into(pixels, out)
        else:
            np.copyto(out, pixels)

    def is_late(self, error: Exception) -> bool:
        return self._is_encoded_until_drawn and isinstance(error, FormatError)

    def input_like(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        if self._transformed:
            return None
        height, width = shape[1:] if self._channels_first else shape[:2]
        shape = (self._channels, *(self._crop_size or (height, width)))
        return shape, np.dtype(np.float32 if self.normalize else np.uint8)

    def value_like(self) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        size = self._crop_size if self._is_encoded_until_drawn else self.image_size
        if size is None:
            return None
        shape = (self._channels, *size) if self._channels_first else (*size, self._channels)
        return shape, np.dtype(np.uint8)

    def pixels_of(self, index: int) -> np.ndarray[Any, Any]:
        """The decoded, resized image before any transform: uint8 [H, W, C].

        Raises:
            SampleError: it can't be read, whatever `on_error` says.
        """
        value = self._values(self._whole_indices([range(len(self))[index]]))[0]
        if isinstance(value, Exception):
            raise value
        if self._is_encoded_until_drawn:
            return decode_image(value, self.color, self.left_of_budget)
        return to_channels_last(value) if self._channels_first else value

    def sample_nbytes(self) -> int | None:
        size = self._crop_size or self.image_size
        if self._transformed or size is None:
            return None
        return size[0] * size[1] * self._channels * (4 if self.normalize else 1) + 8

    @property
    def _channels(self) -> int:
        return 3 if self.color == "RGB" else 1

    def held_nbytes(self) -> int | None:
        if self.holds_encoded:
            parts: list[Any] = self._source.sources if isinstance(self._source, ConcatSource) else [self._source]
            return sum(int(part.sizes().sum()) for part in parts) if isinstance(parts[0], (FilesSource, HDF5Source)) else None
        if self.image_size is None:
            return None
        return len(self._source) * self.image_size[0] * self.image_size[1] * self._channels


def _tensor(value: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(writable(value))


def _are_folders(targets: TargetsArgument) -> bool:
    return isinstance(targets, str) and targets == FOLDERS


def _open(
    data_path: DataPath,
    targets: TargetsArgument,
    reach: RemoteOptions,
) -> tuple[ImageSource, Targets, list[str]]:
    if isinstance(data_path, FileSet) or kind_of(data_path, (IMAGES, HDF5)) is HDF5:
        return _open_packed(*open_files(data_path, reach), targets)
    source = FilesSource(data_path, EXTENSIONS, reach)
    if not _are_folders(targets):
        return source, *given_targets(targets, source.files)
    found, classes = folder_targets(source.files)
    if found is None:
        warn(
            f"ImageDataset: the {len(source):,} images lie flat in the folder, so every target is None; "
            "put them into class folders, or pass targets= (targets=None to say that this is meant)"
        )
    return source, found, classes


def _open_packed(paths: Sequence[str], opened: OpenHDF5, targets: TargetsArgument) -> tuple[ImageSource, Targets, list[str]]:
    def one(path: str) -> tuple[HDF5Source, npt.NDArray[Any] | None]:
        foreign = FormatError(f"{redact(path)} holds no images that headrace packed: open it with HDF5Dataset(path, dataset_name)")
        try:
            source = HDF5Source(path, opened=opened)
        except MissingNameError:
            raise foreign from None
        if source.info is None or source.info.kind != "image":
            raise foreign
        return source, source.column(TARGETS) if targets is not None and source.has_column(TARGETS) else None

    if targets is not None and not _are_folders(targets):
        raise ConfigError("targets= can't be changed for a packed file: give it when you pack, or use target_transform")
    found = opened.read_each(paths, one)
    sources, columns = [source for source, _ in found], [column for _, column in found if column is not None]
    first = sources[0]
    assert first.info is not None
    for source in sources[1:]:
        alike = [(one.info.store, one.info.image, one.info.classes, one.rows_are) for one in (first, source) if one.info is not None]
        if alike[0] != alike[1]:
            raise FormatError(
                f"{source.path} and {first.path} can't be one dataset: they were packed with other classes, sizes or colours: pack them "
                "from one dataset"
            )
    if len(columns) not in (0, len(sources)):
        raise FormatError("some of the packed files hold targets, and some none: pack them from one dataset, or pass targets=None")
    whole: ImageSource = first if len(sources) == 1 else ConcatSource(sources)
    if targets is None:
        return whole, None, []
    return whole, np.concatenate(columns) if columns else None, list(first.info.classes or [])


def _first_packed(source: ImageSource) -> HDF5Source | None:
    """The packed file, or the first of several; None: images are files of their own."""
    first = source.sources[0] if isinstance(source, ConcatSource) else source
    return first if isinstance(first, HDF5Source) else None


class _Samples(Sequence[tuple[str, Any]]):
    def __init__(self, dataset: ImageDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        dataset = self._dataset
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        whole = int(dataset._whole_indices([position])[0])
        source = dataset._source
        path = os.fsdecode(source.files.path(whole)) if isinstance(source, FilesSource) else source.location(whole)
        target = None if dataset.targets is None else dataset.targets[position]
        return path, target.item() if isinstance(target, np.generic) else target
