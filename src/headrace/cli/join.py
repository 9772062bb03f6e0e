"""Completes a pack whose parts are all done.

Check the sidecars of all parts, and write the manifest. `headrace pack` does so by itself where it
packs the last part.

examples:
  %(prog)s packed              writes packed/manifest.json
  %(prog)s s3://bucket/packed  the same in a bucket

Exit code 2: a part is missing.
"""

from __future__ import annotations

import argparse

from headrace.cli.output import Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument("path", metavar="FOLDER", help="that `headrace pack --shard-size` wrote to")


def run(given: argparse.Namespace, output: Output) -> int:
    """Writes the manifest, and prints where."""
    from headrace.io.paths import redact
    from headrace.packing import join

    manifest = redact(join(given.path))
    output.show({"manifest": manifest}, [manifest])
    return 0
