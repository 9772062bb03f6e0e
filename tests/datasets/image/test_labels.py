"""Targets of files: each file gets the one that was meant, and what is not clear is refused."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.datasets.image.labels import checked_targets, given_targets
from headrace.errors import ConfigError, DataNotFoundError, HeadraceError, HeadraceWarning
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import redact
from headrace.io.resolve.file_set import FileSet
from headrace.storage.class_folders import folder_targets
from tests.io.resolve.scanning import scan

NAMES = ["bird/1.jpg", "bird/2.jpg", "cat/1.jpg", "cat/deep/er/3.jpg", "dog/9.jpg"]


def files_of(root: Path, names: list[Any] = NAMES) -> FileSet:
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "wb").close()
    return scan(root, (".jpg",))


@pytest.fixture
def files(tmp_path: Path) -> FileSet:
    return files_of(tmp_path)


class TestFolders:
    def test_are_the_classes(self, files: FileSet) -> None:
        targets, classes = folder_targets(files)
        assert classes == ["bird", "cat", "dog"]
        assert targets is not None and targets.tolist() == [0, 0, 1, 1, 2] and targets.dtype == np.int64

    def test_are_sorted_as_python_sorts_their_names(self, tmp_path: Path) -> None:
        folders = ["b", "B", "a b", "a-b", "a", "10", "9", "é", "z", "日本", "_", "~"]
        targets, classes = folder_targets(files_of(tmp_path, [f"{f}/1.jpg" for f in folders]))
        assert classes == sorted(folders)
        assert targets is not None and sorted(targets.tolist()) == list(range(len(folders)))

    def test_with_names_that_are_no_utf8(self, tmp_path: Path) -> None:
        _, classes = folder_targets(files_of(tmp_path, [b"caf\xe9/1.jpg", "a/1.jpg"]))
        assert [os.fsencode(c) for c in classes] == [b"a", b"caf\xe9"]

    def test_of_several_roots_are_one_class_if_they_have_one_name(self, tmp_path: Path) -> None:
        files_of(tmp_path / "one", ["cat/1.jpg", "dog/1.jpg"])
        files_of(tmp_path / "two", ["cat/2.jpg", "ant/1.jpg"])
        files = scan([tmp_path / "one", tmp_path / "two"], (".jpg",))
        targets, classes = folder_targets(files)
        assert classes == ["ant", "cat", "dog"] and targets is not None
        assert [(n.partition(b"/")[0].decode(), classes[t]) for n, t in zip(files.names, targets, strict=True)] == [
            (c, c) for c in ["ant", "cat", "cat", "dog"]
        ]

    def test_flat_files_have_no_targets(self, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        assert folder_targets(files_of(tmp_path, ["1.jpg", "2.jpg"])) == (None, [])

    def test_files_beside_class_folders(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"2 of 3 files lie beside the class folders.*a\.jpg.*targets="):
            folder_targets(files_of(tmp_path, ["a.jpg", "z.jpg", "cat/1.jpg"]))

    @given(st.lists(st.lists(st.text("ab -.\0", min_size=1, max_size=2), min_size=1, max_size=3).map("/".join), min_size=1))
    def test_are_those_of_each_name(self, listed: list[str]) -> None:
        """Runs of names are not looked at one by one: the answer is as if they were."""
        names = sorted(map(str.encode, listed), key=lambda name: name.replace(b"/", b"\0"))
        files = FileSet(("root",), ("",), None, PackedNames(names), (), frozenset())
        folders = [name.partition(b"/")[0] if b"/" in name else None for name in names]
        if all(folder is None for folder in folders):
            assert folder_targets(files) == (None, [])
        elif None in folders:
            with pytest.raises(ConfigError, match=rf"^{folders.count(None)} of {len(names)} files lie beside") as caught:
                folder_targets(files)
            assert redact(files.path(folders.index(None))) in str(caught.value)
        else:
            classes = sorted(set(folders))
            targets, found = folder_targets(files)
            assert found == [c.decode() for c in classes] and targets is not None and targets.dtype == np.int64
            assert targets.tolist() == [classes.index(folder) for folder in folders]

    @pytest.mark.parametrize("n", [1, 2, 3, 65_536, 70_001])
    def test_of_many_flat_files(self, n: int) -> None:
        names = [b"%08d.jpg" % i for i in range(n)]
        assert folder_targets(FileSet(("root",), ("",), None, PackedNames(names), (), frozenset())) == (None, [])
        with pytest.raises(ConfigError, match=rf"{n:,} of {n + 2:,} files.*root/00000000\.jpg"):
            folder_targets(FileSet(("root",), ("",), None, PackedNames([b"!/1.jpg", b"!/2.jpg", *names]), (), frozenset()))

    def test_of_many_files_make_no_object_each(self) -> None:
        n = 300_000
        files = FileSet(("r",), ("",), None, PackedNames(b"%06d/%d.jpg" % (i // 1000, i) for i in range(n)), (), frozenset())
        tracemalloc.start()
        targets, classes = folder_targets(files)
        assert tracemalloc.get_traced_memory()[1] < 8 * n + 500_000
        tracemalloc.stop()
        assert len(classes) == 300 and targets is not None and np.array_equal(targets, np.arange(n) // 1000)

    def test_a_class_folder_without_files(self, tmp_path: Path) -> None:
        files_of(tmp_path, NAMES)
        (tmp_path / "empty").mkdir()
        (tmp_path / ".cache").mkdir()
        with pytest.raises(DataNotFoundError, match=r"1 class folders hold no image.*'empty'"):
            folder_targets(scan(tmp_path, (".jpg",)))
        (tmp_path / "empty").rmdir()
        assert folder_targets(scan(tmp_path, (".jpg",)))[1] == ["bird", "cat", "dog"]

    def test_images_among_other_data(self, tmp_path: Path) -> None:
        files_of(tmp_path, ["figures/1.jpg", *(f"texts/{i}.json" for i in range(20))])
        with pytest.raises(DataNotFoundError, match=r"hold no image.*'texts', in which there are 20 \.json: use TextDataset;"):
            folder_targets(scan(tmp_path, (".jpg",)))


class TestGiven:
    def test_none(self, files: FileSet) -> None:
        assert given_targets(None, files) == (None, [])

    def test_a_mapping_by_relative_path_or_name(self, files: FileSet) -> None:
        by_path = {name: i * 10 for i, name in enumerate(NAMES)}
        assert given_targets(by_path, files)[0].tolist() == [0, 10, 20, 30, 40]
        by_name = {"1.jpg": 1, "2.jpg": 2, "3.jpg": 3, "9.jpg": 9, "cat/1.jpg": 11}  # one 1.jpg by its path, the other by its name
        targets, classes = given_targets(by_name, files)
        assert targets.tolist() == [1, 2, 11, 3, 9] and targets.dtype == np.int64 and classes == []

    def test_a_name_that_fits_several_files(self, files: FileSet, tmp_path: Path) -> None:
        for targets in ({"1.jpg": 1, "2.jpg": 2, "3.jpg": 3, "9.jpg": 9}, csv(tmp_path, "1.jpg,1\n2.jpg,2\n3.jpg,3\n9.jpg,9\n")):
            with pytest.raises(ConfigError, match=r"file name 1\.jpg fits bird/1\.jpg and cat/1\.jpg: give relative paths"):
                given_targets(targets, files)

    @pytest.mark.parametrize(
        "mask",
        [
            lambda path: path.replace(".jpg", ".png"),
            lambda path: os.path.basename(path).replace("jpg", "PNG"),
            lambda path: "mask.png",
            lambda path: path,
            lambda path: path.replace(".jpg", ".mask"),
        ],
    )
    def test_names_of_files_are_no_classes(self, files: FileSet, tmp_path: Path, mask: Any) -> None:
        for name in NAMES:
            (tmp_path / name).with_suffix(".mask").touch()
        with pytest.raises(ConfigError, match=r"targets gives names of files \(.*\), which would become class numbers"):
            given_targets(mask, files)

    def test_a_class_for_each_sample_is_warned_of(self, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
        files = files_of(tmp_path, [f"{i:02d}.jpg" for i in range(20)])
        with pytest.warns(HeadraceWarning, match=r"20 different texts for 20 samples \('text 00', \.\.\.\)"):
            given_targets(lambda path: f"text {path[-6:-4]}", files)
        recwarn.clear()
        given_targets(lambda path: f"v1.{path[-6]}", files)
        assert not recwarn

    def test_texts_become_class_numbers(self, files: FileSet) -> None:
        targets, classes = given_targets(lambda path: "odd" if path.endswith(("1.jpg", "3.jpg")) else "even", files)
        assert classes == ["even", "odd"] and targets.tolist() == [1, 0, 1, 1, 0]

    @pytest.mark.parametrize(
        "value", [0.5, None, True, [1, 2], {"boxes": [1]}, (1, "a"), np.ones(3), np.float32(2)], ids=lambda v: type(v).__name__
    )
    def test_other_values_stay_as_they_are(self, files: FileSet, value: Any) -> None:
        targets, classes = given_targets(lambda path: value, files)
        assert isinstance(targets, list) and len(targets) == 5 and all(t is value for t in targets) and classes == []

    def test_mixed_values_stay_as_they_are(self, files: FileSet) -> None:
        values = iter([1, "a", None, 2.5, np.int64(3)])
        assert given_targets(lambda path: next(values), files)[0] == [1, "a", None, 2.5, 3]

    def test_a_callable_gets_the_full_path(self, files: FileSet, tmp_path: Path) -> None:
        seen: list[str] = []
        given_targets(lambda path: seen.append(path) or 0, files)
        assert seen == [str(tmp_path / name) for name in NAMES]

    def test_an_error_of_the_callable_comes_through(self, files: FileSet) -> None:
        with pytest.raises(ZeroDivisionError):
            given_targets(lambda path: 1 // 0, files)

    def test_a_file_without_a_target(self, files: FileSet) -> None:
        with pytest.raises(ConfigError, match=r"no entry for dog/9\.jpg"):
            given_targets({name: 1 for name in NAMES[:-1]}, files)

    @pytest.mark.parametrize("wrong", [3, dict, [1, 2, 3, 4, 5], np.arange(5), np.float32(3), {"a", "b"}])
    def test_what_can_be_no_targets(self, wrong: Any) -> None:
        with pytest.raises(ConfigError, match=r"mapping, a CSV file, a callable, .* or None|Pass a mapping"):
            checked_targets(wrong, "a/folder")


def csv(folder: Path, text: str | bytes) -> str:
    path = folder / "targets.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


ROWS = "".join(f"{name},{value}\n" for name, value in zip(NAMES, [3, 10, 3, 4, 5], strict=True))


class TestCSV:
    @pytest.mark.parametrize(
        "text",
        [
            ROWS,
            "file,label\n" + ROWS,
            "Image , class\n" + ROWS,
            ROWS.replace("\n", "\r\n"),
            ROWS.replace(",", " , "),
            ROWS.replace("\n", ",more,columns\n"),
            ROWS.replace("\n", "\n\n"),
            '"bird/1.jpg","3"\n' + ROWS[ROWS.index("\n") + 1 :],
            "unknown.jpg,77\n" + ROWS,
            "\ufeff" + ROWS,
            "\ufefffile,label\n" + ROWS,
            "picture,breed\n" + ROWS,
        ],
    )
    def test_of_numbers(self, files: FileSet, tmp_path: Path, text: str) -> None:
        for path in (csv(tmp_path, text), Path(csv(tmp_path, text))):
            targets, classes = given_targets(path, files)
            assert targets.tolist() == [3, 10, 3, 4, 5] and targets.dtype == np.int64 and classes == []

    def test_of_fractions(self, files: FileSet, tmp_path: Path) -> None:
        targets, classes = given_targets(csv(tmp_path, ROWS.replace("10", "0.5")), files)
        assert targets == [3.0, 0.5, 3.0, 4.0, 5.0] and classes == []

    def test_of_texts(self, files: FileSet, tmp_path: Path) -> None:
        text = 'name,kind\n"bird/1.jpg",hawk\n2.jpg,"owl, grey"\ncat/1.jpg,hawk\n3.jpg,été\n9.jpg,hawk\n'
        targets, classes = given_targets(csv(tmp_path, text), files)
        assert classes == ["hawk", "owl, grey", "été"] and targets.tolist() == [0, 1, 0, 2, 0]

    @pytest.mark.parametrize("header", ["", "file,label\n"])
    def test_rows_that_contradict_each_other(self, files: FileSet, tmp_path: Path, header: str) -> None:
        assert given_targets(csv(tmp_path, header + ROWS + ROWS), files)[0].tolist() == [3, 10, 3, 4, 5]
        rows = (2, 7) if header else (1, 6)
        with pytest.raises(ConfigError, match=rf"rows {rows[0]} and {rows[1]} of .*targets\.txt give bird/1\.jpg .*\('3' and '4'\)"):
            given_targets(csv(tmp_path, header + ROWS + "bird/1.jpg,4\n"), files)

    def test_that_is_missing(self, files: FileSet, tmp_path: Path) -> None:
        with pytest.raises(DataNotFoundError, match=r"none\.csv does not exist"):
            given_targets(str(tmp_path / "none.csv"), files)

    @pytest.mark.parametrize("text", ["bird/1.jpg\n", "bird/1.jpg;3\n", ROWS + "lonely\n"])
    def test_without_a_second_column(self, files: FileSet, tmp_path: Path, text: str) -> None:
        with pytest.raises(ConfigError, match=r"row \d of .*targets\.txt has no second column: write file,target"):
            given_targets(csv(tmp_path, text), files)

    @pytest.mark.parametrize("text", ["", "file,label\n", "other.jpg,3\n"])
    def test_without_the_files(self, files: FileSet, tmp_path: Path, text: str) -> None:
        with pytest.raises(ConfigError, match=r"no entry for bird/1\.jpg"):
            given_targets(csv(tmp_path, text), files)

    @pytest.mark.parametrize("kind", ["folder", "latin-1", "bytes"])
    def test_that_is_none(self, files: FileSet, tmp_path: Path, kind: str) -> None:
        path = {
            "folder": lambda: str(tmp_path),
            "latin-1": lambda: csv(tmp_path, "bird/1.jpg,\xe9t\xe9\n".encode("latin-1")),
            "bytes": lambda: csv(tmp_path, bytes(range(256))),
        }[kind]()
        with pytest.raises(HeadraceError, match=str(tmp_path)):
            given_targets(path, files)
