"""What is packed of images and arrays: bytes as they are, smaller JPEGs, pixels, rows, values.

The bytes of an image and of its mask lie one behind the other, and are one sample, with one
checksum. Pixels and their mask are the fields of a row. What follows from the dataset alone is
written as it is read; samples whose sizes are not known go through a spool.
"""

from __future__ import annotations

import contextlib
import copy
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
import PIL
import simplejpeg
import torch

from headrace.arguments import described
from headrace.core.dataset import BaseDataset
from headrace.datasets.arrays import HDF5Dataset
from headrace.datasets.image.decoder import (
    MaskDecoder,
    decode_mask,
    encode_mask,
    mask_of,
    resize_nearest,
)
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.image.pixels import decode_image, image_shape
from headrace.datasets.memory_efficient import ALONE
from headrace.dtypes import BFLOAT16, IntArray
from headrace.errors import BudgetError, ConfigError, FormatError, SampleError
from headrace.formats.arrays.packed import (
    BOXES,
    IMAGE,
    MASK,
    MASK_STARTS,
    MASKS,
    OFFSETS,
    TARGETS,
    PackedInfo,
    bytes_of,
)
from headrace.formats.files import FilesSource, PairedSource
from headrace.formats.hdf5.chunks import filter_versions
from headrace.formats.hdf5.rows import HDF5Source
from headrace.formats.source import PackPart
from headrace.io.packed_strings import PackedNames
from headrace.memory.budget import format_size
from headrace.packing.options import LARGEST_SIDE, PackOptions
from headrace.packing.part import PartFile
from headrace.packing.parts import PartsPlan, checks_of, edges_of
from headrace.packing.plan import (
    GROUP_BYTES,
    Column,
    Packing,
    Plan,
    Rows,
    Spool,
    annotations_check,
    boxes_of,
    check_names,
    chunks_for,
    each_sample,
    files_of,
    groups_of,
    make_plan,
    names_of,
    some_of,
    stream,
    target_arrays,
    target_columns_of,
)

T = TypeVar("T")
_UNKNOWN_SAMPLES = 16  # a task decodes so many, whose sizes are not known, or fewer large ones


class Survey(NamedTuple):
    """What the plan of several parts needs to know of all samples.

    Attributes:
        info: of one file of them.
        sizes: [n] int64, bytes of each as it is stored, about.
        source_sizes: [n] int64, bytes of each where it comes from, by which a changed source is
            noticed; None: they are known by the fingerprint alone.
        options: what else decides the bytes, by name.
    """

    info: PackedInfo
    sizes: IntArray
    source_sizes: IntArray | None
    options: dict[str, Any]


def are_files(source: Any) -> bool:
    """True if samples are files, or pairs of files."""
    return isinstance(source, FilesSource | PairedSource)


def packed_info_of(files: Sequence[HDF5Source]) -> PackedInfo | None:
    """What packed files say of themselves, as the first of them does; None: some are none, or
    were packed in another way.
    """
    infos = [one.of_samples for one in files]
    ways = {None if info is None else (info.kind, info.store, info.values) for info in infos}
    return infos[0] if len(ways) == 1 else None


class Contents:
    """What is packed of a dataset.

    Args:
        dataset: whose samples a file gets.
        options: how.

    Attributes:
        rows: what its samples have in common with those of other parts; None: the dataset says it.
        part: which part of a pack it is; None: it is the whole.
        is_stored: True if a plan follows from the dataset alone: its samples are image files, or
            rows of a file as they are.

    Raises:
        ConfigError: the dataset can't be packed with these options.
    """

    rows: Rows | None = None
    part: PackPart | None = None

    def __init__(self, dataset: BaseDataset, options: PackOptions) -> None:
        source = dataset.sample_source
        self.dataset = dataset
        self.options = options
        self.workers = options.threads if source.thread_safe else 0
        self._files = files_of(source)
        self._packed = packed_info_of(self._files)
        self._is_image = isinstance(dataset, ImageDataset)
        self._is_encoded = are_files(source) or (
            self._packed is not None and self._packed.store == "encoded"
        )
        self._has_masks = isinstance(dataset.sample_decoder, MaskDecoder)
        self._color = getattr(dataset, "color", "RGB")
        self.is_stored = self._follows_from_source()
        self._check_options()

    def _follows_from_source(self) -> bool:
        if self._is_image:
            return bool(self._files) or are_files(self.dataset.sample_source)
        decoder = self.dataset.sample_decoder
        is_plain = decoder.stores_values and not decoder.splits_targets
        if not self._files or not isinstance(self.dataset, HDF5Dataset) or not is_plain:
            return False
        spec = self._files[0].array_spec
        have_one_spec = spec is not None and all(one.array_spec == spec for one in self._files)
        return have_one_spec or self._is_encoded

    def _check_options(self) -> None:
        options = self.options
        if options.end_token is not None:
            raise ConfigError("end_token is for texts: leave it out")
        if options.is_jpeg and not self._is_image:
            raise ConfigError("store='jpeg' is for images: open them with ImageDataset")
        if options.store in ("encoded", "jpeg") and not self._is_encoded:
            raise ConfigError(
                "store='encoded': the samples of this dataset are arrays, not encoded images: pass "
                "store='decoded'"
            )
        if self._packed is not None and "targets" in self._packed.image and not self._is_image:
            raise ConfigError(
                f"{self._files[0].path} holds images with {self._packed.image['targets']}: open it "
                "with ImageDataset, and pack that"
            )
        is_checked = self._is_encoded and self._kind == "image" and not options.is_jpeg
        if options.check != "decode" and (not is_checked or options.store == "decoded"):
            raise ConfigError(f"check={options.check!r} is for encoded images: leave it out")

    @property
    def _kind(self) -> str:
        are_images = self._is_image or (self._packed is not None and self._packed.kind == "image")
        return "image" if are_images and self.is_stored else "array"

    @property
    def names(self) -> PackedNames | None:
        """Of the samples, where they are files or have been."""
        return names_of(self.dataset)

    @property
    def fingerprint(self) -> str:
        """Of the samples."""
        return self.dataset.fingerprint

    def view(self, numbers: IntArray) -> Self:
        """Some of the samples, by number."""
        some = copy.copy(self)
        some.dataset = self.dataset.subset(numbers)
        return some

    def without(self, unreadable: Mapping[int, object]) -> Self:
        """The samples that can be read; `unreadable` says what is wrong with each of the others, by
        number.

        Raises:
            SampleError: none can be read.
        """
        if not unreadable:
            return self
        count = len(self.dataset)
        readable = np.setdiff1d(np.arange(count), list(unreadable))
        if not len(readable):
            raise SampleError(
                f"none of {count:,} samples can be read; the first: "
                f"{next(iter(unreadable.values()))}"
            )
        return self.view(readable)

    def source_sizes(self) -> IntArray | None:
        """Bytes of each sample where it comes from ([n] int64), if samples are files or rows that
        are packed as they are.
        """
        if not self.is_stored:
            return None
        source = self.dataset.sample_source
        whole = self.dataset.whole_indices(np.arange(len(self.dataset)))
        if isinstance(source, FilesSource | PairedSource):
            return source.sizes(whole)
        sizes = [one.image_sizes() if one.gives_images else one.sizes() for one in self._files]
        return np.concatenate(sizes)[whole]

    # -- the plan of several parts

    def plan_parts(
        self, source_sizes: IntArray | None = None, edges: list[int] | None = None
    ) -> PartsPlan:
        """The plan of all parts.

        Args:
            source_sizes: see `source_sizes`, where these are known.
            edges: of another plan of these samples.

        Raises:
            ConfigError: there are no samples; see `packing`.
            SampleError: see `packing`.
        """
        survey = self._survey(source_sizes)
        if not len(survey.sizes):
            raise ConfigError("a dataset without samples can't be packed into parts")
        if edges is None:
            edges = edges_of(survey.sizes, self.options.part_nbytes)
        info = survey.info
        options = {**self._given_options(), **survey.options}
        if info.target_columns is not None:
            options["target_columns"] = info.target_columns
        sources = list[int]()
        if survey.source_sizes is not None:
            sources = checks_of(self.names, survey.source_sizes, edges)
        return PartsPlan(
            info.kind,
            info.store,
            self.fingerprint,
            len(survey.sizes),
            edges,
            np.add.reduceat(survey.sizes, edges[:-1]).tolist(),
            sources,
            options,
            info.classes,
        )

    def _given_options(self) -> dict[str, Any]:
        """What the options of a plan have of the arguments of `pack`, whatever is packed."""
        how = self.options
        options: dict[str, Any] = {
            "shard_size": how.part_nbytes,
            "on_error": "skip" if self.dataset.on_error == "skip" else "raise",
            **annotations_check(self.dataset),
        }
        if how.check != "decode":
            options["check"] = how.check
        if how.is_jpeg:
            options["jpeg"] = {"max_size": how.max_size, "quality": how.quality}
            if self._color != "RGB":
                options["jpeg"]["color"] = self._color
        return options

    def _layout_options(self, rows: Rows) -> dict[str, Any]:
        """What they have of chunks, and of the libraries that decide the bytes."""
        how = self.options
        options: dict[str, Any] = {}
        versions: dict[str, str] = {}
        is_resized = self._is_image and rows.store == "decoded" and self._is_encoded
        if how.is_jpeg or is_resized:
            versions |= {"Pillow": PIL.__version__, "simplejpeg": simplejpeg.__version__}
        if is_resized or how.max_size is not None:
            versions["torch"] = str(torch.__version__).partition("+")[0]  # resizes
        chunks = chunks_for(how, rows)
        if chunks is not None:
            options = {"compression": how.compression, "chunks": chunks}
            if how.compression is not None:
                versions |= filter_versions(how.compression)
        if versions:
            options["versions"] = versions
        return options

    def is_plan(self, frozen: PartsPlan) -> bool:
        """True if a plan of samples that had to be looked at is what these options give of the same
        dataset.
        """
        rows = frozen.rows
        if self.is_stored or rows is None or frozen.fingerprint != self.fingerprint:
            return False
        seen = {name: frozen.options.get(name) for name in ("rows", "target_columns")}
        options = {**seen, **self._given_options(), **self._layout_options(rows)}
        return options == {**seen, **frozen.options}

    def _survey(self, read_sizes: IntArray | None) -> Survey:
        packing = self.packing(None, read_sizes)
        plan = packing.plan
        sizes = np.zeros(len(self.dataset), np.int64)
        sizes[np.setdiff1d(np.arange(len(sizes)), list(packing.left_out))] = plan.sizes
        if self.options.is_jpeg and read_sizes is None:
            # about: they are known when all are encoded
            sizes = (sizes * self._jpeg_ratio(sizes)).astype(np.int64)
        options = {**plan.info.image, **self._layout_options(plan.rows)}
        if not self.is_stored or (plan.rows.dtype.names and self._has_masks):
            options["rows"] = plan.rows.as_json()
        return Survey(plan.info, sizes, plan.read_sizes if self.is_stored else None, options)

    # -- a file

    def packing(self, part: PartFile | None, read_sizes: IntArray | None = None) -> Packing:
        """What is written, and how.

        Args:
            part: beside which a spool may be; None: nothing is written, and images that are
                re-encoded are planned as they are.
            read_sizes: `source_sizes`, where these are known.

        Raises:
            ConfigError: the dataset can't be packed, or not with this store.
            SampleError: see `pack`.
        """
        if not self.is_stored:
            return self._of_values(part)
        if read_sizes is None:
            read_sizes = self.source_sizes()
            assert read_sizes is not None
        if self.options.is_jpeg and part is not None:
            return self._reencoded(part, read_sizes)
        plan = self._stored_plan(read_sizes)
        return Packing(plan, lambda group: self._stored(plan, group), {})

    def _plan(
        self,
        rows: Rows,
        lengths: IntArray | None,
        targets: Any,
        columns: Mapping[str, Column] | None = None,
        **about: Any,
    ) -> Plan:
        """The plan of exactly these samples.

        Args:
            rows: what they have in common.
            lengths: [n] int64, the items of the first axis of each; None: they are rows.
            targets: one a sample, or None.
            columns: others beside the samples, by name.
            about: what `PackedInfo` says of them besides.
        """
        packed = None
        # of arrays of a pack: the pack's, if its targets are the dataset's
        if self.is_stored and self.dataset._arguments.get("target_name") == TARGETS:
            packed = self._packed
        classes: Any = getattr(self.dataset, "classes", None)
        is_list = isinstance(classes, (list, tuple))
        if not is_list or not all(isinstance(name, str) for name in classes):
            classes = None if packed is None else packed.classes
        elif self.is_stored and not classes:
            classes = None
        info = PackedInfo(
            self._kind,
            rows.store,
            len(self.dataset),
            self.fingerprint,
            classes,
            part=self.part,
            values=rows.values,
            target_columns=target_columns_of(self.dataset, targets, packed),
            **about,
        )
        columns = {**target_arrays(targets), **(columns or {})}
        return make_plan(self.options, info, rows, lengths, self.names, columns)

    # -- samples as they are, and pixels

    def _stored_plan(self, read_sizes: IntArray, image_sizes: IntArray | None = None) -> Plan:
        """The plan of samples of these sizes ([n] int64); of images that were encoded anew also
        without their masks.
        """
        dataset = self.dataset
        rows = self._stored_rows()
        is_encoded = rows.store == "encoded"
        targets = dataset.targets
        boxes = boxes_of(dataset)
        columns: dict[str, Column] = {}
        image: dict[str, Any] = {}
        if image_sizes is not None:
            image = {"jpeg": [self.options.max_size, self.options.quality]}
        elif not is_encoded and self._is_image:
            shape = rows.dtype[IMAGE].shape if self._has_masks else rows.shape
            image = {"color": self._color, "image_size": list(shape[:2])}
        elif not is_encoded and self._packed is not None:
            image = self._packed.image
        if boxes is not None:
            targets = None
            columns = boxes.columns(self._box_sizes(not is_encoded or image_sizes is not None))
            class_ids = list(boxes.class_to_idx.values())
            image = {**image, "targets": BOXES, "class_ids": class_ids}
        if self._has_masks:
            image = {**image, "targets": MASKS}
            if is_encoded:
                if image_sizes is None:
                    image_sizes = self._image_sizes(read_sizes)
                columns[MASK_STARTS] = np.cumsum(read_sizes) - read_sizes + image_sizes
        plan = self._plan(rows, read_sizes if is_encoded else None, targets, columns, image=image)
        return replace(plan, read_sizes=read_sizes)

    def _image_sizes(self, read_sizes: IntArray) -> IntArray:
        """Bytes of each image without its mask; where no sizes are wanted, none are asked for."""
        if not read_sizes.any():
            return read_sizes
        dataset = self.dataset
        whole = dataset.whole_indices(np.arange(len(dataset)))
        if isinstance(dataset.sample_source, PairedSource):
            return dataset.sample_source.files.sizes(whole)
        return np.concatenate([one.image_sizes() for one in self._files])[whole]

    def _stored_rows(self) -> Rows:
        """What samples have in common that are stored as they are, or as pixels."""
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
            size = stored[IMAGE].shape if stored.names else self._files[0].shape[1:]
        height = int(size[0])
        width = int(size[1])
        pixels = (height, width, 3 if self._color == "RGB" else 1)
        if not self._has_masks:
            return Rows("decoded", np.dtype(np.uint8), pixels)
        kind = stored[MASK].base if stored.names else self._mask_dtype()
        fields = [(IMAGE, np.uint8, pixels), (MASK, kind, (height, width))]
        return Rows("decoded", np.dtype(fields), ())

    def _mask_dtype(self) -> np.dtype[Any]:
        """The dtype of the first mask that can be read.

        Raises:
            SampleError: there is none.
        """
        dataset = self.dataset
        reader = dataset.sample_reader
        failure = SampleError("there are no samples")
        for index in dataset.whole_indices(np.arange(len(dataset))).tolist():
            record: Any = reader.records([index], dataset.sample_source.read)[0]
            if not isinstance(record, SampleError):
                try:
                    return decode_mask(record[1], dataset.budget.left).dtype
                except FormatError as error:
                    record = reader.failed(index, "can't be decoded", error)
            failure = record
            if dataset.on_error != "skip":
                break
        raise failure

    def _box_sizes(self, are_resized: bool) -> npt.NDArray[Any]:
        """Height and width that boxes are in pixels of; where images are stored in other sizes,
        all must be known.

        Raises:
            SampleError: an image whose size is not known can't be read.
        """
        dataset = self.dataset
        sizes: npt.NDArray[Any] = dataset.targets.sizes.copy()
        if are_resized:
            for position in np.flatnonzero((sizes == 0).any(axis=1)).tolist():
                index = int(dataset.whole_indices(position))
                record = dataset.sample_reader.records([index], dataset.sample_source.read)[0]
                if not isinstance(record, SampleError):  # it is left out when it is packed
                    sizes[position] = image_shape(record, dataset.budget.left)
        return sizes

    def _stored(self, plan: Plan, group: range) -> list[Column | SampleError]:
        """The samples of a group as they will be stored."""
        dataset = self.dataset

        def one(position: int, index: int, record: Any) -> Column | SampleError:
            if plan.info.store != "encoded":
                sample = self._row(plan, position, index, record)
            elif plan.info.kind == "image":
                sample = self._checked(plan, position, index, record)
            else:
                sample = np.frombuffer(record, np.uint8)
            if isinstance(sample, SampleError):
                return sample
            if sample.nbytes != plan.sizes[position] or sample.dtype != plan.rows.dtype:
                raise SampleError(
                    f"{dataset.source_of(position)} changed while it was packed: "
                    f"{plan.sizes[position]:,} bytes ({plan.rows.dtype}) at the start, "
                    f"{sample.nbytes:,} ({sample.dtype}) now: pack again when nobody writes there"
                )
            return sample

        return each_sample(dataset, group, one)

    def _checked(self, plan: Plan, position: int, index: int, record: Any) -> Column | SampleError:
        """The bytes of an encoded image, with those of its mask; they are looked at first: an error
        if they are damaged, don't fit each other, or the image is not as large as its annotations
        say.
        """
        left = self.dataset.budget.left
        is_decoded = self.options.check == "decode"
        image, *masks = record if self._has_masks else (record,)
        try:
            if is_decoded:
                decode_image(image, self._color, left=left)
            else:
                image_shape(image, left)
            for mask in masks:
                mask_of(image, mask, left)
            self._check_size(position, image)
        except Exception as error:  # as the dataset itself would meet it
            return self.dataset.sample_reader.failed(index, "can't be decoded", error)
        if masks:
            begin = plan.columns[OFFSETS][position]
            if begin + len(image) != plan.columns[MASK_STARTS][position]:
                raise SampleError(f"{self.dataset.source_of(position)} changed while it was packed")
        return np.concatenate([np.frombuffer(data, np.uint8) for data in (image, *masks)])

    def _check_size(self, position: int, image: Any) -> None:
        """Raises a FormatError where annotations say another size than an encoded image has."""
        boxes = boxes_of(self.dataset)
        if boxes is not None:
            height, width = image_shape(image, self.dataset.budget.left)
            boxes.size_of(position, (height, width))

    def _row(self, plan: Plan, position: int, index: int, record: Any) -> Column | SampleError:
        """A row as it is; or the pixels of an image, with their mask.

        Raises:
            ConfigError: the mask has another dtype than the first one.
        """
        dataset = self.dataset
        reader = dataset.sample_reader
        value: Any
        if not isinstance(dataset, ImageDataset):
            value = _value(dataset, position, index, record)
            if isinstance(value, SampleError):
                return value
            return as_row(f"sample {position}", value[0])
        value = reader.decoded(index, record, dataset.pixel_format)
        if isinstance(value, SampleError):
            return value
        boxes = boxes_of(dataset)
        if self._has_masks:
            pixels, mask = value
            dtype = plan.rows.dtype
            if mask.dtype != dtype[MASK].base:
                raise ConfigError(
                    f"store='decoded': the mask of {dataset.source_of(position)} is "
                    f"{mask.dtype}, and the first one {dtype[MASK].base}, and rows have one dtype: "
                    "pack with store='encoded', or save all masks with the same number of bits"
                )
            value = np.zeros((), dtype)
            value[IMAGE] = pixels
            value[MASK] = mask
        elif boxes is not None:
            value, size = value
            try:
                boxes.size_of(position, (int(size[0]), int(size[1])))
            except FormatError as error:
                return reader.failed(index, "can't be packed", error)
        return np.ascontiguousarray(value).reshape(value.shape)

    # -- samples whose sizes are known when they are made

    def made(
        self,
        task: Callable[[range], Sequence[T | SampleError]],
        groups: Iterator[range],
        what: str,
        use: Callable[[int, T], None],
        workers: int | None = None,
    ) -> dict[int, str]:
        """Uses what a task makes of each sample that can be read, in order; returns what is wrong
        with the others.
        """
        count = len(self.dataset)
        left_out = dict[int, str]()
        if workers is None:
            workers = self.workers
        with contextlib.closing(
            stream(task, groups, workers, self.options.progress, count, what)
        ) as results:
            for group, samples in results:
                for number, sample in zip(group, samples, strict=True):
                    if isinstance(sample, SampleError):
                        left_out[number] = str(sample)
                    else:
                        use(number, sample)
        return left_out

    def _reencoded(self, part: PartFile, read_sizes: IntArray) -> Packing:
        """Images as JPEG, each with its mask where they have masks."""
        image_sizes = array("q")
        spool = Spool(part)

        def use(_: int, image: tuple[bytes, ...]) -> None:
            spool.append(*image)
            image_sizes.append(len(image[0]))

        left_out = self.made(self._jpegs, groups_of(read_sizes), "re-encoding", use)
        sizes = np.array(image_sizes, np.int64)
        plan = self.without(left_out)._stored_plan(spool.sizes, sizes)
        return Packing(plan, spool.reader(), left_out)

    def _jpegs(self, group: range) -> list[tuple[bytes, ...] | SampleError]:
        def make(position: int, index: int, record: Any) -> tuple[bytes, ...] | SampleError:
            image, *masks = record if self._has_masks else (record,)
            try:
                self._check_size(position, image)
                made = self._jpeg(image)
                return self._with_mask(image, masks[0], made) if masks else (made,)
            except Exception as error:  # as the dataset itself would meet it
                return self.dataset.sample_reader.failed(index, "can't be decoded", error)

        return each_sample(self.dataset, group, make)

    def _jpeg(self, data: Any) -> bytes:
        """An encoded image as JPEG, its longer side at most `max_size`; the image as it is, if that
        is not larger.

        Raises:
            FormatError: it can't be decoded.
        """
        left = self.dataset.budget.left
        height, width = image_shape(data, left)
        scale = 1.0
        if self.options.max_size is not None:
            scale = self.options.max_size / max(height, width)
        size = None
        if scale < 1:
            size = max(1, round(height * scale)), max(1, round(width * scale))
        pixels = decode_image(data, self._color, size, left=left)
        if max(pixels.shape) > LARGEST_SIDE:
            return bytes(data)
        space = {"colorspace": "RGB", "colorsubsampling": "420"}
        if self._color == "L":
            space = {"colorspace": "GRAY", "colorsubsampling": "Gray"}
        pixels = np.ascontiguousarray(pixels)
        made: bytes = simplejpeg.encode_jpeg(pixels, quality=self.options.quality, **space)
        return made if len(made) < len(data) else bytes(data)

    def _with_mask(self, image: Any, mask: Any, made: bytes) -> tuple[bytes, bytes]:
        """An image that was encoded anew, and its mask: as it is or, where the image has fewer
        pixels now, of its size, without loss. Both as they were, where together they would not
        become smaller.

        Raises:
            FormatError: they don't fit each other.
        """
        numbers = mask_of(image, mask, self.dataset.budget.left)
        size = image_shape(made, self.dataset.budget.left)
        fitted = bytes(mask)
        if size != numbers.shape:
            fitted = encode_mask(resize_nearest(numbers, size))
        if len(made) + len(fitted) < len(image) + len(mask):
            return made, fitted
        return bytes(image), bytes(mask)

    def _jpeg_ratio(self, sizes: IntArray) -> float:
        """About how large re-encoded images are beside what they were, by some of them, evenly
        spread.
        """
        before = 0
        after = 0
        for number in some_of(len(self.dataset)):
            with contextlib.suppress(SampleError):  # said when it is packed
                image = self._jpegs(range(number, number + 1))[0]
                if not isinstance(image, SampleError):
                    before += int(sizes[number])
                    after += sum(map(len, image))
        return after / before if before else 1.0

    # -- values of any dataset

    def _of_values(self, part: PartFile | None) -> Packing:
        """Samples that have to be decoded to know their shapes. All have one dtype and one shape,
        but for the length of their first axis; memory is 8 bytes and a target a sample.

        Raises:
            ConfigError: samples or targets are no arrays, or not alike; the message names one.
            BudgetError: the targets of all samples don't fit memory.
        """
        budget = self.dataset.budget
        spool = None if part is None else Spool(part)
        samples = _Alike(_SAMPLES, 1)
        targets = _Alike("targets one dtype and one shape", 0)
        target_bytes = bytearray()
        if self.rows is not None:
            is_ragged = self.rows.store == "ragged"
            samples.fixed = int(is_ragged)
            shape = (0, *self.rows.shape) if is_ragged else self.rows.shape
            samples.expect("a sample of the other parts", shape, self.rows.dtype, self.rows.values)

        def groups() -> Iterator[range]:
            start = 0
            while start < len(self.dataset):
                # one by one until it is known how large they are
                some = min(_UNKNOWN_SAMPLES, GROUP_BYTES // samples.largest) or 1
                yield range(start, min(start + some, len(self.dataset)))
                start += some

        def use(number: int, sample: tuple[Column, Column | None, str | None]) -> None:
            row, target, values = sample
            samples.add(f"sample {number}", row, values)
            if spool is not None:
                spool.append(bytes_of(row))
            if target is not None:
                nbytes = target.nbytes * len(self.dataset)
                if not targets.lengths and not budget.fits(nbytes):
                    raise BudgetError(
                        f"the targets of {len(self.dataset):,} samples take {format_size(nbytes)}, "
                        f"and {format_size(budget.available)} of memory are available, where "
                        "targets lie, also when the pack is read: make large ones part of the "
                        "samples, such as {'image': ..., 'labels': ...} in decode or __getitem__, "
                        "or raise max_memory_usage"
                    )
                targets.add(f"the target of sample {number}", target)
                target_bytes.extend(target.tobytes())

        left_out = self.made(self._values, groups(), "reading samples", use)
        contents = self.without(left_out)
        plan = contents._values_plan(samples, targets, target_bytes)
        return Packing(plan, (lambda group: []) if spool is None else spool.reader(), left_out)

    def _values_plan(self, samples: _Alike, of_targets: _Alike, target_bytes: bytearray) -> Plan:
        """The plan for exactly these samples."""
        dataset = self.dataset
        count = len(of_targets.lengths)
        if count not in (0, len(dataset)):
            raise ConfigError(
                f"{count:,} of {len(dataset):,} samples have a target: give one to all, or to none"
            )
        targets: Any = None
        if not dataset.sample_decoder.splits_targets:
            targets = dataset.targets
        elif count:
            flat = np.frombuffer(target_bytes, of_targets.dtype)
            targets = flat.reshape(count, *of_targets.shape)
        is_ragged = samples.values is not None or len(set(samples.lengths)) > 1
        if self.rows is not None:
            is_ragged = self.rows.store == "ragged"
        if not is_ragged:
            return self._plan(Rows("decoded", samples.dtype, samples.shape), None, targets)
        rows = Rows("ragged", samples.dtype, samples.shape[1:], samples.values)
        return self._plan(rows, np.array(samples.lengths, np.int64), targets)

    def _values(self, group: range) -> list[tuple[Column, Column | None, str | None] | SampleError]:
        """Of each sample the array that is stored, its target, and "bytes" or "str" if it is
        these.
        """
        dataset = self.dataset

        def make(
            position: int, index: int, record: Any
        ) -> tuple[Column, Column | None, str | None] | SampleError:
            sample = _value(dataset, position, index, record)
            if isinstance(sample, SampleError):
                return sample
            value, target = sample
            what = f"sample {position}"
            kind = next((kind.__name__ for kind in (bytes, str) if isinstance(value, kind)), None)
            if isinstance(value, str):
                try:
                    value = value.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise ConfigError(
                        f"{what} can't be packed: it is no text that UTF-8 has ({error}): pack "
                        "bytes"
                    ) from error
            row = np.frombuffer(value, np.uint8) if kind else as_row(what, value)
            is_alone = target is None or target is ALONE
            if is_alone or not dataset.sample_decoder.splits_targets:
                return row, None, kind
            return row, as_row(f"the target of {what}", target), kind

        return each_sample(dataset, group, make)


def _value(
    dataset: BaseDataset, position: int, index: int, record: Any
) -> tuple[Any, Any] | SampleError:
    """Input and target of a record by the dataset's own steps, not transformed."""
    value = dataset.sample_reader.decoded(index, record, dataset.sample_decoder)
    if isinstance(value, SampleError):
        return value
    try:
        value, target = dataset.split_value(position, value)
        return dataset.sample_decoder.packed_value(value), target
    except Exception as error:
        error.add_note(f"headrace: while packing sample {position} ({dataset.source_of(position)})")
        raise


_SAMPLES = (
    "samples one dtype and one shape (only the first axis of arrays may differ), or pack a "
    "subset() of those that are alike"
)


class _Alike:
    """What arrays have in common: one dtype and one shape, but for its first axes where `fixed` is
    not 0; and what `Rows.values` says of them. `remedy`: what to give all of them, in words.
    """

    def __init__(self, remedy: str, fixed: int) -> None:
        self.remedy = remedy
        self.fixed = fixed
        self.first = ""
        self.shape: tuple[int, ...] = (0,)
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)
        self.values: str | None = None
        self.lengths = array("q")  # 1 of a number
        self.largest = GROUP_BYTES  # bytes of one

    def expect(
        self, what: str, shape: tuple[int, ...], dtype: np.dtype[Any], values: str | None
    ) -> None:
        """Says what all arrays are like, by one of them."""
        self.first = what
        self.shape = shape
        self.dtype = dtype
        self.values = values

    def add(self, what: str, value: Column, values: str | None = None) -> None:
        """Adds an array.

        Raises:
            ConfigError: it is of another kind than those before.
        """
        if not self.first:
            self.expect(what, value.shape, value.dtype, values)
        if values != self.values:
            raise ConfigError(
                f"{what} can't be packed with the others: it is {values or 'an array'}, and they "
                f"are {self.values or 'arrays'}: give all samples one type, or pack a subset() of "
                "those that are alike"
            )
        is_like = len(value.shape) == len(self.shape) and value.dtype == self.dtype
        if not is_like or value.shape[self.fixed :] != self.shape[self.fixed :]:
            raise ConfigError(
                f"{what} can't be packed with the others: it is {value.dtype} of shape "
                f"{list(value.shape)}, and {self.first} is {self.dtype} of shape "
                f"{list(self.shape)}: give all {self.remedy}"
            )
        if not self.lengths:
            self.largest = 1
        self.largest = max(self.largest, value.nbytes)
        self.lengths.append(value.shape[0] if value.shape else 1)


def as_row(what: str, value: Any) -> Column:
    """The array of a number, an array or a tensor; of a dict of these a compound, whose fields are
    sorted by name.

    Raises:
        ConfigError: it is something else, or a dict whose names are no texts.
    """
    if isinstance(value, dict) and value:
        check_names(value, what)
        what = what.rstrip(",")
        fields = {name: as_row(f"{what}, {name!r},", value[name]) for name in sorted(value)}
        row = np.zeros((), [(name, field.dtype, field.shape) for name, field in fields.items()])
        for name, field in fields.items():
            row[name] = field
        return row
    made: Column | None = None
    if isinstance(value, torch.Tensor):
        try:
            made = value.numpy(force=True)
        # a dtype that NumPy doesn't have, or no strided tensor
        except (TypeError, RuntimeError) as error:
            raise ConfigError(
                f"{what} can't be packed: {error}: convert it in decode, or in __getitem__"
            ) from error
    elif isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)):
        made = np.asarray(value)
    if made is None or made.dtype.kind not in "biufc" or made.dtype.char in "gG":
        shown = described(value)
        if made is not None:
            shown = f"an array of {'bfloat16' if made.dtype == BFLOAT16 else made.dtype}"
        raise ConfigError(
            f"{what} can't be packed: it is {shown}. Samples are arrays, tensors, numbers, dicts "
            "of these, bytes, str, and (input, target) tuples; fields and targets are no bytes or "
            "str: convert it in decode or __getitem__; of a table choose columns= "
            "or column=; of a tar give what is packed by "
            "split_target (docs/packing.md)"
        )
    return made
