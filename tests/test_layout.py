"""Imports run one way, from the top floor down (docs/architecture.md); and tensors say where
they are made.
"""

import ast
import functools
from pathlib import Path
from typing import Any

from torch.utils._device import _device_constructors

import headrace

PACKAGE = Path(headrace.__file__).parent
# in this order
GROUND = ["dtypes", "errors", "synonyms", "arguments", "display", "casting"]
BELOW = {
    "tokenizer": "",
    "memory": "",
    "order": "",
    "monitor": "memory",
    "io": "memory",
    "formats": "io memory",
    "collate": "memory tokenizer",
    "core": "collate formats io order memory tokenizer",
    "datasets": "core collate formats io monitor order memory tokenizer",
    "loader": "datasets core collate formats io monitor order memory",
    "profiling": "loader datasets core formats io monitor order memory",
    "packing": "loader datasets core formats io order memory tokenizer",
    "previewing": "loader datasets core",
    "testing": "loader datasets core order memory",
    "cli": "previewing packing profiling datasets core formats io memory",
}
"""What each room may import, besides itself and the ground."""
INSIDE = {
    "io": """
        paths atomic library_errors ranges files ordered handles local_files
        checksums array_file disk_cache remote remote_files index
    """,
    "io/remote": "options requests http client prefetch",
    "order": "permutation seeding world lanes epoch drawn ranks splits",
    "memory": "limits processes anonymous budget lru tree ring store machine",
    "monitor": "stats memory",
    "collate": "stack vision sequences registry",
    "loader": """
        signals served start config state plan budget fetch processes device ranks epoch
        loader multi module
    """,
    "datasets": """
        cells arrays resizing pixels columns table image files episodes sparse text
        dialects streaming unnormalized open memory_efficient
    """,
    "core": "decoder reader values held ahead options views dataset batcher",
    "datasets/image": """
        augment labels decoder masks coco tables packs columns image
    """,
    "datasets/text": "decoders chats passes text",
    "packing": "destination plan parts contents stored texts hdf5 run",
    "profiling": "result running compare tune profile",
    "previewing": "batch sheet",
    "formats/resolve": "file_set find manifests resolver",
    "formats/arrays": "codecs chunks packed reader joined rows volumes",
    "formats/sparse": "rows matrix",
    "formats/episodes": "source rlds find",
    "formats/hdf5": "files remote chunks tree rows",
    "formats/zarr": "stores shards library tree",
    "formats/text": "plain records index source",
    "formats/table": "columns files arrow source arrays",
    "formats/shards": "heads source litdata mds",
    "formats": """
        resolve source files text zips arrays tree ome
        hdf5 zarr
        trees sparse protobuf tfrecord episodes table shards tar tokens
        read_rows registry
    """,
}
"""The files and sub-rooms of a room, from below: each imports only those before it, types
aside.
"""


def files_of(place: str) -> list[Path]:
    """The files of a room, a sub-room, or that file."""
    path = PACKAGE / place
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def units_in(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir() if path.name[0] not in "_."}


@functools.cache
def nodes_of(path: Path, types: bool = True) -> list[Any]:
    """What a file imports and calls, inside functions too; for type checkers alone, or not."""
    if types:
        tree = ast.parse(path.read_text())
        kinds = ast.Import | ast.ImportFrom | ast.Call | ast.If
        return [node for node in ast.walk(tree) if isinstance(node, kinds)]
    blocks = [node for node in nodes_of(path) if isinstance(node, ast.If)]
    guarded = [block for block in blocks if getattr(block.test, "id", "") == "TYPE_CHECKING"]
    for_checkers = {node for block in guarded for node in ast.walk(block)}
    return [node for node in nodes_of(path) if node not in for_checkers]


def modules(path: Path, types: bool = True) -> set[str]:
    """The modules that a file imports, and the names out of them."""
    found: set[str] = set()
    for node in nodes_of(path, types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import hides its room"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return found


def test_rooms_import_only_what_lies_below() -> None:
    assert units_in(PACKAGE) - {"py"} == {*GROUND, *BELOW}
    lower: set[str] = set()
    for number, room in enumerate([*GROUND, *BELOW]):
        allowed = {room, *GROUND[:number], *BELOW.get(room, "").split()}
        assert allowed - {room} <= lower, f"{room} stands below what it may import"
        lower.add(room)
        for path in files_of(room):
            used = {name.split(".")[1] for name in modules(path) if name.startswith("headrace.")}
            assert used & {*GROUND, *BELOW} <= allowed, path


def test_sub_rooms_are_ordered() -> None:
    for room, units in INSIDE.items():
        order = units.split()
        assert units_in(PACKAGE / room) == set(order)
        prefix = "headrace." + room.replace("/", ".") + "."
        for place, unit in enumerate(order):
            for path in files_of(f"{room}/{unit}"):
                inside = [name for name in modules(path, types=False) if name.startswith(prefix)]
                used = {name.removeprefix(prefix).split(".")[0] for name in inside}
                assert used & set(order) <= set(order[: place + 1]), path


def test_the_lower_rooms_do_not_know_the_dataloader() -> None:
    data = "torch.utils.data"
    for room in ("io", "formats", "memory", "order", "monitor"):
        for path in files_of(room):
            used = {name for name in modules(path) if name.startswith(data)}
            assert used <= {data, f"{data}.Sampler", f"{data}.get_worker_info"}, path


def test_each_new_tensor_names_its_device() -> None:
    """Else it would follow torch's default device."""
    makers = {f"torch.{function.__name__}" for function in _device_constructors()}
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            function = getattr(node, "func", None)
            if isinstance(function, ast.Attribute) and ast.unparse(function) in makers:
                given = {keyword.arg for keyword in node.keywords}
                assert given & {"device", None}, f"{path}:{node.lineno}"


def test_whole_numbers_are_sorted_and_never_hashed() -> None:
    """`np.unique` of numbers alone takes fifty times as long as `headrace.dtypes.distinct`; with
    an index, an inverse, counts or an axis it sorts.
    """
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "unique":
                assert node.keywords, f"{path}:{node.lineno}"
