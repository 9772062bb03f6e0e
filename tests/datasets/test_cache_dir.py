"""What is kept in `cache_dir`: its parents are made, and a full disk is the disk's fault, never
that of the files that are read.
"""

from __future__ import annotations

import errno
import gzip
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest

from headrace import (
    HDF5Dataset,
    HeadraceWarning,
    ImageDataset,
    StreamingDataset,
    TextDataset,
)
from headrace.errors import AccessError
from headrace.io.array_file import ArrayWriter
from headrace.io.resolve import listings
from headrace.storage.hdf5 import chunks
from tests.data.make import make_photos, make_tar

pa = pytest.importorskip("pyarrow")

Opened = Callable[[Path, Path], Any]


def lines(folder: Path, cache_dir: Path) -> Any:
    (folder / "a.txt").write_text("a\nbb\n")
    return len(TextDataset(folder / "a.txt", unit="line", cache_dir=cache_dir)[1]["input_ids"])


def plain_copy(folder: Path, cache_dir: Path) -> Any:
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"a\nbb\n"))
    return len(TextDataset(folder / "a.txt.gz", unit="line", cache_dir=cache_dir)[1]["input_ids"])


def records(folder: Path, cache_dir: Path) -> Any:
    (folder / "a.jsonl").write_text('{"text": "a", "label": 0}\n{"text": "bb", "label": 2}\n')
    return TextDataset(
        folder / "a.jsonl", text_field="text", target_field="label", cache_dir=cache_dir
    ).targets[1]


def tokens(folder: Path, cache_dir: Path) -> Any:
    (folder / "a.txt").write_text("abcd")
    return len(
        TextDataset(folder / "a.txt", unit="file", max_length=2, packing=True, cache_dir=cache_dir)
    )


def tar(folder: Path, cache_dir: Path) -> Any:
    make_tar(folder / "a.tar", [("0.cls", b"2")])
    return int(next(iter(StreamingDataset(str(folder / "a.tar"), cache_dir=cache_dir)))["cls"])


def chunk_table(folder: Path, cache_dir: Path) -> Any:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("data", data=np.arange(4), chunks=(1,), compression="gzip")
    return int(HDF5Dataset(folder / "a.h5", cache_dir=cache_dir)[2])


def listing(folder: Path, cache_dir: Path) -> Any:
    make_photos(folder / "photos", classes=("a", "b"), per_class=1, size=(4, 4))
    return len(ImageDataset(folder / "photos", cache_dir=cache_dir))


KINDS = [lines, plain_copy, records, tokens, tar, chunk_table, listing]


@pytest.fixture(autouse=True)
def _all_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "KEPT_FROM", 1)
    monkeypatch.setattr(listings, "SETTLED_NS", -(10**18))


def test_its_parents_are_made(tmp_path: Path) -> None:
    for kind in KINDS:
        data, cache = tmp_path / kind.__name__ / "data", tmp_path / kind.__name__ / "a" / "b"
        data.mkdir(parents=True)
        assert kind(data, cache) == 2, kind
        assert any(path.suffix == ".bin" for path in cache.iterdir()), kind


FULL = [(kind, errno.ENOSPC) for kind in KINDS] + [(lines, errno.EDQUOT), (tar, errno.EROFS)]


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for turn, (kind, number) in enumerate(FULL):
        full = OSError(number, os.strerror(number))
        monkeypatch.setattr(ArrayWriter, "_put", mock.Mock(side_effect=full))
        data, cache = tmp_path / f"{turn}", tmp_path / f"{turn}" / "cache"
        data.mkdir()
        reason = re.escape(os.strerror(number))
        if kind is plain_copy:
            with pytest.raises(AccessError, match=reason):
                kind(data, cache)
            continue
        with pytest.warns(HeadraceWarning, match=rf"^cache_dir=.*{reason}"):
            assert kind(data, cache) == 2, kind
        assert not any(path.suffix in (".bin", ".part") for path in cache.iterdir()), kind
