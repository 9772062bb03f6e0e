"""Listing a folder gives all its files in one order, however many threads do it."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import AccessError, DataNotFoundError
from headrace.io.resolve import folders
from headrace.io.resolve.folders import FILE, FOLDER, NOTHING, OTHER, list_folder
from tests.io.resolve.scanning import scan

ENDINGS = (b".jpg",)


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def listed(root: Path) -> list[str]:
    return [os.fsdecode(name) for name in list_folder(os.fsencode(root), ENDINGS).names]


# Bytes on both sides of "/", and names that are the beginning of others.
parts = st.text("ab !-.é\x01~", min_size=1, max_size=3).filter(
    lambda part: not part.startswith(".")
)
trees = st.lists(st.lists(parts, min_size=1, max_size=4).map("/".join), min_size=1, max_size=12)


def grow(root: Path, tree: list[str]) -> list[str]:
    """Makes the files that can be made: where one is a folder already, or its folder a file, it
    is left out.
    """
    made = []
    for name in tree:
        try:
            touch(root, f"{name}.jpg")
            made.append(f"{name}.jpg")
        except OSError:
            continue
    return list(dict.fromkeys(made))


class TestOrder:
    @pytest.mark.slow
    @settings(max_examples=150, deadline=None)
    @given(trees)
    def test_is_that_of_the_parts(self, tree: list[str]) -> None:
        with tempfile.TemporaryDirectory() as root:
            made = grow(Path(root), tree)
            assert listed(Path(root)) == sorted(
                made, key=lambda name: os.fsencode(name).replace(b"/", b"\0")
            )

    @pytest.mark.slow
    @settings(max_examples=50, deadline=None)
    @given(st.lists(trees, min_size=2, max_size=4), st.data())
    def test_of_several_roots_and_of_equal_names(
        self, grown: list[list[str]], data: st.DataObject
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            roots = [Path(folder, str(i)) for i in range(len(grown))]
            trees_made = [
                grow(touch(root, "same.jpg"), tree) for root, tree in zip(roots, grown, strict=True)
            ]
            entries = data.draw(
                st.lists(st.sampled_from(range(len(roots))), min_size=2, max_size=5)
            )
            wanted = sorted(
                (
                    os.fsencode(name).replace(b"/", b"\0"),
                    os.fsencode(name),
                    number,
                    os.fsencode(roots[root] / name),
                )
                for number, root in enumerate(entries)
                for name in dict.fromkeys([*trees_made[root], "same.jpg"])
            )
            found = scan([roots[i] for i in entries], (".jpg",))
            assert [found.path(i) for i in range(len(found.names))] == [path for *_, path in wanted]
            assert set(found.roots) == {str(roots[i]) for i in entries}
            assert (found.root_of is None) == (len(found.roots) == 1)

    def test_files_and_folders_sort_together(self, tmp_path: Path) -> None:
        touch(
            tmp_path,
            "a.jpg",
            "a/1.jpg",
            "a/b.jpg/2.jpg",
            "a b/1.jpg",
            "a-b.jpg",
            "b.jpg",
            "a/b/3.jpg",
            "a/b-.jpg",
            "B/c.jpg",
        )
        wanted = [
            "B/c.jpg",
            "a/1.jpg",
            "a/b/3.jpg",
            "a/b-.jpg",
            "a/b.jpg/2.jpg",
            "a b/1.jpg",
            "a-b.jpg",
            "a.jpg",
            "b.jpg",
        ]
        assert listed(tmp_path) == wanted

    def test_does_not_depend_on_which_listing_comes_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = [f"{a}/{b}/{c}.jpg" for a in "abcd" for b in "abcd" for c in "xy"]
        touch(tmp_path, *made)
        real, waits = os.scandir, np.random.default_rng(0)
        monkeypatch.setattr(
            os, "scandir", lambda path: time.sleep(waits.uniform(0, 0.01)) or real(path)
        )
        assert [listed(tmp_path) for _ in range(5)] == [made] * 5

    def test_a_deep_tree(self, tmp_path: Path) -> None:
        deep = "/".join("d" * 300)
        touch(tmp_path, f"{deep}/x.jpg", "z.jpg")
        assert listed(tmp_path) == [f"{deep}/x.jpg", "z.jpg"]


class TestListing:
    def test_knows_the_folders_and_their_times(self, tmp_path: Path) -> None:
        touch(tmp_path, "b/deep/x.jpg", "a/x.txt", "c.jpg")
        found = list_folder(os.fsencode(tmp_path), ENDINGS)
        assert sorted(found.folders) == [b"", b"a", b"b", b"b/deep"]
        for name, times in zip(found.folders, found.times.tolist(), strict=True):
            status = os.stat(os.path.join(os.fsencode(tmp_path), name))
            assert times == [status.st_mtime_ns, status.st_ctime_ns]

    def test_knows_the_links_and_where_they_lead(self, tmp_path: Path) -> None:
        data = (
            touch(
                tmp_path, "data/real/x.jpg", "data/x.jpg", "elsewhere/y.jpg", "elsewhere/notes.txt"
            )
            / "data"
        )
        targets = {
            "file.jpg": "../elsewhere/y.jpg",
            "notes": "../elsewhere/notes.txt",
            "folder": "../elsewhere",
            "gone.jpg": "nothing",
            "self": "self",
            "text.jpg": "../elsewhere/notes.txt",
            "real/up": "..",
        }
        for name, target in targets.items():
            (data / name).symlink_to(target)
        found = list_folder(os.fsencode(data), ENDINGS)
        assert dict(zip(map(os.fsdecode, found.links), found.kinds.tolist(), strict=True)) == {
            **dict.fromkeys(["file.jpg", "text.jpg"], FILE),
            **dict.fromkeys(["folder", "real/up"], FOLDER),
            "notes": OTHER,
            **dict.fromkeys(["gone.jpg", "self"], NOTHING),
        }
        # the last is a loop: looked at, not into
        assert sorted(found.folders) == [b"", b"folder", b"real", b"real/up"]
        assert list(found.names) == [
            b"file.jpg",
            b"folder/y.jpg",
            b"real/x.jpg",
            b"text.jpg",
            b"x.jpg",
        ]

    def test_of_an_empty_folder(self, tmp_path: Path) -> None:
        found = list_folder(os.fsencode(tmp_path), ENDINGS)
        assert (len(found.names), list(found.folders), len(found.links), found.times.shape) == (
            0,
            [b""],
            0,
            (1, 2),
        )


class TestThreads:
    def test_list_many_folders_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        touch(tmp_path, *(f"{i}/x.jpg" for i in range(40)))
        all_there, real = threading.Barrier(folders.THREADS), os.scandir

        def scandir(path: Any) -> Iterator[Any]:
            if path != os.fsencode(tmp_path):
                # breaks, and fails the test, unless so many are here at the same time
                all_there.wait(20)
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)
        assert len(listed(tmp_path)) == 40

    @pytest.mark.parametrize(
        ("error", "wanted"),
        [(PermissionError, AccessError), (FileNotFoundError, DataNotFoundError)],
    )
    def test_one_error_ends_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, wanted: Any
    ) -> None:
        touch(tmp_path, *(f"{i:03d}/deep/x.jpg" for i in range(200)))
        real, seen = os.scandir, []

        def scandir(path: Any) -> Any:
            seen.append(path)
            if path.endswith(b"/000"):
                raise error(1, "no")
            time.sleep(0.002)
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)
        with pytest.raises(wanted, match=r"/000"):
            listed(tmp_path)
        assert len(seen) < 150

    def test_the_first_of_several_errors_is_raised(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        touch(tmp_path, *(f"{i:02d}/x.jpg" for i in range(20)))
        real = os.scandir

        def scandir(path: Any) -> Any:
            if path.endswith((b"/03", b"/17", b"/04")):
                time.sleep(0.05 if path.endswith(b"/03") else 0)
                raise PermissionError(13, "no")
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)
        with pytest.raises(AccessError, match=r"/03"):
            listed(tmp_path)
