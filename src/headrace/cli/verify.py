"""`headrace verify`: compares packed files with their checksums."""

from __future__ import annotations

import argparse

SUMMARY = "read packed files again and compare each sample with its checksum"
DESCRIPTION = "Read packed files, and compare every sample, the names and the targets with their checksums."
EXAMPLES = """\
examples:
  %(prog)s train.h5 val.h5

Exit code 1: a sample is damaged, or a file is; stdout names them.
"""
_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument("paths", nargs="+", metavar="FILE", help="a file that `headrace pack` wrote, or a folder of parts")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar (never shown but on a terminal)")


def run(given: argparse.Namespace) -> int:
    """Verifies each file, and prints a line for it."""
    from headrace.packing import verify

    is_sound = True
    for path in given.paths:
        result = verify(path, progress=False if given.no_progress else None)
        is_sound = is_sound and result.ok
        print(f"{result.path}: {result.samples:,} samples, {f'{len(result.bad):,} damaged' if result.bad else 'all sound'}")
        for number, location, error in result.bad[:_SHOWN]:
            print(f"  {'' if number < 0 else f'sample {number}, '}{location}: {' '.join(error.split())}")
        if len(result.bad) > _SHOWN:
            print(f"  and {len(result.bad) - _SHOWN:,} more")
    return 0 if is_sound else 1
