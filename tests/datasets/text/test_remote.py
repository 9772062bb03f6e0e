"""Samples of remote texts are those of a local copy, in every unit and mode."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import HeadraceWarning, SampleError, TextDataset, pack
from headrace.storage.text import source as texts
from headrace.testing.contract import same
from tests.servers.ranges import RangeServer

WORDS = ["the", "mill", "wheel", "turns", "in", "the", "river", "grün", "\u0a0d\U0001f600"]
UNITS: dict[str, dict[str, Any]] = {
    "file": {"unit": "file"},
    "line": {"unit": "line"},
    "record": {"unit": "record", "target_field": "n"},
    "windows": {"unit": "file", "max_length": 40, "stride": 25},
    "blocks": {"unit": "line", "max_length": 40, "packing": True, "end_token": 0},
    "records in blocks": {"unit": "record", "max_length": 40, "packing": True},
}


def contents() -> dict[str, str]:
    draws = random.Random(0)

    def text(lines: int) -> str:
        made = [" ".join(draws.choices(WORDS, k=draws.randrange(9))) for _ in range(lines)]
        return "".join(line + draws.choice(["\n", "\r\n"]) for line in made)

    rows = [{"text": " ".join(draws.choices(WORDS, k=5)), "n": n} for n in range(40)]
    return {
        "a/1.txt": text(30),
        "a/2.md": "\ufeff" + text(9),
        "b/3.txt.gz": text(20),
        "b/4.txt": text(41) + "finis",
        "a/5.jsonl": "\n\n".join(map(json.dumps, rows)),
        "b/6.json": json.dumps(rows[:7]),
        "b/7.csv": "n,text\n" + "".join(f'{n},"a ""{n}""\n{n}"\n' for n in range(15)),
        "b/8.jsonl.gz": "\n".join(map(json.dumps, rows)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    for name, content in contents().items():
        (folder / name).parent.mkdir(exist_ok=True)
        data = content.encode()
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return folder


@pytest.fixture
def opened(
    server: RangeServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    monkeypatch.setattr(texts, "block_length", lambda _: 300)
    made: list[TextDataset] = []

    def make(what: str, is_far: bool, **options: Any) -> TextDataset:
        place, cache = (server.url, "far") if is_far else (folder, "near")
        is_of_records = UNITS[what]["unit"] == "record"
        names = sorted(contents(), key=lambda name: name[2:])
        paths = [f"{place}/{name}" for name in (names[4:] if is_of_records else names[:4])]
        options = {"cache_dir": tmp_path / cache, "progress": False, **options}
        made.append(TextDataset(paths, **UNITS[what], **options))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


def samples(dataset: TextDataset) -> list[Any]:
    return list(dataset.__getitems__(range(len(dataset))))


def batches(dataset: TextDataset, make_loader: Any, shuffle: Any, **options: Any) -> list[Any]:
    loader = make_loader(
        dataset, batch_size=4, shuffle=shuffle, collate_fn="list", **{"num_workers": 0, **options}
    )
    found = list(loader)
    loader.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("what", UNITS)
def test_the_same_samples_and_order(
    what: str, opened: Any, make_loader: Any, server: RangeServer
) -> None:
    near, far = opened(what, False), opened(what, True)
    assert len(far) == len(near) > 3
    assert far.fingerprint == near.fingerprint
    assert same(samples(far), samples(near))
    for name in ("blocks", "lengths"):
        one, other = getattr(far, name)(), getattr(near, name)()
        assert (one is None) == (other is None), name
        assert np.array_equal(one, other), name
    server.counts()
    for mode, shuffle in (("cached", "block"), ("streaming", "block"), ("streaming", True)):
        expected = batches(near, make_loader, shuffle)
        again = opened(what, True, loading_mode=mode)
        if what != "file":  # whose tables and tokens are kept
            assert server.counts()["ranges"] == []
        assert same(batches(again, make_loader, shuffle), expected), (mode, shuffle)
        server.counts()


def test_warm_start_reads_each_block_once(
    server: RangeServer, opened: Any, make_loader: Any
) -> None:
    for what in ("line", "record"):
        opened(what, True)
        server.counts()
        again = opened(what, True, loading_mode="streaming")
        assert server.counts()["ranges"] == []
        lanes: Any = {"interleave": 2, "turns": 2, "num_workers": 2}
        found = batches(again, make_loader, "block", **lanes)
        assert sum(map(len, found)) == len(again)
        is_of_a_copy = 1  # at least: nothing of it is fetched
        most = len(again.blocks()) + 2 * 2 - 1 - is_of_a_copy
        assert len(server.counts()["ranges"]) <= most


def test_a_bad_record_is_named(server: RangeServer, folder: Path, tmp_path: Path) -> None:
    content = b'{"text": "a"}\n\n{"text": 5}\n{nothing}\n{"text": "\xff"}\n'
    (folder / "bad.jsonl").write_bytes(content)
    url, options = f"{server.url}/bad.jsonl", {"unit": "record", "cache_dir": tmp_path}
    with TextDataset(url, **options) as dataset:
        for index, said in ((1, "line 3"), (2, "line 4"), (3, "line 5: byte 0xff at offset 47")):
            with pytest.raises(SampleError, match=f"sample {index} .*{url}, {said}"):
                dataset[index]
    with TextDataset(url, on_error="skip", **options) as dataset:
        assert len(dataset.__getitems__(range(4))) == 1
    with pytest.warns(HeadraceWarning, match="3 of 4 documents"):
        windows = TextDataset(url, on_error="skip", stride=4, max_length=4, **options)
    assert len(windows) == 1
    windows.close()
    (folder / "bad.jsonl").unlink()


def test_folders_of_a_bucket(memory: Any, folder: Path, tmp_path: Path) -> None:
    for path in folder.rglob("*.*"):
        memory.pipe(f"/texts/{path.relative_to(folder)}", path.read_bytes())
    for unit, where in (("file", ""), ("line", ", line 1")):
        options: Any = {"labels": "folders", "cache_dir": tmp_path, "errors": "replace"}
        with (
            TextDataset(folder, unit=unit, **options) as near,
            TextDataset("memory://texts", unit=unit, **options) as far,
        ):
            assert same(samples(far), samples(near))
            assert far.classes == ["a", "b"]
            assert far.fingerprint == near.fingerprint
            assert far.source_of(0) == f"memory://texts/a/1.txt{where}"


def test_packed_like_local_ones(opened: Any, tmp_path: Path) -> None:
    for is_far in (False, True):
        pack(opened("line", is_far), tmp_path / f"{is_far}.h5", progress=False, workers=1)
    assert (tmp_path / "True.h5").read_bytes() == (tmp_path / "False.h5").read_bytes()
