"""Samples of tar shards are what tarfile reads, and a damaged tar is an error."""

from __future__ import annotations

import gzip
import io
import pickle
import re
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import HeadraceWarning, TarSource
from headrace.errors import DataNotFoundError, FileChangedError, FormatError
from headrace.io.local.files import LocalFiles
from headrace.storage.tar import index as tar_made
from headrace.storage.tar import source as tar
from tests.data.make import make_tar

pytestmark = pytest.mark.quick_every(2)

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
Members = list[tuple[str, bytes]]


def by_tarfile(path: Path) -> list[dict[str, Any]]:
    """The samples, as WebDataset makes them of what Python's own module reads."""
    samples: list[dict[str, Any]] = []
    with tarfile.open(path, "r:") as file:
        for member in file:
            found = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", member.name, re.DOTALL)
            # WebDataset makes samples of some of these
            is_hidden = member.name.rpartition("/")[2].startswith(".")
            if (
                not member.isreg()
                or found is None
                or is_hidden
                or re.match(r"__[^/]*__($|/)", member.name)
            ):
                continue
            if not samples or samples[-1]["__key__"] != found[1]:
                samples.append({"__key__": found[1]})
            content = file.extractfile(member)
            assert content is not None and found[2].lower() not in samples[-1]
            samples[-1][found[2].lower()] = content.read()
    return samples


def without_url(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if name != "__url__"} for record in records
    ]


def read_all(path: Path, **options: Any) -> list[dict[str, Any]]:
    source = TarSource(path, **options)
    return without_url(source.read(range(len(source))))


def plain(count: int = 6, nbytes: int = 100) -> Members:
    """Samples 000, 001, ... of a .bin and a .cls."""
    data = np.random.default_rng(count).bytes(nbytes)
    return [
        (f"some/{n:03d}.{ending}", data[n % 7 :] if ending == "bin" else b"%d" % n)
        for n in range(count)
        for ending in ("bin", "cls")
    ]


# --- what is read ---------------------------------------------------------------------------------

_parts = st.text(
    st.characters(exclude_characters="/\0.", exclude_categories=["Cs"]), min_size=1, max_size=40
)
_names = st.tuples(
    st.lists(_parts, max_size=3),
    _parts,
    st.lists(st.sampled_from(["jpg", "PNG", "seg.png", "cls", ""]), unique=True, max_size=3),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(_names, max_size=6),
    st.integers(0, 3),
    st.sampled_from(FORMATS),
    st.randoms(use_true_random=False),
)
def test_it_reads_what_tarfile_reads(
    tmp_path: Path, names: list[Any], deep: int, form: int, random: Any
) -> None:
    members: Members = []
    for number, (folders, stem, endings) in enumerate(names):
        where = "/".join(
            [
                *["a" * 60] * (deep if form != tarfile.USTAR_FORMAT else 0),
                *folders,
                f"{number}{stem}",
            ]
        )
        members += [
            (
                f"{where}.{ending}" if ending else where,
                random.randbytes(random.choice([0, 1, 511, 512, 513, 2000])),
            )
            for ending in endings
        ]
    try:
        path = make_tar(tmp_path / "a.tar", members, form)
    except (ValueError, UnicodeEncodeError):  # a name that this format has no room for
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert read_all(path) == by_tarfile(path)


@pytest.mark.parametrize("form", FORMATS)
def test_long_names_of_all_kinds(tmp_path: Path, form: int) -> None:
    names = ["a" * 95, "b/" * 60 + "c" * 90, "é" * 40]
    if form != tarfile.USTAR_FORMAT:
        names += ["d" * 101, "e" * 600, "f/" * 200 + "g" * 300, "日本" * 80]
    members = [
        (f"{name}.{ending}", f"{name} {ending}".encode())
        for name in names
        for ending in ("jpg", "txt")
    ]
    path = make_tar(tmp_path / "a.tar", members, form)
    assert (
        read_all(path)
        == by_tarfile(path)
        == [
            {"__key__": name, **{ending: f"{name} {ending}".encode() for ending in ("jpg", "txt")}}
            for name in names
        ]
    )


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_sizes_beyond_the_usual_field(tmp_path: Path, form: int) -> None:
    """A member of 9 GiB: a hole, so that it takes no room."""
    large, small, path = tarfile.TarInfo("0.bin"), tarfile.TarInfo("1.txt"), tmp_path / "a.tar"
    large.size, small.size = 9 << 30, 5
    head = large.tobuf(form)
    with open(path, "wb") as file:
        file.write(head)
        file.seek(len(head) + large.size)
        file.write(small.tobuf(form) + b"small".ljust(512, b"\0") + bytes(1024))
    source = TarSource(path)
    assert source.sizes().tolist() == [9 << 30, 5] and source.read([1])[0]["txt"] == b"small"
    assert list(source.byte_ranges(np.array([0])).each()) == [
        (str(path), len(head), len(head) + large.size)
    ]


def test_what_is_no_part_of_a_sample(tmp_path: Path) -> None:
    hidden = [
        ("._000.jpg", b"mac"),
        ("some/._001.jpg", b"mac"),
        (".hidden", b""),
        ("__index__", b"{}"),
        ("__meta__/a.jpg", b""),
    ]
    path = make_tar(
        tmp_path / "a.tar",
        [*hidden, ("README", b"read me"), ("some/", b""), *plain(2), ("a.b/c.jpg", b"key a.b/c")],
    )
    source = TarSource(path)
    assert without_url(source.read([0, 1, 2])) == by_tarfile(path)
    assert [record["__key__"] for record in source.read([2, 0])] == ["a.b/c", "some/000"]
    assert "1 members have no key or no extension" in source.how()["samples"]


def test_extensions_are_lower_case_and_keys_are_not(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", [("A.JPG", b"1"), ("A.Seg.PNG", b"2"), ("a.jpg", b"3")])
    assert read_all(path) == [
        {"__key__": "A", "jpg": b"1", "seg.png": b"2"},
        {"__key__": "a", "jpg": b"3"},
    ]


def test_a_key_that_comes_again_is_another_sample(tmp_path: Path) -> None:
    path = make_tar(
        tmp_path / "a.tar", [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.jpg", b"3"), ("a.cls", b"4")]
    )
    assert read_all(path) == by_tarfile(path) and len(by_tarfile(path)) == 3


@pytest.mark.quick_every(1)
@pytest.mark.parametrize(
    ("names", "second"),
    [
        (["a.cls", "b.cls", "a.txt", "b.txt"], 2),
        (["./a.cls", "b.cls", "b.txt", "a.txt"], 3),
        (["d/a.cls", "a.cls", "d//a.txt"], 2),
    ],
)
def test_members_of_a_sample_that_lie_apart_are_an_error(
    names: list[str], second: int, tmp_path: Path
) -> None:
    path = make_tar(tmp_path / "a.tar", [(name, b"1") for name in names])
    places = rf"'cls' at byte 512 and 'txt' at byte {1024 * second + 512:,}"
    with pytest.raises(
        FormatError,
        match=rf"sample '{re.escape(names[0][:-4])}' lie apart \({places}\).*--sort=name",
    ):
        TarSource(path)


@pytest.mark.quick_every(1)
def test_a_folder_named_by_a_dot_is_the_same(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", [("./a.cls", b"1"), ("a.txt", b"2"), ("b.txt", b"3")])
    assert read_all(path) == [
        {"__key__": "./a", "cls": b"1", "txt": b"2"},
        {"__key__": "b", "txt": b"3"},
    ]


@pytest.mark.parametrize("second", ["a.JPG", "a.__key__"])
def test_a_second_member_of_one_name_is_an_error(tmp_path: Path, second: str) -> None:
    path = make_tar(tmp_path / "a.tar", [("a.jpg", b"1"), (second, b"2")])
    with pytest.raises(
        FormatError, match=f"{path.name}: member '{second}'.*is the second .* of sample 'a'"
    ):
        TarSource(path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_are_left_out_and_that_is_said(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        _add(file, "0.txt", b"zero")
        link = tarfile.TarInfo("1.txt")
        link.type, link.linkname = kind, "0.txt"
        file.addfile(link)
        _add(file, "2.txt", b"two")
    with pytest.warns(HeadraceWarning, match=r"1 members are links or devices.*a\.tar, '1\.txt'"):
        assert (
            read_all(path)
            == by_tarfile(path)
            == [{"__key__": "0", "txt": b"zero"}, {"__key__": "2", "txt": b"two"}]
        )


def test_sparse_members_are_refused(tmp_path: Path) -> None:
    gnu, pax = tarfile.TarInfo("0.bin"), tarfile.TarInfo("1.bin")
    gnu.type, pax.pax_headers = (
        tarfile.GNUTYPE_SPARSE,
        {"GNU.sparse.major": "1", "GNU.sparse.name": "real.bin"},
    )
    for number, (info, form) in enumerate([(gnu, tarfile.GNU_FORMAT), (pax, tarfile.PAX_FORMAT)]):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(info.tobuf(form) + bytes(1024))
        with pytest.raises(FormatError, match=f"{number}.tar: member .* at byte [0-9,]+ is sparse"):
            TarSource(path)


def test_global_headers(tmp_path: Path) -> None:
    for said, is_sound in (({"comment": "written by hand"}, True), ({"path": "all.txt"}, False)):
        path = tmp_path / "a.tar"
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers=said) as file:
            _add(file, "0.txt", b"zero")
        if is_sound:
            assert read_all(path) == [{"__key__": "0", "txt": b"zero"}]
        else:
            with pytest.raises(FormatError, match="gives all members that follow one path"):
                TarSource(path)


# --- several shards -------------------------------------------------------------------------------


def shards(folder: Path, counts: tuple[int, ...] = (3, 0, 5, 1)) -> Path:
    folder.mkdir()
    for number, count in enumerate(counts):
        make_tar(
            folder / f"{number}.tar",
            [(f"{number}-{name[5:]}", data) for name, data in plain(count, 300)],
        )
    return folder


def test_shards_are_one_source(tmp_path: Path) -> None:
    folder = shards(tmp_path / "shards")
    source, twin = (
        TarSource(folder),
        [sample for path in sorted(folder.iterdir()) for sample in by_tarfile(path)],
    )
    assert len(source) == len(twin) == 9
    assert without_url(source.read([8, 0, 3, 3, 2])) == [
        twin[8],
        twin[0],
        twin[3],
        twin[3],
        twin[2],
    ]
    assert [Path(record["__url__"]).name for record in source.read([0, 3, 8])] == [
        "0.tar",
        "2.tar",
        "3.tar",
    ]
    assert source.read([]) == [] and source.location(3) == f"{folder}/2.tar, sample '2-000'"
    assert source.sizes().tolist() == [
        sum(len(v) for k, v in sample.items() if k != "__key__") for sample in twin
    ]
    for (where, begin, end), sample in zip(
        source.byte_ranges(np.array([0, 8])).each(), (0, 8), strict=True
    ):
        bytes_there = Path(where).read_bytes()[begin:end]
        assert bytes_there.startswith(twin[sample]["bin"]) and bytes_there.endswith(
            twin[sample]["cls"]
        )
    ends = [list(source.byte_ranges(np.array(part)).each()) for part in ([0, 2], [3, 7], [8])]
    assert source.stored_nbytes == sum(part[-1][2] - part[0][1] for part in ends)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.read([4]) == source.read([4]) and copy.fingerprint() == source.fingerprint()


def test_many_extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "_FEW", 2)
    path = make_tar(tmp_path / "a.tar", [(f"a.{n}", b"%d" % n) for n in range(5)])
    assert read_all(path) == [{"__key__": "a", **{str(n): b"%d" % n for n in range(5)}}]


def test_the_fingerprint_is_of_names_and_sizes(tmp_path: Path) -> None:
    one, other = shards(tmp_path / "one"), shards(tmp_path / "other")
    known = TarSource(one).fingerprint()
    assert (
        TarSource(other).fingerprint()
        == known
        == TarSource([one / f"{n}.tar" for n in range(4)]).fingerprint()
    )
    make_tar(other / "3.tar", [("3-000.bin", b"")])
    assert TarSource(other).fingerprint() != known
    assert (
        len(
            {
                TarSource(shards(tmp_path / f"{n}", counts)).fingerprint()
                for n, counts in enumerate([(3, 1), (1, 3), (4,)])
            }
        )
        == 3
    )


def test_blocks_follow_from_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shards(tmp_path / "shards", (30, 0, 17, 1))
    assert TarSource(folder).blocks().tolist() == [30, 17, 1]
    # 4 samples, each of which takes 4 x 512 bytes
    monkeypatch.setattr("headrace.storage.blocks.LONGEST", 8192)
    assert TarSource(folder).blocks().tolist() == [4, 4, 4, 4, 4, 4, 4, 2, 4, 4, 4, 4, 1, 1]
    assert TarSource(shards(tmp_path / "empty", (0, 0))).blocks().tolist() == []


def test_no_shards(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"\.tar"):
        TarSource(tmp_path)


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_a_tar_that_is_cut_short_is_an_error_wherever(tmp_path: Path, form: int) -> None:
    whole = make_tar(
        tmp_path / "whole.tar",
        [
            *plain(2, 700),
            ("n" * (90 if form == tarfile.USTAR_FORMAT else 120) + ".txt", b"x" * 600),
        ],
        form,
    )
    data, path = whole.read_bytes(), tmp_path / "cut.tar"
    end = data.rstrip(b"\0").__len__()
    end = -(-end // 512) * 512
    for at in range(0, end + 1, 128):
        path.write_bytes(data[:at])
        with pytest.raises(FormatError, match=rf"cut\.tar (ends at byte {at:,}[ ,]|is empty)"):
            TarSource(path)
    path.write_bytes(data[: end + 512])  # one empty header is an end
    assert read_all(path) == read_all(whole) == by_tarfile(whole)


@pytest.mark.parametrize("form", FORMATS)
def test_flipped_bytes_of_headers_are_noticed(tmp_path: Path, form: int) -> None:
    """All but those that tarfile reads too: the bodies of extended headers have no checksum."""
    whole = make_tar(
        tmp_path / "whole.tar",
        [
            *plain(1, 700),
            ("é" * 30 + "n" * (10 if form == tarfile.USTAR_FORMAT else 120) + ".txt", b"x" * 600),
        ],
        form,
    )
    data, path, seen = whole.read_bytes(), tmp_path / "bad.tar", 0
    headers, bodies = _headers(whole)
    for at in [
        at
        for begin in headers
        for at in [*range(begin, begin + 160, 3), *range(begin + 160, begin + 512, 41)]
    ] + bodies:
        for bit in (0x01, 0x20):
            damaged = bytearray(data)
            damaged[at] ^= bit
            path.write_bytes(damaged)
            try:
                found = read_all(path)
            except FormatError as error:
                seen += 1
                assert "bad.tar" in str(error)
            else:
                assert at in bodies or found == by_tarfile(whole), at
                assert found == by_tarfile(path), at
    assert seen > 100


def _headers(path: Path) -> tuple[list[int], list[int]]:
    """Where headers begin, and some bytes of their extensions."""
    headers, bodies = [], []
    with tarfile.open(path, "r:") as file:
        for member in file:
            headers += sorted({member.offset, member.offset_data - 512})
            bodies += range(member.offset + 512, member.offset_data - 512, 7)
    return headers, bodies


@given(st.data())
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_a_format_error_or_none(tmp_path: Path, data: st.DataObject) -> None:
    whole = make_tar(tmp_path / "whole.tar", plain(2, 30), tarfile.PAX_FORMAT).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    some = data.draw(st.binary(max_size=600))
    path = tmp_path / "bad.tar"
    path.write_bytes(
        whole[:at] + some + whole[at + data.draw(st.sampled_from([0, len(some), 512])) :]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read_all(path)
        except FormatError as error:
            assert "bad.tar" in str(error)


def test_compressed_tars_are_refused(tmp_path: Path) -> None:
    data = make_tar(tmp_path / "a.tar", plain(2)).read_bytes()
    for name in ("a.tar.gz", "b.tgz", "c.tar"):
        folder = tmp_path / name[0] / "in"
        folder.mkdir(parents=True)
        (folder / name).write_bytes(gzip.compress(data))
        with pytest.raises(FormatError, match=r"compressed as a whole.*unpack it"):
            TarSource(folder)


def test_what_is_no_tar(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(b"no tar at all " * 100)
    with pytest.raises(FormatError, match=r"header at byte 0 .* is no tar, whatever its name says"):
        TarSource(path)
    path.write_bytes(bytes(10240))
    assert len(TarSource(path)) == 0  # an archive of nothing


def test_tars_that_were_simply_joined(tmp_path: Path) -> None:
    one, two = (
        make_tar(tmp_path / "one", plain(2)),
        make_tar(tmp_path / "two", [("9.bin", bytes(2 << 20))]),
    )
    path = tmp_path / "a.tar"
    path.write_bytes(one.read_bytes() + two.read_bytes())
    with pytest.warns(
        HeadraceWarning, match=r"bytes follow the end mark of .*a\.tar and are not read"
    ):
        assert len(TarSource(path)) == 2


def test_a_shard_that_changes_under_its_reader(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", plain(3))
    source = TarSource(path)
    source.read([0])
    make_tar(path, plain(4))
    with pytest.raises(FileChangedError, match="has been changed since it was opened"):
        source.read([1])
    source.close()


# --- the index ------------------------------------------------------------------------------------


def test_the_index_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, kept = shards(tmp_path / "shards"), tmp_path / "kept"
    expected = read_all(folder, cache_dir=kept)
    assert len(list(kept.iterdir())) == 4

    scanned: list[str] = []
    real = tar_made.scanned
    monkeypatch.setattr(
        tar_made,
        "scanned",
        lambda files, path: scanned.append(Path(path).name) or real(files, path),
    )
    assert read_all(folder, cache_dir=kept) == expected and not scanned
    make_tar(folder / "1.tar", [("new.txt", b"new")])  # another one under its name
    next(kept.iterdir()).write_bytes(b"damaged")
    assert len(read_all(folder, cache_dir=kept)) == 10
    assert "1.tar" in scanned and len(scanned) in (1, 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    # small ones are read again
    assert len(read_all(folder)) == 10 and not (tmp_path / "user").exists()
    monkeypatch.setattr(tar_made, "KEPT_FROM", 2)
    scanned.clear()
    assert len(read_all(folder)) == len(read_all(folder)) == 10 and sorted(scanned) == [
        "0.tar",
        "1.tar",
        "1.tar",
        "2.tar",
        "3.tar",
    ]


def test_a_cache_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    path = make_tar(tmp_path / "a.tar", plain(3))
    with pytest.warns(
        HeadraceWarning,
        match=r"cache_dir=.*file.*: indices of tars are not kept \(.*\), so headers are read",
    ):
        assert len(read_all(path, cache_dir=tmp_path / "file")) == 3


class Counted(LocalFiles):
    """Notes how many bytes each read has."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[int] = []

    def read_into(self, ranges: Any, buffers: Any) -> None:
        self.reads.append(int(ranges.nbytes.sum()))
        super().read_into(ranges, buffers)


def test_large_members_are_hopped_over(tmp_path: Path) -> None:
    for nbytes, most in ((300_000, 10 * 4096 + (256 << 10)), (100, 1 << 20)):
        path = make_tar(tmp_path / "a.tar", [(f"{n}.bin", bytes(nbytes)) for n in range(10)])
        files = Counted()
        index = tar_made.scanned(files, str(path))
        files.close()
        reads = files.reads
        assert len(index.keys) == 10 and sum(reads) <= most
        assert len(reads) <= (11 if nbytes > 100 else 1)


def _add(file: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    file.addfile(info, io.BytesIO(data))
