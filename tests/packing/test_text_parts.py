"""Texts in several parts: the tokens, samples and batches of one file, whoever packs them, and
from wherever they are read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import (
    CharTokenizer,
    ConfigError,
    HDF5Dataset,
    StreamingDataset,
    TextDataset,
    create_dataloader,
    open_dataset,
    pack,
    verify,
)
from headrace.errors import (
    DataNotFoundError,
    FileChangedError,
    FormatError,
    HeadraceWarning,
    SampleError,
    TargetExistsError,
)
from headrace.packing import join, pack_status
from headrace.storage.tokens.joined import JoinedTokens
from headrace.storage.tokens.packed import PackedTokens
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.packing.shared import contents, kill_four_times
from tests.servers.ranges import RangeServer

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.quick_every(3)]

MODES = ("lazy", "eager", "cached", "streaming")
WAYS: dict[str, dict[str, Any]] = {
    "documents": {"max_length": 9},
    "windows": {"max_length": 8, "stride": 5},
    "blocks": {"max_length": 8, "packing": True},
}
SHARD = 60


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Texts in two class folders, some empty, some not ASCII."""
    draw = np.random.default_rng(0)
    for number, size in enumerate((40, 0, 7, 8, 23, 1, 16, 0, 30, 12, 5, 60, 3)):
        folder = tmp_path / "texts" / ("prose", "verse")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        letters = "".join(draw.choice(list("abcdé \n"), size))
        (folder / f"{number}.txt").write_bytes(letters.encode())
    return tmp_path / "texts"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    rows = [
        {"text": f"the {'mill ' * (number % 7)}wheel", "score": number / 2} for number in range(60)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def opened(texts: Path, **options: Any) -> TextDataset:
    return TextDataset(
        texts, **{"labels": "folders", "cache_dir": texts.parent / "kept", **options}
    )


class Words:
    """A tokenizer of words; known again only with a fingerprint."""

    def __init__(self, first: int = 10) -> None:
        self.first = first

    def __call__(self, text: str) -> list[int]:
        return [self.first + len(word) for word in text.split()]


@pytest.mark.quick_every(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_batches_are_those_of_one_file(texts: Path, tmp_path: Path, way: str, mode: str) -> None:
    one, parts = (
        pack(opened(texts), tmp_path / "one.h5"),
        pack(opened(texts), tmp_path / "parts", shard_size=SHARD),
    )
    assert pack_status(parts).parts > 3
    with (
        TextDataset(one, loading_mode=mode, **WAYS[way]) as single,
        TextDataset(parts, loading_mode=mode, **WAYS[way]) as joined,
    ):
        assert joined.fingerprint == single.fingerprint and joined.classes == single.classes == [
            "prose",
            "verse",
        ]
        if mode != "streaming":
            assert len(joined) == len(single) and all(
                same(joined[i], single[i]) for i in range(len(single))
            )
        ours, theirs = (
            list(
                create_dataloader(
                    d, batch_size=3, num_workers=0, shuffle="block" if mode == "streaming" else True
                )
            )
            for d in (joined, single)
        )
        assert len(ours) == len(theirs) > 3 and all(
            same(a, b) for a, b in zip(ours, theirs, strict=True)
        )


def test_opens_in_every_way(texts: Path, tmp_path: Path) -> None:
    parts = pack(opened(texts), tmp_path / "parts", shard_size=SHARD)
    files = sorted(map(str, parts.glob("*.h5")))
    with opened(texts) as source:
        for path in (parts, parts / "manifest.json", str(parts / "*.h5"), files, f"{parts}/"):
            with TextDataset(path) as packed, open_dataset(path) as found:
                assert isinstance(found, TextDataset) and len(found) == len(packed) == len(source)
                assert packed.fingerprint == source.fingerprint and np.array_equal(
                    packed.targets, source.targets
                )
                assert all(same(packed[i], source[i]) for i in range(len(source)))
        with TextDataset(files[1:]) as rest:
            assert rest.fingerprint != source.fingerprint and len(rest) < len(source)
        with TextDataset(parts) as packed:
            name = Path(source.source_of(12)).name
            assert (
                files[-1] in packed.source_of(12)
                and name in packed.source_of(12)
                and "more" in packed.explain()
            )
        assert len(list(StreamingDataset(parts))) == len(source)
        with HDF5Dataset(parts, target_name="targets") as rows:
            assert len(rows) == len(source) and rows.fingerprint == source.fingerprint


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("way", WAYS)
def test_opens_from_a_server(
    texts: Path, tmp_path: Path, way: str, make_loader: Callable[..., Any]
) -> None:
    parts = pack(opened(texts), tmp_path / "parts", shard_size=SHARD)
    with RangeServer(parts) as server, TextDataset(parts, **WAYS[way]) as local:
        url = f"{server.url}/manifest.json"
        with TextDataset(url, cache_dir=tmp_path / "cache", **WAYS[way]) as remote:
            assert remote.fingerprint == local.fingerprint and all(
                same(remote[i], local[i]) for i in range(len(local))
            )
        with TextDataset(
            url, cache_dir=tmp_path / "other", loading_mode="streaming", **WAYS[way]
        ) as remote:
            ours = list(make_loader(remote, batch_size=3, num_workers=0))
            theirs = list(make_loader(local, batch_size=3, num_workers=0, shuffle="block"))
            assert len(ours) > 3 and all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def test_workers_read_the_same(
    texts: Path, tmp_path: Path, make_loader: Callable[..., Any]
) -> None:
    parts = pack(opened(texts), tmp_path / "parts", shard_size=SHARD)
    with TextDataset(parts, **WAYS["blocks"]) as packed:
        found = []
        for options in (
            {"num_workers": 0},
            {"num_workers": 2, "multiprocessing_context": "forkserver"},
        ):
            found.append(list(make_loader(packed, batch_size=3, **options)))
        assert len(found[0]) > 3 and all(same(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("unit", ["line", "record"])
def test_lines_and_records(records: Path, tmp_path: Path, unit: str) -> None:
    options: dict[str, Any] = {
        "unit": unit,
        "target_field": "score" if unit == "record" else None,
        "cache_dir": tmp_path / "kept",
    }
    with TextDataset(records, **options) as source:
        parts = pack(source, tmp_path / "parts", shard_size=300)
        assert pack_status(parts).parts > 3
        with TextDataset(parts) as packed:
            assert len(packed) == 60 and packed.fingerprint == source.fingerprint
            assert all(same(packed[i], source[i]) for i in range(60))
        chosen = source.subset([4, 50, 50, 2, *range(10, 40)])
        with TextDataset(pack(chosen, tmp_path / "view", shard_size=200)) as packed:
            assert (
                len(packed) == 34
                and packed.fingerprint == chosen.fingerprint
                and all(same(packed[i], chosen[i]) for i in range(34))
            )


@pytest.mark.parametrize("how", ["shares", "processes"])
def test_same_bytes_whoever_packs(records: Path, tmp_path: Path, how: str) -> None:
    source = TextDataset(records, cache_dir=tmp_path / "kept")
    whole, out = pack(source, tmp_path / "whole", shard_size=300), tmp_path / "out"
    if how == "shares":
        for number in (2, 0, 1):
            pack(
                TextDataset(records, cache_dir=tmp_path / str(number)),
                out,
                shard_size=300,
                part=f"{number}/3",
            )
            assert pack_status(out).joined == (number == 1)
    else:
        pack(source, out, shard_size=300, processes=2)
    assert contents(out) == contents(whole) and verify(out).ok


@pytest.mark.parametrize("unit", ["file", "line", "record"])
@pytest.mark.slow
def test_texts_of_a_server(texts: Path, records: Path, tmp_path: Path, unit: str) -> None:
    """Packed from URLs, and into a store."""
    (tmp_path / "lines.txt").write_text(records.read_text())
    path = {"line": tmp_path / "lines.txt", "record": records}.get(unit)
    paths = sorted(texts.rglob("*.txt")) if path is None else [path]
    with (
        RangeServer(tmp_path) as server,
        TextDataset(paths, unit=unit, cache_dir=tmp_path / "kept") as local,
    ):
        urls = [f"{server.url}/{one.relative_to(tmp_path)}" for one in paths]
        with TextDataset(urls, unit=unit, cache_dir=tmp_path / "cache") as remote:
            shard_size = SHARD if unit == "file" else 300
            out = pack(remote, "memory://text-parts/packed", shard_size=shard_size)
            parts = pack(local, tmp_path / "parts", shard_size=shard_size)
    memory = fsspec.filesystem("memory")
    try:
        stored = {
            name.rpartition("/")[2]: memory.cat_file(name)
            for name in memory.find("/text-parts/packed")
        }
        assert {
            name: hashlib.sha256(data).hexdigest() for name, data in stored.items()
        } == contents(parts)
        assert verify(out).ok and pack_status(out).parts > 3
        with (
            TextDataset(
                f"{out}/manifest.json", cache_dir=tmp_path / "other", **WAYS["blocks"]
            ) as far,
            TextDataset(parts, **WAYS["blocks"]) as near,
        ):
            assert all(same(far[i], near[i]) for i in range(len(near)))
    finally:
        memory.rm("/text-parts", recursive=True)


def test_a_tokenizer_of_rust(records: Path, tmp_path: Path) -> None:
    """In threads and in processes."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "the": 1, "mill": 2, "wheel": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    source = TextDataset(records, tokenizer=tokenizer, cache_dir=tmp_path / "kept")
    whole = pack(source, tmp_path / "whole", shard_size=60)
    with ThreadPoolExecutor(3) as executor:
        assert contents(
            pack(source, tmp_path / "threads", shard_size=60, executor=executor)
        ) == contents(whole)
    assert contents(pack(source, tmp_path / "processes", shard_size=60, processes=2)) == contents(
        whole
    )
    with TextDataset(whole) as packed:
        assert pack_status(whole).parts > 3 and all(same(packed[i], source[i]) for i in range(60))


def test_a_job_tokenises_its_own_parts(records: Path, tmp_path: Path) -> None:
    counted: list[str] = []

    class Counting(Words):
        def __call__(self, text: str) -> list[int]:
            counted.append(text)
            return super().__call__(text)

    source = TextDataset(records, tokenizer=Counting(), cache_dir=tmp_path / "kept")
    out = pack(source, tmp_path / "out", shard_size=30, part="0/2")
    status = pack_status(out)
    assert status.parts > 5 and status.done == list(range(0, status.parts, 2))
    edges = json.loads((out / "plan.json").read_text())["edges"]
    assert len(counted) == 32 + sum(edges[part + 1] - edges[part] for part in status.done), (
        "and 32 for the plan"
    )


def test_tokens_that_are_there_are_copied(texts: Path, tmp_path: Path) -> None:
    """Of windows, blocks, and packed files; what ends a document comes along."""
    with opened(texts, packing=True, max_length=4, end_token=1) as blocks:
        one, parts = (
            pack(blocks, tmp_path / "one.h5"),
            pack(blocks, tmp_path / "parts", shard_size=SHARD, processes=2),
        )
        with TextDataset(parts, packing=True, max_length=4) as packed:
            assert packed.fingerprint == blocks.fingerprint and all(
                same(packed[i], blocks[i]) for i in range(len(blocks))
            )
    again = pack(parts, tmp_path / "again", shard_size=2 * SHARD)
    assert 1 < pack_status(again).parts < pack_status(parts).parts
    assert pack(again, tmp_path / "joined.h5").read_bytes() == one.read_bytes()
    with TextDataset(parts) as packed:
        view = packed.subset([11, 0, 4])
        with TextDataset(pack(view, tmp_path / "view", shard_size=40)) as copy:
            assert copy.fingerprint == view.fingerprint and all(
                same(copy[i], view[i]) for i in range(3)
            )


def test_end_tokens(texts: Path, tmp_path: Path) -> None:
    """Put behind each document while it is packed, they are those of blocks that have them."""
    with opened(texts, packing=True, max_length=4, end_token=7) as blocks:
        expected = pack(blocks, tmp_path / "one.h5").read_bytes()
        assert pack(blocks, tmp_path / "same.h5", end_token=7).read_bytes() == expected
        with pytest.raises(
            ConfigError,
            match="end_token=8: this dataset has tokens that were made with end_token=7",
        ):
            pack(blocks, tmp_path / "other.h5", end_token=8)
        source = opened(texts)
        assert pack(source, tmp_path / "own.h5", end_token=7).read_bytes() == expected
        parts = pack(source, tmp_path / "parts", end_token=7, shard_size=SHARD)
        assert pack(parts, tmp_path / "joined.h5").read_bytes() == expected
    with pytest.raises(TargetExistsError, match="end_token: 7 there, None now"):
        pack(source, parts, shard_size=SHARD)
    with pytest.raises(ConfigError, match="end_token must be an id"):
        pack(source, tmp_path / "bad.h5", end_token=-1)


def test_each_part_has_the_smallest_dtype(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(
            "wheel" * 9 if number < 5 else "wheel\U0001f600" * 8
        )
    source = TextDataset(str(tmp_path / "*.txt"), cache_dir=tmp_path / "kept")
    parts = pack(source, tmp_path / "parts", shard_size=100)
    kinds = []
    for path in sorted(parts.glob("*.h5")):
        with h5py.File(path) as file:
            kinds.append(str(file["data"].dtype))
    assert set(kinds) == {"uint16", "int32"}
    one = pack(source, tmp_path / "one.h5")
    for way in WAYS.values():
        with TextDataset(parts, **way) as joined, TextDataset(one, **way) as single:
            assert all(same(joined[i], single[i]) for i in range(len(single)))


@given(st.data())
@settings(max_examples=20, deadline=None)
@pytest.mark.slow
def test_any_range_of_joined_tokens(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = tmp_path_factory.mktemp("joined")
    sizes = data.draw(
        st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=2, max_size=4)
    )
    each, everything, number = [], "", 0
    for of_file in sizes:
        (folder / "texts").mkdir(exist_ok=True)
        for size in of_file:
            text = "".join(chr(97 + (len(everything) + i) % 26) for i in range(size))
            (folder / "texts" / f"{number:03d}.txt").write_text(text)
            everything, number = everything + text, number + 1
        each.append(PackedTokens(pack(TextDataset(folder / "texts"), folder / f"{len(each)}.h5")))
        shutil.rmtree(folder / "texts")
    tokens = JoinedTokens(each)
    ids = CharTokenizer()(everything)
    assert (
        tokens.count == len(ids)
        and tokens.short[0].tolist() == np.cumsum([0, *itertools.chain(*sizes)]).tolist()
    )
    pairs = sorted(
        data.draw(
            st.lists(st.tuples(st.integers(0, len(ids)), st.integers(0, len(ids))), max_size=5)
        )
    )
    begins, ends = (
        (
            np.array(column, np.int64)
            for column in zip(*[(min(p), max(p)) for p in pairs], strict=True)
        )
        if pairs
        else [np.empty(0, np.int64)] * 2
    )
    for part, begin, end in zip(tokens.parts(begins, ends), begins, ends, strict=True):
        assert part.dtype == tokens.dtype and part.tolist() == ids[begin:end].tolist()
    assert tokens.byte_ranges(begins, ends).nbytes.sum() == 2 * (ends - begins).sum()


class TestTokenizers:
    def test_without_identity(self, texts: Path, tmp_path: Path) -> None:
        with opened(texts, tokenizer=Words()) as source:
            parts = pack(source, tmp_path / "parts", shard_size=10)
            with TextDataset(parts) as packed:
                assert packed.tokenizer is None and all(
                    same(packed[i], source[i]) for i in range(len(source))
                )
        pack(opened(texts, tokenizer=Words()), parts, shard_size=10)
        with pytest.raises(TargetExistsError, match="tokens: "):
            pack(opened(texts, tokenizer=Words(11)), parts, shard_size=10)

    def test_that_no_other_process_can_have(self, texts: Path, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"processes=2: TextDataset can't be sent to another process .*lambda"
        ):
            pack(
                opened(texts, tokenizer=lambda text: [len(text)]),
                tmp_path / "parts",
                shard_size=10,
                processes=2,
            )

    def test_another_one_is_refused(self, texts: Path, tmp_path: Path) -> None:
        parts = pack(opened(texts), tmp_path / "parts", shard_size=SHARD)
        with pytest.raises(
            TargetExistsError,
            match=r"tokenizer: CharTokenizer\(\) there, CharTokenizer\('ab'\) now",
        ):
            pack(opened(texts, tokenizer=CharTokenizer("ab")), parts, shard_size=SHARD)
        with pytest.raises(TargetExistsError, match="end_token: None there, 3 now"):
            pack(opened(texts, end_token=3, packing=True, max_length=4), parts, shard_size=SHARD)

    def test_files_of_two_are_no_dataset(self, texts: Path, tmp_path: Path) -> None:
        pack(opened(texts), tmp_path / "a.h5")
        pack(opened(texts, tokenizer=CharTokenizer("ab")), tmp_path / "b.h5")
        pack(opened(texts, labels=None), tmp_path / "c.h5")
        with pytest.raises(
            FormatError,
            match=r"b\.h5 and .*a\.h5 can't be one dataset: they were packed with other tokenizer",
        ):
            TextDataset([tmp_path / "a.h5", tmp_path / "b.h5"])
        with pytest.raises(FormatError, match="other classes, targets"):
            TextDataset([tmp_path / "a.h5", tmp_path / "c.h5"])


class TestBad:
    """What is wrong is named."""

    def test_unreadable_texts_are_left_out(self, texts: Path, tmp_path: Path) -> None:
        (texts / "verse" / "3.txt").write_bytes(b"\xff\xfeno text")
        with pytest.raises(SampleError, match=r"3\.txt"):
            pack(opened(texts), tmp_path / "parts", shard_size=SHARD)
        with pytest.warns(HeadraceWarning, match="1 samples can't be read and were left out"):
            out = pack(opened(texts, on_error="skip"), tmp_path / "skipped", shard_size=SHARD)
        with TextDataset(out) as packed, opened(texts) as source:
            assert len(packed) == len(source) - 1 and packed.fingerprint != source.fingerprint
            assert same(packed[8], source[8]) and same(packed[9], source[10])

    def test_a_text_that_changes_is_named(self, texts: Path, tmp_path: Path) -> None:
        source = opened(texts)
        out = pack(source, tmp_path / "out", shard_size=SHARD, part="0/2")
        (texts / "verse" / "9.txt").write_text("longer than it was")
        with pytest.raises(TargetExistsError, match="names or sizes of samples"):
            pack(source, out, shard_size=SHARD, part="1/2")

    def test_a_text_that_changes_meanwhile_is_named(self, texts: Path, tmp_path: Path) -> None:
        (texts / "verse" / "9.txt").write_text("it changes when this is tokenised")

        class Changing(CharTokenizer):
            def __call__(self, text: str) -> Any:
                if text.startswith("it changes"):
                    (texts / "verse" / "9.txt").write_text("and is shorter")
                return super().__call__(text)

        with pytest.raises(FileChangedError, match=r"9\.txt"):
            pack(opened(texts, tokenizer=Changing()), tmp_path / "out", shard_size=SHARD)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"store": "decoded"}, "texts are packed as tokens"),
            ({"store": "jpeg"}, "for images"),
            ({"check": "header"}, "for encoded images"),
        ],
    )
    def test_options(self, texts: Path, tmp_path: Path, options: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            pack(opened(texts), tmp_path / "out", shard_size=SHARD, **options)

    def test_views_of_windows(self, texts: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="a view of windows or blocks"):
            pack(opened(texts, **WAYS["windows"]).subset([1]), tmp_path / "out", shard_size=SHARD)

    def test_targets_of_several_kinds(self, tmp_path: Path) -> None:
        rows = [{"text": "wheel", "n": 1 if number < 9 else "one"} for number in range(12)]
        (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
        with pytest.raises(ConfigError, match="targets can't be packed"):
            pack(
                TextDataset(tmp_path / "in.jsonl", target_field="n"),
                tmp_path / "out",
                shard_size=20,
            )

    def test_a_part_that_is_missing(self, texts: Path, tmp_path: Path) -> None:
        parts = pack(opened(texts), tmp_path / "parts", shard_size=SHARD)
        (parts / "manifest.json").unlink()
        sorted(parts.glob("*.h5"))[1].unlink()
        with pytest.raises(DataNotFoundError, match="not complete"):
            TextDataset(parts)
        with pytest.raises(DataNotFoundError, match="missing: 1"):
            join(parts)
        pack(opened(texts), parts, shard_size=SHARD)
        assert pack_status(parts).joined


_JOB = """
import sys
from headrace import TextDataset, pack
texts = TextDataset(sys.argv[1], cache_dir=sys.argv[3])
pack(texts, sys.argv[2], shard_size=2000, processes=int(sys.argv[4]), progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_kills_lose_nothing(tmp_path: Path, processes: int) -> None:
    rows = [{"text": f"{number} {'mill ' * (number % 70)}wheel"} for number in range(600)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    undisturbed = pack(
        TextDataset(tmp_path / "in.jsonl", cache_dir=tmp_path / "kept"),
        tmp_path / "undisturbed",
        shard_size=2000,
    )
    out, choose = tmp_path / "out", random.Random(processes)
    kill_four_times(_JOB, [tmp_path / "in.jsonl", out, tmp_path / "kept", processes], out, choose)
    assert contents(out) == contents(undisturbed) and verify(out).ok


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
class TestContract(DatasetContract):
    """The laws, over several packed files."""

    @pytest.fixture(autouse=True)
    def _data(self, tmp_path: Path, own_cache: None, way: str) -> None:
        rows = [{"text": f"{number} {'mill ' * (number % 9)}wheel"} for number in range(90)]
        (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
        self.way, self.parts = (
            way,
            pack(TextDataset(tmp_path / "in.jsonl"), tmp_path / "parts", shard_size=700),
        )

    def make(self, **options: Any) -> TextDataset:
        return TextDataset(self.parts, **WAYS[self.way], **options)
