"""Writes what a dataset must know of shards that will be read by URL beside each of them: the command line of `headrace.write_index`.

Exit codes: 0 done; 2 an error, told in one line; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from headrace.datasets.indexing import write_index
from headrace.errors import HeadraceError

_EXAMPLE = """\
examples:
  %(prog)s shards/            every .tar, .h5, .jsonl, .txt and .zarr.zip below a folder; upload the .index files with them
  %(prog)s s3://bucket/train  the same in a bucket that may be written to
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the indices, and says which."""
    parser = argparse.ArgumentParser(
        description="Write beside each shard what must be known of it before its samples can be read by URL: the first run then begins in "
        "a few round trips.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file, a folder, a glob or a URL")
    given = parser.parse_args(arguments)
    try:
        for path in given.paths:
            for written in write_index(path):
                print(written)
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
