"""Packs a folder of images (or another dataset) into one HDF5 file: the command line of `headrace.pack`.

Exit codes: 0 done; 2 an error, told in one line; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from headrace.errors import ConfigError, HeadraceError
from headrace.memory.budget import format_size
from headrace.packing.part import PartFile
from headrace.packing.run import PackResult, left_out_message, open_source, pack_dataset
from headrace.storage.hdf5_files import is_hdf5
from headrace.storage.packed import packed_info
from headrace.storage.scan import redact

_EXAMPLE = """\
examples:
  %(prog)s photos/train train.h5
      the image files as they are, about as large as the folder
  %(prog)s photos/train train.h5 --store decoded --size 224
      the pixels at 224 x 224: larger, and nothing is left to decode when it is read

The result is plain HDF5, for h5py and HDFView too. In headrace: ImageDataset("train.h5")
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        PartFile(given.dst, given.overwrite)  # says at once what can't be written, before SRC is searched through
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            with open_source(given.src, **_options(given)) as dataset:
                result = pack_dataset(
                    dataset,
                    given.dst,
                    store=given.store,
                    workers=given.workers,
                    overwrite=given.overwrite,
                    progress=False if given.no_progress else None,
                )
    except HeadraceError as error:
        said = " ".join(str(error).split()).replace('pass on_error="skip"', "pass --skip-bad")
        print(f"{parser.prog}: error: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted, nothing was written", file=sys.stderr)
        return 130
    if result.left_out:
        print(f"{parser.prog}: warning: {left_out_message(result)}", file=sys.stderr)
    print(_summary(result))
    print(f"open it: {_how_to_open(result)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Pack a folder of images into one HDF5 file, verified, with targets, names and checksums.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("src", metavar="SRC", help="folder of images (class folders give the targets), glob, URL, or HDF5 file")
    parser.add_argument("dst", metavar="DST", help="HDF5 file to write; its folder must be there")
    parser.add_argument(
        "--store",
        choices=("encoded", "decoded"),
        help="encoded: the bytes of the image files; decoded: the pixels at --size (default: as SRC has them, so encoded for a folder)",
    )
    parser.add_argument("--size", type=_size, help="with --store decoded: 224, or HxW such as 192x256 (default: 224)")
    parser.add_argument("--color", choices=("RGB", "L"), help="with --store decoded: colour or grey (default: RGB)")
    parser.add_argument("--targets", metavar="CSV", help="CSV file of rows file,target, in place of class folders")
    parser.add_argument("--skip-bad", action="store_true", help="leave out images that can't be read (default: stop at the first)")
    parser.add_argument("--workers", type=_count, metavar="N", help="threads that read and decode (default: one for each core)")
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it is there")
    parser.add_argument("--no-progress", action="store_true", help="no progress bars (never shown but on a terminal)")
    return parser


def _size(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(p.isascii() and p.isdigit() and int(p) > 0 for p in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 224, or HxW such as 192x256")
    return int(parts[0]), int(parts[-1])


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads: write 1 or more")
    return int(text)


def _options(given: argparse.Namespace) -> dict[str, Any]:
    """What `open_source` gets, beside the path.

    Raises:
        ConfigError: an option that would have no effect.
    """
    named = {"image_size": given.size, "color": given.color, "targets": given.targets}
    options = {name: value for name, value in named.items() if value is not None}
    if given.store != "decoded" and (given.size or given.color):
        raise ConfigError("--size and --color change the pixels, and need --store decoded (encoded images stay as they are)")
    if options and is_hdf5(given.src):
        info = packed_info(given.src)
        if info is None or info.kind != "image":
            raise ConfigError(f"--size, --color and --targets are for images, and {redact(given.src)} holds arrays")
    return {**options, "on_error": "skip"} if given.skip_bad else options


def _summary(result: PackResult) -> str:
    classes = f" in {result.classes:,} classes" if result.classes else ""
    left_out = f", {len(result.left_out):,} left out" if result.left_out else ""
    rate = result.nbytes / 1e6 / max(result.seconds, 1e-9)
    return (
        f"{redact(result.path)}: {result.samples:,} samples{classes}{left_out}, {format_size(result.nbytes)} in "
        f"{result.seconds:.1f} s ({rate:.1f} MB/s), store {result.store}"
    )


def _how_to_open(result: PackResult) -> str:
    info = packed_info(result.path)
    name = "ImageDataset" if info is not None and info.kind == "image" else "HDF5Dataset"
    return f"headrace.{name}({redact(result.path)!r})"


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    print(f"convert_to_h5: warning: {' '.join(str(message).split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
