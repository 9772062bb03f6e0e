"""Packed texts, in one file and in parts: documents, windows and blocks are those of the texts.

Kills and jobs: test_parts.py. Each flipped bit: test_verify.py.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import (
    CharTokenizer,
    HDF5Dataset,
    StreamingDataset,
    TextDataset,
    create_dataloader,
    open_dataset,
    pack,
    verify,
)
from headrace.errors import (
    AccessError,
    ConfigError,
    FileChangedError,
    FormatError,
    HeadraceError,
    HeadraceWarning,
    SampleError,
    TargetExistsError,
)
from headrace.formats.hdf5.files import packed_info
from headrace.packing import pack_status
from headrace.testing.contract import same
from tests.packing.cases import make_texts
from tests.packing.shared import check_same, replace_array, samples_of

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.quick_every(2)]

WAYS: dict[str, dict[str, Any]] = {
    "documents": {"max_length": 9},
    "windows": {"max_length": 8, "stride": 5},
    "blocks": {"max_length": 8, "packing": True},
}
SHARD = 60
COUNT = 12


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return make_texts(tmp_path / "texts")


@pytest.fixture
def records(tmp_path: Path) -> Path:
    rows = [{"text": f"the {'mill ' * (n % 7)}wheel", "score": n / 2} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "rows.jsonl"


def opened(texts: Path, **options: Any) -> TextDataset:
    options = {"labels": "folders", "cache_dir": texts.parent / "kept", **options}
    return TextDataset(texts, **options)


class Words:
    """A tokenizer of words, which nobody can know again."""

    def __init__(self, first: int = 10) -> None:
        self.first = first

    def __call__(self, text: str) -> list[int]:
        return [self.first + len(word) for word in text.split()]


@pytest.mark.parametrize("shard_size", [None, SHARD], ids=["file", "parts"])
@pytest.mark.parametrize("way", WAYS)
def test_samples_and_batches_are_those_of_the_texts(
    way: str, shard_size: int | None, texts: Path, tmp_path: Path
) -> None:
    out = pack(opened(texts), tmp_path / "out", shard_size=shard_size)
    for mode in ("lazy", "eager", "cached", "streaming"):
        # texts that are files each lie in no blocks, and their tokens do
        is_laned = mode == "streaming" and (way != "documents" or shard_size is not None)
        options: dict[str, Any] = {"shuffle": "block" if is_laned else True, "num_workers": 0}
        with (
            opened(texts, **WAYS[way]) as source,
            TextDataset(out, loading_mode=mode, **WAYS[way]) as packed,
        ):
            assert packed.fingerprint == source.fingerprint
            assert packed.classes == ["prose", "verse"]
            if mode != "streaming":
                check_same(packed, source)
            if mode != "streaming" or way != "documents":
                ours = list(create_dataloader(packed, batch_size=3, **options))
                theirs = list(create_dataloader(source, batch_size=3, **options))
                assert len(ours) > 3 and same(ours, theirs), mode


@pytest.mark.parametrize("unit", ["record", "line"])
def test_lines_and_records(unit: str, records: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"unit": unit, "cache_dir": tmp_path / "kept"}
    if unit == "record":
        options["target_field"] = "score"
    with TextDataset(records, **options) as source:
        view = source.subset([4, 50, 50, 2, *range(10, 40)])
        for shard_size in (None, 300):
            out = pack(source, tmp_path / f"out{shard_size}", shard_size=shard_size)
            with TextDataset(out) as packed:
                check_same(packed, source)
                assert ", document 3" in packed.source_of(3)
            out = pack(view, tmp_path / f"view{shard_size}", shard_size=shard_size)
            with TextDataset(out) as packed:
                check_same(packed, view)


def test_opens_in_every_way(texts: Path, tmp_path: Path) -> None:
    parts = pack(opened(texts), tmp_path / "parts", shard_size=SHARD)
    files = sorted(map(str, parts.glob("*.h5")))
    with opened(texts) as source:
        for path in (parts, parts / "manifest.json", str(parts / "*.h5"), files, f"{parts}/"):
            with open_dataset(path) as packed:
                check_same(packed, source)
                assert np.array_equal(packed.targets, source.targets)
        with TextDataset(files[1:]) as rest:
            assert rest.fingerprint != source.fingerprint and len(rest) < len(source)
        with TextDataset(parts) as packed:
            location = packed.source_of(11)
            assert files[-1] in location and Path(source.source_of(11)).name in location
        assert len(list(StreamingDataset(parts))) == COUNT
        with HDF5Dataset(parts, target_name="targets") as rows:
            assert len(rows) == COUNT and rows.fingerprint == source.fingerprint


# --- what is in the file --------------------------------------------------------------------------


def test_what_the_file_says(texts: Path, tmp_path: Path) -> None:
    tokenizer = CharTokenizer("abcdé \n'")
    blocks = {"packing": True, "max_length": 4, "end_token": 1}
    with opened(texts, tokenizer=tokenizer, **blocks) as source:
        out = pack(source, tmp_path / "out.h5")
        with TextDataset(out, packing=True, max_length=4) as packed:
            check_same(packed, source)
            assert packed.tokenizer.characters == tokenizer.characters
    with opened(texts, tokenizer=tokenizer, max_length=None) as documents, h5py.File(out) as file:
        data, offsets = file["data"][:], file["offsets"][:]
        names, ends = file["names"][:].tobytes().decode(), file["name_offsets"][:]
        assert (data.dtype, offsets.dtype, file["crc32"].dtype) == (np.uint16, np.int64, np.uint32)
        assert all(file[name].chunks is None for name in file)
        for index in range(COUNT):
            tokens = documents[index]["input_ids"].tolist()
            assert data[offsets[index] : offsets[index + 1]].tolist() == [*tokens, 1]
            name = names[ends[index] : ends[index + 1]]
            assert os.path.join(texts, name) == documents.source_of(index)
        assert file["targets"][:].tolist() == documents.targets.tolist()
        info = packed_info(out)
        assert info is not None and info.fingerprint == documents.fingerprint
        assert (info.kind, info.store, info.count) == ("text", "tokens", COUNT)
        said = {"tokenizer": repr(tokenizer), "class": "CharTokenizer"}
        assert info.text == {**said, "end_token": 1, "unit": "file"}
    with HDF5Dataset(out, target_name="targets") as rows:
        assert rows[0][0].tolist() == data[: offsets[1]].tolist() and rows[0][1] == 0


def test_tokenizers_without_identity(texts: Path, tmp_path: Path) -> None:
    """And of large ids."""
    large = partial(opened, texts, tokenizer=Words(70_000))
    with large() as source:
        for shard_size in (None, 10):
            out = pack(source, tmp_path / f"out{shard_size}", shard_size=shard_size)
            with TextDataset(out) as packed:
                check_same(packed, source)
                assert packed.tokenizer is None
    with h5py.File(tmp_path / "outNone") as file:
        assert file["data"].dtype == np.int32
    pack(large(), out, shard_size=10)
    with pytest.raises(TargetExistsError, match="tokens: "):
        pack(opened(texts, tokenizer=Words(11)), out, shard_size=10)
    with pytest.raises(ConfigError, match="lambda"):
        source = opened(texts, tokenizer=lambda text: [len(text)])
        pack(source, tmp_path / "parts", shard_size=10, processes=2)


def test_same_texts_give_the_same_bytes(texts: Path, tmp_path: Path) -> None:
    first = pack(opened(texts), tmp_path / "first.h5", workers=1).read_bytes()
    copy = opened(shutil.copytree(texts, tmp_path / "copy"), cache_dir=tmp_path / "other")
    assert pack(copy, tmp_path / "second.h5", workers=3).read_bytes() == first
    parts = pack(tmp_path / "first.h5", tmp_path / "parts", shard_size=SHARD, processes=2)
    wider = pack(parts, tmp_path / "wider", shard_size=2 * SHARD)
    assert 1 < pack_status(wider).parts < pack_status(parts).parts
    assert pack(wider, tmp_path / "joined.h5").read_bytes() == first


def test_all_files_in_another_order(texts: Path, tmp_path: Path) -> None:
    view = opened(texts)[::-1]
    with TextDataset(pack(view, tmp_path / "out", shard_size=SHARD)) as packed:
        check_same(packed, view)


def test_end_tokens(texts: Path, tmp_path: Path) -> None:
    """Put behind each document while it is packed, they are those of blocks that have them."""
    with opened(texts, packing=True, max_length=4, end_token=7) as blocks:
        expected = pack(blocks, tmp_path / "one.h5").read_bytes()
        assert pack(blocks, tmp_path / "same.h5", end_token=7).read_bytes() == expected
        with pytest.raises(ConfigError, match=r"end_token=8: .* end_token=7"):
            pack(blocks, tmp_path / "other.h5", end_token=8)
    source = opened(texts)
    assert pack(source, tmp_path / "own.h5", end_token=7).read_bytes() == expected
    parts = pack(source, tmp_path / "parts", end_token=7, shard_size=SHARD)
    assert pack(parts, tmp_path / "joined.h5").read_bytes() == expected
    with pytest.raises(TargetExistsError, match="end_token: 7 there, None now"):
        pack(source, parts, shard_size=SHARD)
    with pytest.raises(ConfigError, match="end_token"):
        pack(source, tmp_path / "bad.h5", end_token=-1)


def test_no_documents_and_no_tokens(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    files = [TextDataset(tmp_path / "empty.txt"), TextDataset(tmp_path / "empty.txt", unit="line")]
    for number, source in enumerate([*files, opened(texts)[:0]]):
        out = pack(source, tmp_path / f"{number}.h5")
        with TextDataset(out) as packed, TextDataset(out, packing=True, max_length=9) as blocks:
            check_same(packed, source)
            assert verify(out).ok and len(blocks) == 0


def test_each_part_has_the_smallest_dtype(tmp_path: Path) -> None:
    for number in range(6):
        text = "wheel" * 9 if number < 5 else "wheel\U0001f600" * 8
        (tmp_path / f"{number}.txt").write_text(text)
    source = TextDataset(str(tmp_path / "*.txt"), cache_dir=tmp_path / "kept")
    parts = pack(source, tmp_path / "parts", shard_size=100)
    kinds = set()
    for path in parts.glob("*.h5"):
        with h5py.File(path) as file:
            kinds.add(str(file["data"].dtype))
    assert kinds == {"uint16", "int32"}
    one = pack(source, tmp_path / "one.h5")
    for way in WAYS.values():
        with TextDataset(parts, **way) as joined, TextDataset(one, **way) as single:
            assert same(samples_of(joined), samples_of(single))


# --- jobs -----------------------------------------------------------------------------------------


def test_other_texts_and_tokenizers_are_other_plans(texts: Path, tmp_path: Path) -> None:
    parts = pack(opened(texts), tmp_path / "parts", shard_size=SHARD, part="0/2")
    rows: list[tuple[dict[str, Any], str]] = [
        ({"tokenizer": CharTokenizer("ab")}, r"CharTokenizer\(\) there, CharTokenizer\('ab'\) now"),
        ({"end_token": 3, "packing": True, "max_length": 4}, "end_token: None there, 3 now"),
    ]
    for options, message in rows:
        with pytest.raises(TargetExistsError, match=message):
            pack(opened(texts, **options), parts, shard_size=SHARD)
    source = opened(texts)
    (texts / "verse" / "9.txt").write_text("longer than it was")
    for changed in (source, opened(texts)):
        with pytest.raises((TargetExistsError, FileChangedError)):
            pack(changed, parts, shard_size=SHARD, part="1/2")


def test_a_text_that_changes_meanwhile_is_named(texts: Path, tmp_path: Path) -> None:
    (texts / "verse" / "9.txt").write_text("it changes when this is tokenised")

    class Changing(CharTokenizer):
        def __call__(self, text: str) -> Any:
            if text.startswith("it changes"):
                (texts / "verse" / "9.txt").write_text("and is shorter")
            return super().__call__(text)

    with pytest.raises(FileChangedError, match="another name or size"):
        pack(opened(texts, tokenizer=Changing()), tmp_path / "out", shard_size=SHARD)


# --- what is refused, and left out ----------------------------------------------------------------


@pytest.mark.quick_every(1)
@pytest.mark.parametrize("shard_size", [None, SHARD])
def test_unreadable_texts(shard_size: int | None, texts: Path, tmp_path: Path) -> None:
    (texts / "verse" / "3.txt").write_bytes(b"\xff\xfeno text")
    skipping = opened(texts, on_error="skip")
    with pytest.raises(SampleError, match=r"3\.txt"):
        pack(opened(texts), tmp_path / "bad", shard_size=shard_size)
    made_up = opened(texts, on_error=lambda *_: {}, cache_dir=tmp_path / str(shard_size))
    with pytest.warns(HeadraceWarning), pytest.raises(SampleError, match=r"3\.txt"):
        pack(made_up, tmp_path / "bad.h5")
    with pytest.warns(HeadraceWarning, match="1 .*left out"):
        pack(skipping, tmp_path / "out", shard_size=shard_size)
    with TextDataset(tmp_path / "out") as packed, opened(texts) as source:
        assert packed.fingerprint != source.fingerprint
        kept = [source[index] for index in range(COUNT) if "3.txt" not in source.source_of(index)]
        assert same(samples_of(packed), kept)


def test_options_that_packing_has_decided(texts: Path, tmp_path: Path) -> None:
    out = pack(opened(texts), tmp_path / "out.h5")
    options = {
        **{"unit": "line", "tokenizer": CharTokenizer(), "text_field": "body"},
        **{"labels": "folders", "encoding": "latin-1", "errors": "replace"},
    }
    for name, value in options.items():
        with pytest.raises(ConfigError, match=rf"{name}=.*out\.h5"):
            TextDataset(out, **{name: value})
    with pytest.raises(ConfigError):
        TextDataset(out).text_of(0)


@pytest.mark.parametrize("shard_size", [SHARD, None])
def test_what_makes_no_sense(shard_size: int | None, texts: Path, tmp_path: Path) -> None:
    pack_it = partial(pack, dst=tmp_path / "new", shard_size=shard_size)
    for options in ({"store": "decoded"}, {"store": "jpeg"}, {"check": "header"}, {"chunks": 2}):
        with pytest.raises(ConfigError):
            pack_it(opened(texts), **options)
    packed = TextDataset(pack(opened(texts), tmp_path / "out.h5"), **WAYS["windows"])
    for view in (opened(texts, **WAYS["blocks"])[:2], packed.subset([1])):
        with pytest.raises(ConfigError, match="view"):
            pack_it(view)
    rows = [{"text": "wheel", "n": 1 if number < 9 else "one"} for number in range(12)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match="targets"):
        pack_it(TextDataset(tmp_path / "in.jsonl", target_field="n"))


def test_files_that_are_no_dataset(texts: Path, tmp_path: Path) -> None:
    pack(opened(texts), tmp_path / "a.h5")
    pack(opened(texts, tokenizer=CharTokenizer("ab")), tmp_path / "b.h5")
    pack(opened(texts, labels=None), tmp_path / "c.h5")
    for name, difference in (("b", "tokenizer"), ("c", "classes, targets")):
        with pytest.raises(FormatError, match=rf"{name}\.h5 and .*a\.h5 .*{difference}"):
            TextDataset([tmp_path / "a.h5", tmp_path / f"{name}.h5"])
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["data"] = np.zeros(3)
    with pytest.raises(FormatError, match=r"plain\.h5"):
        TextDataset(tmp_path / "plain.h5")


# --- damage ---------------------------------------------------------------------------------------


def test_arrays_that_do_not_fit_each_other(texts: Path, tmp_path: Path) -> None:
    path = pack(opened(texts), tmp_path / "out.h5")
    with h5py.File(path) as file:
        offsets, size = file["offsets"][:], len(file["data"])
    wrong = [
        ("offsets", offsets[:-1], "offsets"),
        ("offsets", offsets + 1, "offsets"),
        ("data", np.zeros(size - 1, np.uint16), "offsets"),
        ("data", np.zeros(size, ">u2"), "'data'"),
        ("data", np.zeros((size, 1), np.uint16), "'data'"),
        ("targets", np.zeros(3, np.int64), "'targets'"),
        ("crc32", np.zeros(3, np.uint32), "crc32"),
    ]
    for number, (name, value, word) in enumerate(wrong):
        copy = Path(shutil.copy(path, tmp_path / f"{number}.h5"))
        replace_array(copy, name, value)
        with pytest.raises(FormatError, match=rf"{number}\.h5.*{word}"):
            TextDataset(copy)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(FormatError, match=r"out\.h5"):
        TextDataset(path)


@pytest.mark.parametrize("way", ["gone", "cut", "replaced"])
def test_a_file_that_changes_under_its_reader(way: str, texts: Path, tmp_path: Path) -> None:
    path = pack(opened(texts), tmp_path / "out.h5")
    with TextDataset(path, **WAYS["blocks"]) as dataset:
        assert len(dataset[0]["input_ids"]) == 8
        if way == "gone":
            path.unlink()
        elif way == "cut":
            os.truncate(path, path.stat().st_size // 2)
        else:
            os.replace(pack(opened(texts)[:6], tmp_path / "new.h5"), path)
        with pytest.raises((AccessError, FileChangedError), match=r"out\.h5"):
            dataset.sample_source.read([0])
        with pytest.raises(HeadraceError, match=r"out\.h5"):
            dataset[0]
