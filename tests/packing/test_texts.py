"""Packed texts: tokens bit for bit, as documents, windows and blocks, in all modes; and every
damage is found.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from headrace import (
    AccessError,
    CharTokenizer,
    ConfigError,
    FileChangedError,
    FormatError,
    HDF5Dataset,
    HeadraceError,
    HeadraceWarning,
    SampleError,
    TextDataset,
    create_dataloader,
    open_dataset,
    pack,
    verify,
)
from headrace.packing import run as running
from headrace.packing.run import pack_dataset
from headrace.storage.hdf5.packed import packed_info
from headrace.testing.contract import same

MODES = ("lazy", "eager", "cached", "streaming")
WAYS: dict[str, dict[str, Any]] = {
    "documents": {"max_length": 9},
    "windows": {"max_length": 8, "stride": 5},
    "blocks": {"max_length": 8, "packing": True},
}


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Seven texts in two class folders, one of them empty, one not ASCII."""
    random = np.random.default_rng(0)
    for number, size in enumerate((40, 0, 7, 8, 23, 1, 16)):
        folder = tmp_path / "texts" / ("prose", "verse")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        letters = "".join(random.choice(list("abcdé \n"), size))
        (folder / f"{number}.txt").write_bytes(letters.encode())
    return tmp_path / "texts"


def opened(texts: Path, **options: Any) -> TextDataset:
    return TextDataset(
        texts, **{"labels": "folders", "cache_dir": texts.parent / "kept", **options}
    )


def check_same(packed: TextDataset, source: TextDataset) -> None:
    assert len(packed) == len(source) and packed.fingerprint == source.fingerprint
    assert all(same(packed[i], source[i]) for i in range(len(source)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_samples_and_batches_are_those_of_the_texts(
    texts: Path, tmp_path: Path, way: str, mode: str
) -> None:
    out = pack(opened(texts), tmp_path / "out.h5")
    with (
        opened(texts, **WAYS[way]) as source,
        TextDataset(out, loading_mode=mode, **WAYS[way]) as packed,
    ):
        assert packed.classes == ["prose", "verse"]
        if mode != "streaming":
            check_same(packed, source)
        # texts that are files each lie in no blocks, and their tokens do
        is_laned = mode == "streaming" and way != "documents"
        options: dict[str, Any] = {
            "batch_size": 3,
            "num_workers": 0,
            "shuffle": "block" if is_laned else True,
        }
        ours, theirs = create_dataloader(packed, **options), create_dataloader(source, **options)
        assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))
        assert isinstance(packed.tokenizer, CharTokenizer) and packed.tokenizer.characters is None


def test_workers_read_the_same(
    texts: Path, tmp_path: Path, make_loader: Callable[..., Any]
) -> None:
    out = pack(opened(texts), tmp_path / "out.h5")
    with TextDataset(out, **WAYS["blocks"]) as packed:
        found = []
        for options in (
            {"num_workers": 0},
            {"num_workers": 2, "multiprocessing_context": "forkserver"},
        ):
            found.append(list(make_loader(packed, batch_size=3, **options)))
        assert len(found[0]) == 4 and all(same(a, b) for a, b in zip(*found, strict=True))
        copy = pickle.loads(pickle.dumps(packed))
        assert same(copy[2], packed[2])


@pytest.mark.parametrize("unit", ["line", "record"])
def test_lines_and_records_with_targets(tmp_path: Path, unit: str) -> None:
    rows = [{"text": f"the {'mill ' * number}wheel", "score": number / 2} for number in range(20)]
    lines = [json.dumps(row) for row in rows] if unit == "record" else [row["text"] for row in rows]
    path = tmp_path / ("in.jsonl" if unit == "record" else "in.txt")
    path.write_text("\n".join(lines))
    options: dict[str, Any] = {
        "unit": unit,
        "target_field": "score" if unit == "record" else None,
        "cache_dir": tmp_path / "kept",
    }
    with TextDataset(path, **options) as source:
        out = pack(source, tmp_path / "out.h5")
        with TextDataset(out) as packed:
            check_same(packed, source)
            assert packed.source_of(3) == f"{out}, document 3"
        with pack_view(source, [4, 2, 2], tmp_path) as packed:
            check_same(packed, source.subset([4, 2, 2]))


def pack_view(source: TextDataset, chosen: list[int], folder: Path) -> TextDataset:
    return TextDataset(pack(source.subset(chosen), folder / "view.h5"))


def test_what_the_file_says(texts: Path, tmp_path: Path) -> None:
    """To other programs too."""
    tokenizer = CharTokenizer("abcdé \n'")
    with opened(texts, tokenizer=tokenizer, packing=True, max_length=4, end_token=1) as source:
        out = pack(source, tmp_path / "out.h5")
        with (
            opened(texts, tokenizer=tokenizer, max_length=None) as documents,
            h5py.File(out) as file,
        ):
            data, offsets, names, ends = (
                file[name][:] for name in ("data", "offsets", "names", "name_offsets")
            )
            assert (data.dtype, offsets.dtype, file["crc32"].dtype) == (
                np.uint16,
                np.int64,
                np.uint32,
            )
            assert all(file[name].chunks is None for name in file)
            for i in range(7):
                assert data[offsets[i] : offsets[i + 1]].tolist() == [
                    *documents[i]["input_ids"].tolist(),
                    1,
                ]
                assert os.path.join(
                    texts, names[ends[i] : ends[i + 1]].tobytes().decode()
                ) == documents.source_of(i)
            assert file["targets"][:].tolist() == documents.targets.tolist()
        info = packed_info(out)
        assert info is not None and (info.kind, info.store, info.count, info.fingerprint) == (
            "text",
            "tokens",
            7,
            documents.fingerprint,
        )
        assert info.text == {
            "tokenizer": repr(tokenizer),
            "class": "CharTokenizer",
            "end_token": 1,
            "unit": "file",
        }
        with TextDataset(out, packing=True, max_length=4) as packed:
            check_same(packed, source)
            assert (
                packed.tokenizer.characters == tokenizer.characters
                and "made with CharTokenizer(" in packed.explain()
            )
        with HDF5Dataset(out, target_name="targets") as rows:
            assert (
                rows[0][0].tolist() == data[: offsets[1]].tolist()
                and rows[0][0].dtype == torch.uint16
                and rows[0][1] == 0
            )
        with open_dataset(out) as found, open_dataset(texts) as plain:
            assert (
                isinstance(found, TextDataset)
                and isinstance(plain, TextDataset)
                and len(found) == len(plain) == 7
            )


class Hashing:
    """A tokenizer of large ids that nobody can know again."""

    def __call__(self, text: str) -> list[int]:
        return [70_000 + ord(letter) for letter in text]


def test_a_tokenizer_that_cannot_be_known_again(texts: Path, tmp_path: Path) -> None:
    with opened(texts, tokenizer=Hashing()) as source:
        out = pack(source, tmp_path / "out.h5")
        with TextDataset(out) as packed, h5py.File(out) as file:
            check_same(packed, source)
            assert packed.tokenizer is None and file["data"].dtype == np.int32
            assert "made with a Hashing that can't be known again" in packed.explain()


def test_the_same_texts_give_the_same_bytes(texts: Path, tmp_path: Path) -> None:
    first = pack(opened(texts), tmp_path / "first.h5", workers=1).read_bytes()
    shutil.copytree(texts, tmp_path / "copy")
    assert (
        pack(
            opened(tmp_path / "copy", cache_dir=tmp_path / "other"),
            tmp_path / "second.h5",
            workers=3,
        ).read_bytes()
        == first
    )
    assert pack(tmp_path / "first.h5", tmp_path / "third.h5").read_bytes() == first
    with TextDataset(tmp_path / "first.h5") as packed, opened(texts) as source:
        check_same(TextDataset(pack(packed[2:5], tmp_path / "view.h5")), packed[2:5])
        assert same(packed[2:5][1], source[3])


def test_no_documents_and_no_tokens(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "blank.txt").write_bytes(b"")
    for number, source in enumerate(
        (
            TextDataset(tmp_path / "empty.txt"),
            TextDataset(tmp_path / "blank.txt", unit="line"),
            opened(texts)[:0],
        )
    ):
        out = pack(source, tmp_path / f"{number}.h5")
        assert verify(out).ok
        with TextDataset(out) as packed:
            check_same(packed, source)
        with TextDataset(out, packing=True, max_length=512) as blocks:
            assert len(blocks) == 0


def test_documents_that_cannot_be_read(texts: Path, tmp_path: Path) -> None:
    (texts / "prose" / "0.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(SampleError, match=r"0\.txt: byte 0xff at offset 0 is no utf-8"):
        pack(opened(texts), tmp_path / "out.h5")
    with pytest.warns(
        HeadraceWarning, match="1 of 7 documents can.t be read, or tokenised, and are left out"
    ):
        result = pack_dataset(opened(texts, on_error="skip"), tmp_path / "out.h5")
    (said,) = result.left_out
    assert result.samples == 6 and "0.txt" in said
    with TextDataset(tmp_path / "out.h5") as packed, opened(texts, on_error="skip") as source:
        check_same(packed, source[1:])  # which it is, as far as anybody can tell
    with pytest.warns(HeadraceWarning), pytest.raises(SampleError, match=r"0\.txt"):
        pack(
            opened(texts, on_error=lambda *_: {}, cache_dir=tmp_path / "new"), tmp_path / "other.h5"
        )
    assert not [
        name for name in os.listdir(tmp_path) if name.endswith(".part") or name == "other.h5"
    ]


def test_an_interrupted_run_does_not_tokenise_again(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    class Counting:
        fingerprint = "1"

        def __call__(self, text: str) -> list[int]:
            made.append(text)
            return list(text.encode())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, opened(texts, tokenizer=Counting()) as source:
        patch.setattr(running.PackedWriter, "append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pack(source, tmp_path / "out.h5")
    assert len(made) == 7 and not [name for name in os.listdir(tmp_path) if "out.h5" in name]
    with opened(texts, tokenizer=Counting()) as source:
        assert verify(pack(source, tmp_path / "out.h5")).samples == 7
    assert len(made) == 7


# --- what makes no sense --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unit", "line"),
        ("tokenizer", CharTokenizer()),
        ("text_field", "body"),
        ("labels", "folders"),
        ("newline", "\n"),
        ("encoding", "latin-1"),
        ("errors", "replace"),
    ],
)
def test_what_packing_has_decided_is_refused(
    texts: Path, tmp_path: Path, name: str, value: Any
) -> None:
    out = pack(opened(texts), tmp_path / "out.h5")
    with pytest.raises(
        ConfigError,
        match=rf"{name}=.*out\.h5 holds tokens, so packing has decided this: leave it out",
    ):
        TextDataset(out, **{name: value})


def test_other_things_that_make_no_sense(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="store='decoded' is for images and arrays"):
        pack(opened(texts), tmp_path / "out.h5", store="decoded")
    with pytest.raises(ConfigError, match="a view of windows or blocks can't be packed"):
        pack(opened(texts, **WAYS["blocks"])[:2], tmp_path / "out.h5")
    out = pack(opened(texts), tmp_path / "out.h5")
    with pytest.raises(ConfigError, match="a view of windows or blocks can't be packed"):
        pack(TextDataset(out, **WAYS["windows"])[:2], tmp_path / "other.h5")
    with pytest.raises(ConfigError, match="holds tokens and no texts"):
        TextDataset(out).text_of(0)
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["data"] = np.zeros(3)
    with pytest.raises(FormatError, match=r"plain\.h5 holds no texts that headrace packed"):
        TextDataset(tmp_path / "plain.h5")


# --- damage ---------------------------------------------------------------------------------------


def content(path: Path) -> list[Any]:
    with TextDataset(path, max_length=None) as dataset:
        tokens: Any = dataset.sample_source
        rows = [row.tobytes() for row in dataset.sample_source.read(range(7))]
        return [
            tokens.tokens.info,
            dataset.targets.tolist(),
            [dataset.source_of(i) for i in range(7)],
            *rows,
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", [17, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_every_flipped_bit_is_found(texts: Path, tmp_path: Path, step: int) -> None:
    """Or lies in a gap that HDF5 leaves between its parts."""
    path = pack(opened(texts), tmp_path / "out.h5")
    whole, sound, found = path.read_bytes(), content(path), 0
    for position in range(0, len(whole), step):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            is_found = not verify(path).ok
        except HeadraceError as error:
            assert str(path) in str(error)
            is_found = True
        found += is_found
        assert is_found or content(path) == sound, f"a flipped bit of byte {position} was not found"
    assert found > len(whole) / step / 5


def test_a_flipped_bit_names_the_document(texts: Path, tmp_path: Path) -> None:
    path = pack(opened(texts), tmp_path / "out.h5")
    with h5py.File(path) as file:
        place = file["data"].id.get_offset() + 2 * int(file["offsets"][2])
    with open(path, "r+b") as raw:
        raw.seek(place)
        byte = raw.read(1)[0]
        raw.seek(place)
        raw.write(bytes([byte ^ 4]))
    result = verify(path)
    assert [index for index, _, _ in result.bad] == [2] and result.samples == 7
    assert (
        result.bad[0][1] == f"{path}, document 2 (prose/4.txt)"
        and "wrong checksum" in result.bad[0][2]
    )


@pytest.mark.slow
def test_damage_in_any_piece_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that end within empty documents, and documents larger than a piece."""
    from headrace.io.local import checksums

    monkeypatch.setattr(checksums, "_PIECE", 40)
    monkeypatch.setattr(checksums, "_SEGMENT", 128)
    lengths = [0, 0, 30, 0, *[0] * 12, 5, 5, 5, 100, 0, 1]
    (tmp_path / "in.txt").write_text("".join("x" * length + "\n" for length in lengths))
    path = pack(TextDataset(tmp_path / "in.txt", unit="line"), tmp_path / "out.h5")
    assert verify(path).ok
    with h5py.File(path, "r+") as file:
        begins, size = file["offsets"][:], len(file["data"])
    for place in range(size):
        with h5py.File(path, "r+") as file:
            file["data"][place] ^= 1
        assert [index for index, _, _ in verify(path).bad] == [
            int(np.searchsorted(begins, place, side="right")) - 1
        ]
        with h5py.File(path, "r+") as file:
            file["data"][place] ^= 1


def test_parts_that_do_not_fit_each_other(texts: Path, tmp_path: Path) -> None:
    path = pack(opened(texts), tmp_path / "out.h5")
    with h5py.File(path) as file:
        offsets, size = file["offsets"][:], len(file["data"])
    wrong = [
        ("offsets", offsets[:-1], r"offsets don't fit the 7 documents"),
        ("offsets", offsets + 1, r"offsets don't fit"),
        ("offsets", offsets.astype(np.int32), r"offsets don't fit"),
        ("offsets", offsets.astype(float), r"'offsets' is no flat array of integers"),
        ("data", np.zeros(size - 1, np.uint16), r"offsets don't fit"),
        ("data", np.zeros(size, ">u2"), r"'data' is no flat array of integers"),
        ("data", np.zeros((size, 1), np.uint16), r"'data' is no flat array of integers"),
        ("targets", np.zeros(3, np.int64), r"targets don't fit"),
        ("crc32", np.zeros(3, np.uint32), r"crc32 don't fit"),
    ]
    for number, (name, value, message) in enumerate(wrong):
        copy = tmp_path / f"{number}.h5"
        shutil.copy(path, copy)
        with h5py.File(copy, "a") as file:
            said = json.loads(bytes(file.attrs["headrace"]))
            file.attrs["headrace"] = json.dumps({**said, "checksums": {}})
            del file.attrs["headrace_crc32"], file[name]
            file[name] = value
        with pytest.raises(FormatError, match=rf"{number}\.h5.* {message}"):
            TextDataset(copy)
    whole = path.read_bytes()
    for size in (len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError, match=r"out\.h5 is no HDF5 file, or not a whole one"):
            TextDataset(path)


@pytest.mark.parametrize("way", ["gone", "cut", "replaced"])
def test_a_file_that_changes_under_its_reader(texts: Path, tmp_path: Path, way: str) -> None:
    path = pack(opened(texts), tmp_path / "out.h5")
    with TextDataset(path, **WAYS["blocks"]) as dataset:
        _ = dataset[0]
        if way == "gone":
            path.unlink()
        elif way == "cut":
            os.truncate(path, path.stat().st_size // 2)
        else:
            pack(opened(texts)[:6], tmp_path / "new.h5")
            os.replace(tmp_path / "new.h5", path)
        with pytest.raises(
            (AccessError, FileChangedError),
            match=r"out\.h5 (can't be read any more|has been changed since it was opened)",
        ):
            _ = dataset.sample_source.read([0])
        with pytest.raises(HeadraceError, match=r"out\.h5"):
            _ = dataset[0]


def test_pieces_are_those_of_all_documents(texts: Path, tmp_path: Path) -> None:
    path = pack(opened(texts), tmp_path / "out.h5")
    with (
        TextDataset(path, max_length=None) as documents,
        TextDataset(path, max_length=5, packing=True) as blocks,
    ):
        joined = list(
            itertools.chain.from_iterable(documents[i]["input_ids"].tolist() for i in range(7))
        )
        assert [
            token for i in range(len(blocks)) for token in blocks[i]["input_ids"].tolist()
        ] == joined[: 5 * len(blocks)]


CUT = """
import os, sys, threading
import numpy as np
from headrace import FileChangedError, FormatError, TextDataset

dataset = TextDataset(sys.argv[1], max_length=128, packing=True)
random = np.random.default_rng(0)
threading.Timer(0.1, os.truncate, (sys.argv[1], 0)).start()
try:
    while True:
        dataset.__getitems__(random.integers(len(dataset), size=256).tolist())
except (FileChangedError, FormatError) as error:
    print("error:", error)
"""


@pytest.mark.slow
def test_a_file_cut_short_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("the mill stands and the wheel turns\n" * 200_000)
    packed = pack(TextDataset(tmp_path / "texts.txt", unit="line"), tmp_path / "x.h5")
    whole = Path(packed).read_bytes()
    for _ in range(4):
        Path(packed).write_bytes(whole)
        job = subprocess.run(
            [sys.executable, "-c", CUT, str(packed)], capture_output=True, text=True, timeout=60
        )
        assert (job.returncode, job.stdout[:6]) == (0, "error:"), job.stderr
