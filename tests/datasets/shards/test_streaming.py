"""StreamingDataset: each sample of its shards once, in an order that follows from their layout."""

from __future__ import annotations

import gzip
import io
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
import zstandard
from torch.utils.data import DataLoader, IterableDataset

from headrace import (
    ConfigError,
    HDF5Dataset,
    ImageDataset,
    RandomResizedCrop,
    SampleError,
    StreamingDataset,
    create_dataloader,
    pack,
)
from headrace.datasets.core import loading
from headrace.datasets.shards import streaming
from headrace.errors import DataNotFoundError, FormatError, StateError
from headrace.io.resolve.expressions import expand_braces
from headrace.modes import LoadingMode
from headrace.order import RankBatches
from headrace.order.lanes import interleave_for
from headrace.order.visits import count_visits
from headrace.storage.text import source as texts
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.data.make import make_photos, make_shards, make_tar

pytestmark = pytest.mark.quick_every(4)

UNEVEN = (7, 0, 1, 14, 2, 13)


class Lazily(StreamingDataset):
    """The same samples in another mode, for comparisons."""

    _in_mode = LoadingMode.LAZY


class Eagerly(StreamingDataset):
    """As above."""

    _in_mode = LoadingMode.EAGER


class Cachingly(StreamingDataset):
    """As above."""

    _in_mode = LoadingMode.CACHED


IN_MODE = {"streaming": StreamingDataset, "lazy": Lazily, "eager": Eagerly, "cached": Cachingly}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small shards have several."""
    monkeypatch.setattr("headrace.storage.blocks.LONGEST", 10 << 10)
    monkeypatch.setattr(texts, "block_length", lambda _: 100)


# --- the laws -------------------------------------------------------------------------------------


class OfShards(DatasetContract):
    """Streaming by default."""

    ending: str

    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.getbasetemp() / f"contract-shards-{self.ending}"
        if not self.path.exists():
            make_shards(self.path, UNEVEN, self.ending)

    def make(self, **options: Any) -> Any:
        return IN_MODE[str(options.pop("loading_mode", "streaming"))](
            self.path, buffer_size=6, **options
        )

    def test_law_3_a_state_of_other_data_is_refused(self) -> None:
        other = make_shards(self.path.with_name(f"other-{self.ending}"), (3, 4), self.ending)
        state = self._loader(self.make()).state_dict()
        with pytest.raises(StateError, match=state["fingerprint"]):
            self._loader(StreamingDataset(other)).load_state_dict(state)


@pytest.mark.quick_every(4)
class TestTar(OfShards):
    ending = "tar"

    def make_bad(self, **options: Any) -> tuple[Any, list[int]]:
        path = self.path.with_name("contract-bad.tar")
        if not path.exists():
            said = [
                ("png", b"\x89PNG no image") if n in (2, 13) else ("cls", b"%d" % n)
                for n in range(24)
            ]
            make_tar(path, [(f"{n:02d}.{ending}", data) for n, (ending, data) in enumerate(said)])
        return IN_MODE[str(options.pop("loading_mode", "streaming"))](path, **options), [2, 13]


@pytest.mark.slow
class TestJSONLines(OfShards):
    ending = "jsonl"

    def make_bad(self, **options: Any) -> tuple[Any, list[int]]:
        path = self.path.with_name("contract-bad.jsonl")
        path.write_text(
            "".join("{broken\n" if n in (2, 13) else f'{{"n": {n}}}\n' for n in range(24))
        )
        return IN_MODE[str(options.pop("loading_mode", "streaming"))](path, **options), [2, 13]


del OfShards  # pytest would collect it


# --- exactly once, on any number of ranks and workers ---------------------------------------------


@pytest.fixture(params=["tar", "jsonl"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_shards(tmp_path / "shards", UNEVEN, request.param)


def number_of(sample: Any) -> int:
    return int(sample["cls"] if "cls" in sample else sample["number"])


@pytest.mark.parametrize("counts", [UNEVEN, (3,), (0, 0, 5), (1, 1, 1), (0, 0)], ids=str)
def test_a_plain_dataloader_gives_each_sample_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    """Ranks and workers without processes; each rank gets as many samples."""
    dataset, n = StreamingDataset(make_shards(tmp_path / "shards", counts)), sum(counts)
    for ranks in (1, 2, 4):
        seen: list[list[int]] = []
        for rank in range(ranks):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(ranks))
            for workers in (1, 3):
                of_rank = []
                for worker in range(workers):
                    monkeypatch.setattr(
                        loading,
                        "get_worker_info",
                        lambda w=worker, k=workers: SimpleNamespace(
                            id=w, num_workers=k, dataset=None
                        ),
                    )
                    of_rank += [number_of(sample) for sample in dataset]
                if workers == 1:
                    seen.append(of_rank)
                else:
                    assert Counter(of_rank) == Counter(seen[-1])
        assert len({len(one) for one in seen}) == 1
        together = Counter(number for one in seen for number in one)
        assert set(together) == set(range(n)) and sum(together.values()) == n + (
            -n % ranks if n else 0
        )


@pytest.mark.quick_every(8)
@pytest.mark.parametrize(
    ("ranks", "workers"),
    [
        (r, w) if w == 0 or (r, w) == (2, 1) else pytest.param(r, w, marks=pytest.mark.slow)
        for r in (1, 2, 4)
        for w in (0, 1, 3)
    ],
)
def test_loaders_give_each_sample_once(
    shards: Path, ranks: int, workers: int, make_loader: Any
) -> None:
    seen, lengths = Counter[int](), set()
    for rank in range(ranks):
        loader = make_loader(
            StreamingDataset(shards),
            batch_size=3,
            num_workers=workers,
            rank=rank,
            world_size=ranks,
            collate_fn="list",
        )
        batches = list(loader)
        assert len(batches) == len(loader) and loader.padding == -37 % ranks
        lengths.add(len(batches))
        seen.update(number_of(sample) for batch in batches for sample in batch)
    assert (
        set(seen) == set(range(37)) and sum(seen.values()) == 37 + -37 % ranks and len(lengths) == 1
    )


@pytest.mark.slow
def test_resume_at_every_step_on_other_ranks(tmp_path: Path, make_loader: Any) -> None:
    shards = make_shards(tmp_path / "shards", UNEVEN, "jsonl")

    def loaders(ranks: int) -> list[Any]:
        dataset = StreamingDataset(shards)
        return [
            make_loader(
                dataset,
                batch_size=8 // ranks,
                num_workers=0,
                rank=r,
                world_size=ranks,
                collate_fn="list",
                seed=3,
            )
            for r in range(ranks)
        ]

    def dealt(batches: list[list[Any]]) -> list[int]:
        return [
            number_of(one[i])
            for i in range(max(map(len, batches)))
            for one in batches
            if i < len(one)
        ]

    whole = [number_of(sample) for batch in loaders(1)[0] for sample in batch]
    assert sorted(whole) == list(range(37)) and whole != sorted(whole)
    for before, after in ((1, 2), (2, 4), (4, 1), (2, 1)):
        for step in range(6):
            saved = loaders(before)
            states = []
            for loader in saved:
                iterator = iter(loader)
                for _ in range(step):
                    next(iterator, None)
                states.append(loader.state_dict())
                del iterator
            resumed = loaders(after)
            for loader in resumed:
                loader.load_state_dict(pickle.loads(pickle.dumps(states[-1])))
            if step == 5:
                continue  # the epoch is through: the next one comes
            rest = [number for parts in zip(*resumed, strict=True) for number in dealt(list(parts))]
            padding = -37 % after
            assert rest == whole[8 * step :] + whole[:padding]


def test_ranks_and_workers_have_blocks_of_their_own(tmp_path: Path) -> None:
    """Which are read once, but for those that a lane's end cuts: by arithmetic, for 4 ranks x 8
    workers.
    """
    counts = tuple(np.random.default_rng(1).integers(0, 40, 40).tolist())
    dataset = StreamingDataset(make_shards(tmp_path / "shards", counts, "jsonl"), buffer_size=40)
    blocks = dataset.blocks()
    assert blocks is not None and blocks.sum() == sum(counts) and len(blocks) > 200
    order = dataset.epoch_order("block", 1, 0, 16)
    assert (order.interleave, order.turns) == (8, 24)
    visits = count_visits(RankBatches(order, 0, 4, 4), 8, blocks)
    assert visits.readings <= len(blocks) + order.interleave * order.turns - 1


# --- what a sample is -----------------------------------------------------------------------------


def npy(value: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, value)
    return out.getvalue()


def npz(**values: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **values)
    return out.getvalue()


@pytest.fixture
def one_of_each(tmp_path: Path, tiny_photos: Path) -> Path:
    jpeg = next(
        path for path in sorted(tiny_photos.rglob("*")) if path.suffix.lower() == ".jpg"
    ).read_bytes()
    members = {
        "jpg": jpeg,
        "cls": b"7\n",
        "txt": "Mühle".encode(),
        "json": b'{"a": [1, 2]}',
        "npy": npy(np.arange(6.0).reshape(2, 3)),
        "npz": npz(x=np.arange(3)),
        "seg.png": b"mask",
        "pickle": pickle.dumps(1),
        "bin": b"\0\1",
    }
    return make_tar(
        tmp_path / "a.tar", [(f"some/one.{name}", data) for name, data in members.items()]
    )


def only(dataset: Any) -> Any:
    (sample,) = dataset
    return sample


def test_members_are_decoded_by_their_extension(one_of_each: Path) -> None:
    sample = only(StreamingDataset(one_of_each, decode={"seg.png": bytes.decode}))
    assert sample["jpg"].dtype == torch.uint8 and sample["jpg"].shape == (3, 12, 16)
    assert sample["cls"] == 7 and sample["txt"] == "Mühle" and sample["json"] == {"a": [1, 2]}
    assert sample["npy"].tolist() == [[0, 1, 2], [3, 4, 5]] and sample["npz"]["x"].tolist() == [
        0,
        1,
        2,
    ]
    assert sample["pickle"] == pickle.dumps(1) and sample["bin"] == b"\0\1"  # nothing is run
    assert sample["seg.png"] == "mask"
    assert sample["__key__"] == "some/one" and sample["__url__"] == str(one_of_each)


def test_decoders_of_ones_own_come_first(one_of_each: Path) -> None:
    sample = only(StreamingDataset(one_of_each, decode={".JPG": None, "png": len, "bin": list}))
    assert (
        isinstance(sample["jpg"], bytes)
        and sample["seg.png"] == 4
        and sample["bin"] == [0, 1]
        and sample["cls"] == 7
    )
    raw = only(StreamingDataset(one_of_each, decode=False))
    assert {type(value) for name, value in raw.items() if not name.startswith("__")} == {bytes}


def test_a_member_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", [("a.cls", b"1"), ("b.cls", b"one")])
    with pytest.raises(SampleError, match=r"a\.tar, sample 'b': member 'cls': invalid literal"):
        list(StreamingDataset(path))
    assert [s["cls"] for s in StreamingDataset(path, on_error="skip")] == [1]
    stand_in = StreamingDataset(
        path, on_error=lambda index, where, error: {"cls": -1, "__key__": where}
    )
    assert sorted(s["cls"] for s in stand_in) == [-1, 1]


def test_batches_of_tar_samples_are_stacked(tmp_path: Path, make_loader: Any) -> None:
    loader = make_loader(
        StreamingDataset(make_shards(tmp_path / "s", (5, 6))), batch_size=11, num_workers=0
    )
    (batch,) = loader
    assert batch["png"].shape == (11, 3, 12, 16) and sorted(batch["cls"].tolist()) == list(
        range(11)
    )
    assert loader.get_stats()["bytes_read"] > sum(
        int(size) for size in loader.dataset.sample_source.sizes()
    )
    assert torch.equal(batch["json"]["number"], batch["cls"]) and batch["__key__"] == [
        f"{n:06d}" for n in batch["cls"]
    ]


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("ending", ["jsonl", "txt"])
def test_texts(tmp_path: Path, ending: str, packed: str) -> None:
    folder = make_shards(tmp_path / "shards", UNEVEN, ending)
    compress: Callable[[bytes], bytes] = {
        "": bytes,
        ".gz": gzip.compress,
        ".zst": zstandard.compress,
    }[packed]
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        path.unlink()
        path.with_name(path.name + packed).write_bytes(compress(data))
    dataset = StreamingDataset(folder, cache_dir=tmp_path / "kept")
    blocks = dataset.blocks()
    assert blocks is not None and len(blocks) > 5 and blocks.sum() == 37
    expected = [
        {"number": n, "text": f"line {n}"} if ending == "jsonl" else f"line {n}" for n in range(37)
    ]
    key: Any = str if ending == "txt" else number_of
    assert sorted(dataset, key=key) == sorted(expected, key=key) and list(dataset) != expected


def test_blank_lines_are_no_objects_and_are_lines(tmp_path: Path) -> None:
    for ending, count in (("jsonl", 3), ("txt", 6)):
        path = tmp_path / f"a.{ending}"
        path.write_text("1\n\n2\n\n\n3")
        dataset = StreamingDataset(path)
        blocks = dataset.blocks()
        assert len(dataset) == count and blocks is not None and blocks.sum() == count


def test_blocks_of_lines_leave_blank_ones_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{n}\n" + "\n" * (n % 3) for n in range(200)))
    (tmp_path / "b.jsonl").write_text("\n\n\n")
    (tmp_path / "c.jsonl").write_text("200\n")
    dataset = Lazily([path, tmp_path / "b.jsonl", tmp_path / "c.jsonl"])
    at = 0
    for size in dataset.blocks().tolist():
        offsets = [dataset.sample_source.offset_of(index) // 100 for index in range(at, at + size)]
        assert len(set(offsets)) == 1 and size > 0
        at += size
    assert at == len(dataset) == 201 and [dataset[i] for i in (0, 150, 200)] == [0, 150, 200]


def test_arrays_come_as_their_datasets_give_them(tmp_path: Path) -> None:
    rows = np.arange(60, dtype="f4").reshape(20, 3)
    for number, part in enumerate(np.split(rows, [13])):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["rows"], file["labels"] = part, np.arange(len(part))
        root = zarr.open_group(tmp_path / f"{number}.zarr", mode="w")
        root.create_array("rows", shape=part.shape, dtype="f4", chunks=(4, 3))[...] = part
        root.create_array("labels", shape=(len(part),), dtype="i8", chunks=(4,))[...] = np.arange(
            len(part)
        )
    for pattern in ("*.h5", "*.zarr", "{0..1}.h5", "{0,1}.zarr"):
        dataset = StreamingDataset(
            str(tmp_path / pattern), dataset_name="rows", target_name="labels"
        )
        samples = sorted(dataset, key=lambda sample: float(sample[0][0]))
        assert torch.equal(torch.stack([row for row, _ in samples]), torch.from_numpy(rows))
        assert [label for _, label in samples] == [*range(13), *range(7)]
    for path in tmp_path.glob("*.h5"):
        path.unlink()
    assert len(StreamingDataset(tmp_path, dataset_name="rows")) == 20  # a folder of stores


def test_packed_images_come_as_images(tmp_path: Path, tiny_photos: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.h5", "b.h5"):
        pack(ImageDataset(tiny_photos), tmp_path / "in" / name, progress=False)
    crop = RandomResizedCrop(8)
    for options in (
        {"transform": None},
        {"transform": crop},
        {"transform": [crop, lambda image: torch.tensor(image.size)]},
    ):
        dataset = StreamingDataset(tmp_path / "in", **options)
        twin = ImageDataset(tmp_path / "in" / "a.h5", **options)
        assert dataset.classes == twin.classes and len(dataset) == 8
        ordered = Lazily(tmp_path / "in", **options)
        twin.set_epoch(0)
        ordered.set_epoch(0)
        assert same([ordered[i] for i in range(4)], [twin[i] for i in range(4)])
        assert same([ordered[i + 4][1] for i in range(4)], [twin[i][1] for i in range(4)])
        dataset.set_epoch(1)
        epoch = list(dataset)
        assert len(epoch) == 8 and epoch[0][0].shape == twin[0][0].shape
    other = make_photos(tmp_path / "other", classes=("noise",), per_class=1)
    pack(ImageDataset(other), tmp_path / "in" / "c.h5", progress=False)
    with pytest.raises(
        FormatError, match="can't be one dataset: they were packed with other classes"
    ):
        StreamingDataset(tmp_path / "in")


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixed", "samples", "blocks", "expected"),
    [
        *(
            (1000, 100_000, 5000, 64),
            (1000, 10**6, 100, 1),
            (100, 1000, 1000, 128),
            (10**6, 10**6, 100, 64),
        ),
        *((1, 10, 3, 1), (5, 0, 0, 1), (1000, 7, 1, 1)),
    ],
)
def test_open_blocks_hold_the_shuffle_buffer(
    mixed: int, samples: int, blocks: int, expected: int
) -> None:
    assert interleave_for(mixed, samples, blocks) == expected
    assert interleave_for(mixed, samples, blocks, least=8) == max(
        expected, 1 << (min(8, max(1, blocks)).bit_length() - 1)
    )


def test_order_is_a_function_of_its_parameters(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def numbers(*args: Any, epoch: int = 0, **options: Any) -> list[int]:
        dataset = StreamingDataset(*args, **options)
        dataset.set_epoch(epoch)
        return [number_of(sample) for sample in dataset]

    known = numbers(shards, buffer_size=200)
    assert (
        numbers(str(shards / "*"), buffer_size=200)
        == numbers(sorted(shards.iterdir()), buffer_size=200)
        == known
    )
    assert (
        numbers(shards, buffer_size=200, seed=1)
        != known
        != numbers(shards, buffer_size=200, epoch=1)
    )
    monkeypatch.setattr(streaming, "FEWEST", 1)
    narrow, wide = (
        StreamingDataset(shards, buffer_size=1),
        StreamingDataset(shards, buffer_size=10**6),
    )
    assert narrow.lanes(len(narrow.blocks())) != wide.lanes(len(wide.blocks()))


@pytest.mark.slow
def test_loaders_of_any_number_of_workers_and_plain_ones_agree(
    tmp_path: Path, make_loader: Any
) -> None:
    folder = make_shards(tmp_path / "shards", UNEVEN)
    expected = [
        batch["cls"].tolist()
        for batch in make_loader(StreamingDataset(folder), batch_size=5, num_workers=0, seed=2)
    ]
    for workers in (1, 2):
        loader = make_loader(StreamingDataset(folder), batch_size=5, num_workers=workers, seed=2)
        assert [batch["cls"].tolist() for batch in loader] == expected
    plain = [
        sample["cls"]
        for sample in DataLoader(StreamingDataset(folder), batch_size=None, num_workers=2)
    ]
    assert Counter(plain) == Counter(range(37))


# --- what users see -------------------------------------------------------------------------------


def test_it_is_an_iterable_dataset(shards: Path) -> None:
    dataset = StreamingDataset(shards, buffer_size=50)
    assert (
        isinstance(dataset, IterableDataset)
        and len(dataset) == 37
        and dataset.loading_mode == "streaming"
    )
    with pytest.raises(TypeError, match="no random access"):
        dataset[0]
    assert repr(
        dataset
    ) == f"StreamingDataset(urls={shards}, buffer_size=50)  # 37 samples".replace(
        str(shards), repr(str(shards))
    )
    again = eval(repr(dataset))
    assert (
        [number_of(s) for s in again]
        == [number_of(s) for s in pickle.loads(pickle.dumps(dataset))]
        == [number_of(s) for s in dataset]
    )
    said = dataset.explain()
    assert "buffer_size 50: of " in said and "37 samples from" in said
    assert ("members are decoded by their extension" in said) == ("cls" in next(iter(dataset)))
    part = dataset.subset(range(5, 20))
    assert sorted(number_of(sample) for sample in part) == list(range(5, 20))
    dataset.close()


def test_transforms_get_the_sample(shards: Path, make_loader: Any) -> None:
    def drawn(sample: Any) -> Any:
        return number_of(sample), float(torch.rand(()))

    dataset = StreamingDataset(shards, transform=drawn)
    assert sorted(dataset) == sorted(
        sample
        for batch in make_loader(dataset, num_workers=0, collate_fn="list", seed=42)
        for sample in batch
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"buffer_size": 0}, "buffer_size must be"),
        ({"buffer_size": True}, "buffer_size must be"),
        ({"loading_mode": "lazy"}, "loading_mode has no meaning"),
        ({"shared": "machine"}, "shared has no meaning"),
        ({"decode": 3}, "decode must be"),
        ({"decode": {"jpg": 3}}, r"decode\['jpg'\] must be a callable"),
        ({"dataset_name": "rows"}, "dataset_name is for .h5 and .zarr shards, and these are .tar"),
        ({"target_name": "rows"}, "target_name is for"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    folder = make_shards(tmp_path / "shards", (2,))
    with pytest.raises(ConfigError, match=said):
        StreamingDataset(folder, **options)


def test_shards_that_are_none_or_of_several_kinds(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"ends in any of \.tar"):
        StreamingDataset(tmp_path)
    folder = make_shards(tmp_path / "shards", (2,))
    make_shards(folder, (1, 1), "jsonl")
    with pytest.raises(
        ConfigError, match=r"shards of several kinds .*part-000\.tar.*'folder/\*\.tar'"
    ):
        StreamingDataset(folder)
    with pytest.raises(ConfigError, match=r"decode is for \.tar shards"):
        StreamingDataset(folder / "*.jsonl", decode=False)
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(FormatError, match="does not say which kind"):
        StreamingDataset(tmp_path / "a.bin")
    zarr.open_array(folder / "a.zarr", mode="w", shape=(3,), chunks=(1,), dtype="i4")
    with pytest.raises(ConfigError, match="several kinds"):
        StreamingDataset(folder)
    (tmp_path / "a.tar.gz").write_bytes(b"")
    with pytest.raises(FormatError, match="compressed as a whole"):
        StreamingDataset(tmp_path / "a.tar.gz")


BRACES = [
    ("a-{000..003}.tar", [f"a-{n:03d}.tar" for n in range(4)]),
    ("a-{0..10}.tar", [f"a-{n}.tar" for n in range(11)]),
    ("a-{08..010}.tar", ["a-008.tar", "a-009.tar", "a-010.tar"]),
    ("{1..9..4}-{5..0..2}", ["1-5", "1-3", "1-1", "5-5", "5-3", "5-1", "9-5", "9-3", "9-1"]),
    ("a-{9..11}.tar", ["a-9.tar", "a-10.tar", "a-11.tar"]),
    ("{b,a}/{1..0}", ["b/1", "b/0", "a/1", "a/0"]),
    ("{x{1,2},y}", ["x1", "y", "x2"]),
    ("plain", ["plain"]),
    ("{one}-{}", ["{one}-{}"]),
]


@pytest.mark.parametrize(("pattern", "names"), BRACES)
def test_braces(pattern: str, names: list[str]) -> None:
    assert expand_braces(pattern) == names


def test_braces_that_are_part_of_a_name(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "{1,2}.tar", [("a.cls", b"1")])
    assert len(StreamingDataset(str(path))) == 1
    with pytest.raises(ConfigError, match="more than 1,000,000 names"):
        expand_braces("{0..9999}-{0..9999}.tar")


def test_rows_are_as_hdf5datasets_are(tmp_path: Path, make_loader: Any) -> None:
    """Through whole batches: what is decoded there goes straight into its row."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset(
            "data", data=np.arange(200.0).reshape(50, 4), chunks=(7, 4), compression="gzip"
        )
    streams = make_loader(
        StreamingDataset(tmp_path / "a.h5"), batch_size=8, num_workers=0, shuffle=False
    )
    rows = make_loader(HDF5Dataset(tmp_path / "a.h5"), batch_size=8, num_workers=0, shuffle=False)
    assert same(list(streams), list(rows))
    shuffled = torch.cat(
        list(create_dataloader(StreamingDataset(tmp_path / "a.h5"), batch_size=8, num_workers=0))
    )
    assert torch.equal(
        shuffled[shuffled[:, 0].argsort()], torch.arange(200.0, dtype=torch.float64).reshape(50, 4)
    )
