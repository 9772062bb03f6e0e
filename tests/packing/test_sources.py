"""Every dataset packs, to one file and to parts, and the pack gives the samples and targets of
what was packed.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from headrace import (
    BaseDataset,
    HDF5Dataset,
    ImageDataset,
    MemoryEfficientDataset,
    Source,
    StreamingDataset,
    ZarrDataset,
    create_dataloader,
    open_dataset,
    pack,
    verify,
)
from headrace.errors import BudgetError, ConfigError, FormatError
from headrace.packing import pack_status
from headrace.storage.hdf5.packed import packed_info
from tests.packing.test_values import Samples
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.quick_every(6)

RNG = np.random.default_rng(7)
IMAGES, ROWS = (
    RNG.integers(0, 256, (30, 3, 4), dtype=np.uint8),
    RNG.random((30, 2, 3)).astype(np.float32),
)
LABELS = np.arange(30, dtype=np.int64) % 4


class Lines(Source):
    def __len__(self) -> int:
        return 30

    def read(self, indices: Any) -> list[bytes]:
        return [ROWS[index].tobytes() for index in indices]

    def fingerprint(self) -> str:
        return "rows"


class Own(BaseDataset):
    """A format of one's own."""

    def decode(self, record: bytes) -> Any:
        return np.frombuffer(record, np.float32).reshape(2, 3)


def pieces(dataset: Any) -> Iterator[tuple[Any, Any]]:
    """Input and target of each sample, plain: arrays as bytes with dtype and shape."""
    for sample in (dataset[index] for index in range(len(dataset))):
        pair = sample if isinstance(sample, tuple) else (sample, None)
        yield plain(pair[0]), plain(pair[1])


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (bytes, str)) or value is None:
        return value
    array = np.asarray(value)
    return (str(array.dtype), array.shape, array.tobytes()) if array.ndim else array.item()


def check(
    source: Any, tmp_path: Path, of: Callable[..., Any] | None = None, expected: Any = None
) -> list[Path]:
    """Packs to one file and to about four parts, and compares samples, targets and fingerprints."""
    wanted = list(pieces(source)) if expected is None else expected
    has_targets = any(target is not None for _, target in wanted)
    opened = of or (lambda path: HDF5Dataset(path, target_name="targets" if has_targets else None))
    one = pack(source, tmp_path / "one.h5")
    with h5py.File(one) as file:
        shard_size = max(1, file["data"].nbytes // 4)
    parts = pack(source, tmp_path / "parts", shard_size=shard_size)
    assert pack_status(parts).parts > 1 and verify(one).ok and verify(parts).ok
    for path in (one, parts):
        with opened(path) as packed:
            assert list(pieces(packed)) == wanted
            if isinstance(source, BaseDataset):
                assert packed.fingerprint == source.fingerprint
    return [one, parts]


def images(path: Any, **options: Any) -> ImageDataset:
    return ImageDataset(path, image_size=(12, 16), **options)


class TestImages:
    @pytest.fixture
    def shards(self, photos: Path, tmp_path: Path) -> list[Path]:
        """The photographs in two packed files."""
        whole = images(photos)
        return [
            pack(whole.subset(range(9)), tmp_path / "a.h5"),
            pack(whole.subset(range(9, 24)), tmp_path / "b.h5"),
        ]

    @pytest.mark.parametrize(
        "how", ["folder", "glob", "list", "view", "file", "files", "files glob", "parts", "zarr"]
    )
    def test_encoded(self, photos: Path, shards: list[Path], tmp_path: Path, how: str) -> None:
        path: Any = {
            "folder": photos,
            "view": photos,
            "glob": str(photos / "*" / "*.jpg"),
            "list": sorted(photos.rglob("*.jpg")),
            "file": shards[0],
            "files": shards,
            "files glob": str(tmp_path / "[ab].h5"),
        }.get(how)
        if how == "parts":
            path = pack(images(photos), tmp_path / "first", shard_size=30_000)
        if how == "zarr":
            whole = images(photos)
            halves = (whole.subset(range(9)), whole.subset(range(9, 24)))
            path = [
                pack(half, tmp_path / f"{number}.zarr", format="zarr")
                for number, half in enumerate(halves)
            ]
        names = {p.name: p.parent.name for p in photos.rglob("*.jpg")}
        source = images(path, **({"targets": names} if how in ("glob", "list") else {}))
        one, _ = check(source.subset(range(3, 20)) if how == "view" else source, tmp_path, images)
        info = packed_info(one)
        assert (
            info is not None
            and (info.kind, info.store) == ("image", "encoded")
            and info.classes == source.classes
        )

    def test_decoded(self, shards: list[Path], tmp_path: Path) -> None:
        with images(shards) as source:
            first = pack(source, tmp_path / "decoded", store="decoded", shard_size=2000)
        with ImageDataset(sorted(first.glob("*.h5"))) as source:
            one, _ = check(source, tmp_path, ImageDataset)
        info = packed_info(one)
        assert info is not None and (info.kind, info.store, info.image["image_size"]) == (
            "image",
            "decoded",
            [12, 16],
        )

    def test_reencoded(self, shards: list[Path], tmp_path: Path) -> None:
        with images(shards) as source:
            one = pack(source, tmp_path / "one.h5", store="jpeg", max_size=30)
            parts = pack(source, tmp_path / "parts", store="jpeg", max_size=30, shard_size=3000)
            with images(one) as single, images(parts) as joined:
                assert (
                    list(pieces(single)) == list(pieces(joined))
                    and joined.fingerprint == source.fingerprint
                )

    def test_by_url(self, photos: Path, shards: list[Path], tmp_path: Path) -> None:
        for folder, names in (
            (photos, sorted(str(p.relative_to(photos)) for p in photos.rglob("*.jpg"))),
            (tmp_path, ["a.h5", "b.h5"]),
        ):
            with RangeServer(folder) as server:
                urls = [f"{server.url}/{name}" for name in names]
                target = tmp_path / f"from {len(names)}"
                target.mkdir()
                with images(
                    urls,
                    cache_dir=target / "cache",
                    **({"targets": None} if folder == photos else {}),
                ) as source:
                    check(
                        source,
                        target,
                        images if folder != photos else lambda path: images(path, targets=None),
                    )

    def test_in_a_memory_efficient_dataset(self, photos: Path, tmp_path: Path) -> None:
        with MemoryEfficientDataset(photos, image_size=(12, 16)) as whole:
            one, _ = check(whole, tmp_path, images)
            view = tmp_path / "view"
            view.mkdir()
            check(
                MemoryEfficientDataset(images(photos).subset(range(20))).subset([7, 3, 5, 19, 3]),
                view,
                images,
            )
        info = packed_info(one)
        assert info is not None and (info.kind, info.store) == ("image", "encoded")

    def test_views_of_torch_are_arrays(self, photos: Path, tmp_path: Path) -> None:
        whole = images(photos)
        check(ConcatDataset([Subset(whole, [3, 1]), whole.subset([9, 8, 2]), whole[20:]]), tmp_path)


class TestHDF5:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        with h5py.File(tmp_path / "in.h5", "w") as file:
            file["rows"], file["labels"], file["swapped"] = ROWS, LABELS, ROWS.astype(">f4")
            file.create_dataset("chunked", data=ROWS, chunks=(7, 2, 2))
            file.create_dataset(
                "compressed", data=ROWS, chunks=(4, 2, 3), compression="gzip", shuffle=True
            )
            file["group/inner/rows"] = ROWS
            file["half"] = ROWS.astype(np.float16)
            file["compound"] = np.array(
                [(n, row) for n, row in zip(LABELS, ROWS[:, 0], strict=True)],
                [("n", "i8"), ("row", "f4", (3,))],
            )
            file.create_dataset(
                "texts",
                data=[f"mill {'wheel ' * (n % 3)}{n} é" for n in range(30)],
                dtype=h5py.string_dtype(),
            )
            file.create_dataset("fixed", data=np.array([b"%d" % n for n in range(30)], "S8"))
            vlen = file.create_dataset("vlen", (30,), h5py.vlen_dtype(np.int32))
            for n in range(30):
                vlen[n] = np.arange(n % 5)
        with h5py.File(tmp_path / "other.h5", "w") as file:
            file["rows"], file["labels"] = ROWS[::-1] * 2, LABELS[::-1]
        return tmp_path / "in.h5"

    @pytest.mark.parametrize(
        "name",
        [
            "rows",
            "chunked",
            "compressed",
            "group/inner/rows",
            "half",
            "compound",
            "texts",
            "fixed",
            "vlen",
        ],
    )
    @pytest.mark.parametrize("target", ["labels", None])
    def test_one_dataset(self, path: Path, tmp_path: Path, name: str, target: str | None) -> None:
        with HDF5Dataset(path, name, target_name=target) as source:
            check(source, tmp_path)

    def test_byte_order_of_this_machine(self, path: Path, tmp_path: Path) -> None:
        with HDF5Dataset(path, "swapped") as source:
            check(source, tmp_path)

    def test_views_and_dtypes(self, path: Path, tmp_path: Path) -> None:
        with HDF5Dataset(path, "rows", target_name="labels", dtype="float64") as source:
            check(source.subset([5, 3, 29, 3, *range(10, 20)]), tmp_path)

    def test_several_names(self, path: Path, tmp_path: Path) -> None:
        with HDF5Dataset(path, ["rows", "half"], target_name="labels") as source:
            check(source, tmp_path)

    def test_several_names_with_texts(self, path: Path, tmp_path: Path) -> None:
        with (
            HDF5Dataset(path, ["rows", "texts"]) as source,
            pytest.raises(ConfigError, match="sample 0, 'texts', can't be packed: it is 'mill"),
        ):
            pack(source, tmp_path / "out.h5")

    def test_several_files(self, path: Path, tmp_path: Path) -> None:
        with HDF5Dataset(
            [path, path.with_name("other.h5")], "rows", target_name="labels"
        ) as source:
            assert len(source) == 60
            check(source, tmp_path)

    def test_by_url(self, path: Path, tmp_path: Path) -> None:
        options = {"target_name": "labels", "cache_dir": tmp_path / "cache"}
        with (
            RangeServer(path.parent) as server,
            HDF5Dataset(f"{server.url}/in.h5", "compressed", **options) as source,
        ):
            check(source, tmp_path)

    def test_targets_that_are_texts(self, path: Path, tmp_path: Path) -> None:
        with (
            HDF5Dataset(path, "rows", target_name="texts") as source,
            pytest.raises(ConfigError, match="these targets can't be packed"),
        ):
            pack(source, tmp_path / "out.h5")

    def test_packed_again(self, path: Path, tmp_path: Path) -> None:
        """By its path, from one file and from parts, with the targets."""
        with HDF5Dataset(path, "vlen", target_name="labels") as source:
            one, parts = check(source, tmp_path)
        for number, again in enumerate((one, parts, [one], str(parts / "*.h5"))):
            assert pack(again, tmp_path / f"{number}.h5").read_bytes() == one.read_bytes()


class TestZarr:
    @pytest.mark.parametrize(
        "layout", [{"zarr_format": 2}, {"zarr_format": 3}, {"zarr_format": 3, "shards": (8, 2, 3)}]
    )
    def test_rows(self, tmp_path: Path, layout: Any) -> None:
        group = zarr.open_group(tmp_path / "in.zarr", mode="w", zarr_format=layout["zarr_format"])
        group.create_array(
            "rows",
            data=ROWS,
            chunks=(4, 2, 3),
            **({"shards": layout["shards"]} if "shards" in layout else {}),
        )
        group.create_array("labels", data=LABELS)
        with ZarrDataset(tmp_path / "in.zarr", "rows", target_name="labels") as source:
            check(source, tmp_path)

    @pytest.mark.parametrize("labels", [True, False])
    def test_patches(self, tmp_path: Path, labels: bool) -> None:
        group, volume = (
            zarr.open_group(tmp_path / "in.zarr", mode="w"),
            RNG.integers(0, 99, (20, 20), dtype=np.int16),
        )
        group.create_array("raw", data=volume, chunks=(8, 8))
        group.create_array("labels", data=(volume > 50).astype(np.uint8), chunks=(8, 8))
        with ZarrDataset(
            tmp_path / "in.zarr",
            "raw",
            target_name="labels" if labels else None,
            patch_shape=(6, 6),
            stride=4,
        ) as source:
            check(source, tmp_path)

    def test_labels_that_do_not_fit_memory(self, tmp_path: Path) -> None:
        group = zarr.open_group(tmp_path / "in.zarr", mode="w")
        for name in ("raw", "labels"):
            group.create_array(name, data=np.zeros((90, 90), np.int64), chunks=(30, 30))
        path, options = (
            tmp_path / "in.zarr",
            {"target_name": "labels", "patch_shape": (30, 30), "stride": 1},
        )
        message = r"the targets of 3,721 samples take 26.8 MB, and .* are available"
        with (
            ZarrDataset(path, "raw", max_memory_usage="10MB", **options) as source,
            pytest.raises(BudgetError, match=message),
        ):
            pack(source, tmp_path / "out.h5")


class TestShards:
    @pytest.fixture
    def tar(self, photos: Path, tmp_path: Path) -> Path:
        with tarfile.open(tmp_path / "in.tar", "w") as file:
            for number, image in enumerate(sorted(photos.rglob("*.jpg"))):
                for ending, data in (("jpg", image.read_bytes()), ("cls", b"%d" % (number % 3))):
                    member = tarfile.TarInfo(f"{number:04d}.{ending}")
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))
        return tmp_path / "in.tar"

    def test_a_tar_says_what_to_do(self, tar: Path, tmp_path: Path) -> None:
        for source in (tar, StreamingDataset(tar)):
            with pytest.raises(
                ConfigError,
                match=r"sample 0 can't be packed: it is that of a tar.* by split_target",
            ):
                pack(source, tmp_path / "out.h5")

    def test_members_of_a_tar(self, tar: Path, photos: Path, tmp_path: Path) -> None:
        """The bytes of images, and their classes, of a subclass that says so."""

        class Photos(StreamingDataset):
            def split_target(self, index: int, value: Any) -> tuple[Any, Any]:
                return value["jpg"], int(value["cls"])

        with Photos(tar, decode=False) as source:
            expected = [
                (image.read_bytes(), number % 3)
                for number, image in enumerate(sorted(photos.rglob("*.jpg")))
            ]
            check(source, tmp_path, expected=expected)

    @pytest.mark.parametrize("kind", ["rows", "images"])
    def test_hdf5(self, photos: Path, tmp_path: Path, kind: str) -> None:
        path = pack(images(photos) if kind == "images" else Samples(list(ROWS)), tmp_path / "in.h5")
        opened = ImageDataset if kind == "images" else HDF5Dataset
        with opened(path) as same, StreamingDataset(path) as source:
            check(source, tmp_path, opened, list(pieces(same)))

    def test_lines(self, tmp_path: Path) -> None:
        (tmp_path / "in.txt").write_text("\n".join(f"line {number} é" for number in range(30)))
        with StreamingDataset(tmp_path / "in.txt") as source:
            check(source, tmp_path, expected=[(f"line {number} é", None) for number in range(30)])

    def test_records(self, tmp_path: Path) -> None:
        (tmp_path / "in.jsonl").write_text(
            "\n".join(json.dumps({"x": number, "y": number / 2}) for number in range(30))
        )
        with StreamingDataset(tmp_path / "in.jsonl") as source:
            check(
                source,
                tmp_path,
                expected=[({"x": number, "y": number / 2}, None) for number in range(30)],
            )


class TestOthers:
    @pytest.mark.parametrize("wraps", [False, True])
    def test_a_format_of_ones_own(self, tmp_path: Path, wraps: bool) -> None:
        source = Own(Lines(), targets=LABELS)
        check(MemoryEfficientDataset(source) if wraps else source, tmp_path)
        view = tmp_path / "view"
        view.mkdir()
        check(source.subset([4, 4, 20, 1, 9]), view)

    SAMPLES: tuple[tuple[str, list[Any]], ...] = (
        ("arrays", [row for row in ROWS]),
        (
            "pairs",
            [(torch.from_numpy(row), int(label)) for row, label in zip(ROWS, LABELS, strict=True)],
        ),
        ("any length", [np.arange(n % 7) for n in range(30)]),
        ("numbers", [float(n) for n in range(60)]),
        (
            "dicts",
            [({"x": row, "n": np.int16(n)}, np.array([n, -n])) for n, row in enumerate(ROWS)],
        ),
        ("bytes", [bytes(range(n)) for n in range(30)]),
        ("bytes of one length", [b"%02d mills" % n for n in range(30)]),
        ("bytes with targets", [(bytes([n] * (n % 4)), n) for n in range(60)]),
        ("no bytes", [b"", *[b"12345678"] * 30]),
        ("str", ["é" * n for n in range(30)]),
        ("str with targets", [(f"wheel {n} \U0001f600\0", float(n)) for n in range(30)]),
    )

    @pytest.mark.quick_every(6)
    @pytest.mark.parametrize(("what", "samples"), SAMPLES, ids=[name for name, _ in SAMPLES])
    @pytest.mark.parametrize("around", ["plain", "memory", "torch"])
    def test_torch_datasets(
        self, tmp_path: Path, what: str, samples: list[Any], around: str
    ) -> None:
        source: Any = Samples(samples)
        if around == "memory":
            source = MemoryEfficientDataset(source)
        if around == "torch":
            source = ConcatDataset(
                [Subset(source, range(9)), Subset(source, [*range(9, len(samples)), 1, 0])]
            )
        check(source, tmp_path)

    def test_bytes_and_str_open_as_such(self, tmp_path: Path) -> None:
        out = pack(Samples(["é", "mill"]), tmp_path / "out.h5")
        with open_dataset(out) as packed, HDF5Dataset(out, encoding=None) as as_bytes:
            assert list(packed) == ["é", "mill"] and list(as_bytes) == ["é".encode(), b"mill"]
            (batch,) = create_dataloader(packed, batch_size=2, shuffle=False, num_workers=0)
            assert batch == ["é", "mill"] and packed.fingerprint == as_bytes.fingerprint
        with h5py.File(out) as file:
            assert file["data"][:].tobytes().decode() == "émill" and file["offsets"][
                :
            ].tolist() == [0, 2, 6]
        info = packed_info(out)
        assert info is not None and (info.store, info.values, info.version) == ("ragged", "str", 3)
        pack(Samples([b"x"]), tmp_path / "bytes.h5")
        with pytest.raises(FormatError, match="samples are str here, and bytes there"):
            HDF5Dataset([tmp_path / "bytes.h5", out])

    @pytest.mark.parametrize(
        ("samples", "message"),
        [
            (
                [b"x", "x"],
                "sample 1 can't be packed with the others: it is str, and they are bytes",
            ),
            (
                [b"x", np.frombuffer(b"x", np.uint8)],
                "sample 1 can't be packed with the others: it is an array, and they are bytes",
            ),
            (["\ud800"], "sample 0 can't be packed: it is no text that UTF-8 has"),
            ([(ROWS[0], "mill")], "the target of sample 0 can't be packed: it is 'mill"),
            (
                [{"x": "mill"}],
                "sample 0, 'x', can't be packed: it is 'mill.*not as fields or targets: leave the "
                "column",
            ),
            ([None], "sample 0 can't be packed: it is None"),
        ],
    )
    def test_what_can_not_be_packed(self, tmp_path: Path, samples: list[Any], message: str) -> None:
        for options in ({}, {"shard_size": 10}):
            with pytest.raises(ConfigError, match=message):
                pack(Samples(samples), tmp_path / "out.h5", **options)

    def test_options_of_texts(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="end_token is for texts"):
            pack(Samples([1, 2]), tmp_path / "out.h5", end_token=1)

    def test_iterable_datasets(self, tmp_path: Path) -> None:
        class Stream(IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                yield from range(3)

        with pytest.raises(ConfigError, match="IterableDataset, which gives no sample by index"):
            pack(Stream(), tmp_path / "out.h5")
