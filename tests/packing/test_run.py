"""Packing: what comes out is what went in, bit for bit; and what can't be packed says why."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from headrace.datasets import BaseDataset, HDF5Dataset, ImageDataset, open_dataset
from headrace.errors import ConfigError, DataNotFoundError, HeadraceWarning, SampleError
from headrace.packing import pack, samples, verify
from headrace.packing import run as running
from headrace.packing.options import StoreOptions
from headrace.packing.part import TargetExistsError
from headrace.packing.run import pack_dataset
from headrace.storage.hdf5.packed import packed_info
from tests.data.make import READABLE, UNREADABLE, make_bad

pytestmark = pytest.mark.quick_every(3)

SIZE = (20, 30)


def images(path: Any, **options: Any) -> ImageDataset:
    return ImageDataset(path, **{"image_size": SIZE, "normalize": False, **options})


def check_same(packed: BaseDataset, source: BaseDataset) -> None:
    """Every sample and target bit for bit, and what describes them."""
    assert len(packed) == len(source) and packed.fingerprint == source.fingerprint
    for i in range(len(source)):
        (image, target), (expected, wanted) = packed[i], source[i]
        assert torch.equal(image, expected) and image.dtype == expected.dtype
        assert target == wanted and type(target) is type(wanted)


def leftovers(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
@pytest.mark.parametrize("store", ["encoded", "decoded"])
def test_round_trip(photos: Path, tmp_path: Path, store: str, mode: str) -> None:
    with images(photos, loading_mode=mode) as source:
        out = pack(source, tmp_path / "out.h5", store=store, workers=2)
        with images(out, loading_mode=mode) as packed:
            check_same(packed, source)
            assert packed.classes == source.classes and packed.class_to_idx == source.class_to_idx
            assert (
                np.array_equal(packed.targets, source.targets) and packed.targets.dtype == np.int64
            )
            for (place, target), (path, wanted) in zip(packed.samples, source.samples, strict=True):
                assert target == wanted and os.path.relpath(path, photos) in place
    assert out == tmp_path / "out.h5" and leftovers(tmp_path) == ["out.h5"]


def test_a_path_is_packed_as_open_dataset_opens_it(photos: Path, tmp_path: Path) -> None:
    out = pack(str(photos), str(tmp_path / "out.h5"))
    with open_dataset(out) as packed, ImageDataset(photos) as source:
        assert isinstance(packed, ImageDataset)
        check_same(packed, source)


@pytest.mark.parametrize("color", ["RGB", "L"])
def test_decoded_images_are_what_pixels_of_gives(photos: Path, tmp_path: Path, color: str) -> None:
    with images(photos, color=color) as source:
        out = pack(source, tmp_path / "out.h5", store="decoded")
        with h5py.File(out) as file:
            assert (
                file["data"].shape == (24, *SIZE, 3 if color == "RGB" else 1)
                and file["data"].dtype == np.uint8
            )
            assert all(np.array_equal(file["data"][i], source.pixels_of(i)) for i in range(24))
        with ImageDataset(out, color=color, normalize=False) as packed:
            assert packed.image_size == SIZE
            check_same(packed, source)


def test_other_programs_find_the_files_bytes(photos: Path, tmp_path: Path) -> None:
    out = pack(photos, tmp_path / "out.h5")
    with ImageDataset(photos) as source, h5py.File(out) as file:
        offsets, names, ends = (
            file["offsets"][:],
            file["names"][:].tobytes(),
            file["name_offsets"][:],
        )
        assert offsets.dtype == ends.dtype == np.int64 and file["crc32"].dtype == np.uint32
        assert all(file[key].chunks is None for key in file)
        for i, (path, target) in enumerate(source.samples):
            assert file["data"][offsets[i] : offsets[i + 1]].tobytes() == Path(path).read_bytes()
            assert names[ends[i] : ends[i + 1]].decode() == os.path.relpath(path, photos)
            assert file["targets"][i] == target


def test_as_rows_of_hdf5(photos: Path, tmp_path: Path) -> None:
    encoded, decoded = (
        pack(photos, tmp_path / "e.h5"),
        pack(images(photos), tmp_path / "d.h5", store="decoded"),
    )
    with (
        ImageDataset(photos) as source,
        HDF5Dataset(encoded, "data") as rows,
        HDF5Dataset(decoded, "data", target_name="targets") as pixels,
    ):
        assert len(rows) == len(pixels) == 24 and rows.fingerprint == source.fingerprint
        for i, (path, target) in enumerate(source.samples):
            assert (
                rows[i].dtype == torch.uint8
                and rows[i].numpy().tobytes() == Path(path).read_bytes()
            )
            assert pixels[i][0].shape == (*SIZE, 3) and pixels[i][1] == target


def test_files_of_every_kind(tmp_path: Path) -> None:
    """Turned, grey, CMYK, 16 bits, many frames, names that are no UTF-8: the file is kept as it
    is, and decodes alike.
    """
    bad = make_bad(tmp_path / "odd")
    for kind in UNREADABLE:
        bad[kind].unlink()
    with images(tmp_path / "odd", targets=None) as source:
        assert len(source) >= len(READABLE)
        for store in ("encoded", "decoded"):
            with images(pack(source, tmp_path / f"{store}.h5", store=store)) as packed:
                check_same(packed, source)


@pytest.mark.parametrize("store", ["encoded", "decoded"])
def test_the_same_input_gives_the_same_bytes(photos: Path, tmp_path: Path, store: str) -> None:
    shutil.copytree(photos, tmp_path / "copy")
    first = pack(images(photos), tmp_path / "first.h5", store=store, workers=1).read_bytes()
    time.sleep(1.1)  # HDF5 notes whole seconds, where it does
    second = pack(
        images(tmp_path / "copy"), tmp_path / "second.h5", store=store, workers=3
    ).read_bytes()
    assert first == second
    # a packed file's copy too
    assert pack(tmp_path / "first.h5", tmp_path / "third.h5").read_bytes() == first


def test_views(photos: Path, tmp_path: Path) -> None:
    source = images(photos)
    for number, view in enumerate(
        (source.subset([5, 3, 3, 20]), source.split(0.3)[0], source[4:9], source[4:9].subset([1]))
    ):
        out = pack(view, tmp_path / f"{number}.h5")
        check_same(images(out), view)
        assert images(out).classes == source.classes  # of all, as the view's are
        check_same(
            images(pack(images(out)[::2], tmp_path / f"{number}b.h5", store="decoded")),
            images(out)[::2],
        )


def test_a_view_without_samples(photos: Path, tmp_path: Path) -> None:
    for store in ("encoded", "decoded"):
        out = pack(images(photos).subset([]), tmp_path / f"{store}.h5", store=store)
        assert len(images(out)) == 0 and verify(out).ok


def test_streaming_datasets(photos: Path, tmp_path: Path) -> None:
    out = pack(images(photos, loading_mode="streaming"), tmp_path / "out.h5")
    check_same(images(out), images(photos))


TARGETS: list[tuple[str, Callable[[str], Any], type]] = [
    ("floats", lambda path: len(path) / 3, float),
    ("numbers", lambda path: len(path), int),
    ("texts", lambda path: os.path.basename(path)[:5], int),
    ("truths", lambda path: path.endswith("g"), bool),
]


@pytest.mark.parametrize(("name", "target", "kind"), TARGETS, ids=[t[0] for t in TARGETS])
def test_targets(
    photos: Path, tmp_path: Path, name: str, target: Callable[[str], Any], kind: type
) -> None:
    source = images(photos, targets=target)
    packed = images(pack(source, tmp_path / "out.h5"))
    check_same(packed, source)
    assert type(packed[0][1]) is kind and packed.classes == source.classes


def test_targets_that_are_arrays(photos: Path, tmp_path: Path) -> None:
    source = images(photos, targets=lambda path: np.array([len(path), 0.5], np.float32))
    packed = images(pack(source, tmp_path / "out.h5"))
    assert all(
        np.array_equal(packed[i][1], source[i][1]) and packed[i][1].dtype == np.float32
        for i in range(24)
    )


@pytest.mark.parametrize(
    "target",
    [
        lambda path: [len(path)] * len(path),
        lambda path: {"a": [len(path)] * len(path)},
        lambda path: None,
        lambda path: [1, 2],
    ],
    ids=["ragged", "dicts", "nothing", "lists"],
)
def test_targets_that_no_file_can_give_back(
    photos: Path, tmp_path: Path, target: Callable[[str], Any]
) -> None:
    source = images(photos, targets=lambda path: target("xx" if "circle" in path else "xxx"))
    with pytest.raises(ConfigError, match=r"targets can't be packed.*targets=None"):
        pack(source, tmp_path / "out.h5")
    assert leftovers(tmp_path) == []


def test_no_targets(photos: Path, tmp_path: Path) -> None:
    packed = images(pack(images(photos, targets=None), tmp_path / "out.h5"))
    assert packed.targets is None and packed.classes == [] and packed[0][1] is None


def test_many_class_names(photos: Path, tmp_path: Path) -> None:
    """More than the 64 kB that an attribute could hold in HDF5's oldest format."""
    tall = images(photos)
    tall.classes = [f"a class of a long name, number {i:05}" for i in range(20_000)]
    out = pack(tall, tmp_path / "out.h5")
    assert images(out).classes == tall.classes and verify(out).ok


@pytest.mark.parametrize("dtype", ["u1", ">i4", "f2", "f8", "?", "c16"])
@pytest.mark.parametrize("row", [(), (3,), (4, 2)], ids=["scalar", "1-D", "2-D"])
def test_arrays(tmp_path: Path, dtype: str, row: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    data, labels = (
        rng.integers(0, 2, (40, *row)).astype(dtype),
        rng.integers(0, 9, 40).astype(">i2"),
    )
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("x", data=data, chunks=(7, *row), compression="gzip")
        file["y"] = labels
    source = HDF5Dataset(tmp_path / "in.h5", "x", target_name="y")
    out = pack(source, tmp_path / "out.h5")
    packed = open_dataset(out, target_name="targets")
    assert type(packed) is HDF5Dataset and packed.fingerprint == source.fingerprint
    for i, (record, expected) in enumerate(
        zip(packed.sample_source.read(range(40)), source.sample_source.read(range(40)), strict=True)
    ):
        assert (
            (record.dtype, record.shape)
            == (expected.dtype, expected.shape)
            == (np.dtype(dtype), row)
        )
        assert record.tobytes() == expected.tobytes() == data[i : i + 1].tobytes()
    assert [int(t) for t in packed.targets] == labels.tolist()
    again = pack(out, tmp_path / "again.h5")  # as a path: with its targets
    assert again.read_bytes() == out.read_bytes()


def test_encoded_images_stay_images_through_hdf5_dataset(photos: Path, tmp_path: Path) -> None:
    out = pack(photos, tmp_path / "out.h5")
    again = pack(HDF5Dataset(out, target_name="targets"), tmp_path / "again.h5")
    assert again.read_bytes() == out.read_bytes()


@pytest.mark.parametrize(
    ("make", "store", "message"),
    [
        (
            lambda e, d: ImageDataset(e, image_size=None),
            "decoded",
            r"image_size is None: open the dataset with image_size=",
        ),
        (lambda e, d: ImageDataset(d), "encoded", r"pass store='decoded'"),
        (lambda e, d: HDF5Dataset(d), "encoded", r"pass store='decoded'"),
        (lambda e, d: HDF5Dataset(e), "decoded", r"open the file with ImageDataset"),
        (
            lambda e, d: ImageDataset(e),
            "zipped",
            r"store must be 'encoded', 'jpeg' or 'decoded', not 'zipped'",
        ),
    ],
)
def test_stores_that_make_no_sense(
    photos: Path,
    tmp_path: Path,
    make: Callable[[Path, Path], BaseDataset],
    store: str,
    message: str,
) -> None:
    encoded, decoded = (
        pack(photos, tmp_path / "e.h5"),
        pack(images(photos), tmp_path / "d.h5", store="decoded"),
    )
    with pytest.raises(ConfigError, match=message):
        pack(make(encoded, decoded), tmp_path / "out.h5", store=store)
    assert leftovers(tmp_path) == ["d.h5", "e.h5"]


def test_datasets_that_can_not_be_packed(photos: Path, tmp_path: Path) -> None:
    class Mine(BaseDataset):
        def decode(self, record: bytes) -> list[int]:
            return list(record)

    with pytest.raises(
        ConfigError,
        match=(
            r"sample 0 can't be packed: it is a list\. Packing takes arrays.*convert it in "
            r"decode"
        ),
    ):
        pack(Mine(images(photos).sample_source), tmp_path / "out.h5")
    for dry_run in (False, True):
        for workers in (0, -1, "two"):
            with pytest.raises(
                ConfigError,
                match=f"workers must be an integer of at least 1 or None, not {workers!r}",
            ):
                pack(photos, tmp_path / "out.h5", workers=workers, dry_run=dry_run)  # type: ignore[call-overload]


@pytest.mark.slow
def test_a_broken_image_is_named(photos: Path, tmp_path: Path) -> None:
    for kind in sorted(UNREADABLE):
        folder = tmp_path / kind
        shutil.copytree(photos / "circle", folder)
        broken = make_bad(tmp_path / "odd")[kind]
        shutil.copy(broken, folder / broken.name)
        for store in ("encoded", "decoded"):
            with pytest.raises(SampleError) as caught:
                pack(images(folder, targets=None), tmp_path / "out.h5", store=store)
            assert str(folder / broken.name) in str(caught.value) and "\n" not in str(caught.value)
            assert "out.h5" not in leftovers(tmp_path) and ".out.h5.part" not in leftovers(tmp_path)


@pytest.mark.parametrize("store", ["encoded", "decoded"])
def test_images_that_may_be_left_out(photos: Path, tmp_path: Path, store: str) -> None:
    shutil.copytree(photos, tmp_path / "in")
    bad = make_bad(tmp_path / "odd")
    shutil.copy(bad["truncated_jpeg"], tmp_path / "in" / "gradient" / "a.jpg")
    shutil.copy(bad["empty_jpeg"], tmp_path / "in" / "noise" / "z.jpg")
    source = images(tmp_path / "in", on_error="skip")
    with pytest.warns(
        HeadraceWarning,
        match=r"out\.h5: 2 of 26 samples can't be read and were left out: .*a\.jpg.*z\.jpg",
    ):
        out = pack(source, tmp_path / "out.h5", store=store)
    kept = [i for i in range(26) if source.samples[i][0][-5:] not in ("a.jpg", "z.jpg")]
    packed = images(out)
    check_same(packed, source.subset(kept))
    assert len(packed) == 24 and packed.fingerprint != source.fingerprint
    assert len(pack_dataset(source, out, options=StoreOptions(store), overwrite=True).left_out) == 2


def test_a_header_is_all_that_may_be_checked(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tmp_path / "in")
    bad = make_bad(tmp_path / "odd")
    # a header, and not all pixels
    shutil.copy(bad["truncated_jpeg"], tmp_path / "in" / "gradient" / "a.jpg")
    source = images(tmp_path / "in")
    with pytest.raises(SampleError, match=r"a\.jpg"):
        pack(source, tmp_path / "out.h5")
    out = pack(source, tmp_path / "out.h5", check="header")
    assert len(images(out)) == len(source) and verify(out).ok
    shutil.copy(bad["empty_jpeg"], tmp_path / "in" / "noise" / "z.jpg")
    with pytest.raises(SampleError, match=r"z\.jpg"):
        pack(images(tmp_path / "in"), tmp_path / "other.h5", check="header")


@pytest.mark.parametrize("given", [{"store": "decoded"}, {"store": "jpeg"}])
def test_check_is_for_encoded_images(photos: Path, tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="check='header' is for encoded images"):
        pack(images(photos), tmp_path / "out.h5", check="header", **given)
    with pytest.raises(ConfigError, match="check='header' is for encoded images"):
        pack(np.arange(6).reshape(3, 2), tmp_path / "out.h5", check="header")
    with pytest.raises(ConfigError, match="check must be 'decode' or 'header'"):
        pack(images(photos), tmp_path / "out.h5", check="none")


def test_none_may_be_left_out_of_none(tmp_path: Path) -> None:
    bad = make_bad(tmp_path / "odd")
    (tmp_path / "in").mkdir()
    shutil.copy(bad["empty_jpeg"], tmp_path / "in" / "a.jpg")
    with pytest.raises(SampleError, match=r"none of 1 samples can be read; the first: .*a\.jpg"):
        pack(images(tmp_path / "in", targets=None, on_error="skip"), tmp_path / "out.h5")
    assert leftovers(tmp_path) == ["in", "odd"]


def test_a_callable_is_no_leave_to_make_samples_up(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos / "circle", tmp_path / "in")
    (tmp_path / "in" / "x.jpg").write_bytes(b"")
    source = images(
        tmp_path / "in", targets=None, on_error=lambda index, path, error: torch.zeros(3, *SIZE)
    )
    with pytest.raises(SampleError, match=r"x\.jpg"):
        pack(source, tmp_path / "out.h5")


def test_a_file_that_changes_while_it_is_packed(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tmp_path / "in")
    source = images(tmp_path / "in")
    path = Path(source.samples[7][0])
    sizes = source.sample_source.sizes()
    source.sample_source.sizes = lambda indices: sizes[indices]  # type: ignore[method-assign]  # as they were when packing began
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(
        SampleError,
        match=rf"{path.name} changed while it was packed: {sizes[7]:,} bytes.*{sizes[7] + 4:,}",
    ):
        pack(source, tmp_path / "out.h5")
    path.unlink()
    with pytest.raises(SampleError, match=path.name):
        pack(source, tmp_path / "out.h5")
    assert leftovers(tmp_path) == ["in"]


def test_an_existing_file_is_kept_unless_it_may_be_replaced(
    photos: Path, tiny_photos: Path, tmp_path: Path
) -> None:
    out = pack(photos, tmp_path / "out.h5")
    before = out.read_bytes()
    with pytest.raises(
        TargetExistsError, match=r"out\.h5 is there already: pass overwrite=True \(--overwrite\)"
    ) as caught:
        pack(tiny_photos, out)
    assert isinstance(caught.value, FileExistsError) and out.read_bytes() == before
    with pytest.raises(SampleError), warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadraceWarning)
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "a.jpg").write_bytes(b"")
        pack(tmp_path / "bad", out, overwrite=True)
    assert out.read_bytes() == before  # a failure keeps what was there
    assert pack(tiny_photos, out, overwrite=True) == out and len(ImageDataset(out)) == 4


def test_places_that_can_not_be_written(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="is no folder: make it first"):
        pack(photos, tmp_path / "none" / "out.h5")
    with pytest.raises(ConfigError, match="is a folder: name the file"):
        pack(photos, tmp_path)


def test_what_is_read_ahead_is_bounded(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the disk, the threads stay a few groups ahead of what is written."""
    monkeypatch.setattr(running, "GROUP_SAMPLES", 1)
    begun, written, ahead = [], [], []
    prepare, append = running._prepare, running.PackedWriter.append

    def counted(*arguments: Any) -> Any:
        begun.append(1)
        return prepare(*arguments)

    def slow(self: Any, samples: Any, checksums: Any) -> None:
        time.sleep(0.005)
        ahead.append(len(begun) - len(written))
        append(self, samples, checksums)
        written.append(1)

    monkeypatch.setattr(running, "_prepare", counted)
    monkeypatch.setattr(running.PackedWriter, "append", slow)
    pack(photos, tmp_path / "out.h5", workers=2)
    assert len(written) == 24 and max(ahead) <= 4


def test_groups_are_cut_by_bytes_too() -> None:
    assert [len(g) for g in samples.groups_of(np.arange(1000, 1100))] == [64, 36]
    sizes = np.arange(1000, 1024)
    large = sizes * (samples.GROUP_BYTES // 3000)
    groups = list(samples.groups_of(large))
    assert [i for g in groups for i in g] == list(range(24)) and all(
        len(g) >= 2 for g in groups[:-1]
    )
    assert all(int(large[g.start : g.stop].sum()) <= samples.GROUP_BYTES for g in groups)
    assert [len(g) for g in samples.groups_of(sizes * samples.GROUP_BYTES)] == [1] * 24


def test_what_the_file_says_of_itself(photos: Path, tmp_path: Path) -> None:
    info = packed_info(pack(images(photos), tmp_path / "out.h5", store="decoded"))
    assert info is not None and (info.kind, info.store, info.count) == ("image", "decoded", 24)
    assert info.image == {"color": "RGB", "image_size": list(SIZE)} and info.classes == [
        "circle",
        "gradient",
        "noise",
    ]
    assert str(tmp_path) not in (tmp_path / "out.h5").read_bytes().decode("latin-1")
    assert str(photos) not in (tmp_path / "out.h5").read_bytes().decode("latin-1")
