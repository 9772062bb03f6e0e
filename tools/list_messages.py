"""Lists the messages of headrace's errors and warnings, from its source.

python tools/list_messages.py        # prints them as docs/errors.md shows them

As a hook of mkdocs it writes the list into docs/errors.md when the site is built, so that the
page is always that of the code.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).resolve().parent.parent / "src" / "headrace"
MARK = "<!-- messages -->"
VARIES = "…"
"""What stands for a part of a message that differs from call to call."""
MOST_FORMS = 16
"""Of a message with several conditional parts, the most forms that are listed."""
ROOMS = {
    "arguments": "Arguments",
    "casting": "Arguments",
    "cli": "Command line",
    "collate": "Collating",
    "datasets": "Datasets",
    "io": "Files, URLs and caches",
    "loader": "Loader",
    "memory": "Memory",
    "modes": "Loading modes",
    "monitor": "Monitoring",
    "order": "Order",
    "packing": "Packing",
    "previewing": "Command line",
    "profiling": "Profiling",
    "formats": "Formats",
    "testing": "A format of your own",
}
"""Headings of the page, by the package of headrace that has the message."""


class Message(NamedTuple):
    """A message of the source.

    Attributes:
        kind: name of the class of the error; "HeadraceWarning" of a warning.
        text: the message, with `VARIES` for what differs.
        heading: of the page.
    """

    kind: str
    text: str
    heading: str


def _kinds() -> set[str]:
    """Names of the errors that users see: headrace's public ones and Python's own."""
    tree = ast.parse((SOURCE / "errors.py").read_text(encoding="utf-8"))
    public = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return public | {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }


class Module:
    """The messages of one file of the source."""

    def __init__(self, path: Path, kinds: set[str]) -> None:
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        self._kinds = kinds
        self._functions = {
            node.name: node for node in ast.walk(self._tree) if isinstance(node, ast.FunctionDef)
        }
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        self._heading = ROOMS.get(room, "Arguments")

    def messages(self) -> Iterator[Message]:
        """Those of each call that makes an error, or warns."""
        for function, call in self._calls(self._tree, None):
            kind = self._kind_of(call)
            if kind is None or not call.args:
                continue
            # its arguments are the parts of the message
            said = call.args if kind == "CollateError" else call.args[:1]
            for form in self._joined(said, function, 0):
                text = _tidy(form)
                if len(text.replace(VARIES, " ").split()) >= 2:
                    yield Message(kind, text, self._heading)

    def _calls(
        self, node: ast.AST, function: ast.AST | None
    ) -> Iterator[tuple[ast.AST | None, ast.Call]]:
        """Calls below a node, each with the innermost function that it stands in."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield function, child
            yield from self._calls(child, child if isinstance(child, ast.FunctionDef) else function)

    def _kind_of(self, call: ast.Call) -> str | None:
        name = (
            call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        )
        if name == "warn":
            return "HeadraceWarning"
        return name if name in self._kinds else None

    def _forms(self, node: ast.expr, function: ast.AST | None, depth: int = 0) -> list[str]:
        """What an expression may say: one form for each way through its conditions, at most
        `MOST_FORMS`.
        """
        if isinstance(node, ast.Constant):
            return [str(node.value)] if isinstance(node.value, str) else [VARIES]
        if isinstance(node, ast.FormattedValue):
            return (
                self._forms(node.value, function, depth)
                if isinstance(node.value, ast.IfExp)
                else self._part(node.value, function, depth)
            )
        if isinstance(node, ast.JoinedStr):
            return self._joined(node.values, function, depth)
        if isinstance(node, ast.Starred):
            return self._forms(node.value, function, depth)
        if isinstance(node, ast.Tuple):
            return self._joined(node.elts, function, depth)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._joined([node.left, node.right], function, depth)
        if isinstance(node, ast.IfExp):
            return [
                *self._forms(node.body, function, depth),
                *self._forms(node.orelse, function, depth),
            ]
        return self._part(node, function, depth)

    def _joined(self, nodes: list[ast.expr], function: ast.AST | None, depth: int) -> list[str]:
        parts = [self._forms(part, function, depth) for part in nodes]
        return ["".join(form) for form in itertools.islice(itertools.product(*parts), MOST_FORMS)]

    def _part(self, node: ast.expr, function: ast.AST | None, depth: int) -> list[str]:
        """A name that is assigned a text in the same function, a call of a function that returns
        one; else `VARIES`.
        """
        texts: list[ast.expr] = []
        if depth < 3 and isinstance(node, ast.Name) and function is not None:
            texts = _assigned(node.id, function, node.lineno)
        elif (
            depth < 3
            and isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in self._functions
        ):
            function = self._functions[node.func.id]
            texts = [
                each.value
                for each in ast.walk(function)
                if isinstance(each, ast.Return) and each.value is not None
            ]
        forms = []
        for text in texts:
            forms += self._forms(text, function, depth + 1) if _is_text(text) else [VARIES]
        # a number with its unit is no text
        forms = [form if re.search("[A-Za-z]{3}", form) else VARIES for form in forms]
        return list(dict.fromkeys(forms))[:MOST_FORMS] or [VARIES]


def _assigned(name: str, function: ast.AST, line: int) -> list[ast.expr]:
    """What a name of a function may hold at a line: what it is assigned before, as in the branches
    of an if; of many values, the last one.
    """
    assigned = [
        (node.lineno, node.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    ]
    if len(assigned) > MOST_FORMS:
        assigned = sorted((pair for pair in assigned if pair[0] < line), key=lambda pair: pair[0])[
            -1:
        ]
    return [value for _, value in assigned]


def _is_text(node: ast.expr) -> bool:
    """True if an expression is a text, one of two, or a tuple with one (a part of the message of
    a CollateError).
    """
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) and _is_text(node.orelse)
    if isinstance(node, ast.Tuple):
        return any(map(_is_text, node.elts))
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _tidy(text: str) -> str:
    """The first line, with one sign for several parts that follow each other; numbers are below
    it.
    """
    text = " ".join(text.partition("\n")[0].split())
    while VARIES + VARIES in text:
        text = text.replace(VARIES + VARIES, VARIES)
    return text


@functools.cache
def messages() -> tuple[Message, ...]:
    """All messages of the source, each once, in the order of their headings and kinds."""
    kinds = _kinds()
    found = {
        message
        for path in sorted(SOURCE.rglob("*.py"))
        for message in Module(path, kinds).messages()
    }
    return tuple(
        sorted(
            found,
            key=lambda each: (
                each.heading,
                each.kind,
                each.text.lstrip(VARIES + " '").lower(),
                each.text,
            ),
        )
    )


def listed() -> str:
    """The messages as Markdown: a heading for each room, and below it a list for each kind."""
    lines = []
    for heading, of_room in itertools.groupby(messages(), key=lambda message: message.heading):
        lines += [f"## {heading}", ""]
        for kind, of_kind in itertools.groupby(of_room, key=lambda message: message.kind):
            lines += [f"**{kind}**", "", *(f"* {_code(message.text)}" for message in of_kind), ""]
    return "\n".join(lines)


def _code(text: str) -> str:
    """The text as inline code, by more backquotes than it has."""
    if "`" not in text:
        return f"`{text}`"
    ticks = next(count for count in itertools.count(2) if "`" * count not in text)
    return f"{'`' * ticks} {text} {'`' * ticks}"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page: puts the list where it is marked."""
    return markdown.replace(MARK, listed()) if MARK in markdown else markdown


if __name__ == "__main__":
    print(listed())
