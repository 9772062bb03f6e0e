"""SparseDataset: rows of CSR matrices in HDF5 and Zarr, as AnnData lays them out."""

from __future__ import annotations

import itertools
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr

from headrace import (
    ConfigError,
    FileChangedError,
    FormatError,
    HDF5Dataset,
    HeadraceWarning,
    MemoryEfficientDataset,
    MissingNameError,
    SampleError,
    SparseDataset,
    SparseRow,
    SparseRows,
    ZarrDataset,
    create_dataloader,
    open_dataset,
    pack,
    sparse_collate,
)
from headrace.inspecting import inspect
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.data.sparse import KINDS, csr_of, random_matrix, write_anndata, write_frame, write_matrix

pytestmark = pytest.mark.quick_every(5)

ROOT = Path(__file__).parent.parent.parent
ROWS, COLUMNS = 40, 30
DENSE = random_matrix(ROWS, COLUMNS)
MODES = ("lazy", "eager", "cached", "streaming")
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "HDF5, contiguous": (".h5ad", {}),
    "HDF5, raw chunks": (".h5ad", {"chunks": 16}),
    "HDF5, gzip": (".h5ad", {"chunks": 16, "compression": "gzip", "shuffle": True}),
    "HDF5, lzf": (".h5ad", {"chunks": 50, "compression": "lzf"}),
    "HDF5, one chunk": (".h5ad", {"chunks": 1 << 12, "compression": "gzip"}),
    "Zarr, raw chunks": (".zarr", {"chunks": 16, "compressors": None}),
    "Zarr, zstd": (".zarr", {"chunks": 16}),
    "Zarr, shards": (".zarr", {"chunks": 8, "shards": (400,)}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sparse")
    return {
        name: write_anndata(folder / f"{number}{ending}", DENSE, **options)
        for number, (name, (ending, options)) in enumerate(LAYOUTS.items())
    }


def batches(dataset: Any, **options: Any) -> list[Any]:
    loader = create_dataloader(
        dataset, **{"batch_size": 7, "shuffle": False, "num_workers": 0, **options}
    )
    try:
        return [*loader]
    finally:
        loader.close()


# -- what samples and batches are


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("direct", [True, False])
def test_rows_of_all_layouts(files: dict[str, Path], name: str, direct: bool) -> None:
    with SparseDataset(files[name], direct=direct) as dataset:
        assert (
            len(dataset) == ROWS
            and dataset.shape == (ROWS, COLUMNS)
            and dataset.columns == [f"gene {n}" for n in range(COLUMNS)]
        )
        assert all(torch.equal(dataset[i], torch.from_numpy(DENSE[i])) for i in (0, 2, 3, -1))
        for shuffle in (False, True, "block"):
            found = batches(dataset, shuffle=shuffle, seed=3)
            order = np.concatenate([dataset.epoch_order(shuffle, 3, 0, 7)[np.arange(ROWS)]])
            assert np.array_equal(torch.cat(found).numpy(), DENSE[order])
        is_library = not direct or "lzf" in name
        assert all(
            ("h5py" in how or "zarr-python" in how) == is_library
            for how in dataset.sample_source.how().values()
        )


@pytest.mark.parametrize("layout", ["csr", "pairs"])
@pytest.mark.parametrize(("index_dtype", "dtype"), [("u2", "f4"), ("i4", "f8"), ("i8", "u1")])
def test_batches_are_those_of_the_library(
    tmp_path: Path, layout: Any, index_dtype: str, dtype: str
) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    parts = csr_of(DENSE.astype(dtype))
    parts["indices"] = parts["indices"].astype(index_dtype)
    made = group.create_group("X")
    made.attrs.update(
        {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(DENSE.shape)}
    )
    for name, values in parts.items():  # as annbatch lays them out
        made.create_array(
            name,
            data=values,
            chunks=(16,),
            shards=(160,),
            compressors=zarr.codecs.BloscCodec(cname="lz4", clevel=3),
        )
    with (
        SparseDataset(tmp_path / "a.zarr", layout=layout) as dataset,
        SparseDataset(tmp_path / "a.zarr", layout=layout, direct=False) as plain,
    ):
        assert all("blosc out of shards" in how for how in dataset.sample_source.how().values())
        for shuffle in (False, True, "block"):
            order = dataset.epoch_order(shuffle, 5, 0, 7)[np.arange(ROWS)].tolist()
            found, expected = (batches(one, shuffle=shuffle, seed=5) for one in (dataset, plain))
            for batch, same_batch, start in zip(found, expected, range(0, ROWS, 7), strict=True):
                assert same(batch, same_batch) and same(
                    batch, sparse_collate([plain[i] for i in order[start : start + 7]])
                ), shuffle


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["dense", "csr", "pairs"])
def test_batches_are_those_of_single_rows(files: dict[str, Path], mode: str, layout: Any) -> None:
    options: dict[str, Any] = {"layout": layout, "targets": "kind"}
    with (
        SparseDataset(files["HDF5, gzip"], loading_mode=mode, progress=False, **options) as dataset,
        SparseDataset(files["HDF5, gzip"], **options) as single,
    ):
        for shuffle in (False, "block"):
            order = dataset.epoch_order(shuffle, 5, 0, 7)[np.arange(ROWS)].tolist()
            for epoch in range(2):
                dataset.set_epoch(0)
                loader = create_dataloader(
                    dataset, batch_size=7, shuffle=shuffle, num_workers=0, seed=5
                )
                for batch, start in zip(loader, range(0, ROWS, 7), strict=True):
                    expected = sparse_collate([single[index] for index in order[start : start + 7]])
                    assert same(batch, expected), (epoch, start)
                loader.close()


def test_layouts_are_those_of_torch(files: dict[str, Path]) -> None:
    path = files["HDF5, contiguous"]
    csr = batches(SparseDataset(path, layout="csr"))
    assert all(
        batch.layout is torch.sparse_csr and batch.crow_indices().dtype == torch.int64
        for batch in csr
    )
    assert np.array_equal(torch.cat([batch.to_dense() for batch in csr]).numpy(), DENSE)
    weight = torch.randn(COLUMNS, 4, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(csr[0] @ weight, torch.from_numpy(DENSE[:7]) @ weight, atol=1e-2)
    row = SparseDataset(path, layout="csr")[3]
    assert row.shape == (1, COLUMNS) and torch.equal(row.to_dense()[0], torch.from_numpy(DENSE[3]))
    pairs = batches(SparseDataset(path, layout="pairs"))[0]
    assert (
        isinstance(pairs, SparseRows) and pairs.indices.dtype == pairs.offsets.dtype == torch.int64
    )
    bags = torch.nn.functional.embedding_bag(
        pairs.indices, weight, pairs.offsets, per_sample_weights=pairs.values, mode="sum"
    )
    assert torch.allclose(bags, torch.from_numpy(DENSE[:7]) @ weight, atol=1e-2)
    sample = SparseDataset(path, layout="pairs")[3]
    assert (
        isinstance(sample, SparseRow)
        and sample.indices.tolist() == [*range(COLUMNS)]
        and torch.equal(sample.values, row.values())
    )


def test_pairs_are_padded_where_that_is_asked_for(files: dict[str, Path]) -> None:
    batch = batches(
        SparseDataset(files["Zarr, zstd"], layout="pairs", targets="kind"), collate_fn="pad"
    )[0]
    (indices, values), kinds = batch
    assert indices.values.shape == values.values.shape == (7, COLUMNS) and kinds.tolist() == [
        0,
        1,
        2,
        0,
        1,
        2,
        0,
    ]
    assert indices.lengths.tolist() == np.count_nonzero(DENSE[:7], axis=1).tolist()


@pytest.mark.parametrize(
    "dtype",
    ["f2", "f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "?", "c8", ">f4", ">i2"],
)
@pytest.mark.parametrize("index_dtype", ["i4", "i8", "u4", ">i4"])
def test_dtypes(tmp_path: Path, dtype: str, index_dtype: str) -> None:
    dense = random_matrix(12, 9, 0.4, dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = write_matrix(file, "X", dense)
        for name in ("indptr", "indices"):
            values = group[name][...]
            del group[name]
            group[name] = values.astype(index_dtype)
    native = dense.astype(dense.dtype.newbyteorder("="))
    dataset = SparseDataset(tmp_path / "a.h5")
    (batch,) = batches(dataset, batch_size=12)
    assert batch.numpy().dtype == native.dtype and np.array_equal(batch.numpy(), native)
    assert np.array_equal(dataset[3].numpy(), native[3])
    cast = SparseDataset(
        tmp_path / "a.h5", dtype="float64" if native.dtype.kind != "c" else "complex128"
    )
    assert np.array_equal(
        batches(cast, batch_size=12)[0].numpy(), native.astype(cast._format.dtype)
    )
    assert same(batches(cast, batch_size=12)[0][3], cast[3])


def test_other_groups_and_the_older_attributes(tmp_path: Path, files: dict[str, Path]) -> None:
    for name in ("HDF5, gzip", "Zarr, zstd"):
        with SparseDataset(files[name], "layers/counts/", targets="age") as dataset:
            row, age = dataset[5]
            assert (
                row.dtype == torch.int32
                and np.array_equal(row.numpy(), 2 * DENSE[5])
                and age == 2.5
            )
            assert dataset.columns is not None and dataset.classes is None
    with h5py.File(tmp_path / "old.h5", "w") as file:
        write_matrix(file, "X", DENSE, old=True)
        write_matrix(file.create_group("raw"), "X", DENSE[:, :5])
        write_frame(file["raw"], "var", [f"raw {n}" for n in range(5)])
        write_frame(file, "obs", [str(n) for n in range(ROWS)], {"age": np.arange(ROWS)})
        file["X/indptr"].attrs["unused"] = 1
    assert np.array_equal(
        batches(SparseDataset(tmp_path / "old.h5"), batch_size=ROWS)[0].numpy(), DENSE
    )
    raw = SparseDataset(tmp_path / "old.h5", "raw/X", targets="age")
    assert raw.columns == [f"raw {n}" for n in range(5)] and raw[7][1] == 7
    with h5py.File(tmp_path / "root.h5", "w") as file:
        write_matrix(file, "", DENSE)
    assert torch.equal(SparseDataset(tmp_path / "root.h5", "/")[1], torch.from_numpy(DENSE[1]))


def test_tables_of_older_files(tmp_path: Path) -> None:
    """AnnData 0.6 wrote a table as one array of compounds, 0.7 categories in a group of their
    own.
    """
    with h5py.File(tmp_path / "6.h5ad", "w") as file:
        write_matrix(file, "X", DENSE, old=True)
        kinds = np.arange(ROWS) % 3
        file["obs"] = np.array(
            [(b"c%d" % n, kind) for n, kind in enumerate(kinds)], [("index", "S5"), ("kind", "i1")]
        )
        file["var"] = np.array([(b"gene %d" % n,) for n in range(COLUMNS)], [("index", "S10")])
        file.create_dataset(
            "uns/kind_categories", data=np.array(KINDS, object), dtype=h5py.string_dtype()
        )
    with h5py.File(tmp_path / "7.h5ad", "w") as file:
        write_matrix(file, "X", DENSE)
        write_frame(file, "obs", [str(n) for n in range(ROWS)], {"kind": kinds.astype("i1")})
        write_frame(file, "var", [f"gene {n}" for n in range(COLUMNS)])
        file.create_dataset(
            "obs/__categories/kind", data=np.array(KINDS, object), dtype=h5py.string_dtype()
        )
    for path in (tmp_path / "6.h5ad", tmp_path / "7.h5ad"):
        dataset = SparseDataset(path, targets="kind", columns=["gene 4"])
        assert (
            dataset.classes == [*KINDS]
            and dataset.targets.tolist() == kinds.tolist()
            and dataset.columns == ["gene 4"]
        )


# -- targets


def test_targets_are_columns_of_obs(files: dict[str, Path]) -> None:
    for name in ("HDF5, contiguous", "Zarr, shards"):
        dataset = SparseDataset(files[name], targets="kind")
        assert (
            dataset.classes == [*KINDS] and dataset[4][1] == 1 and dataset.targets.dtype == np.int64
        )
        assert batches(dataset)[0][1].tolist() == [0, 1, 2, 0, 1, 2, 0]
        assert SparseDataset(files[name], targets="batch")[3][1] == "b1"
        several = SparseDataset(files[name], targets=["kind", "age"])
        assert several.classes == {"kind": [*KINDS]} and several[5][1] == {"kind": 2, "age": 2.5}
        assert batches(several)[0][1]["age"].tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3]
        assert several.subset([7, 5])[1][1] == {"kind": 2, "age": 2.5}
        given = SparseDataset(files[name], targets=np.arange(ROWS) * 10)
        assert given[3][1] == 30 and given.classes is None
    with pytest.raises(
        MissingNameError, match=r"has no column in obs: 'kinds'; it has: 'age', 'batch', 'kind'"
    ):
        SparseDataset(files["HDF5, contiguous"], targets="kinds")
    with pytest.raises(ConfigError, match="targets holds 3 targets, and there are 40 samples"):
        SparseDataset(files["HDF5, contiguous"], targets=np.arange(3))
    with pytest.raises(ConfigError, match="names a column more than once"):
        SparseDataset(files["HDF5, contiguous"], targets=["kind", "kind"])


def test_split_by_columns_of_obs(files: dict[str, Path], tmp_path: Path) -> None:
    for name in ("HDF5, contiguous", "Zarr, shards"):
        dataset = SparseDataset(files[name], targets="age")
        assert [*dataset.label_columns] == ["kind", "age", "batch"]
        train, val = dataset.split(0.75, groups="batch")
        batches_of = [
            set(dataset.label_columns["batch"][view.whole_indices(range(len(view)))])
            for view in (train, val)
        ]
        assert not batches_of[0] & batches_of[1] and len(train) + len(val) == ROWS
        kinds = [
            dataset.label_columns["kind"][view.whole_indices(range(len(view)))]
            for _, view in dataset.folds(2, stratify="kind")
        ]
        assert all(
            abs(
                np.bincount(one, minlength=3) * 2 - np.bincount(np.concatenate(kinds), minlength=3)
            ).max()
            <= 2
            for one in kinds
        )
        assert [len(view) for view in val.split(0.5, stratify="kind")] == [
            len(val) // 2,
            len(val) - len(val) // 2,
        ]
        held = MemoryEfficientDataset(dataset, loading_mode="eager")
        assert [
            one.whole_indices(range(len(one))).tolist() for one in held.split(0.75, groups="batch")
        ] == [view.whole_indices(range(len(view))).tolist() for view in (train, val)]
        half = pickle.loads(pickle.dumps(MemoryEfficientDataset(dataset[::2], loading_mode="lazy")))
        assert [*half.label_columns] == ["kind", "age", "batch"]
        assert half.label_columns["age"].tolist() == dataset.label_columns["age"][::2].tolist()
        with pytest.raises(
            MissingNameError,
            match=(
                r"stratify: the table of labels has no column 'kinds'; it has 'age', 'batch', "
                r"'kind'"
            ),
        ):
            dataset.split(0.5, stratify="kinds")
    write_anndata(tmp_path / "0.h5ad", DENSE)
    both = SparseDataset([files["HDF5, contiguous"], tmp_path / "0.h5ad"])
    assert (
        len(both.label_columns["kind"]) == 2 * ROWS
        and len(both.split(0.5, stratify="kind")[0]) == ROWS
    )
    assert (
        pickle.loads(pickle.dumps(both)).label_columns["age"].tolist()
        == both.label_columns["age"].tolist()
    )
    (tmp_path / "plates").mkdir()
    shutil.copy(tmp_path / "0.h5ad", tmp_path / "plates" / "0.h5ad")
    plates = SparseDataset(tmp_path / "plates")
    shutil.copy(tmp_path / "0.h5ad", tmp_path / "plates" / "1.h5ad")
    with pytest.raises(
        FileChangedError,
        match="there are 2 files now, and 1 when they were opened: open them again",
    ):
        plates.split(0.5, stratify="kind")
    (tmp_path / "plates" / "1.h5ad").unlink()
    write_anndata(tmp_path / "plates" / "0.h5ad", DENSE[:7])
    with pytest.raises(
        FileChangedError,
        match=r"0\.h5ad: column 'kind' has 7 rows, and the matrix had 40: open it again",
    ):
        plates.split(0.5, stratify="kind")
    with h5py.File(tmp_path / "bare.h5", "w") as file:
        write_matrix(file, "X", DENSE)
    with pytest.raises(
        ConfigError, match="this SparseDataset has no table of labels: pass a label for each sample"
    ):
        SparseDataset(tmp_path / "bare.h5").split(0.5, groups="donor")


def _changed(path: Path, change: Callable[[h5py.File], object]) -> Path:
    write_anndata(path, DENSE)
    with h5py.File(path, "r+") as file:
        change(file)
    return path


def _set(file: h5py.File, name: str, place: Any, value: Any) -> None:
    file[name][place] = value


def _replace(file: h5py.File, name: str, values: Any) -> None:
    del file[name]
    file[name] = values


def test_rows_without_a_category(tmp_path: Path) -> None:
    path = _changed(tmp_path / "a.h5ad", lambda file: _set(file, "obs/kind/codes", slice(0, 5), -1))
    with pytest.warns(
        HeadraceWarning, match="5 of 40 rows have no category in 'kind': their target is -1"
    ):
        dataset = SparseDataset(path, targets="kind")
    assert dataset.targets[:6].tolist() == [-1] * 5 + [2] and dataset.classes == [*KINDS]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda file: file.pop("obs/kind/categories"),
            "obs/kind is categorical and has no categories: the file is damaged",
        ),
        (lambda file: file.pop("obs/kind/codes"), "obs/kind is categorical and has no codes"),
        (
            lambda file: _set(file, "obs/kind/codes", 6, 3),
            "obs/kind: row 6 has code 3, and there are 3 categories",
        ),
        (lambda file: _set(file, "obs/kind/codes", 6, -2), "obs/kind: row 6 has code -2"),
        (
            lambda file: _replace(file, "obs/kind/codes", np.zeros(ROWS)),
            "obs/kind: codes are float64, and no integers",
        ),
        (
            lambda file: _replace(file, "obs/kind/codes", np.zeros(9, "i1")),
            r"obs/kind has shape \[9\], and not one value for each of 40 rows",
        ),
        (
            lambda file: file["obs/kind"].attrs.modify("encoding-type", "unheard-of"),
            "obs/kind has encoding-type 'unheard-of'",
        ),
        (
            lambda file: file["var"].attrs.modify("_index", "names"),
            "'var' has no 'names', where the names of its rows should be",
        ),
        (
            lambda file: _replace(file, "var/_index", np.arange(5)),
            "'var' names 5 columns, and 'X' has 30",
        ),
    ],
)
def test_tables_that_are_damaged(tmp_path: Path, change: Any, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        SparseDataset(_changed(tmp_path / "a.h5ad", change), targets="kind")


def test_nullable_columns(tmp_path: Path) -> None:
    def add(file: h5py.File) -> None:
        for name, missing in (("whole", False), ("holes", True)):
            group = file.create_group(f"obs/{name}")
            group.attrs.update({"encoding-type": "nullable-integer", "encoding-version": "0.1.0"})
            group["values"], group["mask"] = (
                np.arange(ROWS),
                np.arange(ROWS) == (3 if missing else -1),
            )

    path = _changed(tmp_path / "a.h5ad", add)
    assert SparseDataset(path, targets="whole")[7][1] == 7
    with pytest.raises(FormatError, match="obs/holes has no value for 1 of 40 rows, such as row 3"):
        SparseDataset(path, targets="holes")
    file_without = tmp_path / "b.h5"
    with h5py.File(file_without, "w") as file:
        write_matrix(file, "X", DENSE)
    with pytest.raises(
        ConfigError, match="has no table obs beside 'X', so there is no column 'kind'"
    ):
        SparseDataset(file_without, targets="kind")


# -- columns


@pytest.mark.parametrize("layout", ["dense", "csr", "pairs"])
@pytest.mark.parametrize(
    "columns",
    [
        [3, 17, 4],
        ["gene 20", "gene 2", "gene 9"],
        np.arange(COLUMNS) % 3 == 1,
        [*range(COLUMNS)],
        [-1],
    ],
)
def test_columns(files: dict[str, Path], columns: Any, layout: Any) -> None:
    numbers = (
        [int(str(name).split()[-1]) for name in columns]
        if isinstance(columns[0], str)
        else np.arange(COLUMNS)[columns]
    )
    dataset = SparseDataset(files["HDF5, gzip"], columns=columns, layout=layout)
    assert dataset.shape == (ROWS, len(numbers)) and dataset.columns == [
        f"gene {n}" for n in numbers
    ]
    (batch,) = batches(dataset, batch_size=ROWS)
    assert same(batch, sparse_collate([dataset[i] for i in range(ROWS)]))
    if layout == "pairs":
        rows = np.repeat(np.arange(ROWS), np.diff(batch.offsets.numpy(), append=len(batch.values)))
        batch = torch.sparse_coo_tensor(
            torch.stack([torch.from_numpy(rows), batch.indices]),
            batch.values,
            dataset.shape,
            check_invariants=True,
        )
    assert np.array_equal(
        (batch if layout == "dense" else batch.to_dense()).numpy(), DENSE[:, numbers]
    )
    assert dataset.fingerprint != SparseDataset(files["HDF5, gzip"]).fingerprint


@pytest.mark.parametrize(
    ("columns", "error", "said"),
    [
        (
            ["gene 3", "gene 99"],
            MissingNameError,
            "has no column 'gene 99'; it has: 'gene 9', .* and 20 more",
        ),
        ([3, 30], ConfigError, "columns reach from 3 to 30, and there are 30"),
        ([3, 3], ConfigError, "columns takes 'gene 3' more than once"),
        ([], ConfigError, "columns is empty"),
        (
            "gene 3",
            ConfigError,
            "columns must be names or numbers of columns, or a mask, not 'gene 3'",
        ),
        ([1.5], ConfigError, "columns must hold either names"),
        (np.ones(7, bool), ConfigError, "columns is a mask of 7, and there are 30 columns"),
        (np.zeros(30, bool), ConfigError, "a mask that takes no column"),
    ],
)
def test_columns_that_make_no_sense(
    files: dict[str, Path], columns: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        SparseDataset(files["HDF5, contiguous"], columns=columns)


# -- several files


@pytest.fixture(scope="module")
def three(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[Path], list[np.ndarray[Any, Any]], list[list[str]]]:
    """Files of different columns: their paths, matrices, and names of columns."""
    folder = tmp_path_factory.mktemp("three")
    names = [list("abcdef"), list("fedcba"), list("cbxyf")]
    matrices = [
        random_matrix(5 + number, len(one), 0.5, seed=number) for number, one in enumerate(names)
    ]
    paths = [
        write_anndata(folder / f"{number}.h5ad", dense, names=one, chunks=4, compression="gzip")
        for number, (dense, one) in enumerate(zip(matrices, names, strict=True))
    ]
    return paths, matrices, names


def _expected(matrices: Any, names: Any, columns: list[str]) -> np.ndarray[Any, Any]:
    whole = np.zeros((sum(map(len, matrices)), len(columns)), "f4")
    start = 0
    for dense, one in zip(matrices, names, strict=True):
        for number, column in enumerate(columns):
            if column in one:
                whole[start : start + len(dense), number] = dense[:, one.index(column)]
        start += len(dense)
    return whole


@pytest.mark.parametrize(
    ("count", "options", "columns"),
    [
        (2, {}, "abcdef"),
        (3, {"join": "inner"}, "bcf"),
        (3, {"join": "outer"}, "abcdefxy"),
        (3, {"columns": ["f", "b"]}, "fb"),
        (3, {"join": "outer", "columns": ["x", "a", "c"]}, "xac"),
        (3, {"join": "inner", "columns": [2, 0]}, "fb"),
    ],
)
def test_files_are_joined_by_name(
    three: Any, count: int, options: dict[str, Any], columns: str
) -> None:
    paths, matrices, names = (one[:count] for one in three)
    expected = _expected(matrices, names, [*columns])
    for layout in ("dense", "csr"):
        with SparseDataset(paths, targets="kind", layout=layout, **options) as dataset:
            assert dataset.columns == [*columns] and dataset.classes == [*KINDS]
            for shuffle in (False, True, "block"):
                found = batches(dataset, shuffle=shuffle, seed=1, batch_size=4)
                order = dataset.epoch_order(shuffle, 1, 0, 4)[np.arange(len(dataset))]
                rows = (
                    torch.cat([rows.to_dense() for rows, _ in found])
                    if layout == "csr"
                    else torch.cat([rows for rows, _ in found])
                )
                assert np.array_equal(rows.numpy(), expected[order])
                assert np.array_equal(
                    torch.cat([kinds for _, kinds in found]).numpy(), dataset.targets[order]
                )
            assert re.search(r"1\.h5ad, X, row 2$", dataset.source_of(7))


def test_files_that_can_not_be_joined(three: Any, tmp_path: Path) -> None:
    paths, matrices, _ = three
    said = (
        r"0\.h5ad lacks 2 columns of .*2\.h5ad, such as 'x', 'y' and .*2\.h5ad lacks 3 columns of "
        r".*such as 'a', 'd', 'e': pass join="
    )
    with pytest.raises(FormatError, match=said):
        SparseDataset(paths)
    with pytest.raises(MissingNameError, match=r"2\.h5ad has no column 'a'"):
        SparseDataset(paths, columns=["a", "b"])
    with pytest.raises(ConfigError, match="join must be 'inner', 'outer' or None, not 'left'"):
        SparseDataset(paths, join="left")  # type: ignore[arg-type]
    other = write_anndata(tmp_path / "b.h5ad", matrices[0].astype("f8"), names=list("abcdef"))
    with pytest.raises(
        FormatError, match="values are float64 here, and float32 there: pass dtype="
    ):
        SparseDataset([paths[0], other])
    assert SparseDataset([paths[0], other], dtype="float32")[5].dtype == torch.float32
    twice = write_anndata(tmp_path / "c.h5ad", matrices[0], names=list("aacdef"))
    with pytest.raises(
        FormatError, match=r"more than one column is called 'a', .*var_names_make_unique"
    ):
        SparseDataset([paths[0], twice], join="inner")
    with pytest.raises(FormatError, match="more than one column is called 'a'"):
        SparseDataset(twice, columns=["a"])
    assert SparseDataset(twice, columns=[1])[3].tolist() == [2]
    with h5py.File(tmp_path / "d.h5", "w") as file:
        write_matrix(file, "X", matrices[2])
    with pytest.raises(
        FormatError,
        match=r"d\.h5 does not name its 5 columns \(there is no var\), so they can't be joined",
    ):
        SparseDataset([paths[0], tmp_path / "d.h5"], join="inner")
    with pytest.raises(ConfigError, match="does not name its columns"):
        SparseDataset(tmp_path / "d.h5", columns=["a"])
    apart = write_anndata(tmp_path / "e.h5ad", matrices[0], names=list("mnopqr"))
    with pytest.raises(FormatError, match="have no column in common"):
        SparseDataset([paths[0], apart], join="inner")


def test_classes_of_several_files(tmp_path: Path) -> None:
    paths = []
    for number, categories in enumerate((["NK", "T"], ["T", "B"])):
        path = write_anndata(tmp_path / f"{number}.h5ad", DENSE[:4])
        with h5py.File(path, "r+") as file:
            del file["obs"]
            write_frame(file, "obs", list("wxyz"), {"kind": ([0, 1, 1, 0], categories)})
        paths.append(path)
    dataset = SparseDataset(paths, targets="kind")
    assert dataset.classes == ["NK", "T", "B"] and dataset.targets.tolist() == [
        0,
        1,
        1,
        0,
        1,
        2,
        2,
        1,
    ]


# -- what SciPy allows, and what is wrong


def _write(path: Path, indptr: Any, indices: Any, data: Any, shape: Any) -> Path:
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group["indptr"], group["indices"], group["data"] = (
            np.asarray(indptr),
            np.asarray(indices),
            np.asarray(data),
        )
        group.attrs.update(
            {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": np.array(shape)}
        )
    return path


def test_values_of_one_column_are_summed(tmp_path: Path) -> None:
    """As SciPy reads it: columns in any order, duplicates summed in their order, values behind
    the last row not used, zeros kept.
    """
    path = _write(
        tmp_path / "a.h5",
        [0, 4, 4, 6, 7],
        [2, 0, 2, 2, 1, 1, 0, 2],
        np.array([1, 2, 3, 0.5, 4, 5, 0, 9], "f4"),
        (4, 3),
    )
    expected = torch.tensor([[2, 0, 4.5], [0, 0, 0], [0, 9, 0], [0, 0, 0]])
    for layout in ("dense", "csr", "pairs"):
        dataset = SparseDataset(path, layout=layout)
        (batch,) = batches(dataset, batch_size=4)
        assert same(batch, sparse_collate([dataset[i] for i in range(4)]))
        if layout == "pairs":
            assert batch.indices.tolist() == [0, 2, 1, 0] and batch.offsets.tolist() == [0, 2, 2, 3]
        else:
            assert torch.equal(batch.to_dense(), expected)
    bits = _write(tmp_path / "b.h5", [0, 2], [1, 1], np.array([True, True]), (1, 2))
    assert SparseDataset(bits)[0].tolist() == [False, True]
    picked = SparseDataset(path, columns=[2, 1])
    assert torch.equal(batches(picked, batch_size=4)[0], expected[:, [2, 1]])


DAMAGED: list[tuple[Any, Any, Any, Any, str]] = [
    ([0, 2, 1, 3], [0, 1, 2], [1.0, 2, 3], (3, 3), "indptr falls from 2 to 1 at row 1"),
    ([1, 2, 3, 3], [0, 1, 2], [1.0, 2, 3], (3, 3), "indptr begins at 1, and not at 0"),
    ([0, 2, 3, 9], [0, 1, 2], [1.0, 2, 3], (3, 3), "indptr ends at 9, and there are 3 values"),
    (
        [0, 2, 3],
        [0, 1, 2],
        [1.0, 2, 3],
        (3, 3),
        r"indptr is int64 \[3\], and 3 rows need 4 integers",
    ),
    ([0.0, 2, 3, 3], [0, 1, 2], [1.0, 2, 3], (3, 3), "indptr is float64"),
    ([0, 2, 3, 3], [0, 1], [1.0, 2, 3], (3, 3), "there are 2 indices and 3 data"),
    ([0, 2, 3, 3], [0.0, 1, 2], [1.0, 2, 3], (3, 3), "indices are float64, and no integers"),
    ([0, 2, 3, 3], [[0, 1, 2]], [1.0, 2, 3], (3, 3), r"indices has shape \[1, 3\]"),
    ([0, 2, 3, 3], [0, 1, 2], [b"a", b"b", b"c"], (3, 3), "data are |S1, and no numbers"),
    ([0, 2, 3, 3], [0, 1, 2], np.array([1, 2, 3], np.longdouble), (3, 3), "data are long doubles"),
    ([0, 2, 3, 3], [0, 1, 2], [1.0, 2, 3], (3, 3, 3), "its attribute shape is"),
    ([0, 2, 3, 3], [0, 1, 2], [1.0, 2, 3], (-3, 3), "its attribute shape is"),
]


@pytest.mark.parametrize(("indptr", "indices", "data", "shape", "said"), DAMAGED)
def test_matrices_that_are_damaged(
    tmp_path: Path, indptr: Any, indices: Any, data: Any, shape: Any, said: str
) -> None:
    with pytest.raises(FormatError, match=said) as raised:
        SparseDataset(_write(tmp_path / "a.h5", indptr, indices, data, shape))
    assert "a.h5: 'X'" in str(raised.value)


@pytest.mark.falls_back
@pytest.mark.parametrize("column", [3, -1])
def test_a_column_that_is_not_there(tmp_path: Path, column: int) -> None:
    path = _write(tmp_path / "a.h5", [0, 2, 3, 4], [0, 1, column, 1], [1.0, 2, 3, 4], (3, 3))
    dataset = SparseDataset(path)
    assert dataset[0].tolist() == [1, 2, 0]
    said = (
        rf"sample 1 can't be read: .*a\.h5, X, row 1: column {column} is outside of the 3 columns "
        r"that the matrix has"
    )
    with pytest.raises(SampleError, match=said):
        dataset[1]
    with pytest.raises(SampleError, match=said):
        batches(dataset)
    for layout in ("dense", "csr", "pairs"):
        skipping = SparseDataset(path, layout=layout, on_error="skip")
        (batch,) = batches(skipping)
        assert same(batch, sparse_collate([skipping[0], skipping[2]]))


def test_groups_that_are_none(tmp_path: Path, files: dict[str, Path]) -> None:
    with pytest.raises(MissingNameError, match=r"has no group 'Y'; it has: 'X', 'layers/counts'"):
        SparseDataset(files["HDF5, gzip"], "Y")
    with pytest.raises(MissingNameError, match=r"has no group 'Y'; it has: 'X', 'layers/counts'"):
        SparseDataset(files["Zarr, zstd"], "Y")
    with pytest.raises(
        ConfigError,
        match=(
            r"'obs' is no sparse matrix: its encoding-type is 'dataframe', .*matrices of this "
            r"file: 'X'"
        ),
    ):
        SparseDataset(files["HDF5, gzip"], "obs")
    with pytest.raises(
        ConfigError, match=r"'X/data' is a dense array, float32 .*use HDF5Dataset\(path, 'X/data'\)"
    ):
        SparseDataset(files["HDF5, gzip"], "X/data")
    with pytest.raises(ConfigError, match=r"use ZarrDataset\(path, 'X/data'\)"):
        SparseDataset(files["Zarr, zstd"], "X/data")
    columnwise = _changed(
        tmp_path / "a.h5ad", lambda file: file["X"].attrs.modify("encoding-type", "csc_matrix")
    )
    with pytest.raises(
        FormatError,
        match=(
            r"'X' is a CSC matrix, .*convert it once, with anndata: adata\.X = "
            r"adata\.X\.tocsr\(\)"
        ),
    ):
        SparseDataset(columnwise)
    with pytest.raises(FormatError, match="is a CSC matrix"):
        open_dataset(columnwise)
    lacking = _changed(tmp_path / "b.h5ad", lambda file: file["X"].pop("indices"))
    with pytest.raises(FormatError, match="'X' has no 'indices': the file is damaged"):
        SparseDataset(lacking)
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["images"] = np.zeros((3, 3))
    with pytest.raises(MissingNameError, match="has no sparse matrix 'X'; it has: 'images'"):
        SparseDataset(tmp_path / "c.h5")
    for options, said in (
        ({"layout": "coo"}, "layout must be one of 'dense', 'csr', 'pairs'"),
        ({"dtype": "S3"}, "torch has no such"),
        ({"group": 3}, "group must be the path"),
        ({"genes": [1]}, "SparseDataset has no 'genes'"),
    ):
        with pytest.raises(ConfigError, match=said):
            SparseDataset(files["HDF5, gzip"], **options)  # type: ignore[arg-type]


def test_matrices_without_rows_or_values(tmp_path: Path) -> None:
    nothing: Any = np.empty(0, "f4")
    empty = SparseDataset(_write(tmp_path / "a.h5", [0], np.empty(0, "i4"), nothing, (0, 3)))
    assert len(empty) == 0 and batches(empty) == []
    for layout in ("dense", "csr", "pairs"):
        zeros = SparseDataset(
            _write(tmp_path / "b.h5", [0, 0, 0], np.empty(0, "i4"), nothing, (2, 3)), layout=layout
        )
        for shuffle in (False, "block"):
            (batch,) = batches(zeros, shuffle=shuffle)
            assert same(batch, sparse_collate([zeros[0], zeros[1]]))
    store = zarr.open_group(tmp_path / "a.zarr", mode="w")
    write_matrix(store, "X", np.zeros((2, 3), "f4"))
    assert batches(SparseDataset(tmp_path / "a.zarr"))[0].tolist() == [[0, 0, 0], [0, 0, 0]]


# -- the rest of headrace


def test_blocks_are_chunks(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.storage.blocks.LONGEST", 1)
    dataset = SparseDataset(files["HDF5, gzip"])
    sizes, indptr = dataset.blocks(), csr_of(DENSE)["indptr"]
    assert sizes is not None and sizes.sum() == ROWS and len(sizes) > 4
    edges = np.concatenate([[0], np.cumsum(sizes)])
    assert all(
        len(set((indptr[a:b] // 32).tolist())) == 1 for a, b in itertools.pairwise(edges.tolist())
    )
    dataset.sample_source.hold_chunks(1 << 20)
    loader = create_dataloader(dataset, batch_size=4, shuffle="block", num_workers=0)
    for _ in loader:
        pass
    chunks = 2 * -(-int(indptr[-1]) // 16)
    assert chunks <= loader.get_stats()["chunks_decoded"] <= 2 * chunks
    assert dataset.sample_source.block_nbytes == 2 * 3 * 16 * 4


def test_a_state_of_other_columns_is_refused(files: dict[str, Path]) -> None:
    state = create_dataloader(
        SparseDataset(files["HDF5, gzip"], columns=[1, 2]), batch_size=4, num_workers=0
    ).state_dict()
    other = create_dataloader(
        SparseDataset(files["HDF5, gzip"], columns=[2, 1]), batch_size=4, num_workers=0
    )
    with pytest.raises(Exception, match="fingerprint"):
        other.load_state_dict(state)


def test_workers_get_what_this_process_has(files: dict[str, Path]) -> None:
    for layout in ("dense", "csr", "pairs"):
        dataset = SparseDataset(
            files["Zarr, shards"], layout=layout, targets=["kind", "age"], columns=[4, 2, 9]
        )
        for start in ("fork", "forkserver"):
            options: dict[str, Any] = {"shuffle": "block", "seed": 3}
            found = [
                _copied(batch)
                for batch in batches(
                    dataset, num_workers=2, multiprocessing_context=start, **options
                )
            ]
            assert same(found, [_copied(batch) for batch in batches(dataset, **options)])


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return (
        type(value)(*map(_copied, value))
        if hasattr(value, "_fields")
        else type(value)(map(_copied, value))
    )


def test_transforms_get_rows(files: dict[str, Path]) -> None:
    dense = SparseDataset(files["HDF5, gzip"], transform=torch.log1p)
    assert torch.equal(batches(dense)[0], torch.log1p(torch.from_numpy(DENSE[:7])))
    counted = SparseDataset(
        files["HDF5, gzip"],
        layout="pairs",
        transform=lambda row: row.values.sum(),
        return_index=True,
    )
    sums, indices = batches(counted)[1]
    assert torch.equal(sums, torch.from_numpy(DENSE[7:14].sum(1))) and indices.tolist() == [
        *range(7, 14)
    ]


def test_open_dataset_finds_matrices(files: dict[str, Path], tmp_path: Path) -> None:
    for name in ("HDF5, gzip", "Zarr, zstd"):
        found = open_dataset(files[name], targets="kind", layout="csr")
        assert type(found) is SparseDataset and found[0][1] == 0
    assert type(open_dataset(files["HDF5, gzip"], group="layers/counts")) is SparseDataset
    with h5py.File(write_anndata(tmp_path / "layer.h5ad", random_matrix(6, 5)), "r+") as file:
        file.attrs["encoding-type"] = "anndata"
        counts = torch.from_numpy(2 * random_matrix(6, 5).astype("i4"))
        del file["X"]
    with open_dataset(tmp_path / "layer.h5ad") as only_layer:
        assert type(only_layer) is SparseDataset
        assert torch.equal(
            only_layer[3].to_dense()
            if only_layer[3].layout is not torch.strided
            else only_layer[3],
            counts[3],
        )
    assert type(open_dataset(files["HDF5, gzip"], dataset_name="X/data")) is HDF5Dataset
    assert type(open_dataset(files["Zarr, zstd"], dataset_name="X/data")) is ZarrDataset
    with h5py.File(tmp_path / "one.h5", "w") as file:
        write_matrix(file, "counts", DENSE)
    with h5py.File(tmp_path / "root.h5", "w") as file:
        write_matrix(file, "", DENSE)
    with h5py.File(tmp_path / "beside.h5", "w") as file:
        write_matrix(file, "graph", DENSE)
        file["data"] = DENSE
    found = open_dataset(tmp_path / "one.h5")
    assert type(found) is SparseDataset and torch.equal(found[1], torch.from_numpy(DENSE[1]))
    assert (
        type(open_dataset(tmp_path / "root.h5")) is SparseDataset
        and type(open_dataset(tmp_path / "beside.h5")) is HDF5Dataset
    )
    loader = create_dataloader(files["HDF5, gzip"], batch_size=4, num_workers=0, columns=["gene 3"])
    assert next(iter(loader)).shape == (4, 1)
    with pytest.raises(ConfigError, match="image_size is an option for images"):
        open_dataset(files["HDF5, gzip"], image_size=3)


def test_info_says_what_a_matrix_is(files: dict[str, Path], tmp_path: Path) -> None:
    for name in LAYOUTS:
        report = inspect(files[name])
        mean = np.count_nonzero(DENSE) / ROWS
        assert (
            report.samples == ROWS
            and report.samples_are
            == f"rows of 'X', float32 [30], sparse (CSR), {mean:,.0f} values a row"
        )
        assert (
            report.opens_as == f"headrace.SparseDataset({report.path!r})"
            and report.format.startswith("AnnData ")
        )
        with SparseDataset(files[name]) as dataset:
            assert report.fingerprint == dataset.fingerprint
        (cost,) = report.access
        assert [advice.code for advice in report.advice] == [
            'create_dataloader(dataset, shuffle="block")'
        ] * (cost.chunks > 0)
        assert (
            cost.name == "X"
            and cost.nbytes == int(8 * mean)
            and (cost.chunks == 0) == ("raw" in name or "contiguous" in name)
        )
    counts = inspect(files["HDF5, gzip"], dataset_name="layers/counts")
    assert (
        counts.opens_as == f"headrace.SparseDataset({counts.path!r}, 'layers/counts')"
        and "int32" in counts.samples_are
    )
    columnwise = _changed(
        tmp_path / "a.h5ad", lambda file: file["X"].attrs.modify("encoding-type", "csc_matrix")
    )
    assert any("is a CSC matrix" in note for note in inspect(columnwise).notes)


def test_pack_writes_dense_rows(files: dict[str, Path], tmp_path: Path) -> None:
    with SparseDataset(files["HDF5, gzip"], targets="kind", columns=[2, 4, 9]) as dataset:
        pack(dataset, tmp_path / "a.h5", progress=False)
    with HDF5Dataset(tmp_path / "a.h5", target_name="targets") as packed:
        assert (
            packed[3][0].tolist() == [3, 5, 10]
            and packed[4][1] == 1
            and packed.sample_source.info.classes == [*KINDS]
        )
    for layout in ("csr", "pairs"):
        with pytest.raises(
            ConfigError,
            match=(
                r"sparse rows can't be packed\. Leave the file as it is: SparseDataset reads it "
                r"in place"
            ),
        ):
            pack(
                SparseDataset(files["HDF5, gzip"], layout=layout), tmp_path / "b.h5", progress=False
            )


def test_what_is_shown(files: dict[str, Path]) -> None:
    dataset = SparseDataset(files["HDF5, gzip"], columns=[3, 1], targets="kind")
    assert repr(dataset) == (
        f"SparseDataset({str(files['HDF5, gzip'])!r}, targets='kind', columns=[3, 1])  # 40 samples"
    )
    explained = dataset.explain()
    assert (
        "X/indices: pread + inflate + unshuffle" in explained
        and "columns: 2, by a table of the 30 that are stored" in explained
    )
    assert dataset.source_of(3).endswith(", X, row 3") and dataset.lengths()[3] == COLUMNS
    assert (
        "rows read together, and laid out at once"
        in create_dataloader(dataset, batch_size=4, num_workers=0).explain()
    )
    assert dataset.held_nbytes() == 8 * np.count_nonzero(DENSE)


def test_the_code_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cells.h5ad", "plate1.h5ad", "plate2.h5ad", "cells.zarr"):
        write_anndata(
            tmp_path / name,
            random_matrix(200, 40),
            names=["CD3E", "CD8A", "NKG7", *(f"gene {n}" for n in range(37))],
        )
    with h5py.File(tmp_path / "cells.h5ad", "r+") as file:
        file["obsm/X_pca"] = np.zeros((200, 5), "f4")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "docs"}
    page = (ROOT / "docs" / "sparse.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, "docs/sparse.md", "exec"), names)
        for value in list(names.values()):
            if hasattr(value, "load_state_dict") and not isinstance(value, type):
                value.close()


# -- the laws


class TestDenseRows(DatasetContract):
    @pytest.fixture(autouse=True)
    def _file(self, files: dict[str, Path], tmp_path: Path) -> None:
        self.path = files["HDF5, gzip"]
        self.bad = tmp_path / "bad.h5ad"

    def make(self, **options: Any) -> SparseDataset:
        return SparseDataset(self.path, targets="kind", **options)

    def make_bad(self, **options: Any) -> tuple[SparseDataset, list[int]]:
        if not self.bad.exists():
            write_anndata(self.bad, DENSE)
            with h5py.File(self.bad, "r+") as file:
                for row in (5, 11):
                    file["X/indices"][file["X/indptr"][row]] = COLUMNS + row
        return SparseDataset(self.bad, targets="kind", **options), [5, 11]


@pytest.mark.slow
class TestCSRRowsOfSeveralFiles(DatasetContract):
    @pytest.fixture(autouse=True)
    def _files(self, files: dict[str, Path]) -> None:
        self.paths = [files[name] for name in ("Zarr, zstd", "Zarr, raw chunks", "Zarr, shards")]

    def make(self, **options: Any) -> SparseDataset:
        return SparseDataset(self.paths, layout="csr", columns=[5, 3, 20, 21], **options)
