"""HDF5Dataset as users see it: several files, names, dtypes, and files that are not as they
should be.
"""

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
    FileChangedError,
    FormatError,
    HDF5Dataset,
    MissingNameError,
    SampleError,
    create_dataloader,
)
from headrace.testing.contract import same

pytestmark = pytest.mark.quick_every(3)

N = 40


def rows(n: int = N, seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 255, (n, 6, 5), dtype=np.uint8)


def write(path: Path, **datasets: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, (data, how) in datasets.items():
            file.create_dataset(name, data=data, **how)
    return path


PACKED = {"chunks": (8, 6, 5), "compression": "gzip"}


# -- what samples are


def test_several_files_are_one_dataset(tmp_path: Path) -> None:
    for number, n in enumerate((7, 0, 12, 1)):
        write(
            tmp_path / f"{number}.h5",
            data=(rows(n, number), {}),
            y=(np.arange(n) + 100 * number, {}),
        )
    whole = np.concatenate([rows(n, number) for number, n in enumerate((7, 0, 12, 1))])
    for path in (str(tmp_path / "*.h5"), [tmp_path / f"{number}.h5" for number in range(4)]):
        dataset = HDF5Dataset(path, target_name="y")
        assert len(dataset) == 20 and dataset.targets[7] == 200
        assert all(torch.equal(dataset[i][0], torch.from_numpy(whole[i])) for i in range(20))
        assert torch.equal(dataset[-1][0], torch.from_numpy(whole[-1])) and dataset[19][1] == 300
        batches = list(create_dataloader(dataset, batch_size=8, num_workers=2, seed=3))
        assert sum(len(images) for images, _ in batches) == 20
        assert dataset.source_of(8).endswith("2.h5, data, row 1")
        dataset.close()
    write(tmp_path / "4.h5", data=(rows(3).astype("f4"), {}))
    with pytest.raises(
        FormatError,
        match=(
            r"4\.h5 and .*0\.h5 can't be one dataset: rows of float32 \[6, 5\] here, and of uint8 "
            r"\[6, 5\]"
        ),
    ):
        HDF5Dataset(str(tmp_path / "*.h5"))


def test_more_files_than_descriptors(tmp_path: Path) -> None:
    for number in range(90):
        write(
            tmp_path / f"{number:03}.h5",
            data=(
                rows(2, number),
                {"chunks": (1, 6, 5), "compression": "lzf" if number % 2 else None},
            ),
        )
    dataset = HDF5Dataset(str(tmp_path / "*.h5"))
    before = len(os.listdir("/proc/self/fd"))
    assert all(np.array_equal(dataset[i], rows(2, i // 2)[i % 2]) for i in range(180))
    assert len(os.listdir("/proc/self/fd")) - before <= 64 + 16
    dataset.close()


def test_several_names_give_dicts(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.h5",
        image=(rows(), PACKED),
        label=(np.arange(N), {}),
        text=([f"no. {i}" for i in range(N)], {}),
    )
    dataset = HDF5Dataset(path, ["image", "label", "text"])
    sample = dataset[3]
    assert (
        torch.equal(sample["image"], torch.from_numpy(rows()[3]))
        and sample["label"] == 3
        and sample["text"] == "no. 3"
    )
    batch = next(iter(create_dataloader(dataset, batch_size=4, shuffle=False, num_workers=1)))
    assert (
        batch["image"].shape == (4, 6, 5)
        and batch["label"].tolist() == [0, 1, 2, 3]
        and batch["text"][1] == "no. 1"
    )
    write(tmp_path / "b.h5", image=(rows(), {}), label=(np.arange(5), {}))
    with pytest.raises(FormatError, match=r"different numbers of rows: 'image' 40, 'label' 5"):
        HDF5Dataset(tmp_path / "b.h5", ["image", "label"])


def test_elements_that_are_no_plain_numbers(tmp_path: Path) -> None:
    kinds = np.dtype([("a", ">i4"), ("inner", [("b", "f8"), ("c", "u1", (2,))])])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        compound = np.zeros(N, kinds)
        compound["a"], compound["inner"]["b"] = np.arange(N), np.arange(N) / 3
        file.create_dataset("compound", data=compound, chunks=(8,), compression="gzip")
        file["text"] = [f"Ωmega {i}" for i in range(N)]
        file["fixed"] = np.array([f"f{i}".encode() for i in range(N)])
        ragged = file.create_dataset("ragged", N, h5py.vlen_dtype("f4"))
        for i in range(N):
            ragged[i] = np.arange(i)
        file.create_dataset(
            "enum",
            data=np.arange(N) % 3,
            dtype=h5py.enum_dtype({"a": 0, "b": 1, "c": 2}, basetype="i2"),
        )
        file["truth"] = np.arange(N) % 2 == 0
        file["many words"] = np.array([["a", "b"]] * N, dtype=object)
        mixed = file.create_dataset(
            "mixed", N, np.dtype([("name", h5py.string_dtype()), ("size", "i4")])
        )
        mixed[:] = [(f"n{i}", i) for i in range(N)]
    expected = {
        "compound": {
            "a": torch.tensor(7, dtype=torch.int32),
            "inner": {"b": torch.tensor(7 / 3, dtype=torch.float64)},
        },
        "text": "Ωmega 7",
        "fixed": "f7",
        "ragged": torch.arange(7.0),
        "enum": torch.tensor(1, dtype=torch.int16),
        "truth": torch.tensor(False),
        "many words": ["a", "b"],
        "mixed": {"name": "n7", "size": torch.tensor(7, dtype=torch.int32)},
    }
    expected["compound"]["inner"]["c"] = torch.zeros(2, dtype=torch.uint8)
    for name, value in expected.items():
        for mode in ("lazy", "eager", "cached"):
            dataset = HDF5Dataset(tmp_path / "a.h5", name, loading_mode=mode, progress=False)
            assert same(dataset[7], value), (name, dataset[7])
            dataset.close()


def test_references_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(3)
        file.create_dataset("to", data=[file["x"].ref] * 3, dtype=h5py.ref_dtype)
        file["single"] = 3.0
    with pytest.raises(FormatError, match="holds references"):
        HDF5Dataset(tmp_path / "a.h5", "to")
    with pytest.raises(FormatError, match="'single' is a single value"):
        HDF5Dataset(tmp_path / "a.h5", "single")


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
def test_a_dtype_casts(tmp_path: Path, mode: str) -> None:
    path = write(tmp_path / "a.h5", data=(rows(), PACKED))
    dataset = HDF5Dataset(path, dtype="float32", loading_mode=mode, progress=False)
    assert dataset[3].dtype == torch.float32 and torch.equal(
        dataset[3], torch.from_numpy(rows()[3]).float()
    )
    batch = next(iter(create_dataloader(dataset, batch_size=8, shuffle=False, num_workers=0)))
    assert batch.dtype == torch.float32 and torch.equal(batch, torch.from_numpy(rows()[:8]).float())
    dataset.close()
    with pytest.raises(ConfigError, match="dtype='no such' is no NumPy dtype"):
        HDF5Dataset(path, dtype="no such")


# -- blocks


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("height", [16, 128])
def test_a_block_shuffle_decodes_each_chunk_once(tmp_path: Path, workers: int, height: int) -> None:
    n = 128 * 60
    data = np.arange(n * 4, dtype=np.int32).reshape(n, 4)
    path = write(
        tmp_path / "a.h5",
        data=(data, {"chunks": (height, 4), "compression": "gzip", "shuffle": True}),
    )
    dataset = HDF5Dataset(path)
    loader = create_dataloader(
        dataset, batch_size=64, shuffle="block", num_workers=workers, interleave=4, turns=4
    )
    for _ in range(2):
        before = loader.get_stats().get("chunks_decoded", 0)
        seen = torch.cat([batch[:, 0] for batch in loader])
        assert sorted(seen.tolist()) == list(range(0, n * 4, 4))
        decoded = loader.get_stats()["chunks_decoded"] - before
        assert n // height <= decoded <= n // height + 4 * 4 - 1
    loader.close()


def test_open_blocks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    data = np.zeros((4000, 1000), np.float64)
    path = write(tmp_path / "a.h5", data=(data, {"chunks": (100, 1000), "compression": "gzip"}))
    dataset = HDF5Dataset(path, max_memory_usage="40MB")
    with pytest.raises(
        BudgetError, match=r"shuffle='block': each of 1 processes has \d+ blocks open.*interleave"
    ):
        create_dataloader(
            dataset, batch_size=8, shuffle="block", num_workers=0, interleave=20, turns=2
        )
    assert (
        len(
            list(
                create_dataloader(
                    dataset, batch_size=8, shuffle="block", num_workers=0, interleave=4, turns=2
                )
            )
        )
        == 500
    )
    with pytest.raises(
        BudgetError,
        match=(
            r"a chunk of HDF5Source takes 800\.0 kB when it is decoded, and the memory budget is "
            r"500\.0 kB"
        ),
    ):
        HDF5Dataset(path, max_memory_usage="500kB")
    dataset = HDF5Dataset(path, max_memory_usage="1500kB")
    with pytest.raises(
        BudgetError,
        match=(
            r"that take 800\.0 kB when they are decoded, in each of 2 processes, and .* a process "
            r"are"
        ),
    ):
        create_dataloader(dataset, batch_size=8, shuffle=True, num_workers=2, prefetch_factor=1)
    assert len(create_dataloader(dataset, batch_size=8, shuffle=True, num_workers=0)) == 500


# -- bad input


@pytest.mark.falls_back
def test_a_chunk_that_is_damaged_names_its_samples(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", data=(rows(), {**PACKED, "fletcher32": True}))
    with h5py.File(path) as file:
        found: list[Any] = []
        file["data"].id.chunk_iter(found.append)
    with open(path, "r+b") as file:
        file.seek(found[2].byte_offset + 20)
        byte = file.read(1)[0]
        file.seek(found[2].byte_offset + 20)
        file.write(bytes([byte ^ 1]))
    dataset = HDF5Dataset(path)
    first = found[2].chunk_offset[0]
    with pytest.raises(
        SampleError,
        match=(
            rf"sample {first} can't be read: .*a\.h5, chunk \({first // 8}, 0, 0\) of 'data': "
            r"wrong checksum"
        ),
    ):
        dataset[first]
    loader = create_dataloader(
        HDF5Dataset(path, on_error="skip"), batch_size=16, shuffle=False, num_workers=2
    )
    assert sum(len(batch) for batch in loader) == N - 8 and loader.get_stats()["skipped"] == 8


def test_a_file_that_is_cut_at_any_length(tmp_path: Path) -> None:
    """An error, or the bytes that were there."""
    path = write(tmp_path / "a.h5", data=(rows(), PACKED), plain=(rows(), {}))
    whole = path.read_bytes()
    for length in np.random.default_rng(0).integers(0, len(whole), 40).tolist():
        path.write_bytes(whole[:length])
        for name in ("data", "plain"):
            try:
                dataset = HDF5Dataset(path, name)
                samples = [dataset[i] for i in range(N)]
            except (FormatError, MissingNameError, SampleError):
                continue
            assert np.array_equal(np.stack(samples), rows())


def test_a_file_that_is_changed_under_the_reader(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", data=(rows(), PACKED))
    dataset = HDF5Dataset(path)
    assert np.array_equal(dataset[3], rows()[3])
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    os.utime(path, ns=(1, 1))
    with pytest.raises(
        FileChangedError, match="has been changed since it was opened: open the dataset again"
    ):
        dataset[30]


def test_a_file_that_is_replaced_goes_on_where_it_is_open(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", data=(rows(), PACKED))
    dataset = HDF5Dataset(path)
    assert np.array_equal(dataset[3], rows()[3])
    os.replace(write(tmp_path / "b.h5", data=(rows(seed=2), PACKED)), path)
    assert np.array_equal(dataset[30], rows()[30])
    dataset.close()
    with pytest.raises(FileChangedError, match="has been changed"):
        dataset[30]


WRITER = """
import h5py, sys
with h5py.File(sys.argv[1], "w", libver="latest") as file:
    chunks = {"maxshape": (None, 4), "chunks": (8, 4), "compression": "gzip"}
    rows = file.create_dataset("data", (30, 4), "i4", **chunks)
    rows[:] = 7
    file.swmr_mode = True
    rows.flush()
    print("ready", flush=True)
    sys.stdin.readline()
    rows.resize((40, 4))
    rows[30:] = 8
    rows.flush()
    print("more", flush=True)
    sys.stdin.readline()
"""


def test_a_file_that_is_being_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "a.h5")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        dataset = HDF5Dataset(tmp_path / "a.h5")
        assert len(dataset) == 30 and "another process is writing" in dataset.explain()
        assert dataset[29].tolist() == [7] * 4
        writer.stdin.write("\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "more\n"
        assert len(dataset) == 30 and dataset[29].tolist() == [7] * 4
        batches = list(create_dataloader(dataset, batch_size=10, num_workers=1))
        assert all((batch == 7).all() for batch in batches)
        dataset.close()
        writer.communicate("\n")
    dataset = HDF5Dataset(tmp_path / "a.h5")
    assert len(dataset) == 40 and dataset[39].tolist() == [8] * 4


def test_missing_sources_of_virtual_datasets(tmp_path: Path) -> None:
    write(tmp_path / "source.h5", x=(rows(), {}))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        layout = h5py.VirtualLayout((N, 6, 5), "u1")
        layout[:] = h5py.VirtualSource(tmp_path / "source.h5", "x", (N, 6, 5))
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset(
            "external", data=rows(), external=[(str(tmp_path / "raw.bin"), 0, h5py.h5f.UNLIMITED)]
        )
        for name, other in (("one", "two"), ("two", "one")):
            circle = h5py.VirtualLayout((N, 6, 5), "u1")
            circle[:] = h5py.VirtualSource(".", other, (N, 6, 5))
            file.create_virtual_dataset(name, circle)
    for name in ("virtual", "external"):
        assert np.array_equal(HDF5Dataset(tmp_path / "a.h5", name)[5], rows()[5])
    with pytest.raises(FormatError, match="leads back to itself"):
        HDF5Dataset(tmp_path / "a.h5", "one")
    os.remove(tmp_path / "source.h5")
    os.remove(tmp_path / "raw.bin")
    with pytest.raises(
        DataNotFoundError,
        match=r"the virtual dataset '/virtual' needs .*source\.h5' ?, which is missing",
    ):
        HDF5Dataset(tmp_path / "a.h5", "virtual")
    with pytest.raises(DataNotFoundError, match=r"external file .*raw\.bin', which does not exist"):
        HDF5Dataset(tmp_path / "a.h5", "external")


FILTERS = """
import sys
import numpy as np
from headrace import FormatError, HDF5Dataset
assert "hdf5plugin" not in sys.modules
for name in ("zstd", "blosc", "lz4"):
    dataset = HDF5Dataset(sys.argv[1], name)
    assert [int(dataset[i][0]) for i in range(20)] == list(range(0, 80, 4)), name
table = HDF5Dataset(sys.argv[1], "table")
assert [int(table[i]["number"]) for i in (0, 1, 999)] == [0, 1, 999]
assert "h5py:" not in table.explain()
for name in ("bitshuffle", "blosc2", "lzo"):
    try:
        HDF5Dataset(sys.argv[1], name)
    except FormatError as error:
        print(error)
"""


@pytest.mark.slow
def test_filters_that_h5py_lacks(tmp_path: Path) -> None:
    """Ours need no plugin; for others the error says what to do."""
    filters = {
        "zstd": hdf5plugin.Zstd(),
        "blosc": hdf5plugin.Blosc(),
        "lz4": hdf5plugin.LZ4(),
        "blosc2": hdf5plugin.Blosc2(),
    }
    filters["bitshuffle"] = hdf5plugin.Bitshuffle()
    data = np.arange(80).reshape(20, 4)
    path = write(
        tmp_path / "a.h5",
        **{name: (data, {"chunks": (4, 4), **how}) for name, how in filters.items()},
    )
    table = np.zeros(1000, [("flag", "u1"), ("number", "f8")])
    table["number"] = np.arange(1000)
    with h5py.File(path, "r+") as file:
        # a table as PyTables writes it, whose truth values are bit fields
        kind = h5py.h5t.create(h5py.h5t.COMPOUND, 9)
        kind.insert(b"flag", 0, h5py.h5t.STD_B8LE)
        kind.insert(b"number", 1, h5py.h5t.IEEE_F64LE)
        for name, filter_number in (("table", 32001), ("lzo", 305)):
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_chunk((100,))
            if name == "table":
                plist.set_filter(filter_number, h5py.h5z.FLAG_MANDATORY, (0, 0, 0, 0, 5, 1, 1))
                h5py.h5d.create(file.id, b"table", kind, h5py.h5s.create_simple((1000,)), plist)
                file["table"].id.write(h5py.h5s.ALL, h5py.h5s.ALL, table, kind)
            else:
                plist.set_filter(filter_number, h5py.h5z.FLAG_OPTIONAL)
                h5py.h5d.create(
                    file.id, b"lzo", h5py.h5t.STD_I32LE, h5py.h5s.create_simple((1000,)), plist
                )
    environment = {name: value for name, value in os.environ.items() if name != "HDF5_PLUGIN_PATH"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run(
        [sys.executable, "-c", FILTERS, path],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    said = run.stdout.splitlines()
    assert len(said) == 3 and all(
        f"is packed with {name}, which h5py lacks: pip install" in line
        for name, line in zip(("bitshuffle", "blosc2"), said[:2], strict=True)
    )
    assert "is packed with lzo, which h5py lacks: hdf5plugin has not all of them either" in said[2]


def test_what_can_not_be_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", data=(rows(), {}))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataNotFoundError, match=r"no file under .* ends in any of .h5"):
        HDF5Dataset(tmp_path / "empty")
    with pytest.raises(DataNotFoundError, match="nothing matches"):
        HDF5Dataset(str(tmp_path / "*.hdf"))
    with pytest.raises(DataNotFoundError, match="data_path is empty"):
        HDF5Dataset([])
    with pytest.raises(ConfigError, match="mixes URLs and local paths"):
        HDF5Dataset(["https://host/a.h5?key=secret", path])
    with pytest.raises(ConfigError, match="dataset_name must be"):
        HDF5Dataset(path, [])
    with pytest.raises(ConfigError, match="target_name must be"):
        HDF5Dataset(path, "data", target_name=["other"])
    with pytest.raises(MissingNameError, match="it has: data"):
        HDF5Dataset(path, ["data", "other"])
    with h5py.File(tmp_path / "null.h5", "w") as file:
        file["data"] = h5py.Empty("f4")
        file["rows"] = np.ones((3, 2))
        file["texts"] = np.array([b"a", b"b\xff", b"c"])
    with pytest.raises(FormatError, match="'data' has a null dataspace, and so no values"):
        HDF5Dataset(tmp_path / "null.h5")
    with pytest.raises(FormatError, match="'data' has a null dataspace, and so no values"):
        HDF5Dataset(tmp_path / "null.h5", "rows", target_name="data")
    with pytest.raises(FormatError, match=r"null\.h5: 'texts', row 1: a string is not UTF-8"):
        HDF5Dataset(tmp_path / "null.h5", "rows", target_name="texts")


@pytest.mark.parametrize("locking", [None, False, True, "best-effort"])
@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_the_user_has_open_too(tmp_path: Path, locking: Any, direct: bool) -> None:
    """HDF5 lets a process open a file in one way of locking only: whoever comes first decides."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(20).reshape(5, 4)
    with h5py.File(tmp_path / "a.h5", locking=locking) as file:
        dataset = HDF5Dataset(tmp_path / "a.h5", "x", direct=direct)
        assert dataset[3].tolist() == file["x"][3].tolist()
        dataset.close()
    dataset = HDF5Dataset(tmp_path / "a.h5", "x", direct=direct)
    assert dataset[3].tolist() == [12, 13, 14, 15]
    with h5py.File(tmp_path / "a.h5") as file:
        assert dataset[4].tolist() == file["x"][4].tolist()
    dataset.close()


def test_a_file_that_this_process_has_open_for_writing(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(20).reshape(5, 4)
        with pytest.raises(
            AccessError, match="is open for writing in this process: close it first"
        ):
            HDF5Dataset(tmp_path / "a.h5", "x")
        file["x"][0] = 7  # it is still open
    assert HDF5Dataset(tmp_path / "a.h5", "x")[0].tolist() == [7] * 4


@pytest.mark.parametrize("chunks", [None, (2, 3, 2), (2, 4, 3)])
@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
def test_indices_of_a_batch_count_from_the_end_or_are_refused(
    tmp_path: Path, chunks: Any, mode: str
) -> None:
    rows = np.arange(60).reshape(5, 4, 3)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=rows, chunks=chunks)
    dataset = HDF5Dataset(tmp_path / "a.h5", "x", loading_mode=mode)
    for some in (dataset, dataset[1:4]):
        whole = rows if some is dataset else rows[1:4]
        found = some.__getitems__([-1, 0, -len(whole)])
        assert all(np.array_equal(a, b) for a, b in zip(found, whole[[-1, 0, 0]], strict=True))
        for outside in (len(whole), -len(whole) - 1):
            with pytest.raises(IndexError, match=f"outside of a dataset of {len(whole)} samples"):
                some.__getitems__([0, outside])
    dataset.close()


# -- names, strings and numbers


def test_the_only_dataset_is_found_by_itself(tmp_path: Path) -> None:
    write(
        tmp_path / "a.h5",
        **{"deep/er/images": (rows(), {}), "deep/labels": (np.arange(N), {}), "scale": (3.0, {})},
    )
    dataset = HDF5Dataset(tmp_path / "a.h5", target_name="/deep/labels")
    assert np.array_equal(dataset[5][0], rows()[5]) and dataset[5][1] == 5
    write(tmp_path / "b.h5", data=(rows(), {}), other=(rows(), {}))
    assert np.array_equal(HDF5Dataset([tmp_path / "b.h5", tmp_path / "b.h5"])[N + 1], rows()[1])
    with pytest.raises(
        MissingNameError,
        match=(
            r"a\.h5 has 2 datasets: name one of them as dataset_name: deep/er/images \[40, 6, 5\] "
            r"uint8, "
        ),
    ):
        HDF5Dataset(tmp_path / "a.h5")
    write(tmp_path / "c.h5", scale=(3.0, {}))
    with pytest.raises(MissingNameError, match=r"c\.h5 has no dataset of samples"):
        HDF5Dataset(tmp_path / "c.h5")


def test_coordinates_and_references_are_no_candidates(tmp_path: Path) -> None:
    """Of netCDF-4, MATLAB 7.3 and AnnData with a dense X, nobody has to name the array that
    samples are read from.
    """
    netcdf = write(tmp_path / "a.nc", temperature=(rows(), {}), time=(np.arange(N), {}))
    with h5py.File(netcdf, "r+") as file:
        file["time"].make_scale("time")
    matlab = write(tmp_path / "b.mat", **{"images": (rows(), {}), "#refs#/a": (np.arange(3), {})})
    cells = write(tmp_path / "c.h5ad", X=(rows(), {}), **{"obs/age": (np.arange(N), {})})
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
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["fixed"] = np.array([word.encode("latin-1") for word in words])
        file.create_dataset(
            "any", data=[word.encode("latin-1") for word in words], dtype=h5py.string_dtype("ascii")
        )
        file.create_dataset(
            "record",
            data=np.array(
                [(word.encode("latin-1"), 1) for word in words], [("word", "S9"), ("n", "u1")]
            ),
        )
    for name in ("fixed", "any"):
        assert [
            HDF5Dataset(tmp_path / "a.h5", name, encoding="latin-1")[i] for i in range(2)
        ] == words
        dataset = HDF5Dataset(tmp_path / "a.h5", name, target_name=name, encoding=None)
        assert dataset[1] == (words[1].encode("latin-1"), words[1].encode("latin-1"))
        with pytest.raises(
            SampleError,
            match=r"a string is not UTF-8: .* pass its encoding=, or encoding=None to get bytes",
        ):
            HDF5Dataset(tmp_path / "a.h5", name)[0]
    assert HDF5Dataset(tmp_path / "a.h5", "record", encoding="latin-1")[0]["word"] == "Größe"
    with pytest.raises(ConfigError, match="encoding='no-8' is no encoding"):
        HDF5Dataset(tmp_path / "a.h5", "fixed", encoding="no-8")


def test_long_doubles_need_a_dtype(tmp_path: Path) -> None:
    long = np.arange(12, dtype=np.longdouble).reshape(4, 3) / 3
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = long
        file["pairs"] = np.zeros(4, [("a", "f4"), ("b", [("c", np.longdouble, (2,))])])
    with pytest.raises(
        FormatError,
        match=(
            r"'x' holds long doubles \(float\d+\), which torch does not have: pass "
            r"dtype=\"float64\""
        ),
    ):
        HDF5Dataset(tmp_path / "a.h5", "x")
    with pytest.raises(FormatError, match=r"'pairs', field 'b\.c', holds long doubles"):
        HDF5Dataset(tmp_path / "a.h5", "pairs", dtype="float64")
    loader = create_dataloader(
        HDF5Dataset(tmp_path / "a.h5", "x", dtype="float64"), batch_size=4, shuffle=False
    )
    assert torch.equal(next(iter(loader)), torch.from_numpy(long.astype("f8")))


def test_packed_compounds_of_any_shape(tmp_path: Path) -> None:
    kinds = np.dtype([("a", "u1"), ("b", "f8"), ("c", "i2", (2,)), ("s", "S3", (2,))])
    table = np.zeros((N, 3), kinds)
    table["b"], table["c"], table["s"] = np.arange(3 * N).reshape(N, 3), 7, b"ab"
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["table"] = table
        ragged = file.create_dataset(
            "ragged", N, h5py.vlen_dtype(np.dtype([("a", "u1"), ("b", "f8")]))
        )
        for i in range(N):
            ragged[i] = np.array([(j, i) for j in range(i % 4)], [("a", "u1"), ("b", "f8")])
    narrow = np.zeros((N, 1), [("m", "f4", (2, 3)), ("k", "u1")])
    narrow["m"] = np.arange(6 * N).reshape(N, 1, 2, 3)
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["narrow"] = narrow
    for mode in ("lazy", "eager", "cached"):
        sample = HDF5Dataset(tmp_path / "a.h5", "narrow", loading_mode=mode, progress=False)[7]
        assert sample["m"].shape == (1, 2, 3) and sample["m"].flatten().tolist() == [
            42,
            43,
            44,
            45,
            46,
            47,
        ]
        sample = HDF5Dataset(tmp_path / "a.h5", "table", loading_mode=mode, progress=False)[7]
        assert (
            sample["b"].tolist() == [21, 22, 23]
            and sample["c"].shape == (3, 2)
            and sample["s"] == [["ab", "ab"]] * 3
        )
        sample = HDF5Dataset(tmp_path / "a.h5", "ragged", loading_mode=mode, progress=False)[7]
        assert same(
            sample,
            {
                "a": torch.arange(3, dtype=torch.uint8),
                "b": torch.full((3,), 7.0, dtype=torch.float64),
            },
        )
