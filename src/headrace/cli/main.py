# PYTHON_ARGCOMPLETE_OK
"""Parses and runs one verb of the `headrace` command.

Exit codes: 0 done; 1 the data are wrong; 2 used wrongly, or it could not be done; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from headrace import __version__
from headrace.cli import (
    bench,
    cache,
    env,
    index,
    info,
    join,
    pack,
    preview,
    profile,
    status,
    verify,
)
from headrace.cli.flags import as_flags
from headrace.cli.hints import exit_code_of, next_command
from headrace.cli.output import Output, has_colors, one_line, write
from headrace.errors import HeadraceError

Run = Callable[[argparse.Namespace, Output], int]

VERBS = {
    **{"info": info, "preview": preview, "bench": bench, "profile": profile},
    **{"pack": pack, "verify": verify, "status": status, "join": join, "index": index},
    **{"cache": cache, "env": env},
}
_QUIET, _JSON = (
    "print nothing but errors and warnings",
    'print one JSON document; an error too, as {"error": ...}',
)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps descriptions as wide as the terminal is, and leaves examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return super()._fill_text(text, width, indent)
        return textwrap.fill(
            " ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent
        )


class Parser(argparse.ArgumentParser):
    """A parser whose errors say which command is next."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, "allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses flags in the name of the verb that lacks them; argparse leaves this to the
        whole command.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Prints usage, error and the next command, and exits with 2."""
        self.print_usage(sys.stderr)
        self.exit(
            2, f"{self.prog}: error: {message}{self._remedy(message)}\nnext: {self.prog} --help\n"
        )

    def _remedy(self, message: str) -> str:
        """What was meant by a wrong verb, or by a flag that the verb lacks."""
        from headrace.arguments import nearest, synonyms

        verb = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if verb is not None:
            meant = nearest(verb[1], re.findall(r"[\w-]+", verb[2]))
            return f" (did you mean {meant}?)" if meant else ""
        flag = re.search(r"unrecognized arguments: --([\w-]+)", message)
        if flag is None:
            return ""
        flags = {
            action.dest: action.option_strings[-1]
            for action in self._actions
            if action.option_strings
        }
        name = flag[1].replace("-", "_")
        instead = synonyms(name, flags)
        if instead:
            return f" (use {re.sub('[a-z_]+', lambda word: flags.get(word[0], word[0]), instead)})"
        meant = nearest(name, flags)
        return f" (did you mean {flags[meant]}?)" if meant else ""


def parser_of(verbs: dict[str, ModuleType], version: str) -> Parser:
    """The parser of all verbs."""
    parser = Parser(
        prog="headrace",
        description="See, prepare and measure training data for PyTorch.",
        epilog="examples:\n  %(prog)s info photos/train\n  %(prog)s pack photos/train train.h5\n\n"
        "Exit codes: 0 fine; 1 something is wrong with the data; 2 used wrongly, or it could not "
        "be done; 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"headrace {version}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, module in verbs.items():
        verb = subparsers.add_parser(
            name, help=module.SUMMARY, description=module.DESCRIPTION, epilog=module.EXAMPLES
        )
        module.add_arguments(verb)
        verb.add_argument("--json", action="store_true", help=_JSON)
        verb.add_argument("-q", "--quiet", action="store_true", help=_QUIET)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    parser = parser_of(VERBS, __version__)
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may follow
        import argcomplete

        argcomplete.autocomplete(parser)
    given = parser.parse_args(arguments)
    return run_verb(VERBS[given.verb].run, given, f"headrace {given.verb}")


def run_verb(run: Run, given: argparse.Namespace, program: str) -> int:
    """Run a verb: errors and warnings are one line on stderr, which begins with the program's
    name; the next command may follow.
    """
    output = Output(getattr(given, "json", False), getattr(given, "quiet", False))
    if output.as_json or output.quiet:
        given.no_progress = True

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: Any = None,
    ) -> None:
        _tell(program, "warning", as_flags(one_line(message), given))

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            return run(given, output)
    except (HeadraceError, OSError) as error:
        code = exit_code_of(error)
        message = one_line(error)
        # a verb that opens data: arguments that its messages name are flags here
        if "dataset_name" in given:
            message = as_flags(message, given)
        _tell(program, "error", message, next_command(error, given))
        output.show_error(error, message, code)
        return code
    except KeyboardInterrupt:
        _tell(program, "interrupted")
        return 130
    except Exception as error:  # a fault of headrace's own
        import traceback

        traceback.print_exc()
        _tell(
            program,
            "error",
            f"{type(error).__name__}, which headrace does not expect: please report it",
            "headrace env",
        )
        output.show_error(error, one_line(error), 2)
        return 2


def _tell(program: str, what: str, message: str = "", following: str | None = None) -> None:
    color = {"error": "31;1", "warning": "33;1"}.get(what, "1")
    shown = f"\x1b[{color}m{what}\x1b[0m" if has_colors(sys.stderr) else what
    write(f"{program}: {shown}{': ' if message else ''}{message}\n", sys.stderr)
    if following is not None:
        write(f"next: {following}\n", sys.stderr)
