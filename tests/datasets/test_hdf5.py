"""HDF5Dataset: several files, names, dtypes, and files that are not as they should be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
import torch

from headrace import (
    AccessError,
    BudgetError,
    ConfigError,
    DataNotFoundError,
    FormatError,
    HDF5Dataset,
    MissingNameError,
    SampleError,
    create_dataloader,
)
from headrace.testing.contract import same

N = 40
PACKED = {"chunks": (8, 6, 5), "compression": "gzip"}
MAP_MODES = ("lazy", "eager", "cached")


def rows(n: int = N, seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 255, (n, 6, 5), dtype=np.uint8)


def write(path: Path, **datasets: Any) -> Path:
    """Writes datasets: of each its values, or its values and the options of h5py."""
    with h5py.File(path, "w") as file:
        for name, value in datasets.items():
            data, options = value if isinstance(value, tuple) else (value, {})
            file.create_dataset(name, data=data, **options)
    return path


# -- what samples are


def test_several_files_are_one_dataset(tmp_path: Path, loader_of: Any) -> None:
    counts = (7, 0, 12, 1)
    for number, n in enumerate(counts):
        write(tmp_path / f"{number}.h5", data=rows(n, number), y=np.arange(n) + 100 * number)
    whole = np.concatenate([rows(n, number) for number, n in enumerate(counts)])
    for path in (str(tmp_path / "*.h5"), [tmp_path / f"{number}.h5" for number in range(4)]):
        dataset = HDF5Dataset(path, target_name="y")
        assert len(dataset) == 20 and dataset.targets[7] == 200 and dataset[19][1] == 300
        assert np.array_equal(np.stack([row for row, _ in dataset]), whole)
        assert torch.equal(dataset[-1][0], torch.from_numpy(whole[-1]))
        assert sum(len(images) for images, _ in loader_of(dataset, num_workers=2)) == 20
        assert dataset.source_of(8).endswith("2.h5, data, row 1")
    write(tmp_path / "4.h5", data=rows(3).astype("f4"))
    with pytest.raises(FormatError, match=r"4\.h5 and .*0\.h5 .*float32 \[6, 5\].*uint8"):
        HDF5Dataset(str(tmp_path / "*.h5"))


def test_more_files_than_descriptors(tmp_path: Path) -> None:
    for number in range(90):
        how = {"chunks": (1, 6, 5), "compression": "lzf" if number % 2 else None}
        write(tmp_path / f"{number:03}.h5", data=(rows(2, number), how))
    dataset = HDF5Dataset(str(tmp_path / "*.h5"))
    before = len(os.listdir("/proc/self/fd"))
    assert all(np.array_equal(dataset[i], rows(2, i // 2)[i % 2]) for i in range(180))
    assert len(os.listdir("/proc/self/fd")) - before <= 64 + 16
    dataset.close()


def test_several_names_give_dicts(tmp_path: Path, loader_of: Any) -> None:
    texts = [f"no. {i}" for i in range(N)]
    path = write(tmp_path / "a.h5", image=(rows(), PACKED), label=np.arange(N), text=texts)
    dataset = HDF5Dataset(path, ["image", "label", "text"])
    sample = dataset[3]
    assert np.array_equal(sample["image"], rows()[3])
    assert sample["label"] == 3 and sample["text"] == "no. 3"
    batch = next(iter(loader_of(dataset, shuffle=False)))
    assert batch["image"].shape == (4, 6, 5) and batch["label"].tolist() == [0, 1, 2, 3]
    assert batch["text"][1] == "no. 1"
    write(tmp_path / "b.h5", image=rows(), label=np.arange(5))
    with pytest.raises(FormatError, match="'image' 40, 'label' 5"):
        HDF5Dataset(tmp_path / "b.h5", ["image", "label"])


def test_elements_that_are_no_plain_numbers(tmp_path: Path) -> None:
    kinds = np.dtype([("a", ">i4"), ("inner", [("b", "f8"), ("c", "u1", (2,))])])
    compound = np.zeros(N, kinds)
    compound["a"], compound["inner"]["b"] = np.arange(N), np.arange(N) / 3
    table = np.zeros((N, 3), [("a", "u1"), ("b", "f8"), ("c", "i2", (2,)), ("s", "S3", (2,))])
    table["b"], table["c"], table["s"] = np.arange(3 * N).reshape(N, 3), 7, b"ab"
    narrow = np.zeros((N, 1), [("m", "f4", (2, 3)), ("k", "u1")])
    narrow["m"] = np.arange(6 * N).reshape(N, 1, 2, 3)
    path = write(
        tmp_path / "a.h5",
        compound=(compound, {"chunks": (8,), "compression": "gzip"}),
        table=table,
        narrow=narrow,
        text=[f"Ωmega {i}" for i in range(N)],
        fixed=np.array([f"f{i}".encode() for i in range(N)]),
        enum=(np.arange(N) % 3, {"dtype": h5py.enum_dtype({"a": 0, "b": 1}, basetype="i2")}),
        truth=np.arange(N) % 2 == 0,
        words=np.array([["a", "b"]] * N, dtype=object),
    )
    with h5py.File(path, "r+") as file:
        pair = np.dtype([("a", "u1"), ("b", "f8")])
        ragged = file.create_dataset("ragged", N, h5py.vlen_dtype("f4"))
        pairs = file.create_dataset("pairs", N, h5py.vlen_dtype(pair))
        ragged[7], pairs[7] = np.arange(7.0), np.array([(j, 7) for j in range(3)], pair)
        mixed = [("name", h5py.string_dtype()), ("size", "i4")]
        file["mixed"] = np.array([(f"n{i}", i) for i in range(N)], mixed)
    inner = {"b": torch.tensor(7 / 3, dtype=torch.float64), "c": torch.zeros(2, dtype=torch.uint8)}
    expected: dict[str, Any] = {
        "compound": {"a": torch.tensor(7, dtype=torch.int32), "inner": inner},
        "table": {
            "a": torch.zeros(3, dtype=torch.uint8),
            "b": torch.tensor([21, 22, 23], dtype=torch.float64),
            "c": torch.full((3, 2), 7, dtype=torch.int16),
            "s": [["ab", "ab"]] * 3,
        },
        "narrow": {
            "m": torch.arange(42.0, 48).reshape(1, 2, 3),
            "k": torch.zeros(1, dtype=torch.uint8),
        },
        "text": "Ωmega 7",
        "fixed": "f7",
        "enum": torch.tensor(1, dtype=torch.int16),
        "truth": torch.tensor(False),
        "words": ["a", "b"],
        "ragged": torch.arange(7.0),
        "pairs": {
            "a": torch.arange(3, dtype=torch.uint8),
            "b": torch.full((3,), 7.0, dtype=torch.float64),
        },
        "mixed": {"name": "n7", "size": torch.tensor(7, dtype=torch.int32)},
    }
    for name, value in expected.items():
        for mode in MAP_MODES:
            with HDF5Dataset(path, name, loading_mode=mode, progress=False) as dataset:
                assert same(dataset[7], value), (name, dataset[7])


def test_a_dtype_casts(tmp_path: Path, loader_of: Any) -> None:
    path = write(tmp_path / "a.h5", data=(rows(), PACKED), long=np.arange(12, dtype="g") / 3)
    expected = torch.from_numpy(rows()).float()
    for mode in MAP_MODES:
        dataset = HDF5Dataset(path, "data", dtype="float32", loading_mode=mode, progress=False)
        assert same(dataset[3], expected[3])
        assert same(next(iter(loader_of(dataset, shuffle=False))), expected[:4])
    long = HDF5Dataset(path, "long", dtype="float64")
    assert same(long[5], torch.tensor(5 / 3, dtype=torch.float64))
    with pytest.raises(FormatError, match=r"'long'.*dtype=\"float64\""):
        HDF5Dataset(path, "long")
    pairs = np.zeros(4, [("a", "f4"), ("b", [("c", np.longdouble, (2,))])])
    with pytest.raises(FormatError, match=r"'pairs'.*'b\.c'"):
        HDF5Dataset(write(tmp_path / "b.h5", pairs=pairs), dtype="float64")


# -- blocks


def test_open_blocks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    how = {"chunks": (100, 1000), "compression": "gzip"}
    path = write(tmp_path / "a.h5", data=(np.zeros((4000, 1000)), how))
    dataset = HDF5Dataset(path, max_memory_usage="40MB")
    options: dict[str, Any] = {"batch_size": 8, "shuffle": "block", "num_workers": 0, "turns": 2}
    with pytest.raises(BudgetError, match="interleave"):
        create_dataloader(dataset, interleave=20, **options)
    assert len(create_dataloader(dataset, interleave=4, **options)) == 500
    with pytest.raises(BudgetError, match=r"800\.0 kB.*500\.0 kB"):
        HDF5Dataset(path, max_memory_usage="500kB")
    dataset = HDF5Dataset(path, max_memory_usage="1500kB")
    with pytest.raises(BudgetError, match=r"800\.0 kB.* 2 processes"):
        create_dataloader(dataset, batch_size=8, shuffle=True, num_workers=2, prefetch_factor=1)
    assert len(create_dataloader(dataset, batch_size=8, shuffle=True, num_workers=0)) == 500


# -- bad input


WRITER = """
import h5py, sys
with h5py.File(sys.argv[1], "w", libver="latest") as file:
    file["data"] = [7] * 30
    file.swmr_mode = True
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_file_that_is_being_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "a.h5")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        with pytest.raises(AccessError, match=r"a\.h5 is being written by another process"):
            HDF5Dataset(tmp_path / "a.h5")
        writer.communicate("\n")
    assert HDF5Dataset(tmp_path / "a.h5")[29] == 7


def test_virtual_datasets_in_a_circle(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, source in (("one", "two"), ("two", "one")):
            layout = h5py.VirtualLayout((N, 5), "u1")
            layout[:] = h5py.VirtualSource(".", source, (N, 5))
            file.create_virtual_dataset(name, layout)
    with pytest.raises(FormatError):
        HDF5Dataset(tmp_path / "a.h5", "one")


FILTERS = """
import sys
from headrace import FormatError, HDF5Dataset
assert "hdf5plugin" not in sys.modules
for name in ("zstd", "blosc"):
    dataset = HDF5Dataset(sys.argv[1], name)
    assert [int(dataset[i][0]) for i in range(20)] == list(range(0, 80, 4)), name
for name in ("bitshuffle", "lzo"):
    try:
        HDF5Dataset(sys.argv[1], name)
    except FormatError as error:
        print(error)
"""


@pytest.mark.slow
def test_filters_that_h5py_lacks(tmp_path: Path) -> None:
    """Ours need no plugin; for others the error says what to do."""
    filters = {"zstd": hdf5plugin.Zstd(), "blosc": hdf5plugin.Blosc()}
    filters["bitshuffle"] = hdf5plugin.Bitshuffle()
    data = np.arange(80).reshape(20, 4)
    arrays = {name: (data, {"chunks": (4, 4), **how}) for name, how in filters.items()}
    with h5py.File(write(tmp_path / "a.h5", **arrays), "r+") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((100,))
        plist.set_filter(305, h5py.h5z.FLAG_OPTIONAL)
        space = h5py.h5s.create_simple((1000,))
        h5py.h5d.create(file.id, b"lzo", h5py.h5t.STD_I32LE, space, plist)
    environment = {name: value for name, value in os.environ.items() if name != "HDF5_PLUGIN_PATH"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", FILTERS, str(tmp_path / "a.h5")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert run.returncode == 0, run.stderr
    packed, unknown = run.stdout.splitlines()
    assert "bitshuffle" in packed and "pip install" in packed
    assert "lzo" in unknown and "pip install" not in unknown.partition("hdf5plugin")[2]


def test_what_can_not_be_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", data=rows(), single=3.0, texts=np.array([b"a", b"\xff"] * 20))
    with h5py.File(path, "r+") as file:
        file["null"] = h5py.Empty("f4")
        file.create_dataset("to", data=[file["data"].ref] * 3, dtype=h5py.ref_dtype)
    (tmp_path / "empty").mkdir()
    for missing in (tmp_path / "empty", str(tmp_path / "*.hdf"), []):
        with pytest.raises(DataNotFoundError):
            HDF5Dataset(missing)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"data_path": ["https://host/a.h5", path]}, ConfigError, "mix URLs"),
        ({"dataset_name": []}, ConfigError, "dataset_name"),
        ({"target_name": ["other"]}, ConfigError, "target_name"),
        ({"dtype": "no such"}, ConfigError, "'no such'"),
        ({"dataset_name": "texts", "encoding": "no-8"}, ConfigError, "'no-8'"),
        ({"dataset_name": ["data", "other"]}, MissingNameError, "it has: data"),
        ({"dataset_name": "null"}, FormatError, "'null'"),
        ({"target_name": "null"}, FormatError, "'null'"),
        ({"target_name": "texts"}, FormatError, r"a\.h5: 'texts', row 1"),
        ({"dataset_name": "to"}, FormatError, "references"),
        ({"dataset_name": "single"}, FormatError, "'single'"),
    ]
    for options, error, named in cases:
        with pytest.raises(error, match=named):
            HDF5Dataset(**{"data_path": path, "dataset_name": "data", **options})


def test_a_file_that_this_process_has_open_too(tmp_path: Path) -> None:
    """HDF5 lets a process open a file in one way of locking only: whoever comes first decides."""
    path = write(tmp_path / "a.h5", x=np.arange(20).reshape(5, 4))
    for locking in (None, False, True, "best-effort"):
        for direct in (True, False):
            with (
                h5py.File(path, locking=locking) as file,
                HDF5Dataset(path, "x", direct=direct) as dataset,
            ):
                assert dataset[3].tolist() == file["x"][3].tolist()
            with HDF5Dataset(path, "x", direct=direct) as dataset:
                assert dataset[3].tolist() == [12, 13, 14, 15]
                with h5py.File(path) as file:
                    assert dataset[4].tolist() == file["x"][4].tolist()
    with h5py.File(path, "r+") as file:
        with pytest.raises(AccessError, match=r"a\.h5"):
            HDF5Dataset(path, "x")
        file["x"][0] = 7  # it is still open
    assert HDF5Dataset(path, "x")[0].tolist() == [7] * 4


# -- names, strings and numbers


def test_the_only_dataset_is_found_by_itself(tmp_path: Path) -> None:
    deep = {"deep/er/images": rows(), "deep/labels": np.arange(N), "scale": 3.0}
    dataset = HDF5Dataset(write(tmp_path / "a.h5", **deep), target_name="/deep/labels")
    assert np.array_equal(dataset[5][0], rows()[5]) and dataset[5][1] == 5
    path = write(tmp_path / "b.h5", data=rows(), other=rows())
    assert np.array_equal(HDF5Dataset([path, path])[N + 1], rows()[1])
    with pytest.raises(MissingNameError, match=r"a\.h5 has 2 .*deep/er/images \[40, 6, 5\]"):
        HDF5Dataset(tmp_path / "a.h5")
    with pytest.raises(MissingNameError, match=r"c\.h5"):
        HDF5Dataset(write(tmp_path / "c.h5", scale=3.0))


def test_coordinates_and_references_are_no_candidates(tmp_path: Path) -> None:
    """The array need not be named in netCDF-4, MATLAB 7.3 and AnnData."""
    netcdf = write(tmp_path / "a.nc", temperature=rows(), time=np.arange(N))
    with h5py.File(netcdf, "r+") as file:
        file["time"].make_scale("time")
    matlab = write(tmp_path / "b.mat", **{"images": rows(), "#refs#/a": np.arange(3)})
    cells = write(tmp_path / "c.h5ad", **{"X": rows(), "obs/age": np.arange(N)})
    with h5py.File(cells, "r+") as file:
        file.attrs["encoding-type"] = "anndata"
    for path in (netcdf, matlab, cells):
        with HDF5Dataset(path) as dataset:
            assert np.array_equal(dataset[7], rows()[7]), path
    with h5py.File(netcdf, "r+") as file:
        del file["temperature"]
    assert HDF5Dataset(netcdf)[3] == 3


def test_strings_may_have_another_encoding(tmp_path: Path) -> None:
    words = ["Größe", "naïve"]
    encoded = [word.encode("latin-1") for word in words]
    records = np.array([(word, 1) for word in encoded], [("word", "S9"), ("n", "u1")])
    any_length = (encoded, {"dtype": h5py.string_dtype("ascii")})
    path = write(tmp_path / "a.h5", fixed=np.array(encoded), any=any_length, record=records)
    for name in ("fixed", "any"):
        assert list(HDF5Dataset(path, name, encoding="latin-1")) == words
        dataset = HDF5Dataset(path, name, target_name=name, encoding=None)
        assert dataset[1] == (encoded[1], encoded[1])
        with pytest.raises(SampleError, match="encoding="):
            HDF5Dataset(path, name)[0]
    assert HDF5Dataset(path, "record", encoding="latin-1")[0]["word"] == "Größe"
