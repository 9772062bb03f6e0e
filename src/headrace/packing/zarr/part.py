"""The objects of a part of a Zarr pack: writes them, reads them back, and compares them with what
they must be.

Pixels and their masks are in a shard each. A sample's checksum is that of both, one behind the
other.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
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
    are_targets,
    bytes_of,
    crc_of,
    edges_named,
    offsets_named,
)

Column = npt.NDArray[Any]


def write_shards(
    files: Sequence[PartFile], packing: Packing, layout: ZarrLayout, part: int, workers: int
) -> dict[str, Column]:
    """Writes the samples of a part into empty files; gives what the part has of the other arrays,
    by name.

    Args:
        files: one for each array of the samples, entered, and not committed.
        packing: of the samples of the part.
        layout: of the pack.
        part: its number.
        workers: threads that read and decode; 0: none.

    Raises:
        SampleError: a sample can't be read.
        WriteError, AccessError: a file can't be written.
        ConfigError: the samples or targets are not as the plan has them.
    """
    plan, data = packing.plan, layout.data
    if packing.left_out:
        raise _unreadable(next(iter(packing.left_out.values())))
    if np.dtype((plan.dtype, plan.shape[1:])) != layout.row:
        raise ConfigError(
            f"the samples of this part are {plan.dtype} {list(plan.shape[1:])}, not "
            f"{layout.row.base} {list(layout.row.shape)}"
        )
    nbytes = int(plan.sizes.sum())
    if layout.is_flat and nbytes > data.length:
        raise WriteError(
            f"{redact(files[0].target)}: {nbytes:,} bytes of samples don't fit the "
            f"{data.length:,} that were planned"
        )
    each = (
        [nbytes]
        if layout.is_flat
        else [len(plan.sizes) * array.item_bytes for array in layout.of_samples]
    )
    writers = [ShardWriter(*one) for one in zip(files, layout.of_samples, each, strict=True)]
    sums = np.zeros(len(plan.sizes), np.uint32)
    if layout.is_flat:
        files[0].sum_ahead(np.concatenate([[0], np.cumsum(plan.sizes)]))
    together = 1 if data.compression is None else data.chunk or 1
    groups = groups_of(plan.sizes + plan.read_sizes, together=together)

    def encoded(group: range) -> list[Any]:
        samples, sums[group.start : group.stop] = zip(*packing.prepare(group), strict=True)
        for sample in samples:
            if isinstance(sample, SampleError):
                raise _unreadable(sample)
        names = layout.row.names
        columns = (
            [samples] if names is None else [[sample[name] for sample in samples] for name in names]
        )
        return [
            writer.encode([bytes_of(one) for one in column])
            for writer, column in zip(writers, columns, strict=True)
        ]

    with with_progress(encoded, groups, workers, False, plan.info.count, "packing") as results:
        for _, made in results:
            for writer, blocks in zip(writers, made, strict=True):
                writer.append(blocks)
    for writer in writers:
        writer.finish()
    return _columns(packing, layout, part, sums)


def _unreadable(why: object) -> SampleError:
    return SampleError(
        f"{why}: the places of all samples in a Zarr pack are planned, so one that fails later "
        "can't be left out: pass overwrite=True "
        "(--overwrite) with on_error='skip' (--skip-bad) to plan anew"
    )


def _columns(
    packing: Packing, layout: ZarrLayout, part: int, sums: npt.NDArray[np.uint32]
) -> dict[str, Column]:
    plan, columns = packing.plan, dict[str, Column]()
    if layout.is_flat:
        edges = np.concatenate([[0], np.cumsum(plan.sizes)]) + part * layout.data.length
        columns |= {STARTS: edges[:-1], STOPS: edges[1:]}
    columns |= {name: plan.columns[name] for name in layout.arrays if are_targets(name)}
    if NAMES in layout.arrays:
        edges = plan.columns[NAME_OFFSETS] + part * layout.arrays[NAMES].length
        columns |= {NAMES: plan.columns[NAMES], NAME_STARTS: edges[:-1], NAME_STOPS: edges[1:]}
    for name in layout.arrays.keys() & {MASK_STARTS, IMAGE_ID, IMAGE_SIZE}:
        columns[name] = plan.columns[name] + (
            part * layout.data.length if name == MASK_STARTS else 0
        )
    for name in layout.arrays.keys() & RAGGED.keys():
        edges, (starts, stops) = (
            plan.columns[offsets_named(name)] + part * layout.arrays[name].length,
            edges_named(name),
        )
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
            f"{name} of this part are {column.dtype} {list(column.shape[1:])}, and of the others "
            f"{array.dtype} {list(array.shape[1:])}: "
            "give all samples targets of one dtype and shape"
        )
    return column.astype(array.dtype)


def chunk_of(column: Column, array: ArrayLayout) -> bytes:
    """The chunk that a part has of an array without shards: padded with zeros, and with its
    checksum.
    """
    whole = np.zeros((array.length, *array.shape[1:]), array.dtype)
    whole[: len(column)] = column
    return with_checksum(bytes_of(whole))


def column_in(data: bytes, array: ArrayLayout, count: int) -> Column:
    """The items of a chunk, by `chunk_of`.

    Raises:
        FormatError: it is damaged, or what it was padded with is.
    """
    decoded = np.frombuffer(Crc32c().decode(data, array.chunk_bytes), array.dtype).reshape(
        array.length, *array.shape[1:]
    )
    if bytes_of(decoded[count:]).any():
        raise FormatError("something lies behind its last item")
    return decoded[:count]


def read_back(
    files: Sequence[PartFile],
    layout: ZarrLayout,
    columns: dict[str, Column],
    part: int,
    workers: int,
) -> list[Stored]:
    """Reads all samples of the shards of a part again, in threads; gives what a sidecar says of
    them.

    Raises:
        WriteError: a sample read back is another one.
    """
    for file in files:
        file.reread()
    with files[0].explained():
        bad, shards = damaged_samples(
            [file.fd for file in files], layout, columns, part, workers, files[0].ahead
        )
    if bad:
        raise WriteError(
            f"{redact(files[0].target)}: {len(bad):,} samples read back are not what was written, "
            f"the first is number {bad[0][0]}: "
            "the disk or the memory of this machine is faulty"
        )
    return shards


def sum_of_objects(objects: Iterable[Stored]) -> int:
    """What a sidecar has as the CRC of a part: that of the names, bytes and CRCs of its objects."""
    return zlib.crc32(json.dumps(list(objects)).encode("ascii"))


def damaged_samples(
    fds: Sequence[int],
    layout: ZarrLayout,
    columns: dict[str, Column],
    part: int,
    workers: int,
    ahead: SumsAhead | None = None,
) -> tuple[list[tuple[int, str]], list[Stored]]:
    """Samples that are not what the column of their CRCs says, by their numbers in the part, and
    what is wrong; and the shards.

    Args:
        fds: of the file of each shard.
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
        damaged = list(_damaged_rows(fds, layout.of_samples, sums.tolist()))
        wholes = [sum_file(fd, workers=workers) for fd in fds]
        return damaged, [
            Stored(array.key(part), one.size, one.crc)
            for array, one in zip(layout.of_samples, wholes, strict=True)
        ]
    [fd] = fds
    starts, stops = (columns[name] - part * data.length for name in (STARTS, STOPS))
    edges = np.append(starts, stops[-1:])
    if edges[0] or (edges[1:] != stops).any() or (starts > stops).any() or edges[-1] > data.length:
        raise FormatError(
            f"{STARTS} and {STOPS} are not those of samples that lie one behind the other"
        )
    chunk_sizes(fd, data, int(edges[-1]))  # checks them
    whole = sum_file(fd, edges, workers, ahead=ahead)
    damaged = [(number, "wrong checksum") for number in np.flatnonzero(whole.crcs != sums).tolist()]
    return damaged, [Stored(data.key(part), whole.size, whole.crc)]


def _damaged_rows(
    fds: Sequence[int], arrays: Sequence[ArrayLayout], sums: list[int]
) -> Iterator[tuple[int, str]]:
    height, sizes = (
        arrays[0].chunk_bytes // arrays[0].item_bytes,
        [array.item_bytes for array in arrays],
    )
    shards = [
        chunks_in(fd, array, len(sums) * array.item_bytes)
        for fd, array in zip(fds, arrays, strict=True)
    ]
    for first, *chunks in zip(range(0, len(sums), height), *shards, strict=True):
        error = next((chunk for chunk in chunks if isinstance(chunk, FormatError)), None)
        for at, expected in enumerate(sums[first : first + height]):
            rows = (
                []
                if error
                else [
                    chunk[at * size : (at + 1) * size]
                    for chunk, size in zip(chunks, sizes, strict=True)
                ]
            )
            if error is not None:
                yield first + at, str(error)
            elif crc_of(rows[0] if len(rows) == 1 else np.concatenate(rows)) != expected:
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
    beside = layout.arrays.keys() - {array.name for array in layout.of_samples}
    # these are as long as the others say
    for name in sorted(beside, key=lambda name: name in stops):
        array = layout.arrays[name]
        items = int(columns[stops[name]][-1]) - part * array.length if name in stops else count
        try:
            columns[name] = column_in(contents[name], array, items)
        except FormatError as error:
            raise FormatError(f"{name}: {error}") from error
    return columns
