"""Packed tokens by URL are those of a local file; what goes wrong on the way is named."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import CharTokenizer, HDF5Dataset, StreamingDataset, TextDataset, open_dataset, pack
from headrace.errors import ConfigError, DataNotFoundError, FormatError
from headrace.testing.contract import same
from tests.servers.ranges import RangeServer

WAYS: dict[str, dict[str, Any]] = {
    "whole": {"max_length": None},
    "heads": {"max_length": 1},
    "windows": {"max_length": 16, "stride": 5},
    "blocks": {"max_length": 16, "packing": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokens.h5 of records with targets; classes.h5 of class folders; rows.h5: no texts."""
    made, texts = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("texts")
    draws, letters = random.Random(0), "abcdé \n"
    rows = [
        {"text": "".join(draws.choices(letters, k=draws.choice((0, 3, 20, 40)))), "n": n % 5}
        for n in range(90)
    ]
    (texts / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options: Any = {"tokenizer": CharTokenizer(letters), "cache_dir": texts / "cache"}
    with TextDataset(texts / "a.jsonl", target_field="n", **options) as dataset:
        pack(dataset, made / "tokens.h5", progress=False, workers=1)
    for number in range(12):
        path = texts / "classes" / ("prose", "verse")[number % 2] / f"{number}.txt"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("wheel \U0001f600"[: number % 9] * number)
    with TextDataset(texts / "classes", labels="folders", cache_dir=texts / "cache") as dataset:
        pack(dataset, made / "classes.h5", progress=False, workers=1)
    with h5py.File(made / "rows.h5", "w") as file:
        file["data"] = np.zeros((3, 2))
    return made


@pytest.fixture
def server(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> RangeServer:
    monkeypatch.setattr("headrace.formats.source.LONGEST", 300)
    monkeypatch.setattr("headrace.io.remote.client._WAIT", 0.002)
    return server


@pytest.fixture
def far_of(server: RangeServer, tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def make(name: str = "tokens.h5", of: Any = TextDataset, **options: Any) -> Any:
            reach = {"cache_dir": tmp_path / "cache", "deadline": 30, "progress": False}
            return stack.enter_context(of(f"{server.url}/{name}", **{**reach, **options}))

        yield make


def batches(make_loader: Any, dataset: Any, **options: Any) -> list[Any]:
    """Copies: a batch lies in a buffer that is used again."""
    how = {"num_workers": 0, "shuffle": "block", "interleave": 2, "turns": 2, **options}
    loader = make_loader(dataset, batch_size=4, **how)
    found = [pickle.loads(pickle.dumps(batch)) for batch in loader]
    loader.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"), [("classes.h5", "whole"), *(("tokens.h5", way) for way in WAYS)]
)
def test_the_same_samples(name: str, way: str, far_of: Any, folder: Path, make_loader: Any) -> None:
    near = TextDataset(folder / name, **WAYS[way])
    shuffles: dict[str, tuple[Any, ...]] = {"lazy": (False,), "cached": (True,)}
    for mode, some in {**shuffles, "streaming": (True, "block")}.items():
        far = far_of(name, loading_mode=mode, **WAYS[way])
        assert len(far) == len(near) > 5
        assert far.fingerprint == near.fingerprint
        assert np.array_equal(far.lengths(), near.lengths())
        assert np.array_equal(far.blocks(), near.blocks())
        assert len(far.blocks()) > 3 or name == "classes.h5"
        assert far.classes == near.classes
        assert isinstance(far.tokenizer, CharTokenizer)
        assert (far.targets is None) == (way == "blocks")
        assert np.array_equal(far.targets, near.targets)
        if mode != "streaming":
            assert same(far.__getitems__([5, 0, 5, -1]), near.__getitems__([5, 0, 5, -1]))
        for shuffle in some:
            found = batches(make_loader, far, shuffle=shuffle)
            assert same(found, batches(make_loader, near, shuffle=shuffle)), (mode, shuffle)


@pytest.mark.slow
def test_what_is_said_and_found(far_of: Any, folder: Path, server: RangeServer) -> None:
    far, near = far_of("classes.h5"), TextDataset(folder / "classes.h5")
    assert far.classes == ["prose", "verse"]
    for index in (0, 7):
        assert far.source_of(index) == near.source_of(index).replace(str(folder), server.url)
    assert f"of 12 documents, as int32, by ranges from {server.url}/classes.h5" in far.explain()
    with pytest.raises(ConfigError, match="tokens here, not texts"):
        far.text_of(0)
    near, far = TextDataset(folder / "tokens.h5"), far_of(of=open_dataset)
    assert isinstance(far, TextDataset)
    assert same(far[20], near[20])
    shards, expected = far_of(of=StreamingDataset), StreamingDataset(folder / "tokens.h5")
    assert same(list(shards), list(expected))
    assert isinstance(far_of("rows.h5", of=open_dataset), HDF5Dataset)
    with pytest.raises(FormatError, match=r"rows\.h5 .*HDF5Dataset"):
        far_of("rows.h5")
    with pytest.raises(DataNotFoundError, match=r"/none\.h5"):
        far_of("none.h5")


# -- what is asked for


def test_each_block_is_fetched_once(server: RangeServer, far_of: Any, make_loader: Any) -> None:
    """Windows too, of which each token is read several times."""
    for way, options in WAYS.items():
        far = far_of(loading_mode="streaming", **options)
        server.counts()
        found = batches(make_loader, far)
        ranges = server.counts()["ranges"]
        assert sum(len(batch["input_ids"]) for batch in found) == len(far)
        assert 3 < len(ranges) <= len(far.blocks()) + 2 * 2 - 1, way
        reach = max(2 * 16, 2 * (options["max_length"] or 40))  # of a block's last sample
        nbytes = sum(stop - start for _, start, stop in ranges)
        assert nbytes <= far.sample_source.count * 2 + len(ranges) * reach, way


# -- what goes wrong


def relabelled(path: Path, **said: Any) -> None:
    """Has a file say something else of itself."""
    with h5py.File(path, "a") as file:
        text = json.dumps({**json.loads(bytes(file.attrs["headrace"])), **said}).encode()
        file.attrs["headrace"], file.attrs["headrace_crc32"] = text, np.uint32(zlib.crc32(text))


def flip(path: Path, name: str) -> None:
    with h5py.File(path) as file:
        place = file[name].id.get_offset()
    data = bytearray(path.read_bytes())
    data[place + 8] ^= 1
    path.write_bytes(data)


def replace(path: Path, name: str, how: Any) -> None:
    """Has an array lie in chunks, or in another file."""
    with h5py.File(path, "a") as file:
        data = file[name][:]
        del file[name]
        if isinstance(how, Path):
            file[name] = h5py.ExternalLink(str(how), name)
        else:
            file.create_dataset(name, data=data, chunks=how)


def test_damage_is_an_error_with_the_url(far_of: Any, folder: Path) -> None:
    whole = folder / "tokens.h5"
    for damage, given, said in (
        (relabelled, {"version": 99}, "layout 99"),
        (relabelled, {"count": 3}, "3 samples"),
        (flip, {"name": "offsets"}, "'offsets' has a wrong checksum"),
        (flip, {"name": "targets"}, "'targets' has a wrong checksum"),
        (Path.write_bytes, {"data": whole.read_bytes()[:-1]}, "or is incomplete"),
        (replace, {"name": "data", "how": (7,)}, "'data'"),
        (replace, {"name": "data", "how": whole}, "'data' leads into .*tokens.h5"),
        (replace, {"name": "offsets", "how": whole}, "'offsets'"),
        (replace, {"name": "crc32", "how": whole}, "is damaged"),
    ):
        path = folder / "damaged.h5"
        shutil.copy(whole, path)
        damage(path, **given)  # type: ignore[operator]
        with pytest.raises(FormatError, match=rf"http://127.*/damaged\.h5.*{said}"):
            far_of(path.name)
        path.unlink()
