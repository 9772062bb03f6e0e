"""A file stands under its name only when it is whole: killed, interrupted, raced, refused,
nothing is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.datasets.image.image import ImageDataset
from headrace.errors import (
    AccessError,
    ConfigError,
    DataNotFoundError,
    TargetExistsError,
    WriteError,
)
from headrace.io import checksums
from headrace.packing import contents as contained, destination, hdf5, pack, verify
from headrace.packing.destination import PartFile
from tests.packing.shared import contents, images

pytestmark = pytest.mark.quick_every(2)

STOPPED = """
import sys, time
from headrace.packing.hdf5 import PackedWriter
from headrace.packing import contents, pack
contents.Contents.group_samples = 2
append = PackedWriter.append
def stop(self, samples, checksums):
    append(self, samples, checksums)
    print("writing", flush=True)
    time.sleep(600)
PackedWriter.append = stop
pack(*sys.argv[1:])
"""


@contextlib.contextmanager
def packing(src: Path, dst: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that packs, and stands still when its first samples are written."""
    source = os.path.dirname(os.path.dirname(headrace.__file__))
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", STOPPED, str(src), str(dst)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **pipes) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "writing\n"
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_two_jobs_at_once_an_interrupt_and_a_kill(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.h5"
    with packing(photos, out) as process:
        with pytest.raises(WriteError, match=r"out\.h5 \(it holds \.out\.h5\.part\)"):
            pack(photos, out)
        pack(photos, tmp_path / "other.h5")  # what is held is the target, not the folder
        # the refused job took nothing away
        assert sorted(os.listdir(tmp_path)) == [".out.h5.part", "other.h5"]
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode != 0 and "KeyboardInterrupt" in said
        assert os.listdir(tmp_path) == ["other.h5"]
    with packing(photos, out):
        pass
    assert (tmp_path / ".out.h5.part").stat().st_size > 0
    pack(photos, out)
    assert sorted(os.listdir(tmp_path)) == ["other.h5", "out.h5"]
    assert verify(out).ok and len(ImageDataset(out)) == 24


# --- the temporary file ---------------------------------------------------------------------------


def test_two_writers_in_one_process(tmp_path: Path) -> None:
    with PartFile(tmp_path / "out") as first:
        with pytest.raises(WriteError, match="another job"):
            PartFile(tmp_path / "out").__enter__()
        os.write(first.fd, b"first")
        first.commit()
    assert (tmp_path / "out").read_bytes() == b"first" and os.listdir(tmp_path) == ["out"]


def test_the_target_appears_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(TargetExistsError), PartFile(tmp_path / "out") as part:
        (tmp_path / "out").write_bytes(b"somebody else's")
        part.commit()
    assert (tmp_path / "out").read_bytes() == b"somebody else's" and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("event", ["removed", "renamed", "replaced"])
def test_the_file_goes_between_opening_and_locking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """Its writer came to an end at that moment: the lock is then on a file that has another
    name, or none.
    """
    path = tmp_path / ".out.part"
    calls: list[int] = []
    flock = fcntl.flock

    def late(fd: int, how: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            path.rename(tmp_path / "finished")
            if event != "renamed":
                (tmp_path / "finished").unlink()
            if event == "replaced":
                path.write_bytes(b"a dead writer's")
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with PartFile(tmp_path / "out") as part:
        assert os.fstat(part.fd).st_size == 0, "a dead writer's file is taken over empty"
        os.write(part.fd, b"mine")
        part.commit()
    assert len(calls) == 2 and (tmp_path / "out").read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path)) == (["finished", "out"] if event == "renamed" else ["out"])


def test_a_remover_looks_between_opening_and_locking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds no lock, takes one, and removes the file: the writer makes another one."""
    flock = fcntl.flock

    def late(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        remover = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        flock(remover, how)
        next(tmp_path.glob(".out.*.part")).unlink()
        try:
            flock(fd, how)
        finally:
            os.close(remover)

    monkeypatch.setattr(fcntl, "flock", late)
    with PartFile(tmp_path / "out", is_shared=True) as part:
        os.write(part.fd, b"mine")
        part.commit()
    assert os.listdir(tmp_path) == ["out"] and (tmp_path / "out").read_bytes() == b"mine"


def test_parts_on_their_way_to_a_store_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a live job, however long it has not written; what a killed one left is removed."""
    monkeypatch.setattr(destination.tempfile, "gettempdir", lambda: str(tmp_path))
    with destination._temporary("0.h5") as part:
        left = Path(part.path.replace("0.h5", "2.h5"))
        left.touch()
        os.utime(part.path, (0, 0))
        with destination._temporary("1.h5"):
            assert Path(part.path).exists() and not left.exists()
    assert os.listdir(tmp_path) == []


def test_a_link_under_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / ".out.part").symlink_to("precious")
    with pytest.raises(WriteError):
        PartFile(tmp_path / "out").__enter__()
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """File systems that have none are told of; systems that have none are refused."""

    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with PartFile(tmp_path / "out") as part:
        part.commit()
    assert os.listdir(tmp_path) == ["out"] and "has no locks" in caplog.text
    monkeypatch.setattr(destination, "HAS_LOCKS", False)
    with pytest.raises(ConfigError):
        PartFile(tmp_path / "other").__enter__()


def test_an_error_of_any_kind_removes_the_file(tmp_path: Path) -> None:
    for kind in (ValueError, KeyboardInterrupt):
        with pytest.raises(kind), PartFile(tmp_path / "out") as part:
            os.write(part.fd, b"half")
            raise kind
        assert os.listdir(tmp_path) == []


def test_the_mode_of_the_file_is_the_users(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with PartFile(tmp_path / "out") as part:
            part.commit()
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640


# --- what the system refuses ----------------------------------------------------------------------

SYSTEM_ERRORS = [
    ("pwritev", errno.ENOSPC, WriteError),
    ("pwritev", errno.EDQUOT, WriteError),
    ("pwritev", errno.EROFS, AccessError),
    ("ftruncate", errno.EFBIG, WriteError),
    ("fsync", errno.EIO, WriteError),
]


@pytest.mark.parametrize(("call", "number", "kind"), SYSTEM_ERRORS)
def test_what_the_system_refuses(
    call: str,
    number: int,
    kind: type[Exception],
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = getattr(os, call)
    calls: list[int] = []

    def fails(fd: int, *arguments: Any) -> Any:
        calls.append(fd)
        if len(calls) < {"pwritev": 5}.get(call, 1):
            return whole(fd, *arguments)
        raise OSError(number, os.strerror(number))

    (tmp_path / "out.h5").write_bytes(b"before")
    source = ImageDataset(photos)
    monkeypatch.setattr(os, call, fails)
    monkeypatch.setattr(contained.Contents, "group_samples", 2)
    with pytest.raises(kind) as caught:
        pack(source, tmp_path / "out.h5", overwrite=True)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["out.h5"] and (tmp_path / "out.h5").read_bytes() == b"before"


@pytest.mark.parametrize("shard_size", [None, 16_000])
def test_a_full_disk_is_told_before_samples_are_read(
    shard_size: int | None, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same call goes on."""
    free = shutil.disk_usage(tmp_path)._replace(free=5000)
    with monkeypatch.context() as patched:
        patched.setattr(destination.shutil, "disk_usage", lambda path: free)
        patched.setattr(contained.Contents, "each", lambda *_: pytest.fail("read"))
        with pytest.raises(WriteError, match=r"out.* disk is full.* 5\.0 kB are free"):
            pack(photos, tmp_path / "out", shard_size=shard_size)
    out = Path(pack(photos, tmp_path / "out", shard_size=shard_size))
    whole = Path(pack(photos, tmp_path / "whole", shard_size=shard_size))
    assert contents(out) == contents(whole) and verify(out).ok


@pytest.mark.parametrize(
    "how",
    [{}, {"shard_size": 16_000}, {"store": "decoded", "compression": "gzip", "chunks": 1}],
    ids=str,
)
def test_a_real_limit_on_the_size_of_files(
    how: dict[str, Any], photos: Path, tmp_path: Path
) -> None:
    """The system's own refusal (Python ignores SIGXFSZ, so it comes as EFBIG), of which HDF5 tells
    where it writes chunks.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(WriteError, match="ulimit -f"):
            pack(images(photos), tmp_path / "out", progress=False, **how)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.rglob("*.part"))
    assert verify(pack(images(photos), tmp_path / "out", **how)).ok


def test_a_folder_that_goes_away(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataNotFoundError), PartFile(tmp_path / "folder" / "out") as part:
        shutil.rmtree(tmp_path / "folder")
        part.commit()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("is_ahead", [False, True])
def test_flips_are_found_before_a_file_is_named(
    is_ahead: bool, photos: Path, tmp_path: Path
) -> None:
    """A bit of the fourth sample is another one on the disk. Small files are read back at their
    end, large ones while they are written.
    """
    pwritev, reread = os.pwritev, PartFile.reread
    calls: list[int] = []
    ahead: list[int] = []

    def flipping(fd: int, buffers: Any, place: int) -> int:
        if len(buffers) > 3 and not calls:
            calls.append(place)
            buffers = [bytearray(buffer) for buffer in buffers]
            buffers[3][0] ^= 4
        return pwritev(fd, buffers, place)

    def counting(part: PartFile) -> None:
        ahead.append(len(part.ahead.futures) if part.ahead else -1)
        reread(part)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "pwritev", flipping)
        patched.setattr(PartFile, "reread", counting)
        if is_ahead:
            patched.setattr(contained.Contents, "group_samples", 4)
            patched.setattr(checksums, "_SEGMENT", 1)
            patched.setattr(checksums, "_LARGEST_PAGE", 0)
            patched.setattr(hdf5, "_FLUSHED", 1)
        with pytest.raises(WriteError, match=r"1 samples read back .* number 3:"):
            pack(photos, tmp_path / "out")
    assert ahead == [24 if is_ahead else 0]
    assert not list(tmp_path.rglob("*.part"))
    assert verify(pack(photos, tmp_path / "out")).ok
