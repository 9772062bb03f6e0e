"""Uses an installed headrace as a new user would: each mode, a resumption with workers, a pack, the
command. For CI and releases.

python tools/smoke.py  # outside of the checkout, by the Python of the environment that is tried

It needs what `pip install headrace` installs and nothing else.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np
import torch
import zarr
from PIL import Image

import headrace
from headrace import (
    HDF5Dataset,
    ImageDataset,
    TextDataset,
    ZarrDataset,
    create_dataloader,
    pack,
    verify,
)


def make_files(folder: Path) -> None:
    """Photographs, an HDF5 file, a Zarr store and a text, all small."""
    draws = np.random.default_rng(0)
    for number in range(24):
        path = folder / "photos" / ("cat", "dog")[number % 2] / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (48, 64, 3), np.uint8)).save(path)
    rows = draws.normal(size=(64, 5)).astype("f4")
    with h5py.File(folder / "rows.h5", "w") as file:
        file.create_dataset("data", data=rows, chunks=(8, 5), compression="gzip")
    zarr.create_array(folder / "rows.zarr", data=rows, chunks=(8, 5))
    (folder / "text.txt").write_text(
        "".join(f"line {number}\n" for number in range(100)), encoding="utf-8"
    )


def batches_of(dataset: torch.utils.data.Dataset, workers: int = 0) -> list[torch.Tensor]:
    """The inputs of one shuffled epoch."""
    with create_dataloader(
        dataset, batch_size=8, seed=3, num_workers=workers, shuffle=True
    ) as loader:
        return [
            batch[0].clone() if isinstance(batch, list | tuple) else batch.clone()
            for batch in loader
        ]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(
        torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


def check(what: str, passed: bool) -> None:
    print(f"{'ok   ' if passed else 'FAILS'} {what}", flush=True)
    if not passed:
        sys.exit(1)


def main() -> None:
    print(
        f"headrace {headrace.__version__} at {Path(headrace.__file__).parent}, torch "
        f"{torch.__version__}, Python {sys.version.split()[0]}"
    )
    with tempfile.TemporaryDirectory(prefix="headrace-smoke-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        make_files(folder)
        photos = folder / "photos"
        reference = batches_of(ImageDataset(photos, image_size=32))
        for mode in ("eager", "cached", "streaming"):
            check(
                f"images, {mode}: as lazy",
                equal(
                    reference, batches_of(ImageDataset(photos, image_size=32, loading_mode=mode))
                ),
            )
        check(
            "images, two workers: as one process",
            equal(reference, batches_of(ImageDataset(photos, image_size=32), workers=2)),
        )
        with create_dataloader(
            ImageDataset(photos, image_size=32), batch_size=8, seed=3, num_workers=0
        ) as loader:
            next(iter(loader))
            state = loader.state_dict()
        with create_dataloader(
            ImageDataset(photos, image_size=32), batch_size=8, seed=3, num_workers=2
        ) as loader:
            loader.load_state_dict(state)
            check(
                "resumed after one batch",
                equal(reference[1:], [images.clone() for images, _ in loader]),
            )
        arrays = [
            batches_of(HDF5Dataset(folder / "rows.h5", "data")),
            batches_of(ZarrDataset(folder / "rows.zarr")),
        ]
        check("the rows of HDF5 are those of Zarr", equal(*arrays))
        check(
            "lines of a text",
            len(TextDataset(folder / "text.txt", unit="line", cache_dir=folder / "cache")) == 100,
        )
        packed = pack(ImageDataset(photos), folder / "photos.h5", progress=False)
        verify(packed, progress=False)
        check(
            "packed photographs", equal(reference, batches_of(ImageDataset(packed, image_size=32)))
        )
        for arguments in (["--version"], ["info", str(photos)], ["env"]):
            command = Path(sys.executable).with_name("headrace")
            done = subprocess.run(
                [command, *arguments], capture_output=True, text=True, timeout=120
            )
            check(f"headrace {arguments[0]}", done.returncode == 0 and bool(done.stdout.strip()))


if __name__ == "__main__":
    main()
