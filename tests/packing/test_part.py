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
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.datasets import ImageDataset
from headrace.errors import (
    AccessError,
    ConfigError,
    DataNotFoundError,
    TargetExistsError,
    WriteError,
)
from headrace.io.local import checksums
from headrace.packing import pack, verify
from headrace.packing import part as parts
from headrace.packing import run as running
from headrace.packing.part import PartFile

pytestmark = pytest.mark.quick_every(5)

STOPPED = """
import sys, time
from headrace.packing.formats.hdf5 import PackedWriter
from headrace.packing import pack, run
run.GROUP_SAMPLES = 2
append = PackedWriter.append
def stop(self, samples, checksums):
    append(self, samples, checksums)
    print("writing", flush=True)
    time.sleep(600)
PackedWriter.append = stop
pack(*sys.argv[1:])
"""
Start = Callable[[Path, Path], "subprocess.Popen[str]"]


@pytest.fixture
def start_packing() -> Iterator[Start]:
    """Starts a process that packs, and stands still when its first samples are written."""
    source = os.path.dirname(os.path.dirname(headrace.__file__))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
    }
    with contextlib.ExitStack() as stack:

        def start(src: Path, dst: Path) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", STOPPED, str(src), str(dst)]
            process = stack.enter_context(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == "writing\n"
            return process

        yield start


@pytest.mark.slow
def test_killed_in_the_middle(photos: Path, tmp_path: Path, start_packing: Start) -> None:
    out = tmp_path / "out.h5"
    process = start_packing(photos, out)
    process.kill()
    process.wait()
    assert (
        os.listdir(tmp_path) == [".out.h5.part"] and (tmp_path / ".out.h5.part").stat().st_size > 0
    )
    assert pack(photos, out) == out
    assert os.listdir(tmp_path) == ["out.h5"] and verify(out).ok and len(ImageDataset(out)) == 24


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_two_jobs_at_once_and_an_interrupt(
    photos: Path, tmp_path: Path, start_packing: Start
) -> None:
    out = tmp_path / "out.h5"
    process = start_packing(photos, out)
    with pytest.raises(
        WriteError,
        match=r"another job is packing to .*out\.h5 \(it holds \.out\.h5\.part\): wait for it",
    ):
        pack(photos, out)
    pack(photos, tmp_path / "other.h5")  # what is held is the target, not the folder
    # the refused job took nothing away
    assert sorted(os.listdir(tmp_path)) == [".out.h5.part", "other.h5"]
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0 and "KeyboardInterrupt" in said
    assert os.listdir(tmp_path) == ["other.h5"]


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


def test_a_dead_writers_file_is_taken_over_empty(tmp_path: Path) -> None:
    (tmp_path / ".out.part").write_bytes(b"x" * 1000)
    with PartFile(tmp_path / "out") as part:
        assert os.fstat(part.fd).st_size == 0
        part.commit()
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("event", ["removed", "renamed", "replaced"])
def test_the_file_goes_between_opening_and_locking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """Its writer came to an end at that moment: the lock is then on a file that has another
    name, or none.
    """
    path, calls, flock = tmp_path / ".out.part", [], fcntl.flock

    def late(fd: int, how: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            path.rename(tmp_path / "finished") if event == "renamed" else path.unlink()
            if event == "replaced":
                path.write_bytes(b"a dead writer's")
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with PartFile(tmp_path / "out") as part:
        os.write(part.fd, b"mine")
        part.commit()
    assert len(calls) == 2 and (tmp_path / "out").read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path)) == (["finished", "out"] if event == "renamed" else ["out"])


def test_a_link_under_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / ".out.part").symlink_to("precious")
    with pytest.raises(WriteError, match="out can't be written"):
        PartFile(tmp_path / "out").__enter__()
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_file_systems_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with PartFile(tmp_path / "out") as part:
        part.commit()
    assert os.listdir(tmp_path) == ["out"] and "has no locks" in caplog.text


def test_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "HAS_LOCKS", False)
    with pytest.raises(ConfigError, match="packed files are read everywhere"):
        PartFile(tmp_path / "out").__enter__()


def test_an_error_of_any_kind_removes_the_file(tmp_path: Path) -> None:
    for kind in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(kind), PartFile(tmp_path / "out") as part:
            os.write(part.fd, b"half")
            raise kind
        assert os.listdir(tmp_path) == []


def test_the_files_mode_is_the_users(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with PartFile(tmp_path / "out") as part:
            part.commit()
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640


SYSTEM_ERRORS = [
    (errno.ENOSPC, WriteError, r"out\.h5 can't be written, the disk is full"),
    (errno.EDQUOT, WriteError, r"out\.h5 can't be written, the disk is full"),
    (errno.EFBIG, WriteError, r"out\.h5 is too large for this file system"),
    (errno.EROFS, AccessError, r"this user may not write there"),
    (errno.EIO, WriteError, r"out\.h5 can't be written: "),
]


@pytest.mark.quick_every(15)
@pytest.mark.parametrize(
    ("number", "kind", "message"), SYSTEM_ERRORS, ids=[errno.errorcode[e[0]] for e in SYSTEM_ERRORS]
)
@pytest.mark.parametrize("call", ["pwritev", "pwrite", "fsync", "ftruncate"])
def test_what_the_system_refuses(
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    number: int,
    kind: type[Exception],
    message: str,
) -> None:
    whole, calls = getattr(os, call), []

    def fails(fd: int, *arguments: Any) -> Any:
        calls.append(fd)
        if len(calls) < {"pwritev": 5, "pwrite": 3}.get(call, 1):
            return whole(fd, *arguments)
        raise OSError(number, os.strerror(number))

    (tmp_path / "out.h5").write_bytes(b"before")
    source = ImageDataset(photos)
    monkeypatch.setattr(os, call, fails)
    monkeypatch.setattr(running, "GROUP_SAMPLES", 2)
    with pytest.raises(kind, match=message) as caught:
        pack(source, tmp_path / "out.h5", overwrite=True)
    assert "\n" not in str(caught.value) and calls
    assert os.listdir(tmp_path) == ["out.h5"] and (tmp_path / "out.h5").read_bytes() == b"before"


def test_full_disk_is_reported_before_reading(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=50_000)
    monkeypatch.setattr(parts.shutil, "disk_usage", lambda path: free)
    monkeypatch.setattr(running, "_prepare", lambda *_: pytest.fail("read"))
    with pytest.raises(
        WriteError, match=r"the disk is full: it needs .* kB, and 50\.0 kB are free"
    ):
        pack(photos, tmp_path / "out.h5")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("limit", [4096, 60_000])
def test_a_real_limit_on_the_size_of_files(photos: Path, tmp_path: Path, limit: int) -> None:
    """The system's own refusal (Python ignores SIGXFSZ, so it comes as EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(WriteError) as caught:
            pack(photos, tmp_path / "out.h5", progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "too large for this file system, or for this user's limit (ulimit -f)" in str(
        caught.value
    )
    assert os.listdir(tmp_path) == []
    pack(photos, tmp_path / "out.h5")  # nothing in the process is broken by it


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_this_user_may_not_write(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(AccessError, match="this user may not write there"):
        pack(photos, tmp_path / "locked" / "out.h5")


def test_a_folder_that_may_not_be_written(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.open

    def refuse(path: Any, flags: int, *mode: Any) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return whole(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        AccessError, match=r"this user may not write there \(Permission denied\)"
    ) as caught:
        pack(photos, tmp_path / "out.h5")
    assert isinstance(caught.value, PermissionError)


def test_a_folder_that_goes_away(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with (
        pytest.raises(DataNotFoundError, match=r"is gone|is no folder"),
        PartFile(tmp_path / "folder" / "out") as part,
    ):
        shutil.rmtree(tmp_path / "folder")
        part.commit()
    assert os.listdir(tmp_path) == []


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are read back one by one, while the next but one is written."""
    monkeypatch.setattr(running, "GROUP_SAMPLES", 1)
    monkeypatch.setattr(parts, "_FLUSHED", 1)
    for module in (parts, checksums):
        monkeypatch.setattr(module, "NEAR", 1)
    monkeypatch.setattr(checksums, "_SEGMENT", 64)


@pytest.mark.usefixtures("small_segments")
def test_samples_are_read_back_while_others_are_written(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, ahead = list[tuple[int, int]](), list[int]()
    sum_segment, reread = checksums._sum_segment, PartFile.reread

    def counted(fd: int, segment: checksums.Segment, *arguments: Any) -> int:
        read.append((segment.start, segment.stop))
        return sum_segment(fd, segment, *arguments)

    def then(self: PartFile) -> None:
        assert self.ahead is not None
        ahead.append(len(self.ahead.futures))
        reread(self)

    monkeypatch.setattr(checksums, "_sum_segment", counted)
    monkeypatch.setattr(PartFile, "reread", then)
    pack(photos, tmp_path / "out.h5")
    samples = len(ImageDataset(photos))
    assert ahead == [samples - 1]  # the last one is read at the end
    assert (
        len(read) == len(set(read)) and sorted(read)[-1][1] == (tmp_path / "out.h5").stat().st_size
    )
    assert verify(tmp_path / "out.h5").ok


def flipping_the_fourth(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A bit of the fourth segment that is read back is another one; where each begins is listed."""
    settle, flipped = PartFile._settle, list[int]()

    def flip(self: PartFile, start: int, stop: int) -> None:
        settle(self, start, stop)
        flipped.append(start)
        if len(flipped) == 4:
            os.pwrite(self.fd, bytes([os.pread(self.fd, 1, start)[0] ^ 4]), start)

    monkeypatch.setattr(PartFile, "_settle", flip)
    return flipped


@pytest.mark.usefixtures("small_segments")
def test_bit_flips_are_found_while_others_are_written(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flipped = flipping_the_fourth(monkeypatch)
    with pytest.raises(
        WriteError,
        match=r"out\.h5: 1 samples read back are not what was written, the first is number 3:",
    ):
        pack(photos, tmp_path / "out.h5")
    assert os.listdir(tmp_path) == [] and len(flipped) > 4


@pytest.mark.usefixtures("small_segments")
def test_flips_are_found_while_others_go_to_a_shard(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flipped = flipping_the_fourth(monkeypatch)
    with pytest.raises(
        WriteError, match=r"1 samples read back are not what was written, the first is number 3:"
    ):
        pack(photos, tmp_path / "out.zarr", format="zarr")
    assert len(flipped) > 4
    monkeypatch.undo()
    pack(photos, tmp_path / "out.zarr", format="zarr")
    assert verify(tmp_path / "out.zarr").ok


@pytest.mark.usefixtures("small_segments")
def test_a_disk_that_fails_is_noticed_in_the_middle(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: PartFile, start: int, stop: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(PartFile, "_settle", fails)
    monkeypatch.setattr(PartFile, "reread", lambda self: pytest.fail("it went on to the end"))
    whole = checksums.SumsAhead.written

    def written(self: checksums.SumsAhead, stop: int) -> None:
        whole(self, stop)
        futures.wait(self.futures.values())  # so that the next group meets the error

    monkeypatch.setattr(checksums.SumsAhead, "written", written)
    with pytest.raises(WriteError, match=r"out\.h5 can't be written: "):
        pack(photos, tmp_path / "out.h5")
    assert os.listdir(tmp_path) == []


def test_bit_flips_are_found_before_the_file_is_named(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reread = PartFile.reread

    def flip(self: PartFile) -> None:
        reread(self)
        size = os.fstat(self.fd).st_size
        # in the last sample
        os.pwrite(self.fd, bytes([os.pread(self.fd, 1, size - 5)[0] ^ 4]), size - 5)

    monkeypatch.setattr(PartFile, "reread", flip)
    with pytest.raises(
        WriteError,
        match=r"out\.h5: 1 samples read back are not what was written, the first is number 23",
    ):
        pack(photos, tmp_path / "out.h5")
    assert os.listdir(tmp_path) == []
