"""Compares the objects of a Zarr pack with their checksums."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping

from headrace.errors import FormatError, HeadraceError
from headrace.io.local.checksums import sum_file
from headrace.io.paths import in_one_line
from headrace.packing.destination import Destination
from headrace.packing.zarr.layout import Stored, ZarrLayout
from headrace.packing.zarr.part import columns_in, damaged_samples
from headrace.storage.arrays.packed import DATA, NAME_STARTS, NAME_STOPS, NAMES

Damage = tuple[int, str, str]
"""``(index, location, error)`` of a sample that is not what was packed; -1: of a file."""


def whole_file(name: str) -> Damage:
    """Of a file with another checksum whose samples have theirs."""
    return -1, name, f"{name}: wrong checksum of the file, though each sample is sound: pack it again"


def damaged_in_part(folder: Destination, layout: ZarrLayout, part: int, objects: Mapping[str, Stored], workers: int) -> list[Damage]:
    """What is wrong with a part: samples that don't fit their CRCs, by their numbers in the part; or objects as a whole.

    Args:
        folder, layout, part: of the pack, and the number of the part.
        objects: what the manifest says of the part's objects, by name.
        workers: threads.
    """
    contents, bad = dict[str, bytes](), list[Damage]()
    for name, array in layout.arrays.items():
        if name != DATA:
            key = array.key(part)
            contents[name] = folder.read(key) or b""
            said = objects.get(key)
            if said is None or (len(contents[name]), zlib.crc32(contents[name])) != said[1:]:
                bad.append((-1, folder.shown_name(key), f"{folder.shown_name(key)}: wrong checksum of the file: pack it again"))
    key = layout.data.key(part)
    name = folder.shown_name(key)
    try:
        columns = columns_in(contents, layout, part)
        with folder.fetched(key) as path:
            fd = os.open(path, os.O_RDONLY)
            try:
                whole = sum_file(fd, workers=workers)
                if key in objects and (whole.size, whole.crc) == objects[key][1:]:
                    return bad
                damaged, *sums = damaged_samples(fd, layout, columns, part, workers)
                for number, why in damaged:
                    where = f"{name}, sample {number} of the part"
                    if NAMES in columns:
                        edges = [int(columns[edge][number]) - part * layout.arrays[NAMES].length for edge in (NAME_STARTS, NAME_STOPS)]
                        where += f" ({in_one_line(columns[NAMES][slice(*edges)].tobytes())})"
                    bad.append((number, where, f"{where}: {why}: pack it again"))
                if not bad and (key not in objects or sums != [*objects[key][1:]]):
                    bad.append(whole_file(name))
            finally:
                os.close(fd)
    except FormatError as error:
        bad.append((-1, name, f"{name}: {error}: pack it again"))
    except (HeadraceError, OSError) as error:
        bad.append((-1, name, str(error)))
    return bad


def damaged_metadata(folder: Destination, metadata: Mapping[str, bytes]) -> list[Damage]:
    """The metadata files that are not what follows from the plan."""
    names = [folder.shown_name(name) for name, data in metadata.items() if folder.read(name) != data]
    return [(-1, name, f"{name} is not what follows from the plan: write it again (headrace.packing.join)") for name in names]
