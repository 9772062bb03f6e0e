# PYTHON_ARGCOMPLETE_OK
"""Parses and runs one verb of the `headrace` command.

Exit codes: 0 done; 1 the data are wrong; 2 wrong usage, or the command failed; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import re
import shlex
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from headrace import __version__
from headrace.cli import info, machine, measure, packs
from headrace.cli.flags import add_options, as_flags
from headrace.cli.output import Output, exit_code_of
from headrace.errors import (
    ConfigError,
    DataNotFoundError,
    FormatError,
    HeadraceError,
    MissingNameError,
    one_line,
)
from headrace.io.paths import is_url, redact

VERBS = {**info.VERBS, **measure.VERBS, **packs.VERBS, **machine.VERBS}
_OF_ALL = {
    "-q --quiet": ({"action": "store_true"}, "only errors and warnings"),
    "json": (bool, 'print one JSON document; errors as {"error": ...}'),
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors say which command is next."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses flags in the name of the verb that lacks them; argparse leaves this to the
        whole command.
        """
        given, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return given, unknown

    def error(self, message: str) -> NoReturn:
        """Prints usage, error and the next command, and exits with 2."""
        from headrace.arguments import nearest, synonyms

        known = {name: name for name in VERBS}
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from ", message)
        if wrong is None:
            known = {
                one.dest: one.option_strings[-1] for one in self._actions if one.option_strings
            }
            wrong = re.search(r"unrecognized arguments: --([\w-]+)", message)
        if wrong is not None:
            name = wrong[1].replace("-", "_")
            instead = synonyms(name, known)
            meant = nearest(name, known)
            if instead:
                flags = re.sub("[a-z_]+", lambda word: known.get(word[0], word[0]), instead)
                message += f" (use {flags})"
            elif meant:
                message += f" (did you mean {known[meant]}?)"
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\nnext: {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and gives its exit code."""
    parser = Parser(
        prog="headrace",
        description="Inspect, prepare and measure training data for PyTorch.",
        epilog="examples:\n  %(prog)s info photos/train\n  %(prog)s pack photos/train train.h5\n\n"
        "Exit codes: 0 success; 1 something is wrong with the data; 2 wrong usage, or the command "
        "failed; 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in VERBS.items():
        summary, _, more = (inspect.getdoc(verb.run) or "").partition("\n\n")
        description, colon, examples = more.partition("examples:")
        # as wide as argparse prints the options
        description = textwrap.fill(one_line(description), shutil.get_terminal_size().columns - 2)
        of_verb = subparsers.add_parser(
            name, help=summary.rstrip("."), description=description, epilog=colon + examples
        )
        verb.add_to(of_verb)
        add_options(of_verb, _OF_ALL)
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may follow
        import argcomplete

        argcomplete.autocomplete(parser)
    given = parser.parse_args(arguments)
    return run_verb(VERBS[given.verb].run, given, f"headrace {given.verb}")


def run_verb(
    run: Callable[[argparse.Namespace, Output], int], given: argparse.Namespace, program: str
) -> int:
    """Runs a verb: errors and warnings are one line on stderr, which begins with the program's
    name; the next command may follow.
    """
    output = Output(getattr(given, "json", False), getattr(given, "quiet", False))
    if output.as_json or output.quiet:
        given.no_progress = True
    errors = Output(stream=sys.stderr)

    def tell(what: str, message: str) -> None:
        errors.write(f"{program}: {errors.paint(what, what)}: {message}\n")

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        tell("warning", as_flags(one_line(message), given))

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            return run(given, output)
    except KeyboardInterrupt:
        errors.write(f"{program}: interrupted\n")
        return 130
    except Exception as error:
        code = exit_code_of(error)
        message = one_line(error)
        following = next_command(error, given)
        if not isinstance(error, HeadraceError | OSError):  # a fault of headrace's own
            import traceback

            traceback.print_exc()
            message = f"{type(error).__name__}, which headrace does not expect: please report it"
            following = "headrace env"
        elif "dataset_name" in given:  # a verb that opens data has flags for its arguments
            message = as_flags(message, given)
        tell("error", message)
        if following is not None:
            errors.write(f"next: {following}\n")
        shown = {"type": type(error).__name__, "message": message, "exit_code": code}
        # the error may be that nothing can be printed, such as to a full disk
        with contextlib.suppress(OSError):
            output.show_json({"error": shown})
        return code


def next_command(error: BaseException, given: argparse.Namespace) -> str | None:
    """The command that tells more of what is wrong. None: the message says it all."""
    verb = getattr(given, "verb", None)
    paths: list[str] = getattr(given, "paths", [])
    path = getattr(given, "path", None) or getattr(given, "src", None)
    if len(paths) == 1:
        path = paths[0]
    if verb == "join" and os.path.isdir(path or ""):
        return f"headrace status {shlex.quote(redact(path))}"
    if path is not None and isinstance(error, DataNotFoundError):
        if is_url(path):
            return None
        folder = os.path.abspath(os.path.expanduser(path))
        while not os.path.isdir(folder) or (verb == "info" and folder == os.path.abspath(path)):
            folder = os.path.dirname(folder)
        return f"headrace info {shlex.quote(folder)}"
    if path is not None and isinstance(error, MissingNameError | FormatError) and verb != "info":
        return f"headrace info {shlex.quote(redact(path))}"
    if verb is not None and isinstance(error, ConfigError):
        return f"headrace {verb} --help"
    return None
