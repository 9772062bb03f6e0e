"""Compares the objects of a Zarr pack with their checksums."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping

from headrace.errors import FormatError, HeadraceError
from headrace.io.local.checksums import sum_file
from headrace.io.paths import in_one_line
from headrace.packing.destination import Destination
from headrace.packing.zarr.layout import Stored, ZarrLayout
from headrace.packing.zarr.part import columns_in, damaged_samples
from headrace.storage.arrays.packed import NAME_STARTS, NAME_STOPS, NAMES

Damage = tuple[int, str, str]
"""``(index, location, error)`` of a sample that is not what was packed; -1: of a file."""


def whole_file(name: str) -> Damage:
    """Of a file with another checksum whose samples have theirs."""
    return (
        -1,
        name,
        f"{name}: wrong checksum of the file, though each sample is sound: pack it again",
    )


def damaged_in_part(
    folder: Destination, layout: ZarrLayout, part: int, objects: Mapping[str, Stored], workers: int
) -> list[Damage]:
    """What is wrong with a part: samples that don't fit their CRCs, by their numbers in the part;
    or objects as a whole.

    Args:
        folder, layout, part: of the pack, and the number of the part.
        objects: what the manifest says of the part's objects, by name.
        workers: threads.
    """
    contents, bad = dict[str, bytes](), list[Damage]()
    keys = [array.key(part) for array in layout.of_samples]
    for name, array in layout.arrays.items():
        if array.chunk is None:
            key = array.key(part)
            contents[name] = folder.read(key) or b""
            said = objects.get(key)
            if said is None or (len(contents[name]), zlib.crc32(contents[name])) != said[1:]:
                bad.append(
                    (
                        -1,
                        folder.shown_name(key),
                        f"{folder.shown_name(key)}: wrong checksum of the file: pack it again",
                    )
                )
    name = folder.shown_name(keys[0])
    try:
        columns = columns_in(contents, layout, part)
        with contextlib.ExitStack() as opened:
            fds = list[int]()
            for path in [opened.enter_context(folder.fetched(key)) for key in keys]:
                fds.append(os.open(path, os.O_RDONLY))
                opened.callback(os.close, fds[-1])
            wholes = [sum_file(fd, workers=workers) for fd in fds]
            wrong = [
                key
                for key, one in zip(keys, wholes, strict=True)
                if key not in objects or (one.size, one.crc) != objects[key][1:]
            ]
            if not wrong:
                return bad
            name = folder.shown_name(wrong[0])
            damaged, shards = damaged_samples(fds, layout, columns, part, workers)
            for number, why in damaged:
                where = f"{name}, sample {number} of the part"
                if NAMES in columns:
                    edges = [
                        int(columns[edge][number]) - part * layout.arrays[NAMES].length
                        for edge in (NAME_STARTS, NAME_STOPS)
                    ]
                    where += f" ({in_one_line(columns[NAMES][slice(*edges)].tobytes())})"
                bad.append((number, where, f"{where}: {why}: pack it again"))
            if not bad:
                bad += [
                    whole_file(folder.shown_name(shard.name))
                    for shard in shards
                    if objects.get(shard.name) != shard
                ]
    except FormatError as error:
        bad.append((-1, name, f"{name}: {error}: pack it again"))
    except (HeadraceError, OSError) as error:
        bad.append((-1, name, str(error)))
    return bad


def damaged_metadata(folder: Destination, metadata: Mapping[str, bytes]) -> list[Damage]:
    """The metadata files that are not what follows from the plan."""
    names = [
        folder.shown_name(name) for name, data in metadata.items() if folder.read(name) != data
    ]
    return [
        (
            -1,
            name,
            f"{name} is not what follows from the plan: write it again (headrace.packing.join)",
        )
        for name in names
    ]
