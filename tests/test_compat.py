"""Files that version 0.1.0 made: states, packed files, indices and caches (tests/data/make_compat.py), as later versions read them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from headrace import HDF5Dataset, verify
from headrace.order import EpochOrder
from tests.data import make_compat as made
from tests.servers.ranges import RangeServer

COMPAT = Path(__file__).parent / "data" / "compat"
EXPECTED = json.loads((COMPAT / "expected.json").read_text())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_data(tmp_path_factory.mktemp("compat"))


@pytest.fixture(scope="module")
def indexed_url() -> Iterator[str]:
    with RangeServer(COMPAT / "indexed") as server:
        yield server.url


# -- states


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("name", made.STATES)
def test_old_state_gives_rest_of_epoch(data: Path, name: str) -> None:
    states = [json.loads((COMPAT / "states" / f"{name}.json").read_text()), torch.load(COMPAT / "states" / f"{name}.pt", weights_only=True)]
    for state in states:
        loader = made.STATES[name][0](data)
        loader.load_state_dict(state)
        assert made.rest_of(loader) == EXPECTED["states"][name]
        loader.close()


def test_old_state_of_two_ranks_on_one(data: Path) -> None:
    state = json.loads((COMPAT / "states" / "first_of_two_ranks.json").read_text())
    loader = made.small_loader(made.rows(data), batch_size=6)
    loader.load_state_dict(state)
    of_both = [set(batch) for batch in made.rest_of(loader)]
    assert all(set(batch) <= both for batch, both in zip(EXPECTED["states"]["first_of_two_ranks"], of_both, strict=True))
    loader.close()


# -- packed files


@pytest.mark.parametrize("name", EXPECTED["packed"])
def test_old_packed_file_reads_the_same(name: str) -> None:
    with made.open_packed(COMPAT / "packed", name) as dataset:
        assert made.described(dataset) == EXPECTED["packed"][name]
    assert verify(COMPAT / "packed" / f"{name}.h5").bad == []


# -- indices: the files have lost all that says where samples lie


@pytest.mark.parametrize("name", made.INDEXED)
def test_old_index_is_used(indexed_url: str, tmp_path: Path, name: str) -> None:
    with made.open_indexed(indexed_url, name, cache_dir=tmp_path) as dataset:
        assert made.described_indexed(dataset) == EXPECTED["indexed"][name]


# -- caches: of local files they are made anew; a listing is used as long as its folders have not changed


@pytest.mark.parametrize("name", made.CACHED)
def test_old_cache_is_used(tmp_path: Path, name: str) -> None:
    data = made.make_cached(tmp_path / "data")
    made.gut_cached(data)
    _relocate(COMPAT / "cached", name, tmp_path / "cache", data)
    with made.open_cached(data, name, tmp_path / "cache") as dataset:
        assert made.described_indexed(dataset) == EXPECTED["cached"][name]


def test_changed_data_without_caches_differ(tmp_path: Path) -> None:
    """Else the tests of caches would show nothing."""
    data = made.make_cached(tmp_path / "data")
    made.gut_cached(data)
    for name in made.CACHED:
        try:
            with made.open_cached(data, name, tmp_path / "cache") as dataset:
                assert made.described_indexed(dataset) != EXPECTED["cached"][name]
        except OSError:
            pass  # a tar without headers


def _relocate(stored: Path, name: str, cache_dir: Path, root: Path) -> None:
    """A cache file as that version would have written it for files below `root`, for the user who runs this test."""
    said = json.loads((stored / f"{name}.json").read_text().replace("{root}", str(root)))
    whole = (stored / f"{name}.bin").read_bytes()
    about = {**said["about"], "user": os.geteuid()}
    meta = json.dumps(about).encode()
    magic, version, _ = whole.split(b"\n", 1)[0].split()
    rest = _with_times(whole.split(b"\n", 2)[2], root / name / "images")
    digest = hashlib.blake2b(meta + rest[8 * 8 :], digest_size=16).hexdigest()
    whole = b"%s %s %s\n%s\n" % (magic, version, digest.encode(), meta) + rest
    cache_dir.mkdir(mode=0o700)
    path = cache_dir / f"headrace-{said['kind']}-{hashlib.blake2b(meta, digest_size=16).hexdigest()}.bin"
    path.write_bytes(whole)
    path.chmod(0o600)


def _with_times(arrays: bytes, root: Path) -> bytes:
    """The arrays of a listing (names, folders, times, links, kinds) with the times that the folders have here."""
    sizes = np.frombuffer(arrays, "<i8", 8).tolist()
    starts = (64 + np.cumsum([0, *sizes])).tolist()
    names, offsets, times = (slice(starts[number], starts[number + 1]) for number in (2, 3, 4))
    edges = np.frombuffer(arrays[offsets], "<i8").tolist()
    folders = [root / os.fsdecode(arrays[names][begin:end]) for begin, end in itertools.pairwise(edges)]
    found = np.array([(path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in folders], "<i8")
    assert len(found.tobytes()) == sizes[4]
    return arrays[: times.start] + found.tobytes() + arrays[times.stop :]


# -- what they are


def test_compat_files_are_small() -> None:
    assert sum(path.stat().st_size for path in COMPAT.rglob("*") if path.is_file()) < 300_000


def test_compat_data_are_made_the_same(tmp_path: Path) -> None:
    first, second = made.make_data(tmp_path / "1"), made.make_data(tmp_path / "2")
    for path in first.rglob("*"):
        if path.is_file() and path.suffix != ".h5":  # HDF5 notes times
            assert path.read_bytes() == (second / path.relative_to(first)).read_bytes()
    shutil.rmtree(first)


def test_states_of_lanes_that_cut_chunks(tmp_path: Path) -> None:
    """An epoch over compressed chunks that began when lanes ended within them goes on in the order of that time."""
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("data", data=np.arange(200, dtype=np.int32).reshape(200, 1), chunks=(7, 1), compression="gzip")

    def loader() -> Any:
        dataset = HDF5Dataset(tmp_path / "rows.h5", "data")
        return made.small_loader(dataset, shuffle="block", interleave=2, turns=3)

    def rest(loader: Any) -> list[int]:
        return [number for batch in loader for number in made.numbers_of(batch)]

    with contextlib.closing(loader()) as now:
        batches = iter(now)
        for _ in range(5):
            next(batches)
        state = now.state_dict()
        layout, _, digest = state["blocks"].partition("-")
        assert layout == "3"
    blocks = [7] * 28 + [4]
    orders = [
        EpochOrder(200, shuffle="block", seed=11, blocks=blocks, global_batch=4, interleave=2, turns=3, aligned=aligned)[20:].tolist()
        for aligned in (True, False)
    ]
    assert orders[0] != orders[1]
    for number, expected in zip("32", orders, strict=True):
        with contextlib.closing(loader()) as later:
            later.load_state_dict({**state, "blocks": f"{number}-{digest}"})
            assert later.state_dict()["blocks"] == f"{number}-{digest}"
            assert rest(later) == expected
            whole = rest(later)  # the next epoch, in the same layout
            assert sorted(whole) == list(range(200))
