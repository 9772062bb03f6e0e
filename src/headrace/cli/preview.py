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
from headrace.cli.flags import add_options, check_output, imported_function
from headrace.cli.output import Output, fields_of, visible
from headrace.errors import ConfigError, WriteError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument("path", metavar="PATH", help="a file, a folder, a glob or a URL")
    parser.add_argument(
        "-o", "--output", metavar="PNG", help="the picture to write (default: print texts)"
    )
    options = {
        "count": (24, "samples in the batch"),
        "seed": (int, "of the order and of random transforms (default: 42)"),
        "epoch": (int, "whose first batch is shown (default: 0)"),
        "in_order": (bool, "the first samples, not shuffled"),
        "transform": (str, "MODULE:NAME or FILE.py:NAME of a callable"),
        "cell": (160, "pixels of a sample's picture"),
    }
    add_options(parser, options)
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
        seed=42 if given.seed is None else given.seed,
        epoch=given.epoch or 0,
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
