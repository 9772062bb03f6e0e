"""Targets of files: each file gets the one that was meant, and what is not clear is refused."""

from __future__ import annotations

import json
import os
import re
import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headrace import ImageDataset, MemoryEfficientDataset
from headrace.datasets.image.augment import RandomHorizontalFlip
from headrace.datasets.image.labels import MultiHot, checked_targets, given_targets
from headrace.errors import (
    ConfigError,
    DataNotFoundError,
    FormatError,
    HeadraceError,
    HeadraceWarning,
    MissingNameError,
)
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import redact
from headrace.io.resolve.file_set import FileSet
from headrace.storage.class_folders import folder_targets
from headrace.testing import DatasetContract
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
        assert (
            targets is not None
            and targets.tolist() == [0, 0, 1, 1, 2]
            and targets.dtype == np.int64
        )

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
        assert [
            (n.partition(b"/")[0].decode(), classes[t])
            for n, t in zip(files.names, targets, strict=True)
        ] == [(c, c) for c in ["ant", "cat", "cat", "dog"]]

    def test_flat_files_have_no_targets(self, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        assert folder_targets(files_of(tmp_path, ["1.jpg", "2.jpg"])) == (None, [])

    def test_files_beside_class_folders(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"2 of 3 files lie beside the class folders.*a\.jpg.*targets="
        ):
            folder_targets(files_of(tmp_path, ["a.jpg", "z.jpg", "cat/1.jpg"]))

    @given(
        st.lists(
            st.lists(st.text("ab -.\0", min_size=1, max_size=2), min_size=1, max_size=3).map(
                "/".join
            ),
            min_size=1,
        )
    )
    def test_are_those_of_each_name(self, listed: list[str]) -> None:
        """Runs of names are not looked at one by one: the answer is as if they were."""
        names = sorted(map(str.encode, listed), key=lambda name: name.replace(b"/", b"\0"))
        files = FileSet(("root",), ("",), None, PackedNames(names), (), frozenset())
        folders = [name.partition(b"/")[0] if b"/" in name else None for name in names]
        if all(folder is None for folder in folders):
            assert folder_targets(files) == (None, [])
        elif None in folders:
            with pytest.raises(
                ConfigError, match=rf"^{folders.count(None)} of {len(names)} files lie beside"
            ) as caught:
                folder_targets(files)
            assert redact(files.path(folders.index(None))) in str(caught.value)
        else:
            classes = sorted(set(folders))
            targets, found = folder_targets(files)
            assert (
                found == [c.decode() for c in classes]
                and targets is not None
                and targets.dtype == np.int64
            )
            assert targets.tolist() == [classes.index(folder) for folder in folders]

    @pytest.mark.parametrize("n", [1, 2, 3, 65_536, 70_001])
    def test_of_many_flat_files(self, n: int) -> None:
        names = [b"%08d.jpg" % i for i in range(n)]
        assert folder_targets(
            FileSet(("root",), ("",), None, PackedNames(names), (), frozenset())
        ) == (None, [])
        with pytest.raises(ConfigError, match=rf"{n:,} of {n + 2:,} files.*root/00000000\.jpg"):
            folder_targets(
                FileSet(
                    ("root",),
                    ("",),
                    None,
                    PackedNames([b"!/1.jpg", b"!/2.jpg", *names]),
                    (),
                    frozenset(),
                )
            )

    def test_of_many_files_make_no_object_each(self) -> None:
        n = 300_000
        files = FileSet(
            ("r",),
            ("",),
            None,
            PackedNames(b"%06d/%d.jpg" % (i // 1000, i) for i in range(n)),
            (),
            frozenset(),
        )
        tracemalloc.start()
        targets, classes = folder_targets(files)
        assert tracemalloc.get_traced_memory()[1] < 8 * n + 500_000
        tracemalloc.stop()
        assert (
            len(classes) == 300
            and targets is not None
            and np.array_equal(targets, np.arange(n) // 1000)
        )

    def test_a_class_folder_without_files(self, tmp_path: Path) -> None:
        files_of(tmp_path, NAMES)
        (tmp_path / "empty").mkdir()
        (tmp_path / ".cache").mkdir()
        (tmp_path / "__MACOSX").mkdir()
        with pytest.raises(
            DataNotFoundError,
            match=(
                r"a class folder holds no file that is read, such as 'empty': remove the empty "
                r"folders, which"
            ),
        ):
            folder_targets(scan(tmp_path, (".jpg",)))
        (tmp_path / "empty").rmdir()
        assert folder_targets(scan(tmp_path, (".jpg",)))[1] == ["bird", "cat", "dog"]

    def test_images_among_other_data(self, tmp_path: Path) -> None:
        files_of(tmp_path, ["figures/1.jpg", *(f"texts/{i}.json" for i in range(20))])
        with pytest.raises(
            DataNotFoundError,
            match=(
                r"no file that is read, such as 'texts' \(there are 20 \.json: use TextDataset\): "
                r"remove"
            ),
        ):
            folder_targets(scan(tmp_path, (".jpg",)))


class TestFoldersThatAreNoClasses:
    @pytest.mark.parametrize(
        "folders",
        [("train", "val"), ("Test", "training", "valid"), ("train2017", "val2017"), ("train",)],
    )
    def test_splits_are_refused(self, folders: tuple[str, ...], tmp_path: Path) -> None:
        for folder in folders:
            save(tmp_path / folder / "cat" / "1.png")
        (tmp_path / "notes").mkdir()
        first, named = str(tmp_path / folders[0]), ", ".join(folders)
        with pytest.raises(
            ConfigError,
            match=rf"holds {named}: parts .*Pass the path of one, '{first}'.*targets='folders'",
        ):
            ImageDataset(tmp_path)
        (tmp_path / "notes").rmdir()
        assert ImageDataset(tmp_path, targets="folders").classes == list(folders)
        assert ImageDataset(tmp_path, targets=None).targets is None
        assert ImageDataset(first).classes == ["cat"]

    @pytest.mark.parametrize(
        ("beside", "targets"),
        [
            ("masks/1_mask.png", "masks"),
            ("labels/1.txt", None),
            ("annotations/all.json", "annotations/all.json"),
            ("all.json", "all.json"),
        ],
    )
    def test_images_beside_their_targets_are_refused(
        self, beside: str, targets: str | None, tmp_path: Path
    ) -> None:
        save(tmp_path / "images" / "1.png")
        path = tmp_path / beside
        if path.suffix == ".png":
            save(path)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text('{"images": [], "annotations": [], "categories": []}')
        wanted = "" if targets is None else f", such as targets='{tmp_path / targets}'"
        with pytest.raises(
            ConfigError,
            match=re.escape(f"pass '{tmp_path / 'images'}' and") + f".* as targets={wanted};",
        ):
            ImageDataset(tmp_path)
        assert ImageDataset(tmp_path, targets=None).targets is None

    def test_one_class_of_images_is_one(self, tmp_path: Path) -> None:
        save(tmp_path / "images" / "1.png")
        save(tmp_path / "trains" / "1.png")
        (tmp_path / "about.json").write_text('{"licence": "CC0"}')
        assert ImageDataset(tmp_path).classes == ["images", "trains"]


def save(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 3)).save(path)


class TestGiven:
    def test_none(self, files: FileSet) -> None:
        assert given_targets(None, files)[:2] == (None, [])

    def test_a_mapping_by_relative_path_or_name(self, files: FileSet) -> None:
        by_path = {name: i * 10 for i, name in enumerate(NAMES)}
        assert given_targets(by_path, files)[0].tolist() == [0, 10, 20, 30, 40]
        # one 1.jpg by its path, the other by its name
        by_name = {"1.jpg": 1, "2.jpg": 2, "3.jpg": 3, "9.jpg": 9, "cat/1.jpg": 11}
        targets, classes, *_ = given_targets(by_name, files)
        assert targets.tolist() == [1, 2, 11, 3, 9] and targets.dtype == np.int64 and classes == []

    def test_a_name_that_fits_several_files(self, files: FileSet, tmp_path: Path) -> None:
        for targets in (
            {"1.jpg": 1, "2.jpg": 2, "3.jpg": 3, "9.jpg": 9},
            csv(tmp_path, "1.jpg,1\n2.jpg,2\n3.jpg,3\n9.jpg,9\n"),
        ):
            with pytest.raises(
                ConfigError,
                match=r"file name 1\.jpg fits bird/1\.jpg and cat/1\.jpg: give relative paths",
            ):
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
        with pytest.raises(
            ConfigError,
            match=r"targets gives names of files \(.*\), which would become class numbers",
        ):
            given_targets(mask, files)

    def test_a_class_for_each_sample_is_warned_of(
        self, tmp_path: Path, recwarn: pytest.WarningsRecorder
    ) -> None:
        files = files_of(tmp_path, [f"{i:02d}.jpg" for i in range(20)])
        with pytest.warns(
            HeadraceWarning, match=r"20 different texts for 20 samples \('text 00', \.\.\.\)"
        ):
            given_targets(lambda path: f"text {path[-6:-4]}", files)
        recwarn.clear()
        given_targets(lambda path: f"v1.{path[-6]}", files)
        assert not recwarn

    def test_texts_become_class_numbers(self, files: FileSet) -> None:
        targets, classes, *_ = given_targets(
            lambda path: "odd" if path.endswith(("1.jpg", "3.jpg")) else "even", files
        )
        assert classes == ["even", "odd"] and targets.tolist() == [1, 0, 1, 1, 0]

    @pytest.mark.parametrize(
        "value",
        [0.5, None, True, [1, 2], {"boxes": [1]}, (1, "a"), np.ones(3), np.float32(2)],
        ids=lambda v: type(v).__name__,
    )
    def test_other_values_stay_as_they_are(self, files: FileSet, value: Any) -> None:
        targets, classes, *_ = given_targets(lambda path: value, files)
        assert (
            isinstance(targets, list)
            and len(targets) == 5
            and all(t is value for t in targets)
            and classes == []
        )

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

    @pytest.mark.parametrize(
        "wrong", [3, dict, [1, 2, 3, 4, 5], np.arange(5), np.float32(3), {"a", "b"}]
    )
    def test_what_can_be_no_targets(self, wrong: Any) -> None:
        with pytest.raises(
            ConfigError, match=r"folder of masks, .*mapping.* or None|Pass a mapping"
        ):
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
            targets, classes, *_ = given_targets(path, files)
            assert (
                targets.tolist() == [3, 10, 3, 4, 5] and targets.dtype == np.int64 and classes == []
            )

    @pytest.mark.parametrize("delimiter", [";", "|", "\t"])
    def test_another_delimiter_is_told_and_used(
        self, delimiter: str, files: FileSet, tmp_path: Path
    ) -> None:
        path = csv(tmp_path, ROWS.replace(",", delimiter))
        with pytest.raises(
            ConfigError,
            match=re.escape(f"separated by {delimiter!r}: pass delimiter={delimiter!r}"),
        ):
            given_targets(path, files)
        assert given_targets(path, files, delimiter=delimiter)[0].tolist() == [3, 10, 3, 4, 5]
        with pytest.raises(ConfigError, match="delimiter is for a table of labels in CSV"):
            given_targets(dict.fromkeys(NAMES, 1), files, delimiter=delimiter)

    def test_of_fractions(self, files: FileSet, tmp_path: Path) -> None:
        targets, classes, *_ = given_targets(csv(tmp_path, ROWS.replace("10", "0.5")), files)
        assert (
            targets.tolist() == [3.0, 0.5, 3.0, 4.0, 5.0]
            and targets.dtype == np.float64
            and classes == []
        )

    def test_of_texts(self, files: FileSet, tmp_path: Path) -> None:
        text = (
            'name,kind\n"bird/1.jpg",hawk\n2.jpg,"owl, '
            'grey"\ncat/1.jpg,hawk\n3.jpg,été\n9.jpg,hawk\n'
        )
        targets, classes, *_ = given_targets(csv(tmp_path, text), files)
        assert classes == ["hawk", "owl, grey", "été"] and targets.tolist() == [0, 1, 0, 2, 0]

    @pytest.mark.parametrize("header", ["", "file,label\n"])
    def test_rows_that_contradict_each_other(
        self, files: FileSet, tmp_path: Path, header: str
    ) -> None:
        assert given_targets(csv(tmp_path, header + ROWS + ROWS), files)[0].tolist() == [
            3,
            10,
            3,
            4,
            5,
        ]
        rows = (2, 7) if header else (1, 6)
        with pytest.raises(
            ConfigError,
            match=(
                rf"rows {rows[0]} and {rows[1]} of .*targets\.txt give bird/1\.jpg .*\('3' and "
                r"'4'\)"
            ),
        ):
            given_targets(csv(tmp_path, header + ROWS + "bird/1.jpg,4\n"), files)

    def test_that_is_missing(self, files: FileSet, tmp_path: Path) -> None:
        with pytest.raises(DataNotFoundError, match=r"none\.csv does not exist"):
            given_targets(str(tmp_path / "none.csv"), files)

    @pytest.mark.parametrize("text", ["bird/1.jpg\n", "bird/1.jpg;3\n", ROWS + "lonely\n"])
    def test_without_a_second_column(self, files: FileSet, tmp_path: Path, text: str) -> None:
        with pytest.raises(
            ConfigError,
            match=(
                r"row \d of .*targets\.txt has no second column(: write file,target|; its .* "
                r"delimiter=';')"
            ),
        ):
            given_targets(csv(tmp_path, text), files)

    @pytest.mark.parametrize("text", ["", "file,label\n", "other.jpg,3\n"])
    def test_without_the_files(self, files: FileSet, tmp_path: Path, text: str) -> None:
        with pytest.raises(ConfigError, match=r"no entry for bird/1\.jpg"):
            given_targets(csv(tmp_path, text), files)

    def test_of_files_that_are_not_there(self, files: FileSet, tmp_path: Path) -> None:
        tables: list[tuple[Any, str]] = [
            (
                csv(tmp_path, ROWS + "no.jpg,1\nnor.jpg,2\n"),
                r"targets: .*targets\.txt: 2 \(no\.jpg, nor\.jpg\) of 7 labels are of files that",
            ),
            (
                {**dict.fromkeys(NAMES, 1), "no.jpg": 2},
                r"targets: 1 \(no\.jpg\) of 6 labels are of files that",
            ),
        ]
        for table, message in tables:
            with pytest.raises(
                DataNotFoundError,
                match=(
                    rf"{message} .*: is the download complete. Add the files, remove these, or "
                    r"pass unused_targets='skip'"
                ),
            ):
                given_targets(table, files)
            with pytest.warns(
                HeadraceWarning, match=rf"{message} are not among the data: left out"
            ):
                assert len(given_targets(table, files, skips_unused=True)[0]) == len(NAMES)

    def test_unused_targets_is_for_names(self, tmp_path: Path) -> None:
        Image.new("RGB", (4, 3)).save(tmp_path / "1.png")
        for targets in (None, len, "folders"):
            with pytest.raises(ConfigError, match="unused_targets"):
                ImageDataset(tmp_path, targets=targets, unused_targets="skip")
        with pytest.raises(
            ConfigError, match="unused_targets must be 'raise' or 'skip', not 'warn'"
        ):
            ImageDataset(tmp_path, targets={"1.png": 3}, unused_targets="warn")  # type: ignore[arg-type]
        with pytest.warns(HeadraceWarning, match=r"1 \(2\.png\) of 2 labels"):
            assert ImageDataset(
                tmp_path, targets={"1.png": 3, "2.png": 4}, unused_targets="skip"
            ).targets.tolist() == [3]

    def test_names_may_lack_their_ending(self, files: FileSet, tmp_path: Path) -> None:
        text = "id,label\nbird/1,3\n2,10\ncat/1.jpg,3\n3,4\n9,5\n"
        assert given_targets(csv(tmp_path, text), files)[0].tolist() == [3, 10, 3, 4, 5]

    @pytest.mark.parametrize("kind", ["folder", "latin-1", "bytes"])
    def test_that_is_none(self, files: FileSet, tmp_path: Path, kind: str) -> None:
        path = {
            "folder": lambda: str(tmp_path),
            "latin-1": lambda: csv(tmp_path, "bird/1.jpg,\xe9t\xe9\n".encode("latin-1")),
            "bytes": lambda: csv(tmp_path, bytes(range(256))),
        }[kind]()
        with pytest.raises(HeadraceError, match=str(tmp_path)):
            given_targets(path, files)


TABLE = {
    "file": NAMES,
    "species": ["hawk", "owl", "lynx", "lynx", "dingo"],
    "age": [3, 1, 4, 1, 5],
    "weight": [0.5, 2.0, 7.5, 1.25, 9.0],
    "patient": ["p1", "p1", "p2", "p3", "p3"],
}


def as_csv(table: dict[str, list[Any]], folder: Path) -> str:
    rows = [list(table), *zip(*table.values(), strict=True)]
    return csv(folder, "".join(",".join(map(str, row)) + "\n" for row in rows))


def as_json(table: dict[str, list[Any]], folder: Path, lines: bool = False) -> str:
    records = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    path = folder / ("labels.jsonl" if lines else "labels.json")
    path.write_text("\n".join(map(json.dumps, records)) if lines else json.dumps(records))
    return str(path)


def as_object(table: dict[str, list[Any]], folder: Path) -> str:
    records = {
        row[0]: dict(zip([*table][1:], row[1:], strict=True))
        for row in zip(*table.values(), strict=True)
    }
    (folder / "object.json").write_text(json.dumps(records))
    return str(folder / "object.json")


def as_parquet(table: dict[str, list[Any]], folder: Path) -> str:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(table), folder / "labels.parquet")
    return str(folder / "labels.parquet")


def as_lines(table: dict[str, list[Any]], folder: Path) -> str:
    return as_json(table, folder, lines=True)


FORMS = [as_csv, as_json, as_lines, as_object, as_parquet]


class TestTables:
    @pytest.mark.parametrize("form", FORMS)
    def test_several_columns_become_a_dict(self, files: FileSet, tmp_path: Path, form: Any) -> None:
        labels = given_targets(form(TABLE, tmp_path), files)
        assert (
            labels.targets[3] == {"species": 2, "age": 1, "weight": 1.25, "patient": 2}
            and len(labels.targets) == 5
        )
        assert labels.classes == [] and labels.column_classes["species"] == [
            "dingo",
            "hawk",
            "lynx",
            "owl",
        ]
        assert labels.columns["age"].tolist() == TABLE["age"] and labels.columns[
            "patient"
        ].tolist() == [0, 0, 1, 2, 2]
        assert [one["age"] for one in labels.targets[1:3]] == [1, 4]

    @pytest.mark.parametrize("form", FORMS)
    def test_one_column_is_chosen_and_all_are_kept(
        self, files: FileSet, tmp_path: Path, form: Any
    ) -> None:
        labels = given_targets(form(TABLE, tmp_path), files, target_name="species")
        assert labels.targets.tolist() == [1, 3, 2, 2, 0] and labels.classes == [
            "dingo",
            "hawk",
            "lynx",
            "owl",
        ]
        assert list(labels.columns) == ["species", "age", "weight", "patient"]
        assert given_targets(form(TABLE, tmp_path), files, target_name=["age"]).targets[0] == {
            "age": 3
        }

    def test_the_column_of_files_is_found_by_what_it_holds(
        self, files: FileSet, tmp_path: Path
    ) -> None:
        # files are called so, too
        turned = {
            **{name: TABLE[name] for name in ("patient", "age", "file")},
            "age": [9, 1, 2, 3, 3],
        }
        labels = given_targets(as_csv(turned, tmp_path), files)
        assert labels.targets[1] == {"patient": 0, "age": 1} and list(labels.columns) == [
            "patient",
            "age",
        ]

    @pytest.mark.parametrize("form", [as_csv, as_json, as_parquet])
    def test_no_column_names_files(self, files: FileSet, tmp_path: Path, form: Any) -> None:
        table = {name: TABLE[name] for name in ("species", "weight")}
        with pytest.raises(
            ConfigError,
            match=(
                r"no column of .* \(species, weight\) holds names of the files, such as '.*': add "
                r"one"
            ),
        ):
            given_targets(form(table, tmp_path), files)

    def test_the_index_that_pandas_writes_is_no_label(self, files: FileSet, tmp_path: Path) -> None:
        with_index = {"": list(range(5)), **TABLE}
        labels = given_targets(as_csv(with_index, tmp_path), files)
        assert list(labels.columns) == ["species", "age", "weight", "patient"]
        with pytest.raises(
            ConfigError, match=r"column 1 of .* has no name in the header: name it, or leave it out"
        ):
            given_targets(as_csv({**with_index, "": [3, 1, 4, 1, 5]}, tmp_path), files)

    @pytest.mark.parametrize("form", [as_json, as_object, as_parquet])
    def test_lists_of_texts_are_several_classes(
        self, files: FileSet, tmp_path: Path, form: Any
    ) -> None:
        tags = [["red"], ["red", "big"], [], ["big", "big"], ["old"]]
        labels = given_targets(form({"file": NAMES, "tags": tags}, tmp_path), files)
        assert labels.classes == ["big", "old", "red"] and isinstance(labels.targets, MultiHot)
        wanted = [[0, 0, 1], [1, 0, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0]]
        assert [target.tolist() for target in labels.targets] == wanted and labels.targets[
            0
        ].dtype == np.float32
        assert [target.tolist() for target in labels.targets.take(np.array([4, 1]))] == [
            wanted[4],
            wanted[1],
        ]

    def test_a_separator_parts_texts(self, files: FileSet, tmp_path: Path) -> None:
        table = {
            "file": NAMES,
            "tags": ["red", "red; big", "", "big;big", "old"],
            "age": [1, 2, 3, 4, 5],
        }
        labels = given_targets(
            as_csv(table, tmp_path), files, target_name="tags", label_separator=";"
        )
        assert [target.tolist() for target in labels.targets] == [
            [0, 0, 1],
            [1, 0, 1],
            [0, 0, 0],
            [1, 0, 0],
            [0, 1, 0],
        ]
        assert (
            given_targets(
                as_csv({**table, "kind": TABLE["species"]}, tmp_path), files, label_separator=";"
            ).targets[1]["kind"]
            == 3
        )
        patients = given_targets(
            as_csv({**table, "p": TABLE["patient"]}, tmp_path),
            files,
            target_name="tags",
            label_separator=";",
        )
        assert patients.columns["p"].tolist() == [0, 0, 1, 2, 2]
        by_name = dict(zip(NAMES, table["tags"], strict=True))
        assert [t.tolist() for t in given_targets(by_name, files, label_separator=";").targets] == [
            t.tolist() for t in labels.targets
        ]

    @pytest.mark.parametrize("form", [as_csv, as_json, as_parquet])
    def test_an_empty_cell_is_named(self, files: FileSet, tmp_path: Path, form: Any) -> None:
        empty = "" if form is as_csv else None
        table = {**TABLE, "age": [3, 1, empty, 1, 5]}
        row = 4 if form is as_csv else 3
        with pytest.raises(
            ConfigError, match=rf"row {row} of .* has no 'age': fill it in.*target_name="
        ):
            given_targets(form(table, tmp_path), files)
        assert (
            given_targets(form(table, tmp_path), files, target_name="species").columns["age"][2]
            is None
        )

    @pytest.mark.parametrize("form", [as_csv, as_json, as_parquet])
    def test_rows_that_contradict_each_other(
        self, files: FileSet, tmp_path: Path, form: Any
    ) -> None:
        twice = {name: [*values, values[0]] for name, values in TABLE.items()}
        assert given_targets(form(twice, tmp_path), files).targets[0]["age"] == 3
        twice["age"][-1] = 9
        with pytest.raises(
            ConfigError,
            match=r"rows \d and \d of .* give bird/1\.jpg different targets \('?3'? and '?9'?\)",
        ):
            given_targets(form(twice, tmp_path), files)

    @pytest.mark.parametrize("form", FORMS)
    def test_a_file_without_a_row(self, files: FileSet, tmp_path: Path, form: Any) -> None:
        short = {name: values[:3] for name, values in TABLE.items()}
        with pytest.raises(
            ConfigError, match=r"no entry for cat/deep/er/3\.jpg .*nor for 1 others of 5 files"
        ):
            given_targets(form(short, tmp_path), files)

    def test_a_column_that_is_not_there(self, files: FileSet, tmp_path: Path) -> None:
        with pytest.raises(
            MissingNameError,
            match=r"no column 'kind' of labels; it has 'species', 'age', 'weight', 'patient'",
        ):
            given_targets(as_csv(TABLE, tmp_path), files, target_name="kind")
        with pytest.raises(ConfigError, match="has no column beside that of the files"):
            given_targets(as_json({"file": NAMES}, tmp_path), files)
        with pytest.raises(ConfigError, match="target_name is for the columns of a table"):
            given_targets(dict.fromkeys(NAMES, 1), files, target_name="kind")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                ROWS.replace("\n", ",more,columns\n"),
                "has 4 columns and no header: name them in a first row",
            ),
            ("file,label,age\nbird/1.jpg,3\n", "row 2 of .* has 2 cells, and there are 3 columns"),
            (
                "file,label\nbird/1.jpg,3,4\n",
                "row 2 of .* has 3 cells, and there are 2 columns: quote",
            ),
            ("file,label,label\nbird/1.jpg,3,4\n", "has a name twice"),
            (
                '[{"file": "bird/1.jpg", "a": 1}, {"file": "bird/2.jpg", "b": 1}]',
                "row 2 of .* has the fields file, b, and the first has file, a",
            ),
            ('["bird/1.jpg", 3]', "row 1 of .* is no object with fields, but 'bird/1.jpg'"),
            ('{"bird/1.jpg": 3', "is no JSON file"),
        ],
    )
    def test_tables_that_make_no_sense(
        self, files: FileSet, tmp_path: Path, text: str, message: str
    ) -> None:
        with pytest.raises(HeadraceError, match=message):
            given_targets(csv(tmp_path, text), files)

    def test_a_damaged_parquet_table(self, files: FileSet, tmp_path: Path) -> None:
        path = Path(as_parquet(TABLE, tmp_path))
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(FormatError, match=r"labels\.parquet is a damaged Parquet table"):
            given_targets(str(path), files)

    def test_parquet_without_pyarrow(
        self, files: FileSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        (tmp_path / "labels.parquet").write_bytes(b"PAR1...")
        with pytest.raises(
            ConfigError, match=r"needs the package pyarrow: pip install 'headrace\[arrow\]'"
        ):
            given_targets(str(tmp_path / "labels.parquet"), files)

    def test_frames_of_pandas_and_arrow(self, files: FileSet) -> None:
        pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
        frame = pandas.DataFrame(TABLE)
        for table in (
            frame,
            frame.set_index("file"),
            pyarrow.table(TABLE),
            frame.astype({"species": "category"}),
        ):
            labels = given_targets(checked_targets(table, "folder"), files)
            assert labels.targets[3] == {"species": 2, "age": 1, "weight": 1.25, "patient": 2}
        series = frame.set_index("file")["species"]
        assert given_targets(checked_targets(series, "folder"), files).targets.tolist() == [
            1,
            3,
            2,
            2,
            0,
        ]


class TestURLs:
    @pytest.mark.parametrize("form", FORMS)
    def test_tables_may_be_behind_urls(
        self, files: FileSet, tmp_path: Path, memory: Any, form: Any
    ) -> None:
        path = form(TABLE, tmp_path)
        memory.put(path, "/labels/" + os.path.basename(path))
        labels = given_targets(f"memory://labels/{os.path.basename(path)}", files)
        assert labels.targets[3] == {"species": 2, "age": 1, "weight": 1.25, "patient": 2}

    def test_that_are_missing(self, files: FileSet, memory: Any) -> None:
        with pytest.raises(
            DataNotFoundError, match=r"targets: memory://labels/none\.csv does not exist"
        ):
            given_targets("memory://labels/none.csv?key=hunter2", files)


class TestSplitsByColumns:
    @pytest.fixture
    def dataset(self, photos: Path) -> ImageDataset:
        names = [str(path.relative_to(photos)) for path in sorted(photos.rglob("*.*"))]
        table = {
            "file": names,
            "kind": [name.partition("/")[0] for name in names],
            "patient": [f"p{n // 4}" for n in range(len(names))],
        }
        (photos.parent / f"{photos.name}.json").write_text(
            json.dumps(
                [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
            )
        )
        return ImageDataset(
            photos,
            targets=str(photos.parent / f"{photos.name}.json"),
            target_name="kind",
            image_size=8,
        )

    def test_groups_and_labels_may_be_columns(self, dataset: ImageDataset) -> None:
        assert dataset.classes == ["circle", "gradient", "noise"] and dataset.column_classes[
            "patient"
        ] == [f"p{n}" for n in range(6)]
        train, val = dataset.split(0.5, groups="patient", stratify="kind")
        patients = [
            set(dataset.label_columns["patient"][part.whole_indices(range(len(part)))])
            for part in (train, val)
        ]
        assert len(train) == len(val) == 12 and not patients[0] & patients[1]
        assert np.bincount(train.targets).tolist() == np.bincount(val.targets).tolist() == [4, 4, 4]
        for train, val in dataset[4:].folds(5, groups="patient"):
            assert len(val) == 4 and len(train) == 16
        with MemoryEfficientDataset(dataset[8:]) as wrapped:
            assert [len(part) for part in wrapped.split([0.5, 0.25, 0.25], groups="patient")] == [
                8,
                4,
                4,
            ]

    def test_validation_parts_have_their_own_transform(self, dataset: ImageDataset) -> None:
        train, val, test = dataset.split([0.5, 0.25, 0.25], val_transform=lambda image: 7)
        assert train[0][0].shape == (3, 8, 8) and val[0][0] == test[0][0] == 7
        assert all(
            val[0][0] == 7 and train[0][0].shape == (3, 8, 8)
            for train, val in dataset.folds(3, val_transform=lambda image: 7)
        )

    def test_random_transforms_of_validation_parts_are_warned_of(
        self, dataset: ImageDataset
    ) -> None:
        augmented = dataset.with_transform([RandomHorizontalFlip()])
        for split in (
            lambda **options: augmented.split(0.5, **options),
            lambda **options: augmented.folds(3, **options),
        ):
            with pytest.warns(
                HeadraceWarning,
                match=(
                    r"views .*transformed at random \(RandomHorizontalFlip\): pass "
                    r"val_transform="
                ),
            ):
                split()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                split(val_transform=[])
                dataset.split(0.5)

    def test_columns_that_are_not_there(self, dataset: ImageDataset, photos: Path) -> None:
        with pytest.raises(
            MissingNameError,
            match=r"groups: the table of labels has no column 'person'; it has 'kind', 'patient'",
        ):
            dataset.split(0.5, groups="person")
        with pytest.raises(
            ConfigError, match="stratify='kind': this ImageDataset has no table of labels"
        ):
            ImageDataset(photos).split(0.5, stratify="kind")

    def test_a_dict_is_no_single_label(self, photos: Path, dataset: ImageDataset) -> None:
        several = ImageDataset(photos, targets=dataset._arguments["targets"])
        with pytest.raises(
            ConfigError, match=r"is no single label: .*one of its columns \(kind, patient\)"
        ):
            several.split(0.5, stratify=True)
        assert several[5:7].targets[0] == {"kind": 0, "patient": 1}


@pytest.mark.slow
class TestTablesKeepTheLaws(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.photos, self.labels = photos, tmp_path_factory.getbasetemp() / "contract-labels.jsonl"
        names = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.*"))
        rows = [
            {
                "file": name,
                "kind": ["oak", "ash", "elm"][n % 3],
                "age": n,
                "seen": ["may"] * (1 + n % 2),
            }
            for n, name in enumerate(names)
        ]
        if not self.labels.exists():
            self.labels.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(self, **options: Any) -> ImageDataset:
        return ImageDataset(self.photos, targets=self.labels, image_size=8, **options)


@pytest.mark.parametrize("other", ["deep/1.jpg", "a/1.jpg"])
def test_a_file_s_own_name_is_that_of_no_other(other: str, tmp_path: Path) -> None:
    files = files_of(tmp_path, ["1.jpg", other])
    with pytest.raises(
        ConfigError,
        match=(
            rf"the file name 1.jpg fits (1.jpg and {other}|{other} and 1.jpg): give relative "
            r"paths"
        ),
    ):
        given_targets({"1.jpg": 7}, files)
    assert sorted(given_targets({"1.jpg": 7, other: 8}, files).targets.tolist()) == [7, 8]


class TestCellsOfATable:
    def opened(self, tmp_path: Path, table: str, **options: Any) -> ImageDataset:
        for name in "xyz":
            Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
        (tmp_path / "labels.csv").write_text(table)
        return ImageDataset(tmp_path, targets=tmp_path / "labels.csv", **options)

    def test_with_underscores_are_texts(self, tmp_path: Path) -> None:
        dataset = self.opened(tmp_path, "file,label\nx.png,1_2\ny.png,12\nz.png,1_3\n")
        assert (list(dataset.targets), dataset.classes) == ([1, 0, 2], ["12", "1_2", "1_3"])

    def test_beyond_64_bits_matter_only_as_targets(self, tmp_path: Path) -> None:
        table = f"file,label,study\nx,cat,{1 << 63}\ny,dog,{1 << 70}\nz,cat,1\n"
        dataset = self.opened(tmp_path, table, target_name="label")
        assert list(dataset.targets) == [0, 1, 0] and list(dataset.label_columns["study"]) == [
            1 << 63,
            1 << 70,
            1,
        ]
        with pytest.raises(
            ConfigError,
            match=rf"column 'study' of .*labels.csv has {1 << 63}, an integer of more than 64 bits",
        ):
            self.opened(tmp_path, table)
        with pytest.raises(ConfigError, match="targets has 9223372036854775808, an integer"):
            ImageDataset(tmp_path, targets=dict(zip("xyz", (1, 2, 1 << 63), strict=True)))


def test_deeply_nested_json_is_an_error_of_ours(tiny_photos: Path, tmp_path: Path) -> None:
    path = tmp_path / "labels.json"
    for text in ("[" * 100_000, '{"images": ' * 50_000):
        path.write_text(text)
        with pytest.raises(FormatError, match="no JSON file"):
            ImageDataset(tiny_photos, targets=path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_labels_in_a_pipe_are_refused(photos: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "labels.csv")
    with pytest.raises(ConfigError, match=r"labels\.csv is a pipe"):
        ImageDataset(photos, targets=tmp_path / "labels.csv")
