"""Shows which parts of a pack are done, missing or stale.

Show how far a pack of several parts is: which are done, missing, or stale (of another plan). Reads
no samples.

examples:
  %(prog)s packed
  %(prog)s --json packed | jq .missing

Exit code 1: parts are missing or stale, or the manifest is.
"""

from __future__ import annotations

import argparse

from headrace.cli.output import Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument(
        "path", metavar="FOLDER", help="that `headrace pack --shard-size` writes to"
    )


def run(given: argparse.Namespace, output: Output) -> int:
    """Prints the status."""
    from headrace.packing import pack_status

    status = pack_status(given.path)
    output.show(status, [str(status)])
    return 0 if status.joined else 1
