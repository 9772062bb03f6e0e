"""Imports run one way, from the top floor down (docs/architecture.md); and tensors say where
they are made.
"""

import ast
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import headrace

PACKAGE = Path(headrace.__file__).parent
# in this order
GROUND = ("dtypes", "sorting", "errors", "synonyms", "arguments", "display", "casting")
BELOW: dict[str, set[str]] = {
    "dtypes": set(),
    "sorting": set(),
    "errors": set(),
    "synonyms": set(),
    "arguments": set(),
    "display": set(),
    "casting": set(),
    "tokenizer": set(),
    "memory": set(),
    "order": set(),
    "monitor": {"memory"},
    "io": {"memory"},
    "storage": {"io", "memory"},
    "modes": {"storage", "io", "memory"},
    "collate": {"memory", "tokenizer"},
    "datasets": {"collate", "modes", "storage", "io", "memory", "order", "monitor", "tokenizer"},
    "loader": {"datasets", "collate", "modes", "memory", "order", "monitor"},
    "profiling": {"loader", "datasets", "modes", "storage", "io", "memory", "order", "monitor"},
    "packing": {"loader", "datasets", "modes", "storage", "io", "memory", "order", "tokenizer"},
    "inspecting": {"storage", "io", "memory"},
    "previewing": {"loader", "datasets"},
    "testing": {"loader", "datasets", "modes", "order", "memory"},
    "cli": {
        "inspecting",
        "previewing",
        "profiling",
        "packing",
        "datasets",
        "storage",
        "io",
        "memory",
    },
}
"""What each room may import, besides itself and the errors."""
INSIDE: dict[str, list[str]] = {
    "io": [
        *(
            "paths",
            "atomic",
            "library_errors",
            "nearest_names",
            "packed_strings",
            "ranges",
            "files",
            "ordered",
            "handles",
            "local",
        ),
        *(
            "array_file",
            "single_flight",
            "remote",
            "cache",
            "remote_files",
            "index",
            "sequential",
            "resolve",
        ),
    ],
    "io/local": ["hints", "gather", "files", "folders", "checksums"],
    "io/remote": [
        "options",
        "timeouts",
        "concurrency",
        "http",
        "errors",
        "fsspec_calls",
        "client",
        "prefetch",
    ],
    "io/cache": ["disk_cache", "blocks", "contents"],
    "order": [
        *(
            "permutation",
            "base",
            "seeding",
            "shares",
            "world",
            "request",
            "drawn",
            "lanes",
            "sequence",
            "ranks",
            "splits",
        ),
        *("epoch", "sampler", "visits"),
    ],
    "memory": [
        *(
            "limits",
            "per_process",
            "budget",
            "anonymous",
            "locks",
            "lru",
            "tree",
            "ring",
            "rows",
            "store",
        ),
        *("row_store", "whole", "recycled", "machine"),
    ],
    "monitor": ["stats", "hooks", "loading", "memory"],
    "collate": [
        "normalization",
        "fields",
        "stack",
        "detection",
        "vision",
        "pad",
        "text",
        "registry",
    ],
    "loader": [
        *(
            "torch_private",
            "config",
            "data",
            "stateful",
            "state",
            "plan",
            "budget",
            "device",
            "worker",
            "build",
        ),
        *("distributed", "explain", "epoch", "loader", "create", "multi", "module", "steps"),
    ],
    "loader/worker": ["signals", "start", "served", "fetch", "fetch_stream", "processes", "pool"],
    "loader/multi": ["foreign", "schedule", "multi"],
    "datasets": [
        *(
            "cells",
            "wrapped",
            "core",
            "delegating",
            "image",
            "text",
            "arrays",
            "hdf5",
            "episodes",
            "zarr",
            "sparse",
            "table",
            "shards",
            "options",
            "indexing",
            "unnormalized",
            "finished",
            "open",
            "memory_efficient",
        ),
    ],
    "datasets/core": [
        *(
            "batch",
            "format",
            "threads",
            "warnings",
            "reader",
            "finishing",
            "options",
            "checks",
            "construction",
            "budgeting",
            "loading",
        ),
        *("views", "splitting", "base", "ways"),
    ],
    "datasets/image": [
        *(
            "claims",
            "pixels",
            "sizing",
            "augment",
            "masks",
            "format",
            "ways",
            "joint",
            "matching",
            "coco",
            "boxes",
            "tables",
            "labels",
        ),
        *("opening", "image"),
    ],
    "datasets/text": [
        *(
            "options",
            "tokenizing",
            "passes",
            "marked",
            "ways",
            "units",
            "chat_template",
            "chats",
            "opening",
            "documents",
            "text",
        ),
    ],
    "datasets/sparse": ["batches", "ways", "format", "sparse"],
    "datasets/table": ["ways", "texts", "format", "table"],
    "datasets/episodes": ["statistics", "ways", "episodes"],
    "datasets/shards": ["members", "shards", "streaming"],
    "packing": [
        *(
            "part",
            "options",
            "beside",
            "plan",
            "values",
            "destination",
            "own_source",
            "samples",
            "zarr",
            "parts",
            "status",
            "verify",
            "formats",
            "jpeg",
            "texts",
        ),
        *("run", "zarr_parts", "jobs", "dry_run", "api"),
    ],
    "packing/beside": ["targets", "pairs"],
    "packing/formats": ["layout", "versions", "hdf5"],
    "packing/jobs": ["planning", "job", "running"],
    "packing/dry_run": ["measure", "plan"],
    "packing/zarr": ["layout", "shard", "part", "verify"],
    "profiling/report": ["page", "plot", "result"],
    "profiling": [
        *(
            "room",
            "tune",
            "workers",
            "compare",
            "report",
            "model",
            "gil",
            "frozen",
            "running",
            "alone",
            "limit",
        ),
        *("images", "advice", "trying", "profile"),
    ],
    "previewing": ["batch", "panels", "table", "sheet"],
    "inspecting": [
        *(
            "report",
            "sizes",
            "formats",
            "costs",
            "advice",
            "sparse",
            "episodes",
            "nodes",
            "hdf5",
            "zarr",
            "labels",
            "images",
            "texts",
            "shards",
        ),
        *("tables", "inspect"),
    ],
    "inspecting/nodes": ["hdf5", "zarr"],
    "io/resolve": [
        "contents",
        "expressions",
        "folders",
        "listings",
        "file_set",
        "local",
        "remote",
        "packs",
        "resolver",
    ],
    "storage/arrays": [
        "codecs",
        "compressors",
        "patches",
        "values",
        "chunks",
        "reader",
        "spans",
        "axes",
        "gather",
        "rows",
        "decoded",
        "packed",
        "volumes",
    ],
    "storage/sparse": [
        "rows",
        "groups",
        "matrix",
        "frames",
        "hdf5",
        "zarr",
        "join",
        "source",
        "opening",
    ],
    "storage/episodes": ["windows", "steps", "source", "look"],
    "storage/hdf5": [
        *(
            "filters",
            "times",
            "probe",
            "files",
            "remote",
            "links",
            "conventions",
            "tables",
            "chunks",
            "layouts",
        ),
        *("packed", "rows", "episodes"),
    ],
    "storage/zarr": [
        *(
            "layout",
            "store",
            "zips",
            "stores",
            "library_store",
            "library",
            "ome",
            "shards",
            "rows",
            "packed",
            "volumes",
            "episodes",
        ),
    ],
    "storage/text": [
        "lines",
        "plain",
        "records",
        "chats",
        "line_index",
        "index_beside",
        "scan",
        "files",
        "source",
        "index",
    ],
    "storage/table": [
        "library",
        "messages",
        "encrypted",
        "columns",
        "in_place",
        "files",
        "parquet",
        "arrow",
        "source",
        "arrays",
    ],
    "storage/tar": ["index", "source"],
    "storage/tokens": ["source", "best_fit", "packed", "joined"],
    "storage": [
        *(
            "blocks",
            "parallel",
            "source",
            "concat",
            "files",
            "pairs",
            "class_folders",
            "arrays",
            "episodes",
            "hdf5",
            "zarr",
            "sparse",
            "replay",
            "table",
        ),
        *("tar", "text", "tokens", "image_formats", "kinds", "read_rows"),
    ],
}
"""The files and sub-rooms of a room, from below: each imports only those before it, types
included.
"""


def modules(path: Path) -> set[str]:
    """The modules of headrace that a file imports, and the names out of them, inside functions
    too.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import hides its room"
            names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {name for name in names if name.startswith("headrace.")}
    return found


def imports(path: Path) -> set[str]:
    """The rooms that a file imports."""
    return {name.split(".")[1] for name in modules(path) if name.split(".")[1] in BELOW}


def test_every_room_has_its_place() -> None:
    rooms = {
        path.stem
        for path in PACKAGE.iterdir()
        if path.name[0] not in "_." and path.suffix in ("", ".py")
    }
    assert rooms == set(BELOW)


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_only_what_lies_below(room: str) -> None:
    folder = PACKAGE / room
    for path in folder.rglob("*.py") if folder.is_dir() else [PACKAGE / f"{room}.py"]:
        assert imports(path) <= BELOW[room] | set(GROUND) | {room}, path


def _ground_of(room: str) -> set[str]:
    return set(GROUND[: GROUND.index(room)] if room in GROUND else GROUND)


def test_nothing_leads_in_a_circle() -> None:
    placed: set[str] = set()
    while placed != set(BELOW):
        ready = {
            room for room, below in BELOW.items() if below | _ground_of(room) <= placed | {room}
        } - placed
        assert ready, f"a circle among {set(BELOW) - placed}"
        placed |= ready


@pytest.mark.parametrize("room", INSIDE)
def test_sub_rooms_are_ordered(room: str) -> None:
    folder, order = PACKAGE / room, INSIDE[room]
    assert {path.stem for path in folder.iterdir() if path.name[0] not in "_."} == set(order)
    for place, unit in enumerate(order):
        for path in (
            (folder / unit).rglob("*.py") if (folder / unit).is_dir() else [folder / f"{unit}.py"]
        ):
            prefix = "headrace." + room.replace("/", ".") + "."
            used = {
                name.removeprefix(prefix).split(".")[0]
                for name in modules(path)
                if name.startswith(prefix)
            } & set(order)
            assert used <= set(order[: place + 1]), path


@pytest.mark.parametrize("room", ["io", "storage", "memory", "order", "monitor"])
def test_the_lower_rooms_do_not_know_the_dataloader(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "torch.utils.data"
            ):
                assert {alias.name for alias in node.names} <= {"Sampler", "get_worker_info"}, path


def test_each_new_tensor_names_its_device() -> None:
    """Else it would follow torch's default device."""
    makers = {function.__name__ for function in _device_constructors()}
    calls = [
        (path, node)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    nameless = []
    for path, call in calls:
        function = call.func
        of_torch = (
            isinstance(function, ast.Attribute)
            and isinstance(function.value, ast.Name)
            and function.value.id == "torch"
        )
        if (
            of_torch
            and function.attr in makers
            and not {"device", None} & {keyword.arg for keyword in call.keywords}
        ):
            nameless.append(f"{path.relative_to(PACKAGE)}:{call.lineno}")
    assert not nameless
