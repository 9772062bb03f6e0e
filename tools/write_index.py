"""`headrace index` as a script. Exit codes: 0 done; 2 an error, told in one line; 130
interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from headrace.cli.main import VERBS
from headrace.cli.output import Output
from headrace.errors import HeadraceError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    index = VERBS["index"]
    parser = argparse.ArgumentParser(
        description=index.run.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    index.add_to(parser)
    given = parser.parse_args(arguments)
    try:
        return index.run(given, Output())
    except (HeadraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
