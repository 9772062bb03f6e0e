"""The verbs that run a loader: one draws what it yields, two measure it."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

from headrace.cli.flags import (
    PATH,
    Verb,
    called,
    check_output,
    data_options,
    imported,
    imported_function,
    is_name,
)
from headrace.cli.output import Output, fields_of, visible
from headrace.errors import ConfigError, WriteError

if TYPE_CHECKING:
    from headrace.profiling.compare import ModeRate

MODES = ("lazy", "cached", "eager", "streaming")


def preview_verb(given: argparse.Namespace, output: Output) -> int:
    """Draws what a loader yields: a contact sheet, or a table of texts.

    Draw the first batch that a loader yields in an epoch, after all transforms: images with their
    targets and class names, three slices of volumes, texts with their tokens and padding.

    examples:
      %(prog)s photos/train -o sheet.png --epoch 3
      %(prog)s photos/train -o sheet.png --transform my_project.transforms:augment
      %(prog)s volume.zarr -o slices.png --patch-shape 64
      %(prog)s books.jsonl --count 8
    """
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
        raise ConfigError("these samples are not texts: pass -o sheet.png to draw them")
    samples = [fields_of(item) for item in shown.items]
    for sample in samples:
        for name in ("value", "target", "boxes"):
            del sample[name]
    told = {"title": shown.title, "batch": shown.batch, "notes": shown.notes, "samples": samples}
    output.show({**told, "output": given.output}, map(visible, lines))
    return 0


def bench_verb(given: argparse.Namespace, output: Output) -> int:
    """Measures how fast a path loads on this machine, in each loading mode.

    Measure how fast this machine loads a path: each loading mode, the time to the first batch, and
    how fast the files alone are read. It takes about a minute, and runs no training step.

    examples:
      %(prog)s photos/train
      %(prog)s train.h5 --batch-size 256 --workers 4 --mode cached --mode eager --seconds 20
    """
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


def profile_verb(given: argparse.Namespace, output: Output) -> int:
    """Finds what limits training speed, and measures what helps.

    Measure what limits a training: the step, the number of workers, reading, decoding, a transform
    or a collate function. Predict what would help, and by how much. --apply measures the first
    advice next to the loader as it is.

    examples:
      %(prog)s photos/train                              the loader of a path, with default options
      %(prog)s train.py:loader --step train.py:step      a loader of a program, with its step
      %(prog)s mytraining:make_loader --step mytraining:step --apply --html profile.html

    FILE.py:NAME and MODULE:NAME are imported: put the code that starts a training
    under `if __name__ == "__main__":`.
    """
    if given.html is not None:
        check_output("--html", given.html, (".html", ".htm"))
    if given.plot is not None:
        sources = (given.target, given.targets)
        check_output("--plot", given.plot, (".png", ".svg", ".pdf"), sources)
    if given.seconds < 1:
        raise ConfigError("--seconds must be at least 1")
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

    from headrace import create_dataloader, open_dataset

    if not is_name(given.target):
        data: Any = closing.enter_context(open_dataset(given.target, **options))
    elif options:
        raise ConfigError(f"{given.target} names Python code: leave out the options of data")
    else:
        data = imported("TARGET", given.target)
        is_data = hasattr(data, "__getitem__") or isinstance(data, DataLoader)
        if callable(data) and not is_data:
            data = called(given.target, data)
    if isinstance(data, DataLoader):
        return data
    return closing.enter_context(create_dataloader(data, batch_size=given.batch_size))


VERBS = {
    "preview": Verb(
        preview_verb,
        {
            "path": PATH,
            "-o --output": ({"metavar": "PNG"}, "picture to write (default: print texts)"),
            "count": (24, "samples in the batch"),
            "seed": (int, "seed of the order and of random transforms (default: 42)"),
            "epoch": (int, "epoch whose first batch is shown (default: 0)"),
            "in_order": (bool, "show the first samples, not shuffled"),
            "transform": (str, "transform, as MODULE:NAME or FILE.py:NAME"),
            "cell": (160, "size of a sample's picture in pixels"),
        },
        opens_data=True,
    ),
    "bench": Verb(
        bench_verb,
        {
            "path": PATH,
            "--mode": (
                {"action": "append", "choices": MODES, "dest": "modes"},
                "loading mode to measure; repeat for several (default: all)",
            ),
            "batch_size": (64, "samples per batch"),
            "workers": (int, "worker processes (default: what a loader would choose)"),
            "seconds": (60.0, "time for all modes together, about"),
            "dataset_name": (str, "array of HDF5 or Zarr to read"),
            "encoding": (str, "encoding of texts (default: utf-8)"),
        },
    ),
    "profile": Verb(
        profile_verb,
        {
            "target": (
                {"metavar": "TARGET"},
                "a path, or MODULE:NAME of a loader, dataset, or function that returns one",
            ),
            "step": (str, "training step, as MODULE:NAME of a function of a batch"),
            "batch_size": (64, "samples per batch, of a path or a dataset"),
            "seconds": (60.0, "time for the whole profile, about"),
            "apply": (bool, "measure the first advice too"),
            "html": (str, "self-contained HTML page to write"),
            "plot": (str, "picture to write (pip install 'headrace[plot]')"),
        },
        opens_data=True,
    ),
}
