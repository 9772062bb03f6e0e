"""Samples that are packed as they are stored, or as their pixels.

The bytes of an image and of its mask lie one behind the other, and are one sample, with one
checksum. Pixels and their mask are the fields of a row. The plan follows from the dataset alone;
images that are encoded anew go through a spool.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import PIL
import simplejpeg
import torch

from headrace.core.dataset import BaseDataset
from headrace.datasets.arrays import ArrayDataset, HDF5Dataset
from headrace.datasets.image.coco import CocoTargets
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.image.masks import (
    MaskDecoder,
    encode_mask,
    mask_of,
    resize_nearest,
)
from headrace.datasets.open import open_dataset
from headrace.datasets.pixels import decode_image, image_shape
from headrace.dtypes import AnyArray, IntArray
from headrace.errors import ConfigError, FormatError, SampleError
from headrace.formats.arrays import packed
from headrace.formats.files import FilesSource, PairedSource
from headrace.formats.hdf5.rows import HDF5Source
from headrace.formats.resolve.resolver import DataPath
from headrace.packing.contents import Contents
from headrace.packing.destination import PartFile
from headrace.packing.plan import (
    LARGEST_SIDE,
    PackOptions,
    PackPlan,
    Plan,
    Rows,
    Spool,
    chunks_for,
    files_of,
    groups_of,
    some_of,
)


def are_stored(dataset: BaseDataset) -> bool:
    """True if samples are image files, or rows of HDF5 files as they are."""
    source = dataset.sample_source
    files = files_of(source)
    if isinstance(dataset, ImageDataset):
        return bool(files) or isinstance(source, FilesSource | PairedSource)
    decoder = dataset.sample_decoder
    is_plain = decoder.stores_values and not decoder.splits_targets
    if not files or not isinstance(dataset, HDF5Dataset) or not is_plain:
        return False
    info = packed_info_of(files)
    if info is not None and info.store == "encoded":
        return True
    spec = files[0].array_spec
    return spec is not None and all(one.array_spec == spec for one in files)


def packed_info_of(files: Sequence[HDF5Source]) -> packed.PackedInfo | None:
    """The description of packed files, by the first of them. None: one is not packed, or was packed
    in another way.
    """
    infos = [one.of_samples for one in files]
    ways = {None if info is None else (info.kind, info.store, info.values) for info in infos}
    return infos[0] if len(ways) == 1 else None


def open_source(path: DataPath, **options: Any) -> BaseDataset:
    """`open_dataset`, which opens packed arrays with their targets, so that a copy keeps them."""
    dataset = open_dataset(path, **options)
    if isinstance(dataset, ArrayDataset) and dataset.targets is None:
        files = files_of(dataset.sample_source)
        has_targets = all(one.has_column(packed.TARGETS) for one in files)
        if packed_info_of(files) is not None and has_targets:
            dataset.close()
            return open_dataset(path, target_name=packed.TARGETS, **options)
    return dataset


class StoredContents(Contents):
    """Samples for which `are_stored` holds."""

    def __init__(self, dataset: BaseDataset, options: PackOptions) -> None:
        super().__init__(dataset, options)
        self._packed = packed_info_of(self._files)
        self._is_image = isinstance(dataset, ImageDataset)
        self._is_encoded = not self._files or (
            self._packed is not None and self._packed.store == "encoded"
        )
        if dataset._arguments.get("target_name") == packed.TARGETS:
            self._pack_of_targets = self._packed
        self._has_masks = isinstance(dataset.sample_decoder, MaskDecoder)
        self._color = getattr(dataset, "color", "RGB")

    def check_options(self) -> None:
        super().check_options()
        if self.options.store in ("encoded", "jpeg"):
            chunks_for(self.options, Rows("encoded", np.dtype(np.uint8), ()), 0)
        if self._packed is not None and "targets" in self._packed.image and not self._is_image:
            raise ConfigError(
                f"{self._files[0].path} holds images with {self._packed.image['targets']}: open it "
                "with ImageDataset, and pack that"
            )

    @functools.cached_property
    def source_sizes(self) -> IntArray:
        source = self.dataset.sample_source
        if isinstance(source, FilesSource | PairedSource):
            return source.sizes(self._whole_indices())
        sizes = [one.image_sizes() if one.gives_images else one.sizes() for one in self._files]
        return np.concatenate(sizes)[self._whole_indices()]

    # -- plans

    def is_plan(self, frozen: PackPlan) -> bool:
        """One of many jobs does not ask for the size of each file again: those of the parts that
        it packs are compared when they are packed.
        """
        if self.options.part is None or frozen.fingerprint != self.fingerprint:
            return False
        unknown = copy.copy(self)
        unknown.source_sizes = np.zeros(len(self.dataset), np.int64)
        of_sizes = {name: getattr(frozen, name) for name in ("edges", "nbytes", "sources")}
        return replace(unknown.plan_parts(), **of_sizes) == frozen

    def plan_parts(self) -> PackPlan:
        how = self.options
        plan = self.plan_file(None)
        sizes = plan.sizes
        options: dict[str, Any] = {}
        versions: dict[str, str] = {}
        is_resized = self._is_image and plan.rows.store == "decoded" and self._is_encoded
        if how.store == "jpeg" or is_resized:
            versions |= {"Pillow": PIL.__version__, "simplejpeg": simplejpeg.__version__}
        if how.max_size is not None or is_resized:
            versions["torch"] = str(torch.__version__).partition("+")[0]
        if how.store == "jpeg":
            options["jpeg"] = {"max_size": how.max_size, "quality": how.quality}
            if self._color != "RGB":
                options["jpeg"]["color"] = self._color
            if sizes.any():
                # about: they are known when all are encoded
                sizes = (sizes * self._jpeg_ratio(sizes)).astype(np.int64)
        options |= {**plan.info.image, **self.layout_options(plan.rows, versions)}
        if plan.rows.dtype.names and self._has_masks:
            options["rows"] = plan.rows.as_json()
        return self._parts(plan.info, sizes, options)

    def plan_file(self, part: PartFile | None) -> Plan:
        if self.options.store != "jpeg" or part is None:
            plan = self._stored_plan(self.source_sizes)
            return replace(plan, prepare=lambda group: self._stored(plan, group))
        image_sizes = array("q")
        left_out = dict[int, str]()
        spool = Spool(part)
        jpegs = self.readable(
            lambda group: self.each(group, self._encoded),
            groups_of(self.source_sizes),
            "re-encoding",
            left_out,
        )
        for _, parts in jpegs:
            spool.append(*parts)
            image_sizes.append(len(parts[0]))
        sizes = np.array(image_sizes, np.int64)
        plan = self.without(left_out)._stored_plan(spool.sizes, sizes)
        return replace(plan, prepare=spool.read, left_out=left_out)

    def _about(self, targets: Any) -> dict[str, Any]:
        about = super()._about(targets)
        if self._is_image or (self._packed is not None and self._packed.kind == "image"):
            about["kind"] = "image"
        return {**about, "classes": about["classes"] or None}

    def _stored_plan(self, read_sizes: IntArray, image_sizes: IntArray | None = None) -> Plan:
        """The plan of samples of these sizes ([n] int64); for re-encoded images also without their
        masks.
        """
        rows = self._stored_rows()
        is_encoded = rows.store == "encoded"
        targets = self.dataset.targets
        columns: dict[str, AnyArray] = {}
        image: dict[str, Any] = {}
        if image_sizes is not None:
            image = {"jpeg": [self.options.max_size, self.options.quality]}
        elif not is_encoded and self._is_image:
            shape = rows.dtype[packed.IMAGE].shape if self._has_masks else rows.shape
            image = {"color": self._color, "image_size": list(shape[:2])}
        elif not is_encoded and self._packed is not None:
            image = self._packed.image
        if self._boxes is not None:
            targets = None
            columns = self._boxes.columns(
                self._box_sizes(self._boxes, not is_encoded or image_sizes is not None)
            )
            class_ids = list(self._boxes.class_to_idx.values())
            image = {**image, "targets": packed.BOXES, "class_ids": class_ids}
        if self._has_masks:
            image = {**image, "targets": packed.MASKS}
            if is_encoded:
                if image_sizes is None:
                    image_sizes = self._image_sizes(read_sizes)
                columns[packed.MASK_STARTS] = np.cumsum(read_sizes) - read_sizes + image_sizes
        lengths = read_sizes if is_encoded else None
        return replace(self._plan(rows, lengths, targets, columns, image), read_sizes=read_sizes)

    def _image_sizes(self, read_sizes: IntArray) -> IntArray:
        """Bytes of each image without its mask; zeros where `read_sizes` are."""
        if not read_sizes.any():
            return read_sizes
        source = self.dataset.sample_source
        if isinstance(source, PairedSource):
            return source.files.sizes(self._whole_indices())
        return np.concatenate([one.image_sizes() for one in self._files])[self._whole_indices()]

    def _stored_rows(self) -> Rows:
        """What the stored samples or pixels have in common."""
        if self.rows is not None:
            return self.rows
        dataset = self.dataset
        store = self.options.store
        if store in ("encoded", "jpeg") or (store is None and self._is_encoded):
            return Rows("encoded", np.dtype(np.uint8), ())
        if not isinstance(dataset, ImageDataset):
            if self._is_encoded:
                raise ConfigError(
                    "store='decoded': open the file with ImageDataset, which decodes the images, "
                    "and pack that"
                )
            return Rows("decoded", self._files[0].dtype, self._files[0].shape[1:])
        size: Any = dataset.image_size
        if size is None and self._is_encoded:
            raise ConfigError(
                "store='decoded' needs images of one size, and image_size is None: open the "
                "dataset with image_size=(height, width)"
            )
        stored: np.dtype[Any] = self._files[0].dtype if self._files else np.dtype(np.uint8)
        if size is None:
            size = stored[packed.IMAGE].shape if stored.names else self._files[0].shape[1:]
        height = int(size[0])
        width = int(size[1])
        pixels = (height, width, 3 if self._color == "RGB" else 1)
        if not self._has_masks:
            return Rows("decoded", np.dtype(np.uint8), pixels)
        kind = stored[packed.MASK].base if stored.names else self._mask_dtype(dataset)
        fields = [(packed.IMAGE, np.uint8, pixels), (packed.MASK, kind, (height, width))]
        return Rows("decoded", np.dtype(fields), ())

    def _mask_dtype(self, dataset: ImageDataset) -> np.dtype[Any]:
        """The dtype of the mask of the first readable sample.

        Raises:
            SampleError: there is none.
        """
        reader = dataset.sample_reader
        decoder = dataset.pixel_format
        error: SampleError | None = None
        for position in range(len(dataset)):
            [value] = self.each(
                [position], lambda _, index, record: reader.decoded(index, record, decoder)
            )
            if not isinstance(value, SampleError):
                dtype: np.dtype[Any] = value[1].dtype
                return dtype
            error = error or value
        raise SampleError(
            f"none of {len(dataset):,} masks can be read, and rows need one; the first: {error}"
        ) from error

    def _box_sizes(self, boxes: CocoTargets, are_resized: bool) -> AnyArray:
        """Height and width that boxes refer to. If images are resized, all must be known.

        Raises:
            SampleError: an image whose size is not known can't be read.
        """
        left = self.dataset.budget.left
        sizes: AnyArray = boxes.sizes.copy()
        if are_resized:
            for position in np.flatnonzero((sizes == 0).any(axis=1)).tolist():
                [size] = self.each([position], lambda _, __, image: image_shape(image, left))
                if not isinstance(size, SampleError):  # it is left out when it is packed
                    sizes[position] = size
        return sizes

    # -- samples

    def _stored(self, plan: Plan, group: range) -> list[AnyArray | SampleError]:
        """The samples of a group as they will be stored."""
        image_sizes = None
        if packed.MASK_STARTS in plan.columns:
            image_sizes = plan.columns[packed.MASK_STARTS] - plan.columns[packed.OFFSETS][:-1]

        def one(position: int, index: int, record: Any) -> AnyArray | SampleError:
            is_same = True
            if plan.info.store == "encoded":
                parts = self._encoded(position, index, record)
                if isinstance(parts, SampleError):
                    return parts
                sample = np.concatenate([np.frombuffer(data, np.uint8) for data in parts])
                is_same = image_sizes is None or len(parts[0]) == image_sizes[position]
            else:
                row = self._row(plan, position, index, record)
                if isinstance(row, SampleError):
                    return row
                sample = row
            is_same = is_same and sample.nbytes == plan.sizes[position]
            if not is_same or sample.dtype != plan.rows.dtype:
                raise SampleError(
                    f"{self.dataset.source_of(position)} changed while it was packed: "
                    f"{plan.sizes[position]:,} bytes ({plan.rows.dtype}) at the start, "
                    f"{sample.nbytes:,} ({sample.dtype}) now: pack again when no process writes it"
                )
            return sample

        return self.each(group, one)

    def _encoded(self, position: int, index: int, record: Any) -> tuple[Any, ...] | SampleError:
        """The bytes of an encoded image and its mask: re-encoded, or checked. An error if they are
        damaged, don't fit each other, or the image has another size than its annotations say.
        """
        left = self.dataset.budget.left
        image, *masks = record if self._has_masks else (record,)
        made: tuple[Any, ...] = (image, *masks)
        try:
            if self.options.store == "jpeg":
                made = self._jpeg(image, *masks)
            else:
                if self.options.check == "decode":
                    decode_image(image, self._color, left=left)
                else:
                    image_shape(image, left)
                for mask in masks:
                    mask_of(image, mask, left)
            if self._boxes is not None:
                height, width = image_shape(image, left)
                self._boxes.size_of(position, (height, width))
        except Exception as error:  # as the dataset itself would meet it
            return self.dataset.sample_reader.failed(index, "can't be decoded", error)
        return made

    def _row(self, plan: Plan, position: int, index: int, record: Any) -> AnyArray | SampleError:
        """A row as it is; or the pixels of an image with its mask.

        Raises:
            ConfigError: the mask has another dtype than the first one.
        """
        dataset = self.dataset
        if not isinstance(dataset, ImageDataset):
            made = self._value(position, index, record)
            return made if isinstance(made, SampleError) else made[0]
        value: Any = dataset.sample_reader.decoded(index, record, dataset.pixel_format)
        if isinstance(value, SampleError):
            return value
        if self._has_masks:
            pixels, mask = value
            dtype = plan.rows.dtype
            if mask.dtype != dtype[packed.MASK].base:
                raise ConfigError(
                    f"store='decoded': the mask of {dataset.source_of(position)} is {mask.dtype}, "
                    f"and the first one {dtype[packed.MASK].base}, and rows have one dtype: pack "
                    "with store='encoded', or save all masks with the same number of bits"
                )
            value = np.zeros((), dtype)
            value[packed.IMAGE] = pixels
            value[packed.MASK] = mask
        elif self._boxes is not None:
            value, (height, width) = value
            try:
                self._boxes.size_of(position, (int(height), int(width)))
            except FormatError as error:
                return dataset.sample_reader.failed(index, "can't be packed", error)
        return np.ascontiguousarray(value).reshape(value.shape)

    # -- images that are encoded anew

    def _jpeg(self, image: Any, *masks: Any) -> tuple[bytes, ...]:
        """Re-encodes an image as JPEG, its longer side at most `max_size`. Resizes its mask,
        without loss, if the image shrinks. Returns both unchanged unless they become smaller.

        Raises:
            FormatError: one can't be decoded; they don't fit each other.
        """
        left = self.dataset.budget.left
        before = tuple(bytes(one) for one in (image, *masks))
        height, width = image_shape(image, left)
        size = None
        most = self.options.max_size
        if most is not None and most < max(height, width):
            scale = most / max(height, width)
            size = max(1, round(height * scale)), max(1, round(width * scale))
        pixels = np.ascontiguousarray(decode_image(image, self._color, size, left=left))
        fitted = before[1:]
        for mask in masks:
            numbers = mask_of(image, mask, left)
            if numbers.shape != pixels.shape[:2]:
                fitted = (encode_mask(resize_nearest(numbers, pixels.shape[:2])),)
        if max(pixels.shape) > LARGEST_SIDE:
            return before
        space = {"colorspace": "RGB", "colorsubsampling": "420"}
        if self._color == "L":
            space = {"colorspace": "GRAY", "colorsubsampling": "Gray"}
        encoded = simplejpeg.encode_jpeg(pixels, quality=self.options.quality, **space)
        made: tuple[bytes, ...] = (encoded, *fitted)
        is_smaller = len(encoded) < len(image) and sum(map(len, made)) < sum(map(len, before))
        return made if is_smaller else before

    def _jpeg_ratio(self, sizes: IntArray) -> float:
        """Estimates by evenly spread samples how large re-encoded images are, relative to the
        originals.
        """
        before = 0
        after = 0
        for number in some_of(len(self.dataset)):
            with contextlib.suppress(SampleError):  # said when it is packed
                [image] = self.each([number], self._encoded)
                if not isinstance(image, SampleError):
                    before += int(sizes[number])
                    after += sum(map(len, image))
        return after / before if before else 1.0
