"""Finds what holds a training back, and measures what helps.

Measure what limits a training: the step, the number of workers, reading, decoding, a transform or a
collate function; and what would help, by how much. --apply measures the first advice beside the
loader as it is.

examples:
  %(prog)s photos/train                              the loader of a path, with default options
  %(prog)s train.py:loader --step train.py:step      a loader of a program, with its step
  %(prog)s mytraining:make_loader --step mytraining:step --apply --html profile.html

FILE.py:NAME and MODULE:NAME are imported: keep what begins a training
under `if __name__ == "__main__":`.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from headrace.cli.data import add_data_options, data_options, open_data
from headrace.cli.flags import (
    add_options,
    called,
    check_output,
    imported,
    imported_function,
    is_name,
)
from headrace.cli.output import Output, visible
from headrace.errors import ConfigError, WriteError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="a path, or MODULE:NAME of a loader, of a dataset, or of what returns one",
    )
    options = {
        "step": (str, "MODULE:NAME of the training step, which is called with each batch"),
        "batch_size": (64, "of the loader of a path or a dataset"),
        "seconds": (60.0, "for all of it, about"),
        "apply": (bool, "measure the first advice too"),
        "html": (str, "a self-contained page to write"),
        "plot": (str, "a picture to write (pip install 'headrace[plot]')"),
    }
    add_options(parser, options)
    add_data_options(parser)


def run(given: argparse.Namespace, output: Output) -> int:
    """Profiles, prints the table, and writes page and picture."""
    sources = (given.target, given.targets)
    if given.html is not None:
        check_output("--html", given.html, (".html", ".htm"))
    if given.plot is not None:
        check_output("--plot", given.plot, (".png", ".svg", ".pdf"), sources)
    if given.seconds < 1:
        raise ConfigError("--seconds: nothing can be told in less than 1 second")
    from headrace.profiling import profile_dataloader

    step = None if given.step is None else imported_function("--step", given.step)
    with contextlib.ExitStack() as closing:
        loader = _loader_of(given, data_options(given), closing)
        profile = profile_dataloader(loader, step, given.seconds, apply=given.apply)
    output.show_lines(map(visible, profile.lines()))
    for path, save in ((given.html, profile.save_html), (given.plot, profile.save_plot)):
        if path is not None:
            try:
                save(path)
            except OSError as error:
                raise WriteError(f"{path} can't be written: {error}") from error
            output.show_lines([f"written: {visible(path)}"])
    output.show_json(profile.as_dict())
    return 0


def _loader_of(
    given: argparse.Namespace, options: dict[str, Any], closing: contextlib.ExitStack
) -> Any:
    from torch.utils.data import DataLoader

    from headrace import create_dataloader

    if not is_name(given.target):
        data: Any = closing.enter_context(open_data(given.target, options))
    elif options:
        raise ConfigError(f"{given.target} is a name in a program: leave out the options of data")
    else:
        data = imported("TARGET", given.target)
        is_data = hasattr(data, "__getitem__") or isinstance(data, DataLoader)
        if callable(data) and not is_data:
            data = called(given.target, data)
    if isinstance(data, DataLoader):
        return data
    return closing.enter_context(create_dataloader(data, batch_size=given.batch_size))
