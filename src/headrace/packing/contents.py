"""Packs the values of a dataset, which must be decoded to find their shapes. The subclasses in
`stored` and `texts` pack samples as they are, and tokens.

The columns beside the samples are offsets, names, targets, boxes, and where masks begin. Targets
are one array or, where they are dicts, one for each of their columns, named by `target_named`.
Boxes lie as `CocoTargets.columns` gives them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import numpy as np
import torch

from headrace.arguments import described
from headrace.core.dataset import BaseDataset
from headrace.core.views import ColumnTargets
from headrace.datasets.image.coco import CocoTargets
from headrace.datasets.image.labels import FOLDERS
from headrace.datasets.memory_efficient import ALONE
from headrace.dtypes import BFLOAT16, AnyArray, IntArray
from headrace.errors import BudgetError, ConfigError, SampleError
from headrace.formats.arrays import packed
from headrace.formats.arrays.packed import PackPart
from headrace.formats.files import FilesSource, PairedSource
from headrace.formats.hdf5.chunks import filter_versions
from headrace.formats.resolve.file_set import PackedNames
from headrace.memory.budget import format_size
from headrace.packing.destination import PartFile
from headrace.packing.plan import (
    GROUP_BYTES,
    GROUP_SAMPLES,
    PackOptions,
    PackPlan,
    Plan,
    Rows,
    Spool,
    checks_of,
    chunks_for,
    edges_of,
    files_of,
    stream,
)

T = TypeVar("T")
_UNKNOWN_SAMPLES = 16  # a task decodes so many, whose sizes are not known, or fewer large ones


class Contents:
    """The contents of a pack: values of one dtype and one shape, except for the length of the first
    axis. They go through a spool; memory is 8 bytes and a target per sample.

    Args:
        dataset: the dataset to pack.
        options: the options of `pack`.

    Attributes:
        rows: dtype and shape that the samples of all parts share. None: found from the dataset.
        part: the part of a pack. None: a single file.
        group_samples: the most samples that are written at once.

    Raises:
        ConfigError: the dataset can't be packed with these options.
    """

    rows: Rows | None = None
    part: PackPart | None = None
    group_samples = GROUP_SAMPLES
    _is_encoded = False
    """True if samples are encoded images where they come from."""
    _pack_of_targets: packed.PackedInfo | None = None
    """Info of the pack that samples and targets come from, if it knows their classes."""

    def __init__(self, dataset: BaseDataset, options: PackOptions) -> None:
        source = dataset.sample_source
        self.dataset = dataset
        self.options = options
        self.workers: int = options.threads if source.thread_safe else 0
        self._files = files_of(source)

    def __getstate__(self) -> dict[str, Any]:
        """Another process asks for the sizes in the source again, and compares them."""
        return {name: value for name, value in vars(self).items() if name != "source_sizes"}

    def check_options(self) -> None:
        """Raises a ConfigError for an option that does not apply to these samples."""
        options = self.options
        if options.store in ("encoded", "jpeg") and not self._is_encoded:
            raise ConfigError(
                f"store={options.store!r}: the samples of this dataset are arrays, not encoded "
                "images: pass store='decoded'"
            )
        if options.check != "decode" and (
            not self._is_encoded or options.store in ("jpeg", "decoded")
        ):
            raise ConfigError(f"check={options.check!r} is for encoded images: leave it out")

    @property
    def names(self) -> PackedNames | None:
        """Names of the samples, if they are files or were packed from files."""
        source = self.dataset.sample_source
        if isinstance(source, PairedSource):
            source = source.files
        names = None
        if isinstance(source, FilesSource):
            names = source.listing.names
        elif self._files:
            names = PackedNames.joined([one.names for one in self._files])
        return None if names is None else names.take(self._whole_indices())

    def _whole_indices(self) -> IntArray:
        """The number of each sample in its source ([n])."""
        return self.dataset.whole_indices(np.arange(len(self.dataset)))

    @property
    def _boxes(self) -> CocoTargets | None:
        targets = self.dataset.targets
        return targets if isinstance(targets, CocoTargets) else None

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the samples."""
        return self.dataset.fingerprint

    def view(self, numbers: IntArray) -> Self:
        """The contents with only these samples."""
        some = copy.copy(self)
        sizes = vars(self).get("source_sizes")
        if sizes is not None:
            some.source_sizes = sizes[numbers]
        some.dataset = self.dataset.subset(numbers)
        return some

    def without(self, unreadable: Mapping[int, object]) -> Self:
        """The contents without unreadable samples. `unreadable` maps their numbers to errors.

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

    @functools.cached_property
    def source_sizes(self) -> IntArray | None:
        """Bytes of each sample in the source ([n] int64), by which a changed one is noticed. None:
        they are not known.
        """
        return None

    # -- the plan of several parts

    def plan_parts(self) -> PackPlan:
        """Plans all parts.

        Raises:
            ConfigError: there are no samples; see `plan_file`.
            SampleError: see `plan_file`.
        """
        plan = self.plan_file(None)
        sizes = np.zeros(len(self.dataset), np.int64)
        sizes[np.setdiff1d(np.arange(len(sizes)), list(plan.left_out))] = plan.sizes
        options = {"rows": plan.rows.as_json(), **self.layout_options(plan.rows, {})}
        return self._parts(plan.info, sizes, options)

    def _parts(self, info: packed.PackedInfo, sizes: IntArray, options: dict[str, Any]) -> PackPlan:
        """The plan of all parts.

        Args:
            info: of any file of the pack.
            sizes: [n] int64, approximate stored bytes of each sample.
            options: other settings that decide the bytes, by name.
        """
        if not len(sizes):
            raise ConfigError("the dataset has no samples to pack")
        edges = edges_of(sizes, self.options.part_nbytes)
        options = {**self._given_options(), **options}
        if info.target_columns is not None:
            options["target_columns"] = info.target_columns
        sources = list[int]()
        if self.source_sizes is not None:
            sources = checks_of(self.names, self.source_sizes, edges)
        return PackPlan(
            info.kind,
            info.store,
            self.fingerprint,
            len(sizes),
            edges,
            np.add.reduceat(sizes, edges[:-1]).tolist(),
            sources,
            options,
            info.classes,
        )

    def _given_options(self) -> dict[str, Any]:
        """The arguments of `pack` that are part of a plan, whatever is packed."""
        how = self.options
        options: dict[str, Any] = {
            "shard_size": how.part_nbytes,
            "on_error": "skip" if self.dataset.on_error == "skip" else "raise",
        }
        annotations = self._annotations()
        if annotations:
            options["annotations"] = crc_of_columns(annotations)
        if how.check != "decode":
            options["check"] = how.check
        return options

    def _annotations(self) -> dict[str, AnyArray]:
        """Targets that lie beside the samples, by which a plan notices other ones. Empty if there
        are none, or if they follow from the file names.
        """
        dataset = self.dataset
        if self._boxes is not None:
            return self._boxes.columns(self._boxes.sizes)
        given = dataset._arguments.get("targets", FOLDERS)
        by_folders = isinstance(given, str) and given == FOLDERS
        if by_folders and isinstance(dataset.sample_source, FilesSource):
            return {}
        if dataset.sample_decoder.splits_targets:
            return {}
        return target_arrays(dataset.targets)

    def layout_options(self, rows: Rows, decoded_by: dict[str, str]) -> dict[str, Any]:
        """Chunks, and the versions of libraries that decide the bytes, for a plan."""
        how = self.options
        versions = dict(decoded_by)
        options: dict[str, Any] = {}
        chunks = chunks_for(how, rows, len(self.dataset))
        if chunks is not None:
            options = {"compression": how.compression, "chunks": chunks}
            if how.compression is not None:
                versions |= filter_versions(how.compression)
        if versions:
            options["versions"] = versions
        return options

    def is_plan(self, frozen: PackPlan) -> bool:
        """True if `frozen` is known to be the plan of these samples with these options, so that
        they need not be decoded, nor their sizes be asked for, to plan again.
        """
        rows = frozen.rows
        if rows is None or frozen.fingerprint != self.fingerprint:
            return False
        seen = {name: frozen.options.get(name) for name in ("rows", "target_columns")}
        options = {**seen, **self._given_options(), **self.layout_options(rows, {})}
        return options == {**seen, **frozen.options}

    # -- a file

    def plan_file(self, part: PartFile | None) -> Plan:
        """Plans a file.

        Args:
            part: the file, which a spool may lie beside. None: nothing is written, and images that
                are re-encoded are planned as they are.

        Raises:
            ConfigError: samples or targets can't be packed, or are not alike; the message names
                one.
            BudgetError: the targets of all samples don't fit memory.
            SampleError: see `pack`.
        """
        budget = self.dataset.budget
        spool = None if part is None else Spool(part)
        samples = _Alike(_SAMPLES, 1)
        targets = _Alike("targets one dtype and one shape", 0)
        target_bytes = bytearray()
        if self.rows is not None:
            samples.first = "a sample of the other parts"
            samples.values = self.rows.values
            samples.dtype = self.rows.dtype
            samples.fixed = 0
            samples.shape = self.rows.shape
            if self.rows.store == "ragged":
                samples.fixed = 1
                samples.shape = (0, *self.rows.shape)

        def groups() -> Iterator[range]:
            start = 0
            while start < len(self.dataset):
                # one by one until it is known how large they are
                some = min(_UNKNOWN_SAMPLES, GROUP_BYTES // samples.largest) or 1
                yield range(start, min(start + some, len(self.dataset)))
                start += some

        left_out = dict[int, str]()
        values = self.readable(
            lambda group: self.each(group, self._value), groups(), "reading samples", left_out
        )
        for number, (row, target, kind) in values:
            samples.add(f"sample {number}", row, kind)
            if spool is not None:
                spool.append(packed.bytes_of(row))
            if target is None:
                continue
            nbytes = target.nbytes * len(self.dataset)
            if not targets.lengths and not budget.fits(nbytes):
                raise BudgetError(
                    f"the targets of {len(self.dataset):,} samples take {format_size(nbytes)}, "
                    f"and {format_size(budget.available)} of memory are available: make large "
                    "ones a field of the samples, in decode or __getitem__, or raise "
                    "max_memory_usage"
                )
            targets.add(f"the target of sample {number}", target)
            target_bytes.extend(target.tobytes())
        plan = self.without(left_out)._values_plan(samples, targets, target_bytes)
        plan = replace(plan, left_out=left_out)
        return plan if spool is None else replace(plan, prepare=spool.read)

    def _values_plan(self, samples: _Alike, of_targets: _Alike, target_bytes: bytearray) -> Plan:
        """The plan of exactly these samples."""
        dataset = self.dataset
        count = len(of_targets.lengths)
        if count not in (0, len(dataset)):
            raise ConfigError(
                f"{count:,} of {len(dataset):,} samples have a target: all samples need one, or "
                "none"
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

    def _plan(
        self,
        rows: Rows,
        lengths: IntArray | None,
        targets: Any,
        columns: Mapping[str, AnyArray] | None = None,
        image: Mapping[str, Any] | None = None,
    ) -> Plan:
        """The plan of exactly these samples.

        Args:
            rows: what they have in common.
            lengths: [n] int64, length of the first axis of each. None: they are rows.
            targets: one per sample, or None.
            columns: others beside the samples, by name.
            image: `PackedInfo.image`.

        Raises:
            ConfigError: see `target_arrays`, `chunks_for`; a chunk would be too large.
        """
        columns = {**target_arrays(targets), **(columns or {})}
        count = len(self.dataset)
        if lengths is not None:
            count = len(lengths)
            columns[packed.OFFSETS] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        names = self.names
        if names is not None:
            columns[packed.NAMES], columns[packed.NAME_OFFSETS] = names.arrays
        info = packed.PackedInfo(
            store=rows.store,
            count=count,
            fingerprint=self.fingerprint,
            part=self.part,
            values=rows.values,
            checksums={name: packed.crc_of(column) for name, column in sorted(columns.items())},
            image=dict(image or {}),
            **self._about(targets),
        )
        chunks = chunks_for(self.options, rows, count)
        compression = None if chunks is None else self.options.compression
        return Plan(info, rows, columns, compression, chunks)

    def _about(self, targets: Any) -> dict[str, Any]:
        """The fields of `PackedInfo` for the kind of samples, their classes and their targets."""
        pack = self._pack_of_targets
        classes: Any = getattr(self.dataset, "classes", None)
        is_list = isinstance(classes, (list, tuple))
        if not is_list or not all(isinstance(name, str) for name in classes):
            classes = None if pack is None else pack.classes
        about = {"kind": "array", "classes": None if classes is None else list(classes)}
        columns = columns_in(targets)
        if columns is not None:
            names: Any = getattr(self.dataset, "column_classes", None)
            if not isinstance(names, Mapping):
                names = {} if pack is None else dict(pack.target_columns or ())
            about["target_columns"] = [
                [name, list(names[name]) if names.get(name) else None] for name in columns
            ]
        return about

    # -- samples

    def each(
        self, positions: Sequence[int], make: Callable[[int, int, Any], T | SampleError]
    ) -> list[T | SampleError]:
        """Reads samples and calls `make` with the position, the index in the source and the record
        of each. A SampleError stands for a sample that may be left out.
        """
        dataset = self.dataset
        whole = dataset.whole_indices(positions).tolist()
        records = dataset.sample_reader.records(whole, dataset.sample_source.read)
        samples = []
        for position, index, record in zip(positions, whole, records, strict=True):
            made = record
            if not isinstance(record, SampleError):
                made = make(position, index, record)
            # samples that a callable makes up are not packed
            if isinstance(made, SampleError) and dataset.on_error != "skip":
                raise made
            samples.append(made)
        return samples

    def _value(
        self, position: int, index: int, record: Any
    ) -> tuple[AnyArray, AnyArray | None, str | None] | SampleError:
        """Decodes a sample by the dataset's own steps, without transforms. Returns the array that
        is stored, its target, and "bytes" or "str" if the sample is one of these.
        """
        dataset = self.dataset
        value = dataset.sample_reader.decoded(index, record, dataset.sample_decoder)
        if isinstance(value, SampleError):
            return value
        try:
            value, target = dataset.split_value(position, value)
            value = dataset.sample_decoder.packed_value(value)
        except Exception as error:
            where = dataset.source_of(position)
            error.add_note(f"headrace: while packing sample {position} ({where})")
            raise
        what = f"sample {position}"
        kind = next((kind.__name__ for kind in (bytes, str) if isinstance(value, kind)), None)
        if isinstance(value, str):
            try:
                value = value.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"{what} can't be packed: its text is not valid UTF-8 ({error}): pack bytes"
                ) from error
        row = np.frombuffer(value, np.uint8) if kind else as_row(what, value)
        is_alone = target is None or target is ALONE
        if is_alone or not dataset.sample_decoder.splits_targets:
            return row, None, kind
        return row, as_row(f"the target of {what}", target), kind

    def readable(
        self,
        task: Callable[[range], Sequence[T | SampleError]],
        groups: Iterator[range],
        what: str,
        left_out: dict[int, str],
        workers: int | None = None,
    ) -> Iterator[tuple[int, T]]:
        """Runs a task for each group. Yields the number and the result of each readable sample, in
        order, and adds the errors of the others to `left_out`.
        """
        if workers is None:
            workers = self.workers
        progress = self.options.progress
        results = stream(task, groups, workers, progress, len(self.dataset), what)
        with contextlib.closing(results):
            for group, samples in results:
                for number, sample in zip(group, samples, strict=True):
                    if isinstance(sample, SampleError):
                        left_out[number] = str(sample)
                    else:
                        yield number, sample


_SAMPLES = (
    "samples one type, dtype and shape (only the first axis of arrays may differ), or pack a "
    "subset() of those that are alike"
)


class _Alike:
    """Checks that arrays have one dtype and one shape, except for the first `fixed` axes. `remedy`
    says what all of them must have.
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

    def add(self, what: str, value: AnyArray, values: str | None = None) -> None:
        """Adds an array.

        Raises:
            ConfigError: it is of another kind than those before.
        """
        if not self.first:
            self.first = what
            self.shape = value.shape
            self.dtype = value.dtype
            self.values = values
        is_like = (values, value.dtype, value.ndim) == (self.values, self.dtype, len(self.shape))
        if not is_like or value.shape[self.fixed :] != self.shape[self.fixed :]:
            found = values or f"{value.dtype} of shape {list(value.shape)}"
            expected = self.values or f"{self.dtype} of shape {list(self.shape)}"
            remedy = self.remedy
            if value.dtype.names is not None:
                remedy = (
                    "values of a dict the same dtype and shape, since a dict is packed as one row"
                )
            raise ConfigError(
                f"{what} can't be packed with the others: it is {found}, and {self.first} is "
                f"{expected}: give all {remedy}"
            )
        if not self.lengths:
            self.largest = 1
        self.largest = max(self.largest, value.nbytes)
        self.lengths.append(value.shape[0] if value.shape else 1)


# -- columns


def target_arrays(targets: Any) -> dict[str, AnyArray]:
    """The arrays of a pack that hold the targets, by name.

    Raises:
        ConfigError: see `as_column`, `check_names`.
    """
    if targets is None:
        return {}
    columns = columns_in(targets)
    if columns is None:
        return {packed.TARGETS: as_column(targets)}
    check_names(columns)
    return {
        packed.target_named(number): as_column(column, name)
        for number, (name, column) in enumerate(columns.items())
    }


def crc_of_columns(columns: Mapping[str, AnyArray]) -> int:
    """One CRC of all columns."""
    crc = 0
    for _, column in sorted(columns.items()):
        crc = zlib.crc32(packed.bytes_of(column).data, crc)
    return crc


def columns_in(targets: Any) -> Mapping[str, Any] | None:
    """The columns of targets that are dicts with the same names. None: they are not."""
    if isinstance(targets, ColumnTargets):
        return targets.columns
    if isinstance(targets, np.ndarray):
        names = targets.dtype.names
        return None if names is None else {name: targets[name] for name in names}
    is_of_dicts = (
        isinstance(targets, Sequence)
        and len(targets) > 0
        and all(isinstance(one, dict) for one in targets)
    )
    if not is_of_dicts or not targets[0]:
        return None
    if any(one.keys() != targets[0].keys() for one in targets):
        return None
    return {name: [one[name] for one in targets] for name in targets[0]}


def check_names(names: Iterable[Any], what: str = "these targets") -> None:
    """Raises a ConfigError if a name in dicts is not a str, or is empty."""
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"{what} can't be packed: keys of dicts must be non-empty texts, not {name!r}: "
                "rename it"
            )


def as_column(targets: Sequence[Any] | AnyArray, name: str | None = None) -> AnyArray:
    """Targets as an array whose rows are equal to them.

    Args:
        targets: one a sample.
        name: of the column that they are; None: they are no columns.

    Raises:
        ConfigError: they are not all numbers, or all arrays of one shape.
    """
    try:
        column = np.asarray(targets)
    except ValueError:  # rows of different lengths
        column = np.empty(0, object)
    types = set[type]()
    if not isinstance(targets, np.ndarray):
        types = {type(target) for target in targets}
    # NumPy rounds integers that neither int64 nor uint64 holds together
    is_rounded = int in types and column.dtype.kind == "f"
    is_sound = column.ndim == 1 or types <= {np.ndarray}
    if column.dtype.kind not in "biufc" or len(types) > 1 or not is_sound or is_rounded:
        what = "these targets" if name is None else f"the column {name!r} of these targets"
        raise ConfigError(
            f"{what} can't be packed: they must be numbers of one dtype, or NumPy arrays of one "
            "shape, or dicts of these with the same names; choose such columns of a table of "
            "labels by target_name=, or pack without any (images: targets=None; texts: no "
            "target_field=) and look them up by the numbers of the samples, which return_index "
            "gives"
        )
    return np.ascontiguousarray(column)


def as_row(what: str, value: Any) -> AnyArray:
    """The array of a number, array or tensor; of a dict of these a compound, with its fields sorted
    by name.

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
    made: AnyArray | None = None
    shown = described(value)
    if isinstance(value, torch.Tensor):
        shown = f"a tensor of {value.dtype}"
        # a dtype that NumPy doesn't have, or no strided tensor
        with contextlib.suppress(TypeError, RuntimeError):
            made = value.numpy(force=True)
    elif isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)):
        made = np.asarray(value)
    if made is None or made.dtype.kind not in "biufc" or made.dtype.char in "gG":
        if made is not None:
            shown = f"an array of {'bfloat16' if made.dtype == BFLOAT16 else made.dtype}"
        raise ConfigError(
            f"{what} can't be packed: it is {shown}. Samples are arrays, tensors, numbers, dicts "
            "of these, bytes, str, and (input, target) tuples; fields and targets can't be bytes "
            "or str: convert it in decode or __getitem__; of a table choose columns= or column=; "
            "of a tar give what is packed by split_target (docs/packing.md)"
        )
    return made
