"""The commands of README.md, of the guides and of benchmarks/README.md have the options that the
programs have.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from headrace.cli.main import main as headrace_main

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
COMMAND = re.compile(r"^(?:\S*python3? (benchmarks|examples)/(\w+)\.py|(headrace) )(.*)$")


class Parsed(Exception):
    """The options were right."""


def commands() -> list[tuple[str, ...]]:
    """Page, folder, script and options of each command in a block of a page, and of each in
    backquotes that begins with `python`.
    """
    found: dict[tuple[str, ...], None] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        lines = [line for language, block in blocks if not language for line in block.splitlines()]
        lines += re.findall(r"`(\S*python (?:benchmarks|examples)/[^`]*)`", text)
        for line in lines:
            if match := COMMAND.match(line.strip()):
                folder, script, own, options = match.groups()
                options = options.partition(" #")[0].strip()
                if script != "chart":  # takes none
                    found[page.name, own or folder, script or "", options] = None
    return list(found)


@pytest.fixture
def parses(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a program until its options are parsed."""
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
        parse(self, *arguments)
        raise Parsed

    def run(folder: str, script: str, options: str) -> None:
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
        words = shlex.split(options)
        if folder == "headrace":
            headrace_main(words)
            return
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *words])
        scripts(script).main()

    return run


def test_commands_of_pages_have_right_options(parses: Any) -> None:
    found = commands()
    assert len(found) >= 50
    assert {folder for _, folder, *_ in found} == {"benchmarks", "examples", "headrace"}
    for command in found:
        with pytest.raises((Parsed, SystemExit)) as ended:
            parses(*command[1:])
        assert ended.type is Parsed or ended.value.code == 0, command  # 0: --help and the like
