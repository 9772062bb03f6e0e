"""What is packed of images and arrays: bytes as they are, smaller JPEGs, pixels, rows, values.

The bytes of an image and of its mask lie one behind the other, and are one sample, with one
checksum. Pixels and their mask are the fields of a row. What follows from the dataset alone is
written as it is read; samples whose sizes are not known go through a spool.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import PIL
import simplejpeg
import torch

from headrace.arguments import described
from headrace.core.dataset import BaseDataset
from headrace.datasets.arrays import ArrayDataset, HDF5Dataset
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
from headrace.io.packed_strings import PackedNames
from headrace.memory.budget import format_size
from headrace.packing.options import LARGEST_SIDE, PackOptions
from headrace.packing.part import PartFile
from headrace.packing.plan import (
    GROUP_BYTES,
    Column,
    Packing,
    Plan,
    Rows,
    Spool,
    boxes_of,
    check_names,
    each_sample,
    files_of,
    groups_of,
    laid_out,
    make_plan,
    names_of,
    some_of,
    stream,
    target_columns_of,
    without,
)

T = TypeVar("T")
_PAIRS_LAYOUT = 4  # the version of packs with masks or boxes
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


def is_packed_as_stored(dataset: BaseDataset) -> bool:
    """True if a plan follows from the dataset alone: its samples are image files, or rows of a
    file as they are.
    """
    source = dataset.sample_source
    if are_files(source):
        return isinstance(dataset, ImageDataset)
    files = files_of(source)
    if not files or isinstance(dataset, ImageDataset):
        return bool(files)
    decoder = dataset.sample_decoder
    is_plain = (
        isinstance(dataset, HDF5Dataset) and decoder.stores_values and not decoder.splits_targets
    )
    spec = files[0].array_spec
    have_one_spec = spec is not None and all(one.array_spec == spec for one in files)
    return is_plain and (have_one_spec or _is_encoded(dataset))


def are_files(source: Any) -> bool:
    """True if samples are files, or pairs of files."""
    return isinstance(source, FilesSource | PairedSource)


def _is_encoded(dataset: BaseDataset) -> bool:
    """True if samples are encoded images where they come from, and not arrays."""
    packed = packed_info_of(files_of(dataset.sample_source))
    return are_files(dataset.sample_source) or (packed is not None and packed.store == "encoded")


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
        rows: what its samples have in common with those of other parts; None: the dataset says it.
    """

    def __init__(
        self, dataset: BaseDataset, options: PackOptions, rows: Rows | None = None
    ) -> None:
        self.dataset = dataset
        self.options = options
        self.rows = rows
        self.workers = options.threads if dataset.sample_source.thread_safe else 0
        self.is_stored = is_packed_as_stored(dataset)
        self._is_image = isinstance(dataset, ImageDataset)
        self._has_masks = isinstance(dataset.sample_decoder, MaskDecoder)
        self._color = getattr(dataset, "color", "RGB")

    @property
    def names(self) -> PackedNames | None:
        """Of the samples, where they are files or have been."""
        return names_of(self.dataset)

    @property
    def fingerprint(self) -> str:
        """Of the samples."""
        return self.dataset.fingerprint

    def within(self, numbers: range, rows: Rows | None) -> Contents:
        """Some of the samples."""
        return Contents(self.dataset.subset(np.asarray(numbers)), self.options, rows)

    def without(self, unreadable: Mapping[int, object]) -> Contents:
        """All samples but these; see `without`."""
        return Contents(without(self.dataset, unreadable), self.options, self.rows)

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
        files = files_of(source)
        sizes = [one.image_sizes() if one.gives_images else one.sizes() for one in files]
        return np.concatenate(sizes)[whole]

    def survey(self, read_sizes: IntArray | None = None) -> Survey:
        """What the plan of several parts needs.

        Args:
            read_sizes: `source_sizes`, where these are known.

        Raises:
            ConfigError, SampleError: see `packing`.
        """
        how = self.options
        packing = self.packing(None, read_sizes)
        plan = packing.plan
        sizes = np.zeros(len(self.dataset), np.int64)
        sizes[np.setdiff1d(np.arange(len(sizes)), list(packing.left_out))] = plan.sizes
        if how.is_jpeg and read_sizes is None:
            # about: they are known when all are encoded
            sizes = (sizes * self._jpeg_ratio(sizes)).astype(np.int64)
        options = dict(plan.info.image)
        # of the libraries that decide the bytes
        versions: dict[str, str] = {}
        is_resized = self._is_image and plan.info.store == "decoded" and _is_encoded(self.dataset)
        if how.is_jpeg or is_resized:
            versions |= {"Pillow": PIL.__version__, "simplejpeg": simplejpeg.__version__}
        if is_resized or how.max_size is not None:
            versions["torch"] = str(torch.__version__).partition("+")[0]  # resizes
        if plan.chunks is not None:
            options |= {"compression": plan.compression, "chunks": plan.chunks}
            if plan.compression is not None:
                versions |= filter_versions(plan.compression)
        if versions:
            options["versions"] = versions
        if not self.is_stored or (plan.rows.dtype.names and self._has_masks):
            options["rows"] = plan.rows.as_json()
        return Survey(plan.info, sizes, plan.read_sizes if self.is_stored else None, options)

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
        options = self.options
        store: str | None = options.store
        if options.end_token is not None:
            raise ConfigError("end_token is for texts: leave it out")
        if options.is_jpeg:
            if not self._is_image:
                raise ConfigError("store='jpeg' is for images: open them with ImageDataset")
            store = "encoded"
            self._refuse_check()
        if store == "encoded" and not _is_encoded(self.dataset):
            raise ConfigError(
                "store='encoded': the samples of this dataset are arrays, not encoded images: pass "
                "store='decoded'"
            )
        if not self.is_stored:
            self._refuse_check()
            return self._of_values(part)
        if read_sizes is None:
            read_sizes = self.source_sizes()
            assert read_sizes is not None
        if options.is_jpeg and part is not None:
            return self._reencoded(part, read_sizes)
        plan = self._stored_plan(store, read_sizes)
        if (plan.info.kind, plan.info.store) != ("image", "encoded"):
            self._refuse_check()
        plan = laid_out(plan, options)
        return Packing(plan, lambda group: self._stored(plan, group), {})

    def _refuse_check(self) -> None:
        check = self.options.check
        if check != "decode":
            raise ConfigError(f"check={check!r} is for encoded images: leave it out")

    # -- samples as they are, and pixels

    def _stored_plan(
        self,
        store: str | None,
        read_sizes: IntArray,
        image_sizes: IntArray | None = None,
    ) -> Plan:
        """The plan of samples of these sizes ([n] int64); of images that were encoded anew also
        without their masks.
        """
        dataset = self.dataset
        source = dataset.sample_source
        files = files_of(source)
        packed = packed_info_of(files)
        if packed is not None and "targets" in packed.image and not self._is_image:
            raise ConfigError(
                f"{files[0].path} holds images with {packed.image['targets']}: open it with "
                "ImageDataset, and pack that"
            )
        encoded_now = _is_encoded(dataset)
        if store is None:
            store = "encoded" if encoded_now and self.rows is None else "decoded"
        lengths = None
        rows = Rows(store, np.dtype(np.uint8), ())
        if store == "encoded":
            lengths = read_sizes
        elif self.rows is not None:
            rows = self.rows
        else:
            rows = self._decoded_rows(files, encoded_now)
        boxes = boxes_of(dataset)
        targets = None
        columns: dict[str, Column] = {}
        if boxes is None:
            targets = dataset.targets
        else:
            columns = boxes.columns(self._box_sizes(store == "decoded" or image_sizes is not None))
        if self._has_masks and store == "encoded":
            whole = dataset.whole_indices(np.arange(len(dataset)))
            starts = read_sizes  # where no sizes are wanted, none are asked for
            if image_sizes is not None:
                starts = image_sizes
            elif isinstance(source, PairedSource) and read_sizes.any():
                starts = source.files.sizes(whole)
            elif read_sizes.any():
                starts = np.concatenate([one.image_sizes() for one in files])[whole]
            columns[MASK_STARTS] = np.cumsum(read_sizes) - read_sizes + starts
        image: dict[str, Any] = {}
        if image_sizes is not None:
            image = {"jpeg": [self.options.max_size, self.options.quality]}
        elif store == "decoded" and self._is_image:
            shape = rows.dtype[IMAGE].shape if self._has_masks else rows.shape
            image = {"color": self._color, "image_size": list(shape[:2])}
        elif store == "decoded" and packed is not None:
            image = packed.image
        paired: dict[str, Any] = {}
        if self._has_masks:
            paired = {"targets": MASKS}
        elif boxes is not None:
            paired = {"targets": BOXES, "class_ids": list(boxes.class_to_idx.values())}
        # of arrays of a pack: the pack's, if its targets are the dataset's
        its_pack = packed if dataset._arguments.get("target_name") == TARGETS else None
        classes: Any = None
        if isinstance(dataset, ImageDataset):
            classes = dataset.classes or None
        elif isinstance(dataset, ArrayDataset) and dataset.classes is not None:
            classes = dataset.classes
        elif its_pack is not None:
            classes = its_pack.classes
        info = PackedInfo(
            "image" if self._is_image or (packed and packed.kind == "image") else "array",
            store,
            len(dataset),
            dataset.fingerprint,
            classes,
            {**image, **paired},
            target_columns=target_columns_of(dataset, targets, its_pack),
            version=_PAIRS_LAYOUT if paired else 1,
        )
        return make_plan(info, rows, lengths, read_sizes, self.names, targets, columns)

    def _decoded_rows(self, files: Sequence[HDF5Source], encoded: bool) -> Rows:
        """Shape and dtype of a decoded sample."""
        dataset = self.dataset
        if not isinstance(dataset, ImageDataset):
            if encoded:
                raise ConfigError(
                    "store='decoded': open the file with ImageDataset, which decodes the images, "
                    "and pack that"
                )
            return Rows("decoded", files[0].dtype, files[0].shape[1:])
        size: Any = dataset.image_size
        if size is None and encoded:
            raise ConfigError(
                "store='decoded' needs images of one size, and image_size is None: open the "
                "dataset with image_size=(height, width)"
            )
        stored = files[0].dtype if files else None
        if size is None:
            size = files[0].dtype[IMAGE].shape if files[0].dtype.names else files[0].shape[1:]
        height = int(size[0])
        width = int(size[1])
        pixels = (height, width, 3 if self._color == "RGB" else 1)
        if not self._has_masks:
            return Rows("decoded", np.dtype(np.uint8), pixels)
        kind = stored[MASK].base if stored is not None and stored.names else self._mask_dtype()
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
        plan = self.without(left_out)._stored_plan("encoded", spool.sizes, sizes)
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
        plan = laid_out(contents._values_plan(samples, targets, target_bytes), self.options)
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
        lengths = None
        rows = Rows("decoded", samples.dtype, samples.shape)
        version = 1
        if is_ragged:
            lengths = np.array(samples.lengths, np.int64)
            rows = Rows("ragged", samples.dtype, samples.shape[1:], samples.values)
            version = 2 if samples.values is None else 3
        names: Any = getattr(dataset, "classes", None)
        is_named = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        info = PackedInfo(
            "array",
            rows.store,
            len(dataset),
            dataset.fingerprint,
            list(names) if is_named else None,
            values=samples.values,
            target_columns=target_columns_of(dataset, targets),
            version=version,
        )
        return make_plan(info, rows, lengths, None, self.names, targets, {})

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
