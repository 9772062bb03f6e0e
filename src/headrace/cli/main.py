"""Runs one verb of the `headrace` command.

Exit codes: 0 done; 1 the data are wrong; 2 used wrongly, or it could not be done; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from headrace import __version__
from headrace.cli import index, join, pack, status, verify
from headrace.cli.flags import as_flags
from headrace.errors import FileChangedError, FormatError, HeadraceError, SampleError

Run = Callable[[argparse.Namespace], int]

_VERBS = {"pack": pack, "status": status, "join": join, "verify": verify, "index": index}
_WRONG_DATA = (FormatError, SampleError, FileChangedError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(prog="headrace", description="Prepare training data for PyTorch: pack, verify and index files.")
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, module in _VERBS.items():
        options: dict[str, Any] = {"help": module.SUMMARY, "description": module.DESCRIPTION, "epilog": module.EXAMPLES}
        module.add_arguments(verbs.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **options))
    given = parser.parse_args(arguments)
    return run_verb(_VERBS[given.verb].run, given, f"headrace {given.verb}")


def run_verb(run: Run, given: argparse.Namespace, program: str) -> int:
    """Run a verb: errors and warnings are one line on stderr, which begins with the program's name."""

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        print(f"{program}: warning: {as_flags(_one_line(message))}", file=sys.stderr)

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            return run(given)
    except HeadraceError as error:
        print(f"{program}: error: {_one_line(error)}", file=sys.stderr)
        return 1 if isinstance(error, _WRONG_DATA) else 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
