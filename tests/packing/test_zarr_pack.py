"""Packs to Zarr: one group whose shards are the parts, read by zarr-python alone, and equal to
what was packed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import shutil
import threading
import warnings
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import blosc
from torch.utils.data import Dataset

from headrace import (
    HDF5Dataset,
    ImageDataset,
    StreamingDataset,
    TextDataset,
    ZarrDataset,
    create_dataloader,
    open_dataset,
    pack,
)
from headrace.errors import (
    ConfigError,
    DataNotFoundError,
    FileChangedError,
    FormatError,
    HeadraceWarning,
    SampleError,
    TargetExistsError,
)
from headrace.packing import join, pack_status, verify
from headrace.packing.zarr.layout import ArrayLayout, flat_options, rows_options, zarr_layout
from headrace.packing.zarr.shard import encoded
from tests.packing.shared import contents, kill_four_times
from tests.servers.s3 import S3Server

pytestmark = pytest.mark.quick_every(8)

SHARD = 16_000
"""Bytes: the 24 photographs of the fixture become several parts."""
SIZE = (20, 30)
STORES = ("encoded", "decoded", "jpeg")


class Rows(Dataset[Any]):
    """Arrays of one shape, with a target each."""

    def __init__(
        self,
        count: int = 30,
        shape: tuple[int, ...] = (3, 4),
        dtype: str = "<f4",
        ragged: int | None = None,
    ) -> None:
        self.count, self.shape, self.dtype, self.ragged = count, shape, dtype, ragged

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        shape = (index, *self.shape[1:]) if index == self.ragged else self.shape
        return np.full(shape, index, self.dtype), index * 7


class Dicts(Rows):
    """Dicts of arrays."""

    def __getitem__(self, index: int) -> Any:
        return {"a": np.zeros(2), "b": np.zeros(3)}


@pytest.fixture(scope="module", params=STORES)
def store(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def packed(photos: Path, store: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The photographs, packed in one go; not to be written to."""
    return to_zarr(photos, tmp_path_factory.mktemp(store) / "whole", store)


def opened(path: Any, **options: Any) -> ImageDataset:
    return ImageDataset(path, image_size=SIZE, normalize=False, **options)


def to_zarr(photos: Path, out: Any, store: str, **options: Any) -> Any:
    with opened(photos) as source:
        return pack(source, out, store=store, format="zarr", **{"shard_size": SHARD, **options})  # type: ignore[call-overload]


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 100_000), st.integers(1, 3_000_000))
def test_rows_of_parts_are_whole_chunks(count: int, row: int, shard_size: int) -> None:
    options = rows_options((count, row), np.dtype(np.uint8), shard_size)
    parts = -(-count // options["samples"])
    layout = zarr_layout(count, parts, options)
    assert (
        options["samples"] % options["chunk"] == 0
        and parts * options["samples"] >= count > (parts - 1) * options["samples"]
    )
    assert options["chunk"] * row <= max(row, 64 << 10) and layout.data.shape == (count, row)
    assert options["samples"] * row < shard_size + 2 * options["chunk"] * row + row


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60), st.integers(1, 10**7))
def test_flat_parts_fit_their_shards(sizes: list[int], shard_size: int) -> None:
    options = flat_options(np.array(sizes), np.array(sizes), shard_size)
    step = options["samples"]
    parts = [sum(sizes[start : start + step]) for start in range(0, len(sizes), step)]
    assert (
        max(parts) <= options["shard"] < max(parts) + options["chunk"]
        and options["shard"] % options["chunk"] == 0
    )


def test_zarr_python_reads_it_alone(photos: Path, packed: Path, store: str) -> None:
    with opened(photos) as source, warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(packed / "data.zarr", mode="r")
        arrays = {name: array[:] for name, array in group.arrays() if name != "data"}
        data: Any = group["data"]
        assert np.array_equal(arrays["targets"], source.targets)
        for index, (path, _) in enumerate(source.samples):
            name = (
                arrays["names"][arrays["name_starts"][index] : arrays["name_stops"][index]]
                .tobytes()
                .decode()
            )
            assert path.endswith(name)
            if store == "decoded":
                assert np.array_equal(data[index], source.pixels_of(index))
            else:
                image = data[arrays["starts"][index] : arrays["stops"][index]].tobytes()
                assert (
                    image == Path(path).read_bytes()
                    if store == "encoded"
                    else len(image) <= Path(path).stat().st_size
                )
        assert json.loads(group.attrs["headrace"])["fingerprint"] == source.fingerprint  # type: ignore[arg-type]


def test_each_part_has_objects_of_its_own(packed: Path) -> None:
    parts = pack_status(packed).parts
    assert parts > 2
    for folder in (path for path in (packed / "data.zarr").iterdir() if path.is_dir()):
        chunks = sorted(path.name for path in folder.iterdir() if path.name != "zarr.json")
        assert len(chunks) == parts and {name.split(".")[1] for name in chunks} == {
            str(part) for part in range(parts)
        }


def test_round_trip(photos: Path, packed: Path, store: str, tmp_path: Path) -> None:
    with opened(photos) as source, opened(pack(source, tmp_path / "one.h5", store=store)) as one:  # type: ignore[call-overload]
        for path in (packed, packed / "manifest.json", str(packed) + "/", packed / "data.zarr"):
            with opened(path) as copy, open_dataset(path) as found:
                assert isinstance(found, ImageDataset) and len(copy) == len(found) == len(source)
                assert copy.fingerprint == source.fingerprint and copy.classes == source.classes
                assert np.array_equal(copy.targets, source.targets)
                for index in range(len(source)):
                    assert (
                        torch.equal(copy[index][0], one[index][0])
                        and copy[index][1] == source[index][1]
                    )
                    assert Path(source.samples[index][0]).name in copy.source_of(index)


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached", "streaming"])
def test_batches_are_those_of_one_file(
    photos: Path, packed: Path, store: str, mode: str, tmp_path: Path
) -> None:
    with opened(photos) as source:
        one = pack(source, tmp_path / "one.h5", store=store)  # type: ignore[call-overload]

    def batches(path: Path) -> list[Any]:
        with opened(path, loading_mode=mode) as dataset:
            loader = create_dataloader(
                dataset, batch_size=5, shuffle=mode != "streaming", seed=3, num_workers=0
            )
            return [(images.clone(), targets.clone()) for images, targets in loader]

    for ours, theirs in zip(batches(packed), batches(one), strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_resumes_in_the_middle(packed: Path) -> None:
    with opened(packed) as dataset:
        loader = create_dataloader(dataset, batch_size=5, shuffle="block", seed=3, num_workers=0)
        whole = [targets.tolist() for _, targets in loader]
        first, batches = (
            create_dataloader(dataset, batch_size=5, shuffle="block", seed=3, num_workers=0),
            [],
        )
        for _, targets in first:
            batches.append(targets.tolist())
            if len(batches) == 2:
                break
        rest = create_dataloader(dataset, batch_size=5, shuffle="block", seed=3, num_workers=0)
        rest.load_state_dict(first.state_dict())
        assert batches + [targets.tolist() for _, targets in rest] == whole


@pytest.mark.parametrize("how", ["shares", "backwards", "threads", "processes"])
def test_same_bytes_whoever_packs(
    photos: Path, packed: Path, store: str, tmp_path: Path, how: str
) -> None:
    out, parts = tmp_path / "out", pack_status(packed).parts
    if how == "shares":
        for i in range(3):
            assert to_zarr(photos, out, store, part=f"{i}/3", workers=1) == out
            assert pack_status(out).joined == (i == 2) == (out / "data.zarr" / "zarr.json").exists()
    elif how == "backwards":
        for i in reversed(range(parts)):
            to_zarr(photos, out, store, parts=f"{i}:{i + 1}")
    elif how == "threads":
        with ThreadPoolExecutor(3) as executor:
            to_zarr(photos, out, store, executor=executor)
    else:
        to_zarr(photos, out, store, processes=2)
    assert contents(out) == contents(packed)


def test_same_call_goes_on(photos: Path, packed: Path, store: str, tmp_path: Path) -> None:
    out = Path(shutil.copytree(packed, tmp_path / "out"))
    (out / "manifest.json").unlink()
    data = sorted((out / "data.zarr" / "data").glob("c.*"))
    data[0].unlink()
    (out / "data.zarr" / "targets" / "c.1").unlink()
    with open(data[2], "ab") as file:
        file.write(b"x")
    (data[0].parent / f".{data[0].name}.0123abcd.part").write_bytes(b"of a job that was killed")
    before = {path: path.stat().st_mtime_ns for path in data[3:]}
    status = pack_status(out)
    assert (status.missing, status.stale, status.joined) == ([0], [1, 2], False)
    with pytest.raises(DataNotFoundError, match="not complete"):
        ImageDataset(out)
    with pytest.raises(DataNotFoundError, match="missing: 0"):
        join(out)
    to_zarr(photos, out, store)
    assert contents(out) == contents(packed)
    assert {path: path.stat().st_mtime_ns for path in data[3:]} == before, "finished parts stay"


def test_nobody_opens_what_is_packed_again(
    photos: Path, packed: Path, store: str, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(packed, tmp_path / "out"))
    for name in ("c.0", "c.1"):
        (out / "data.zarr" / "crc32" / name).unlink()
    to_zarr(photos, out, store, parts="0:1")
    assert pack_status(out).stale == [1] and not (out / "data.zarr" / "zarr.json").exists()
    with pytest.raises(DataNotFoundError, match="not complete"):
        ImageDataset(out)
    with pytest.raises((FormatError, DataNotFoundError)):
        ZarrDataset(out / "data.zarr", "data")
    to_zarr(photos, out, store)
    assert contents(out) == contents(packed)


def test_another_plan_is_refused(photos: Path, packed: Path, store: str, tmp_path: Path) -> None:
    out = Path(shutil.copytree(packed, tmp_path / "out"))
    with pytest.raises(TargetExistsError, match=r"shard_size: 16000 there, 30000 now"):
        to_zarr(photos, out, store, shard_size=30_000)
    with opened(photos) as source:
        with pytest.raises(TargetExistsError, match=r"format: zarr there, hdf5 now"):
            pack(source, out, store=store, shard_size=SHARD)  # type: ignore[call-overload]
        assert contents(out) == contents(packed)
        to_zarr(photos, out, store, shard_size=30_000, overwrite=True)
        assert contents(out) == contents(
            to_zarr(photos, tmp_path / "new", store, shard_size=30_000)
        )
        pack(source, out, store=store, shard_size=SHARD, overwrite=True)  # type: ignore[call-overload]
        assert not list(out.rglob("*.zarr")), "nothing is left of the other format"
        to_zarr(photos, out, store, overwrite=True)
    assert contents(out) == contents(packed)


def test_a_pack_is_packed_again(photos: Path, packed: Path, store: str, tmp_path: Path) -> None:
    with opened(packed) as source:
        for options in ({"format": "zarr", "shard_size": 9000}, {"shard_size": 9000}, {}):
            out = pack(source, tmp_path / f"again-{len(options)}", **options)  # type: ignore[arg-type]
            with opened(out) as copy:
                assert copy.fingerprint == source.fingerprint and copy.classes == source.classes
                assert all(
                    torch.equal(copy[i][0], source[i][0]) and copy[i][1] == source[i][1]
                    for i in range(24)
                )


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "|u1", "<i8", "|b1", "<c8", ">u2", "<f2"])
@pytest.mark.parametrize("shape", [(3, 4), (), (5,), (2, 1, 3)])
def test_arrays(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    out = pack(Rows(shape=shape, dtype=dtype), tmp_path / "out", format="zarr", shard_size=100)
    assert verify(out).ok and verify(out).samples == 30
    group = zarr.open_group(out / "data.zarr", mode="r")
    assert all(np.array_equal(group["data"][i], np.full(shape, i, dtype)) for i in range(30))  # type: ignore[index]
    with (
        ZarrDataset(out, target_name="targets") as rows,
        ZarrDataset(out / "data.zarr", "data", target_name="targets") as same,
    ):
        for index in range(30):
            value, target = rows[index]
            assert (
                np.array_equal(np.asarray(value), np.full(shape, index, dtype))
                and target == same[index][1] == index * 7
            )
        assert rows.fingerprint == same.fingerprint
    with open_dataset(out) as rows:
        assert isinstance(rows, ZarrDataset) and len(rows) == 30


@pytest.mark.quick_every(8)
@pytest.mark.parametrize("dtype", ["|u1", ">f4", "<i8"])
@pytest.mark.parametrize("compression", ["gzip", "zstd", "lz4", None])
@pytest.mark.parametrize("chunks", [1, 4, None])
def test_compressed_chunks(
    tmp_path: Path, dtype: str, compression: str | None, chunks: int | None
) -> None:
    source, how = (
        Rows(shape=(9, 7), dtype=dtype),
        {"format": "zarr", "shard_size": 8 * 63 * np.dtype(dtype).itemsize},
    )
    out = pack(source, tmp_path / "out", compression=compression, chunks=chunks, workers=3, **how)  # type: ignore[arg-type]
    again = pack(
        source,
        tmp_path / "again",
        compression=compression,
        chunks=chunks,
        part="1/2",
        workers=1,
        **how,
    )  # type: ignore[arg-type]
    pack(source, again, compression=compression, chunks=chunks, part="0/2", **how)  # type: ignore[arg-type]
    assert contents(again) == contents(out) and pack_status(out).parts > 2 and verify(out).ok
    data: Any = zarr.open_array(out / "data.zarr", path="data", mode="r")
    assert data.chunks[0] == (chunks or 8) and all(
        (data[index] == source[index][0]).all() for index in range(30)
    )
    with ZarrDataset(out, target_name="targets") as rows:
        assert all(
            np.array_equal(np.asarray(rows[i][0]), source[i][0]) and rows[i][1] == 7 * i
            for i in range(30)
        )
        assert "zarr-python" not in rows.explain()
    if compression is not None:
        stored = sum(path.stat().st_size for path in (out / "data.zarr" / "data").glob("c.*"))
        assert stored < 30 * 63 * np.dtype(dtype).itemsize or chunks == 1, (
            "very small chunks don't get smaller"
        )
        with pytest.raises(TargetExistsError, match="compression"):
            pack(source, out, chunks=chunks, **how)  # type: ignore[arg-type]
    shard = out / "data.zarr" / "data" / "c.1.0.0"
    content = bytearray(shard.read_bytes())
    for place, is_sample in ((10, True), (len(content) - 5, False)):
        shard.write_bytes(
            bytes(content[:place]) + bytes([content[place] ^ 1]) + bytes(content[place + 1 :])
        )
        bad = [index for index, _, _ in verify(out).bad]
        assert bad == (list(range(8, 8 + data.chunks[0])) if is_sample else [-1])


def test_threads_that_encode_leave_blosc_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that encode at once the first to begin is the first to end."""
    array, chunk = (
        ArrayLayout("data", (4, 4096), np.dtype("<i8"), 4, 1, compression="lz4"),
        np.arange(4096).view(np.uint8),
    )
    both, first_ended, numbers, compress, settings = (
        threading.Barrier(2),
        threading.Event(),
        itertools.count(),
        blosc.compress,
        [],
    )

    def in_turn(*arguments: Any) -> Any:
        number = next(numbers)
        both.wait(60)
        assert number == 0 or first_ended.wait(60)
        settings.append(blosc.use_threads)
        return compress(*arguments)

    monkeypatch.setattr(blosc, "compress", in_turn)
    monkeypatch.setattr(blosc, "use_threads", True)
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(encoded, chunk, array) for _ in range(2)]
        wait(made, return_when=FIRST_COMPLETED)
        first_ended.set()
        assert made[0].result() == made[1].result()
    assert settings == [False, False] and blosc.use_threads is True


def test_default_shard_size(tmp_path: Path) -> None:
    out = pack(Rows(), tmp_path / "out", format="zarr")
    assert (
        pack_status(out).parts == 1
        and json.loads((out / "plan.json").read_text())["options"]["shard_size"] == 256_000_000
    )


def test_unreadable_samples_are_left_out(photos: Path, store: str, tmp_path: Path) -> None:
    source = Path(shutil.copytree(photos, tmp_path / "photos"))
    broken = sorted(source.rglob("*.jpg"))[3]
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(SampleError, match=broken.name):
        to_zarr(source, tmp_path / "out", store)
    out = tmp_path / "skipped"
    with opened(source, on_error="skip") as dataset:
        how: Any = {"store": store, "format": "zarr", "shard_size": SHARD}
        pack(dataset, out, part="0/2", **how)
        assert json.loads((out / "plan.json").read_text())["count"] == 23
        with pytest.warns(HeadraceWarning, match=r"1 samples? can't be read"):
            pack(dataset, out, part="1/2", **how)
        manifest = json.loads((out / "manifest.json").read_text())
        assert (manifest["left_out"], manifest["samples"]) == (1, 23) and broken.name in manifest[
            "left_out_first"
        ][0]
        kept = [index for index, (path, _) in enumerate(dataset.samples) if Path(path) != broken]
        with opened(out) as packed, dataset.subset(kept) as view:
            assert len(packed) == 23 and packed.fingerprint == view.fingerprint
            if store != "jpeg":
                assert all(torch.equal(packed[i][0], view[i][0]) for i in range(23))
    assert verify(out).ok


def test_a_sample_that_fails_later_is_an_error(photos: Path, store: str, tmp_path: Path) -> None:
    source = Path(shutil.copytree(photos, tmp_path / "photos"))
    with opened(source, on_error="skip") as dataset:
        how: Any = {"store": store, "format": "zarr", "shard_size": SHARD}
        pack(dataset, tmp_path / "out", parts="0:1", **how)
        last = Path(dataset.samples[23][0])
        last.write_bytes(bytes(last.stat().st_size))
        with pytest.raises(SampleError, match=last.name) as caught:
            pack(dataset, tmp_path / "out", **how)
        assert "overwrite=True" in str(caught.value) and any(
            "data/c." in note for note in caught.value.__notes__
        )
        last.write_bytes(b"shorter")
        with pytest.raises((FileChangedError, TargetExistsError)):
            pack(dataset, tmp_path / "out", **how)
        assert not (tmp_path / "out" / "manifest.json").exists()


def test_every_flipped_bit_is_found(packed: Path, tmp_path: Path) -> None:
    assert verify(packed).ok and verify(packed).samples == 24
    choose = random.Random(7)
    for path in sorted(
        path for path in packed.rglob("*") if path.is_file() and path.suffix != ".crc32"
    ):
        out = Path(shutil.copytree(packed, tmp_path / "out"))
        data = bytearray(path.read_bytes())
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        (out / path.relative_to(packed)).write_bytes(data)
        try:
            bad = verify(out).bad
            assert bad, path
            if path.parent.parent.name == "data.zarr":
                assert any(str(path.relative_to(packed)) in location for _, location, _ in bad)
        except (FormatError, DataNotFoundError) as error:
            assert str(out) in str(error)
        shutil.rmtree(out)


def test_a_damaged_sample_is_named(packed: Path, store: str, tmp_path: Path) -> None:
    out = Path(shutil.copytree(packed, tmp_path / "out"))
    last = max(
        (out / "data.zarr" / "data").glob("c.*"), key=lambda path: int(path.name.split(".")[1])
    )
    data = bytearray(last.read_bytes())
    data[3] ^= 1
    last.write_bytes(data)
    first = json.loads((out / "plan.json").read_text())["edges"][-2]
    named = [index for index, _, _ in verify(out).bad]
    assert named == ([first] if store != "decoded" else list(range(first, 24))), (
        "of rows: all of the chunk"
    )
    with opened(out) as dataset, pytest.raises(SampleError, match="checksum"):
        dataset[first]
    with opened(out) as dataset:
        dataset[0]


def test_a_missing_column_chunk_is_an_error(packed: Path, tmp_path: Path) -> None:
    for name in ("targets", "crc32", "names"):
        out = Path(shutil.copytree(packed, tmp_path / name))
        (out / "data.zarr" / name / "c.1").unlink()
        with pytest.raises(FormatError, match="missing"):
            ImageDataset(out)


@pytest.mark.slow
def test_to_a_store(photos: Path, packed: Path, store: str, own_cache: None) -> None:
    if store == "jpeg":
        pytest.skip("its objects are those of encoded images")
    with S3Server() as server, opened(photos) as source:
        client, options = server.client(), server.options
        client.create_bucket(Bucket="bucket")
        out = to_zarr(photos, "s3://bucket/packed", store, part="0/2", storage_options=options)
        status = pack_status(out, storage_options=options)
        assert (
            out == "s3://bucket/packed"
            and status.done == list(range(0, status.parts, 2))
            and not status.joined
        )
        to_zarr(photos, out, store, storage_options=options)
        pages = client.list_objects_v2(Bucket="bucket")["Contents"]
        stored = {
            item["Key"]: client.get_object(Bucket="bucket", Key=item["Key"])["Body"].read()
            for item in pages
        }
        assert {
            name.removeprefix("packed/"): hashlib.sha256(data).hexdigest()
            for name, data in stored.items()
        } == contents(packed)
        assert verify(out, storage_options=options).ok
        with opened(packed) as local:
            for path in (f"{out}/manifest.json", f"{out}/data.zarr"):
                for mode in ("lazy", "streaming"):
                    with opened(path, storage_options=options, loading_mode=mode) as remote:
                        assert len(remote) == 24 and remote.fingerprint == source.fingerprint
                        images = [
                            image
                            for batch, _ in create_dataloader(remote, batch_size=5, shuffle=False)
                            for image in batch
                        ]
                        assert all(
                            torch.equal(image, local[index][0])
                            for index, image in enumerate(images)
                        )
        key = next(key for key in stored if "/crc32/c.1" in key)
        client.put_object(Bucket="bucket", Key=key, Body=stored[key][:-1])
        assert pack_status(out, storage_options=options).stale == [1]


def test_shards_are_streamed_as_images(packed: Path) -> None:
    for path in (packed, packed / "data.zarr"):
        with (
            StreamingDataset(str(path)) as shards,
            ImageDataset(packed, loading_mode="streaming") as images,
        ):
            ours, theirs = (
                sorted((image.sum().item(), int(target)) for image, target in each)
                for each in (shards, images)
            )
            assert ours == theirs and len(ours) == 24, "in the order of its own shuffle"


class TestBad:
    """What Zarr can't hold is said before anything is written; and what opens a pack, where
    another dataset is asked to.
    """

    def test_another_dataset(self, packed: Path, photos: Path, tmp_path: Path) -> None:
        hdf5 = pack(photos, tmp_path / "hdf5", shard_size=SHARD)
        refused: list[tuple[Any, Path, str]] = [
            (HDF5Dataset, packed, "a Zarr group"),
            (TextDataset, packed, "a Zarr group"),
        ]
        for dataset, path, what in [*refused, (ZarrDataset, hdf5, "HDF5 files")]:
            with pytest.raises(
                FormatError, match=rf"is a pack, {what} of .* headrace.open_dataset"
            ):
                dataset(path)
        with pytest.raises(FormatError, match="is a pack, HDF5 files"):
            ImageDataset([packed, hdf5])

    def test_samples(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("words")
        refused: list[tuple[Any, str]] = [
            (TextDataset(tmp_path / "a.txt"), "these are texts"),
            (Rows(ragged=7), "these are arrays of several shapes"),
            (Rows(dtype="<M8[s]"), "dtype|numbers"),
            (Rows(shape=(0, 3)), "no elements"),
            (Dicts(), "can't hold samples of dtype"),
        ]
        for dataset, message in refused:
            with pytest.raises(ConfigError, match=message):
                pack(dataset, tmp_path / "out", format="zarr")

    def test_format(self, photos: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="format must be 'hdf5' or 'zarr'"):
            pack(photos, tmp_path / "out", format="parquet")  # type: ignore[arg-type]
        (tmp_path / "file.zarr").write_text("x")
        with pytest.raises(ConfigError, match="is a file"):
            pack(photos, tmp_path / "file.zarr", format="zarr")


_JOB = """
import sys
from headrace import ImageDataset, pack
pack(
    ImageDataset(sys.argv[1], image_size=24), sys.argv[2], shard_size=6000, store=sys.argv[3],
    format="zarr", processes=int(sys.argv[4]), progress=False,
)
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_kills_lose_nothing(photos: Path, store: str, tmp_path: Path, processes: int) -> None:
    undisturbed = pack(
        ImageDataset(photos, image_size=24),
        tmp_path / "whole",
        shard_size=6000,
        store=store,
        format="zarr",
    )  # type: ignore[call-overload]
    out, choose = tmp_path / "out", random.Random(f"{store}{processes}")
    kill_four_times(_JOB, [photos, out, store, processes], out, choose)
    assert contents(out) == contents(undisturbed)
