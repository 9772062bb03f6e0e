"""`headrace profile`: what holds a training back, and what would help, by how much."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from headrace.cli.data import add_data_options, data_options, open_data, refuse_own_data
from headrace.cli.flags import count, imported, is_name, raised_by, seconds
from headrace.cli.output import Output, visible
from headrace.errors import AccessError, ConfigError, HeadraceError, WriteError

SUMMARY = "find what holds a training back, and measure what helps"
DESCRIPTION = (
    "Measure what holds a training back: the step, the number of workers, reading, decoding, a "
    "transform or a collate function; and what "
    "would help, by how much. --apply measures the first advice beside the loader as it is."
)
EXAMPLES = """\
examples:
  %(prog)s photos/train                              the loader of a path, with default options
  %(prog)s train.py:loader --step train.py:step      a loader of a program, with its step
  %(prog)s mytraining:make_loader --step mytraining:step --apply --html profile.html

FILE.py:NAME and MODULE:NAME are imported: keep what begins a training
under `if __name__ == "__main__":`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="a path, or MODULE:NAME of a loader, of a dataset, or of what returns one",
    )
    parser.add_argument(
        "--step",
        metavar="MODULE:NAME",
        help="a function that is called with each batch: the training step",
    )
    parser.add_argument(
        "--batch-size",
        type=count,
        default=64,
        metavar="N",
        help="of the loader of a path or a dataset (default: 64)",
    )
    parser.add_argument(
        "--seconds",
        type=seconds,
        default=60.0,
        metavar="S",
        help="for all of it, about (default: 60)",
    )
    parser.add_argument("--apply", action="store_true", help="measure the first advice too")
    parser.add_argument(
        "--html", metavar="FILE", help="write a page that needs nothing from elsewhere"
    )
    add_data_options(parser)
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="write a picture, .png, .svg or .pdf (pip install 'headrace[plot]')",
    )


def run(given: argparse.Namespace, output: Output) -> int:
    """Profiles, prints the table, and writes page and picture."""
    if given.html is not None:
        _check_written("--html", given.html, (".html", ".htm"), given)
    if given.plot is not None:
        _check_written("--plot", given.plot, (".png", ".svg", ".pdf"), given)
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                "--plot needs matplotlib: pip install 'headrace[plot]', or use --html"
            )
    if given.seconds < 1:
        raise ConfigError("--seconds: nothing can be told in less than 1 second")
    from headrace.profiling import profile_dataloader

    step = None if given.step is None else _step_of(given.step)
    loader, opened = _loader_of(given.target, given.batch_size, data_options(given))
    try:
        profile = profile_dataloader(loader, step, given.seconds, apply=given.apply)
    finally:
        for closable in opened:
            closable.close()
    output.show_lines(map(visible, profile.lines()))
    written = []
    for name, save in (("html", profile.save_html), ("plot", profile.save_plot)):
        path = getattr(given, name)
        if path is not None:
            try:
                save(path)
            except OSError as error:
                raise WriteError(f"{path} can't be written: {error.strerror or error}") from error
            written.append(path)
    if written:
        output.show_lines([f"written: {', '.join(map(visible, written))}"])
    output.show_json(profile.as_dict())
    return 0


def _check_written(
    option: str, path: str, endings: tuple[str, ...], given: argparse.Namespace
) -> None:
    """Raises an error for a file that can't be written or is data, before anything is measured."""
    if not path.lower().endswith(endings) or os.path.isdir(path):
        raise ConfigError(f"{option} {path}: name a file that ends with {' or '.join(endings)}")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ConfigError(
            f"{option}: the folder {folder} does not exist: create it, or name another one"
        )
    if not os.access(folder, os.W_OK):
        raise AccessError(
            f"{option}: this user may not write to the folder {folder}: name another one"
        )
    if option == "--plot":
        refuse_own_data(option, path, (given.target, given.targets))


def _loader_of(target: str, batch_size: int, options: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The loader that is profiled, and what was opened for it here."""
    from torch.utils.data import DataLoader

    from headrace import create_dataloader

    if not is_name(target):
        dataset = open_data(target, options)
        loader = create_dataloader(dataset, batch_size=batch_size)
        return loader, [loader, dataset]
    if options:
        raise ConfigError(
            f"{target} is a name in a program, and options of data are for a path: leave them out"
        )
    found = imported("TARGET", target)
    if callable(found) and not hasattr(found, "__getitem__") and not isinstance(found, DataLoader):
        found = _call(target, found)
    if isinstance(found, DataLoader):
        return found, []
    loader = create_dataloader(found, batch_size=batch_size)
    return loader, [loader]


def _step_of(target: str) -> Callable[[Any], Any]:
    if not is_name(target):
        raise ConfigError(
            f"--step: {target!r} names no function: write MODULE:NAME or FILE.py:NAME"
        )
    function = imported("--step", target)
    if not callable(function):
        raise ConfigError(f"--step: {target} is no function, but a {type(function).__name__}")
    return lambda batch: _call(target, function, batch)


def _call(target: str, function: Callable[..., Any], *given: Any) -> Any:
    """Calls a function of the user's; what it raises is the user's."""
    try:
        return function(*given)
    except HeadraceError:
        raise
    except Exception as error:
        raise raised_by(target, error) from error
