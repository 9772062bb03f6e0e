"""`headrace verify`: compares packed files with their checksums."""

from __future__ import annotations

import argparse

from headrace.cli.flags import count
from headrace.cli.output import Output

SUMMARY = "read packed files again and compare each sample with its checksum"
DESCRIPTION = "Read packed files, and compare every sample, the names and the targets with their checksums."
EXAMPLES = """\
examples:
  %(prog)s train.h5 val.h5
  %(prog)s packed            all parts of a folder

Exit code 1: a sample is damaged, or a file is; stdout names them.
"""
_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument("paths", nargs="+", metavar="FILE", help="a file that `headrace pack` wrote, or a folder of parts")
    parser.add_argument("--workers", type=count, metavar="N", help="threads that read (default: one for each core)")
    parser.add_argument("--processes", type=count, default=1, metavar="N", help="that verify parts at the same time (default: 1)")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar (never shown but on a terminal)")


def run(given: argparse.Namespace, output: Output) -> int:
    """Verifies each file, and prints a line for it."""
    from headrace.packing import verify

    results = []
    for path in given.paths:
        result = verify(path, workers=given.workers, processes=given.processes, progress=False if given.no_progress else None)
        results.append(result)
        lines = [f"{result.path}: {result.samples:,} samples, {f'{len(result.bad):,} damaged' if result.bad else 'all sound'}"]
        for number, location, error in result.bad[:_SHOWN]:
            lines.append(f"  {'' if number < 0 else f'sample {number}, '}{location}: {' '.join(error.split())}")
        if len(result.bad) > _SHOWN:
            lines.append(f"  and {len(result.bad) - _SHOWN:,} more")
        output.show_lines(lines)
    is_sound = all(result.ok for result in results)
    output.show_json({"ok": is_sound, "files": results})
    return 0 if is_sound else 1
