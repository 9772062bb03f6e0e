"""Ways to damage a file.

A mutation is a name and three integers, which are taken modulo whatever they choose from: so any
integers make sense, and whoever draws them (hypothesis, or `random`) need not know the file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.storage.specimens import FOLDER, Files

_METADATA = ("zarr.json", ".zarray", ".zgroup")
_JSON_VALUES: list[Any] = [
    *(
        0,
        1,
        2,
        3,
        4,
        6,
        7,
        -1,
        2**31 - 1,
        2**40,
        2**53,
        2**62,
        2**63 - 1,
        2**63,
        2**64 - 1,
        10**400,
        0.5,
        3.0,
        1e308,
        float("nan"),
    ),
    *(
        None,
        True,
        False,
        "",
        "x",
        "/",
        ".",
        "../",
        "\0",
        "NaN",
        "Infinity",
        "0x7fc00000",
        "AAAA",
        [],
        {},
        [0],
        [1, 2],
        [[]],
        {"name": "x"},
    ),
    *(
        "<i4",
        ">i4",
        "<f4",
        "<i8",
        "|u1",
        "|S4",
        "|O",
        "<M8[s]",
        "<U2",
        "int32",
        "float32",
        "int64",
        "uint8",
        "bool",
        "complex64",
        "string",
    ),
    *(
        "C",
        "F",
        "start",
        "end",
        "little",
        "big",
        "zlib",
        "gzip",
        "zstd",
        "blosc",
        "crc32c",
        "bytes",
        "default",
        "v2",
        "array",
        "group",
    ),
    *(
        [7, 3],
        [3, 2],
        [1, 1],
        [2**62, 3],
        [7, 2**40],
        [2**40, 2**40],
        [2**31, 2**31],
        [0, 3],
        [7],
        [7, 3, 1],
        [1, 0],
        [7, -3],
        [3.0, 2],
    ),
    *(
        {"name": "gzip", "configuration": {"level": 1}},
        {"name": "bytes"},
        {"id": "zlib", "level": 1},
        {"id": "shuffle", "elementsize": 0},
    ),
]


class Mutation(NamedTuple):
    """One damage: `file` and `at` say where, `what` with which value."""

    name: str
    file: int
    at: int
    what: int


def damaged(kind: str, files: Files, mutations: list[Mutation]) -> Files:
    """The files after some mutations."""
    for mutation in mutations:
        if mutation.name in _OF_FOLDERS:
            files = (
                _OF_FOLDERS[mutation.name](files, mutation) if kind == FOLDER and files else files
            )
        elif files:
            name = sorted(files)[mutation.file % len(files)]
            files = {
                **files,
                name: _OF_BYTES[mutation.name](files[name], mutation.at, mutation.what),
            }
    return files


def random_mutations(random: random.Random) -> list[Mutation]:
    """One mostly, and sometimes several."""
    count = random.choice((1, 1, 1, 1, 2, 3, 8))
    big = 1 << 32
    return [
        Mutation(
            random.choice(NAMES),
            random.randrange(big),
            random.randrange(big),
            random.randrange(big),
        )
        for _ in range(count)
    ]


# -- bytes


def _put(data: bytes, at: int, new: bytes) -> bytes:
    """New bytes over old ones; the length stays."""
    at %= max(1, len(data))
    return (data[:at] + new + data[at + len(new) :])[: len(data)]


def _flip(data: bytes, at: int, what: int) -> bytes:
    return _put(data, at, bytes([data[at % len(data)] ^ (1 << what % 8)])) if data else data


def _overwrite(data: bytes, at: int, what: int) -> bytes:
    return _put(data, at, bytes([(0, 255, what >> 8 & 255)[what % 3]]))


def _integer(data: bytes, at: int, what: int) -> bytes:
    """An aligned integer becomes an extreme one."""
    width = (4, 8)[what & 1]
    extremes = [
        0,
        1,
        2**31 - 1,
        2**31,
        2**40,
        2**62,
        2**63 - 1,
        2**63,
        2**64 - 1,
        len(data),
        len(data) - 1,
        len(data) + 1,
    ]
    new = extremes[(what >> 1) % len(extremes)] & (1 << 8 * width) - 1
    return _put(data, at % max(1, len(data)) // width * width, new.to_bytes(width, "little"))


def _cut(data: bytes, at: int, what: int) -> bytes:
    return data[: at % (len(data) + 1)]


def _append(data: bytes, at: int, what: int) -> bytes:
    return data + random.Random(what).randbytes(1 + at % 40)


def _swap(data: bytes, at: int, what: int) -> bytes:
    length = 1 + what % 64
    if len(data) < 2 * length:
        return data
    first = at % (len(data) - 2 * length + 1)
    second = first + length + (what >> 8) % (len(data) - first - 2 * length + 1)
    a, b = data[first : first + length], data[second : second + length]
    return _put(_put(data, first, b), second, a)


def _zero(data: bytes, at: int, what: int) -> bytes:
    return _put(data, at, bytes(1 + what % 200))


_OF_BYTES: dict[str, Callable[[bytes, int, int], bytes]] = {
    "flip": _flip,
    "overwrite": _overwrite,
    "integer": _integer,
    "cut": _cut,
    "append": _append,
    "swap": _swap,
    "zero": _zero,
}


# -- folders


def _is_metadata(name: str) -> bool:
    return name.rpartition("/")[2] in _METADATA


def _one(files: Files, number: int, metadata: bool) -> str | None:
    some = [name for name in sorted(files) if _is_metadata(name) == metadata]
    if metadata and number % 8:  # those of the array, mostly
        some = [name for name in some if "/" in name] or some
    return some[number // 8 % len(some)] if some else None


def _delete(files: Files, mutation: Mutation) -> Files:
    name = _one(files, mutation.file, metadata=mutation.what % 16 == 0)
    return {key: data for key, data in files.items() if key != name}


def _replace(files: Files, mutation: Mutation) -> Files:
    one, other = (_one(files, number, metadata=False) for number in (mutation.file, mutation.at))
    return files if one is None or other is None else {**files, one: files[other]}


def _empty(files: Files, mutation: Mutation) -> Files:
    name = _one(files, mutation.file, metadata=False)
    return files if name is None else {**files, name: b""}


def _edit(files: Files, mutation: Mutation) -> Files:
    """Another value somewhere in the metadata; or a key that is deleted, or two members of a
    list that change places.
    """
    name = _one(files, mutation.file, metadata=True)
    try:
        said = json.loads(files[name or ""])
        places = [(holder, key) for holder, key in _places(said) if key != "attributes"]
        holder, key = places[mutation.at % len(places)]
    except (ValueError, KeyError, ZeroDivisionError, RecursionError):
        return files
    action = mutation.what % 8
    if action == 0 and isinstance(holder, dict):
        del holder[key]
    elif action == 1 and isinstance(holder, list):
        other = (mutation.what >> 3) % len(holder)
        holder[key], holder[other] = holder[other], holder[key]
    elif action == 2 and isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[key] = _JSON_VALUES[(mutation.what >> 3) % len(_JSON_VALUES)]
    return {**files, name or "": json.dumps(said).encode()}


def _places(said: Any) -> list[tuple[Any, Any]]:
    keys = (
        list(said)
        if isinstance(said, dict)
        else list(range(len(said)))
        if isinstance(said, list)
        else []
    )
    return [place for key in keys for place in ((said, key), *_places(said[key]))]


_OF_FOLDERS: dict[str, Callable[[Files, Mutation], Files]] = {
    "delete": _delete,
    "replace": _replace,
    "empty": _empty,
    "edit": _edit,
}
NAMES = [*_OF_BYTES, *_OF_FOLDERS, "edit", "integer", "flip"]
