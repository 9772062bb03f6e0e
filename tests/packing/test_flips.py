"""Verifying finds each flipped bit, wherever it lies, and names the sample that it lies in."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Dataset

from headrace import ImageDataset, TextDataset, pack, verify
from headrace.errors import HeadraceError
from tests.data.labelled import make_coco, make_masks, save_mask
from tests.data.make import make_photos


class Ragged(Dataset[Any]):
    """Arrays of any length, with a target each."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.full((index % 4, 3), index, np.int16), index


class Pack(NamedTuple):
    """A sound pack, and which bytes are those of a sample."""

    path: Path
    samples: dict[tuple[Path, int], int]
    """The number of the sample that a byte of a file lies in."""

    def files(self) -> list[Path]:
        return (
            [self.path]
            if self.path.is_file()
            else sorted(path for path in self.path.rglob("*") if path.is_file())
        )


def _words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def _with_masks(photos: Path) -> ImageDataset:
    folder = make_masks(photos.parent / "masks", 12)
    for path in (folder / "masks").glob("*/*"):  # all of 8 bits
        save_mask(path, np.asarray(Image.open(path)), "L")
    return ImageDataset(folder / "images", targets=folder / "masks", image_size=6)


def _with_boxes(photos: Path) -> ImageDataset:
    folder = make_coco(photos.parent / "boxes", 12)
    return ImageDataset(folder / "images", targets=folder / "instances.json", masks=True)


def _with_columns(photos: Path) -> ImageDataset:
    names = sorted(path.relative_to(photos).as_posix() for path in photos.glob("*/*"))
    return ImageDataset(
        photos,
        targets={
            name: {"kind": number % 3, "height": number / 4} for number, name in enumerate(names)
        },
    )


Make = Callable[[Path, Path, Any], Path]
PACKS: dict[str, Make] = {
    "encoded": lambda photos, out, how: pack(photos, out, **how),
    "jpeg": lambda photos, out, how: pack(photos, out, store="jpeg", max_size=24, **how),
    "decoded": lambda photos, out, how: pack(
        ImageDataset(photos, image_size=6), out, store="decoded", **how
    ),
    "masks": lambda photos, out, how: pack(_with_masks(photos), out, **how),
    "masks decoded": lambda photos, out, how: pack(
        _with_masks(photos), out, store="decoded", **how
    ),
    "boxes": lambda photos, out, how: pack(_with_boxes(photos), out, **how),
    "columns": lambda photos, out, how: pack(_with_columns(photos), out, **how),
    "ragged": lambda photos, out, how: pack(Ragged(), out, **how),
    "chunks": lambda photos, out, how: pack(
        ImageDataset(photos, image_size=6), out, store="decoded", chunks=5, **how
    ),
    "gzip": lambda photos, out, how: pack(
        ImageDataset(photos, image_size=6),
        out,
        store="decoded",
        compression="gzip",
        chunks=5,
        **how,
    ),
    "zarr": lambda photos, out, how: pack(photos, out, format="zarr", **how),
    "zarr columns": lambda photos, out, how: pack(_with_columns(photos), out, format="zarr", **how),
    "zarr decoded": lambda photos, out, how: pack(
        ImageDataset(photos, image_size=6), out, store="decoded", format="zarr", **how
    ),
    "tokens": lambda photos, out, how: pack(
        TextDataset(
            photos / "lines.txt", unit="line", tokenizer=_words, cache_dir=out.parent / "cache"
        ),
        out,
        **how,
    ),
}
PARTS = {
    "jpeg": 2000,
    "ragged": 40,
    "tokens": 30,
    **dict.fromkeys(("encoded", "masks", "boxes", "columns", "zarr", "zarr columns"), 3000),
}
"""Bytes a part; others: 500."""


def _samples_of(files: list[Path]) -> Iterator[tuple[tuple[Path, int], int]]:
    first = 0
    for path in files:
        if path.suffix != ".h5":
            continue
        with h5py.File(path) as file:
            data, count = file["data"], len(file["crc32"])
            if data.chunks is not None:
                continue
            begin, width = (
                data.id.get_offset() or 0,
                data.dtype.itemsize * int(np.prod(data.shape[1:])),
            )
            edges = (
                file["offsets"][:] if "offsets" in file else np.arange(count + 1)
            ) * width + begin
            for number in range(count):
                for place in range(int(edges[number]), int(edges[number + 1])):
                    yield (path, place), first + number
            first += count


@pytest.fixture(
    scope="module",
    params=[
        (kind, several) for kind in PACKS for several in (False, True)[kind.startswith("zarr") :]
    ],
    ids=str,
)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pack:
    kind, several = request.param
    folder = tmp_path_factory.mktemp("flips")
    photos = make_photos(folder / "photos", per_class=4, size=(20, 30))
    (photos / "lines.txt").write_text("".join(f"{'a ' * (i % 5)}bb\n" for i in range(40)))
    path = PACKS[kind](
        photos,
        folder / ("out" if several else "out.h5"),
        {"shard_size": PARTS.get(kind, 500)} if several else {},
    )
    assert verify(path).ok
    whole = Pack(path, {})
    if several:
        assert len(list(path.glob("part-*.json"))) > 1
    whole.samples.update(_samples_of(whole.files()))
    assert bool(whole.samples) == (
        kind
        in (
            "encoded",
            "jpeg",
            "decoded",
            "masks",
            "masks decoded",
            "boxes",
            "columns",
            "ragged",
            "tokens",
        )
    )
    return whole


def check(packed: Pack, file: Path, place: int, bit: int) -> None:
    """Flips a bit for a while."""
    sound = file.read_bytes()
    try:
        file.write_bytes(sound[:place] + bytes([sound[place] ^ 1 << bit]) + sound[place + 1 :])
        try:
            bad = verify(packed.path, progress=False).bad
        except (HeadraceError, OSError) as error:
            assert packed.path.name in str(error) and (file, place) not in packed.samples, (
                f"{file.name}, byte {place}, bit {bit}: {error}"
            )
        else:
            assert bad, f"{file.name}, byte {place}, bit {bit} was not found"
            if (file, place) in packed.samples:
                assert [index for index, _, _ in bad] == [packed.samples[file, place]], (
                    f"{file.name}, byte {place}"
                )
    finally:
        file.write_bytes(sound)


@pytest.mark.quick_every(2)
def test_some_bits_of_each_file_are_found(packed: Pack) -> None:
    choose = random.Random(str(packed.path.name))
    files = packed.files()
    chosen = [
        files[0],
        *(file for file in files if file.suffix != ".h5" and "part" not in file.name),
        *files[-2:],
    ]
    for file in chosen:
        size = file.stat().st_size
        for place in (choose.randrange(size), size - 1) if size else ():
            check(packed, file, place, choose.randrange(8))


@pytest.mark.slow
def test_hundred_random_bits_are_found(packed: Pack) -> None:
    """Of each pack, so more than 1,000 of all: half of them in samples, half anywhere."""
    choose = random.Random(7)
    files = packed.files()
    sizes, places = [file.stat().st_size for file in files], sorted(packed.samples)
    for number in range(100):
        if number % 2 and places:
            file, place = choose.choice(places)
        else:
            (file,) = choose.choices(files, sizes)
            place = choose.randrange(file.stat().st_size)
        check(packed, file, place, choose.randrange(8))
    assert verify(packed.path).ok


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bytes_beside_the_samples_are_protected(packed: Pack) -> None:
    """Headers, gaps between them, and what HDF5 leaves; of a folder the plan, the manifest and
    one part with its sidecar.
    """
    choose = random.Random(11)
    files = packed.files()
    first = [file for file in files if file.name.startswith("part-00000")]
    for file in (
        files
        if packed.path.is_file()
        else [*(file for file in files if "part" not in file.name), *first]
    ):
        for place in range(
            choose.randrange(5), file.stat().st_size, 5 if file.suffix != ".h5" else 23
        ):
            if (file, place) not in packed.samples:
                check(packed, file, place, choose.randrange(8))


def test_damaged_copy_is_repaired_by_packing_again(tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", per_class=2, size=(20, 30))
    out = Path(pack(photos, tmp_path / "out", shard_size=4000))
    sound = {path.name: path.read_bytes() for path in out.iterdir()}
    part = sorted(out.glob("part-*.h5"))[0]
    part.write_bytes(b"x" + sound[part.name][1:])
    assert not verify(out).ok
    part.unlink()
    pack(photos, out, shard_size=4000)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == sound
    shutil.rmtree(out)
