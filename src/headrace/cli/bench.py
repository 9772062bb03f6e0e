"""`headrace bench`: how fast data come out of a path on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headrace.cli.flags import count, number, seconds
from headrace.cli.output import Output, fields_of, visible

if TYPE_CHECKING:
    from headrace.profiling.compare import Comparison, ModeRate

SUMMARY = "measure how fast data come out of a path here, in each loading mode"
DESCRIPTION = (
    "Measure how fast batches come out of a path on this machine: the loading modes side by side "
    "in about a minute, the time to the first "
    "batch, and how fast the files alone are read. A training step takes its time besides."
)
EXAMPLES = """\
examples:
  %(prog)s photos/train
  %(prog)s train.h5 --batch-size 256 --workers 4 --mode cached --mode eager --seconds 20
"""
MODES = ("lazy", "cached", "eager", "streaming")
_BAR = 20  # columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument(
        "path",
        metavar="PATH",
        help="what `headrace.open_dataset` takes: a file, a folder, a glob or a URL",
    )
    parser.add_argument(
        "--batch-size", type=count, default=64, metavar="N", help="samples in a batch (default: 64)"
    )
    parser.add_argument(
        "--workers",
        type=number(0),
        metavar="N",
        help="processes that load (default: as many as a loader takes here)",
    )
    parser.add_argument(
        "--mode",
        action="append",
        choices=MODES,
        dest="modes",
        help="a mode to measure, may be given again (default: all)",
    )
    parser.add_argument(
        "--seconds",
        type=seconds,
        default=60.0,
        metavar="S",
        help="for all modes together, about (default: 60)",
    )
    parser.add_argument("--dataset-name", metavar="NAME", help="of HDF5 and Zarr: the array")
    parser.add_argument("--encoding", help="of texts (default: utf-8)")


def run(given: argparse.Namespace, output: Output) -> int:
    """Measures, and prints a line a mode as soon as it is known."""
    from headrace.io.paths import redact
    from headrace.profiling.compare import compare_modes

    options = {
        name: getattr(given, name)
        for name in ("dataset_name", "encoding")
        if getattr(given, name) is not None
    }
    path = redact(given.path)
    output.show_lines(
        [
            f"{output.paint(visible(path), 'bold')}: batches of {given.batch_size}, about "
            f"{given.seconds:g} s"
        ]
    )
    found = compare_modes(
        given.path,
        seconds=given.seconds,
        batch_size=given.batch_size,
        num_workers=given.workers,
        modes=given.modes or MODES,
        on_mode=lambda rate: output.show_lines([_line(rate)]),
        **options,
    )
    output.show_lines(_summary(found, output))
    output.show_json({"path": path, **fields_of(found)})
    return 0


def _line(rate: ModeRate) -> str:
    if rate.samples_per_second is None:
        return f"  {rate.mode:<10} {visible(rate.note)}"
    first = f"first batch after {rate.first_batch_s:.2f} s"
    note = f"; {rate.note}" if rate.note else ""
    return (
        f"  {rate.mode:<10} {rate.samples_per_second:>10,.0f} samples/s "
        f"{rate.mb_per_second:>8,.1f} MB/s   {first}{note}"
    )


def _summary(found: Comparison, output: Output) -> Iterator[str]:
    fastest = found.fastest
    if fastest is None:
        return
    for rate in found.modes if not output.width or output.width >= 60 else []:
        part: Any = (rate.samples_per_second or 0.0) / (fastest.samples_per_second or 1.0)
        yield f"  {rate.mode:<10} {output.paint('█' * round(part * _BAR), 'cyan')}".rstrip()
    if found.read_mb_per_second is not None:
        limit = f": {found.limit:,.0f} samples/s" if found.limit else ""
        yield (
            "  the files alone, read from their beginning in one thread: "
            f"{found.read_mb_per_second:,.0f} MB/s{limit}"
        )
    samples = (
        "" if found.samples is None else f"{found.samples:,} samples of {found.sample_mb:.3g} MB, "
    )
    yield (
        f"  {samples}{found.num_workers} worker{'s' * (found.num_workers != 1)}; fastest: "
        f"{output.paint(fastest.mode, 'bold')}"
    )
