"""Layouts that are kept give the same datasets without h5py, and none of files that have
changed.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import HDF5Dataset, StreamingDataset
from headrace.errors import DataNotFoundError, FileChangedError, FormatError, SampleError
from headrace.testing.contract import same
from tests.servers.ranges import RangeServer

N = 60
NAMES = ["raw", "packed", "sparse", "sums", "big", ["raw", "packed"]]


def write(path: Path, seed: int = 0) -> None:
    draws = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        file["raw"] = draws.integers(0, 256, (N, 40), np.uint8)
        file.create_dataset(
            "packed",
            data=draws.integers(0, 9, (N, 70), np.int32),
            chunks=(8, 70),
            compression="gzip",
            shuffle=True,
        )
        sparse = file.create_dataset("sparse", (N, 4), np.float64, chunks=(1, 4), fillvalue=2.5)
        sparse[5] = seed
        file.create_dataset(
            "sums", data=draws.integers(0, 9, (N, 7), np.int16), chunks=(16, 7), fletcher32=True
        )
        file["big"] = draws.integers(0, 9, (N, 3)).astype(">i4")
        file.create_dataset(
            "library",
            data=draws.integers(0, 9, (N, 40), np.int32),
            chunks=(16, 40),
            compression="lzf",
        )
        file["texts"] = [f"text {number}" for number in range(N)]
        file["targets"] = np.arange(N) + 100 * seed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server serves; each test has files of its own in it."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture
def shards(folder: Path, tmp_path: Path) -> Path:
    made = folder / tmp_path.name
    made.mkdir()
    for seed, name in enumerate(("a.h5", "b.h5", "c.h5")):
        write(made / name, seed)
    return made


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What h5py opened, of a server."""
    from headrace.storage.hdf5.remote import RemoteHDF5

    paths, before = list[str](), RemoteHDF5.open
    monkeypatch.setattr(
        RemoteHDF5, "open", lambda self, path: (paths.append(path), before(self, path))[1]
    )
    return paths


@pytest.fixture
def far_of(server: RangeServer, shards: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(
        *arguments: Any,
        of: Any = HDF5Dataset,
        names: Any = ("a.h5", "b.h5", "c.h5"),
        **options: Any,
    ) -> Any:
        urls = [f"{server.url}/{shards.name}/{name}" for name in names]
        made.append(
            of(
                urls,
                **dict(zip(["dataset_name"], arguments, strict=False)),
                cache_dir=tmp_path / "cache",
                **options,
            )
        )
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


def kept(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache").glob("headrace-hdf5-layout-*"))


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("target", [None, "targets"])
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_kept_layouts_give_the_same(
    far_of: Any, shards: Path, tmp_path: Path, opened: list[str], name: Any, target: str | None
) -> None:
    near = HDF5Dataset([shards / one for one in ("a.h5", "b.h5", "c.h5")], name, target_name=target)
    for attempt in range(2):
        opened.clear()
        far = far_of(name, target_name=target)
        assert bool(opened) != bool(attempt) and len(kept(tmp_path)) == 1
        assert (
            far.fingerprint == near.fingerprint
            and np.array_equal(far.blocks(), near.blocks())
            and len(far) == 3 * N
        )
        assert [one.replace("ranges", "pread") for one in far.sample_source.how().values()] == list(
            near.sample_source.how().values()
        )
        indices = [0, 5, N + 5, 3 * N - 1, 17]
        assert same(far.__getitems__(indices), near.__getitems__(indices))
        assert target is None or np.array_equal(far.targets, near.targets)
    near.close()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("library", {}),
        ("texts", {}),
        ("raw", {"direct": False}),
        ("raw", {"axis": 1}),
        ("raw", {"target_name": "texts"}),
    ],
)
def test_what_is_not_read_directly_has_no_layout(
    far_of: Any, tmp_path: Path, opened: list[str], name: str, options: Any
) -> None:
    for _ in range(2):
        opened.clear()
        far_of(name, **options)[3]
        assert opened and not kept(tmp_path)


def test_another_question_has_another_layout(
    far_of: Any, tmp_path: Path, opened: list[str]
) -> None:
    far_of("raw")
    for arguments, options in (
        (("packed",), {}),
        (("raw",), {"target_name": "targets"}),
        (("raw",), {"names": ("a.h5", "b.h5")}),
        ((["raw"],), {}),
    ):
        opened.clear()
        far_of(*arguments, **options)
        assert opened
    assert len(kept(tmp_path)) == 5


def test_columns_are_still_to_be_had(far_of: Any) -> None:
    far_of("raw")
    source = far_of("raw").sample_source.sources[1]
    assert source.column("targets").tolist() == list(range(100, 100 + N)) and source.has_column(
        "big"
    )


def test_a_file_that_changed_since_is_opened_anew(
    far_of: Any, shards: Path, opened: list[str]
) -> None:
    far_of("raw", target_name="targets")
    write(shards / "c.h5", 7)
    opened.clear()
    far, near = (
        far_of("raw", target_name="targets"),
        HDF5Dataset(shards / "c.h5", "raw", target_name="targets"),
    )
    assert opened and same(far.__getitems__(range(2 * N, 3 * N)), near.__getitems__(range(N)))
    near.close()


def test_damaged_layouts_are_not_used(far_of: Any, tmp_path: Path, opened: list[str]) -> None:
    first = far_of("raw")[2 * N]
    (file,) = kept(tmp_path)
    whole = bytearray(file.read_bytes())
    whole[4096] ^= 1
    for content in (bytes(whole), bytes(whole[:-9]), b""):
        file.write_bytes(content)
        opened.clear()
        assert same(far_of("raw")[2 * N], first) and opened


def test_large_layouts_are_not_kept(
    far_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.storage.hdf5.layouts._MOST", 3 * 24 + 3 * 8 * N - 1)
    far_of("raw", target_name="targets")
    assert not kept(tmp_path)
    far_of("raw")
    assert len(kept(tmp_path)) == 1


def test_an_index_beside_is_asked_for_without_layouts(
    far_of: Any, server: RangeServer, shards: Path
) -> None:
    """A server of which the indices are kept, and layouts of other files."""
    far_of("raw")
    shutil.copy(shards / "a.h5", shards / "d.h5")
    server.counts()
    far_of("raw", names=("d.h5",))
    asked = {name for name, _, _ in server.counts()["ranges"]}
    assert f"{shards.name}/d.h5" in asked
    server.counts()
    far_of("raw", names=("d.h5",))
    assert server.counts()["requests"] == 1


def test_a_bad_file_among_others_leaves_nothing_running(
    far_of: Any, shards: Path, tmp_path: Path
) -> None:
    """The indices of those before it are kept; what was on its way of those behind it is not
    waited for.
    """
    (shards / "b.h5").write_bytes(b"no HDF5 file" * 100)
    with pytest.raises(FormatError, match=r"http://.*/b\.h5 is no HDF5 file"):
        far_of("raw")
    assert len(list((tmp_path / "cache").glob("headrace-hdf5-index-*"))) == 1 and not kept(tmp_path)
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("headrace-keep")
    ]


# -- files that change, or vanish, when they were opened by their layouts


@pytest.mark.falls_back
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["a.h5", "c.h5"])
def test_a_shard_replaced_while_it_streams(
    far_of: Any, shards: Path, make_loader: Any, name: str, workers: int
) -> None:
    far_of("raw", of=StreamingDataset)
    far = far_of("raw", of=StreamingDataset)
    write(shards / name, 9)
    loader = make_loader(far, batch_size=4, num_workers=workers, shuffle="block")
    with pytest.raises(FileChangedError, match=rf"http://.*/{name}, bytes .* has been replaced"):
        list(loader)


@pytest.mark.falls_back
@pytest.mark.parametrize("name", ["a.h5", "c.h5"])
def test_a_shard_that_vanished(far_of: Any, shards: Path, make_loader: Any, name: str) -> None:
    far_of("raw", of=StreamingDataset)
    far = far_of("raw", of=StreamingDataset)
    (shards / name).unlink()
    with pytest.raises(SampleError, match=rf"http://.*/{name}, bytes .*: there is no such file"):
        list(make_loader(far, batch_size=4, num_workers=0, shuffle="block"))
    with pytest.raises(DataNotFoundError, match=rf"http://.*/{name}: there is no such file"):
        far_of("raw", of=StreamingDataset)


def test_workers_give_the_order_of_local_files(far_of: Any, shards: Path, make_loader: Any) -> None:
    options = {"batch_size": 8, "shuffle": "block", "seed": 3, "num_workers": 2}
    near = StreamingDataset(
        [shards / one for one in ("a.h5", "b.h5", "c.h5")],
        dataset_name="packed",
        target_name="targets",
    )
    expected = [targets.tolist() for _, targets in make_loader(near, **options)]
    for _ in range(2):
        loader = make_loader(
            far_of("packed", of=StreamingDataset, target_name="targets"), **options
        )
        assert [targets.tolist() for _, targets in loader] == expected
    near.close()
