"""Verifying finds each flipped bit, wherever it lies, and names the sample that it lies in."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from headrace import verify
from headrace.errors import HeadraceError
from tests.packing.cases import CASES, make_case
from tests.packing.shared import flip

PACKS = [case for case in CASES if case[1] != "header"]


class Pack:
    """A sound pack.

    Attributes:
        files: those of it.
        samples: the number of the sample that a byte of a file lies in.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        self.samples = dict(_samples_of([file for file in self.files if file.suffix == ".h5"]))
        assert verify(path).ok

    def check(self, file: Path, place: int, bit: int) -> None:
        """Flips a bit for a while."""
        sound = file.read_bytes()
        at = f"{file.name}, byte {place}, bit {bit}"
        flip(file, place, bit)
        try:
            bad = verify(self.path, progress=False).bad
        except (HeadraceError, OSError) as error:
            assert self.path.name in str(error) and (file, place) not in self.samples, at
        else:
            assert bad, at
            if (file, place) in self.samples:
                assert [index for index, _, _ in bad] == [self.samples[file, place]], at
        finally:
            file.write_bytes(sound)


def _samples_of(files: list[Path]) -> Iterator[tuple[tuple[Path, int], int]]:
    first = 0
    for path in files:
        with h5py.File(path) as file:
            data, count = file["data"], len(file["crc32"])
            if data.chunks is not None:
                continue
            width = data.dtype.itemsize * int(np.prod(data.shape[1:]))
            edges = file["offsets"][:] if "offsets" in file else np.arange(count + 1)
            edges = edges * width + (data.id.get_offset() or 0)
        for number in range(count):
            for place in range(int(edges[number]), int(edges[number + 1])):
                yield (path, place), first + number
        first += count


@pytest.fixture(scope="module", params=PACKS, ids="-".join)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pack:
    pack = Pack(make_case(*request.param, tmp_path_factory.mktemp("flips")).path)
    is_flat = request.param[1] in ("file", "jpeg", "parts", "decoded")
    assert bool(pack.samples) == is_flat
    return pack


@pytest.mark.quick_every(4)
def test_some_bits_of_each_file_are_found(packed: Pack) -> None:
    choose = random.Random(packed.path.name)
    others = [file for file in packed.files if file.suffix != ".h5" and file.stat().st_size]
    for file in [packed.files[-1], *choose.sample(others, min(5, len(others)))]:
        size = file.stat().st_size
        packed.check(file, choose.randrange(size), choose.randrange(8))
        packed.check(file, size - 1, choose.randrange(8))


@pytest.mark.slow
def test_random_bits_are_found(packed: Pack) -> None:
    """Half of them in samples, half anywhere."""
    choose = random.Random(7)
    sizes = [file.stat().st_size for file in packed.files]
    places = sorted(packed.samples)
    for number in range(40):
        if number % 2 and places:
            file, place = choose.choice(places)
        else:
            (file,) = choose.choices(packed.files, sizes)
            place = choose.randrange(file.stat().st_size)
        packed.check(file, place, choose.randrange(8))
    assert verify(packed.path).ok


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_bytes_beside_the_samples_are_protected(packed: Pack) -> None:
    """Headers, gaps between them, and what HDF5 leaves."""
    choose = random.Random(11)
    for file in packed.files:
        step = 23 if file.suffix == ".h5" else 5
        for place in range(choose.randrange(5), file.stat().st_size, step):
            if (file, place) not in packed.samples:
                packed.check(file, place, choose.randrange(8))
