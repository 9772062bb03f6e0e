"""Shards of MosaicML Streaming and LitData: their own files, damaged ones, and on a server."""

from __future__ import annotations

import base64
import io
import json
import shutil
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headrace import (
    BudgetError,
    ConfigError,
    DataNotFoundError,
    FormatError,
    HeadraceWarning,
    ImageDataset,
    SampleError,
    TextDataset,
    create_dataloader,
    open_dataset,
)
from headrace.datasets.columns import ColumnsDataset
from headrace.formats.shards import heads
from headrace.testing.contract import MODES, DatasetContract, same
from tests.data.make import make_mds
from tests.datasets.remote_contract import RemoteDatasetContract
from tests.servers.ranges import RangeServer

DATA = Path(__file__).parents[2] / "data"
"""What mosaicml-streaming 0.13.0 and litdata wrote, and what went into it, or they read of it."""
KINDS = (
    *("mds/plain", "mds/zstd"),
    *("litdata/plain-0.2.40", "litdata/plain-0.2.76"),
    *("litdata/zstd-0.2.40", "litdata/sample-0.2.76"),
)
COLUMNS = {"id": ("int", 8), "text": ("str", None), "x": ("ndarray:float32:3", 12)}
IN_ORDER: Any = {"batch_size": 7, "shuffle": False, "num_workers": 0, "collate_fn": "list"}
SHARDS = (7, 0, 5, 12)


def sample(number: int) -> tuple[bytes, bytes, bytes]:
    text = f"{'mill ' * (number % 4)}wheel {number}"
    return struct.pack("<q", number), text.encode(), np.float32([number, 1, 2]).tobytes()


def write(folder: Path, compression: str = "", **changed: bytes) -> Path:
    """24 samples in four shards, one of them empty; `changed`: the text of a sample, by s + its
    number.
    """
    numbers = iter(range(sum(SHARDS)))
    shards = []
    for count in SHARDS:
        rows = []
        for number in [next(numbers) for _ in range(count)]:
            key, text, row = sample(number)
            rows.append((key, changed.get(f"s{number}", text), row))
        shards.append(rows)
    return make_mds(folder, COLUMNS, shards, compression)


def plain(value: Any) -> Any:
    """A value as `expected.json` has it, where images are pixels."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Decimal):
        return {"decimal": str(value)}
    return value


def rgb(said: dict[str, Any]) -> torch.Tensor:
    if "bytes" in said:
        image = Image.open(io.BytesIO(base64.b64decode(said["bytes"])))
    else:
        pixels = base64.b64decode(said["pixels"])
        image = Image.frombytes(said["mode"], tuple(said["size"]), pixels)
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def is_equal(value: Any, said: Any) -> bool:
    if isinstance(said, list):
        return all(is_equal(*pair) for pair in zip(value, said, strict=True))
    if isinstance(value, torch.Tensor) and isinstance(said, dict) and "dtype" not in said:
        return torch.equal(value, rgb(said))
    if isinstance(said, int) and isinstance(value, torch.Tensor):
        return bool(value.dtype == torch.int64 and value == said)
    return bool(plain(value) == said)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_its_own_library(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = json.loads((DATA / kind).with_name("expected.json").read_text())
    for mode in MODES:
        monkeypatch.setattr(heads, "_LARGE", 0 if mode in ("lazy", "streaming") else 1 << 16)
        with open_dataset(DATA / kind, loading_mode=mode, progress=False) as dataset:
            [samples] = create_dataloader(dataset, **IN_ORDER)
        for got, said in zip(samples, expected, strict=True):
            assert sorted(got) == sorted(said)
            wrong = [name for name in said if not is_equal(got[name], said[name])]
            assert not wrong, mode


def row(number: int, kind: str) -> dict[str, Any]:
    """A sample of LitData's frames or tables."""
    head = {"id": torch.tensor(number), "text": sample(number)[1].decode()}
    if kind == "batch":
        return {**head, "x": torch.arange(number % 5, dtype=torch.float32)}
    box = {"w": torch.tensor(number), "h": torch.tensor(-number / 2, dtype=torch.float64)}
    ids = torch.arange(number % 3)
    raw = bytes([number] * 3)
    return {**head, "ok": torch.tensor(number % 2 == 0), "ids": ids, "raw": raw, "box": box}


@pytest.mark.parametrize("kind", ["batch", "arrow", "arrow-zstd"])
def test_frames_and_tables_of_litdata(kind: str) -> None:
    for mode in MODES:
        folder = DATA / f"litdata/{kind}-0.2.76"
        with open_dataset(folder, loading_mode=mode, progress=False) as dataset:
            batches = list(create_dataloader(dataset, **IN_ORDER))
        samples = [one for batch in batches for one in batch]
        assert same(samples, [row(number, kind) for number in range(len(dataset))])


def test_chunks_on_a_server(memory: Any) -> None:
    for kind in ("plain-0.2.40", "batch-0.2.76", "arrow-0.2.76"):
        for path in (DATA / "litdata" / kind).iterdir():
            memory.pipe_file(f"/{kind}/{path.name}", path.read_bytes())
        memory.pipe_file(f"/{kind}/README.md", b"What this is.")
        with open_dataset(DATA / "litdata" / kind) as local:
            assert same(list(open_dataset(f"memory://{kind}")), list(local))


def test_trees_and_tokens_of_litdata() -> None:
    pairs = open_dataset(DATA / "litdata/tuples-0.2.40")
    assert [(int(one["0"]), one["1"]) for one in pairs] == [(n, "x" * n) for n in range(5)]
    documents = [list(range(n * 3, n * 3 + n % 7 + 1)) for n in range(9)]
    tokens = open_dataset(DATA / "litdata/tokens-0.2.40", columns="value")
    assert [one.tolist() for one in tokens] == documents and tokens[1].dtype == torch.int32
    texts = TextDataset(DATA / "litdata/tokens-0.2.40", column="value")
    assert [one["input_ids"].tolist() for one in texts] == documents


@pytest.mark.slow
class TestContract(DatasetContract):
    compression = ""

    @pytest.fixture(autouse=True)
    def _written(self, tmp_path: Path) -> None:
        self.folder = write(tmp_path / "data", self.compression)

    def make(self, **options: Any) -> ColumnsDataset:
        return ColumnsDataset(self.folder, **options)

    def make_bad(self, **options: Any) -> tuple[ColumnsDataset, list[int]]:
        write(self.folder, self.compression, s9=b"\xff", s20=b"\xc3")
        return self.make(**options), [9, 20]


class TestCompressed(TestContract):
    compression = "gz"


class TestFrames(TestContract):
    @pytest.fixture(autouse=True)
    def _written(self, tmp_path: Path) -> None:
        self.folder = copied("batch-0.2.76", tmp_path)

    def make_bad(self, **options: Any) -> tuple[ColumnsDataset, list[int]]:
        overwrite(self.folder / "chunk-0-0.bin", FRAME, bytes(4))
        return self.make(**options), [0, 1, 2, 3]


@pytest.mark.slow
class TestRemote(RemoteDatasetContract):
    data = tuple(f"shard.{number:05d}.mds" for number in range(len(SHARDS)))
    names = (*data, "index.json")
    has_index_beside = False

    def write(self, folder: Path) -> None:
        write(folder)

    def make(self, paths: list[str], **options: Any) -> ColumnsDataset:
        return ColumnsDataset([path for path in paths if ".mds" in path], **options)


def test_columns_are_chosen(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    assert open_dataset(folder, columns="text")[5] == "mill wheel 5"
    assert list(open_dataset(folder, columns=["x", "id"])[0]) == ["x", "id"]
    texts = TextDataset(folder, column="text", unit="record")
    assert texts[5]["input_ids"].tolist() == [ord(one) + 2 for one in "mill wheel 5"]
    pairs = ImageDataset(DATA / "mds/plain", column="o_jpeg", targets="c_int", image_size=8)
    assert [target for _, target in pairs] == [-3, -2, -1, 0, 1, 2, 3]
    assert pairs[3][0].shape == (3, 8, 8)
    rows = next(iter(create_dataloader(open_dataset(folder, columns="x"), shuffle=False)))
    assert torch.equal(rows[:, 0], torch.arange(24.0))


def test_other_classes_name_what_reads_shards(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    with pytest.raises(FormatError, match="open_dataset"):
        TextDataset(folder)
    with pytest.raises(DataNotFoundError, match="use open_dataset"):
        ImageDataset(folder)
    with pytest.raises(ConfigError, match="list of names"):
        open_dataset(folder, columns=5)


def test_an_index_means_its_shards_and_no_others(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    chunks = DATA / KINDS[2]
    with RangeServer(folder) as mds, RangeServer(chunks) as litdata:  # which list no folders
        for place in (folder, chunks, mds.url, litdata.url):
            with open_dataset(f"{place}/index.json", cache_dir=tmp_path / "cache") as dataset:
                assert type(dataset) is ColumnsDataset and len(dataset) in (7, 24)
                assert len(dataset[3]) > 1
    assert len(TextDataset(folder / "index.json")) == 1


def test_streams_are_one_dataset(tmp_path: Path) -> None:
    write(tmp_path / "data/a")
    write(tmp_path / "data/b", "gz")
    dataset = open_dataset(tmp_path / "data")
    assert [int(one["id"]) for one in dataset] == [*range(24)] * 2
    assert int(dataset.blocks().sum()) == len(dataset) == 48
    merged = []
    for part in "ab":  # as `merge_index` writes it
        index = tmp_path / "data" / part / "index.json"
        for entry in json.loads(index.read_text())["shards"]:
            for data in filter(None, (entry["raw_data"], entry["zip_data"])):
                data["basename"] = f"{part}/{data['basename']}"
            merged.append(entry)
        index.unlink()
    (tmp_path / "data/index.json").write_text(json.dumps({"version": 2, "shards": merged}))
    assert same(list(open_dataset(tmp_path / "data")), list(dataset))


def change(folder: Path, *numbers: int, of: str = "raw_data", **said: Any) -> None:
    """Has the index say something else of some shards, and of their files `of`."""
    index = json.loads((folder / "index.json").read_text())
    for entry in (index["shards"][number] for number in numbers):
        for name, value in said.items():
            at = entry[of] if name in ("bytes", "basename") else entry
            at[name] = value
    (folder / "index.json").write_text(json.dumps(index))


ALL = range(4)
LZ4 = {"compression": "lz4", "zip_data": {"basename": "a.mds.lz4", "bytes": 1}}
LARGE = ["int", "str", "ndarray:uint8:1000000000000"]
CHANGES: list[tuple[str, Any, dict[str, Any]]] = [
    ("3", [2], {"version": 3}),
    ("abc", [2], {"column_names": ["abc"] * 3}),
    ("-1", [0], {"samples": -1}),
    ("samples", [0], {"samples": 1 << 30}),
    ("bytes", [0], {"bytes": 1 << 70}),
    ("leads out", [0], {"basename": "../data/shard.00000.mds"}),
    ("leads out", [0], {"basename": "/etc/passwd"}),
    ("leads out", [0], {"basename": "a::file:b"}),
    ("lz4", [0], {**LZ4, "raw_data": {"basename": "a.mds", "bytes": 1}}),
    ("one name", ALL, {"column_names": ["a", "b", "a"]}),
    ("'id'", ALL, {"column_sizes": ["8", None, 12]}),
    ("'x'", ALL, {"column_encodings": LARGE, "column_sizes": [8, None, None]}),
    ("pkl", ALL, {"column_encodings": ["int", "pkl", "str"]}),
    ("ndarray:object", ALL, {"column_encodings": ["int", "ndarray:object", "str"]}),
]


@pytest.mark.parametrize(("named", "numbers", "said"), CHANGES)
def test_an_index_that_lies_is_an_error(
    named: str, numbers: Any, said: dict[str, Any], tmp_path: Path
) -> None:
    folder = write(tmp_path / "data")
    change(folder, *numbers, **said)
    with pytest.raises(FormatError, match=named):
        open_dataset(folder)


def test_an_index_that_is_none_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    for text, named in (("{", "index"), ("{}", "shards"), ("[" * 100_000, "Recursion")):
        (folder / "index.json").write_text(text)
        with pytest.raises(FormatError, match=named):
            open_dataset(folder)
    (folder / "index.json").unlink()
    with pytest.raises(DataNotFoundError, match="index"):
        open_dataset(folder)


@pytest.mark.parametrize(("compression", "large"), [("", 1 << 16), ("", 0), ("gz", 0)])
def test_a_bad_shard_is_an_error_of_its_samples(
    compression: str, large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "_LARGE", large)
    whole = write(tmp_path / "data", compression)
    ending = ".mds.gz" if compression else ".mds"
    shard = whole / f"shard.00000{ending}"
    data = shard.read_bytes()
    contents = [data[:-9], data[: len(data) // 2] + b"\xff" * 9 + data[len(data) // 2 + 9 :], b""]
    contents.append(data[:8] + b"\xff" * 4 + data[12:])  # where sample 1 begins
    for content in [*contents, None]:
        shard.unlink(missing_ok=True)
        if content is not None:
            shard.write_bytes(content)
        with open_dataset(whole) as dataset:
            assert int(dataset[7]["id"]) == 7
            with pytest.raises((SampleError, DataNotFoundError), match=r"shard\.00000"):
                [dataset[number] for number in range(7)]
        with open_dataset(whole, on_error="skip") as dataset:
            loader = create_dataloader(dataset, batch_size=24, shuffle=False, num_workers=0)
            ids = torch.cat([batch["id"] for batch in loader]).tolist()
            assert set(range(7, 24)) <= set(ids) < set(range(24))


def test_counts_that_lie_take_no_memory(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", "gz")
    change(folder, 0, of="zip_data", bytes=1 << 40)
    with open_dataset(folder) as dataset, pytest.raises(SampleError, match=r"1,099,511,627,776"):
        dataset[0]
    folder = write(tmp_path / "other", "gz")
    change(folder, 0, bytes=1 << 31)
    with pytest.raises(BudgetError):
        open_dataset(folder, max_memory_usage="1GB")


@pytest.mark.parametrize("compression", ["", "gz"])
def test_bad_shards_on_a_server_are_skipped(
    compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.io.remote.client._WAIT", 0.002)
    folder = write(tmp_path / "data", compression)
    names = [path.name for path in sorted(folder.glob("shard.*"))]
    (folder / names[0]).unlink()
    data = (folder / names[2]).read_bytes()
    (folder / names[2]).write_bytes(data[:-9])
    with RangeServer(folder) as server:
        urls = [f"{server.url}/{name}" for name in names]
        options = {"loading_mode": "streaming", "retries": 1, "cache_dir": tmp_path / "cache"}
        with open_dataset(urls, on_error="skip", **options) as dataset:
            loader = create_dataloader(dataset, batch_size=24, shuffle="block", num_workers=0)
            assert sorted(next(iter(loader))["id"].tolist()) == list(range(12, 24))
            loader.close()
        signed = [open_dataset([f"{url}?key={key}" for url in urls]) for key in "ab"]
        assert signed[0].fingerprint == signed[1].fingerprint == dataset.fingerprint


def test_some_shards_of_a_folder_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"shard\.00001.*subset"):
        open_dataset(write(tmp_path / "data") / "shard.00000.mds")


def test_splits_and_other_columns_are_named(tmp_path: Path) -> None:
    write(tmp_path / "data/train")
    write(tmp_path / "data/val")
    with pytest.warns(HeadraceWarning, match="train and val"):
        open_dataset(tmp_path / "data")
    make_mds(tmp_path / "data/z", {"id": ("int", 8)}, [[(bytes(8),)]])
    with pytest.raises(FormatError, match="by itself"):
        open_dataset(tmp_path / "data")


@pytest.mark.parametrize("option", ["encryption", "compression_level"])
def test_chunks_that_are_not_read_are_named(option: str, tmp_path: Path) -> None:
    folder = copied("tuples-0.2.40", tmp_path)
    index = json.loads((folder / "index.json").read_text())
    index["config"][option] = {"a": "int"}
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=option):
        open_dataset(folder)


TABLE = 24 + 4 * 11
"""Where the table of the frames begins in the first chunk, and the first frame."""
FRAME = TABLE + 3 * 24
FIELDS = ((0, 7), (8, 2), (12, 9), (16, 5), (20, 2), (24, 1), (28, 1 << 31))
FRAMES = ((0, 1), (4, 3), (8, 9), (8, 1 << 20), (12, 1 << 31), (16, 1 << 20), (20, 1 << 30))


def copied(kind: str, to: Path) -> Path:
    return Path(shutil.copytree(DATA / "litdata" / kind, to / "data", dirs_exist_ok=True))


def overwrite(path: Path, at: int, data: bytes) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:at] + data + old[at + len(data) :])


def test_frames_that_lie_are_errors_of_their_samples(tmp_path: Path) -> None:
    for at, value in (*FIELDS, *((TABLE + at, value) for at, value in FRAMES)):
        folder = copied("batch-0.2.76", tmp_path)
        overwrite(folder / "chunk-0-0.bin", at, struct.pack("<I", value))
        with open_dataset(folder) as dataset:
            assert int(dataset[10]["id"]) == 10
            with pytest.raises(SampleError, match="table of frames"):
                dataset[3]
    folder = copied("batch-0.2.76", tmp_path)
    overwrite(folder / "chunk-0-0.bin", 40, struct.pack("<7I", *[1 << 31] * 7))
    overwrite(folder / "chunk-0-0.bin", TABLE + 20, struct.pack("<I", 1 << 31))
    for at in (44, 68):
        overwrite(folder / "chunk-0-0.bin", TABLE + at, bytes(4))
    with pytest.raises(BudgetError):
        open_dataset(folder, max_memory_usage="1GB")
    bomb = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 40)
    for data, said in ((bomb, "1,099,511,627,776"), (bytes(13), "damaged")):
        folder = copied("sample-0.2.76", tmp_path)
        overwrite(folder / "chunk-0-0.bin", 16, data)
        with open_dataset(folder) as dataset, pytest.raises(SampleError, match=said):
            dataset[0]


def test_tables_that_lie_are_errors(tmp_path: Path) -> None:
    for chunk, at, data, said in (
        ("1.bin", -12, struct.pack("<I", 1 << 31), "no table"),
        ("1.bin", -6, b"!", "no table"),
        ("0.bin", -12, struct.pack("<I", 99), "does not end|damaged"),
        ("0.bin", 40, b"A" * 900, "damaged"),
    ):
        path = copied("arrow-0.2.76", tmp_path) / f"chunk-0-{chunk}"
        overwrite(path, at % path.stat().st_size, data)
        with pytest.raises(FormatError, match=rf"chunk-0-{chunk}.*{said}"):
            open_dataset(tmp_path / "data")
    folder = copied("arrow-0.2.76", tmp_path)
    index = (folder / "index.json").read_text()
    (folder / "index.json").write_text(index.replace('"chunk_size": 7', '"chunk_size": 6'))
    with pytest.raises(FormatError, match=r"7 samples, and index\.json says 6"):
        open_dataset(folder)
