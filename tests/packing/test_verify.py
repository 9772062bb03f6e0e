"""Verifying finds each flipped bit, and names the sample that it lies in."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace.datasets.arrays import HDF5Dataset
from headrace.datasets.image.image import ImageDataset
from headrace.errors import (
    ConfigError,
    DataNotFoundError,
    FormatError,
    HeadraceError,
    MissingNameError,
    SampleError,
)
from headrace.formats.arrays.packed import CRC, DATA, NAME_OFFSETS, NAMES, OFFSETS, TARGETS
from headrace.packing import VerifyResult, pack, pack_status, verify
from headrace.packing.parts import Sidecar
from tests.packing.cases import CASES, make_case
from tests.packing.shared import flip, replace_array
from tests.servers.plain import plain_server

pytestmark = pytest.mark.quick_every(2)


@pytest.fixture
def packed(tiny_photos: Path, tmp_path: Path) -> Path:
    return Path(pack(tiny_photos, tmp_path / "out.h5"))


def place(path: Path, name: str) -> int:
    with h5py.File(path) as file:
        return int(file[name].id.get_offset())


def test_a_sound_file(packed: Path) -> None:
    before = os.listdir("/proc/self/fd")
    assert verify(packed) == VerifyResult(packed, 4, []) and verify(str(packed)).ok
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_flipped_bit_names_file_row_and_image(packed: Path) -> None:
    with h5py.File(packed) as file:
        begin = int(file[OFFSETS][2])
    flip(packed, place(packed, DATA) + begin + 30, bit=5)
    result = verify(packed)
    location = f"{packed}, data, row 2 (noise/noise_000.jpg)"
    assert not result.ok and [bad[:2] for bad in result.bad] == [(2, location)]
    assert "wrong checksum" in result.bad[0][2]
    with ImageDataset(packed) as dataset:
        with pytest.raises(SampleError, match=r"row 2 \(noise/noise_000\.jpg\): wrong checksum"):
            dataset[2]
        assert dataset[1][0].shape == dataset[3][0].shape
    with ImageDataset(packed, on_error="skip") as dataset:
        assert len(dataset.__getitems__([1, 2, 3])) == 2
    with pytest.raises(FormatError, match="wrong checksum"):
        HDF5Dataset(packed).sample_source.read([2])


@pytest.mark.quick_every(1)
@pytest.mark.parametrize("name", [DATA, NAMES])
def test_damage_in_a_store_is_named_by_its_url(
    tiny_photos: Path, tmp_path: Path, memory: Any, name: str
) -> None:
    """And not by the temporary file that a part is fetched into."""
    out = pack(tiny_photos, "memory://verify/packed", shard_size="1GB")
    (part,) = (path for path in memory.store if path.endswith(".h5"))
    memory.get_file(part, str(tmp_path / "part.h5"))
    flip(tmp_path / "part.h5", place(tmp_path / "part.h5", name))
    memory.put_file(str(tmp_path / "part.h5"), part)
    ((index, location, error),) = verify(out).bad
    url = "memory://verify/packed/part-00000-of-00001.h5"
    row = f"{url}, data, row 0 (circle/circle_000.jpg)"
    assert (index, location) == ((0, row) if name == DATA else (-1, url))
    assert error.startswith(row if name == DATA else f"{url}: 'names'")


@pytest.mark.parametrize("name", [OFFSETS, NAMES, NAME_OFFSETS, TARGETS])
def test_a_flipped_bit_beside_the_samples(packed: Path, name: str) -> None:
    flip(packed, place(packed, name) + 1, bit=1)
    for opened in (verify, ImageDataset):
        with pytest.raises(FormatError, match=f"'{name}' has a wrong checksum"):
            opened(packed)


def test_a_flipped_bit_of_a_checksum_and_in_a_gap(packed: Path) -> None:
    flip(packed, place(packed, DATA) - 1)
    ((index, location, _),) = verify(packed).bad
    assert (index, location) == (-1, str(packed))
    flip(packed, place(packed, CRC) + 4)
    assert [index for index, _, _ in verify(packed).bad] == [1]


def test_a_truncated_file(packed: Path) -> None:
    whole = packed.read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        packed.write_bytes(whole[:size])
        with pytest.raises(FormatError, match=r"out\.h5"):
            verify(packed)


def test_arrays_that_do_not_fit_each_other(packed: Path, tmp_path: Path) -> None:
    with h5py.File(packed) as file:
        offsets, size = file[OFFSETS][:], len(file[DATA])
    wrong: list[tuple[str, Any]] = [
        (OFFSETS, offsets[:-1]),
        (OFFSETS, offsets + 1),
        (OFFSETS, np.array([0, size, 10, 20, size])),
        (OFFSETS, np.zeros(0, np.int64)),
        (NAME_OFFSETS, np.array([0, 1, 2, 3, 4])),
        (DATA, np.zeros(size - 1, np.uint8)),
        (CRC, np.zeros(3, np.uint32)),
        (TARGETS, np.zeros(3, np.int64)),
    ]
    for number, (name, value) in enumerate(wrong):
        copy = Path(shutil.copy(packed, tmp_path / f"{number}.h5"))
        replace_array(copy, name, value)
        opened = ImageDataset if name == TARGETS else verify
        with pytest.raises(FormatError, match=rf"{number}\.h5"):
            opened(copy)
    replace_array(packed, OFFSETS, None)
    with pytest.raises(MissingNameError, match="'offsets'"):
        verify(packed)


def test_what_headrace_did_not_pack(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.txt").write_text("a text")
    for name in ("data", "x"):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file[name] = np.zeros((3, 2))
    replace_array(packed, CRC, None)
    errors = {
        **{"data.h5": FormatError, "x.h5": FormatError, "t.txt": FormatError},
        **{"out.h5": FormatError, "empty": DataNotFoundError, "none.h5": DataNotFoundError},
    }
    for name, error in errors.items():
        with pytest.raises(error, match=name):
            verify(tmp_path / name)


# --- parts ----------------------------------------------------------------------------------------


@pytest.fixture
def parts(photos: Path, tmp_path: Path) -> Path:
    return Path(pack(photos, tmp_path / "parts", shard_size=16_000))


def test_web_servers_list_no_sizes(parts: Path) -> None:
    with plain_server(parts.parent) as url:
        for asks in (verify, pack_status):
            with pytest.raises(ConfigError, match="HTTP neither writes files nor lists"):
                asks(f"{url}/parts")


def test_a_part_of_another_run_is_not_that_of_the_manifest(
    tiny_photos: Path, tmp_path: Path
) -> None:
    out = pack(tiny_photos, tmp_path / "packed", shard_size="1GB")
    sidecar = out / "part-00000-of-00001.json"
    said = json.loads(sidecar.read_text())
    del said["check"]
    sidecar.write_bytes(Sidecar(**{**said, "crc32": said["crc32"] ^ 1}).text)
    assert [index for index, _, _ in verify(out).bad] == [-1]


# --- each kind of pack ----------------------------------------------------------------------------

PACKS = [case for case in CASES if case[1] != "header"]


class Pack:
    """A sound pack: its files, and the number of the sample that a byte of a file lies in."""

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
def any_pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pack:
    pack = Pack(make_case(*request.param, tmp_path_factory.mktemp("flips")).path)
    is_flat = request.param[1] in ("file", "jpeg", "parts", "decoded")
    assert bool(pack.samples) == is_flat
    return pack


@pytest.mark.quick_every(5)
def test_some_bits_of_each_file_are_found(any_pack: Pack) -> None:
    choose = random.Random(any_pack.path.name)
    others = [file for file in any_pack.files if file.suffix != ".h5" and file.stat().st_size]
    for file in [any_pack.files[-1], *choose.sample(others, min(5, len(others)))]:
        size = file.stat().st_size
        any_pack.check(file, choose.randrange(size), choose.randrange(8))
        any_pack.check(file, size - 1, choose.randrange(8))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "count",
    [pytest.param(40, marks=pytest.mark.slow), pytest.param(1500, marks=pytest.mark.nightly)],
)
def test_random_bits_are_found(any_pack: Pack, count: int) -> None:
    """Half of them in samples, half anywhere: headers, gaps, and what HDF5 leaves."""
    choose = random.Random(7)
    sizes = [file.stat().st_size for file in any_pack.files]
    places = sorted(any_pack.samples)
    for number in range(count):
        if number % 2 and places:
            file, place = choose.choice(places)
        else:
            (file,) = choose.choices(any_pack.files, sizes)
            place = choose.randrange(file.stat().st_size)
        any_pack.check(file, place, choose.randrange(8))
    assert verify(any_pack.path).ok
