"""Are the tokens of a packed file that is far away those of a copy on this machine: as documents,
windows and blocks, in every mode and worker? What is asked for, and what becomes of what goes
wrong?
"""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import CharTokenizer, HDF5Dataset, StreamingDataset, TextDataset, open_dataset, pack
from headrace.errors import ConfigError, DataNotFoundError, FormatError
from headrace.storage.tokens.source import BlocksSource
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.slow

MODES = ("lazy", "cached", "eager", "streaming")
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"max_length": None},
    "documents": {"max_length": 9},
    "heads": {"max_length": 1},
    "windows": {"max_length": 16, "stride": 5},
    "blocks": {"max_length": 16, "packing": True},
    "rows": {"max_length": 16, "packing": "bfd"},
}
LANES = {"interleave": 2, "turns": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokens.h5: uint16, of records with a target, some of them empty; classes.h5: int32, of
    files in class folders.
    """
    made, cache, draws = (
        tmp_path_factory.mktemp("served"),
        tmp_path_factory.mktemp("cache"),
        random.Random(0),
    )
    texts = tmp_path_factory.mktemp("texts")
    rows = [
        {"text": "".join(draws.choices("abcdé \n", k=draws.choice((0, 3, 20, 40)))), "n": n % 5}
        for n in range(90)
    ]
    (texts / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with TextDataset(
        texts / "a.jsonl",
        tokenizer=CharTokenizer("abcdé \n"),
        unit="record",
        target_field="n",
        cache_dir=cache,
    ) as dataset:
        pack(dataset, made / "tokens.h5", progress=False, workers=1)
    for number in range(12):
        path = texts / "classes" / ("prose", "verse")[number % 2] / f"{number}.txt"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("wheel \U0001f600"[: number % 9] * number)
    with TextDataset(texts / "classes", labels="folders", cache_dir=cache) as dataset:
        pack(dataset, made / "classes.h5", progress=False, workers=1)
    with h5py.File(made / "rows.h5", "w") as file:
        file["data"] = np.zeros((3, 2))
    return made


@pytest.fixture
def server(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> RangeServer:
    monkeypatch.setattr("headrace.storage.blocks.LONGEST", 300)
    monkeypatch.setattr("headrace.storage.tokens.best_fit._ROWS", 10)
    monkeypatch.setattr("headrace.storage.tokens.best_fit._LEAST", 1)
    monkeypatch.setattr("headrace.io.remote.client._WAIT", 0.002)
    return server


@pytest.fixture
def far_of(server: RangeServer, tmp_path: Path) -> Iterator[Any]:
    made: list[Any] = []

    def make(name: str = "tokens.h5", of: Any = TextDataset, **options: Any) -> Any:
        made.append(
            of(
                f"{server.url}/{name}",
                **{"cache_dir": tmp_path / "cache", "deadline": 30, "progress": False, **options},
            )
        )
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


def batches(make_loader: Any, dataset: Any, **options: Any) -> list[Any]:
    """Copies: a batch lies in a buffer that is used again."""
    loader = make_loader(
        dataset, **{"batch_size": 4, "num_workers": 0, "shuffle": "block", **LANES, **options}
    )
    found = [pickle.loads(pickle.dumps(batch)) for batch in loader]
    loader.close()
    return found


# -- one value, one order


@pytest.mark.parametrize("name", ["tokens.h5", pytest.param("classes.h5", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_the_same_samples_and_order(
    name: str, way: str, far_of: Any, folder: Path, make_loader: Any
) -> None:
    near = TextDataset(folder / name, **WAYS[way])
    for mode in MODES:
        far = far_of(name, loading_mode=mode, **WAYS[way])
        assert (
            len(far) == len(near) > (5 if way == "rows" else 9)
            and far.fingerprint == near.fingerprint
            and np.array_equal(far.lengths(), near.lengths())
        )
        assert np.array_equal(far.blocks(), near.blocks()) and (
            len(far.blocks()) > 3 or name == "classes.h5"
        )
        assert far.classes == near.classes and isinstance(far.tokenizer, CharTokenizer)
        assert (far.targets is None) == (near.targets is None) == (
            way in ("blocks", "rows")
        ) and np.array_equal(far.targets, near.targets)
        if mode != "streaming":
            assert all(same(far[i], near[i]) for i in range(len(near)))
            assert same(far.__getitems__([5, 0, 5, -1]), near.__getitems__([5, 0, 5, -1]))
        for shuffle in (False, True, "block"):
            assert same(
                batches(make_loader, far, shuffle=shuffle),
                batches(make_loader, near, shuffle=shuffle),
            ), (mode, shuffle)


@pytest.mark.quick_every(9)
@pytest.mark.parametrize(("mode", "workers"), [("lazy", 1), ("streaming", 2), ("cached", 2)])
@pytest.mark.parametrize("way", ["documents", "windows", "blocks"])
def test_with_workers(
    way: str, mode: str, workers: int, far_of: Any, folder: Path, make_loader: Any
) -> None:
    expected = batches(make_loader, TextDataset(folder / "tokens.h5", **WAYS[way]))
    options: Any = {"num_workers": workers, "multiprocessing_context": "fork"}
    assert same(batches(make_loader, far_of(loading_mode=mode, **WAYS[way]), **options), expected)


_SPAWNED = [(way, mode) for way in WAYS for mode in MODES]


@pytest.mark.parametrize(
    ("way", "mode"),
    [
        pytest.param(*case, marks=() if case == ("blocks", "streaming") else pytest.mark.slow)
        for case in _SPAWNED
    ],
)
def test_spawned_workers_go_on_with_what_is_known(
    way: str, mode: str, server: RangeServer, far_of: Any, folder: Path, make_loader: Any
) -> None:
    expected = batches(make_loader, TextDataset(folder / "tokens.h5", **WAYS[way]))
    far = far_of(loading_mode=mode, **WAYS[way])
    server.counts()
    assert same(batches(make_loader, far, num_workers=1, multiprocessing_context="spawn"), expected)
    counts = server.counts()
    assert counts["requests"] == len(counts["ranges"])  # nobody asks for versions again


def test_a_view_and_a_copy(far_of: Any, folder: Path, make_loader: Any) -> None:
    far, near = (
        dataset.subset([40, 7, 7, 3, *range(50, 80)])
        for dataset in (far_of(), TextDataset(folder / "tokens.h5"))
    )
    assert far.fingerprint == near.fingerprint and same(
        batches(make_loader, far), batches(make_loader, near)
    )
    copy = pickle.loads(pickle.dumps(far))
    far.close()
    for dataset in (far, copy):
        assert same(dataset[3], near[3])
        dataset.close()


@pytest.mark.parametrize("way", ["documents", "blocks"])
def test_a_state_of_the_local_file_goes_on_by_url(
    way: str, far_of: Any, folder: Path, make_loader: Any
) -> None:
    def loader_of(dataset: TextDataset) -> Any:
        return make_loader(dataset, batch_size=4, num_workers=0, shuffle="block", seed=3)

    loader = loader_of(TextDataset(folder / "tokens.h5", loading_mode="streaming", **WAYS[way]))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state, rest = loader.state_dict(), [pickle.loads(pickle.dumps(batch)) for batch in iterator]
    resumed = loader_of(far_of(loading_mode="streaming", **WAYS[way]))
    resumed.load_state_dict(state)
    assert rest and same(list(map(pickle.loads, map(pickle.dumps, resumed))), rest)


def test_names_and_words(far_of: Any, folder: Path, server: RangeServer) -> None:
    far, near = far_of("classes.h5"), TextDataset(folder / "classes.h5")
    assert far.classes == ["prose", "verse"]
    for index in (0, 7):
        assert far.source_of(index) == near.source_of(index).replace(str(folder), server.url)
    assert re.search(
        r"tokens: [\d,]+ of 12 documents, as int32, by ranges from http://127.*classes\.h5, made "
        r"with CharTok",
        far.explain(),
    )
    with pytest.raises(ConfigError, match="holds tokens and no texts"):
        far.text_of(0)


def test_found_by_what_is_in_it(far_of: Any, folder: Path) -> None:
    near = TextDataset(folder / "tokens.h5")
    far = far_of(of=open_dataset)
    assert isinstance(far, TextDataset) and same(far[20], near[20])
    shards = far_of(of=StreamingDataset)
    expected = StreamingDataset(folder / "tokens.h5")
    assert len(shards) == len(expected) and same(list(shards), list(expected))


def test_other_file_systems(folder: Path, memory: Any, tmp_path: Path) -> None:
    near = TextDataset(folder / "tokens.h5")
    memory.pipe("/run/tokens.h5", (folder / "tokens.h5").read_bytes())
    memory.pipe("/run/other.he5", (folder / "tokens.h5").read_bytes())
    for url in (
        "memory://run/tokens.h5",
        "memory://run/*.h5",
        ["memory://run/tokens.h5"],
        (folder / "tokens.h5").as_uri(),
    ):
        with TextDataset(url, cache_dir=tmp_path) as far:
            assert (
                len(far) == len(near)
                and far.fingerprint == near.fingerprint
                and same(far[20], near[20])
            )
    with TextDataset(
        ["memory://run/tokens.h5", "memory://run/other.he5"], cache_dir=tmp_path
    ) as both:
        assert len(both) == 2 * len(near) and same(both[len(near) + 20], near[20])


@pytest.mark.parametrize("name", ["tokens.h5", "classes.h5"])
def test_packed_again_from_afar(name: str, far_of: Any, folder: Path, tmp_path: Path) -> None:
    near = TextDataset(folder / name)
    for number, chosen in enumerate((slice(None), slice(2, 9))):
        for where, dataset in (("near", near), ("far", far_of(name))):
            pack(
                dataset[chosen] if number else dataset,
                tmp_path / f"{where}.h5",
                progress=False,
                workers=1,
                overwrite=True,
            )
        assert (tmp_path / "far.h5").read_bytes() == (tmp_path / "near.h5").read_bytes()


# -- what is asked for


def test_a_later_start_asks_for_versions_alone(server: RangeServer, far_of: Any) -> None:
    for attempt in range(2):
        server.counts()
        far_of(**WAYS["windows"])
        counts = server.counts()
        assert bool(counts["ranges"]) != bool(attempt)
    assert counts["requests"] == 1  # of the file


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_a_streaming_epoch_asks_for_each_block_once(
    way: str, workers: int, server: RangeServer, far_of: Any, make_loader: Any
) -> None:
    """Windows too, of which each token is read several times."""
    far = far_of(loading_mode="streaming", **WAYS[way])
    server.counts()
    found = batches(make_loader, far, num_workers=workers)
    ranges, blocks = server.counts()["ranges"], far.blocks()
    assert sum(len(batch["input_ids"]) for batch in found) == len(far)
    assert 3 < len(ranges) <= len(blocks) + LANES["interleave"] * LANES["turns"] - 1
    reach = 2 * 16 if WAYS[way].get("max_length") else 2 * 40  # of a block's last sample
    assert (
        sum(stop - start for _, start, stop in ranges)
        <= far.sample_source.count * 2 + len(ranges) * reach
    )


def test_a_batch_is_asked_for_at_once(server: RangeServer, far_of: Any) -> None:
    far = far_of(**WAYS["blocks"])
    assert isinstance(far.sample_source, BlocksSource)
    server.counts()
    far.__getitems__([3, 9, 4, 20])
    assert len(server.counts()["ranges"]) == 1  # they lie near one another


# -- what goes wrong


def test_no_such_file_and_other_files(far_of: Any, server: RangeServer) -> None:
    with pytest.raises(DataNotFoundError, match=r"/none\.h5"):
        far_of("none.h5")
    with pytest.raises(
        FormatError, match=r"rows\.h5 holds no texts that headrace packed: open it with HDF5Dataset"
    ):
        far_of("rows.h5")
    assert isinstance(far_of("rows.h5", of=open_dataset), HDF5Dataset)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unit", "line"),
        ("tokenizer", CharTokenizer()),
        ("labels", "folders"),
        ("errors", "replace"),
    ],
)
def test_what_packing_has_decided_is_refused(name: str, value: Any, far_of: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"{name}=.*tokens\.h5 holds tokens, so packing has decided this: leave it out",
    ):
        far_of(**{name: value})


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


DAMAGE: dict[str, tuple[Any, str]] = {
    "later": (
        lambda path: relabelled(path, version=99),
        r"was packed by a later headrace \(layout 99",
    ),
    "offsets": (
        lambda path: flip(path, "offsets"),
        r"'offsets' has a wrong checksum, the file is damaged",
    ),
    "targets": (
        lambda path: flip(path, "targets"),
        r"'targets' has a wrong checksum, the file is damaged",
    ),
    "fewer": (
        lambda path: relabelled(path, count=3),
        r"is damaged: offsets, targets, crc32 don't fit the 3 documents it should hold",
    ),
    "short": (
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        r"no HDF5 file, or not a whole one",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_an_error_with_the_url(what: str, far_of: Any, folder: Path) -> None:
    damage, said = DAMAGE[what]
    path = folder / f"{what}.h5"
    shutil.copy(folder / "tokens.h5", path)
    damage(path)
    with pytest.raises(FormatError, match=rf"http://127.*/{what}\.h5.* {said}"):
        far_of(path.name)
    path.unlink()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("data", "chunks", r"'data' is no flat array of integers in one piece"),
        (
            "data",
            "link",
            r"the link 'data' on the way to 'data' leads into .*tokens\.h5.*: far away other "
            r"files are not followed",
        ),
        ("offsets", "link", r"the link 'offsets' on the way"),
        ("crc32", "link", r"the link 'crc32' on the way"),
    ],
)
def test_what_lies_otherwise(name: str, value: str, said: str, far_of: Any, folder: Path) -> None:
    path = folder / "otherwise.h5"
    shutil.copy(folder / "tokens.h5", path)
    with h5py.File(path, "a") as file:
        data = file[name][:]
        del file[name]
        if value == "link":
            file[name] = h5py.ExternalLink(str(folder / "tokens.h5"), name)
        else:
            file.create_dataset(name, data=data, chunks=(7,))
    with pytest.raises(FormatError, match=said):
        far_of(path.name)
    path.unlink()


def test_wrong_bytes_on_the_way_to_opening_are_fetched_again(
    server: RangeServer, far_of: Any, folder: Path
) -> None:
    for seed in range(5):
        server.set(faults={"wrong": 1}, most=1, seed=seed)
        far = far_of(cache_dir=folder.parent / f"cache-{seed}")
        near = TextDataset(folder / "tokens.h5")
        assert all(same(far[i], near[i]) for i in (3, 40))
        assert np.array_equal(far.targets, near.targets)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["windows", "blocks"])
class TestContract(DatasetContract):
    """headrace's laws, of windows and blocks that are read by ranges."""

    @pytest.fixture(autouse=True)
    def _data(self, server: RangeServer, tmp_path: Path, way: str) -> None:
        self.url, self.cache, self.way = server.url + "/tokens.h5", tmp_path / "cache", way

    def make(self, **options: Any) -> TextDataset:
        return TextDataset(self.url, **WAYS[self.way], **{"cache_dir": self.cache, **options})
