"""Samples of remote texts are those of a local copy, in every unit, mode and worker."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import CharTokenizer, HeadraceWarning, SampleError, TextDataset, open_dataset
from headrace.storage.text import source as texts
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.slow

WORDS = ["the", "mill", "wheel", "turns", "in", "the", "river", "grün", "\u0a0d\U0001f600"]
NAMES = {
    "file": ["a/1.txt", "a/2.md", "b/3.txt.gz", "b/4.txt"],
    "line": ["a/1.txt", "a/2.md", "b/3.txt.gz", "b/4.txt"],
    "record": ["a/5.jsonl", "b/6.json", "b/7.csv", "b/8.jsonl.gz"],
}
UNITS: dict[str, dict[str, Any]] = {
    "file": {"unit": "file"},
    "line": {"unit": "line"},
    "record": {"unit": "record", "target_field": "n"},
    "windows": {"unit": "file", "max_length": 40, "stride": 25},
    "blocks": {"unit": "line", "max_length": 40, "packing": True, "end_token": 0},
    "records in blocks": {"unit": "record", "max_length": 40, "packing": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draws = tmp_path_factory.mktemp("served"), random.Random(0)

    def text(lines: int) -> str:
        return "".join(
            " ".join(draws.choices(WORDS, k=draws.randrange(9))) + draws.choice(["\n", "\r\n"])
            for _ in range(lines)
        )

    rows = [{"text": " ".join(draws.choices(WORDS, k=5)), "n": n} for n in range(40)]
    contents = {
        "a/1.txt": text(30),
        "a/2.md": "\ufeff" + text(9),
        "b/3.txt.gz": text(20),
        "b/4.txt": text(41) + "finis",
        "a/5.jsonl": "\n\n".join(map(json.dumps, rows)),
        "b/6.json": json.dumps(rows[:7]),
        "b/7.csv": "n,text\n" + "".join(f'{n},"a ""{n}""\n{n}"\n' for n in range(15)),
        "b/8.jsonl.gz": "\n".join(map(json.dumps, rows)),
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        data = content.encode()
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return folder


@pytest.fixture
def server(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> RangeServer:
    monkeypatch.setattr(texts, "block_length", lambda _: 300)
    return server


@pytest.fixture
def opened(server: RangeServer, folder: Path, tmp_path: Path) -> Iterator[Any]:
    made: list[TextDataset] = []

    def make(what: str, is_far: bool, **options: Any) -> TextDataset:
        given = {
            **UNITS[what],
            "cache_dir": tmp_path / ("far" if is_far else "near"),
            "progress": False,
            **options,
        }
        names = NAMES[given["unit"]]
        made.append(
            TextDataset(
                [f"{server.url}/{name}" if is_far else folder / name for name in names], **given
            )
        )
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def samples(dataset: TextDataset) -> list[Any]:
    return [plain(sample) for sample in dataset.__getitems__(range(len(dataset)))]


def batches(dataset: TextDataset, make_loader: Any, **options: Any) -> list[Any]:
    loader = make_loader(
        dataset, **{"batch_size": 4, "num_workers": 0, "shuffle": "block", **options}
    )
    found = [plain(batch) for batch in loader]
    loader.close()
    return found


@pytest.mark.quick_every(6)
@pytest.mark.parametrize("what", UNITS)
def test_the_same_samples_and_order(what: str, opened: Any, make_loader: Any) -> None:
    near, far = opened(what, False), opened(what, True)
    assert (
        len(far) == len(near) > 3
        and far.fingerprint == near.fingerprint
        and samples(far) == samples(near)
    )
    assert (far.blocks() is None) == (near.blocks() is None) and np.array_equal(
        far.blocks(), near.blocks()
    )
    assert np.array_equal(far.lengths(), near.lengths())
    expected = batches(near, make_loader)
    for mode in ("lazy", "cached", "eager", "streaming"):
        found = batches(opened(what, True, loading_mode=mode), make_loader)
        assert found == expected, mode
    for shuffle in (True, False):
        streamed = batches(
            opened(what, True, loading_mode="streaming"), make_loader, shuffle=shuffle
        )
        assert streamed == batches(near, make_loader, shuffle=shuffle)


@pytest.mark.parametrize("mode", ["lazy", "streaming"])
@pytest.mark.parametrize("what", ["file", "record", "blocks"])
def test_with_workers(what: str, mode: str, opened: Any, make_loader: Any) -> None:
    expected = batches(opened(what, False), make_loader)
    assert batches(opened(what, True, loading_mode=mode), make_loader, num_workers=2) == expected


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("mode", ["lazy", "cached", "eager", "streaming"])
@pytest.mark.parametrize("what", UNITS)
def test_with_workers_of_each_kind(
    what: str, mode: str, method: str, opened: Any, make_loader: Any
) -> None:
    expected = batches(opened(what, False), make_loader)
    options: Any = {"num_workers": 2, "multiprocessing_context": method}
    assert batches(opened(what, True, loading_mode=mode), make_loader, **options) == expected


def test_warm_start_reads_each_block_once(
    server: RangeServer, opened: Any, make_loader: Any
) -> None:
    for what in ("line", "record"):
        opened(what, True)
        server.counts()
        again = opened(what, True, loading_mode="streaming")
        assert server.counts()["ranges"] == []
        blocks = again.blocks()
        found = batches(again, make_loader, num_workers=2, interleave=2, turns=2, batch_size=8)
        assert sum(len(batch["input_ids"]) for batch in found) == len(again)
        is_of_a_copy = 1  # at least: nothing of it is fetched
        assert len(server.counts()["ranges"]) <= len(blocks) + 2 * 2 - 1 - is_of_a_copy


@pytest.mark.parametrize("what", ["windows", "blocks"])
def test_tokens_are_made_once_of_each_version(what: str, server: RangeServer, opened: Any) -> None:
    found = samples(opened(what, True))
    server.counts()
    assert samples(opened(what, True)) == found
    assert server.counts()["ranges"] == []
    # can't be known again
    other = opened(what, True, tokenizer=lambda text: [ord(character) + 2 for character in text])
    assert [sample["input_ids"] for sample in samples(other)] == [
        sample["input_ids"] for sample in found
    ]


@pytest.mark.quick_every(1)
def test_a_bad_record_is_named(server: RangeServer, folder: Path, tmp_path: Path) -> None:
    (folder / "bad.jsonl").write_bytes(
        b'{"text": "a"}\n\n{"text": 5}\n{nothing}\n{"text": "\xff"}\n'
    )
    url = f"{server.url}/bad.jsonl"
    with TextDataset(url, unit="record", cache_dir=tmp_path) as dataset:
        for index, said in (
            (1, "line 3: its field 'text' is a int"),
            (2, "line 4: no JSON"),
            (3, "line 5: byte 0xff at offset 47 is no utf-8"),
        ):
            with pytest.raises(
                SampleError, match=f"sample {index} can't be decoded: {url}, {said}"
            ):
                dataset[index]
    with TextDataset(url, unit="record", cache_dir=tmp_path, on_error="skip") as dataset:
        assert len(dataset.__getitems__(range(4))) == 1
    with pytest.warns(HeadraceWarning, match="3 of 4 documents can't be read"):
        blocks = TextDataset(
            url, unit="record", cache_dir=tmp_path, on_error="skip", stride=4, max_length=4
        )
    assert len(blocks) == 1
    blocks.close()
    (folder / "bad.jsonl").unlink()


def test_a_text_that_is_too_large_for_the_budget(
    server: RangeServer, folder: Path, tmp_path: Path
) -> None:
    (folder / "large.txt").write_bytes(b"x" * (17 << 20))
    for unit in ("file", "line"):
        options: Any = {
            "unit": unit,
            "cache_dir": tmp_path,
            "max_memory_usage": "20MB",
            "max_length": None,
        }
        dataset = TextDataset(f"{server.url}/large.txt", **options)
        with pytest.raises(
            SampleError, match=r"a text of 17.8 MB .* is too large for the memory budget"
        ):
            dataset[0]
        dataset.close()
    (folder / "large.txt").unlink()


def test_folders_of_a_bucket(memory: Any, folder: Path, tmp_path: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"a", "b"}
    for path in folder.rglob("*.*"):
        memory.pipe(f"/texts/{path.relative_to(folder)}", path.read_bytes())
    for unit in ("file", "line"):
        options: Any = {
            "unit": unit,
            "labels": "folders",
            "cache_dir": tmp_path,
            "errors": "replace",
        }
        near, far = TextDataset(folder, **options), TextDataset("memory://texts", **options)
        assert (
            samples(far) == samples(near)
            and far.classes == ["a", "b"]
            and far.fingerprint == near.fingerprint
        )
        assert far.source_of(0) == "memory://texts/a/1.txt" + (", line 1" if unit == "line" else "")
        near.close()
        far.close()


def test_packed_like_local_ones(opened: Any, tmp_path: Path) -> None:
    from headrace import pack

    for is_far in (False, True):
        pack(opened("line", is_far), tmp_path / f"{is_far}.h5", progress=False, workers=1)
    assert (tmp_path / "True.h5").read_bytes() == (tmp_path / "False.h5").read_bytes()


def test_found_by_its_name_and_shown_without_secrets(server: RangeServer, tmp_path: Path) -> None:
    dataset = open_dataset(
        f"{server.url}/a/5.jsonl?key=secret",
        unit="record",
        cache_dir=tmp_path,
        storage_options={"headers": {"x": "secret"}},
    )
    assert isinstance(dataset, TextDataset) and CharTokenizer().decode(
        dataset[0]["input_ids"].tolist()
    ) == dataset.text_of(0)
    assert "secret" not in f"{dataset!r} {dataset.explain()} {dataset.source_of(0)}"
    dataset.close()
