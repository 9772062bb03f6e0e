"""`headrace preview`: what a loader yields, as a picture or a table."""

from __future__ import annotations

import argparse
import base64
import io
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from headrace.cli.data import add_data_options, data_options, open_data, refuse_own_data
from headrace.cli.flags import imported, number, raised_by
from headrace.cli.output import Output, visible, write
from headrace.errors import ConfigError, HeadraceError, WriteError

if TYPE_CHECKING:
    from PIL.Image import Image

SUMMARY = "draw what a loader yields: a contact sheet, or a table of texts"
DESCRIPTION = (
    "Draw the first batch that a loader yields in an epoch, after all transforms: images with "
    "their targets and class names, three slices "
    "of volumes, texts with their tokens and padding. The table of texts is printed where no "
    "picture is asked for."
)
EXAMPLES = """\
examples:
  %(prog)s photos/train -o sheet.png --epoch 3
  %(prog)s photos/train -o sheet.png --transform my_project.transforms:augment
  %(prog)s volume.zarr -o slices.png --patch-shape 64
  %(prog)s books.jsonl --count 8
"""
_MOST = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument(
        "path",
        metavar="PATH",
        help="what `headrace.open_dataset` takes: a file, a folder, a glob or a URL",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="PNG",
        help="the picture to write (default: into a terminal that can show it)",
    )
    parser.add_argument(
        "--count",
        type=number(1, _MOST),
        default=24,
        metavar="N",
        help="samples in the batch (default: 24)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=42,
        metavar="N",
        help="of the order and of random transforms (default: 42)",
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
    add_data_options(parser)
    parser.add_argument(
        "--cell",
        type=number(1, _MOST),
        default=160,
        metavar="PIXELS",
        help="of a sample's picture (default: 160)",
    )


def run(given: argparse.Namespace, output: Output) -> int:
    """Takes a batch, and draws it."""
    from headrace.previewing import draw_sheet, preview, table_lines

    options = data_options(given)
    transform = None if given.transform is None else _transform_of(given.transform)
    _check_output(given.output, (given.path, given.targets))
    try:
        shown = preview(
            given.path,
            count=given.count,
            seed=given.seed,
            epoch=given.epoch,
            shuffle=not given.in_order,
            transform=transform,
            opens=lambda path, **others: open_data(path, others),
            **options,
        )
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        if (
            transform is None
            or isinstance(error, HeadraceError)
            or not any("while transforming" in note for note in notes)
        ):
            raise
        raise raised_by(f"--transform {given.transform}", error) from error
    told: dict[str, Any] = {
        "title": shown.title,
        "facts": shown.facts,
        "notes": shown.notes,
        "output": given.output,
    }
    told["samples"] = [
        {
            "index": item.index,
            "where": item.where,
            "caption": item.caption,
            "text": item.text,
            "padding": item.padding,
        }
        for item in shown.items
    ]
    if given.output is not None:
        _save(draw_sheet(shown, cell=given.cell), given.output)
        lines = [
            f"{visible(given.output)}: {len(shown.items):,} samples, {visible(shown.title)}",
            *map(visible, shown.notes),
        ]
    elif shown.is_text or output.as_json or output.quiet:
        lines = [visible(line) for line in table_lines(shown, output.columns)]
    elif (way := _way_of_terminal(output)) is None:
        raise ConfigError("this terminal shows no pictures: pass -o sheet.png")
    else:
        write(way(draw_sheet(shown, cell=given.cell)) + "\n", output.stream)
        lines = [visible(shown.title), *map(visible, shown.notes)]
    output.show(told, lines)
    return 0


def _transform_of(name: str) -> Callable[[Any], Any]:
    transform = imported("--transform", name)
    if not callable(transform):
        raise ConfigError(
            f"--transform {name}: it is {type(transform).__name__}, and can't be called"
        )
    return transform  # type: ignore[no-any-return]


def _check_output(path: str | None, sources: Iterable[str | None]) -> None:
    """Raises an error for what can't be written, or is read itself, before anything is read."""
    if path is None:
        return
    if os.path.splitext(path)[1].lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise ConfigError(f"-o {path}: the picture is a .png, .jpg or .webp")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise WriteError(
            f"-o {path}: the folder {folder} does not exist, or this user may not write to it"
        )
    refuse_own_data("-o", path, sources)


def _save(sheet: Image, path: str) -> None:
    try:
        sheet.save(path)
    except OSError as error:
        raise WriteError(f"{path} can't be written: {error.strerror or error}") from error


# -- terminals that show pictures


def _way_of_terminal(output: Output) -> Callable[[Image], str] | None:
    """How the terminal is told of a picture; None: it shows none, or nobody looks."""
    if not output.is_terminal:
        return None
    if "KITTY_WINDOW_ID" in os.environ or os.environ.get("TERM") in (
        "xterm-kitty",
        "xterm-ghostty",
    ):
        return _for_kitty
    if os.environ.get("TERM_PROGRAM") in ("iTerm.app", "WezTerm"):
        return _for_iterm
    return None


def _png(sheet: Image) -> str:
    data = io.BytesIO()
    sheet.save(data, "png")
    return base64.b64encode(data.getvalue()).decode()


def _for_iterm(sheet: Image) -> str:
    """https://iterm2.com/documentation-images.html"""
    return f"\x1b]1337;File=inline=1;width=auto;preserveAspectRatio=1:{_png(sheet)}\a"


def _for_kitty(sheet: Image) -> str:
    """https://sw.kovidgoyal.net/kitty/graphics-protocol: pieces of 4096 letters, of which all
    but the last say that more comes.
    """
    data = _png(sheet)
    pieces = [data[start : start + 4096] for start in range(0, len(data), 4096)]
    first = "a=T,f=100,"
    return "".join(
        f"\x1b_G{first if not n else ''}m={int(n < len(pieces) - 1)};{piece}\x1b\\"
        for n, piece in enumerate(pieces)
    )
