"""Images in folders, or packed into one file, with class numbers as targets."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.budgeting import DatasetBudget
from headrace.datasets.core.checks import check_arguments
from headrace.datasets.core.options import PathOptions, split_options
from headrace.datasets.image.augment import image_sides, split_augment
from headrace.datasets.image.format import DEFAULT_SIZE, ImageFormat
from headrace.datasets.image.labels import FOLDERS, Targets, TargetsArgument, checked_targets, given_targets
from headrace.errors import ConfigError, FormatError, MissingNameError, warn
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.file_set import FileSet, Kind
from headrace.io.resolve.resolver import kind_of
from headrace.modes import LoadingMode, ModeName
from headrace.storage.arrays.packed import TARGETS, PackedSource
from headrace.storage.class_folders import folder_targets
from headrace.storage.concat import ConcatSource
from headrace.storage.files import FilesSource
from headrace.storage.hdf5.files import HDF5
from headrace.storage.hdf5.rows import HDF5Source, OpenHDF5, open_files
from headrace.storage.kinds import EXTENSIONS, IMAGES
from headrace.storage.zarr.packed import PackedGroup, packed_groups
from headrace.storage.zarr.rows import OpenZarr
from headrace.storage.zarr.stores import ZARR

_UNSET: Any = "default"
ImageSource = FilesSource | PackedSource | ConcatSource[PackedSource]


class ImageDataset(BaseDataset):
    """Samples ``(image, target)`` of the images under a path.

    By default an image is resized to 224 x 224, scaled to [0, 1] and normalised with the ImageNet statistics: float32 [3, H, W].

    Args:
        data_path: a folder (searched through, sorted, .jpg .jpeg .png .bmp .tiff .tif .webp .gif in any case), a file, a glob, a
            pattern in braces, fsspec URLs, or a list of these. Or HDF5 files that `headrace.pack` wrote, named in any of these ways but a
            folder (.h5, .hdf5, .he5); or the folder of a pack of several parts, or its manifest.json.
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
    _format: ImageFormat

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
        source, given, self.classes = _open(data_path, targets, reach)
        self.class_to_idx: dict[str, int] = {name: number for number, name in enumerate(self.classes)}
        self.normalize: bool = normalize
        self.color, self.transform_input = color, transform_input
        augment, transform = split_augment(transform)
        transformed = transform is not None or options.get("transforms") is not None
        packed = _first_packed(source)
        is_stored_decoded = packed is not None and packed.info is not None and packed.info.store == "decoded"
        is_sized = image_size is not _UNSET or not (transformed or (augment is not None and augment.size is not None))
        self.image_size: tuple[int, int] | None = _size_of(image_size, is_sized, color, packed if is_stored_decoded else None)
        sample_format = ImageFormat(
            color=color, image_size=self.image_size, is_size_given=image_size is not _UNSET, exact=decode == "exact", normalize=normalize,
            transform_input=transform_input, augment=augment, transformed=transformed, is_stored_decoded=is_stored_decoded,
            hold=common.get("hold"), left=DatasetBudget(common.get("max_memory_usage", 0.8)),
        )  # fmt: skip
        super().__init__(source, sample_format=sample_format, targets=given, transform=transform, loading_mode=loading_mode, **common)

    @property
    def samples(self) -> Sequence[tuple[str, Any]]:
        """``(path, target)`` of each sample, made when it is asked for."""
        return _Samples(self)

    @property
    def holds_encoded(self) -> bool:
        """True if encoded bytes are held: where images keep their own size, if `hold` is not given."""
        return self._hold == "encoded" if self._hold is not None else self.image_size is None

    def held_as(self) -> str:
        return self._format.held_as

    def pixels_of(self, index: int) -> np.ndarray[Any, Any]:
        """The decoded, resized image before any transform: uint8 [H, W, C].

        Raises:
            SampleError: it can't be read, whatever `on_error` says.
        """
        value = self.sample_reader.values([int(self.whole_indices(range(len(self))[index]))], self.sample_access)[0]
        if isinstance(value, Exception):
            raise value
        return self._format.pixels(value)

    @functools.cached_property
    def pixel_format(self) -> ImageFormat:
        """As `sample_format`, with pixels uint8 [H, W, C] as values, where `image_size` is given."""
        return dataclasses.replace(self._format, channels_first=False)

    def held_nbytes(self) -> int | None:
        if self.holds_encoded:
            parts: list[Any] = self.sample_source.sources if isinstance(self.sample_source, ConcatSource) else [self.sample_source]
            return sum(int(part.sizes().sum()) for part in parts) if isinstance(parts[0], (FilesSource, PackedSource)) else None
        if self.image_size is None:
            return None
        return len(self.sample_source) * self.image_size[0] * self.image_size[1] * self._format.channels


def _size_of(image_size: Any, is_sized: bool, color: str, packed: PackedSource | None) -> tuple[int, int] | None:
    """The size of values: that of a packed file of decoded images, where none is given; else the default, if images get one (`is_sized`).

    Raises:
        ConfigError: the size is none; or the file holds images of another colour.
    """
    if packed is not None:
        stored = packed.info.image.get("color") if packed.info is not None else None
        if stored != color:
            raise ConfigError(f"color={color!r}: {packed.path} was packed with color={stored!r}; pack it again")
        if image_size is _UNSET:
            return int(packed.shape[1]), int(packed.shape[2])
    if image_size is _UNSET:
        return DEFAULT_SIZE if is_sized else None
    return None if image_size is None else image_sides(image_size, "image_size", ", or None")


def _are_folders(targets: TargetsArgument) -> bool:
    return isinstance(targets, str) and targets == FOLDERS


def _open(data_path: DataPath, targets: TargetsArgument, reach: RemoteOptions) -> tuple[ImageSource, Targets, list[str]]:
    if isinstance(data_path, FileSet):
        kind: Kind | None = ZARR if ZARR.fits(os.fsdecode(data_path.names[0])) else HDF5
    else:
        kind = kind_of(data_path, (IMAGES, HDF5, ZARR), reach)
    if kind in (HDF5, ZARR):
        return _open_packed(data_path, kind, targets, reach)
    source = FilesSource(data_path, EXTENSIONS, reach)
    if not _are_folders(targets):
        return source, *given_targets(targets, source.listing)
    numbers, classes = folder_targets(source.listing)
    if numbers is None:
        warn(
            f"ImageDataset: the {len(source):,} images lie flat in the folder, so every target is None; "
            "put them into class folders, or pass targets= (targets=None to say that this is meant)"
        )
    return source, numbers, classes


def _open_packed(
    data_path: DataPath | FileSet, kind: Kind, targets: TargetsArgument, reach: RemoteOptions
) -> tuple[ImageSource, Targets, list[str]]:
    def one(path: str) -> tuple[PackedSource, npt.NDArray[Any] | None]:
        dataset = "HDF5Dataset" if hdf5 is not None else "ZarrDataset"
        foreign = FormatError(f"{redact(path)} holds no images that headrace packed: open it with {dataset}(path, dataset_name)")
        try:
            source: PackedSource = HDF5Source(path, opened=hdf5) if hdf5 is not None else PackedGroup(path, zarr)
        except MissingNameError:
            raise foreign from None
        if source.info is None or source.info.kind != "image":
            raise foreign
        return source, source.column(TARGETS) if targets is not None and source.has_column(TARGETS) else None

    if targets is not None and not _are_folders(targets):
        raise ConfigError("targets= can't be changed for a packed file: give it when you pack, or use target_transform")
    hdf5: OpenHDF5 | None = None
    zarr: OpenZarr | None = None
    if kind is HDF5:
        paths, hdf5 = open_files(data_path, reach)
        each = hdf5.hdf5.read_each(paths, one)
    else:
        paths, zarr = packed_groups(data_path, reach)
        each = [one(path) for path in paths]
    sources, columns = [source for source, _ in each], [column for _, column in each if column is not None]
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


def _first_packed(source: ImageSource) -> PackedSource | None:
    """The packed file, or the first of several; None: images are files of their own."""
    first = source.sources[0] if isinstance(source, ConcatSource) else source
    return first if isinstance(first, PackedSource) else None


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
        whole = int(dataset.whole_indices(position))
        source = dataset.sample_source
        path = os.fsdecode(source.listing.path(whole)) if isinstance(source, FilesSource) else source.location(whole)
        target = None if dataset.targets is None else dataset.targets[position]
        return path, target.item() if isinstance(target, np.generic) else target
