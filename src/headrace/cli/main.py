# PYTHON_ARGCOMPLETE_OK
"""Runs one verb of the `headrace` command.

Exit codes: 0 done; 1 the data are wrong; 2 used wrongly, or it could not be done; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from headrace import __version__
from headrace.cli import bench, cache, env, index, info, join, pack, preview, status, verify
from headrace.cli.flags import as_flags
from headrace.cli.hints import next_command
from headrace.cli.output import Output, has_colors, write
from headrace.cli.parsing import parser_of
from headrace.errors import FileChangedError, FormatError, HeadraceError, SampleError

Run = Callable[[argparse.Namespace, Output], int]

VERBS = {
    **{"info": info, "preview": preview, "bench": bench},
    **{"pack": pack, "verify": verify, "status": status, "join": join, "index": index},
    **{"cache": cache, "env": env},
}
_WRONG_DATA = (FormatError, SampleError, FileChangedError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    parser = parser_of(VERBS, __version__)
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may follow
        import argcomplete

        argcomplete.autocomplete(parser)
    given = parser.parse_args(arguments)
    return run_verb(VERBS[given.verb].run, given, f"headrace {given.verb}")


def run_verb(run: Run, given: argparse.Namespace, program: str) -> int:
    """Run a verb: errors and warnings are one line on stderr, which begins with the program's name; the next command may follow."""
    output = Output(getattr(given, "json", False), getattr(given, "quiet", False))
    if output.as_json or output.quiet:
        given.no_progress = True

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        _tell(program, "warning", as_flags(_one_line(message)))

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            return run(given, output)
    except (HeadraceError, OSError) as error:
        code = 1 if isinstance(error, _WRONG_DATA) else 2
        message = _one_line(error)
        _tell(program, "error", as_flags(message) if "dataset_name" in given else message, next_command(error, given))
        output.show_error(error, code)
        return code
    except KeyboardInterrupt:
        _tell(program, "interrupted")
        return 130
    except Exception as error:  # a fault of headrace's own
        traceback.print_exc()
        _tell(program, "error", f"{type(error).__name__}, which headrace does not expect: please report it", "headrace env")
        output.show_error(error, 2)
        return 2


def _tell(program: str, what: str, message: str = "", following: str | None = None) -> None:
    color = {"error": "31;1", "warning": "33;1"}.get(what, "1")
    shown = f"\x1b[{color}m{what}\x1b[0m" if has_colors(sys.stderr) else what
    write(f"{program}: {shown}{': ' if message else ''}{message}\n", sys.stderr)
    if following is not None:
        write(f"next: {following}\n", sys.stderr)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
