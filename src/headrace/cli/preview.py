"""Draws what a loader yields: a contact sheet, or a table of texts.

Draw the first batch that a loader yields in an epoch, after all transforms: images with their
targets and class names, three slices of volumes, texts with their tokens and padding.

examples:
  %(prog)s photos/train -o sheet.png --epoch 3
  %(prog)s photos/train -o sheet.png --transform my_project.transforms:augment
  %(prog)s volume.zarr -o slices.png --patch-shape 64
  %(prog)s books.jsonl --count 8
"""

from __future__ import annotations

import argparse

from headrace.cli.data import add_data_options, data_options, open_data
from headrace.cli.flags import check_output, imported_function, number
from headrace.cli.output import Output, fields_of, visible
from headrace.errors import ConfigError, WriteError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    few = number(1, 400)
    parser.add_argument("path", metavar="PATH", help="a file, a folder, a glob or a URL")
    parser.add_argument(
        "-o", "--output", metavar="PNG", help="the picture to write (default: print texts)"
    )
    parser.add_argument(
        "--count", type=few, default=24, metavar="N", help="samples in the batch (default: 24)"
    )
    parser.add_argument(
        "--seed", type=int, default=42, metavar="N", help="of order and transforms (default: 42)"
    )
    parser.add_argument(
        "--epoch", type=int, default=0, metavar="N", help="whose first batch is shown (default: 0)"
    )
    parser.add_argument("--in-order", action="store_true", help="the first samples, not shuffled")
    parser.add_argument(
        "--transform",
        metavar="MODULE:NAME",
        help="a callable, or FILE.py:NAME; the working folder comes first",
    )
    parser.add_argument(
        "--cell", type=few, default=160, metavar="N", help="pixels of a picture (default: 160)"
    )
    add_data_options(parser)


def run(given: argparse.Namespace, output: Output) -> int:
    """Takes a batch, and draws it."""
    from headrace.previewing import draw_sheet, preview

    options = data_options(given)
    if given.transform is not None:
        options["transform"] = imported_function("--transform", given.transform)
    if given.output is not None:
        sources = (given.path, given.targets)
        check_output("-o", given.output, (".png", ".jpg", ".jpeg", ".webp"), sources)
    shown = preview(
        given.path,
        count=given.count,
        seed=given.seed,
        epoch=given.epoch,
        shuffle=not given.in_order,
        opens=lambda path, **others: open_data(path, others),
        **options,
    )
    lines = list(shown.lines(output.columns))
    if given.output is not None:
        try:
            draw_sheet(shown, cell=given.cell).save(given.output)
        except OSError as error:
            raise WriteError(f"{given.output} can't be written: {error}") from error
        lines = [f"{given.output}: {len(shown.items):,} samples, {shown.title}", *shown.notes]
    elif not (shown.is_text or output.as_json or output.quiet):
        raise ConfigError("pictures are not printed: pass -o sheet.png")
    samples = [fields_of(item) for item in shown.items]
    for sample in samples:
        for name in ("value", "target", "boxes"):
            del sample[name]
    told = {"title": shown.title, "batch": shown.batch, "notes": shown.notes, "samples": samples}
    output.show({**told, "output": given.output}, map(visible, lines))
    return 0
