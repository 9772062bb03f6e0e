"""Cached listings are used while they hold, and never when they do not."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import stat
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from headrace import ImageDataset
from headrace.errors import ConfigError, HeadraceWarning
from headrace.io import array_file as kept_files
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve import listings
from headrace.io.resolve.folders import list_folder
from headrace.storage.files import FilesSource
from tests.data.make import make_photos

ENDINGS = (".jpg", ".png")
NAMES = ["a/1.jpg", "a/2.PNG", "b/c/1.jpg", "d.jpg"]


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"content of " + name.encode())
    return root


def settle(root: Path) -> Path:
    """As if the folders had been left alone for a while."""
    for folder, *_ in os.walk(root, topdown=False):
        os.utime(folder, (time.time() - 100, time.time() - 100))
    return root


class Place:
    """A folder of data, one for listings, and how often the first was listed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.cache, self.count = (
            settle(touch(folder / "data", *NAMES)),
            folder / "cache",
            0,
        )
        monkeypatch.setattr(listings, "list_folder", self._list)

    def _list(self, *args: Any) -> Any:
        self.count += 1
        return list_folder(*args)

    def names(self, root: Any = None, endings: tuple[str, ...] = ENDINGS) -> list[str]:
        return [
            os.fsdecode(n)
            for n in FilesSource(
                root or self.root, endings, RemoteOptions(cache_dir=self.cache)
            ).listing.names
        ]

    @property
    def files(self) -> list[Path]:
        return sorted(self.cache.iterdir())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


@pytest.fixture
def kept(place: Place) -> Place:
    """One that is listed and kept."""
    assert place.names() == NAMES and place.count == 1
    return place


class TestFoundAgain:
    def test_without_listing(self, kept: Place) -> None:
        first, again = (
            FilesSource(kept.root, ENDINGS),
            FilesSource(kept.root, ENDINGS, RemoteOptions(cache_dir=kept.cache)),
        )
        assert kept.count == 1
        assert (again.listing.roots, again.listing.folders, list(again.listing.names)) == (
            first.listing.roots,
            first.listing.folders,
            list(first.listing.names),
        )
        assert again.fingerprint() == first.fingerprint()
        assert again.read(range(4)) == [f"content of {name}".encode() for name in NAMES]
        assert not any(a.flags.writeable for a in again.listing.names.arrays)

    def test_under_another_name_of_the_same_path(
        self, kept: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(kept.root.parent)
        monkeypatch.setenv("HOME", str(kept.root.parent))
        for path in ("data", "./data/", "~/data", os.fsencode(kept.root), f"{kept.root}/a/.."):
            source = FilesSource(path, ENDINGS, RemoteOptions(cache_dir="~/cache"))
            assert os.path.samefile(source.listing.path(0), kept.root / NAMES[0])
        assert kept.count == 1

    def test_with_the_same_endings_in_another_order(self, kept: Place) -> None:
        assert kept.names(endings=(".PNG", ".jpg", ".png")) == NAMES and kept.count == 1

    def test_of_each_folder_and_endings(self, kept: Place) -> None:
        assert kept.names(endings=(".png",)) == ["a/2.PNG"] and kept.names(kept.root / "a") == [
            "1.jpg",
            "2.PNG",
        ]
        assert kept.names(endings=(".png",)) == ["a/2.PNG"] and kept.names(kept.root / "a") == [
            "1.jpg",
            "2.PNG",
        ]
        assert kept.count == 3 and len(kept.files) == 3

    def test_of_each_folder_of_a_list(self, kept: Place) -> None:
        both = [kept.root / "a", kept.root / "b", kept.root / "d.jpg"]
        assert kept.names(both) == kept.names(both) == ["1.jpg", "2.PNG", "c/1.jpg", "d.jpg"]
        assert kept.count == 3 and len(kept.files) == 3

    def test_when_only_contents_changed(self, kept: Place) -> None:
        (kept.root / NAMES[0]).write_bytes(b"other")
        assert kept.names() == NAMES and kept.count == 1

    def test_with_names_that_are_no_utf8(self, place: Place) -> None:
        folder = os.path.join(os.fsencode(place.root), b"caf\xe9")
        os.mkdir(folder)
        open(os.path.join(folder, b"\xff\n.jpg"), "wb").close()
        settle(place.root)
        for _ in range(2):
            source = FilesSource(place.root, ENDINGS, RemoteOptions(cache_dir=place.cache))
            assert b"caf\xe9/\xff\n.jpg" in list(source.listing.names)
            assert FilesSource(folder, ENDINGS, RemoteOptions(cache_dir=place.cache)).listing.path(
                0
            ) == os.path.join(folder, b"\xff\n.jpg")
        assert place.count == 2

    def test_by_an_image_dataset(self, tmp_path: Path, place: Place) -> None:
        photos = settle(make_photos(tmp_path / "photos", per_class=1))
        first, again = (ImageDataset(photos, cache_dir=place.cache) for _ in range(2))
        assert place.count == 1
        assert list(first.samples) == list(again.samples) and first.classes == again.classes


def change(do: Callable[[Path], Any]) -> Any:
    return pytest.param(do, id=do.__name__)


def a_new_file(root: Path) -> None:
    touch(root, "b/c/2.jpg")


def a_file_less(root: Path) -> None:
    (root / "a/1.jpg").unlink()


def another_name(root: Path) -> None:
    (root / "a/1.jpg").rename(root / "a/3.jpg")


def a_folder_elsewhere(root: Path) -> None:
    (root / "b/c").rename(root / "c")


def a_folder_less(root: Path) -> None:
    shutil.rmtree(root / "b")


def a_new_folder(root: Path) -> None:
    touch(root, "e/f/1.jpg")


def a_file_for_a_folder(root: Path) -> None:
    shutil.rmtree(root / "b/c")
    touch(root, "b/c")


class TestChanges:
    @pytest.mark.parametrize("backdated", [False, True])
    @pytest.mark.parametrize(
        "do",
        [
            *map(
                change,
                [
                    a_new_file,
                    a_file_less,
                    another_name,
                    a_folder_elsewhere,
                    a_folder_less,
                    a_new_folder,
                    a_file_for_a_folder,
                ],
            )
        ],
    )
    def test_are_seen(self, kept: Place, do: Callable[[Path], None], backdated: bool) -> None:
        """Also where a tool (rsync, tar) sets the folders' times back to what they were."""
        before = {folder: os.stat(folder).st_mtime_ns for folder, *_ in os.walk(kept.root)}
        do(kept.root)
        for folder, mtime in before.items() if backdated else ():
            if os.path.exists(folder):
                os.utime(folder, ns=(mtime, mtime))
        fresh = [os.fsdecode(n) for n in FilesSource(kept.root, ENDINGS).listing.names]
        assert kept.names() == fresh != NAMES and kept.count == 2
        settle(kept.root)
        assert kept.names() == kept.names() == fresh and kept.count == 3

    def test_just_now_may_be_followed_by_others(self, place: Place) -> None:
        touch(place.root, "b/c/2.jpg")
        assert place.names() == place.names() == sorted([*NAMES, "b/c/2.jpg"])
        assert place.count == 2 and not place.cache.exists()
        settle(place.root)
        place.names()
        place.names()
        assert place.count == 3

    @pytest.mark.parametrize(("seconds", "scans"), [(0, 2), (1.9, 2), (2.1, 1), (-3600, 2)])
    def test_two_seconds_count_as_just_now(
        self, place: Place, monkeypatch: pytest.MonkeyPatch, seconds: float, scans: int
    ) -> None:
        """A time that is still to come (another machine's clock) too."""
        now = time.time_ns()
        then = now - int(seconds * 1e9)
        os.utime(place.root / "b/c", ns=(then, then))
        monkeypatch.setattr(time, "time_ns", lambda: now)
        place.names()
        place.names()
        assert place.count == scans

    @pytest.mark.parametrize("do", ["remove", "make", "folder", "retarget"])
    def test_of_what_links_lead_to_are_seen(self, place: Place, tmp_path: Path, do: str) -> None:
        """They change no folder that was listed."""
        elsewhere = touch(tmp_path / "elsewhere", "x.jpg", "full/y.jpg", "other/z.jpg")
        for name, target in {
            "link.jpg": "x.jpg",
            "gone.jpg": "later.jpg",
            "folder": "way",
            "loop": "loop",
        }.items():
            (place.root / name).symlink_to(elsewhere / target if name != "loop" else "loop")
        (elsewhere / "way").symlink_to("full")
        settle(place.root)
        settle(elsewhere)
        assert place.names() == place.names() == sorted([*NAMES, "folder/y.jpg", "link.jpg"])
        assert place.count == 1
        if do == "remove":
            (elsewhere / "x.jpg").unlink()
        elif do == "make":
            touch(elsewhere, "later.jpg")
        elif do == "folder":
            (elsewhere / "later.jpg").mkdir()
        else:
            (elsewhere / "way").unlink()
            (elsewhere / "way").symlink_to("other")
        assert (
            place.names()
            == [os.fsdecode(n) for n in FilesSource(place.root, ENDINGS).listing.names]
            and place.count == 2
        )

    def test_another_folder_in_its_place(self, kept: Place) -> None:
        other = settle(touch(kept.root.parent / "other", "x/1.jpg"))
        for folder in ("data", "data/a", "data/b", "data/b/c"):
            os.utime(kept.root.parent / folder, (5, 5))
        kept.names()
        shutil.rmtree(kept.root)
        other.rename(kept.root)
        os.utime(kept.root, (5, 5))
        assert kept.names() == ["x/1.jpg"]


class TestFile:
    def test_is_its_owners_and_holds_names_only(self, kept: Place) -> None:
        (file,) = kept.files
        assert (
            stat.S_IMODE(file.stat().st_mode) == 0o600
            and stat.S_IMODE(kept.cache.stat().st_mode) == 0o700
        )
        assert b"a/1.jpg" in file.read_bytes() and b"content" not in file.read_bytes()
        assert file.stat().st_size < 5000

    @pytest.mark.parametrize("what", ["cut", "flipped", "longer"])
    def test_damaged_is_listed_and_written_anew(self, kept: Place, what: str) -> None:
        (file,) = kept.files
        sound = file.read_bytes()
        head = sound.index(b"\n")
        for at in [
            *range(0, head, 7),
            *range(kept_files.HEAD, len(sound), 7 if what == "flipped" else 29),
        ]:
            damaged = {
                "cut": sound[:at],
                "flipped": sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :],
                "longer": sound[:at] + b"x" + sound[at:],
            }[what]
            file.write_bytes(damaged)
            count = kept.count
            assert kept.names() == NAMES and kept.count == count + 1, at
            assert file.read_bytes() == sound

    def test_of_another_version_is_written_anew(
        self, kept: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listings, "VERSION", listings.VERSION + 1)
        assert kept.names() == kept.names() == NAMES and kept.count == 2

    @pytest.mark.parametrize("what", ["writable", "link", "pipe", "folder", "owner"])
    def test_that_others_may_have_made_is_not_trusted(self, kept: Place, what: str) -> None:
        (file,) = kept.files
        if what == "writable":
            file.chmod(0o620)
        elif what == "link":
            file.rename(kept.cache / "other")
            file.symlink_to("other")
        elif what == "pipe":
            file.unlink()
            os.mkfifo(file)
        elif what == "folder":
            file.unlink()
            file.mkdir()
        else:
            if os.geteuid() != 0:
                pytest.skip("only root can give files away")
            os.chown(file, 12345, 12345)
        if what == "folder":
            with pytest.warns(HeadraceWarning, match="is not cached"):
                assert kept.names() == NAMES
            return
        assert kept.names() == NAMES and kept.count == 2
        assert (
            file.is_file() and not file.is_symlink() and stat.S_IMODE(file.stat().st_mode) == 0o600
        )
        assert file.stat().st_uid == os.geteuid()
        assert kept.names() == NAMES and kept.count == 2

    def test_cannot_be_read(self, kept: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any) -> Any:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(kept_files, "load_arrays", refuse)
        assert kept.names() == NAMES and kept.count == 2


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EROFS, "Read-only file system")


class TestCacheDir:
    def test_is_made(self, kept: Place) -> None:
        assert len(kept.files) == 1

    @pytest.mark.parametrize("kind", ["a file", "mkdir", "mkstemp", "write", "replace"])
    def test_that_cannot_be_written_to_is_a_warning(
        self, place: Place, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reason = {"a file": "Not a directory", "write": "No space", "replace": "No space"}
        if kind == "a file":
            place.cache.touch()
        elif kind == "mkdir":
            monkeypatch.setattr(os, "mkdir", read_only)
        elif kind == "mkstemp":
            monkeypatch.setattr("tempfile.mkstemp", read_only)
        else:
            monkeypatch.setattr(os, "fsync" if kind == "write" else "replace", full)
        with pytest.warns(
            HeadraceWarning, match=rf"cache_dir=.*not cached.*{reason.get(kind, 'Read-only')}"
        ) as caught:
            assert place.names() == NAMES
        assert caught[0].filename == __file__
        assert not place.cache.is_dir() or place.files == []

    def test_that_can_only_be_read_still_serves(
        self, kept: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.mkstemp", read_only)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert kept.names() == NAMES and kept.count == 1

    def test_inside_of_the_data_is_refused(self, place: Place) -> None:
        """Writing there would change the folder that is listed, and so each listing would be the
        last one's end.
        """
        for cache in (place.root / "a" / "cache", place.root):
            place.cache = cache
            with pytest.warns(HeadraceWarning, match="outside of it"):
                assert place.names() == NAMES
        assert not (place.root / "a/cache").exists()

    @pytest.mark.parametrize("wrong", [3, "", b"", ["a"], True, "s3://bucket/cache"])
    def test_that_is_none(self, place: Place, wrong: Any) -> None:
        with pytest.raises(ConfigError, match="cache_dir must be a local folder"):
            FilesSource(place.root, ENDINGS, RemoteOptions(cache_dir=wrong))

    def test_of_what_is_no_local_folder_stays_empty(self, place: Place) -> None:
        memory = fsspec.filesystem("memory")
        memory.pipe("/listing/x.jpg", b"x")
        for path in (
            place.root / "d.jpg",
            str(place.root / "*/*.jpg"),
            "memory://listing",
            f"file://{place.root}",
        ):
            FilesSource(path, ENDINGS, RemoteOptions(cache_dir=place.cache))
        memory.rm("/listing", recursive=True)
        assert not place.cache.exists()


def be_killed(root: Path, cache: Path, at: str) -> None:
    setattr(os, at, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    FilesSource(root, ENDINGS, RemoteOptions(cache_dir=cache))


class TestWriters:
    @pytest.mark.parametrize("at", ["fsync", "replace"])
    def test_that_are_killed_leave_what_is_removed_later(self, place: Place, at: str) -> None:
        writer = multiprocessing.get_context("fork").Process(
            target=be_killed, args=(place.root, place.cache, at)
        )
        writer.start()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        (left,) = place.files
        assert left.name.endswith(".part")
        # it could be a live writer's
        assert place.names() == NAMES and place.count == 1 and left in place.files
        assert place.names() == NAMES and place.count == 1
        an_hour_ago = time.time() - 3700
        os.utime(left, (an_hour_ago, an_hour_ago))
        touch(place.root, "e.jpg")
        settle(place.root)
        assert len(place.names()) == 5 and len(place.files) == 1

    def test_remove_no_other_files(self, place: Place) -> None:
        others = [
            "notes.part",
            "headrace-listing-x.bin",
            "headrace-store-x.mem",
            ".headrace-listing-.part",
        ]
        touch(place.cache, *others)
        for name in others:
            os.utime(place.cache / name, (5, 5))
        assert place.names() == NAMES
        assert {file.name for file in place.files} > set(others)

    def test_at_the_same_time(self, place: Place) -> None:
        seen: list[list[str]] = []
        threads = [threading.Thread(target=lambda: seen.append(place.names())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [NAMES] * 8 and len(place.files) == 1
        count = place.count
        assert place.names() == NAMES and place.count == count
