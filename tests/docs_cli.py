"""Makes the outputs of docs/cli.md by running the commands that stand there.

    python -m tests.docs_cli

A block of the page that begins with ``$ headrace`` is run in a folder with the data of `make_data`,
with plain text and 100 columns; all that it prints follows. Of commands that measure this machine
(`VOLATILE`) the numbers differ from run to run: only that they run is tested.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import zarr

from headrace.cli.main import main
from tests.conftest import make_photos

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
VOLATILE = ("bench", "env", "cache")
_BLOCK = re.compile(r"```console\n(\$ headrace .*?\n)```", re.DOTALL)


def make_data(folder: Path) -> None:
    """The files that the page speaks of."""
    make_photos(folder / "photos")
    random, book = np.random.default_rng(0), folder / "books"
    with h5py.File(folder / "train.h5", "w") as file:
        data = random.integers(0, 30, (24_000, 64, 64), np.uint8)
        file.create_dataset(
            "images", data=data, chunks=(1000, 64, 64), compression="gzip", compression_opts=1
        )
        file["labels"] = np.arange(24_000) % 3
        file["meta/names"] = [f"image {number}" for number in range(100)]
    volume = zarr.create_array(
        folder / "volume.zarr",
        shape=(96, 128, 128),
        chunks=(64, 64, 64),
        dtype="u2",
        dimension_names=("z", "y", "x"),
    )
    volume[:] = random.integers(0, 30, (96, 128, 128))
    book.mkdir()
    (book / "0.txt").write_text("The mill stands.")
    (book / "1.txt").write_text("The wheel turns in the stream.")
    (book / "2.txt").write_text("Water runs down the headrace.")


def output_of(command: str) -> str:
    """What a command prints, its errors among it."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        contextlib.suppress(SystemExit),
    ):
        main(shlex.split(command)[1:])
    shown = printed.getvalue().replace(os.getcwd(), "/home/me")
    return re.sub(r"[\d.]+ s \([\d.]+ MB/s\)", "0.1 s (60.0 MB/s)", shown)


def pages() -> Iterator[tuple[str, str, str]]:
    """Of each block the command, what the page shows, and what it prints now."""
    for block in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        line, _, shown = block.partition("\n")
        yield line.removeprefix("$ "), shown, output_of(line.removeprefix("$ "))


def write() -> None:
    """Writes the outputs into the page."""
    text = PAGE.read_text(encoding="utf-8")
    for command, shown, printed in pages():
        text = text.replace(f"$ {command}\n{shown}```", f"$ {command}\n{printed}```", 1)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        os.environ.update(COLUMNS="100", XDG_CACHE_HOME=place)
        make_data(Path(place))
        write()
