"""SparseDataset: CSR matrices in HDF5 and Zarr, as AnnData lays them out; and its obsm."""

from __future__ import annotations

import itertools
import pickle
import re
import shutil
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
    ZarrDataset,
    create_dataloader,
    open_dataset,
    pack,
)
from headrace.datasets.sparse import SparseRow, SparseRows, sparse_collate
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.data.sparse import KINDS, csr_of, random_matrix, write_anndata, write_frame, write_matrix
from tests.datasets.demonstrations import spoil
from tests.datasets.remote_contract import RemoteDatasetContract

ROWS, COLUMNS = 40, 30
DENSE = random_matrix(ROWS, COLUMNS)
FORMS: tuple[Any, ...] = ("dense", "csr", "pairs")
BLOSC = zarr.codecs.BloscCodec(cname="lz4", clevel=3)
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "HDF5, contiguous": (".h5ad", {}),
    "HDF5, raw chunks": (".h5ad", {"chunks": 16}),
    "HDF5, gzip": (".h5ad", {"chunks": 16, "compression": "gzip", "shuffle": True}),
    "HDF5, lzf": (".h5ad", {"chunks": 50, "compression": "lzf"}),
    "HDF5, one chunk": (".h5ad", {"chunks": 1 << 12, "compression": "gzip"}),
    "Zarr, raw chunks": (".zarr", {"chunks": 16, "compressors": None}),
    "Zarr, zstd": (".zarr", {"chunks": 16}),
    # as annbatch lays them out
    "Zarr, shards": (".zarr", {"chunks": 16, "shards": (160,), "compressors": BLOSC}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sparse")
    return {
        name: write_anndata(folder / f"{number}{ending}", DENSE, **options)
        for number, (name, (ending, options)) in enumerate(LAYOUTS.items())
    }


@pytest.fixture
def gzipped(files: dict[str, Path]) -> Path:
    return files["HDF5, gzip"]


@pytest.fixture
def stored(files: dict[str, Path]) -> Path:
    return files["Zarr, zstd"]


def batches(dataset: Any, **options: Any) -> list[Any]:
    options = {"batch_size": 7, "shuffle": False, "num_workers": 0, **options}
    loader = create_dataloader(dataset, **options)
    try:
        return [*loader]
    finally:
        loader.close()


def all_rows(dataset: Any) -> Any:
    """All rows in one batch, dense."""
    (batch,) = batches(dataset, batch_size=max(1, len(dataset)))
    assert same(batch, sparse_collate([dataset[index] for index in range(len(dataset))]))
    if isinstance(batch, SparseRows):
        sizes = np.diff(batch.offsets.numpy(), append=len(batch.values))
        dense = np.zeros(dataset.shape, batch.values.numpy().dtype)
        dense[np.repeat(np.arange(len(sizes)), sizes), batch.indices.numpy()] = batch.values
        return dense
    return batch.to_dense().numpy()


# -- what samples and batches are


def test_rows_of_all_layouts(files: dict[str, Path]) -> None:
    for name, path in files.items():
        for direct, layout in ((True, "csr"), (False, "dense")):
            with SparseDataset(path, direct=direct, layout=layout) as dataset:
                assert dataset.shape == (ROWS, COLUMNS) and len(dataset) == ROWS
                assert dataset.columns == [f"gene {n}" for n in range(COLUMNS)]
                assert np.array_equal(all_rows(dataset), DENSE), (name, layout)
                assert dataset.lengths().tolist() == np.count_nonzero(DENSE, axis=1).tolist()
                assert dataset.held_nbytes() == 8 * np.count_nonzero(DENSE)
                is_library = not direct or "lzf" in name
                for column in dataset.sample_source.describe().columns:
                    how = column.read_by
                    assert ("h5py" in how or "zarr-python" in how) == is_library, name


def test_layouts_are_those_of_torch(gzipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.formats.arrays.joined.GROUP", 1)  # parts of chunks are copied
    weight = torch.randn(COLUMNS, 4, generator=torch.Generator().manual_seed(0))
    product = torch.from_numpy(DENSE[:7]) @ weight
    csr = SparseDataset(gzipped, layout="csr")
    batch = batches(csr)[0]
    assert batch.layout is torch.sparse_csr and batch.crow_indices().dtype == torch.int64
    assert torch.allclose(batch @ weight, product, atol=1e-2)
    assert csr[3].shape == (1, COLUMNS)
    dataset = SparseDataset(gzipped, layout="pairs", targets="kind")
    pairs, _ = batches(dataset)[0]
    assert isinstance(pairs, SparseRows) and isinstance(dataset[3][0], SparseRow)
    assert pairs.indices.dtype == pairs.offsets.dtype == torch.int64
    bags = torch.nn.functional.embedding_bag(
        pairs.indices, weight, pairs.offsets, per_sample_weights=pairs.values, mode="sum"
    )
    assert torch.allclose(bags, product, atol=1e-2)
    (indices, values), kinds = batches(dataset, collate_fn="pad")[0]
    assert indices.values.shape == values.values.shape == (7, COLUMNS)
    assert indices.lengths.tolist() == np.count_nonzero(DENSE[:7], axis=1).tolist()
    assert kinds.tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_dtypes(tmp_path: Path) -> None:
    kinds = ["f2", "f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "?", "c8", ">f4"]
    for dtype, index_dtype in zip(kinds, itertools.cycle(["i4", "i8", "u4", ">i4", "u2"])):
        dense = random_matrix(12, 9, 0.4, dtype)
        _write(tmp_path / "a.h5", **csr_of(dense, index_dtype), shape=dense.shape)
        native = dense.astype(dense.dtype.newbyteorder("="))
        rows = all_rows(SparseDataset(tmp_path / "a.h5"))
        assert rows.dtype == native.dtype and np.array_equal(rows, native), (dtype, index_dtype)
        wide = "complex128" if native.dtype.kind == "c" else "float64"
        cast = all_rows(SparseDataset(tmp_path / "a.h5", dtype=wide))
        assert cast.dtype == wide and np.array_equal(cast, native.astype(wide)), dtype


def test_other_groups(gzipped: Path, stored: Path) -> None:
    for path in (gzipped, stored):
        with SparseDataset(path, "layers/counts/", targets="age") as dataset:
            row, age = dataset[5]
            assert row.dtype == torch.int32 and np.array_equal(row, 2 * DENSE[5]) and age == 2.5
            assert dataset.columns is not None and dataset.classes is None


def test_older_files(tmp_path: Path) -> None:
    """AnnData 0.6 had other attributes, and 0.7 wrote categories in a group of their own."""
    path, kinds = tmp_path / "old.h5", np.arange(ROWS) % 3
    with h5py.File(path, "w") as file:
        write_matrix(file, "X", DENSE, old=True)
        columns = {"kind": kinds.astype("i1"), "age": np.arange(ROWS)}
        write_frame(file, "obs", [str(n) for n in range(ROWS)], columns)
        write_matrix(file.create_group("raw"), "X", DENSE[:, :5])
        write_frame(file["raw"], "var", [f"raw {n}" for n in range(5)])
        file["obs/__categories/kind"] = list(KINDS)
    dataset = SparseDataset(path, targets="kind")
    assert dataset.classes == [*KINDS] and dataset.targets.tolist() == kinds.tolist()
    assert np.array_equal(all_rows(SparseDataset(path)), DENSE)
    raw = SparseDataset(path, "raw/X", targets="age", columns=["raw 4", "raw 0"])
    assert raw.columns == ["raw 4", "raw 0"] and raw[7][1] == 7


# -- targets


def test_targets_are_columns_of_obs(files: dict[str, Path]) -> None:
    for name in ("HDF5, contiguous", "Zarr, shards"):
        path = files[name]
        dataset = SparseDataset(path, targets="kind")
        assert dataset.classes == [*KINDS] and dataset.targets.dtype == np.int64
        assert batches(dataset)[0][1].tolist() == [0, 1, 2, 0, 1, 2, 0]
        assert SparseDataset(path, targets="batch")[3][1] == "b1"
        several = SparseDataset(path, targets=["kind", "age"])
        assert several.classes == {"kind": [*KINDS]} and several[5][1] == {"kind": 2, "age": 2.5}
        assert batches(several)[0][1]["age"].tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3]
        assert several.subset([7, 5])[1][1] == {"kind": 2, "age": 2.5}
        given = SparseDataset(path, targets=np.arange(ROWS) * 10)
        assert given[3][1] == 30 and given.classes is None
    refused: list[tuple[Any, type[Exception], str]] = [
        ("kinds", MissingNameError, "'kinds'; it has: 'age', 'batch', 'kind'"),
        (np.arange(3), ConfigError, "3 targets.*40 samples"),
        (["kind", "kind"], ConfigError, "targets"),
    ]
    for targets, error, named in refused:
        with pytest.raises(error, match=named):
            SparseDataset(files["HDF5, contiguous"], targets=targets)


def _chosen(view: Any) -> list[int]:
    chosen: list[int] = view.whole_indices(range(len(view))).tolist()
    return chosen


def test_split_by_columns_of_obs(stored: Path, tmp_path: Path) -> None:
    dataset = SparseDataset(stored, targets="age")
    assert [*dataset.label_columns] == ["kind", "age", "batch"]
    train, val = dataset.split(0.75, groups="batch")
    donors = [set(dataset.label_columns["batch"][_chosen(view)]) for view in (train, val)]
    assert not donors[0] & donors[1] and len(train) + len(val) == ROWS
    for _, view in dataset.folds(2, stratify="kind"):
        counts = np.bincount(dataset.label_columns["kind"][_chosen(view)], minlength=3)
        assert abs(counts * 2 - np.bincount(np.arange(ROWS) % 3)).max() <= 2
    held = MemoryEfficientDataset(dataset, loading_mode="eager", progress=False)
    assert [*map(_chosen, held.split(0.75, groups="batch"))] == [_chosen(train), _chosen(val)]
    half = pickle.loads(pickle.dumps(MemoryEfficientDataset(dataset[::2], loading_mode="lazy")))
    assert (
        half.label_columns["age"][_chosen(half)].tolist()
        == dataset.label_columns["age"][::2].tolist()
    )
    with pytest.raises(MissingNameError, match=r"'kinds'.*'age', 'batch', 'kind'"):
        dataset.split(0.5, stratify="kinds")
    both = SparseDataset([stored, write_anndata(tmp_path / "0.zarr", DENSE)])
    assert len(both.split(0.5, stratify="kind")[0]) == ROWS
    copy = pickle.loads(pickle.dumps(both))
    assert copy.label_columns["age"].tolist() == both.label_columns["age"].tolist()
    with h5py.File(tmp_path / "bare.h5", "w") as file:
        write_matrix(file, "X", DENSE)
    with pytest.raises(ConfigError):
        SparseDataset(tmp_path / "bare.h5").split(0.5, groups="donor")
    with pytest.raises(ConfigError, match="'kind'"):
        SparseDataset(tmp_path / "bare.h5", targets="kind")


def test_labels_of_files_that_change_meanwhile(tmp_path: Path) -> None:
    first = write_anndata(tmp_path / "0.h5ad", DENSE)
    plates = SparseDataset(tmp_path)
    shutil.copy(first, tmp_path / "1.h5ad")
    with pytest.raises(FileChangedError, match=r"had .40.: open"):
        plates.split(0.5, stratify="kind")
    (tmp_path / "1.h5ad").unlink()
    write_anndata(first, DENSE[:7])
    with pytest.raises(FileChangedError, match=r"0\.h5ad': 7. rows.* had .40"):
        plates.split(0.5, stratify="kind")


def test_tables_that_are_damaged(tmp_path: Path) -> None:
    path, codes = tmp_path / "a.h5ad", np.arange(ROWS, dtype="i1") % 3
    above, below = (np.where(np.arange(ROWS) == 6, code, codes) for code in (3, -2))
    arrays: list[tuple[str, Any, str]] = [
        ("obs/kind/categories", None, "'obs/kind' has no 'categories'"),
        ("obs/kind/codes", None, "'obs/kind' has no 'codes'"),
        ("obs/kind/codes", above, "obs/kind: row 6 has code 3, and there are 3"),
        ("obs/kind/codes", below, "obs/kind: row 6 has code -2"),
        ("obs/kind/codes", np.zeros(ROWS), "obs/kind: .*float64"),
        ("obs/kind/codes", np.zeros(9, "i1"), r"obs/kind has shape \[9\]"),
        ("var/_index", np.arange(5), r"var/_index has shape \[5\], .* 30 rows"),
    ]
    for name, values, named in arrays:
        with pytest.raises(FormatError, match=named):
            SparseDataset(spoil(write_anndata(path, DENSE), name, values), targets="kind")
    for name, attribute, value, named in (
        ("obs/kind", "encoding-type", "unheard-of", "obs/kind .*'unheard-of'"),
        ("var", "_index", "names", "'var' has no 'names'"),
    ):
        with h5py.File(write_anndata(path, DENSE), "r+") as file:
            file[name].attrs[attribute] = value
        with pytest.raises(FormatError, match=named):
            SparseDataset(path, targets="kind")


def test_rows_without_a_value(tmp_path: Path) -> None:
    path = write_anndata(tmp_path / "a.h5ad", DENSE)
    with h5py.File(path, "r+") as file:
        file["obs/kind/codes"][:5] = -1
        for name, missing in (("whole", -1), ("holes", 3)):
            group = file.create_group(f"obs/{name}")
            group.attrs.update({"encoding-type": "nullable-integer", "encoding-version": "0.1.0"})
            group["values"], group["mask"] = np.arange(ROWS), np.arange(ROWS) == missing
    with pytest.warns(HeadraceWarning, match="5 of 40 rows .*'kind'.* -1"):
        dataset = SparseDataset(path, targets="kind")
    assert dataset.targets[:6].tolist() == [-1] * 5 + [2] and dataset.classes == [*KINDS]
    assert SparseDataset(path, targets="whole")[7][1] == 7
    with pytest.raises(FormatError, match=r"obs/holes .* 1 of 40 rows, such as row 3"):
        SparseDataset(path, targets="holes")


# -- columns


def test_columns(gzipped: Path) -> None:
    choices: list[tuple[Any, Any]] = [
        ([3, 17, 4], [3, 17, 4]),
        (["gene 20", "gene 2", "gene 9"], [20, 2, 9]),
        (np.arange(COLUMNS) % 3 == 1, range(1, COLUMNS, 3)),
        ([*range(COLUMNS)], range(COLUMNS)),
        ([-1], [COLUMNS - 1]),
    ]
    for (columns, numbers), layout in itertools.product(choices, FORMS):
        dataset = SparseDataset(gzipped, columns=columns, layout=layout)
        assert dataset.columns == [f"gene {n}" for n in numbers]
        assert np.array_equal(all_rows(dataset), DENSE[:, list(numbers)]), (columns, layout)
        assert dataset.fingerprint != SparseDataset(gzipped).fingerprint


def test_arguments_that_make_no_sense(gzipped: Path) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"columns": ["gene 3", "gene 99"]}, MissingNameError, "'gene 99'; it has: .* 20 more"),
        ({"columns": [3, 30]}, ConfigError, "3 to 30, and there are 30"),
        ({"columns": [3, 3]}, ConfigError, "'gene 3'"),
        ({"columns": []}, ConfigError, "columns"),
        ({"columns": "gene 3"}, ConfigError, "'gene 3'"),
        ({"columns": [1.5]}, ConfigError, "columns"),
        ({"columns": np.ones(7, bool)}, ConfigError, "7.* 30 columns"),
        ({"columns": np.zeros(30, bool)}, ConfigError, "columns|mask"),
        ({"layout": "coo"}, ConfigError, "layout"),
        ({"dtype": "S3"}, ConfigError, "S3"),
        ({"group": 3}, ConfigError, "group"),
        ({"genes": [1]}, ConfigError, "'genes'"),
        ({"join": "left"}, ConfigError, "'left'"),
    ]
    for options, error, named in cases:
        with pytest.raises(error, match=named):
            SparseDataset(gzipped, **options)


# -- several files


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Any], list[str]]:
    """Files of different columns: their paths, matrices, and names of columns."""
    folder = tmp_path_factory.mktemp("three")
    names = ["abcdef", "fedcba", "cbxyf"]
    matrices = [random_matrix(5 + n, len(one), 0.5, seed=n) for n, one in enumerate(names)]
    paths = []
    for number, (dense, one) in enumerate(zip(matrices, names, strict=True)):
        options: dict[str, Any] = {"names": list(one), "chunks": 4, "compression": "gzip"}
        paths.append(write_anndata(folder / f"{number}.h5ad", dense, **options))
    return paths, matrices, names


def joined(matrices: list[Any], names: list[str], columns: str) -> np.ndarray[Any, Any]:
    parts = []
    for dense, one in zip(matrices, names, strict=True):
        part = np.zeros((len(dense), len(columns)), "f4")
        for number, column in enumerate(columns):
            if column in one:
                part[:, number] = dense[:, one.index(column)]
        parts.append(part)
    return np.concatenate(parts)


def test_files_are_joined_by_name(three: Any) -> None:
    cases: list[tuple[int, dict[str, Any], str]] = [
        (2, {}, "abcdef"),
        (3, {"join": "inner"}, "bcf"),
        (3, {"join": "outer"}, "abcdefxy"),
        (3, {"columns": ["f", "b"]}, "fb"),
        (3, {"join": "outer", "columns": ["x", "a", "c"]}, "xac"),
        (3, {"join": "inner", "columns": [2, 0]}, "fb"),
    ]
    for count, options, columns in cases:
        paths, matrices, names = (one[:count] for one in three)
        for layout in ("dense", "csr"):
            dataset = SparseDataset(paths, layout=layout, **options)  # type: ignore[arg-type]
            assert dataset.columns == [*columns], options
            assert np.array_equal(all_rows(dataset), joined(matrices, names, columns)), options
            assert re.search(r"1\.h5ad, X, row 2$", dataset.source_of(7))


def test_files_that_can_not_be_joined(three: Any, tmp_path: Path) -> None:
    paths, matrices, _ = three
    with pytest.raises(
        FormatError, match=r"2\.h5ad and .*0\.h5ad differ in 5 columns, such as 'a', 'd', 'e'"
    ):
        SparseDataset(paths)
    with pytest.raises(MissingNameError, match=r"2\.h5ad .*'a'"):
        SparseDataset(paths, columns=["a", "b"])
    other = write_anndata(tmp_path / "b.h5ad", matrices[0].astype("f8"), names=list("abcdef"))
    with pytest.raises(FormatError, match="float64 and float32"):
        SparseDataset([paths[0], other])
    assert SparseDataset([paths[0], other], dtype="float32")[5].dtype == torch.float32
    twice = write_anndata(tmp_path / "c.h5ad", matrices[0], names=list("aacdef"))
    for data, options in (([paths[0], twice], {"join": "inner"}), (twice, {"columns": ["a"]})):
        with pytest.raises(FormatError, match="'a'"):
            SparseDataset(data, **options)
    assert SparseDataset(twice, columns=[1])[3].tolist() == [2]
    with h5py.File(tmp_path / "d.h5", "w") as file:
        write_matrix(file, "X", matrices[2])
    with pytest.raises(FormatError, match=r"d\.h5 .* 5 columns"):
        SparseDataset([paths[0], tmp_path / "d.h5"], join="inner")
    with pytest.raises(ConfigError):
        SparseDataset(tmp_path / "d.h5", columns=["a"])
    apart = write_anndata(tmp_path / "e.h5ad", matrices[0], names=list("mnopqr"))
    with pytest.raises(FormatError, match="in common"):
        SparseDataset([paths[0], apart], join="inner")


# -- what SciPy allows, and what is wrong


def _write(path: Path, indptr: Any, indices: Any, data: Any, shape: Any) -> Path:
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        for name, values in (("indptr", indptr), ("indices", indices), ("data", data)):
            group[name] = np.asarray(values)
        group.attrs.update({"encoding-type": "csr_matrix", "shape": np.array(shape)})
    return path


def test_values_of_one_column_are_summed(tmp_path: Path) -> None:
    """As SciPy reads it: columns in any order, duplicates summed in their order, values behind
    the last row not used, zeros kept.
    """
    indptr, indices = [0, 4, 4, 6, 7], [2, 0, 2, 2, 1, 1, 0, 2]
    data = np.array([1, 2, 3, 0.5, 4, 5, 0, 9], "f4")
    path = _write(tmp_path / "a.h5", indptr, indices, data, (4, 3))
    expected = np.array([[2, 0, 4.5], [0, 0, 0], [0, 9, 0], [0, 0, 0]])
    for layout in FORMS:
        assert np.array_equal(all_rows(SparseDataset(path, layout=layout)), expected), layout
    (pairs,) = batches(SparseDataset(path, layout="pairs"))
    assert pairs.indices.tolist() == [0, 2, 1, 0] and pairs.offsets.tolist() == [0, 2, 2, 3]
    picked = SparseDataset(path, columns=[2, 1])
    assert np.array_equal(all_rows(picked), expected[:, [2, 1]])
    bits = _write(tmp_path / "b.h5", [0, 2], [1, 1], np.array([True, True]), (1, 2))
    assert SparseDataset(bits)[0].tolist() == [False, True]


def test_matrices_that_are_damaged(tmp_path: Path) -> None:
    whole: dict[str, Any] = {"indptr": [0, 2, 3, 3], "indices": [0, 1, 2], "data": [1.0, 2, 3]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"indptr": [0, 2, 1, 3]}, "2 to 1 at row 1"),
        ({"indptr": [1, 2, 3, 3]}, "begins at 1"),
        ({"indptr": [0, 2, 3, 9]}, "ends at 9, and there are 3"),
        ({"indptr": [0, 2, 3]}, r"int64 \[3\]"),
        ({"indptr": [0.0, 2, 3, 3]}, "indptr is float64"),
        ({"indices": [0, 1]}, "2 indices and 3 data"),
        ({"indices": [0.0, 1, 2]}, "indices are float64"),
        ({"indices": [[0, 1, 2]]}, r"indices has shape \[1, 3\]"),
        ({"data": [b"a", b"b", b"c"]}, r"data are \|S1"),
        ({"data": np.array([1, 2, 3], np.longdouble)}, "data are long doubles"),
        ({"shape": (3, 3, 3)}, "shape"),
        ({"shape": (-3, 3)}, "shape"),
    ]
    for change, named in cases:
        parts = {**whole, "shape": (3, 3), **change}
        with pytest.raises(FormatError, match=rf"a\.h5: 'X'.*{named}"):
            SparseDataset(_write(tmp_path / "a.h5", **parts))


@pytest.mark.falls_back
def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    for column in (3, -1):
        indices, data = [0, 1, column, 1], [1.0, 2, 3, 4]
        path = _write(tmp_path / "a.h5", [0, 2, 3, 4], indices, data, (3, 3))
        dataset = SparseDataset(path)
        assert dataset[0].tolist() == [1, 2, 0]
        with pytest.raises(SampleError, match=rf"sample 1 .*a\.h5, X, row 1: .*columns {column} "):
            dataset[1]
        with pytest.raises(SampleError, match="sample 1 "):
            batches(dataset)
        for layout in FORMS:
            skipping = SparseDataset(path, layout=layout, on_error="skip")
            (batch,) = batches(skipping)
            assert same(batch, sparse_collate([skipping[0], skipping[2]]))


def test_groups_that_are_none(tmp_path: Path, gzipped: Path, stored: Path) -> None:
    columnwise = write_anndata(tmp_path / "a.h5ad", DENSE)
    with h5py.File(columnwise, "r+") as file:
        file["X"].attrs["encoding-type"] = "csc_matrix"
    lacking = spoil(write_anndata(tmp_path / "b.h5ad", DENSE), "X/indices", None)
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["images"] = np.zeros((3, 3))
    cases: list[tuple[Path, str, type[Exception], str]] = [
        (gzipped, "Y", MissingNameError, "'Y'; it has: 'X', 'layers/counts'"),
        (stored, "Y", MissingNameError, "'Y'; it has: 'X', 'layers/counts'"),
        (gzipped, "obs", ConfigError, "'obs' .*'dataframe'.*'X'"),
        (gzipped, "X/data", ConfigError, r"HDF5Dataset\(path, 'X/data'\)"),
        (stored, "X/data", ConfigError, r"ZarrDataset\(path, 'X/data'\)"),
        (columnwise, "X", FormatError, r"adata\.X\.tocsr\(\)"),
        (lacking, "X", FormatError, "'X' has no 'indices'"),
        (tmp_path / "c.h5", "X", MissingNameError, "'X'; it has: 'images'"),
    ]
    for path, group, error, named in cases:
        with pytest.raises(error, match=named):
            SparseDataset(path, group)
    with pytest.raises(FormatError, match="CSC"):
        open_dataset(columnwise)


def test_matrices_without_rows_or_values(tmp_path: Path) -> None:
    nothing: Any = np.empty(0, "f4")
    empty = SparseDataset(_write(tmp_path / "a.h5", [0], np.empty(0, "i4"), nothing, (0, 3)))
    assert len(empty) == 0 and batches(empty) == []
    zeros = _write(tmp_path / "b.h5", [0, 0, 0], np.empty(0, "i4"), nothing, (2, 3))
    for layout in FORMS:
        assert not all_rows(SparseDataset(zeros, layout=layout)).any()
    write_matrix(zarr.open_group(tmp_path / "a.zarr", mode="w"), "X", np.zeros((2, 3), "f4"))
    assert all_rows(SparseDataset(tmp_path / "a.zarr")).shape == (2, 3)


# -- the rest of headrace


def test_blocks_are_chunks(gzipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.formats.source.LONGEST", 1)
    dataset = SparseDataset(gzipped)
    sizes, indptr = dataset.blocks(), csr_of(DENSE)["indptr"]
    assert sizes is not None and sizes.sum() == ROWS and len(sizes) > 4
    edges = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    for start, stop in itertools.pairwise(edges):
        assert len(set((indptr[start:stop] // 32).tolist())) == 1
    assert dataset.sample_source.block_nbytes == 2 * 3 * 16 * 4
    chunks = 2 * -(-int(indptr[-1]) // 16)
    for shuffle, most in (("block", 2 * chunks), (True, chunks)):
        if shuffle == "block":
            dataset.sample_source.hold_chunks(1 << 20)
        loader = create_dataloader(dataset, batch_size=4, shuffle=shuffle, num_workers=0)
        list(loader)
        assert chunks <= loader.get_stats()["chunks_decoded"] <= most
        dataset = SparseDataset(gzipped)


def test_open_dataset_finds_matrices(gzipped: Path, stored: Path, tmp_path: Path) -> None:
    for path, plain in ((gzipped, HDF5Dataset), (stored, ZarrDataset)):
        found = open_dataset(path, targets="kind", layout="csr")
        assert type(found) is SparseDataset and found[0][1] == 0
        assert type(open_dataset(path, dataset_name="X/data")) is plain
    assert type(open_dataset(gzipped, group="layers/counts")) is SparseDataset
    for name, beside in (("counts", False), ("", False), ("graph", True)):
        with h5py.File(tmp_path / "one.h5", "w") as file:
            write_matrix(file, name, DENSE)
            if beside:
                file["data"] = DENSE
        with open_dataset(tmp_path / "one.h5") as found:
            assert type(found) is (HDF5Dataset if beside else SparseDataset)
            assert beside or np.array_equal(found[1], DENSE[1])
    with pytest.raises(ConfigError, match="image_size"):
        open_dataset(gzipped, image_size=3)


def test_pack_writes_dense_rows(gzipped: Path, tmp_path: Path) -> None:
    with SparseDataset(gzipped, targets="kind", columns=[2, 4, 9]) as dataset:
        pack(dataset, tmp_path / "a.h5", progress=False)
    with HDF5Dataset(tmp_path / "a.h5", target_name="targets") as packed:
        assert packed[3][0].tolist() == [3, 5, 10] and packed[4][1] == 1
        assert packed.sample_source.info.classes == [*KINDS]
    for layout in ("csr", "pairs"):
        with pytest.raises(ConfigError):
            pack(SparseDataset(gzipped, layout=layout), tmp_path / "b.h5", progress=False)


# -- the laws


@pytest.mark.slow
class TestDenseRows(DatasetContract):
    @pytest.fixture(autouse=True)
    def _file(self, gzipped: Path, tmp_path: Path) -> None:
        self.path, self.bad = gzipped, write_anndata(tmp_path / "bad.h5ad", DENSE)
        with h5py.File(self.bad, "r+") as file:
            for row in (5, 11):
                file["X/indices"][file["X/indptr"][row]] = COLUMNS + row

    def make(self, **options: Any) -> SparseDataset:
        return SparseDataset(self.path, targets="kind", **options)

    def make_bad(self, **options: Any) -> tuple[SparseDataset, list[int]]:
        return SparseDataset(self.bad, targets="kind", **options), [5, 11]


# -- obsm


CELLS = 30
VECTORS = np.random.default_rng(3).random((CELLS, 5), np.float32)
KMERS = random_matrix(CELLS, 7, seed=5)
CLASSES: dict[str, type[Any]] = {"a.h5ad": HDF5Dataset, "a.zarr": ZarrDataset}


def write_obsm(path: Path) -> Path:
    """A file of AnnData with obsm/X_pca, and obsm/kmers, which is sparse."""
    write_anndata(path, random_matrix(CELLS, 12))
    is_zarr = path.suffix == ".zarr"
    root: Any = zarr.open_group(path, mode="r+") if is_zarr else h5py.File(path, "r+")
    (root.create_array if is_zarr else root.create_dataset)("obsm/X_pca", data=VECTORS)
    write_matrix(root["obsm"], "kmers", KMERS)
    if not is_zarr:
        root.close()
    return path


@pytest.fixture(params=CLASSES)
def obsm(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_obsm(tmp_path / str(request.param))


def test_targets_of_dense_arrays(obsm: Path, tmp_path: Path, loader_of: Any) -> None:
    cls = CLASSES[obsm.name]
    for direct in (True, False):
        with cls(obsm, "obsm/X_pca", target_name="obs/kind", direct=direct) as dataset:
            assert dataset.classes == list(KINDS) and type(dataset[4][1]) is int
            assert [target for _, target in dataset] == [row % 3 for row in range(CELLS)]
            assert np.array_equal(np.stack([vector for vector, _ in dataset]), VECTORS)
            vectors, kinds = next(iter(loader_of(dataset, shuffle=False)))
            assert np.array_equal(vectors, VECTORS[:4]) and kinds.tolist() == [0, 1, 2, 0]
            train, _ = dataset.split(0.5, stratify=True)
            assert np.bincount(train.targets).tolist() == [5, 5, 5]
    with HDF5Dataset(pack(dataset, tmp_path / "out.h5"), target_name="targets") as packed:
        assert same(list(packed), list(dataset))
        assert packed.sample_source.info.classes == list(KINDS)
    with open_dataset(obsm, dataset_name="obsm/X_pca", target_name="/obs/kind") as opened:
        assert type(opened) is cls and opened[4][1] == 1
    for name, wanted in (("age", 2.0), ("batch", "b0")):
        with cls(obsm, "obsm/X_pca", target_name=f"obs/{name}") as dataset:
            assert dataset[4][1] == wanted and dataset.classes is None
    for name in ("obs/nothing", "obs"):  # a table is no column
        with pytest.raises(MissingNameError, match=f"'{name}'"):
            cls(obsm, "obsm/X_pca", target_name=name)


def test_categories_of_several_files_are_joined_by_name(tmp_path: Path) -> None:
    write_obsm(tmp_path / "a.h5ad")
    with h5py.File(write_obsm(tmp_path / "b.h5ad"), "r+") as file:
        file["obs/kind/categories"][...] = ["NK", "monocyte", "B cell"]
    with SparseDataset(tmp_path, targets="kind", join="inner") as rows:
        assert rows.classes == [*KINDS, "monocyte"] and rows[CELLS + 1][1] == 3
    with HDF5Dataset(tmp_path, "obsm/X_pca", target_name="obs/kind") as dataset:
        assert dataset.classes == [*KINDS, "monocyte"]
        assert [dataset[row][1] for row in (0, 1, 2)] == [0, 1, 2]
        assert [dataset[CELLS + row][1] for row in (0, 1, 2)] == [1, 3, 0]
    with h5py.File(tmp_path / "c.h5ad", "w") as file:
        file["obsm/X_pca"], file["obs/kind"] = VECTORS, np.arange(CELLS)
    with pytest.raises(FormatError, match="'obs/kind'"):
        HDF5Dataset(tmp_path, "obsm/X_pca", target_name="obs/kind")


FAR = random_matrix(60, 40)


@pytest.mark.slow
class TestH5AD(RemoteDatasetContract):
    """Chunks that are decoded here, of two files."""

    names = ("a.h5ad", "b.h5ad")

    @pytest.fixture(autouse=True)
    def _small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.formats.source.LONGEST", 400)

    def write(self, folder: Path) -> None:
        for name in self.names:
            write_anndata(folder / name, FAR, chunks=32, compression="gzip")

    def make(self, paths: list[str], **options: Any) -> SparseDataset:
        return SparseDataset(paths, targets="kind", layout="csr", **options)


@pytest.mark.slow
class TestZarrShards(TestH5AD):
    names = ("a.zarr",)
    data = tuple(f"a.zarr/X/{name}/c/{n}" for name in ("indices", "data") for n in range(2))
    has_index = False  # arrays without shards, such as indptr, have none

    def write(self, folder: Path) -> None:
        write_anndata(folder / "a.zarr", FAR, chunks=32, shards=(320,))

    def make(self, paths: list[str], **options: Any) -> SparseDataset:
        return SparseDataset(paths[0], targets="kind", layout="pairs", **options)
