"""Targets of files: each file gets the one that was meant, and what is not clear is refused."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from pyarrow import parquet

from headrace import ImageDataset, MemoryEfficientDataset
from headrace.datasets.image.image import checked_targets, labels_of
from headrace.datasets.image.labels import Labels, MultiHot, Wanted
from headrace.errors import (
    ConfigError,
    DataNotFoundError,
    FormatError,
    HeadraceError,
    HeadraceWarning,
    MissingNameError,
)
from headrace.formats.files import folder_targets
from headrace.formats.resolve.file_set import IMAGES, FileSet, PackedNames
from headrace.formats.table import columns as library
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from tests.formats.resolve.scanning import scan

PATHS = st.from_regex(r"[ab \-.\x00]{1,2}(/[ab \-.\x00]{1,2}){0,2}\Z")
NAMES = ["bird/1.jpg", "bird/2.jpg", "cat/1.jpg", "cat/deep/er/3.jpg", "dog/9.jpg"]


def files_of(root: Path, names: list[Any] = NAMES) -> FileSet:
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "wb").close()
    return scan(root, (".jpg",))


def files_named(names: Any) -> FileSet:
    """Files that are nowhere."""
    return FileSet(("root",), ("",), None, PackedNames(names), (), frozenset(), None, None, IMAGES)


def given_targets(targets: Any, files: FileSet, **options: Any) -> Labels:
    return labels_of(Wanted(targets, **options), files, RemoteOptions())


@pytest.fixture
def files(tmp_path: Path) -> FileSet:
    return files_of(tmp_path)


def save(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 3)).save(path)


class TestFolders:
    def test_of_several_roots_are_one_class_if_they_have_one_name(self, tmp_path: Path) -> None:
        files_of(tmp_path / "one", ["cat/1.jpg", "dog/1.jpg"])
        files_of(tmp_path / "two", ["cat/2.jpg", "ant/1.jpg"])
        targets, classes = folder_targets(scan([tmp_path / "one", tmp_path / "two"], (".jpg",)))
        assert classes == ["ant", "cat", "dog"]
        assert np.sort(targets).tolist() == [0, 1, 1, 2]

    @given(st.lists(PATHS, min_size=1, max_size=6))
    def test_are_those_of_each_name(self, listed: list[str]) -> None:
        """Runs of names are not looked at one by one: the answer is as if they were."""
        names = sorted(map(str.encode, listed), key=lambda name: name.replace(b"/", b"\0"))
        files = files_named(names)
        folders = [name.partition(b"/")[0] if b"/" in name else None for name in names]
        if all(folder is None for folder in folders):
            assert folder_targets(files) == (None, [])
        elif None in folders:
            with pytest.raises(ConfigError, match="lies beside the class folders") as caught:
                folder_targets(files)
            assert redact(files.path(folders.index(None))) in str(caught.value)
        else:
            classes = sorted(set(folders))
            targets, found = folder_targets(files)
            assert found == [name.decode() for name in classes]
            assert targets is not None
            assert targets.dtype == np.int64
            assert targets.tolist() == [classes.index(folder) for folder in folders]

    def test_a_table_beside_images_is_the_default(self, tmp_path: Path, memory: Any) -> None:
        """As HuggingFace's imagefolder has it."""
        for name in ("a/1.png", "b/2.png"):
            save(tmp_path / name)
        rows = [{"file_name": "a/1.png", "kind": "oak"}, {"file_name": "b/2.png", "kind": "elm"}]
        for name, text in (
            ("metadata.csv", "file_name,kind\na/1.png,oak\nb/2.png,elm\n"),
            ("metadata.jsonl", "\n".join(map(json.dumps, rows))),
        ):
            csv(tmp_path, text, name)
            memory.put(f"{tmp_path}/", f"/{name}/", recursive=True)
            for path in (tmp_path, f"memory://{name}"):
                dataset = ImageDataset(path)
                assert dataset.classes == ["elm", "oak"] and dataset.targets.tolist() == [1, 0]
            assert ImageDataset(tmp_path, targets="folders").classes == ["a", "b"]
            (tmp_path / name).unlink()
        csv(tmp_path, "file_name,kind,age\na/1.png,oak,3\nb/2.png,elm,4\n", "metadata.csv")
        with pytest.raises(ConfigError, match=r"metadata\.csv .*'kind', 'age': .*target_name="):
            ImageDataset(tmp_path)
        assert ImageDataset(tmp_path, target_name="age").targets.tolist() == [3, 4]
        csv(tmp_path, "picture,age\na/1.png,3\n", "metadata.csv")  # of something else
        assert ImageDataset(tmp_path).classes == ["a", "b"]

    def test_a_class_folder_without_files(self, tmp_path: Path) -> None:
        files_of(tmp_path)
        for name in ("empty", ".cache", "__MACOSX"):
            (tmp_path / name).mkdir()
        with pytest.raises(DataNotFoundError, match="'empty'"):
            folder_targets(scan(tmp_path, (".jpg",)))
        (tmp_path / "empty").rmdir()
        assert folder_targets(scan(tmp_path, (".jpg",)))[1] == ["bird", "cat", "dog"]

    def test_splits_are_refused(self, tmp_path: Path) -> None:
        for number, folders in enumerate(
            (("train", "val"), ("Test", "training", "valid"), ("train2017", "val2017"), ("train",))
        ):
            root = tmp_path / str(number)
            for folder in folders:
                save(root / folder / "cat" / "1.png")
            (root / "notes").mkdir()
            first = str(root / folders[0])
            with pytest.raises(ConfigError, match=rf"holds {', '.join(folders)}: .*'{first}'"):
                ImageDataset(root)
            (root / "notes").rmdir()
            assert ImageDataset(root, targets="folders").classes == list(folders)
            assert ImageDataset(root, targets=None).targets is None
            assert ImageDataset(first).classes == ["cat"]

    def test_images_beside_their_targets_are_refused(self, tmp_path: Path) -> None:
        for case, (beside, targets) in enumerate(
            (
                ("masks/1_mask.png", "masks"),
                ("labels/1.txt", "labels"),
                ("annotations/all.json", "annotations"),
                ("all.json", "all.json"),
            )
        ):
            root = tmp_path / str(case)
            save(root / "images" / "1.png")
            path = root / beside
            if path.suffix == ".png":
                save(path)
            else:
                path.parent.mkdir(exist_ok=True)
                path.write_text('{"images": [], "annotations": [], "categories": []}')
            said = f"'{root / 'images'}'.* as targets=, such as targets='{root / targets}';"
            with pytest.raises(ConfigError, match=said):
                ImageDataset(root)
            assert ImageDataset(root, targets=None).targets is None
        save(tmp_path / "classes" / "images" / "1.png")
        save(tmp_path / "classes" / "trains" / "1.png")
        (tmp_path / "classes" / "about.json").write_text('{"licence": "CC0"}')
        assert ImageDataset(tmp_path / "classes").classes == ["images", "trains"]


class TestGiven:
    def test_a_mapping_by_relative_path_or_name(self, files: FileSet) -> None:
        assert given_targets(None, files)[:2] == (None, [])
        by_path = {name: number * 10 for number, name in enumerate(NAMES)}
        assert given_targets(by_path, files).targets.tolist() == [0, 10, 20, 30, 40]
        # one 1.jpg by its path, the other by its name
        by_name = {"1.jpg": 1, "2.jpg": 2, "3.jpg": 3, "9.jpg": 9, "cat/1.jpg": 11}
        targets, classes, *_ = given_targets(by_name, files)
        assert targets.tolist() == [1, 2, 11, 3, 9]
        assert targets.dtype == np.int64
        assert classes == []
        with pytest.raises(ConfigError, match=r"dog/9\.jpg"):
            given_targets(dict.fromkeys(NAMES[:-1], 1), files)

    def test_names_that_are_whole_paths(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Any
    ) -> None:
        monkeypatch.chdir(tmp_path)
        paths = ["b/1.png", "a/1.png"]
        for path in paths:
            save(Path(path))
            memory.put(path, f"/{path}")
        urls = [f"memory://{path}" for path in paths]
        absolute = [os.path.abspath(path) for path in paths]
        for data, names in ((paths, paths), (paths, absolute), (urls, urls)):
            table = as_csv({"kind": ["x", "y"], "file": names}, tmp_path)
            for targets in (dict(zip(names, "xy", strict=True)), table):
                dataset = ImageDataset(data, targets=targets)
                assert dataset.classes == ["x", "y"]
                assert [int(target) for _, target in dataset.samples] == [0, 1]
        with pytest.raises(ConfigError, match=r"c/1\.png.* belong to no file"):
            ImageDataset(paths, targets={"c/1.png": 1, "a/1.png": 2})

    def test_a_name_that_fits_several_files(self, files: FileSet, tmp_path: Path) -> None:
        for targets in (dict.fromkeys(("1.jpg", "2.jpg"), 1), csv(tmp_path, "1.jpg,1\n2.jpg,2\n")):
            with pytest.raises(ConfigError, match=r"1\.jpg fits bird/1\.jpg and cat/1\.jpg"):
                given_targets(targets, files)
        for other in ("deep/1.jpg", "a/1.jpg"):  # behind and before the file itself
            two = files_of(tmp_path / other[0], ["1.jpg", other])
            with pytest.raises(ConfigError, match=rf"1.jpg fits .*{other}"):
                given_targets({"1.jpg": 7}, two)

    def test_values_of_a_callable(self, files: FileSet, tmp_path: Path) -> None:
        seen: list[str] = []

        def parity(path: str) -> str:
            seen.append(path)
            return "odd" if path.endswith(("1.jpg", "3.jpg")) else "even"

        targets, classes, *_ = given_targets(parity, files)
        assert seen == [str(tmp_path / name) for name in NAMES]
        assert classes == ["even", "odd"]
        assert targets.tolist() == [1, 0, 1, 1, 0]
        # values that are no classes stay as they are
        for value in (0.5, None, True, [1, 2], {"boxes": [1]}, (1, "a"), np.float32(2)):
            targets, classes, *_ = given_targets(lambda path, value=value: value, files)
            assert isinstance(targets, list), value
            assert all(target is value for target in targets), value
            assert classes == []
        values = iter([1, "a", None, 2.5, np.int64(3)])
        assert given_targets(lambda path: next(values), files).targets == [1, "a", None, 2.5, 3]
        with pytest.raises(ZeroDivisionError):
            given_targets(lambda path: 1 // 0, files)

    def test_what_can_be_no_targets(self, files: FileSet, tmp_path: Path) -> None:
        for wrong in (3, dict, [1, 2, 3, 4, 5], np.arange(5), np.float32(3), {"a", "b"}):
            with pytest.raises(ConfigError, match="targets"):
                checked_targets(wrong)
        for option in ({"target_name": "kind"}, {"delimiter": ";"}):
            with pytest.raises(ConfigError, match=next(iter(option))):
                given_targets(dict.fromkeys(NAMES, 1), files, **option)
        with pytest.raises(ConfigError, match=f"{1 << 63}"):
            given_targets(dict.fromkeys(NAMES, 1 << 63), files)

    def test_one_value_for_each_file(self, tmp_path: Path) -> None:
        pandas = pytest.importorskip("pandas")
        paths = [str(tmp_path / name) for name in ("b/1.png", "a/1.png", "a/{0,1}.png")]
        for path in paths:
            save(Path(path))
        for values in (
            [7, 5, 3],
            np.array([7, 5, 3]),
            torch.tensor([7, 5, 3], dtype=torch.uint8),
            pandas.Series([7, 5, 3], [4, 0, 1]),
        ):
            dataset = ImageDataset(paths, targets=values)
            found = {path: int(target) for path, target in dataset.samples}
            assert found == dict(zip(paths, [7, 5, 3], strict=True)), type(values)
        dataset = ImageDataset([Path(path) for path in paths], targets=["x", "y", "x"])
        assert dataset.class_to_idx == {"x": 0, "y": 1}
        assert sorted(int(target) for _, target in dataset.samples) == [0, 0, 1]
        dataset = ImageDataset(paths, targets=np.eye(3))
        assert dict(dataset.samples)[paths[0]].tolist() == [1, 0, 0]
        save(tmp_path / "b" / "2.png")
        for data_path, values in (
            (paths, [1, 2]),
            (paths, [1, 2, 3, 4]),
            (paths[:2] * 2, [1, 2, 3, 4]),
            ([tmp_path / "b", *paths[1:]], [1, 2, 3]),
            ([str(tmp_path / "b" / "*.png")], [1]),
            (tmp_path, [1, 2, 3, 4]),
            (["memory://x/1.png"], [1]),
        ):
            said = r"dict\(zip\(names, values\)\)|pass a list of the files"
            with pytest.raises(ConfigError, match=said):
                ImageDataset(data_path, targets=values)

    def test_of_files_that_are_not_there(self, files: FileSet, tmp_path: Path) -> None:
        with pytest.raises(DataNotFoundError, match=r"^targets: .*masks does not exist"):
            ImageDataset(tmp_path, targets=tmp_path / "masks")
        table = csv(tmp_path, ROWS + "no.jpg,1\nnor.jpg,2\n")
        for targets, message in (
            (table, r"targets\.txt: 2 \(no\.jpg, nor\.jpg\) of 7"),
            ({**dict.fromkeys(NAMES, 1), "no.jpg": 2}, r"1 \(no\.jpg\) of 6"),
        ):
            with pytest.raises(DataNotFoundError, match=message):
                given_targets(targets, files)
            with pytest.warns(HeadraceWarning, match=message):
                assert len(given_targets(targets, files, unused_targets="skip").targets) == 5
        save(tmp_path / "own" / "1.png")
        for wrong, how in ((None, "skip"), (len, "skip"), ("folders", "skip"), ({}, "warn")):
            with pytest.raises(ConfigError, match="unused_targets"):
                ImageDataset(tmp_path / "own", targets=wrong, unused_targets=how)


def csv(folder: Path, text: str | bytes, name: str = "targets.txt") -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


VALUES = [3, 10, 3, 4, 5]
ROWS = "".join(f"{name},{value}\n" for name, value in zip(NAMES, VALUES, strict=True))


class TestCSV:
    def test_of_numbers(self, files: FileSet, tmp_path: Path) -> None:
        for text in (
            ROWS,
            "Image , class\n" + ROWS,
            ROWS.replace("\n", "\r\n"),
            ROWS.replace(",", " , "),
            ROWS.replace("\n", "\n\n"),
            '"bird/1.jpg","3"\n' + ROWS[ROWS.index("\n") + 1 :],
            "\ufeff" + ROWS,
            "\ufefffile,label\n" + ROWS,
            "picture,breed\n" + ROWS,
            "id,label\nbird/1,3\n2,10\ncat/1.jpg,3\n3,4\n9,5\n",  # names without their endings
            ROWS + ROWS,
        ):
            targets, classes, *_ = given_targets(Path(csv(tmp_path, text)), files)
            assert targets.tolist() == VALUES, text
            assert targets.dtype == np.int64
            assert classes == []

    def test_of_fractions_and_texts(self, files: FileSet, tmp_path: Path) -> None:
        targets, classes, *_ = given_targets(csv(tmp_path, ROWS.replace("10", "0.5")), files)
        assert targets.tolist() == [3.0, 0.5, 3.0, 4.0, 5.0]
        assert targets.dtype == np.float64
        text = 'name,kind\n"bird/1.jpg",hawk\n2.jpg,"owl, grey"\ncat/1.jpg,hawk\n3.jpg,été\n'
        targets, classes, *_ = given_targets(csv(tmp_path, text + "9.jpg,1_2\n"), files)
        assert classes == ["1_2", "hawk", "owl, grey", "été"]
        assert targets.tolist() == [1, 2, 1, 3, 0]

    def test_another_delimiter_is_told_and_used(self, files: FileSet, tmp_path: Path) -> None:
        for delimiter in (";", "|", "\t"):
            path = csv(tmp_path, ROWS.replace(",", delimiter))
            with pytest.raises(ConfigError, match=re.escape(f"delimiter={delimiter!r}")):
                given_targets(path, files)
            assert given_targets(path, files, delimiter=delimiter).targets.tolist() == VALUES

    def test_tables_that_make_no_sense(self, files: FileSet, tmp_path: Path) -> None:
        for text, named in (
            (ROWS + "bird/1.jpg,4\n", r"rows 1 and 6 .*targets\.txt .*bird/1\.jpg .*'3' and '4'"),
            ("file,label\n" + ROWS + "bird/1.jpg,4\n", "rows 2 and 7 "),
            ("bird/1.jpg\n", r"row 1 of .*targets\.txt"),
            ("bird/1.jpg;3\n", "';'"),
            (ROWS + "lonely\n", "row 6 "),
            ("", r"bird/1\.jpg"),
            (ROWS.replace("\n", ",more,columns\n"), "row 1 .* 4 cells"),
            ("file,label,age\nbird/1.jpg,3\n", "row 2 .* 2 cells.* 3 columns"),
            ("file,label\nbird/1.jpg,3,4\n", "row 2 .* 3 cells.* 2 columns"),
            ("file,label,label\nbird/1.jpg,3,4\n", "'label', 'label'"),
            ('[{"file": "bird/1.jpg", "a": 1}, {"file": "bird/2.jpg", "b": 1}]', "row 2 .*'b'"),
            ('["bird/1.jpg", 3]', "row 1 .*'bird/1.jpg'"),
            ('{"bird/1.jpg": 3', "JSON"),
            ('{"bird/1.jpg": 3, "bird/1.jpg": 4}', r"bird/1\.jpg"),
            ("[" * 100_000, "JSON"),
            ('{"images": ' * 50_000, "JSON"),
            ("bird/1.jpg,\xe9t\xe9\n".encode("latin-1"), str(tmp_path)),
        ):
            with pytest.raises(HeadraceError, match=named):
                given_targets(csv(tmp_path, text), files)

    def test_files_that_hold_no_table(self, files: FileSet, tmp_path: Path, memory: Any) -> None:
        for path in (str(tmp_path / "none.csv"), "memory://labels/none.csv?key=hunter2"):
            with pytest.raises(DataNotFoundError, match=r"none\.csv does") as caught:
                given_targets(path, files)
            assert "hunter2" not in str(caught.value)
        with pytest.raises(HeadraceError, match=str(tmp_path)):
            given_targets(str(tmp_path), files)
        if hasattr(os, "mkfifo"):
            os.mkfifo(tmp_path / "labels.csv")
            with pytest.raises(ConfigError, match=r"labels\.csv is a pipe"):
                given_targets(str(tmp_path / "labels.csv"), files)


Table = dict[str, list[Any]]
TABLE: Table = {
    "file": NAMES,
    "species": ["hawk", "owl", "lynx", "lynx", "dingo"],
    "age": [3, 1, 4, 1, 5],
    "weight": [0.5, 2.0, 7.5, 1.25, 9.0],
    "patient": ["p1", "p1", "p2", "p3", "p3"],
}


def as_csv(table: Table, folder: Path) -> str:
    rows = [list(table), *zip(*table.values(), strict=True)]
    return csv(folder, "".join(",".join(map(str, row)) + "\n" for row in rows))


def records_of(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def as_json(table: Table, folder: Path) -> str:
    return csv(folder, json.dumps(records_of(table)), "labels.json")


def as_lines(table: Table, folder: Path) -> str:
    return csv(folder, "\n".join(map(json.dumps, records_of(table))), "labels.jsonl")


def as_object(table: Table, folder: Path) -> str:
    records = {record.pop("file"): record for record in records_of(table)}
    return csv(folder, json.dumps(records), "object.json")


def as_parquet(table: Table, folder: Path) -> str:
    path = folder / "labels.parquet"
    parquet.write_table(pyarrow.table(table), path)
    return str(path)


Form = Callable[[Table, Path], str]
FORMS: list[Form] = [as_csv, as_json, as_lines, as_object, as_parquet]


def without(*left_out: str) -> Table:
    return {name: values for name, values in TABLE.items() if name not in left_out}


class TestTables:
    def test_columns_become_targets(self, files: FileSet, tmp_path: Path, memory: Any) -> None:
        for form in FORMS:
            path = form(TABLE, tmp_path)
            memory.put(path, "/labels/" + os.path.basename(path))
            for where in (path, f"memory://labels/{os.path.basename(path)}"):
                labels = given_targets(where, files)
                assert len(labels.targets) == 5
                assert labels.targets[3] == {"species": 2, "age": 1, "weight": 1.25, "patient": 2}
            assert labels.classes == []
            assert labels.column_classes["species"] == ["dingo", "hawk", "lynx", "owl"]
            assert labels.columns["age"].tolist() == TABLE["age"]
            assert labels.columns["patient"].tolist() == [0, 0, 1, 2, 2]
            assert [one["age"] for one in labels.targets[1:3]] == [1, 4]
            labels = given_targets(path, files, target_name="species")
            assert labels.targets.tolist() == [1, 3, 2, 2, 0]
            assert labels.classes == ["dingo", "hawk", "lynx", "owl"]
            assert list(labels.columns) == ["species", "age", "weight", "patient"]
            assert given_targets(path, files, target_name=["age"]).targets[0] == {"age": 3}
            short = {name: values[:3] for name, values in TABLE.items()}
            with pytest.raises(
                ConfigError, match=r"2 \(cat/deep/er/3\.jpg, dog/9\.jpg\) of 5 files"
            ):
                given_targets(form(short, tmp_path), files)

    def test_tables_that_do_not_fit(self, files: FileSet, tmp_path: Path) -> None:
        for form in (as_csv, as_json, as_parquet):
            nameless = form(without("file", "age", "patient"), tmp_path)
            with pytest.raises(ConfigError, match=r"\(species, weight\)"):
                given_targets(nameless, files)
            empty = "" if form is as_csv else None
            path = form({**TABLE, "age": [3, 1, empty, 1, 5]}, tmp_path)
            row = 4 if form is as_csv else 3
            with pytest.raises(ConfigError, match=rf"'age' of .* row {row}:"):
                given_targets(path, files)
            assert given_targets(path, files, target_name="species").columns["age"][2] is None
            twice = {name: [*values, values[0]] for name, values in TABLE.items()}
            assert given_targets(form(twice, tmp_path), files).targets[0]["age"] == 3
            twice["age"][-1] = 9
            said = r"rows \d and \d .* bird/1\.jpg .*'?3'? and '?9'?"
            with pytest.raises(ConfigError, match=said):
                given_targets(form(twice, tmp_path), files)

    def test_the_column_of_files_is_told_by_values(self, files: FileSet, tmp_path: Path) -> None:
        # files are called so, too
        turned = {"patient": TABLE["patient"], "age": [9, 1, 2, 3, 3], "file": NAMES}
        labels = given_targets(as_csv(turned, tmp_path), files)
        assert labels.targets[1] == {"patient": 0, "age": 1}
        assert list(labels.columns) == ["patient", "age"]
        # the index that pandas writes is no label
        path = as_csv({"": list(range(5)), **TABLE}, tmp_path)
        assert list(given_targets(path, files).columns) == ["species", "age", "weight", "patient"]
        with pytest.raises(ConfigError, match="has no name in the header"):
            given_targets(as_csv({"": [3, 1, 4, 1, 5], **TABLE}, tmp_path), files)
        with pytest.raises(MissingNameError, match=r"'kind'.*'species'"):
            given_targets(as_csv(TABLE, tmp_path), files, target_name="kind")
        with pytest.raises(ConfigError, match="'file'"):
            given_targets(as_json({"file": NAMES}, tmp_path), files)

    def test_lists_and_split_texts_are_many_classes(self, files: FileSet, tmp_path: Path) -> None:
        tags = [["red"], ["red", "big"], [], ["big", "big"], ["old"]]
        wanted = [[0, 0, 1], [1, 0, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0]]
        for form in (as_json, as_object, as_parquet):
            labels = given_targets(form({"file": NAMES, "tags": tags}, tmp_path), files)
            assert labels.classes == ["big", "old", "red"]
            assert isinstance(labels.targets, MultiHot)
            assert [target.tolist() for target in labels.targets] == wanted
            assert labels.targets[0].dtype == np.float32
            taken = labels.targets.take(np.array([4, 1]))
            assert [target.tolist() for target in taken] == [wanted[4], wanted[1]]
        texts = ["red", "red; big", "", "big;big", "old"]
        table = {"file": NAMES, "tags": texts, "age": TABLE["age"], "p": TABLE["patient"]}
        path = as_csv(table, tmp_path)
        labels = given_targets(path, files, target_name="tags", label_separator=";")
        by_name = dict(zip(NAMES, texts, strict=True))
        other = given_targets(by_name, files, label_separator=";")
        for found in (labels.targets, other.targets):
            assert [target.tolist() for target in found] == wanted
        assert labels.columns["p"].tolist() == [0, 0, 1, 2, 2]
        assert given_targets(path, files, label_separator=";").targets[1]["p"] == 0

    def test_parquet_that_can_t_be_read(
        self, files: FileSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = Path(as_parquet(TABLE, tmp_path))
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(FormatError, match=r"labels\.parquet"):
            given_targets(str(path), files)
        library.pyarrow.cache_clear()
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(ConfigError, match=r"pip install 'headrace\[arrow\]'"):
            given_targets(str(path), files)

    def test_frames_of_pandas_and_arrow(self, files: FileSet) -> None:
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame(TABLE).astype({"species": "category"})
        for table in (frame, frame.set_index("file"), pyarrow.table(TABLE)):
            labels = given_targets(checked_targets(table), files)
            assert labels.targets[3] == {"species": 2, "age": 1, "weight": 1.25, "patient": 2}
        series = checked_targets(frame.set_index("file")["species"])
        assert given_targets(series, files).targets.tolist() == [1, 3, 2, 2, 0]

    def test_gaps_of_frames_in_columns_that_are_no_targets(self, files: FileSet) -> None:
        pandas = pytest.importorskip("pandas")
        for gap in (float("nan"), pandas.NA, pandas.NaT, np.arange(3)):
            by = pandas.Series([gap] * 5, dtype=object)
            frame = pandas.DataFrame({**without("age", "weight"), "by": by})
            for table in (frame, pandas.concat([frame, frame])):  # each row once, and twice
                given = checked_targets(table)
                labels = given_targets(given, files, target_name="species")
                assert labels.targets.tolist() == [1, 3, 2, 2, 0]
            if not isinstance(gap, np.ndarray):
                with pytest.raises(ConfigError, match=r"'by' of .* has no value in row 1"):
                    given_targets(given, files)

    def test_an_empty_cell_leaves_classes_numbers(self, files: FileSet, tmp_path: Path) -> None:
        for form in FORMS:
            empty = "" if form is as_csv else None
            part = ["train", empty, "val", "train", "val"]
            path = form({**without("age", "patient"), "part": part}, tmp_path)
            labels = given_targets(path, files, target_name="species")
            assert labels.columns["part"].tolist() == [1, 0, 2, 1, 2]
            assert labels.column_classes["part"] == ["", "train", "val"]
            with pytest.raises(ConfigError, match=r"'part' of .* has no value in row"):
                given_targets(path, files, target_name="part")

    def test_integers_beyond_64_bits_are_no_targets(self, files: FileSet, tmp_path: Path) -> None:
        studies = [1 << 63, 1 << 70, 1, 2, 3]
        path = as_csv({**without("age", "weight"), "study": studies}, tmp_path)
        assert given_targets(path, files, target_name="species").columns["study"] == studies
        with pytest.raises(ConfigError, match=rf"'study' of .*targets\.txt has {1 << 63}"):
            given_targets(path, files)
        path = as_csv({**without("age"), "weight": [(1 << 53) + 1, 0.5, 1, 2, 3]}, tmp_path)
        with pytest.raises(ConfigError, match=r"has 9007199254740993: .* not fit float64"):
            given_targets(path, files)


class TestSplitsByColumns:
    @pytest.fixture
    def dataset(self, photos: Path, tmp_path: Path) -> ImageDataset:
        names = [str(path.relative_to(photos)) for path in sorted(photos.rglob("*.*"))]
        kinds = [name.partition("/")[0] for name in names]
        patients = [f"p{number // 4}" for number in range(len(names))]
        labels = as_json({"file": names, "kind": kinds, "patient": patients}, tmp_path)
        return ImageDataset(photos, targets=labels, target_name="kind", image_size=8)

    def test_groups_and_labels_may_be_columns(self, dataset: ImageDataset) -> None:
        assert dataset.classes == ["circle", "gradient", "noise"]
        assert dataset.column_classes["patient"] == [f"p{number}" for number in range(6)]
        train, val = dataset.split(0.5, groups="patient", stratify="kind")
        patients = [
            set(dataset.label_columns["patient"][part.whole_indices(range(len(part)))])
            for part in (train, val)
        ]
        assert len(train) == len(val) == 12
        assert not patients[0] & patients[1]
        assert np.bincount(train.targets).tolist() == np.bincount(val.targets).tolist() == [4] * 3
        for train, val in dataset[4:].folds(5, groups="patient"):
            assert len(val) == 4
            assert len(train) == 16
        with MemoryEfficientDataset(dataset[8:]) as wrapped:
            parts = wrapped.split([0.5, 0.25, 0.25], groups="patient")
            assert [len(part) for part in parts] == [8, 4, 4]

    def test_validation_parts_have_their_own_transform(self, dataset: ImageDataset) -> None:
        parts = [dataset.split([0.5, 0.25, 0.25], val_transform=lambda image: 7)]
        parts += dataset.folds(3, val_transform=lambda image: 7)
        for train, *others in parts:
            assert train[0][0].shape == (3, 8, 8)
            assert all(part[0][0] == 7 for part in others)

    def test_columns_that_are_not_there(self, dataset: ImageDataset, photos: Path) -> None:
        with pytest.raises(MissingNameError, match=r"'person'.*'kind', 'patient'"):
            dataset.split(0.5, groups="person")
        with pytest.raises(ConfigError, match="'kind'"):
            ImageDataset(photos).split(0.5, stratify="kind")
        several = ImageDataset(photos, targets=dataset._arguments["targets"])
        with pytest.raises(ConfigError, match=r"\(kind, patient\)"):
            several.split(0.5, stratify=True)
        assert several[5:7].targets[0] == {"kind": 0, "patient": 1}
