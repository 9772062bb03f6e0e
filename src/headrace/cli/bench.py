"""Measures how fast data come out of a path here, in each loading mode.

Measure how fast batches come out of a path on this machine: the loading modes side by side in about
a minute, the time to the first batch, and how fast the files alone are read. A training step takes
its time besides.

examples:
  %(prog)s photos/train
  %(prog)s train.h5 --batch-size 256 --workers 4 --mode cached --mode eager --seconds 20
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from headrace.cli.flags import add_options
from headrace.cli.output import Output, fields_of, visible

if TYPE_CHECKING:
    from headrace.profiling.compare import ModeRate

MODES = ("lazy", "cached", "eager", "streaming")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument("path", metavar="PATH", help="a file, a folder, a glob or a URL")
    parser.add_argument(
        "--mode", action="append", choices=MODES, dest="modes", help="may be given again"
    )
    options = {
        "batch_size": (64, "samples in a batch"),
        "workers": (int, "processes that load (default: as many as a loader takes here)"),
        "seconds": (60.0, "for all modes together, about"),
        "dataset_name": (str, "of HDF5 and Zarr: the array"),
        "encoding": (str, "of texts (default: utf-8)"),
    }
    add_options(parser, options)


def run(given: argparse.Namespace, output: Output) -> int:
    """Measures, and prints a line a mode as soon as it is known."""
    from headrace.io.paths import redact
    from headrace.profiling.compare import compare_modes

    path = redact(given.path)
    about = f"batches of {given.batch_size}, about {given.seconds:g} s"
    output.show_lines([f"{output.paint(visible(path), 'bold')}: {about}"])
    options = {"dataset_name": given.dataset_name, "encoding": given.encoding}
    result = compare_modes(
        given.path,
        seconds=given.seconds,
        batch_size=given.batch_size,
        num_workers=given.workers,
        modes=given.modes or MODES,
        on_mode=lambda rate: output.show_lines([_line(rate)]),
        **{name: value for name, value in options.items() if value is not None},
    )
    lines = []
    if result.read_mb_per_second is not None:
        rate = f"{result.read_mb_per_second:,.0f} MB/s"
        lines.append(f"  the files alone, read in one thread: {rate}")
    if result.fastest is not None:
        lines.append(
            f"  samples of {result.sample_mb:.3g} MB, {result.num_workers} workers; fastest: "
            f"{output.paint(result.fastest.mode, 'bold')}"
        )
    output.show({"path": path, **fields_of(result)}, lines)
    return 0


def _line(rate: ModeRate) -> str:
    if rate.samples_per_second is None:
        return f"  {rate.mode:<10} {visible(rate.note)}"
    note = ""
    if rate.note:
        note = f"; {rate.note}"
    return (
        f"  {rate.mode:<10} {rate.samples_per_second:>10,.0f} samples/s "
        f"{rate.mb_per_second:>8,.1f} MB/s   first batch after {rate.first_batch_s:.2f} s{note}"
    )
