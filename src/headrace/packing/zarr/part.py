"""The objects of a part of a Zarr pack: writes them, reads them back, and compares them with what they must be."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, FormatError, SampleError, WriteError
from headrace.io.local.checksums import SumsAhead, sum_file
from headrace.io.paths import redact
from headrace.packing.part import PartFile
from headrace.packing.plan import Packing
from headrace.packing.samples import groups_of, with_progress
from headrace.packing.zarr.layout import ArrayLayout, Stored, ZarrLayout
from headrace.packing.zarr.shard import ShardWriter, chunk_sizes, chunks_in, with_checksum
from headrace.storage.arrays.codecs import Crc32c
from headrace.storage.arrays.packed import (
    CRC,
    DATA,
    IMAGE_ID,
    IMAGE_SIZE,
    MASK_STARTS,
    NAME_OFFSETS,
    NAME_STARTS,
    NAME_STOPS,
    NAMES,
    RAGGED,
    STARTS,
    STOPS,
    TARGETS,
    bytes_of,
    crc_of,
    edges_named,
    offsets_named,
)

Column = npt.NDArray[Any]


def write_shard(file: PartFile, packing: Packing, layout: ZarrLayout, part: int, workers: int) -> dict[str, Column]:
    """Writes the samples of a part into an empty file; gives what the part has of the other arrays, by name.

    Args:
        file: entered, and not committed.
        packing: of the samples of the part.
        layout: of the pack.
        part: its number.
        workers: threads that read and decode; 0: none.

    Raises:
        SampleError: a sample can't be read.
        WriteError, AccessError: the file can't be written.
        ConfigError: the samples or targets are not as the plan has them.
    """
    plan, data = packing.plan, layout.data
    if packing.left_out:
        raise _unreadable(next(iter(packing.left_out.values())))
    if plan.dtype != data.dtype or (not layout.is_flat and plan.shape[1:] != data.shape[1:]):
        raise ConfigError(f"the samples of this part are {plan.dtype} {list(plan.shape[1:])}, not {data.dtype} {list(data.shape[1:])}")
    nbytes = int(plan.sizes.sum())
    if layout.is_flat and nbytes > data.length:
        raise WriteError(f"{redact(file.target)}: {nbytes:,} bytes of samples don't fit the {data.length:,} that were planned")
    writer, sums = ShardWriter(file, data, nbytes), np.zeros(len(plan.sizes), np.uint32)
    if layout.is_flat:
        file.sum_ahead(np.concatenate([[0], np.cumsum(plan.sizes)]))
    together = 1 if data.compression is None else data.chunk or 1
    groups = groups_of(plan.sizes + plan.read_sizes, together=together)

    def encoded(group: range) -> list[Any]:
        samples, sums[group.start : group.stop] = zip(*packing.prepare(group), strict=True)
        for sample in samples:
            if isinstance(sample, SampleError):
                raise _unreadable(sample)
        return writer.encode([bytes_of(sample) for sample in samples])

    with with_progress(encoded, groups, workers, False, plan.info.count, "packing") as results:
        for _, blocks in results:
            writer.append(blocks)
    writer.finish()
    return _columns(packing, layout, part, sums)


def _unreadable(why: object) -> SampleError:
    return SampleError(
        f"{why}: the places of all samples in a Zarr pack are planned, so one that fails later can't be left out: pass overwrite=True "
        "(--overwrite) with on_error='skip' (--skip-bad) to plan anew"
    )


def _columns(packing: Packing, layout: ZarrLayout, part: int, sums: npt.NDArray[np.uint32]) -> dict[str, Column]:
    plan, columns = packing.plan, dict[str, Column]()
    if layout.is_flat:
        edges = np.concatenate([[0], np.cumsum(plan.sizes)]) + part * layout.data.length
        columns |= {STARTS: edges[:-1], STOPS: edges[1:]}
    if TARGETS in layout.arrays:
        columns[TARGETS] = plan.columns[TARGETS]
    if NAMES in layout.arrays:
        edges = plan.columns[NAME_OFFSETS] + part * layout.arrays[NAMES].length
        columns |= {NAMES: plan.columns[NAMES], NAME_STARTS: edges[:-1], NAME_STOPS: edges[1:]}
    for name in layout.arrays.keys() & {MASK_STARTS, IMAGE_ID, IMAGE_SIZE}:
        columns[name] = plan.columns[name] + (part * layout.data.length if name == MASK_STARTS else 0)
    for name in layout.arrays.keys() & RAGGED.keys():
        edges, (starts, stops) = plan.columns[offsets_named(name)] + part * layout.arrays[name].length, edges_named(name)
        columns |= {name: plan.columns[name], starts: edges[:-1], stops: edges[1:]}
    columns[CRC] = sums
    return {name: as_planned(name, column, layout.arrays[name]) for name, column in columns.items()}


def as_planned(name: str, column: Column, array: ArrayLayout) -> Column:
    """A column in the dtype of the plan.

    Raises:
        ConfigError: it has other values than that can hold, or another shape.
    """
    if column.shape[1:] != array.shape[1:] or not np.can_cast(column.dtype, array.dtype, "safe"):
        raise ConfigError(
            f"{name} of this part are {column.dtype} {list(column.shape[1:])}, and of the others {array.dtype} {list(array.shape[1:])}: "
            "give all samples targets of one dtype and shape"
        )
    return column.astype(array.dtype)


def chunk_of(column: Column, array: ArrayLayout) -> bytes:
    """The chunk that a part has of an array without shards: padded with zeros, and with its checksum."""
    whole = np.zeros((array.length, *array.shape[1:]), array.dtype)
    whole[: len(column)] = column
    return with_checksum(bytes_of(whole))


def column_in(data: bytes, array: ArrayLayout, count: int) -> Column:
    """The items of a chunk, by `chunk_of`.

    Raises:
        FormatError: it is damaged, or what it was padded with is.
    """
    decoded = np.frombuffer(Crc32c().decode(data, array.chunk_bytes), array.dtype).reshape(array.length, *array.shape[1:])
    if bytes_of(decoded[count:]).any():
        raise FormatError("something lies behind its last item")
    return decoded[:count]


def read_back(file: PartFile, layout: ZarrLayout, columns: dict[str, Column], part: int, workers: int) -> Stored:
    """Reads all samples of a shard again, in threads; gives what a sidecar says of it.

    Raises:
        WriteError: a sample read back is another one.
    """
    file.reread()
    with file.explained():
        bad, nbytes, crc = damaged_samples(file.fd, layout, columns, part, workers, file.ahead)
    if bad:
        raise WriteError(
            f"{redact(file.target)}: {len(bad):,} samples read back are not what was written, the first is number {bad[0][0]}: "
            "the disk or the memory of this machine is faulty"
        )
    return Stored(layout.data.key(part), nbytes, crc)


def sum_of_objects(objects: Iterable[Stored]) -> int:
    """What a sidecar has as the CRC of a part: that of the names, bytes and CRCs of its objects."""
    return zlib.crc32(json.dumps(list(objects)).encode("ascii"))


def damaged_samples(
    fd: int, layout: ZarrLayout, columns: dict[str, Column], part: int, workers: int, ahead: SumsAhead | None = None
) -> tuple[list[tuple[int, str]], int, int]:
    """Samples that are not what the column of their CRCs says, by their numbers in the part, and what is wrong; bytes and CRC of the shard.

    Args:
        fd: of the file of the shard.
        layout: of the pack.
        columns: what the part has of the other arrays, by name.
        part: its number.
        workers: threads.
        ahead: see `sum_file`.

    Raises:
        FormatError: more is damaged than samples.
    """
    data, sums = layout.data, columns[CRC]
    if not layout.is_flat:
        whole = sum_file(fd, workers=workers)
        return list(_damaged_rows(fd, data, sums.tolist())), whole.size, whole.crc
    starts, stops = (columns[name] - part * data.length for name in (STARTS, STOPS))
    edges = np.append(starts, stops[-1:])
    if edges[0] or (edges[1:] != stops).any() or (starts > stops).any() or edges[-1] > data.length:
        raise FormatError(f"{STARTS} and {STOPS} are not those of samples that lie one behind the other")
    chunk_sizes(fd, data, int(edges[-1]))  # checks them
    whole = sum_file(fd, edges, workers, ahead=ahead)
    return [(number, "wrong checksum") for number in np.flatnonzero(whole.crcs != sums).tolist()], whole.size, whole.crc


def _damaged_rows(fd: int, data: ArrayLayout, sums: list[int]) -> Iterator[tuple[int, str]]:
    height, size = data.chunk_bytes // data.item_bytes, data.item_bytes
    for first, chunk in zip(range(0, len(sums), height), chunks_in(fd, data, len(sums) * size), strict=True):
        for at, expected in enumerate(sums[first : first + height]):
            if isinstance(chunk, FormatError):
                yield first + at, str(chunk)
            elif crc_of(chunk[at * size : (at + 1) * size]) != expected:
                yield first + at, "wrong checksum"


def columns_in(contents: dict[str, bytes], layout: ZarrLayout, part: int) -> dict[str, Column]:
    """What a part has of the arrays beside the samples.

    Args:
        contents: of its objects, by the names of the arrays.
        layout, part: of the pack; its number.

    Raises:
        FormatError: one is damaged; the message names the array.
    """
    count = min(layout.samples, layout.count - part * layout.samples)
    columns = dict[str, Column]()
    stops = {NAMES: NAME_STOPS, **{name: edges_named(name)[1] for name in RAGGED}}
    for name in sorted(layout.arrays.keys() - {DATA}, key=lambda name: name in stops):  # these are as long as the others say
        array = layout.arrays[name]
        items = int(columns[stops[name]][-1]) - part * array.length if name in stops else count
        try:
            columns[name] = column_in(contents[name], array, items)
        except FormatError as error:
            raise FormatError(f"{name}: {error}") from error
    return columns
