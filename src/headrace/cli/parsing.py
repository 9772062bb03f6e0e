"""The parser of the `headrace` command."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from types import ModuleType
from typing import Any, NoReturn

_QUIET, _JSON = "print nothing but errors and warnings", 'print one JSON document; an error too, as {"error": ...}'


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps descriptions as wide as the terminal is, and leaves examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return super()._fill_text(text, width, indent)
        return textwrap.fill(" ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent)


class Parser(argparse.ArgumentParser):
    """A parser whose errors say which command is next."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Prints usage, error and the next command, and exits with 2."""
        self.print_usage(sys.stderr)
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        near = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), 1) if wrong else []
        meant = f" (did you mean {near[0]}?)" if near else ""
        self.exit(2, f"{self.prog}: error: {message}{meant}\nnext: {self.prog} --help\n")


def parser_of(verbs: dict[str, ModuleType], version: str) -> Parser:
    """The parser of all verbs."""
    parser = Parser(
        prog="headrace",
        description="See, prepare and measure training data for PyTorch.",
        epilog="examples:\n  %(prog)s info photos/train\n  %(prog)s pack photos/train train.h5\n\n"
        "Exit codes: 0 fine; 1 something is wrong with the data; 2 used wrongly, or it could not be done; 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"headrace {version}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, module in verbs.items():
        verb = subparsers.add_parser(name, help=module.SUMMARY, description=module.DESCRIPTION, epilog=module.EXAMPLES)
        module.add_arguments(verb)
        verb.add_argument("--json", action="store_true", help=_JSON)
        verb.add_argument("-q", "--quiet", action="store_true", help=_QUIET)
    return parser
