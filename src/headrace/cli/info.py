"""`headrace info`: what a path holds, by which path it is read, and what a random sample costs."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headrace.cli.data import add_data_options, data_options, open_data
from headrace.cli.flags import seconds
from headrace.cli.output import Output, shortened, visible

if TYPE_CHECKING:
    from headrace.core.dataset import BaseDataset
    from headrace.inspecting import Access, Advice, Node, Report

SUMMARY = "show what a file, a folder or a URL holds, and what a random sample costs"
DESCRIPTION = (
    "Show what a path holds: format, samples, arrays with their layout and sizes, classes; by "
    "which path headrace reads it, what a "
    "random sample costs, and what would make that less. Reads headers, and no more data than it "
    "takes to know them."
)
EXAMPLES = """\
examples:
  %(prog)s train.h5                  any HDF5 file, Zarr store, tar, text, image or folder of these
  %(prog)s s3://bucket/volume.zarr   the same by URL
  %(prog)s --json photos | jq .classes

Exit code 1: the data are damaged, empty, or not what their name says.
"""
_BAR = 10  # columns
_CLASSES, _NODES = 12, 60  # that are shown
_RARE = 0.01  # of the bytes of the array of interest: arrays that are smaller cost next to nothing
_NARROW = 72  # columns below which codecs and bars are left out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument("path", metavar="PATH", help="a file, a folder, a glob or a URL")
    add_data_options(parser)
    parser.add_argument(
        "--all",
        action="store_true",
        help=f"show all arrays and classes, and not the first {_NODES} and {_CLASSES}",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=20.0,
        metavar="S",
        help="seconds that a server has to answer (default: 20)",
    )


def run(given: argparse.Namespace, output: Output) -> int:
    """Inspects the path, and prints the report."""
    import headrace
    from headrace.inspecting import inspect
    from headrace.io.remote.options import RemoteOptions

    reach = RemoteOptions(retries=2, deadline=given.timeout)
    report = inspect(given.path, dataset_name=given.dataset_name, reach=reach)
    options = data_options(given)
    if options.keys() - {"dataset_name"}:
        _tell_opened(report, open_data(given.path, options))
    output.show(
        {"headrace": headrace.__version__, **report.as_dict()},
        _Page(report, output, given.all).lines(),
    )
    return 1 if not report.files else 0


def _tell_opened(report: Report, dataset: BaseDataset) -> None:
    """Tells what a dataset with the options that were given says itself: samples, classes, how
    it is opened.
    """
    from collections import Counter

    from headrace.datasets.shards.streaming import StreamingDataset

    with dataset:
        if not isinstance(dataset, StreamingDataset):
            report.samples, report.samples_are, report.samples_estimated = (
                len(dataset),
                "with these options",
                False,
            )
        report.opens_as = f"headrace.{repr(dataset).partition('  # ')[0]}"
        report.fingerprint = dataset.fingerprint
        names, targets = getattr(dataset, "classes", None), dataset.targets
        report.classes = None
        if (
            isinstance(names, list)
            and names
            and getattr(targets, "ndim", 0) == 1
            and targets.dtype.kind in "iu"
        ):
            counts = Counter(targets.tolist())
            report.classes = {name: counts[number] for number, name in enumerate(names)}
            report.classes_are = "targets"


class _Page:
    """A report as lines of text."""

    def __init__(self, report: Report, output: Output, shows_all: bool) -> None:
        from headrace.memory.budget import format_size

        self._report, self._output, self._size = report, output, format_size
        self._classes: int | None = None if shows_all else _CLASSES
        self._nodes: int | None = None if shows_all else _NODES

    def lines(self) -> Iterator[str]:
        report, paint = self._report, self._output.paint
        yield f"{paint(visible(report.path), 'bold')}: {self._headline()}"
        yield from self._facts()
        if report.nodes:
            yield ""
            yield from self._tree()
        if report.classes is not None:
            yield ""
            yield from self._class_bars(report.classes)
        if report.access:
            yield ""
            yield from self._costs()
        if report.advice:
            yield ""
            yield paint("faster", "bold")
            for advice in report.advice:
                yield from self._advice(advice)
        if report.notes:
            yield ""
            for note in report.notes:
                yield from self._wrapped("note", visible(note))

    def _headline(self) -> str:
        report = self._report
        files = f", {report.files:,} files" if report.files != 1 else ""
        about = "about " if report.is_estimate else ""
        size = f", {about}{self._size(report.stored)}" if report.stored is not None else ""
        return f"{report.format}{files}{size}"

    # -- facts

    def _facts(self) -> Iterator[str]:
        report = self._report
        if report.samples is not None:
            about = "about " if report.samples_estimated else ""
            kind = f" ({visible(report.samples_are)})" if report.samples_are else ""
            yield from self._wrapped("samples", f"{about}{report.samples:,}{kind}")
        elif report.samples_are:
            yield from self._wrapped("samples", visible(report.samples_are))
        for name, value in report.details.items():
            if value is not None:
                yield from self._wrapped(visible(name), self._told(name, value))
        if report.opens_as is not None:
            yield from self._wrapped("open it", visible(report.opens_as))
        if report.fingerprint is not None:
            yield from self._wrapped("fingerprint", report.fingerprint)

    def _told(self, name: str, value: Any) -> str:
        if isinstance(value, dict):
            shown = [f"{visible(key)} {self._told(name, one)}" for key, one in value.items()]
            return ", ".join(shown)
        if isinstance(value, list):
            return "; ".join(visible(one) for one in value)
        if isinstance(value, int) and not isinstance(value, bool):
            return self._size(value) if name.endswith("sizes") else f"{value:,}"
        return visible(value)

    def _wrapped(self, name: str, text: str) -> Iterator[str]:
        """A name and what there is to say of it, on as many lines as the terminal needs."""
        room = (self._output.width or 10**6) - 14
        first, *rest = textwrap.wrap(
            text, max(20, room), break_long_words=False, break_on_hyphens=False
        ) or [""]
        yield f"  {self._output.paint(f'{shortened(name, 11):<11}', 'dim')} {first}"
        for line in rest:
            yield f"{'':14}{line}"

    # -- arrays

    def _tree(self) -> Iterator[str]:
        report, output = self._report, self._output
        nodes = report.nodes[: self._nodes]
        sizes = _sizes_of(report.nodes)
        whole = max(1, sizes.get("", 0))
        names = [
            f"{branch}{visible(node.path.rpartition('/')[2] or '/')}"
            for node, branch in zip(nodes, _branches(nodes), strict=True)
        ]
        is_narrow = output.columns < _NARROW
        room = min(max(map(len, names)), output.columns - 22 if is_narrow else output.columns // 3)
        for node, name in zip(nodes, names, strict=True):
            stored = sizes.get(node.path)
            share = 0.0 if stored is None else stored / whole
            about = "~" if node.is_estimate else ""
            size = "?" if stored is None else f"{about}{self._size(stored)}"
            bar = (
                ""
                if is_narrow or stored is None
                else output.paint(("█" * round(share * _BAR)).ljust(_BAR), "cyan") + " "
            )
            told = "" if stored is None else f"{share:5.0%}"
            yield (
                f"{shortened(name, room):<{room}} {size:>10} {told:>5} "
                f"{bar}{'' if is_narrow else self._described(node)}"
            ).rstrip()
            if is_narrow and node.kind != "group":
                yield from self._wrapped("", self._described(node))
        if len(nodes) < len(report.nodes):
            yield f"... and {len(report.nodes) - len(nodes):,} more: --all shows them"

    def _described(self, node: Node) -> str:
        if node.kind == "link":
            return self._output.paint(f"→ {visible(node.details.get('to', ''))}", "dim")
        parts = (
            [visible(node.dtype or ""), str(list(node.shape))]
            if node.kind == "array" and node.shape is not None
            else []
        )
        if node.kind == "array":
            cut = (
                f" {list(node.chunks)}"
                if node.chunks and node.layout in ("chunked", "sharded")
                else ""
            )
            shards = f" in shards {list(node.shards)}" if node.shards else ""
            written = node.chunks_written
            parts.append(f"{node.layout or 'no values'}{cut}{shards}")
            if node.codecs:
                parts.append(" + ".join(node.codecs))
            if written is not None and node.layout == "chunked" and node.nbytes and not written:
                parts.append("nothing written")
        parts += [
            f"{name} {self._told(name, value)}"
            for name, value in node.details.items()
            if name not in ("files", "levels")
        ]
        return visible("  ".join(part for part in parts if part))

    # -- classes

    def _class_bars(self, classes: dict[str, int]) -> Iterator[str]:
        output = self._output
        yield (
            output.paint(f"{len(classes):,} classes", "bold")
            + f" ({visible(self._report.classes_are)})"
        )
        shown = sorted(classes.items(), key=lambda item: (-item[1], item[0]))[: self._classes]
        most, room = (
            max(classes.values(), default=1) or 1,
            min(max((len(visible(name)) for name, _ in shown), default=1), 24),
        )
        widest = max(1, min(2 * _BAR, output.columns - room - 14))
        for name, count in shown:
            bar = output.paint("█" * max(1, round(count / most * widest)) if count else "", "cyan")
            yield f"  {shortened(visible(name), room):<{room}} {count:>9,} {bar}".rstrip()
        if len(shown) < len(classes):
            rest = sum(classes.values()) - sum(count for _, count in shown)
            yield (
                f"  ... and {len(classes) - len(shown):,} more with {rest:,} samples: --all shows "
                "them"
            )

    # -- costs

    def _costs(self) -> Iterator[str]:
        paint, first = self._output.paint, self._report.access[0]
        of = f" of {visible(first.name)}" if first.name else ""
        yield paint(f"{first.sample} at random{of}", "bold")
        yield from self._wrapped("read by", visible(first.way))
        yield from self._wrapped("costs", self._cost(first))
        others = [
            one
            for one in self._report.access[1:]
            if (one.amplification >= 2 or one.by_library) and one.total >= _RARE * first.total
        ]
        for access in others[:_CLASSES]:
            yield from self._wrapped(
                "also", f"{visible(access.name)}: {visible(access.way)}; {self._cost(access)}"
            )

    def _cost(self, access: Access) -> str:
        size = "" if access.nbytes is None else f" for {self._size(access.nbytes)}"
        if access.nbytes is None:
            return f"about {self._size(access.read)} read"
        if not access.chunks:
            pieces = f" in {access.reads:,.0f} pieces" if access.reads > 1 else ""
            return (
                f"nothing is decoded as a whole, about {self._size(access.read)} read{pieces}{size}"
            )
        count = (
            f"{access.chunks:,.0f}"
            if access.chunks == int(access.chunks)
            else f"{access.chunks:,.1f}"
        )
        what = "image" if access.sample == "an image" else "chunk"
        times = f" ({access.amplification:,.0f} times as much)" if access.amplification >= 2 else ""
        decoded = (
            f"{count} {what}{'s' * (access.chunks != 1)} decoded, "
            f"{self._size(access.decoded)}{size}{times}"
        )
        return f"{decoded}; about {self._size(access.read)} read"

    def _advice(self, advice: Advice) -> Iterator[str]:
        paint = self._output.paint
        gain = (
            f": at least {advice.gain:g} times as many random samples a second"
            if advice.gain
            else ""
        )
        size = f"; takes about {self._size(advice.nbytes)}" if advice.nbytes else ""
        yield from self._wrapped("because", f"{visible(advice.why)}{gain}{size}")
        if advice.command or advice.code:
            yield f"  {paint(visible(advice.command or advice.code), 'green')}"


def _sizes_of(nodes: list[Node]) -> dict[str, int]:
    """Stored bytes of arrays, and of groups those of all that is in them."""
    sizes: dict[str, int] = {}
    for node in nodes:
        if node.stored is None or node.kind != "array":
            continue
        path = node.path
        sizes[path] = sizes.get(path, 0) + node.stored
        while path:
            path = path.rpartition("/")[0]
            sizes[path] = sizes.get(path, 0) + node.stored
    return sizes


def _branches(nodes: list[Node]) -> Iterator[str]:
    """What stands before the names of nodes, so that they look like a tree."""
    last: set[str] = set()
    following: set[str] = set()
    for node in reversed(nodes):  # of each group the one that comes last
        parent = node.path.rpartition("/")[0] if node.path else None
        if parent is not None and parent not in following:
            last.add(node.path)
            following.add(parent)
    for node in nodes:
        if not node.path:
            yield ""
            continue
        parts = node.path.split("/")
        above = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        yield "".join("    " if path in last else "│   " for path in above) + (
            "└── " if node.path in last else "├── "
        )
