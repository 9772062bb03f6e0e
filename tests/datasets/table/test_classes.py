"""Targets of tables: dictionary-encoded texts are class numbers, other texts stay texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import FormatError, HDF5Dataset, SampleError, TableDataset, create_dataloader, pack
from headrace.storage.hdf5.packed import packed_info
from headrace.testing.contract import DatasetContract
from tests.datasets.table.test_table import WRITERS, name_of, write

pa = pytest.importorskip("pyarrow")  # in the extra `test`

N = 24
KINDS = [("oak", "ash", "elm")[row % 3] for row in range(N)]
CLASSES = ["ash", "elm", "oak"]
TYPES = {"string": pa.string(), "large": pa.large_string(), "view": pa.string_view()}


def kinds_table(kinds: list[Any] = KINDS, kind: str = "string") -> Any:
    return pa.table(
        {
            "size": range(len(kinds)),
            "kind": pa.array(kinds, TYPES[kind]).dictionary_encode(),
            "plain": kinds,
        }
    )


@pytest.mark.parametrize("writer", WRITERS)
def test_dictionary_encoded_texts_are_classes(writer: str, tmp_path: Path) -> None:
    path = write(tmp_path / name_of(writer), kinds_table(), writer, rows=N)
    with TableDataset(path, "size", target_name="kind") as dataset:
        assert dataset.classes == CLASSES and dataset.class_to_idx == {"ash": 0, "elm": 1, "oak": 2}
        assert [CLASSES[target] for _, target in dataset] == KINDS and type(dataset[0][1]) is int
        _, targets = next(
            iter(create_dataloader(dataset, batch_size=N, shuffle=False, num_workers=0))
        )
        assert targets.dtype == torch.int64 and targets.tolist() == [
            CLASSES.index(kind) for kind in KINDS
        ]
        train, held_out = dataset.split(0.5, stratify=True)
        assert (
            np.bincount(train.targets).tolist()
            == np.bincount(held_out.targets).tolist()
            == [4, 4, 4]
        )


@pytest.mark.parametrize("code", [-1, 2])
def test_codes_beyond_the_dictionary_are_errors(code: int, tmp_path: Path) -> None:
    codes = pa.array([0, code, 1], pa.int32())
    kinds = pa.DictionaryArray.from_arrays(codes, ["oak", "ash"], safe=False)
    path = write(tmp_path / "a.arrow", pa.table({"kind": kinds}), "arrow", rows=3)
    with TableDataset(path, "kind") as dataset:
        assert [dataset[0], dataset[2]] == ["oak", "ash"]
        for read in (lambda: dataset[1], lambda: dataset.__getitems__([0, 1, 2])):
            with pytest.raises(SampleError, match=f"item {code} of its dictionary, which has 2"):
                read()


@pytest.mark.parametrize("kind", TYPES)
def test_any_type_of_texts(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", kinds_table(kind=kind), "arrow", rows=N)
    with TableDataset(path, "size", target_name="kind") as dataset:
        assert dataset.classes == CLASSES and dataset[0][1] == 2


def test_dictionaries_of_several_files_differ(tmp_path: Path) -> None:
    # each row group has a dictionary of its own
    write(tmp_path / "a.parquet", kinds_table(KINDS[:10]), rows=2)
    write(tmp_path / "b.parquet", kinds_table(["yew", "ash"]))
    with TableDataset(tmp_path, "size", target_name="kind") as dataset:
        assert dataset.classes == [*CLASSES, "yew"]
        assert [dataset.classes[target] for _, target in dataset] == [*KINDS[:10], "yew", "ash"]


def test_other_texts_stay_texts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", kinds_table())
    with TableDataset(path, "size", target_name="plain") as dataset:
        assert [target for _, target in dataset] == KINDS and dataset.classes == []
    with TableDataset(path, ["kind"]) as rows:
        assert rows[0] == {"kind": "oak"}  # no targets


def test_windows_have_the_class_or_text_of_their_row(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet",
        kinds_table().append_column("text", pa.array([kind * 5 for kind in KINDS])),
    )
    how: dict[str, Any] = {
        "text_column": "text",
        "stride": 4,
        "max_length": 8,
        "cache_dir": tmp_path / "cache",
    }
    with (
        TableDataset(path, target_name="kind", **how) as classes,
        TableDataset(path, target_name="plain", **how) as texts,
    ):
        assert classes.classes == CLASSES and len(classes) == len(texts) > N
        for index in range(len(classes)):
            assert (
                CLASSES[classes.targets[index]]
                == texts.targets[index]
                == classes.text_of(index)[:3]
            )


def test_a_missing_class_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", kinds_table([*KINDS[:5], None]))
    with pytest.raises(FormatError, match=r"row 5: target_name='kind': there is no value \(null\)"):
        TableDataset(path, "size", target_name="kind")


def test_classes_are_packed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", kinds_table())
    with TableDataset(path, "size", target_name="kind") as dataset:
        pack(dataset, tmp_path / "b.h5")
        with HDF5Dataset(tmp_path / "b.h5", target_name="targets") as packed:
            assert [target for _, target in packed] == [target for _, target in dataset]
    info = packed_info(str(tmp_path / "b.h5"))
    assert info is not None and info.classes == CLASSES


def test_categoricals_of_pandas(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"size": np.arange(N), "kind": pandas.Categorical(KINDS, ["oak", "fir", "elm", "ash"])}
    )
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_feather(tmp_path / "b.feather")
    for name in ("a.parquet", "b.feather"):
        with TableDataset(tmp_path / name, "size", target_name="kind") as dataset:
            assert (
                dataset.classes == CLASSES and [CLASSES[target] for _, target in dataset] == KINDS
            )


@pytest.mark.slow
class TestContract(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.getbasetemp() / "classes.parquet"
        if not self.path.exists():
            write(self.path, kinds_table(), rows=5)

    def make(self, **options: Any) -> TableDataset:
        return TableDataset(self.path, "size", target_name="kind", **options)
