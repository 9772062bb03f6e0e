"""What is told of images, texts and tars is what headrace's datasets give."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import headrace
from headrace.inspecting import inspect
from headrace.inspecting.texts import inspect_texts
from headrace.io.remote.options import RemoteOptions
from tests.data.make import make_tar
from tests.datasets.text.chat_tokenizer import chat_tokenizer
from tests.inspecting.opening import opened
from tests.servers.ranges import RangeServer


def test_photographs(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = inspect(photos)
    with opened(report) as dataset:
        counts = np.bincount(np.asarray(dataset.targets)).tolist()
        assert report.classes == dict(zip(dataset.classes, counts, strict=True))
    stored = sum(path.stat().st_size for path in photos.rglob("*.*"))
    assert (report.samples, report.stored, report.is_estimate) == (24, stored, False)
    assert report.details["pixels"]["median"] == "64 x 48"
    assert not report.advice
    monkeypatch.setattr("headrace.inspecting.sizes._COUNTED", 10)
    monkeypatch.setattr("headrace.inspecting.sizes._SAMPLED", 12)
    report = inspect(photos)
    assert report.is_estimate
    assert report.stored == pytest.approx(stored, rel=0.3)
    assert report.samples == 24


def test_images_that_lie_beside_and_broken_ones(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("L", (30, 20)).save(tmp_path / "a" / "1.png")
    Image.new("L", (30, 20)).save(tmp_path / "2.png")
    (tmp_path / "3.jpg").write_bytes(b"no image")
    (tmp_path / "notes.txt").write_text("x")
    report = inspect(tmp_path)
    assert report.classes is None
    assert "beside the class folders" in report.notes[0]
    assert report.notes[1].startswith("1 of 3 images")
    assert "3.jpg" in report.notes[1]
    assert report.details["other files"] == {".txt": 1}
    assert report.details["modes"] == {"L": 2}


@pytest.mark.slow
def test_large_photographs_are_to_be_made_smaller(tmp_path: Path) -> None:
    for number in range(3):
        Image.effect_noise((3000, 2000), 50).convert("RGB").save(tmp_path / f"{number}.jpg")
    (advice,) = inspect(tmp_path).advice
    pack = f"headrace pack {tmp_path} {tmp_path.name}-packed.h5"
    assert advice.command == f"{pack} --store jpeg --max-size 512"


def test_texts_tell_their_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("Straße\n".encode("latin-1"))
    report = inspect(tmp_path)
    assert report.details["encoding"] == "cp1252"
    assert report.opens_as == f"headrace.TextDataset('{tmp_path}', encoding='cp1252')"
    assert "byte 0xdf at offset 4" in report.notes[0]
    with opened(report):
        pass
    path.write_bytes("Straße\n".encode("utf-16"))
    assert inspect(tmp_path).details["encoding"] == "utf-16"
    path.write_text("BMW made this, and it goes on and on.\n")  # as bitmaps begin
    assert inspect(path).samples == 1
    for name, text in (("a.jsonl", '{"text": "mill", "n": 3}\n'), ("a.csv", "text,n\nmill,3\n")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        report = inspect(tmp_path / name)
        assert report.details["encoding"] == "utf-8 with a mark"
        assert list(report.details["fields"]) == ["text", "n"]
        assert report.samples == 1


def test_records_are_counted(tmp_path: Path, own_cache: None) -> None:
    for name in ("a.jsonl", "a.jsonl.gz", "a.csv", "b.tsv"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        if "json" in name:
            rows = [json.dumps({"text": f"row {number}", "label": number}) for number in range(30)]
        else:
            comma = "," if ".csv" in name else "\t"
            rows = [f"text{comma}label", *(f"row {number}{comma}{number}" for number in range(30))]
        data = ("\n".join(rows) + "\n\n" * ("json" in name)).encode()
        is_packed = name.endswith(".gz")
        (folder / name).write_bytes(gzip.compress(data) if is_packed else data)
        report = inspect(folder / name)
        with opened(report):
            assert (report.samples, report.samples_estimated) == (30, False)
            assert (report.fingerprint is None) == is_packed
        kind = "int" if "json" in name else "str"
        assert report.details["fields"] == {"text": "str", "label": kind}
    (tmp_path / "long.csv").write_text(f"text,label\n{'a' * 200_000},1\n")
    assert inspect(tmp_path / "long.csv").details["fields"] == {"text": "str", "label": "str"}


def test_chats_are_told_by_their_messages(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(chat)}\n" * 3 + '{"messages": [')
    report = inspect(tmp_path)
    assert report.details["chats"] == {"looked at": 3, "turns": {"user": 3, "assistant": 3}}
    assert report.samples == 4
    assert report.samples_are == "one chat a sample"
    with opened(report, tokenizer=chat_tokenizer()) as dataset:
        assert dataset.is_of_chats
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    report = inspect(tmp_path)
    assert report.details["chats"]["looked at"] == 3
    assert "headrace.pack(headrace.TextDataset(" in report.advice[0].code


def test_records_of_large_files_are_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.inspecting.texts._SCANNED", 1000)
    rows = [json.dumps({"text": f"row {number % 10}"}) + "\n" for number in range(5000)]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    report = inspect(tmp_path / "a.jsonl")
    assert report.samples_estimated
    assert report.samples == pytest.approx(5000, rel=0.01)
    assert report.fingerprint is None


def test_the_field_of_the_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("BMI,body\n22,hello\n")  # as bitmaps begin
    report = inspect(path)
    assert any("no field is called 'text'" in note for note in report.notes)
    assert report.opens_as == f"headrace.TextDataset({str(path)!r}, text_field='BMI')"
    path.write_text("body,label\nhello,1\n")
    with opened(inspect(path)) as dataset:
        assert dataset.text_of(0) == "hello"


def shard(path: Path, samples: int) -> None:
    pair = (("jpg", b"x" * 2000), ("cls", b"3"))
    make_tar(path, [(f"{n:04}.{ending}", data) for n in range(samples) for ending, data in pair])


def test_tar_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        shard(tmp_path / f"{number}.tar", 40)
    report = inspect(tmp_path)
    assert (report.format, report.files, report.samples) == ("tar shards", 3, 120)
    assert report.details["members"] == ["jpg", "cls"]
    with headrace.StreamingDataset(str(tmp_path)) as dataset:
        assert report.fingerprint == dataset.fingerprint
    old = bytearray((tmp_path / "0.tar").read_bytes())
    old[257:265] = bytes(8)  # as tars were before they had a magic; the checksum is a sum of bytes
    total = sum(old[:148]) + sum(old[156:512]) + 8 * ord(" ")
    old[148:156] = f"{total:06o}\0 ".encode()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "0.tar").write_bytes(old)
    assert inspect(tmp_path / "old" / "0.tar").samples == 40
    (tmp_path / "old" / "0.tar").unlink()
    monkeypatch.setattr("headrace.inspecting.shards._SCANNED", 1000)
    monkeypatch.setattr("headrace.inspecting.shards._HEAD", 50_000)
    report = inspect(tmp_path)
    assert report.samples_estimated
    assert report.samples == pytest.approx(120, rel=0.1)
    assert report.fingerprint is None


def test_remote_files_are_those_of_this_machine(tmp_path: Path) -> None:
    shard(tmp_path / "a.tar", 30)
    (tmp_path / "a.jsonl").write_text('{"text": "a row"}\n' * 50)
    Image.new("1", (30, 20)).save(tmp_path / "a.bmp")
    reach = RemoteOptions(cache_dir=tmp_path / "cache")
    with RangeServer(tmp_path) as server:
        urls = []
        for name in ("a.json", "b.json"):
            (tmp_path / name).write_text('[{"text": "a row"}]')
            urls.append(f"{server.url}/{name}")
        report = inspect_texts(urls, reach)
        assert report.samples_are == "one record a sample" and report.files == 2
        for name, samples in (("a.tar", 30), ("a.jsonl", 50), ("a.bmp", 1)):
            near, far = inspect(tmp_path / name), inspect(f"{server.url}/{name}", reach=reach)
            assert near.samples == far.samples == samples
            assert (near.format, near.stored) == (far.format, far.stored)
