"""Writes beside each shard what must be known of it to read it by URL.

Write beside each shard what must be known of it before its samples can be read by URL: the first
run then begins in a few round trips.

examples:
  %(prog)s shards/            every .tar, .h5 and .arrow file below a folder;
                              upload the .index files with them
  %(prog)s s3://bucket/train  the same in a bucket that may be written to
"""

from __future__ import annotations

import argparse

from headrace.cli.output import Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="a file, a folder, a glob or a URL"
    )


def run(given: argparse.Namespace, output: Output) -> int:
    """Writes the indices, and prints which."""
    from headrace.datasets.indexing import write_index

    written = [str(index) for path in given.paths for index in write_index(path)]
    output.show({"written": written}, written)
    return 0
