"""Writes tests/data/compat: states, packed files, indices and caches as one version makes them, for later versions to read.

    PYTHONPATH=src python -m tests.data.make_compat tests/data/compat

What is there was made by version 0.1.0 (commit a3de28a, before the redesign), and is not to be made again: it stands for the files that
users have. Of another version that changes a format, make a folder of its own beside it. `tests/test_compat.py` reads them; what it
expects stands in `expected.json`, as the version that made them had it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import zarr
from PIL import Image

from tests.data.make import make_shards, make_tar, noise

MTIME_NS = 1_700_000_000_000_000_000
"""Of the files that caches are of."""

# --- the data that states and caches are of ---------------------------------------------------------------------------


def make_data(folder: Path) -> Path:
    """Writes what the states are of, the same each time; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / "rows.h5", "w") as file:
        file.create_dataset("data", data=np.arange(60, dtype=np.int32).reshape(60, 1), chunks=(5, 1))
    make_images(folder / "images")
    (folder / "damaged").mkdir(exist_ok=True)
    for number in range(8):
        shutil.copy(folder / "images" / "a" / f"{number % 6}.png", folder / "damaged" / f"{number}.png")
    (folder / "damaged" / "3.png").write_bytes(b"")
    words = [" ".join(["mill"] * (1 + number * 7 % 13)) for number in range(40)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n, text in enumerate(words)))
    make_shards(folder / "shards", (7, 12, 5, 9), "jsonl")
    for shard in range(2):
        make_tar(folder / f"{shard}.tar", [(f"{n:03d}.cls", b"%d" % n) for n in range(20 * shard, 20 * shard + 20)])
    return folder


def make_images(folder: Path) -> Path:
    """Twelve PNG files of noise, in two class folders."""
    for label, name in enumerate("ab"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(6):
            Image.fromarray(noise(np.random.default_rng((label, number)), (16, 12))).save(folder / name / f"{number}.png")
    return folder


# --- states -----------------------------------------------------------------------------------------------------------


def rows(folder: Path) -> Any:
    from headrace import HDF5Dataset

    return HDF5Dataset(folder / "rows.h5", "data")


def _images(folder: Path, name: str = "images", **options: Any) -> Any:
    from headrace import ImageDataset

    if name == "damaged":
        options["targets"] = None
    return ImageDataset(folder / name, return_index=True, **options)


def _texts(folder: Path) -> Any:
    from headrace import TextDataset

    return TextDataset(folder / "texts.jsonl")


def _stream(folder: Path, pattern: str) -> Any:
    from headrace import StreamingDataset

    return StreamingDataset(str(folder / pattern))


def small_loader(dataset: Any, **options: Any) -> Any:
    from headrace import create_dataloader

    return create_dataloader(dataset, **{"batch_size": 4, "num_workers": 0, "seed": 11, "collate_fn": "list", **options})


def _multi(folder: Path, strategy: str) -> Any:
    from headrace import MultiDataLoader

    loaders = {"rows": small_loader(rows(folder)), "images": small_loader(_images(folder), batch_size=3)}
    return MultiDataLoader(loaders, strategy, weights={"rows": 2, "images": 1} if strategy == "weighted" else None)


STATES: dict[str, tuple[Callable[[Path], Any], int]] = {
    "shuffled": (lambda folder: small_loader(rows(folder), shuffle=True), 5),
    "in_order": (lambda folder: small_loader(rows(folder), shuffle=False), 5),
    "blocks": (lambda folder: small_loader(rows(folder), shuffle="block"), 5),
    "blocks_by_lanes": (lambda folder: small_loader(rows(folder), shuffle="block", interleave=2, turns=3), 7),
    "images": (lambda folder: small_loader(_images(folder)), 1),
    "split": (lambda folder: small_loader(_images(folder).split(0.75)[0]), 1),
    "skipped": (lambda folder: small_loader(_images(folder, "damaged", on_error="skip"), shuffle=False), 1),
    "ended": (lambda folder: small_loader(_images(folder)), 3),
    "texts": (lambda folder: small_loader(_texts(folder)), 4),
    "bucketed": (lambda folder: small_loader(_texts(folder), bucket_by_length=True), 4),
    "weighted": (lambda folder: small_loader(rows(folder), weights=[1 + n % 3 for n in range(60)], num_samples=48), 5),
    "balanced": (lambda folder: small_loader(_images(folder), balanced=True), 1),
    "streaming": (lambda folder: small_loader(_stream(folder, "shards/*.jsonl")), 3),
    "streaming_in_order": (lambda folder: small_loader(_stream(folder, "shards/*.jsonl"), shuffle=False), 3),
    "streaming_tars": (lambda folder: small_loader(_stream(folder, "*.tar")), 4),
    "first_of_two_ranks": (lambda folder: small_loader(rows(folder), rank=0, world_size=2, batch_size=3), 4),
    "multi_in_turn": (lambda folder: _multi(folder, "round_robin"), 6),
    "multi_weighted": (lambda folder: _multi(folder, "weighted"), 6),
}
"""Name -> what makes the loader, and the batches that were received before its state was saved."""
EPOCH = 3


def numbers_of(batch: Any) -> list[Any]:
    """A batch as small JSON: which samples there are in it."""
    if isinstance(batch, tuple) and isinstance(batch[0], str):
        return [batch[0], numbers_of(batch[1])]
    return [_number_of(sample) for sample in batch]


def _number_of(sample: Any) -> int:
    if isinstance(sample, dict) and "input_ids" in sample:  # of characters: the number comes before the space
        text = "".join(chr(code - 2) for code in sample["input_ids"].tolist())
        return int(text.partition(" ")[0])
    if isinstance(sample, dict):
        return int(sample["number"] if "number" in sample else sample["cls"])
    return int(sample[-1] if isinstance(sample, tuple) else np.asarray(sample).reshape(-1)[0])


def rest_of(loader: Any) -> list[list[Any]]:
    """What a loader gives until its epoch ends, and the first batch of the next one."""
    rest = [numbers_of(batch) for batch in loader]
    return [*rest, numbers_of(next(iter(loader)))]


def _write_states(folder: Path, data: Path) -> dict[str, Any]:
    expected = {}
    for name, (make, received) in STATES.items():
        loader = make(data)
        loader.set_epoch(EPOCH)
        iterator = iter(loader)
        for _ in range(received):
            next(iterator)
        if name == "ended":
            assert next(iterator, None) is None
        state = loader.state_dict()
        (folder / f"{name}.json").write_text(json.dumps(state))
        torch.save(state, folder / f"{name}.pt")
        loader.close()
        loader = make(data)
        loader.load_state_dict(state)
        expected[name] = rest_of(loader)
        loader.close()
    return expected


# --- packed files -----------------------------------------------------------------------------------------------------


def open_packed(folder: Path, name: str) -> Any:
    """A packed file as the dataset that it was."""
    from headrace import HDF5Dataset, ImageDataset, TextDataset

    path = folder / f"{name}.h5"
    if name.startswith("images"):
        return ImageDataset(path)
    return HDF5Dataset(path, "data", target_name="targets") if name == "arrays" else TextDataset(path)


def described(dataset: Any) -> dict[str, Any]:
    """What a dataset is, and a checksum of each sample, as JSON."""
    classes = getattr(dataset, "classes", None)
    return {
        "fingerprint": dataset.fingerprint,
        "classes": None if classes is None else list(classes),
        "samples": [checksum(dataset[number]) for number in range(len(dataset))],
    }


def checksum(sample: Any) -> int:
    """Of all values of a sample, names and dtypes too."""
    if isinstance(sample, dict):
        return zlib.crc32(json.dumps({name: checksum(value) for name, value in sorted(sample.items())}).encode())
    if isinstance(sample, (tuple, list)):
        return zlib.crc32(json.dumps([checksum(value) for value in sample]).encode())
    if isinstance(sample, (str, bytes)):
        return zlib.crc32(sample.encode() if isinstance(sample, str) else sample)
    array = np.asarray(sample)
    return zlib.crc32(f"{array.dtype.str}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())


def _write_packed(folder: Path, data: Path) -> dict[str, Any]:
    from headrace import HDF5Dataset, ImageDataset, TextDataset, pack

    with h5py.File(data / "labelled.h5", "w") as file:
        file["data"], file["targets"] = np.arange(90, dtype=np.float32).reshape(10, 3, 3), np.arange(10) % 4
    (data / "labelled.csv").write_text("text,label\n" + "".join(f"the mill {n},{'ab'[n % 2]}\n" for n in range(12)))
    pack(ImageDataset(data / "images"), folder / "images.h5")
    pack(ImageDataset(data / "images", image_size=8), folder / "images_decoded.h5", store="decoded")
    pack(TextDataset(data / "texts.jsonl"), folder / "texts.h5")
    pack(TextDataset(data / "labelled.csv", target_field="label"), folder / "texts_with_classes.h5")
    pack(HDF5Dataset(data / "labelled.h5", "data", target_name="targets"), folder / "arrays.h5")
    expected = {}
    for name in ("images", "images_decoded", "texts", "texts_with_classes", "arrays"):
        with open_packed(folder, name) as dataset:
            expected[name] = described(dataset)
    return expected


# --- indices beside files that make no sense without them -------------------------------------------------------------


INDEXED = ("a.tar", "b.h5", "c.jsonl", "d.txt", "e.csv", "f.zarr", "g.zarr.zip")


def open_indexed(at: str, name: str, **options: Any) -> Any:
    """A file of `indexed/`, below a folder or a URL."""
    from headrace import HDF5Dataset, StreamingDataset, TextDataset, ZarrDataset

    path = f"{at}/{name}"
    if name.endswith(".tar"):
        return StreamingDataset(path, **options)
    if name.endswith(".h5"):
        return HDF5Dataset(path, "data", target_name="labels", **options)
    if name.endswith((".zarr", ".zip")):
        return ZarrDataset(path, **options)
    return TextDataset(path, unit="line" if name.endswith(".txt") else "record", **options)


def described_indexed(dataset: Any) -> list[int]:
    """A checksum of each sample; of a tar's without its URL, of texts without a space at the end, which may have been a line's end."""
    return [checksum(_bare(sample)) for batch in small_loader(dataset, shuffle=False) for sample in batch]


def _bare(sample: Any) -> Any:
    if not isinstance(sample, dict):
        return sample
    if "input_ids" in sample and len(ids := sample["input_ids"]):
        return {**sample, "input_ids": ids[: len(ids) - int(ids[-1] == ord(" ") + 2)]}
    return {name: value for name, value in sample.items() if name != "__url__"}


def _write_indexed(folder: Path) -> None:
    from headrace import write_index

    make_tar(folder / "a.tar", [(f"{n:03d}.{ending}", b"%d" % (n % 7)) for n in range(12) for ending in ("cls", "txt")])
    with h5py.File(folder / "b.h5", "w") as file:
        file.create_dataset("data", data=np.arange(240, dtype=np.float32).reshape(24, 10), chunks=(8, 10), compression="gzip")
        file.create_dataset("labels", data=np.arange(24), chunks=(12,))
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": f"record {n} {'x' * (n + 1)}"}) + "\n" for n in range(20)))
    (folder / "d.txt").write_text("".join(f"line {n} {'x' * (n + 1)}\n" for n in range(20)))
    (folder / "e.csv").write_text("n,text\n" + "".join(f"{n},row {n} {'x' * (n + 1)}\n" for n in range(20)))
    array = zarr.create_array(store=folder / "f.zarr", shape=(32, 4), shards=(16, 4), chunks=(4, 4), dtype="f4")
    array[:] = np.arange(128.0).reshape(32, 4)
    with zarr.storage.ZipStore(folder / "g.zarr.zip", mode="w") as store:
        zarr.create_array(store=store, shape=(32, 4), chunks=(8, 4), dtype="i4")[:] = np.arange(128).reshape(32, 4)
    write_index(folder)
    write_index([str(folder / name) for name in ("e.csv", "f.zarr")])


def gut(folder: Path) -> None:
    """Takes from the files of `indexed/` all that says where samples lie: only the index beside each still does."""
    _gut_tar(folder / "a.tar")
    _gut_hdf5(folder / "b.h5")
    for name in ("c.jsonl", "d.txt", "e.csv"):
        _without_line_ends(folder / name)
    for shard in (folder / "f.zarr" / "c").rglob("0"):
        if shard.is_file():
            _blank(shard, [(shard.stat().st_size - (4 * 16 + 4), shard.stat().st_size)])
    path = folder / "g.zarr.zip"
    data = path.read_bytes()
    _blank(path, [(data.index(b"PK\x01\x02"), len(data))])


def _blank(path: Path, ranges: list[tuple[int, int]]) -> None:
    with open(path, "r+b") as file:
        for start, stop in ranges:
            file.seek(start)
            file.write(b"\0" * (stop - start))


def _gut_tar(path: Path) -> None:
    with tarfile.open(path) as tar:
        headers = [(member.offset, member.offset_data) for member in tar]
    _blank(path, headers)


def _gut_hdf5(path: Path) -> None:
    kept = []
    with h5py.File(path) as file:
        for name in file:
            chunks = file[name].id
            infos = [chunks.get_chunk_info(number) for number in range(chunks.get_num_chunks())]
            kept += [(info.byte_offset, info.byte_offset + info.size) for info in infos]
    stops = [0, *(stop for _, stop in sorted(kept))]
    starts = [*(start for start, _ in sorted(kept)), path.stat().st_size]
    _blank(path, list(zip(stops, starts, strict=True)))


def _without_line_ends(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"\n", b" "))


# --- what a cache_dir holds -------------------------------------------------------------------------------------------


CACHED = ("listing",)


def make_cached(folder: Path) -> Path:
    """What the caches are of."""
    for name in (*CACHED, "listing/images"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    make_images(folder / "listing" / "images")
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, ns=(MTIME_NS, MTIME_NS))
    return folder


def gut_cached(folder: Path) -> None:
    """Changes what the caches are of, but for sizes and times: the same samples come only from what is cached."""
    (folder / "listing" / "images" / "a" / "6.png").write_bytes((folder / "listing" / "images" / "a" / "5.png").read_bytes())
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, ns=(MTIME_NS, MTIME_NS))


def open_cached(folder: Path, name: str, cache_dir: Path) -> Any:
    """The dataset that a cache is of."""
    from headrace import ImageDataset

    return ImageDataset(folder / name / "images", cache_dir=cache_dir)


@contextlib.contextmanager
def _noting_what_caches_are_about(root: Path) -> Iterator[list[dict[str, Any]]]:
    """What each file of a cache_dir is named after: a hash that only its maker can compute."""
    from headrace.storage.kept import KeptArrays
    from headrace.storage.mapped import MappedFile

    noted: list[dict[str, Any]] = []
    makers: dict[Any, Any] = {cls: cls.__init__ for cls in (KeptArrays, MappedFile)}

    def note(cls: Any) -> Callable[..., None]:
        def made(self: Any, cache_dir: str, *args: Any) -> None:
            makers[cls](self, cache_dir, *args)
            kind, about = args[0], args[-1] if cls is MappedFile else args[2]
            said = json.loads(json.dumps(about).replace(str(root), "{root}"))
            noted.append({"file": Path(self.path).name, "form": cls.__name__, "kind": kind, "about": said})

        return made

    for cls in makers:
        cls.__init__ = note(cls)
    try:
        yield noted
    finally:
        for cls, maker in makers.items():
            cls.__init__ = maker


def _write_caches(folder: Path, data: Path) -> dict[str, Any]:
    import time

    make_cached(data)
    time.sleep(2.5)  # a folder that changed just now is not kept
    expected = {}
    for name in CACHED:
        with _noting_what_caches_are_about(data) as noted, open_cached(data, name, folder / name) as dataset:
            expected[name] = described_indexed(dataset)
        (note,) = (note for note in noted if note["kind"] == name)  # of texts there are listings too
        (folder / f"{name}.bin").write_bytes((folder / name / note["file"]).read_bytes())
        (folder / f"{name}.json").write_text(json.dumps(note))
        shutil.rmtree(folder / name)
    return expected


def main() -> None:
    """Writes all of it to a folder."""
    parser = argparse.ArgumentParser(description="Writes files for later versions to read.")
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    scratch = out / "scratch"
    for name in ("states", "packed", "indexed", "cached"):
        (out / name).mkdir(parents=True)
    data = make_data(scratch / "data")
    expected: dict[str, Any] = {"states": _write_states(out / "states", data), "packed": _write_packed(out / "packed", data)}
    _write_indexed(out / "indexed")
    expected["indexed"] = {}
    for name in INDEXED:
        with open_indexed(str(out / "indexed"), name) as dataset:
            expected["indexed"][name] = described_indexed(dataset)
    gut(out / "indexed")
    expected["cached"] = _write_caches(out / "cached", (scratch / "cached").resolve())
    (out / "expected.json").write_text(json.dumps(expected))
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
