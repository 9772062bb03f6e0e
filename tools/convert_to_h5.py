"""`headrace pack` as a script. Exit codes: 0 done; 2 an error, told in one line; 130
interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from headrace.cli.main import VERBS, run_verb


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help shows the arguments)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    pack = VERBS["pack"]
    parser = Parser(
        "convert_to_h5",
        description=pack.run.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pack.add_to(parser)
    code = run_verb(pack.run, parser.parse_args(arguments), parser.prog)
    return 2 if code == 1 else code


if __name__ == "__main__":
    sys.exit(main())
