"""Do imports run one way, from the top floor down? (docs/architecture.md)"""

import ast
from pathlib import Path

import pytest

import headrace

PACKAGE = Path(headrace.__file__).parent
GROUND = ("errors", "arguments", "display")  # in this order
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "arguments": set(),
    "display": set(),
    "tokenizer": set(),
    "memory": set(),
    "order": set(),
    "monitor": {"memory"},
    "storage": {"memory"},
    "modes": {"storage", "memory"},
    "collate": {"memory", "tokenizer"},
    "datasets": {"modes", "storage", "memory", "order", "monitor", "tokenizer"},
    "loader": {"datasets", "collate", "modes", "memory", "order", "monitor"},
    "profiling": {"loader", "datasets", "modes", "memory", "order"},
    "packing": {"loader", "datasets", "modes", "storage", "memory", "order", "tokenizer"},
    "testing": {"loader", "datasets", "modes", "order"},
    "cli": {"packing", "datasets", "storage", "memory"},
}
"""What each room may import, besides itself and the errors."""


def imports(path: Path) -> set[str]:
    """The rooms that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: a relative import hides its room"
        found |= {name.split(".")[1] for name in names if name.startswith("headrace.")}
    return found


def test_every_room_has_its_place() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.name[0] not in "_." and path.suffix in ("", ".py")}
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
        ready = {room for room, below in BELOW.items() if below | _ground_of(room) <= placed | {room}} - placed
        assert ready, f"a circle among {set(BELOW) - placed}"
        placed |= ready


@pytest.mark.parametrize("room", ["storage", "memory", "order", "monitor"])
def test_the_lower_rooms_do_not_know_the_dataloader(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.utils.data"):
                assert {alias.name for alias in node.names} <= {"Sampler", "get_worker_info"}, path
