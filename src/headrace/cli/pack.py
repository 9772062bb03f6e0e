"""Packs images, texts or arrays into an HDF5 file, or several.

Pack a folder of images or texts into an HDF5 file, or several, verified, with targets, names and
checksums.

examples:
  %(prog)s photos/train train.h5
      the image files as they are, about as large as the folder
  %(prog)s photos/train train.h5 --store decoded --size 224
      the pixels at 224 x 224: larger, and nothing is left to decode when it is read
  %(prog)s photos/train train.h5 --store decoded --size 224 --compression gzip
      the same in compressed chunks: smaller, slower to read at random,
      well read with shuffle="block"
  %(prog)s photos/train small.h5 --store jpeg --max-size 512
      smaller images of equal aspect: the size with which most train
  %(prog)s street/images street.h5 --targets street/masks
      each image with its mask; with --targets instances.json with its boxes
  %(prog)s photos/train packed --shard-size 1GB --part $SLURM_ARRAY_TASK_ID/64
      one of 64 jobs that pack into the folder `packed`; started again, each goes on where it was
  %(prog)s books tokens.h5 --tokenizer tokenizer.json
      texts as the tokens of a `tokenizers` file; without --tokenizer each character is a token

The result is plain HDF5, for h5py and HDFView too.
In headrace: ImageDataset("train.h5"), TextDataset("tokens.h5")
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headrace.cli.data import add_data_options, data_options, open_data, text_options
from headrace.cli.flags import count
from headrace.cli.output import Output, fields_of
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from headrace.core.dataset import BaseDataset
    from headrace.packing.options import StoreOptions
    from headrace.packing.run import PackResult

COMPRESSIONS = ("gzip", "lz4", "zstd")
_PATIENCE_S, _RETRIES = 10, 3  # of Dask
_OPENED_BY = {"image": "ImageDataset", "text": "TextDataset"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument(
        "src",
        metavar="SRC",
        help="folder of images (class folders give the targets) or texts, glob, URL, or HDF5 file",
    )
    parser.add_argument(
        "dst",
        metavar="DST",
        help="HDF5 file to write, or with --shard-size a folder; what it is in must be there",
    )
    parser.add_argument(
        "--store",
        choices=("encoded", "jpeg", "decoded"),
        help="encoded: the bytes of the image files; jpeg: re-encoded where that is smaller; "
        "decoded: the pixels at --size "
        "(default: as SRC has them, so encoded for a folder)",
    )
    parser.add_argument(
        "--max-size",
        type=int,
        metavar="N",
        help="with --store jpeg: pixels of the longer side at most (default: any)",
    )
    parser.add_argument(
        "--quality",
        type=int,
        default=90,
        metavar="N",
        help="with --store jpeg: 1 to 100 (default: 90)",
    )
    parser.add_argument(
        "--check",
        choices=("decode", "header"),
        default="decode",
        help=(
            "of encoded images: decode each once, or look at its header alone, which is ten times "
            "as fast (default: decode)"
        ),
    )
    parser.add_argument(
        "--size",
        type=_size,
        help="with --store decoded: 224, or HxW such as 192x256 (default: 224)",
    )
    parser.add_argument(
        "--color", choices=("RGB", "L"), help="with --store decoded: colour or grey (default: RGB)"
    )
    parser.add_argument(
        "--compression",
        choices=COMPRESSIONS,
        help=(
            "of arrays and decoded images, in chunks; gzip needs no plugin of h5py (default: none)"
        ),
    )
    parser.add_argument(
        "--chunks",
        type=count,
        metavar="N",
        help="of those: samples a chunk (default: contiguous; compressed, below 1 MiB)",
    )
    add_data_options(parser)
    parser.add_argument(
        "--end-token",
        type=int,
        metavar="ID",
        help="of texts: an id that is put behind each document",
    )
    parser.add_argument(
        "--workers",
        type=count,
        metavar="N",
        help="threads that read and decode (default: one for each core)",
    )
    parts = parser.add_argument_group("several parts")
    parts.add_argument(
        "--shard-size",
        metavar="SIZE",
        help="of a part, such as 1GB; DST is a folder then (default: one file)",
    )
    parts.add_argument(
        "--part", metavar="i/N", help="pack each N-th part from i on (0 to N - 1): one of N jobs"
    )
    parts.add_argument("--parts", metavar="a:b", help="pack the parts a to b - 1")
    parts.add_argument(
        "--processes",
        type=count,
        default=1,
        metavar="N",
        help="that pack parts at the same time (default: 1)",
    )
    parts.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="of a Dask scheduler whose workers pack the parts, such as tcp://node:8786",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="plan, write nothing, and print the parts and the room needed",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace DST if it is there; of several parts the plan",
    )
    parser.add_argument(
        "--no-progress",
        action="store_true",
        help="no progress bars (never shown but on a terminal)",
    )
    parser.set_defaults(program=parser.prog)


def run(given: argparse.Namespace, output: Output) -> int:
    """Packs, and prints what was written and how it is opened."""
    from headrace.packing.part import PartFile
    from headrace.packing.run import left_out_message, pack_dataset

    try:
        if given.dry_run:
            return _plan(given, output)
        if given.shard_size is not None:
            return _pack_parts(given, output)
        if (
            given.part is not None
            or given.parts is not None
            or given.processes != 1
            or given.dask is not None
        ):
            raise ConfigError(
                "--part, --parts, --processes and --dask need --shard-size, such as 1GB"
            )
        # says at once what can't be written, before SRC is searched through
        PartFile(given.dst, given.overwrite)
        with _open(given.src, _options(given), given.end_token is not None) as dataset:
            result = pack_dataset(
                dataset,
                given.dst,
                options=_store_options(given),
                workers=given.workers,
                overwrite=given.overwrite,
                progress=False if given.no_progress else None,
            )
    except KeyboardInterrupt:
        kept = "nothing was written"
        if given.shard_size is not None:
            kept = "finished parts are kept"
        print(f"{given.program}: interrupted, {kept}", file=sys.stderr)
        return 130
    if result.left_out:
        print(f"{given.program}: warning: {left_out_message(result)}", file=sys.stderr)
    output.show(result, [_summary(result), f"open it: {_how_to_open(result)}"])
    return 0


def _plan(given: argparse.Namespace, output: Output) -> int:
    """Prints what would be packed."""
    from headrace.packing import pack

    with _open(given.src, _options(given), given.end_token is not None) as dataset:
        plan = pack(
            dataset,
            given.dst,
            **fields_of(_store_options(given)),
            shard_size=given.shard_size,
            part=given.part,
            parts=given.parts,
            workers=given.workers,
            processes=given.processes,
            overwrite=given.overwrite,
            progress=False if given.no_progress else None,
            dry_run=True,
        )
    output.show(plan, [str(plan)])
    return 0


def _store_options(given: argparse.Namespace) -> StoreOptions:
    from headrace.packing.options import StoreOptions

    return StoreOptions(
        given.store,
        given.max_size,
        given.quality,
        given.check,
        given.end_token,
        given.compression,
        given.chunks,
    )


def _pack_parts(given: argparse.Namespace, output: Output) -> int:
    from headrace.io.paths import redact
    from headrace.packing.api import pack_folder
    from headrace.packing.status import manifest_of

    with (
        _open(given.src, _options(given), given.end_token is not None) as dataset,
        _executor(given.dask) as executor,
    ):
        status = pack_folder(
            dataset,
            given.dst,
            options=_store_options(given),
            shard_size=given.shard_size,
            part=given.part,
            parts=given.parts,
            workers=given.workers,
            processes=given.processes,
            executor=executor,
            storage_options=None,
            overwrite=given.overwrite,
            progress=False if given.no_progress else None,
        )
    opened = (
        [f"open it: headrace.open_dataset({redact(manifest_of(status.folder))!r})"]
        if status.joined
        else []
    )
    output.show(status, [str(status), *opened])
    return 0


@contextlib.contextmanager
def _executor(address: str | None) -> Iterator[Executor | None]:
    """That of a Dask scheduler; None without an address."""
    if address is None:
        yield None
        return
    try:
        from distributed import Client
    except ImportError:
        raise ConfigError(
            "--dask needs the package `distributed`: pip install 'headrace[dask]'"
        ) from None
    try:
        client = Client(address, timeout=_PATIENCE_S)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dask {address}: no scheduler answers there ({error})") from error
    with client:
        yield client.get_executor(retries=_RETRIES)


def _size(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(p.isascii() and p.isdigit() and int(p) > 0 for p in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 224, or HxW such as 192x256")
    return int(parts[0]), int(parts[-1])


def _options(given: argparse.Namespace) -> dict[str, Any]:
    """What `open_source` gets, beside the path.

    Raises:
        ConfigError: an option that would have no effect.
    """
    from headrace.io.paths import redact
    from headrace.storage.hdf5.kind import is_hdf5
    from headrace.storage.hdf5.packed import packed_info

    options = data_options(given)
    texts = text_options(options)
    images = {
        name: value
        for name, value in (("image_size", given.size), ("color", given.color))
        if value is not None
    }
    is_of_images = bool(images) or not {
        "targets",
        "target_name",
        "unused_targets",
        "masks",
    }.isdisjoint(options)
    if given.store != "decoded" and images:
        raise ConfigError(
            "--size and --color change the pixels, and need --store decoded (encoded images stay "
            "as they are)"
        )
    if (texts or given.end_token is not None) and (is_of_images or given.store is not None):
        raise ConfigError(
            "--store, --size, --color, --targets, --target-name and --masks are for images, and "
            "what else is said is for texts"
        )
    if (is_of_images or texts) and is_hdf5(given.src):
        info = packed_info(given.src)
        if texts:
            raise ConfigError(
                f"{redact(given.src)} is no text: --tokenizer, --unit and the like are for texts"
            )
        is_more = bool(images) or not {"targets", "unused_targets", "masks"}.isdisjoint(options)
        if (info is None or info.kind != "image") and is_more:
            raise ConfigError(
                f"--size, --color, --targets and --masks are for images, and {redact(given.src)} "
                "holds arrays"
            )
    return {**options, **images}


def _open(src: str, options: dict[str, Any], are_texts: bool) -> BaseDataset:
    from headrace.packing.run import open_source

    return open_data(src, options, open_source, are_texts)


def _summary(result: PackResult) -> str:
    from headrace.io.paths import redact
    from headrace.memory.budget import format_size

    classes = f" in {result.classes:,} classes" if result.classes else ""
    left_out = f", {len(result.left_out):,} left out" if result.left_out else ""
    rate = result.nbytes / 1e6 / max(result.seconds, 1e-9)
    return (
        f"{redact(result.path)}: {result.samples:,} samples{classes}{left_out}, "
        f"{format_size(result.nbytes)} in "
        f"{result.seconds:.1f} s ({rate:.1f} MB/s), store {result.store}"
    )


def _how_to_open(result: PackResult) -> str:
    from headrace.io.paths import redact
    from headrace.storage.hdf5.packed import packed_info

    info = packed_info(result.path)
    name = _OPENED_BY.get(info.kind if info is not None else "", "HDF5Dataset")
    return f"headrace.{name}({redact(result.path)!r})"
