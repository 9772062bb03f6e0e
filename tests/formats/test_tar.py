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
from hypothesis import HealthCheck, given, settings, strategies as st

from headrace import HeadraceWarning
from headrace.errors import DataNotFoundError, FormatError
from headrace.formats import tar as tar_made
from headrace.formats.tar import TarSource
from headrace.io.local_files import LocalFiles
from headrace.io.ranges import ByteRanges
from headrace.io.remote.options import RemoteOptions
from tests.data.make import make_tar

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
Members = list[tuple[str, bytes]]
SIZES = {"jpg": 20_000, "mp4": 5 << 20}


def by_tarfile(path: Path) -> list[dict[str, Any]]:
    """The samples, as WebDataset makes them of what Python's own module reads."""
    samples: list[dict[str, Any]] = []
    with tarfile.open(path, "r:") as file:
        for member in file:
            found = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", member.name, re.DOTALL)
            # WebDataset makes samples of some of these
            is_hidden = member.name.rpartition("/")[2].startswith(".")
            is_meta = re.match(r"__[^/]*__($|/)", member.name)
            if not member.isreg() or found is None or is_hidden or is_meta:
                continue
            if not samples or samples[-1]["__key__"] != found[1]:
                samples.append({"__key__": found[1]})
            content = file.extractfile(member)
            assert content is not None and found[2].lower() not in samples[-1]
            samples[-1][found[2].lower()] = content.read()
    return samples


def without_url(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for record in records:
        del record["__url__"]
    return records


def read_all(path: Path, cache_dir: Path | None = None) -> list[dict[str, Any]]:
    source = TarSource(path, RemoteOptions(cache_dir=cache_dir))
    return without_url(source.read(range(len(source))))


def plain(count: int = 6, nbytes: int = 100, prefix: str = "some/") -> Members:
    """Samples 000, 001, ... of a .bin and a .cls."""
    data = np.random.default_rng(count).bytes(nbytes)
    members = []
    for n in range(count):
        members.append((f"{prefix}{n:03d}.bin", data[n % 7 :]))
        members.append((f"{prefix}{n:03d}.cls", b"%d" % n))
    return members


# --- what is read ---------------------------------------------------------------------------------

_parts = st.text(
    st.characters(exclude_characters="/\0.", exclude_categories=["Cs"]), min_size=1, max_size=40
)
_endings = st.lists(st.sampled_from(["jpg", "PNG", "seg.png", "cls", ""]), unique=True, max_size=3)
_names = st.tuples(st.lists(_parts, max_size=3), _parts, _endings)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        long = ["a" * 60] * (deep if form != tarfile.USTAR_FORMAT else 0)
        where = "/".join([*long, *folders, f"{number}{stem}"])
        for ending in endings:
            content = random.randbytes(random.choice([0, 1, 511, 512, 513, 2000]))
            members.append((f"{where}.{ending}" if ending else where, content))
    try:
        path = make_tar(tmp_path / "a.tar", members, form)
    except (ValueError, UnicodeEncodeError):  # a name that this format has no room for
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert read_all(path) == by_tarfile(path)


def test_sizes_beyond_the_usual_field(tmp_path: Path) -> None:
    """A member of 9 GiB: a hole, so that it takes no room."""
    large, small, path = tarfile.TarInfo("0.bin"), tarfile.TarInfo("1.txt"), tmp_path / "a.tar"
    large.size, small.size = 9 << 30, 5
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        head = large.tobuf(form)
        with open(path, "wb") as file:
            file.write(head)
            file.seek(len(head) + large.size)
            file.write(small.tobuf(form) + b"small".ljust(512, b"\0") + bytes(1024))
        source = TarSource(path)
        assert source.sizes().tolist() == [9 << 30, 5] and source.read([1])[0]["txt"] == b"small"
        ranges = list(source.byte_ranges(np.array([0])).each())
        assert ranges == [(str(path), len(head), len(head) + large.size)]


def test_what_is_a_sample(tmp_path: Path) -> None:
    """What is hidden or has no ending is none; a key that comes again is another one."""
    hidden = ["._000.jpg", "some/._001.jpg", ".hidden", "__index__", "__meta__/a.jpg", "README"]
    path = make_tar(
        tmp_path / "a.tar",
        [*((name, b"") for name in [*hidden, "some/"]), *plain(2), ("a.b/c.jpg", b"key a.b/c")],
    )
    source = TarSource(path)
    assert without_url(source.read([0, 1, 2])) == by_tarfile(path)
    assert [record["__key__"] for record in source.read([2, 0])] == ["a.b/c", "some/000"]
    assert "; 1 members have no key or no extension" in source.describe().ways["samples"]
    for names, keys in (
        (["A.JPG", "A.Seg.PNG", "a.jpg"], {"A": ["jpg", "seg.png"], "a": ["jpg"]}),
        (["./a.cls", "a.txt", "b.txt"], {"./a": ["cls", "txt"], "b": ["txt"]}),
    ):
        found = read_all(make_tar(tmp_path / "b.tar", [(name, b"1") for name in names]))
        assert {record["__key__"]: [*record][1:] for record in found} == keys
    again = [(name, b"1") for name in ("a.jpg", "b.jpg", "a.jpg", "a.cls")]
    path = make_tar(tmp_path / "c.tar", again)
    assert read_all(path) == by_tarfile(path) and len(by_tarfile(path)) == 3


def test_members_that_are_no_one_sample_are_an_error(tmp_path: Path) -> None:
    for names, said in (
        (["a.cls", "b.cls", "a.txt", "b.txt"], r"'a' .*byte 512 .*byte 2,560"),
        (["./a.cls", "b.cls", "b.txt", "a.txt"], r"'\./a' .*byte 512 .*byte 3,584"),
        (["d/a.cls", "a.cls", "d//a.txt"], r"'d/a' .*byte 512 .*byte 2,560"),
        (["a.jpg", "a.JPG"], r"a\.tar: member 'a\.JPG'.* of sample 'a'"),
        (["a.jpg", "a.__key__"], r"a\.tar: member 'a\.__key__'.* of sample 'a'"),
    ):
        path = make_tar(tmp_path / "a.tar", [(name, b"1") for name in names])
        with pytest.raises(FormatError, match=said):
            TarSource(path)


def test_links_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
        path = make_tar(tmp_path / "a.tar", [("0.txt", b"zero")])
        with tarfile.open(path, "a") as file:
            link = tarfile.TarInfo("1.txt")
            link.type, link.linkname = kind, "0.txt"
            file.addfile(link)
        with pytest.warns(HeadraceWarning, match=r"1 members .*a\.tar, '1\.txt'"):
            assert read_all(path) == by_tarfile(path) == [{"__key__": "0", "txt": b"zero"}]


def test_sparse_members_are_refused(tmp_path: Path) -> None:
    gnu, pax = tarfile.TarInfo("0.bin"), tarfile.TarInfo("1.bin")
    gnu.type = tarfile.GNUTYPE_SPARSE
    pax.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.name": "real.bin"}
    for info, form in ((gnu, tarfile.GNU_FORMAT), (pax, tarfile.PAX_FORMAT)):
        path = tmp_path / "a.tar"
        path.write_bytes(info.tobuf(form) + bytes(1024))
        with pytest.raises(FormatError, match=r"a\.tar: member .* is sparse"):
            TarSource(path)


def test_of_large_members_headers_alone_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = [*plain(2000), ("a.0.jpg", b"")]  # near one another
    large = [(f"{n}.{end}", bytes(size)) for n in range(8) for end, size in SIZES.items()]
    path = make_tar(tmp_path / "a.tar", [*head, *large])
    sizes = list[int]()
    read_into = LocalFiles.read_into

    def counted(files: LocalFiles, ranges: ByteRanges, buffers: Any) -> Any:
        sizes.append(int(ranges.nbytes.sum()))
        return read_into(files, ranges, buffers)

    monkeypatch.setattr(LocalFiles, "read_into", counted)
    assert len(TarSource(path)) == 2009
    assert sum(sizes) < (8 << 20) + 8 * (300 << 10)


def test_global_headers(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    for headers in ({"comment": "written by hand"}, {"path": "all.txt"}):
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers=headers) as file:
            info = tarfile.TarInfo("0.txt")
            info.size = 4
            file.addfile(info, io.BytesIO(b"zero"))
        if "comment" in headers:
            assert read_all(path) == [{"__key__": "0", "txt": b"zero"}]
        else:
            with pytest.raises(FormatError, match=r"a\.tar"):
                TarSource(path)


# --- several shards -------------------------------------------------------------------------------


def shards(folder: Path, counts: tuple[int, ...] = (3, 0, 5, 1)) -> Path:
    folder.mkdir()
    for number, count in enumerate(counts):
        make_tar(folder / f"{number}.tar", plain(count, 300, f"{number}-"))
    return folder


def test_shards_are_one_source(tmp_path: Path) -> None:
    folder = shards(tmp_path / "shards")
    source, twin = TarSource(folder), []
    for path in sorted(folder.iterdir()):
        twin += by_tarfile(path)
    order = [8, 0, 3, 3, 2]
    assert len(source) == len(twin) == 9
    assert without_url(source.read(order)) == [twin[index] for index in order]
    urls = [Path(record["__url__"]).name for record in source.read([0, 3, 8])]
    assert urls == ["0.tar", "2.tar", "3.tar"]
    assert source.read([]) == [] and source.location(3) == f"{folder}/2.tar, sample '2-000'"
    sizes = [len(sample["bin"]) + len(sample["cls"]) for sample in twin]
    assert source.sizes().tolist() == sizes
    ranges = list(source.byte_ranges(np.array([0, 8])).each())
    for (where, begin, end), sample in zip(ranges, (twin[0], twin[8]), strict=True):
        content = Path(where).read_bytes()[begin:end]
        assert content.startswith(sample["bin"]) and content.endswith(sample["cls"])
    stored = 0
    for first, last in ((0, 2), (3, 7), (8, 8)):
        ends = list(source.byte_ranges(np.array([first, last])).each())
        stored += ends[-1][2] - ends[0][1]
    assert source.stored_nbytes == stored
    copy = pickle.loads(pickle.dumps(source))
    assert copy.read([4]) == source.read([4]) and copy.fingerprint() == source.fingerprint()


def test_blocks_follow_from_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shards(tmp_path / "shards", (30, 0, 17, 1))
    assert TarSource(folder).blocks().tolist() == [30, 17, 1]
    # 4 samples, each of which takes 4 x 512 bytes
    monkeypatch.setattr("headrace.formats.source.LONGEST", 8192)
    assert TarSource(folder).blocks().tolist() == [4, 4, 4, 4, 4, 4, 4, 2, 4, 4, 4, 4, 1, 1]
    assert TarSource(shards(tmp_path / "empty", (0, 0))).blocks().tolist() == []
    (tmp_path / "none").mkdir()
    with pytest.raises(DataNotFoundError, match=r"\.tar"):
        TarSource(tmp_path / "none")


# --- damage ---------------------------------------------------------------------------------------


def test_a_tar_that_is_cut_short_is_an_error_wherever(tmp_path: Path) -> None:
    for form in FORMATS:
        long = "n" * (90 if form == tarfile.USTAR_FORMAT else 120) + ".txt"
        members = [*plain(2, 700), (long, b"x" * 600)]
        whole = make_tar(tmp_path / "whole.tar", members, form)
        data, path = whole.read_bytes(), tmp_path / "cut.tar"
        end = -(-len(data.rstrip(b"\0")) // 512) * 512
        for at in range(0, end + 1, 128):
            path.write_bytes(data[:at])
            with pytest.raises(FormatError, match=rf"cut\.tar (ends at byte {at:,}[ ,]|is empty)"):
                TarSource(path)
        path.write_bytes(data[: end + 512])  # one empty header is an end
        assert read_all(path) == read_all(whole) == by_tarfile(whole)


@pytest.mark.parametrize(
    "form", [*FORMATS[:1], *(pytest.param(form, marks=pytest.mark.slow) for form in FORMATS[1:])]
)
def test_flipped_bytes_of_headers_are_noticed(tmp_path: Path, form: int) -> None:
    """All but those that tarfile reads too: the bodies of extended headers have no checksum."""
    long = "é" * 30 + "n" * (10 if form == tarfile.USTAR_FORMAT else 120) + ".txt"
    whole = make_tar(tmp_path / "whole.tar", [*plain(1, 700), (long, b"x" * 600)], form)
    data, path, seen = whole.read_bytes(), tmp_path / "bad.tar", 0
    headers: set[int] = set()
    bodies: set[int] = set()
    with tarfile.open(whole, "r:") as file:
        for member in file:
            for begin in (member.offset, member.offset_data - 512):
                headers |= {*range(begin, begin + 160, 5), *range(begin + 160, begin + 512, 61)}
            bodies |= {*range(member.offset + 512, member.offset_data - 512, 11)}
    for at in headers | bodies:
        damaged = bytearray(data)
        damaged[at] ^= 0x01 if at % 2 else 0x20
        path.write_bytes(damaged)
        try:
            found = read_all(path)
        except FormatError as error:
            seen += 1
            assert "bad.tar" in str(error)
        else:
            assert at in bodies or found == by_tarfile(whole), at
            assert found == by_tarfile(path), at
    assert seen > 60


def test_what_is_no_tar(tmp_path: Path) -> None:
    data = make_tar(tmp_path / "a.tar", plain(2)).read_bytes()
    for name in ("a.tar.gz", "b.tgz", "c.tar"):
        folder = tmp_path / name[0]
        folder.mkdir()
        (folder / name).write_bytes(gzip.compress(data))
        with pytest.raises(FormatError, match="unpack it"):
            TarSource(folder)
    path = tmp_path / "a.tar"
    path.write_bytes(b"no tar at all " * 100)
    with pytest.raises(FormatError, match=r"byte 0 .*a\.tar|a\.tar.* byte 0 "):
        TarSource(path)
    path.write_bytes(bytes(10240))
    assert len(TarSource(path)) == 0  # an archive of nothing
    path.write_bytes(
        data + make_tar(tmp_path / "two.tar", [("9.bin", bytes(2 << 20))]).read_bytes()
    )
    with pytest.warns(HeadraceWarning, match=r"a\.tar and are not read"):
        assert len(TarSource(path)) == 2  # two that were simply joined


# --- the index ------------------------------------------------------------------------------------


def test_the_index_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, kept = shards(tmp_path / "shards"), tmp_path / "kept"
    expected = read_all(folder, cache_dir=kept)
    assert len(list(kept.iterdir())) == 4
    scanned: list[str] = []
    scan = tar_made.scanned

    def noted(files: Any, path: str) -> Any:
        scanned.append(Path(path).name)
        return scan(files, path)

    monkeypatch.setattr(tar_made, "scanned", noted)
    assert read_all(folder, cache_dir=kept) == expected and not scanned
    make_tar(folder / "1.tar", [("new.txt", b"new")])  # another one under its name
    next(kept.iterdir()).write_bytes(b"damaged")
    assert len(read_all(folder, cache_dir=kept)) == 10
    assert "1.tar" in scanned and len(scanned) in (1, 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    # small ones are read again
    assert len(read_all(folder)) == 10 and not (tmp_path / "user").exists()
    monkeypatch.setattr("headrace.io.index.KEPT_FROM", 2)
    scanned.clear()
    assert len(read_all(folder)) == len(read_all(folder)) == 10
    assert sorted(scanned) == ["0.tar", "1.tar", "1.tar", "2.tar", "3.tar", "3.tar"]
