"""Reads packed files again and compares each sample with its checksum.

Read packed files, and compare every sample, the names and the targets with their checksums.

examples:
  %(prog)s train.h5 val.h5
  %(prog)s packed            all parts of a folder

Exit code 1: a sample is damaged, or a file is; stdout names them.
Exit code 2: else, a file can't be read; the others are verified all the same.
"""

from __future__ import annotations

import argparse
from typing import Any

from headrace.cli.flags import add_options, count
from headrace.cli.output import Output, exit_code_of, one_line, visible
from headrace.errors import HeadraceError

_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument(
        "paths", nargs="+", metavar="FILE", help="a packed file, or a folder of parts"
    )
    options = {
        "workers": (count, "threads that read (default: one for each core)"),
        "no_progress": (bool, "no progress bar (never shown but on a terminal)"),
    }
    add_options(parser, options)


def run(given: argparse.Namespace, output: Output) -> int:
    """Verifies each file, and prints a line for it."""
    from headrace.io.paths import redact
    from headrace.packing import verify

    results = list[Any]()
    codes = list[int]()
    for path in given.paths:
        try:
            progress = False if given.no_progress else None
            result = verify(path, workers=given.workers, progress=progress)
        except (HeadraceError, OSError) as error:
            if len(given.paths) == 1:
                raise
            message = one_line(error)
            shown = redact(path)
            details = {"type": type(error).__name__, "message": message}
            results.append({"path": shown, "error": details})
            codes.append(exit_code_of(error))
            output.show_lines([f"{visible(shown)}: not verified: {message}"])
            continue
        results.append(result)
        codes.append(0 if result.ok else 1)
        state = f"{len(result.bad):,} damaged" if result.bad else "all sound"
        lines = [f"{visible(result.path)}: {result.samples:,} samples, {state}"]
        for number, location, why in result.bad[:_SHOWN]:
            said = one_line(why).removeprefix(f"{location}: ")
            sample = "" if number < 0 else f"sample {number}, "
            lines.append(f"  {sample}{visible(location)}: {visible(said)}")
        if len(result.bad) > _SHOWN:
            lines.append(f"  and {len(result.bad) - _SHOWN:,} more")
        output.show_lines(lines)
    output.show_json({"ok": not any(codes), "files": results})
    return 1 if 1 in codes else max(codes)
