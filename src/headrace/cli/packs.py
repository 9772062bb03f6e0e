"""The verbs that write, verify and inspect packs."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headrace.cli.flags import PATH, Verb, count, data_options
from headrace.cli.output import Output, exit_code_of, visible
from headrace.errors import ConfigError, HeadraceError, one_line

if TYPE_CHECKING:
    from concurrent.futures import Executor

_SHOWN = 10
_PATIENCE_S, _RETRIES = 10, 3  # of Dask
_OPENED_BY = {"image": "ImageDataset", "text": "TextDataset"}
_OPTIONS: dict[str, tuple[Any, str]] = {
    "store": (
        ("encoded", "jpeg", "decoded"),
        "encoded: keep the bytes of the image files; jpeg: re-encode where that is smaller; "
        "decoded: store pixels at --size (default: as in SRC, encoded for a folder)",
    ),
    "max_size": (count, "with --store jpeg: longest side in pixels (default: any)"),
    "quality": (90, "with --store jpeg: JPEG quality, 1 to 100"),
    "check": (
        ("decode", "header"),
        "how to check encoded images: decode each once, or read only its header, ten times as "
        "fast (default: decode)",
    ),
    "compression": (
        ("gzip", "zstd"),
        "compress arrays and decoded images; h5py reads gzip without a plugin (default: none)",
    ),
    "chunks": (count, "samples per chunk (default: contiguous; if compressed, up to 1 MiB)"),
    "end_token": (int, "id to append to each document of texts"),
    "workers": (count, "threads that read and decode (default: one per core)"),
    "shard_size": (str, "size of a part, such as 1GB; DST is then a folder (default: one file)"),
    "part": (str, "i/N: as job i of N (0 to N - 1), pack every N-th part from part i on"),
    "processes": (1, "processes that pack parts at the same time"),
    "overwrite": (bool, "replace DST if it exists; with --shard-size, replace its plan"),
}
"""The keywords of `headrace.pack` that are flags."""


def pack_verb(given: argparse.Namespace, output: Output) -> int:
    """Packs images, texts or arrays into an HDF5 file, or several.

    Pack a folder of images or texts into one HDF5 file or several, with targets, names and
    checksums, and verify the result.

    examples:
      %(prog)s photos/train train.h5
          the image files as they are, about as large as the folder
      %(prog)s photos/train train.h5 --store decoded --size 224
          the pixels at 224 x 224: larger, but readers decode nothing
      %(prog)s photos/train train.h5 --store decoded --size 224 --compression gzip
          the same in compressed chunks: smaller, slow to read at random,
          fast with shuffle="block"
      %(prog)s photos/train small.h5 --store jpeg --max-size 512
          smaller images of the same aspect, large enough for most trainings
      %(prog)s street/images street.h5 --targets street/masks
          each image with its mask; with --targets instances.json with its boxes
      %(prog)s photos/train packed --shard-size 1GB --part $SLURM_ARRAY_TASK_ID/64
          one of 64 jobs that pack into the folder `packed`; started again, each goes on
      %(prog)s books tokens.h5 --tokenizer tokenizer.json
          texts as the tokens of a `tokenizers` file; without --tokenizer each character is a token

    The result is plain HDF5, for h5py and HDFView too.
    In headrace: ImageDataset("train.h5"), TextDataset("tokens.h5")
    """
    from headrace.formats.resolve.manifests import MANIFEST
    from headrace.io.paths import redact
    from headrace.packing import pack, pack_status
    from headrace.packing.destination import PartFile, destination_of
    from headrace.packing.plan import PackOptions
    from headrace.packing.stored import open_source

    values = {name: getattr(given, name) for name in _OPTIONS}
    options = {name: value for name, value in values.items() if value is not None}
    if given.no_progress:
        options["progress"] = False
    if given.dask is not None and given.shard_size is None:
        raise ConfigError("--dask needs --shard-size, such as 1GB")
    pixels = {"image_size": given.size, "color": given.color}
    pixels = {name: value for name, value in pixels.items() if value is not None}
    if given.store != "decoded" and pixels:
        raise ConfigError(
            "--size and --color need --store decoded: encoded images stay as they are"
        )
    try:
        # says at once what makes no sense or can't be written, before SRC is searched through
        PackOptions(**options)
        if given.shard_size is None:
            PartFile(given.dst, given.overwrite)
        start = time.perf_counter()
        with (
            open_source(given.src, **data_options(given), **pixels) as dataset,
            _executor(given.dask) as executor,
        ):
            packed = pack(dataset, given.dst, dry_run=given.dry_run, executor=executor, **options)
    except KeyboardInterrupt:
        kept = "nothing was written"
        if given.shard_size is not None:
            kept = "finished parts are kept"
        print(f"{given.program}: interrupted, {kept}", file=sys.stderr)
        return 130
    if given.dry_run:
        told = {name: getattr(packed, name) for name in ("kind", "store", "parts")}
        told |= {"samples": packed.count, "nbytes": sum(packed.nbytes)}
        output.show(told, [str(packed), "nothing was written"])
    elif given.shard_size is None:
        _show_packed(packed, time.perf_counter() - start, output)
    else:
        status = pack_status(packed)
        lines = [str(status)]
        if status.joined:
            path = redact(destination_of(status.folder).at(MANIFEST))
            lines.append(f"open it: headrace.open_dataset({path!r})")
        output.show(status, lines)
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
        raise ConfigError(f"--dask {address}: no scheduler answers ({error})") from error
    with client:
        yield client.get_executor(retries=_RETRIES)


def _size(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(p.isascii() and p.isdigit() and int(p) > 0 for p in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: use 224, or HxW such as 192x256")
    return int(parts[0]), int(parts[-1])


def _show_packed(path: Any, seconds: float, output: Output) -> None:
    """Shows what a packed file says of itself."""
    from headrace.formats.hdf5.files import packed_info
    from headrace.io.paths import redact
    from headrace.memory.budget import format_size

    info = packed_info(path)
    assert info is not None
    shown = redact(path)
    nbytes = path.stat().st_size
    number = len(info.classes or ())
    classes = ""
    if number:
        classes = f" in {number:,} classes"
    rate = nbytes / 1e6 / max(seconds, 1e-9)
    lines = [
        f"{shown}: {info.count:,} samples{classes}, {format_size(nbytes)} in {seconds:.1f} s "
        f"({rate:.1f} MB/s), store {info.store}",
        f"open it: headrace.{_OPENED_BY.get(info.kind, 'HDF5Dataset')}({shown!r})",
    ]
    told = {"path": shown, "samples": info.count, "classes": number, "nbytes": nbytes}
    output.show({**told, "kind": info.kind, "store": info.store}, lines)


def verify_verb(given: argparse.Namespace, output: Output) -> int:
    """Reads packed files again and compares each sample with its checksum.

    Read packed files, and compare all samples, names and targets with their checksums.

    examples:
      %(prog)s train.h5 val.h5
      %(prog)s packed            all parts of a folder

    Exit code 1: samples or files are damaged; stdout names them.
    Exit code 2: else, a file can't be read; the others are verified anyway.
    """
    from headrace.io.paths import redact
    from headrace.packing import verify

    results = list[Any]()
    codes = list[int]()
    for path in given.paths:
        try:
            progress = False if given.no_progress else None
            result = verify(path, workers=given.workers, progress=progress)
        except (HeadraceError, OSError) as error:
            if len(given.paths) == 1:
                raise
            message = one_line(error)
            shown = redact(path)
            details = {"type": type(error).__name__, "message": message}
            results.append({"path": shown, "error": details})
            codes.append(exit_code_of(error))
            output.show_lines([f"{visible(shown)}: not verified: {message}"])
            continue
        results.append(result)
        codes.append(0 if result.ok else 1)
        state = f"{len(result.bad):,} damaged" if result.bad else "all sound"
        lines = [f"{visible(result.path)}: {result.samples:,} samples, {state}"]
        for number, location, why in result.bad[:_SHOWN]:
            said = one_line(why).removeprefix(f"{location}: ")
            sample = "" if number < 0 else f"sample {number}, "
            lines.append(f"  {sample}{visible(location)}: {visible(said)}")
        if len(result.bad) > _SHOWN:
            lines.append(f"  and {len(result.bad) - _SHOWN:,} more")
        output.show_lines(lines)
    output.show_json({"ok": not any(codes), "files": results})
    return 1 if 1 in codes else max(codes)


def status_verb(given: argparse.Namespace, output: Output) -> int:
    """Shows which parts of a pack are done, missing or stale.

    Show which parts of a pack are done, missing, or stale (of another plan). No samples are read.

    examples:
      %(prog)s packed
      %(prog)s --json packed | jq .missing

    Exit code 1: parts or the manifest are missing or stale.
    """
    from headrace.packing import pack_status

    status = pack_status(given.path)
    output.show(status, [str(status)])
    return 0 if status.joined else 1


def join_verb(given: argparse.Namespace, output: Output) -> int:
    """Completes a pack whose parts are all done.

    Check the sidecars of all parts, and write the manifest. `headrace pack` does this itself when
    it has packed the last part.

    examples:
      %(prog)s packed              writes packed/manifest.json
      %(prog)s s3://bucket/packed  the same in a bucket

    Exit code 2: a part is missing.
    """
    from headrace.io.paths import redact
    from headrace.packing import join

    manifest = redact(join(given.path))
    output.show({"manifest": manifest}, [manifest])
    return 0


def index_verb(given: argparse.Namespace, output: Output) -> int:
    """Writes an index beside each shard, for reading by URL.

    Write an index beside each shard. The first run by URL then begins in a few round trips.

    examples:
      %(prog)s shards/            every .tar, .h5 and .arrow file below a folder;
                                  upload the .index files with them
      %(prog)s s3://bucket/train  the same in a bucket that may be written to
    """
    from headrace.formats.registry import write_index

    written = [str(index) for path in given.paths for index in write_index(path)]
    output.show({"written": written}, written)
    return 0


_FOLDER = ({"metavar": "FOLDER"}, "DST of `headrace pack --shard-size`")
VERBS = {
    "pack": Verb(
        pack_verb,
        {
            "src": (
                {"metavar": "SRC"},
                "folder of images (in class folders) or texts, glob, URL, or HDF5 file",
            ),
            "dst": (
                {"metavar": "DST"},
                "HDF5 file to write, or with --shard-size a folder; its parent must exist",
            ),
            **_OPTIONS,
            "size": (_size, "with --store decoded: 224, or HxW such as 192x256 (default: 224)"),
            "color": (("RGB", "L"), "with --store decoded: RGB, or L for grey (default: RGB)"),
            "dask": (str, "address of a Dask scheduler; its workers pack the parts"),
            "dry_run": (bool, "print the planned parts, and write nothing"),
            "no_progress": (bool, "hide progress bars (shown only on a terminal)"),
        },
        opens_data=True,
    ),
    "verify": Verb(
        verify_verb,
        {
            "paths": ({"nargs": "+", "metavar": "FILE"}, "a packed file, or a folder of parts"),
            "workers": (count, "threads that read (default: one per core)"),
            "no_progress": (bool, "hide the progress bar (shown only on a terminal)"),
        },
    ),
    "status": Verb(status_verb, {"path": _FOLDER}),
    "join": Verb(join_verb, {"path": _FOLDER}),
    "index": Verb(index_verb, {"paths": ({"nargs": "+", **PATH[0]}, PATH[1])}),
}
