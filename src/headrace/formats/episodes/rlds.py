"""Reads episodes of RLDS, as TensorFlow Datasets writes them (Open X-Embodiment): a record each.

A TFRecord holds the values of all steps, such as ``steps/action``: numbers in a flat list, encoded
images in a list of bytes. ``features.json`` in the same folder gives their shapes and dtypes. A
record is read and parsed as a whole, and cached like a decoded chunk. Only the images of the steps
of a window are decoded.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from headrace.dtypes import AnyArray, IntArray, distinct
from headrace.errors import AccessError, FormatError, MissingNameError
from headrace.formats.arrays.chunks import Chunks, Grid
from headrace.formats.arrays.reader import Block, OpenArrays, visit
from headrace.formats.episodes.source import EpisodeSource, Windows
from headrace.formats.files import check_splits
from headrace.formats.resolve.file_set import FileSet
from headrace.formats.source import Description
from headrace.formats.tfrecord import FIRST, TFRecordSource, parsed, values_in
from headrace.io.files import Files
from headrace.io.index import Headers
from headrace.io.paths import in_folder_of, listed_names, redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote.options import RemoteOptions

STEPS = "steps/"
_FEATURES = "features.json"
_IMAGE = "image"
_NUMBERS = "none"
READ = (_IMAGE, _NUMBERS, "bytes", "zlib")
"""Encodings of features that can be cut into windows."""


class Feature(NamedTuple):
    """A feature: its encoding ("image", that of a tensor, or the name of another type), and the
    shape and dtype of a step.
    """

    encoding: str
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def decoded(self, data: bytes, decode_image: DecodeImage) -> AnyArray:
        """The value of a step.

        Raises:
            FormatError: the value is damaged, or has another shape.
        """
        dtype = np.dtype(self.dtype)
        nbytes = math.prod(self.shape) * dtype.itemsize
        if self.encoding == _IMAGE:
            array = decode_image(data, self.shape[-1], dtype)
        else:
            if self.encoding == "zlib":
                data = zlib.decompressobj().decompress(data, nbytes + 1)
            array = np.frombuffer(data, dtype.newbyteorder("<"))
            if array.nbytes == nbytes:
                array = array.reshape(self.shape)
        if array.shape != self.shape or array.dtype != dtype:
            raise FormatError(
                f"a step is {array.dtype} {list(array.shape)}, and {_FEATURES} says {dtype} "
                f"{list(self.shape)}: correct {_FEATURES}"
            )
        return array


DecodeImage = Callable[[bytes, int, np.dtype[Any]], AnyArray]
"""Decodes an image to pixels [H, W, C], given its bytes, the number of channels and the dtype."""


def _declared(node: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Feature]]:
    """The features in a node of `features.json`, by their names in records."""
    if "featuresDict" in node:
        for key, child in node["featuresDict"]["features"].items():
            yield from _declared(child, f"{name}/{key}" if name else key)
    elif "sequence" in node and name + "/" == STEPS:
        yield from _declared(node["sequence"]["feature"], name)
    elif "tensor" in node or "image" in node:
        said = node.get("tensor") or node["image"]
        shape = tuple(map(int, said.get("shape", {}).get("dimensions", ())))
        dtype = said["dtype"]
        encoding = said.get("encoding", _NUMBERS) if "tensor" in node else _IMAGE
        if dtype not in np.sctypeDict or min(shape, default=0) < 0:
            yield name, Feature(f"{dtype} {list(shape)}")
        else:
            yield name, Feature(encoding, shape, dtype)
    elif "classLabel" in node:
        yield name, Feature(_NUMBERS, (), "int64")
    else:
        yield name, Feature(str(node["pythonClassName"]).rpartition(".")[2])


def features_beside(found: FileSet, files: Files) -> dict[str, Feature] | None:
    """The features of the records of some files, by name. None: there is no readable
    `features.json` beside the first file, or it describes no steps.

    Raises:
        FormatError: a `features.json` is damaged, or two differ.
    """
    if _FEATURES not in found.beside:
        found.beside[_FEATURES] = _read_features(found.urls(), files)
    features: dict[str, Feature] | None = found.beside[_FEATURES]
    return features


def _read_features(paths: Sequence[str], files: Files) -> dict[str, Feature] | None:
    beside = list(dict.fromkeys(in_folder_of(path, _FEATURES) for path in paths))
    found: dict[str, Feature] | None = None
    try:
        contents = files.read(ByteRanges.of_wholes(beside, range(len(beside))))
    except AccessError:  # what servers that don't list say of what is missing
        return None
    for path, data in zip(beside, contents, strict=True):
        if b'"steps"' not in bytes(data or b"") and path == beside[0]:
            return None
        try:
            features = dict(_declared(json.loads(bytes(data or b""))))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError(
                f"{redact(path)} is missing, damaged, or of an old version of TensorFlow Datasets "
                f"({type(error).__name__}: {error}): copy or write it again"
            ) from error
        if found not in (None, features):
            raise FormatError(
                f"{redact(path)} describes other features than {redact(beside[0])}: open the "
                "folders one by one"
            )
        found = features
    return found if found and FIRST in found else None


def open_records(found: FileSet, reach: RemoteOptions) -> tuple[TFRecordSource, dict[str, Feature]]:
    """The records of an RLDS dataset, and their features by name. The names of features of steps
    begin with `STEPS`.

    Raises:
        FormatError: there is no `features.json`, or a file is damaged.
    """
    check_splits(found)
    paths, files = found.to_read(reach.cache_dir)
    features = features_beside(found, files)
    source = TFRecordSource(paths, files)
    if features is None or not len(source.steps) == len(source):
        raise FormatError(
            f"{redact(paths[0])}: its records are not episodes of RLDS: each must have "
            f"{FIRST!r}, which a {_FEATURES} in this folder describes, with all other "
            "features: copy that file too, or read the records with open_dataset"
        )
    damaged = np.flatnonzero(source.steps < 0)
    if len(damaged):
        raise FormatError(f"{source.location(int(damaged[0]))} is damaged: copy or write it again")
    return source, features


def values_of(
    source: TFRecordSource,
    features: Mapping[str, Feature],
    names: Sequence[str],
    numbers: IntArray,
) -> dict[str, list[Any]]:
    """Values of some records without a time axis; of a feature of the steps, the first value.

    Raises:
        MissingNameError, FormatError: a record has no such feature, or is damaged.
    """
    stored = {name: STEPS + name if STEPS + name in features else name for name in names}
    found: dict[str, list[Any]] = {name: [] for name in names}
    ranges = source.byte_ranges(numbers if names else numbers[:0])
    bounds = zip(ranges.file, ranges.start.tolist(), ranges.stop.tolist(), strict=True)
    headers = {at: Headers(source.files, ranges.paths[at]) for at in set(ranges.file)}
    for number, (file, start, stop) in zip(numbers.tolist(), bounds, strict=False):
        values = values_in(headers[file], start, stop, [*stored.values()])
        for name, place in stored.items():
            feature = features.get(place)
            if feature is None or not len(values.get(place, ())):
                raise MissingNameError(
                    f"{source.location(number)} has no {name!r} for static=; there are: "
                    f"{listed_names([*features], name)}"
                )
            value = values[place][0]
            if feature.encoding == _NUMBERS:
                first = values[place][: math.prod(feature.shape)]
                value = first.reshape(feature.shape).astype(feature.dtype)[()]
            found[name].append(value)
    return found


class _RecordChunks(Chunks):
    """Records as chunks: by key an array [steps, ...], or a list of the bytes of each step."""

    is_direct = True

    def __init__(self, source: TFRecordSource, features: Mapping[str, Feature]) -> None:
        super().__init__(Grid((len(source),), (1,)), np.dtype("u1"), source.files.explain())
        self._source = source
        self._features = features
        starts, stops = source.bounds(np.arange(len(source)))
        self.nbytes = int((stops - starts).max(initial=0))

    def byte_ranges(self, numbers: IntArray) -> ByteRanges:
        return self._source.byte_ranges(numbers)

    def read(self, numbers: Sequence[int]) -> list[Any]:
        return self._source.files.read(self.byte_ranges(np.asarray(numbers, np.int64)))

    def check_cached(self, number: int) -> None:
        ranges = self.byte_ranges(np.array([number]))
        self._source.files.check(ranges.paths[int(ranges.file[0])])

    def decode(self, number: int, data: Any) -> Any:
        stored = parsed(cast(memoryview, data), {STEPS + name: "" for name in self._features})
        steps = int(self._source.steps[number])
        values: dict[str, Any] = {}
        for name, feature in self._features.items():
            value = stored[STEPS + name]
            wanted = steps
            if feature.encoding == _NUMBERS:
                wanted *= math.prod(feature.shape)
            elif isinstance(value, bytes):
                value = [value]
            is_array = isinstance(value, np.ndarray)
            count = 0 if value is None else len(value)
            if count != wanted or is_array != (feature.encoding == _NUMBERS):
                raise FormatError(
                    f"{name!r} has {count:,} values, which are not {steps:,} steps of the shape "
                    f"{list(feature.shape)} that {_FEATURES} says: correct {_FEATURES}, or write "
                    "the record again"
                )
            values[name] = value
            if is_array:
                values[name] = value.reshape(steps, *feature.shape).astype(feature.dtype)
        return Block(values, steps, len(data))


class RecordEpisodes(EpisodeSource):
    """Episodes in TFRecord files, a record each, or windows over their steps.

    Args:
        source: the records of all files.
        numbers: the number of the record of each episode ([episodes] int64).
        features: the features of the steps, by key.
        names: names of the episodes.
        windows, keys, static: see `EpisodeSource`.
        decode_image: decodes images.
    """

    def __init__(
        self,
        source: TFRecordSource,
        numbers: IntArray,
        features: Mapping[str, Feature],
        names: Sequence[str],
        windows: Windows,
        keys: Sequence[Any],
        static: dict[str, Any],
        decode_image: DecodeImage,
    ) -> None:
        files = source.file_of(numbers)
        opened = OpenArrays[Any](source.files)
        super().__init__(source.shown, files, names, windows, keys, static, opened)
        self._numbers = numbers
        self._features = features
        self._chunks = _RecordChunks(source, features)
        self._decode_image = decode_image

    def _fetch(self, spans: Any, overlap: bool | None = None) -> None:
        wanted: dict[int, list[tuple[Any, int]]] = {}
        for span in spans:
            for at, episode in enumerate(span.episodes.tolist()):
                wanted.setdefault(int(self._numbers[episode]), []).append((span, at))
        numbers = list(wanted)
        encoded: list[tuple[str, bytes, AnyArray]] = []

        def use(at: int, record: Block) -> None:
            for span, number in wanted[numbers[at]]:
                name = span.key.name
                steps = record.content[name][int(span.firsts[number]) : int(span.ends[number])]
                out = span.outs[number]
                if isinstance(steps, np.ndarray):
                    out[...] = steps
                else:
                    encoded.extend([(name, step, out[n : n + 1]) for n, step in enumerate(steps)])

        def decode(number: int) -> None:
            name, step, out = encoded[number]
            try:
                out[0] = self._features[name].decoded(step, self._decode_image)
            except (FormatError, ValueError, zlib.error) as error:
                raise FormatError(f"{name!r}: {error}") from error

        used = None if self.windows.options.window is None else [0] * len(numbers)
        visit(self._chunks, self._opened.chunks, "", numbers, used, use, self.run)
        self.run(decode, len(encoded))

    def _located(self, indices: IntArray, missing: bool) -> list[ByteRanges]:
        episodes, _ = self.windows.places(indices)
        numbers = distinct(self._numbers[episodes])
        if missing:
            cached = [("", number) in self._opened.chunks for number in numbers.tolist()]
            numbers = numbers[~np.array(cached, bool)]
        return [self._chunks.byte_ranges(numbers)]

    @property
    def stored_nbytes(self) -> int:
        return int(self._chunks.byte_ranges(self._numbers).nbytes.sum())

    def blocks_of(self, nbytes: int) -> IntArray | None:
        """The windows of each episode."""
        if self.windows.options.window is None:
            return None
        counts = self.windows.counts
        return counts[counts > 0]

    @property
    def block_nbytes(self) -> int:
        return 0 if self.windows.options.window is None else self._chunks.nbytes

    def describe(self) -> Description:
        description = super().describe()
        nbytes = self.stored_nbytes // max(1, len(self._numbers) * len(self.keys))
        for column in description.columns:
            column.read_by += ", a record at a time"
            column.read = nbytes
        return description
