"""Cached listings are used while they hold, and never when they do not."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError, HeadraceWarning
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve import listings
from headrace.io.resolve.folders import list_folder
from headrace.storage.files import FilesSource
from tests.io.resolve.scanning import names_of, touch

ENDINGS = (".jpg", ".png")
NAMES = ["a/1.jpg", "a/2.PNG", "b/c/1.jpg", "d.jpg"]


def settle(root: Path) -> Path:
    """As if the folders had been left alone for a while."""
    for folder, *_ in os.walk(root, topdown=False):
        os.utime(folder, (time.time() - 100, time.time() - 100))
    return root


class Place:
    """A folder of data, one for listings, and how often the first was listed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = settle(touch(folder / "data", *NAMES))
        self.cache = folder / "cache"
        self.count = 0
        monkeypatch.setattr(listings, "list_folder", self._list)

    def _list(self, *args: Any) -> Any:
        self.count += 1
        return list_folder(*args)

    def source(self, root: Any = None, endings: tuple[str, ...] = ENDINGS) -> FilesSource:
        return FilesSource(root or self.root, endings, RemoteOptions(cache_dir=self.cache))

    def names(self, root: Any = None, endings: tuple[str, ...] = ENDINGS) -> list[str]:
        return names_of(self.source(root, endings).listing)

    def names_now(self) -> list[str]:
        """Without a cache."""
        return names_of(FilesSource(self.root, ENDINGS).listing)

    @property
    def files(self) -> list[Path]:
        return sorted(self.cache.iterdir())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


@pytest.fixture
def kept(place: Place) -> Place:
    """One that is listed and kept."""
    assert place.names() == NAMES
    assert place.count == 1
    return place


class TestFoundAgain:
    def test_without_listing(self, kept: Place) -> None:
        (kept.root / NAMES[0]).write_bytes(b"other")  # contents don't count
        first, again = FilesSource(kept.root, ENDINGS), kept.source()
        assert kept.count == 1
        assert again.listing.roots == first.listing.roots
        assert again.listing.folders == first.listing.folders
        assert again.fingerprint() == first.fingerprint()
        expected = [b"other", *(f"content of {name}".encode() for name in NAMES[1:])]
        assert again.read(range(4)) == expected
        assert not any(array.flags.writeable for array in again.listing.names.arrays)

    def test_under_another_name_of_the_same_path(
        self, kept: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(kept.root.parent)
        monkeypatch.setenv("HOME", str(kept.root.parent))
        for path in ("data", "./data/", "~/data", os.fsencode(kept.root), f"{kept.root}/a/.."):
            source = FilesSource(path, (".PNG", *ENDINGS), RemoteOptions(cache_dir="~/cache"))
            assert os.path.samefile(source.listing.path(0), kept.root / NAMES[0])
        assert kept.count == 1

    def test_of_each_folder_and_endings(self, kept: Place) -> None:
        both = [kept.root / "a", kept.root / "b", kept.root / "d.jpg"]
        for _ in range(2):
            assert kept.names(endings=(".png",)) == ["a/2.PNG"]
            assert kept.names(kept.root / "a") == ["1.jpg", "2.PNG"]
            assert kept.names(both) == ["1.jpg", "2.PNG", "c/1.jpg", "d.jpg"]
        assert kept.count == len(kept.files) == 4

    def test_with_names_that_are_no_utf8(self, place: Place) -> None:
        settle(touch(place.root, b"caf\xe9/\xff\n.jpg"))
        folder = os.path.join(os.fsencode(place.root), b"caf\xe9")
        for _ in range(2):
            assert b"caf\xe9/\xff\n.jpg" in list(place.source().listing.names)
            assert place.source(folder).listing.path(0) == os.path.join(folder, b"\xff\n.jpg")
        assert place.count == 2


def a_new_file(root: Path) -> None:
    touch(root, "b/c/2.jpg")


def a_file_less(root: Path) -> None:
    (root / "a/1.jpg").unlink()


def another_name(root: Path) -> None:
    (root / "a/1.jpg").rename(root / "a/3.jpg")


def a_folder_elsewhere(root: Path) -> None:
    (root / "b/c").rename(root / "c")


def a_new_folder(root: Path) -> None:
    touch(root, "e/f/1.jpg")


def a_file_for_a_folder(root: Path) -> None:
    shutil.rmtree(root / "b/c")
    touch(root, "b/c")


class TestChanges:
    def test_are_seen(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also where a tool (rsync, tar) sets the folders' times back to what they were."""
        edits = [a_new_file, a_file_less, another_name, a_folder_elsewhere, a_new_folder]
        for change in (*edits, a_file_for_a_folder):
            kept = Place(tmp_path / change.__name__, monkeypatch)
            assert kept.names() == NAMES
            before = {folder: os.stat(folder).st_mtime_ns for folder, *_ in os.walk(kept.root)}
            change(kept.root)
            for folder, mtime in before.items():
                if os.path.exists(folder):
                    os.utime(folder, ns=(mtime, mtime))
            fresh = kept.names_now()
            assert kept.names() == fresh != NAMES
            assert kept.count == 2
            settle(kept.root)
            assert kept.names() == kept.names() == fresh
            assert kept.count == 3

    def test_just_now_may_be_followed_by_others(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two seconds count as just now, and a time that is still to come (another machine's
        clock).
        """
        now = time.time_ns()
        monkeypatch.setattr(time, "time_ns", lambda: now)
        for seconds, scans in ((0, 2), (1.9, 2), (-3600, 2), (2.1, 1)):
            then = now - int(seconds * 1e9)
            os.utime(place.root / "b/c", ns=(then, then))
            place.count = 0
            assert place.names() == place.names() == NAMES
            assert place.count == scans, seconds
            assert place.cache.exists() == (scans == 1)

    @pytest.mark.filterwarnings("ignore:.*what does not exist")
    def test_of_what_links_lead_to_are_seen(self, place: Place, tmp_path: Path) -> None:
        """They change no folder that was listed."""
        elsewhere = touch(tmp_path / "elsewhere", "x.jpg", "full/y.jpg", "other/z.jpg")
        links = {"link.jpg": "x.jpg", "gone.jpg": "later.jpg", "folder": "way"}
        for name, target in links.items():
            (place.root / name).symlink_to(elsewhere / target)
        (place.root / "loop").symlink_to("loop")
        (elsewhere / "way").symlink_to("full")
        settle(place.root)
        settle(elsewhere)
        assert place.names() == place.names() == sorted([*NAMES, "folder/y.jpg", "link.jpg"])
        assert place.count == 1
        changes: list[tuple[Callable[..., Any], Path]] = [
            (os.unlink, elsewhere / "x.jpg"),
            (os.mkdir, elsewhere / "later.jpg"),
            (os.rmdir, elsewhere / "later.jpg"),
            (Path.touch, elsewhere / "later.jpg"),
            (os.unlink, elsewhere / "way"),
            (os.mkdir, elsewhere / "way"),
        ]
        for number, (change, path) in enumerate(changes):
            change(path)
            settle(elsewhere)
            assert place.names() == place.names_now()
            assert place.count == 2 + number

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
    def test_damaged_or_of_another_version_is_written_anew(
        self, kept: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (file,) = kept.files
        sound = file.read_bytes()
        file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 4]))
        assert kept.names() == NAMES
        assert kept.count == 2
        assert file.read_bytes() == sound
        count = kept.count
        monkeypatch.setattr(listings, "VERSION", listings.VERSION + 1)
        assert kept.names() == kept.names() == NAMES
        assert kept.count == count + 1


class TestCacheDir:
    def test_inside_of_the_data_is_refused(self, place: Place) -> None:
        """Writing there would change the folder that is listed, and so each listing would be the
        last one's end.
        """
        for cache in (place.root / "a" / "cache", place.root):
            place.cache = cache
            with pytest.warns(HeadraceWarning, match="outside of it"):
                assert place.names() == NAMES
        assert not (place.root / "a/cache").exists()

    def test_that_is_none(self, place: Place) -> None:
        for wrong in (3, "", b"", ["a"], True, "s3://bucket/cache"):
            with pytest.raises(ConfigError, match="cache_dir"):
                FilesSource(place.root, ENDINGS, RemoteOptions(cache_dir=wrong))

    def test_of_what_is_no_local_folder_stays_empty(self, place: Place, memory: Any) -> None:
        memory.pipe("/listing/x.jpg", b"x")
        glob = str(place.root / "*/*.jpg")
        for path in (place.root / "d.jpg", glob, "memory://listing", f"file://{place.root}"):
            place.source(path)
        assert not place.cache.exists()
