"""Verifying: what is reported of damaged files. That each flipped bit is found: test_flips.py."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace.datasets import ImageDataset
from headrace.errors import DataNotFoundError, FormatError, MissingNameError, SampleError
from headrace.packing import VerifyResult, pack, verify
from headrace.storage.arrays.packed import CRC, DATA, NAME_OFFSETS, NAMES, OFFSETS, TARGETS

pytestmark = pytest.mark.quick_every(2)


@pytest.fixture
def packed(tiny_photos: Path, tmp_path: Path) -> Path:
    return pack(tiny_photos, tmp_path / "out.h5")


def flip(path: Path, position: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def place(path: Path, name: str) -> int:
    with h5py.File(path) as file:
        return int(file[name].id.get_offset())


def test_a_sound_file(packed: Path) -> None:
    assert verify(packed) == VerifyResult(packed, 4, []) and verify(str(packed)).ok


def test_a_flipped_bit_names_file_row_and_image(packed: Path) -> None:
    with ImageDataset(packed) as dataset:
        start = int(dataset.sample_source._offsets.array[2])
    flip(packed, place(packed, DATA) + start + 30, bit=5)
    result = verify(packed)
    assert not result.ok and [index for index, _, _ in result.bad] == [2]
    _, location, error = result.bad[0]
    assert location == f"{packed}, data, row 2 (noise/noise_000.jpg)" and "wrong checksum" in error
    with ImageDataset(packed) as dataset:
        with pytest.raises(
            SampleError, match=r"out\.h5, data, row 2 \(noise/noise_000\.jpg\): wrong checksum"
        ):
            dataset[2]
        dataset[1], dataset[3]
    with ImageDataset(packed, on_error="skip") as dataset:
        assert len(dataset.__getitems__([1, 2, 3])) == 2


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
    assert error.startswith(
        f"{row}: wrong checksum" if name == DATA else f"{url}: 'names' has a wrong checksum"
    )


@pytest.mark.parametrize("name", [OFFSETS, NAMES, NAME_OFFSETS, TARGETS])
def test_a_flipped_bit_beside_the_samples(packed: Path, name: str) -> None:
    flip(packed, place(packed, name) + 1, bit=1)
    with pytest.raises(FormatError, match=rf"out\.h5: '{name}' has a wrong checksum"):
        verify(packed)
    with pytest.raises(FormatError, match=f"'{name}' has a wrong checksum"):
        ImageDataset(packed)


def test_a_flipped_bit_of_a_checksum(packed: Path) -> None:
    flip(packed, place(packed, CRC) + 4)
    assert [index for index, _, _ in verify(packed).bad] == [1]


def test_a_truncated_file(packed: Path) -> None:
    whole = packed.read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        packed.write_bytes(whole[:size])
        with pytest.raises(FormatError, match=r"out\.h5 is no HDF5 file, or not a whole one"):
            verify(packed)


def change(packed: Path, name: str, value: object) -> None:
    """Another dataset under the name, as a program other than headrace could write it, and no
    checksum that says so.
    """
    with h5py.File(packed, "a") as file:
        said = json.loads(bytes(file.attrs["headrace"]))
        said["checksums"] = {}
        file.attrs["headrace"] = json.dumps(said)
        del file.attrs["headrace_crc32"]
        del file[name]
        if value is not None:
            file[name] = value


def test_parts_that_do_not_fit_each_other(packed: Path, tmp_path: Path) -> None:
    with h5py.File(packed) as file:
        offsets, size = file[OFFSETS][:], len(file[DATA])
    assert np.all(np.diff(offsets) > 0)
    wrong = [
        (OFFSETS, offsets[:-1]),
        (OFFSETS, offsets + 1),
        (OFFSETS, np.array([0, size, 10, 20, size])),
        (OFFSETS, np.zeros(0, np.int64)),
        (NAME_OFFSETS, np.array([0, 1, 2, 3, 4])),
        (DATA, np.zeros(size - 1, np.uint8)),
        (CRC, np.zeros(3, np.uint32)),
    ]
    for number, (name, value) in enumerate(wrong):
        copy = tmp_path / f"{number}.h5"
        shutil.copy(packed, copy)
        change(copy, name, value)
        with pytest.raises(
            FormatError, match=rf"{number}\.h5 is damaged: .*don't fit the 4 samples"
        ):
            verify(copy)


def test_targets_of_another_length(packed: Path) -> None:
    change(packed, TARGETS, np.zeros(3, np.int64))
    with pytest.raises(
        FormatError, match=r"'targets' has shape \(3,\), not one row for each of 4 samples"
    ):
        ImageDataset(packed)


def test_missing_parts(packed: Path) -> None:
    change(packed, OFFSETS, None)
    with pytest.raises(
        MissingNameError,
        match="no dataset 'offsets'; it has: crc32, data, file_crc32, name_offsets, names, targets",
    ):
        verify(packed)


def test_what_headrace_did_not_pack(tmp_path: Path, packed: Path) -> None:
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["data"] = np.zeros((3, 2))
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.zeros(3)
    with pytest.raises(FormatError, match=r"other\.h5 was not packed by headrace"):
        verify(tmp_path / "other.h5")
    (tmp_path / "t.txt").write_text("a text")
    with pytest.raises(FormatError, match="not packed by headrace"):
        verify(tmp_path / "t.txt")
    with pytest.raises(DataNotFoundError, match="not packed by headrace"):
        verify(tmp_path)
    with pytest.raises(FormatError, match=r"plain\.h5 was not packed by headrace"):
        verify(tmp_path / "plain.h5")
    change(packed, CRC, None)
    with pytest.raises(FormatError, match=r"no checksums"):
        verify(packed)
    with pytest.raises(DataNotFoundError, match=r"none\.h5 does not exist"):
        verify(tmp_path / "none.h5")


def test_nothing_stays_open(packed: Path) -> None:
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    verify(packed)
    assert len(before) == (len(os.listdir("/proc/self/fd")) if before else 0)


@pytest.mark.quick_every(1)
def test_a_part_of_another_run_is_not_that_of_the_manifest(
    tiny_photos: Path, tmp_path: Path
) -> None:
    out = pack(tiny_photos, tmp_path / "packed", shard_size="1GB")
    sidecar = out / "part-00000-of-00001.json"
    said = json.loads(sidecar.read_text())
    said["crc32"] ^= 1
    del said["check"]
    sidecar.write_text(json.dumps(said))
    assert [index for index, _, _ in verify(out).bad] == [-1]
