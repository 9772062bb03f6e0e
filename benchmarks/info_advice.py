"""Is the advice of `headrace info` right?

    python benchmarks/info_advice.py [--seconds 3] [--mb 200] [--only NAME ...] [--work FOLDER]
    [--json]

Writes files that are badly laid out for random rows (and a folder of large photographs), asks
`headrace info --json` what would make them faster, runs the command that it prints, and measures
batches of 64 random samples before and after, in one process, from the page cache. Exit code 1: a
gain is less than was said, or there is no advice.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr
from folders import temporary_folder
from PIL import Image

import headrace

BATCH = 64
_SIDE = 64


def rows(mb: int) -> np.ndarray[Any, Any]:
    """Images of 64 x 64 that can be compressed somewhat, uint8 [rows, 64, 64]."""
    random = np.random.default_rng(0)
    count = max(2048, mb * 1_000_000 // _SIDE**2)
    return (
        random.integers(0, 40, (count, _SIDE, _SIDE), np.uint8) + np.arange(_SIDE, dtype=np.uint8)
    ).astype(np.uint8)


def _hdf5(path: Path, data: Any, **options: Any) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=data, **options)


def tall_gzip(folder: Path, mb: int) -> Path:
    """1,000 rows a chunk, gzip."""
    _hdf5(
        folder / "tall.h5",
        rows(mb),
        chunks=(1000, _SIDE, _SIDE),
        compression="gzip",
        compression_opts=1,
    )
    return folder / "tall.h5"


def columns(folder: Path, mb: int) -> Path:
    """Chunks that cut each row into 16, gzip."""
    _hdf5(
        folder / "columns.h5",
        rows(mb),
        chunks=(512, 16, 16),
        compression="gzip",
        compression_opts=1,
    )
    return folder / "columns.h5"


def guessed(folder: Path, mb: int) -> Path:
    """h5py's own chunks (chunks=True), gzip and shuffle, floats."""
    data = rows(mb // 4).astype(np.float32)
    _hdf5(
        folder / "guessed.h5",
        data,
        chunks=True,
        compression="gzip",
        compression_opts=1,
        shuffle=True,
    )
    return folder / "guessed.h5"


def by_h5py(folder: Path, mb: int) -> Path:
    """A filter that only h5py knows, 200 rows a chunk."""
    _hdf5(
        folder / "scaled.h5", rows(mb).astype(np.int32), chunks=(200, _SIDE, _SIDE), scaleoffset=0
    )
    return folder / "scaled.h5"


def tall_zarr(folder: Path, mb: int) -> Path:
    """Zarr, 2,000 rows a chunk, zstd."""
    data = rows(mb)
    zarr.create_array(
        folder / "tall.zarr", shape=data.shape, chunks=(2000, _SIDE, _SIDE), dtype=data.dtype
    )[:] = data
    return folder / "tall.zarr"


def photographs(folder: Path, mb: int) -> Path:
    """JPEGs of 12 megapixels."""
    (folder / "photos").mkdir()
    random = np.random.default_rng(0)
    for number in range(24):
        small = Image.fromarray(random.integers(0, 255, (75, 100, 3), np.uint8))
        small.resize((4000, 3000), Image.Resampling.BICUBIC).save(
            folder / "photos" / f"{number:02}.jpg", quality=90
        )
    return folder / "photos"


CASES: dict[str, Callable[[Path, int], Path]] = {
    "gzip, 1,000 rows a chunk": tall_gzip,
    "gzip, rows cut into 16": columns,
    "gzip, chunks=True": guessed,
    "scale-offset (h5py reads)": by_h5py,
    "Zarr, 2,000 rows a chunk": tall_zarr,
    "photographs of 12 megapixels": photographs,
}


def rate(path: Path, seconds: float) -> float:
    """Random samples a second."""
    with headrace.open_dataset(path) as dataset:
        count, random, read = len(dataset), np.random.default_rng(1), 0
        batch = min(BATCH, count)
        dataset.__getitems__(random.integers(0, count, batch).tolist())
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            dataset.__getitems__(random.integers(0, count, batch).tolist())
            read += batch
    return read / elapsed


def checked(name: str, folder: Path, mb: int, seconds: float) -> list[dict[str, Any]]:
    """What was said of one case, each piece of advice with a command, and what came of it."""
    path = CASES[name](folder, mb)
    command = [sys.executable, "-m", "headrace"]
    asked = subprocess.run(
        [*command, "info", "--json", str(path)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    found, before = [], rate(path, seconds)
    for advice in json.loads(asked.stdout)["advice"]:
        if not advice["command"]:
            continue
        words = shlex.split(advice["command"])
        assert words[:2] == ["headrace", "pack"]
        subprocess.run(
            [*command, *words[1:], "--no-progress", "-q", "--overwrite"], cwd=folder, check=True
        )
        after, said = rate(folder / words[3], seconds), advice["gain"]
        gain, shown = after / before, advice["command"].replace(f"{folder}/", "")
        found.append(
            {
                "name": name,
                "said": said,
                "before": before,
                "after": after,
                "gain": gain,
                "command": shown,
                "nbytes": os.path.getsize(folder / words[3]),
                "said_nbytes": advice["nbytes"],
                "is_right": gain >= (said or 1.0),
            }
        )
    return found or [{"name": name, "said": None, "gain": None, "command": "", "is_right": False}]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--mb", type=int, default=200, help="of each array, decoded")
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name in given.only:
        with temporary_folder(given.work) as folder:
            some = checked(name, Path(folder), given.mb, given.seconds)
        found += some
        for one in some if not given.json else []:
            if one["gain"] is None:
                print(f"{name:<30} no advice")
                continue
            said = f"at least {one['said']:g}" if one["said"] else "faster"
            rates = f"{one['before']:>9,.0f} -> {one['after']:>9,.0f} samples/s"
            print(
                f"{name:<30} said {said:>14}, is {one['gain']:>7.1f}  ({rates})  "
                f"{'' if one['is_right'] else 'WRONG  '}{one['command']}"
            )
    if given.json:
        print(json.dumps(found, indent=1))
        return 0  # each has "is_right"
    return 0 if all(one["is_right"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
