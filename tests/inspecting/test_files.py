"""What is told of images, texts and tars is what headrace's datasets give."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import headrace
from headrace.inspecting import inspect
from headrace.io.remote.options import RemoteOptions
from tests.datasets.text.chat_tokenizer import ChatTokenizer
from tests.servers.ranges import RangeServer


def test_photographs(photos: Path) -> None:
    report = inspect(photos)
    with headrace.ImageDataset(photos) as dataset:
        counts = np.bincount(np.asarray(dataset.targets)).tolist()
        assert (report.samples, report.fingerprint) == (24, dataset.fingerprint)
        assert report.classes == dict(zip(dataset.classes, counts, strict=True))
    assert (
        report.stored == sum(path.stat().st_size for path in photos.rglob("*.*"))
        and not report.is_estimate
    )
    assert report.details["pixels"]["median"] == "64 x 48" and not report.advice


def test_sizes_of_many_files_are_sampled(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.inspecting.sizes._COUNTED", 10)
    monkeypatch.setattr("headrace.inspecting.sizes._SAMPLED", 12)
    report = inspect(photos)
    assert report.is_estimate and report.stored == pytest.approx(
        sum(path.stat().st_size for path in photos.rglob("*.*")), rel=0.3
    )
    assert report.samples == 24


def test_images_that_lie_beside_and_broken_ones(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("L", (30, 20)).save(tmp_path / "a" / "1.png")
    Image.new("L", (30, 20)).save(tmp_path / "2.png")
    (tmp_path / "3.jpg").write_bytes(b"no image")
    (tmp_path / "notes.txt").write_text("x")
    report = inspect(tmp_path)
    assert report.classes is None and "beside the class folders" in report.notes[0]
    assert (
        report.notes[1].startswith("1 of 3 images that were looked at can't be opened; the first: ")
        and "3.jpg" in report.notes[1]
    )
    assert report.details["other files"] == {".txt": 1} and report.details["modes"] == {"L": 2}


def test_large_photographs_are_to_be_made_smaller(tmp_path: Path) -> None:
    for number in range(3):
        Image.effect_noise((3000, 2000), 50).convert("RGB").save(tmp_path / f"{number}.jpg")
    (advice,) = inspect(tmp_path).advice
    assert (
        advice.command
        == f"headrace pack {tmp_path} {tmp_path.name}-packed.h5 --store jpeg --max-size 512"
    )


def test_texts_tell_their_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Straße\n".encode("latin-1"))
    report = inspect(tmp_path)
    assert (
        report.details["encoding"] == "cp1252"
        and report.opens_as == f"headrace.TextDataset('{tmp_path}', encoding='cp1252')"
    )
    assert "byte 0xdf at offset 4 is no UTF-8" in report.notes[0] and report.samples == 1
    with eval(report.opens_as, {"headrace": headrace}) as dataset:
        assert len(dataset) == 1
    (tmp_path / "a.txt").write_bytes("Straße\n".encode("utf-16"))
    assert inspect(tmp_path).details["encoding"] == "utf-16"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz", "b.tsv"])
def test_records_are_counted(name: str, tmp_path: Path) -> None:
    if "json" in name:
        text = (
            "".join(
                json.dumps({"text": f"row {number}", "label": number}) + "\n"
                for number in range(30)
            )
            + "\n"
        )
    else:
        text = "text\tlabel\n" * (".tsv" in name) + "text,label\n" * (".csv" in name)
        text += "".join(
            f"row {number}{',' if '.csv' in name else chr(9)}{number}\n" for number in range(30)
        )
    (tmp_path / name).write_bytes(
        gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    )
    report = inspect(tmp_path / name)
    with headrace.TextDataset(tmp_path / name, cache_dir=tmp_path / "cache") as dataset:
        assert (report.samples, report.samples_estimated) == (len(dataset), False) == (30, False)
        assert report.fingerprint in (None, dataset.fingerprint) and (
            report.fingerprint is None
        ) == name.endswith(".gz")
    assert report.details["fields"] == {"text": "str", "label": "int" if "json" in name else "str"}


def test_chats_are_told_by_their_messages(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(chat)}\n" * 3 + '{"messages": [')
    report = inspect(tmp_path)
    assert (
        report.details["chats"] == {"looked at": 3, "turns": {"user": 3, "assistant": 3}}
        and report.samples == 4
    )
    assert report.samples_are == "one chat a sample"
    with eval(report.opens_as, {"headrace": headrace, "tokenizer": ChatTokenizer()}) as dataset:
        assert dataset.is_of_chats and len(dataset) == 4
    (tmp_path / "a.jsonl").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "a.jsonl").rename(tmp_path / "a.jsonl.gz")
    report = inspect(tmp_path)
    assert (
        report.details["chats"]["looked at"] == 3
        and "headrace.pack(headrace.TextDataset(" in report.advice[0].code
    )


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", '{"text": "mill", "n": 3}\n'), ("a.csv", "text,n\nmill,3\n")]
)
def test_a_mark_is_no_part_of_the_first_field(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    report = inspect(tmp_path / name)
    assert (
        report.details["encoding"] == "utf-8 with a mark"
        and list(report.details["fields"]) == ["text", "n"]
        and report.samples == 1
    )


def test_records_of_large_files_are_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.inspecting.texts._SCANNED", 1000)
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"row {number % 10}"}) + "\n" for number in range(5000))
    )
    report = inspect(tmp_path / "a.jsonl")
    assert (
        report.samples_estimated
        and report.samples == pytest.approx(5000, rel=0.01)
        and report.fingerprint is None
    )


def shard(path: Path, samples: int) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(samples):
            for ending, data in (("jpg", b"x" * 2000), ("cls", b"3")):
                member = tarfile.TarInfo(f"{number:04}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def test_tar_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        shard(tmp_path / f"{number}.tar", 40)
    report = inspect(tmp_path)
    assert (report.format, report.files, report.samples, report.details["members"]) == (
        "tar shards",
        3,
        120,
        ["jpg", "cls"],
    )
    with headrace.StreamingDataset(str(tmp_path)) as dataset:
        assert report.fingerprint == dataset.fingerprint
    monkeypatch.setattr("headrace.inspecting.shards._SCANNED", 1000)
    monkeypatch.setattr("headrace.inspecting.shards._HEAD", 50_000)
    report = inspect(tmp_path)
    assert (
        report.samples_estimated
        and report.samples == pytest.approx(120, rel=0.1)
        and report.fingerprint is None
    )


def test_remote_files_are_those_of_this_machine(photos: Path, tmp_path: Path) -> None:
    shard(tmp_path / "a.tar", 30)
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"row {number % 10}"}) + "\n" for number in range(50))
    )
    Image.new("L", (30, 20)).save(tmp_path / "a.png")
    with RangeServer(tmp_path) as server:
        for name in ("a.tar", "a.jsonl", "a.png"):
            near, far = (
                inspect(tmp_path / name),
                inspect(f"{server.url}/{name}", reach=RemoteOptions(cache_dir=tmp_path / "cache")),
            )
            assert (near.format, near.samples, near.stored) == (
                far.format,
                far.samples,
                far.stored,
            ), name


@pytest.mark.parametrize(
    ("name", "text"),
    [("bmi.csv", "BMI,text\n22,hello\n"), ("bmw.txt", "BMW made this, and it goes on and on.\n")],
)
def test_texts_that_begin_as_bitmaps_do(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert inspect(tmp_path / name).samples == 1


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_bitmaps_are_known(mode: str, tmp_path: Path) -> None:
    Image.new(mode, (8, 8)).save(tmp_path / "a.bmp")
    assert inspect(tmp_path / "a.bmp").samples == 1
    (tmp_path / "a.bmp").rename(tmp_path / "a.csv")
    with pytest.raises(
        headrace.FormatError, match=r"a.csv is a BMP image, though its name says texts"
    ):
        inspect(tmp_path / "a.csv")


def test_the_field_of_the_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("body,label\nhello,1\n")
    report = inspect(tmp_path / "a.csv")
    assert (
        report.opens_as == f"headrace.TextDataset({str(tmp_path / 'a.csv')!r}, text_field='body')"
    )
    assert (
        "no field is called 'text': name that of the text by text_field=, one of body, label"
        in report.notes
    )
    assert eval(report.opens_as).text_of(0) == "hello"
