"""What goes wrong around a pack: an error that says what, where and what to do, and the same
command again goes on.
"""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import pytest

from headrace import ImageDataset, pack, verify
from headrace.errors import AccessError, ConfigError, HeadraceError, TargetExistsError, WriteError
from headrace.packing import destination, pack_status
from headrace.packing import part as parts
from tests.data.make import make_photos
from tests.packing.shared import contents
from tests.servers.s3 import S3Server

SHARD = 6000


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_photos(tmp_path_factory.mktemp("small") / "photos", per_class=4, size=(20, 30))


def test_no_samples(small: Path, tmp_path: Path) -> None:
    nothing = ImageDataset(small).subset([])
    with pytest.raises(ConfigError, match="without samples can't be packed into parts"):
        pack(nothing, tmp_path / "out", shard_size=SHARD)
    out = pack(nothing, tmp_path / "out.h5")
    assert verify(out).samples == 0 and verify(out).ok and len(ImageDataset(out)) == 0


@pytest.mark.parametrize("several", [False, True])
def test_names_of_any_bytes(small: Path, tmp_path: Path, several: bool) -> None:
    source = tmp_path / "in" / "a class, 'quoted'"
    source.mkdir(parents=True)
    names = [
        b"with space.jpg",
        b"new\nline.jpg",
        b'"quotes".jpg',
        b"latin-\xe9.jpg",
        b"tab\t.jpg",
        b"%41 #?.jpg",
    ]
    for name in names:
        shutil.copy(next(small.rglob("*.jpg")), os.fsencode(source) + b"/" + name)
    out = pack(
        tmp_path / "in",
        tmp_path / ("out dir" if several else "out 1.h5"),
        **({"shard_size": 1500} if several else {}),
    )
    assert verify(out).ok
    with ImageDataset(out) as packed, ImageDataset(tmp_path / "in") as files:
        assert len(packed) == len(names) and packed.classes == files.classes
        assert all((a[0].numpy() == b[0].numpy()).all() for a, b in zip(packed, files, strict=True))
    for damaged in out.glob("part-*.h5") if several else [out]:
        with h5py.File(damaged, "r+") as file:
            file["data"][file["offsets"][:-1]] ^= 1
    bad = verify(out).bad
    assert len(bad) == len(names) and not any(
        "\n" in location + error for _, location, error in bad
    )
    for shown in (r"new\nline.jpg", r"latin-\udce9.jpg", "with space.jpg"):
        assert any(shown in location for _, location, _ in bad)


def test_a_full_disk_and_going_on(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=5000)
    with monkeypatch.context() as patched:
        patched.setattr(parts.shutil, "disk_usage", lambda path: free)
        with pytest.raises(
            WriteError, match=r"part-0000[01]-of-.*disk is full: it needs .*: free some space"
        ):
            pack(small, tmp_path / "out", shard_size=SHARD)
    pack(small, tmp_path / "out", shard_size=SHARD)
    assert contents(tmp_path / "out") == contents(
        Path(pack(small, tmp_path / "whole", shard_size=SHARD))
    )


def test_a_limit_on_the_size_of_files(small: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(
            WriteError,
            match=r"too large for this file system, or for this user's limit \(ulimit -f\)",
        ):
            pack(small, tmp_path / "out", shard_size=SHARD, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]
    assert verify(pack(small, tmp_path / "out", shard_size=SHARD)).ok


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(small: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o555)
    with pytest.raises(AccessError, match="this user may not write there"):
        pack(small, tmp_path / "out", shard_size=SHARD)


def test_clocks_do_not_matter(small: Path, tmp_path: Path) -> None:
    """Machines whose clocks differ: times in the future and in the past change nothing."""
    source = Path(shutil.copytree(small, tmp_path / "photos"))
    out = Path(pack(source, tmp_path / "out", shard_size=SHARD, part="0/2"))
    times = [0, int(time.time()) + 10**8]
    for number, path in enumerate([*source.rglob("*.jpg"), *out.iterdir()]):
        os.utime(path, (times[number % 2],) * 2)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    pack(source, out, shard_size=SHARD, part="1/2")
    assert (
        pack_status(out).joined
        and {name: (out / name).stat().st_mtime_ns for name in before} == before
    )
    assert (
        contents(out) == contents(Path(pack(small, tmp_path / "whole", shard_size=SHARD)))
        and verify(out).ok
    )


def test_two_plans_at_once(small: Path, tmp_path: Path) -> None:
    """One of two packs with other options gets the folder, the other an error; the pack is
    whole.
    """
    for attempt in range(4):
        out, barrier = tmp_path / f"out{attempt}", threading.Barrier(2)

        def job(size: int, out: Path = out, barrier: threading.Barrier = barrier) -> Any:
            with ImageDataset(small) as dataset:
                barrier.wait()
                try:
                    return pack(dataset, out, shard_size=size)
                except HeadraceError as error:
                    return error

        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(job, (SHARD, 2 * SHARD)))
        errors = [result for result in results if isinstance(result, HeadraceError)]
        assert len(errors) == 1 and isinstance(errors[0], TargetExistsError), results
        assert "holds the plan of another pack" in str(errors[0]) and "shard_size" in str(errors[0])
        size = (2 * SHARD, SHARD)[results.index(errors[0])]
        assert verify(pack(small, out, shard_size=size)).ok


@pytest.mark.slow
def test_a_store_that_goes_away(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: None
) -> None:
    """An error when the retries are through; with the server back the same command goes on."""
    monkeypatch.setattr(destination, "_FIRST_PAUSE_S", 0.01)
    with S3Server() as server:
        server.client().create_bucket(Bucket="bucket")
        options = {
            "storage_options": {
                **server.options,
                "config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 2},
            }
        }
        pack(small, "s3://bucket/out", shard_size=SHARD, parts="0:1", **options)
    with pytest.raises(
        WriteError, match=r"s3://bucket/out can't be (listed|read), after 6 attempts: .*"
    ) as caught:
        pack(small, "s3://bucket/out", shard_size=SHARD, **options)
    assert "\n" not in str(caught.value)
