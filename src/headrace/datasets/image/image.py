"""Reads images, with class numbers, labels, masks or boxes as targets."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

import numpy as np

from headrace.arguments import check_choice, check_flag, described
from headrace.casting import FLOAT32, DTypeArgument, normalized_dtype
from headrace.collate import DetectionCollator
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import plain_target
from headrace.core.options import UNSET, LoadingMode, ModeName, PathOptions, check_arguments
from headrace.datasets.image.augment import image_sides, split_augment
from headrace.datasets.image.decoder import DEFAULT_SIZE, ImageDecoder, Opened
from headrace.datasets.image.labels import (
    BY_FOLDERS,
    FOLDERS,
    Labels,
    TargetsArgument,
    Wanted,
    encoded,
    labels_by_name,
    metadata_paths,
    names_masks,
    separated,
)
from headrace.errors import ConfigError, warn
from headrace.formats.files import FilesSource, PairedSource, folder_targets
from headrace.formats.hdf5 import HDF5
from headrace.formats.resolve.file_set import EXTENSIONS, IMAGES, TARS, FileSet, Format
from headrace.formats.resolve.resolver import DataPath, entries_of, named_format
from headrace.formats.source import sources_of
from headrace.io.paths import is_url, redact
from headrace.io.remote.options import RemoteOptions
from headrace.memory.budget import MemoryBudget
from headrace.order.world import local_ranks


def open_images(
    data_path: DataPath | FileSet, wanted: Wanted, reach: RemoteOptions, column: str | None = None
) -> Opened:
    """Opens the images under a path, or in a column, and their targets.

    Raises:
        DataNotFoundError, ConfigError, FormatError, MissingNameError: see `ImageDataset`.
    """
    kind: Format | None = TARS
    where: DataPath | FileSet = data_path
    if column is None and isinstance(data_path, FileSet):
        kind = data_path.kind
    elif column is None:
        kind, where = named_format(data_path, (IMAGES, TARS, HDF5), reach)
    if kind is TARS:
        from headrace.datasets.image.columns import open_column  # imports tables and tars

        return open_column(data_path, column, wanted, reach)
    if kind is HDF5:
        from headrace.datasets.image.packs import open_packs  # imports h5py

        return open_packs(data_path, wanted, reach)
    # imports Pillow and simplejpeg: here, so that forked workers share them
    from headrace.datasets.pixels import PLUGINS, is_readable

    files = FilesSource(where, EXTENSIONS, reach)
    try:
        for plugin in PLUGINS:
            are_of_it = files.listing.names.end_in(*plugin.endings)
            if are_of_it.any() and not is_readable(plugin):
                first = redact(files.listing.names[int(are_of_it.argmax())])
                raise ConfigError(
                    f"{are_of_it.sum():,} of {len(files):,} images are {plugin.name}, such as "
                    f"{first}: pip install {plugin.package}, or pass a glob of the others"
                )
        if wanted.targets in BY_FOLDERS or not names_masks(wanted.targets):
            labels = labels_of(wanted, files.listing, reach)
            if not labels.are_objects:
                return Opened(files, labels)
            from headrace.datasets.image.coco import BoxDecoder

            return Opened(files, labels, BoxDecoder)
        from headrace.datasets.image.masks import open_pairs

        return open_pairs(files, wanted, reach)
    except BaseException:
        files.close()
        raise


def checked_targets(targets: Any, data_path: DataPath = "") -> Any:
    """Checks `targets` before any file is listed, and returns a path, a mapping, a callable, a
    `Table` or None.

    A Series with file names as its index becomes a mapping, and so do as many values as
    `data_path` lists files. A DataFrame becomes a `Table`.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(targets, type):
        if hasattr(targets, "columns"):
            # imported here, since it imports the formats of files of labels
            from headrace.datasets.image.tables import from_frame

            return from_frame(targets)
        if targets is None or callable(targets) or isinstance(targets, (str, os.PathLike, Mapping)):
            return targets
    if hasattr(targets, "to_dict") and all(
        isinstance(key, str) for key in getattr(targets, "index", [None])
    ):
        return dict(targets.to_dict())
    values = targets if isinstance(targets, (list, tuple)) else np.asarray(targets)
    is_listed = not isinstance(data_path, (str, bytes, os.PathLike))
    if is_listed and (isinstance(values, (list, tuple)) or values.ndim):
        entries = list(map(os.fsdecode, entries_of(data_path)))
        paths = [os.path.abspath(os.path.expanduser(path)) for path in entries]
        value_of = dict(zip(paths, values, strict=False))
        if len(values) == len(paths) == len(value_of) and not any(map(is_url, entries)):
            return value_of
    raise ConfigError(
        "targets must be labels by file name (a mapping, a table, or the path of one), a callable, "
        f"a folder of masks, or None, not {described(targets)}: pass dict(zip(names, values))"
    )


def labels_of(wanted: Wanted, files: FileSet, reach: RemoteOptions) -> Labels:
    """The targets of files other than masks: from their folders, a file of labels, or as given.

    Strings become class numbers, in sorted order, and lists of strings multi-hot vectors
    (`MultiHot`). Other values are unchanged.

    Raises:
        ConfigError, DataNotFoundError: a file has no target, or a target no file.
        FormatError, AccessError, RemoteError: the file of labels is damaged, or can't be read.
        MissingNameError: a table has no column of that name.
    """
    targets = wanted.targets
    if isinstance(targets, Mapping):
        return labels_by_name(targets, files, wanted)
    if targets is None or callable(targets):
        wanted.refuse_options("label_separator")
        if targets is None:
            return Labels(None, [])
        values = list(map(targets, files))
        return Labels(*encoded(separated(values, wanted.label_separator), "targets"))
    if targets != FOLDERS and (targets is not UNSET or metadata_paths(files)):
        # imported here, since it imports the formats of files of labels
        from headrace.datasets.image.tables import labels_from_files

        labels = labels_from_files(wanted, files, reach)
        if labels is not None:
            return labels
    wanted.refuse_options()
    numbers, classes = folder_targets(files, only_classes=targets is UNSET)
    if numbers is None:
        warn(
            f"{redact(files.roots[0])}: the {len(files):,} files lie flat in the folder, so "
            "there are no targets; put them into class folders, or pass targets=, such as a "
            "CSV of labels (targets=None: no targets)"
        )
    return Labels(numbers, classes)


class ImageDataset(BaseDataset):
    """Images under a path. A sample is ``(image, target)``.

    By default an image is resized to 224 x 224, scaled to [0, 1] and normalised with the ImageNet
    statistics: float32 [3, H, W].

    Args:
        data_path: a folder (searched recursively and sorted; .jpg .jpeg .png .bmp .tiff .tif .webp
            .gif .avif .heic .heif .jxl in any case), a file, a glob, a pattern with braces, fsspec
            URLs, or a list of these. Or HDF5 files that `headrace.pack` wrote (.h5, .hdf5, .he5),
            given in any of these ways except a folder. Or the folder of a pack of several parts, or
            its manifest.json. Or .tar shards in the WebDataset convention; or, with `column`,
            tables (Parquet, Arrow), .npz, HDF5 files and Zarr stores.
        column: of a table: name of the column with the encoded images, as bytes or structs
            {"bytes", "path"}. Of .npz, HDF5 and Zarr: name of the array of encoded images (uint8 of
            any or one length, or opaque) or of pixels (uint8 [N, H, W, 3]). Of tars: extension of
            the images; None: the first of a sample. `targets` then names the column, or the
            extension of the class numbers; default: none, or "cls" if the first sample has it.
            Strings become class numbers.
        image_size: (height, width), or one int for both. Images are resized bilinearly with
            antialiasing, before the transform; the aspect ratio is not kept. None: images keep
            their size. Default: (224, 224) without transforms, else None; for decoded images, of a
            packed file or an array, their stored size.
        transform: a callable, which receives what `transform_input` names and returns the sample's
            image, or a list of callables. A `RandomResizedCrop`, a `RandomHorizontalFlip`, or the
            first followed by the second, at the head of the list, work on the encoded image; if
            nothing follows them, their result is scaled and normalised as above. The same applies
            at the head of `transforms`.
        loading_mode: see `LoadingMode`.
        targets: default: the labels in a metadata.csv, .jsonl or .parquet in the folder, if it has
            a column "file_name" (HuggingFace's imagefolder); else "folders", which is an error if
            the folders have names of splits (train, val, ...), or of images and masks. Or

            * "folders": class numbers from the first-level folders;
            * "masks/", a folder, glob or URL of masks. Each mask has the relative name of its
              image, with any extension, and its size. A target is int64 [H, W], the stored class
              numbers (`headrace.datasets.image.masks`), resized to the nearest pixel;
            * "instances.json", annotations in COCO format. A target is a dict of `boxes` (float32
              [N, 4]: left, top, right, bottom in pixels of the input), `labels`, `area`, `iscrowd`
              and `image_id` (`headrace.datasets.image.coco`);
            * "labels.csv", .tsv, .json, .jsonl, .parquet, or a DataFrame: labels by file name;
            * a mapping from relative path or file name to target, or a callable that takes the
              path;
            * one value for each file, if `data_path` is a list of files;
            * None: every target is None.

            Strings become class numbers. Lists of strings become float32 [classes], with 1 for each
            class in the list. A file name without its folder must match one file only. Built-in
            crops and flips, and `image_size`, apply to masks and boxes as to their image. Other
            callables of `transform` receive the image alone, those of `transforms` both.
        target_name: for a table: the target column, or a list of columns, which give a dict. None:
            all columns except the one with the file names.
        label_separator: string between several labels in one cell, such as ";". With several
            target columns it applies to those that contain it.
        delimiter: character between the cells of a table of labels in CSV, such as ";". None: a
            comma, and a tab in .tsv.
        unused_targets: what to do with labels by file name, masks and annotations whose files are
            not in the data. "raise": raise an error. "skip": ignore them, with a warning that
            counts them (for one table that serves several folders).
        masks: for COCO: add `masks`, uint8 [N, H, W], to each target. Needs pycocotools (extra
            `coco`).
        color: "RGB" ([3, H, W]) or "L" ([1, H, W], greyscale). Greyscale images of more than 8 bits
            are scaled (`decode_image`).
        normalize: True: normalise as above if there is no transform. Under a loader with an
            accelerator as `device=`, images are copied as uint8 and normalised on the device
            (docs/loader.md, "Devices"). "host": always normalise on the host. False: images stay
            uint8 [C, H, W].
        dtype: dtype of normalised images. torch.float16 and torch.bfloat16 halve the bytes of a
            batch; values are rounded once, from float32. None: float32.
        transform_input: type of the image that `transform` receives: "pil" (as in torchvision),
            "tensor" (uint8 [C, H, W]) or "numpy" (uint8 [H, W, C]).
        decode: "fast": a JPEG that is at least 2, 4 or 8 times as large as needed is decoded at a
            half, a quarter or an eighth of its size, so that its pixels differ slightly (372
            photographs of 400 x 533 at 128 x 128: by 0.7 grey levels on average, with a PSNR of 32
            dB in the worst case; see docs/images.md). "exact": each image is decoded at full size
            and then resized.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Attributes:
        classes: sorted names of the classes, [] if there are none. For COCO in the order of their
            ids.
        class_to_idx: class numbers by name. For COCO the ids, which are the labels.
        label_columns: all columns of a table of labels by name, for the whole dataset.
        column_classes: class names by name of text column.
        samples: ``(path, target)`` of each sample, as in torchvision.
        targets: [n] int64 class numbers, or the targets that were passed. None for masks.

    Raises:
        DataNotFoundError: the path does not exist, or contains no images.
        ConfigError: an argument is invalid; the message names it.
    """

    reads_urls = True
    _decoder: ImageDecoder

    def __init__(
        self,
        data_path: DataPath,
        *,
        column: str | None = None,
        image_size: int | tuple[int, int] | None = UNSET,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        targets: TargetsArgument = UNSET,
        target_name: str | Sequence[str] | None = None,
        label_separator: str | None = None,
        delimiter: str | None = None,
        unused_targets: Literal["raise", "skip"] = "raise",
        masks: bool = False,
        color: Literal["RGB", "L"] = "RGB",
        normalize: bool | Literal["host"] = True,
        dtype: DTypeArgument | None = None,
        transform_input: Literal["pil", "tensor", "numpy"] = "pil",
        decode: Literal["fast", "exact"] = "fast",
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        if column is not None and not isinstance(column, str):
            raise ConfigError(f"column must be the name of one column, or None, not {column!r}")
        check_flag("masks", masks)
        for name, value, choices in (
            ("normalize", normalize, (True, False, "host")),
            ("color", color, ("RGB", "L")),
            ("transform_input", transform_input, ("pil", "tensor", "numpy")),
            ("decode", decode, ("fast", "exact")),
            ("unused_targets", unused_targets, ("raise", "skip")),
        ):
            check_choice(name, value, choices)
        self.data_path: Any = data_path
        if isinstance(data_path, FileSet):
            self.data_path = data_path.given
        if targets is not UNSET:
            targets = checked_targets(targets, self.data_path)
        wanted = Wanted(targets, target_name, label_separator, delimiter, masks, unused_targets)
        reach, common = RemoteOptions.split(options)
        images = open_images(data_path, wanted, reach, column)
        labels = images.labels
        self.classes: list[str] = labels.classes
        self.label_columns: dict[str, Any] = dict(labels.columns)
        self.column_classes: dict[str, list[str]] = dict(labels.column_classes)
        self.class_to_idx: dict[str, int] = dict(
            zip(self.classes, range(len(self.classes)), strict=True)
        )
        if labels.are_objects:
            objects: Any = labels.targets
            self.class_to_idx = objects.class_to_idx
        self.color = color
        is_joint = options.get("transforms") is not None
        if is_joint:
            augment, common["transforms"] = split_augment(options["transforms"], "transforms")
        else:
            augment, transform = split_augment(transform)
        transformed = transform is not None or common.get("transforms") is not None
        if dtype is not None and (transformed or not normalize):
            raise ConfigError(
                f"dtype={dtype!r} is for normalised images, without transform and "
                "normalize=False: leave one of them out"
            )
        if images.color not in (None, color):
            raise ConfigError(f"color={color!r}: the stored pixels are {images.color!r}: pass that")
        size = images.size
        if image_size is None:
            size = None
        elif image_size is not UNSET:
            size = image_sides(image_size, "image_size", ", or None")
        elif images.color is None and not transformed and augment.size is None:
            size = DEFAULT_SIZE
        self.image_size: tuple[int, int] | None = size
        usage = common.get("max_memory_usage", 0.8)
        sample_decoder = images.decoder(
            color=color,
            image_size=size,
            is_size_given=image_size is not UNSET,
            exact=decode == "exact",
            normalize=normalize,
            transform_input=transform_input,
            augment=augment,
            transformed=transformed,
            is_stored_decoded=images.color is not None,
            hold=common.get("hold"),
            left=MemoryBudget(usage, local_world_size=local_ranks).left,
            is_joint=is_joint,
            dtype=FLOAT32 if dtype is None else normalized_dtype(dtype),
        )
        super().__init__(
            images.source,
            sample_decoder=sample_decoder,
            targets=labels.targets,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )
        if labels.are_objects:
            is_of_one_size = (sample_decoder.crop_size or size) is not None
            self.collate: Callable[[list[Any]], Any] | str | None = DetectionCollator(
                stack=is_of_one_size
            )

    @property
    def samples(self) -> Sequence[tuple[str, Any]]:
        """``(path, target)`` of each sample, computed on access."""
        return _Samples(self)

    @property
    def holds_encoded(self) -> bool:
        """True if modes "eager" and "cached" cache encoded bytes. Default: True if images keep
        their own size.
        """
        if self._hold is not None:
            return self._hold == "encoded"
        return self.image_size is None

    def held_as(self) -> str:
        decoder = self._decoder
        return (
            f"{type(decoder).__name__} {decoder.color} {decoder.image_size} "
            f"{decoder.channels_first} {decoder.is_stored_decoded} {decoder.exact}"
        )

    @functools.cached_property
    def pixel_format(self) -> ImageDecoder:
        """Like `sample_decoder`, with uint8 [H, W, C] pixels as values if `image_size` is given."""
        return dataclasses.replace(self._decoder, channels_first=False)

    def held_nbytes(self) -> int | None:
        source: Any = self.sample_source
        if self.holds_encoded:
            parts = sources_of(source)
            for part in parts:
                if not hasattr(part, "sizes") or getattr(part, "holds_objects", False):
                    return None
            return sum(int(part.sizes().sum()) for part in parts)
        nbytes = self._decoder.value_nbytes()
        if nbytes is None:
            return None
        return len(source) * nbytes


class _Samples(Sequence[tuple[str, Any]]):
    def __init__(self, dataset: ImageDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        whole = int(self._dataset.whole_indices(position))
        source: Any = self._dataset.sample_source
        target = None
        if self._dataset.targets is not None:
            target = plain_target(self._dataset.targets[position])
        if isinstance(source, PairedSource):
            target = source.other_path(whole)
            source = source.files
        if isinstance(source, FilesSource):
            return os.fsdecode(source.listing.path(whole)), target
        return source.location(whole), target
