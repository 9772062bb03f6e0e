"""Files are found in one order, and messages keep secrets."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import (
    AccessError,
    ConfigError,
    DataNotFoundError,
    FormatError,
    HeadraceError,
    HeadraceWarning,
)
from headrace.io.paths import chain_of, is_url, named_part, redact
from headrace.io.remote.fsspec_calls import open_filesystem, path_in
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from headrace.io.resolve.file_set import FileSet
from headrace.memory.per_process import PerProcess as WorkerHandle
from tests.io.resolve.scanning import scan

ENDINGS = (".jpg", ".png")


def touch(root: Path, *names: str | bytes) -> Path:
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(b"content of " + os.fsencode(name))
    return root


def names(found: FileSet) -> list[str]:
    return [os.fsdecode(name) for name in found.names]


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> None:
    """Denies one path to a function of `os`: permissions don't hold back root."""
    real = getattr(os, name)

    def denied(given: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if isinstance(given, (str, bytes, os.PathLike)) and os.fsdecode(given) == str(path):
            raise PermissionError(13, "Permission denied", os.fsdecode(given))
        return real(given, *args, **kwargs)

    monkeypatch.setattr(os, name, denied)


class TestFolder:
    def test_is_searched_through_and_sorted_by_parts(self, tmp_path: Path) -> None:
        touch(
            tmp_path,
            "b/1.jpg",
            "a b/1.jpg",
            "a/2.jpg",
            "a/10.jpg",
            "a/1/z.jpg",
            "a-b/1.jpg",
            "a.jpg",
            "Z/1.jpg",
            "é/1.jpg",
            "a/1.jpg",
        )
        wanted = [
            "Z/1.jpg",
            "a/1/z.jpg",
            "a/1.jpg",
            "a/10.jpg",
            "a/2.jpg",
            "a b/1.jpg",
            "a-b/1.jpg",
            "a.jpg",
            "b/1.jpg",
            "é/1.jpg",
        ]
        assert names(scan(tmp_path, ENDINGS)) == wanted

    def test_the_order_is_that_of_the_parts_bytes(self, tmp_path: Path) -> None:
        touch(tmp_path, *(f"{a}{b}/{c}.png" for a in "aB-" for b in ["", "0", "é"] for c in "x,Y"))
        found = names(scan(tmp_path, ENDINGS))
        assert len(found) == 27
        assert found == sorted(found, key=lambda n: [os.fsencode(part) for part in n.split("/")])

    def test_extensions_count_in_any_case(self, tmp_path: Path) -> None:
        touch(
            tmp_path,
            "a.jpg",
            "b.JPG",
            "c.Jpg",
            "d.PNG",
            "e.jpeg",
            "f.txt",
            "g.jpg.txt",
            "jpg",
            ".jpg",
            "h.jpg ",
        )
        assert names(scan(tmp_path, ENDINGS)) == ["a.jpg", "b.JPG", "c.Jpg", "d.PNG"]
        assert names(scan(tmp_path, (".TXT",))) == ["f.txt", "g.jpg.txt"]

    def test_folders_with_the_name_of_a_file(self, tmp_path: Path) -> None:
        touch(tmp_path, "folder.jpg/inner.jpg")
        assert names(scan(tmp_path, ENDINGS)) == ["folder.jpg/inner.jpg"]

    def test_names_that_are_no_utf8(self, tmp_path: Path) -> None:
        touch(tmp_path, b"caf\xe9/na\xefve.jpg", "plain.jpg")
        found = scan(tmp_path, ENDINGS)
        assert list(found.names) == [b"caf\xe9/na\xefve.jpg", b"plain.jpg"]
        assert Path(os.fsdecode(found.path(0))).exists()
        assert [os.fsencode(f) for f in found.folders] == [b"caf\xe9"]
        assert redact(found.path(0)).endswith("caf\\udce9/na\\udcefve.jpg")

    def test_first_level_folders_are_listed_with_and_without_files(self, tmp_path: Path) -> None:
        touch(tmp_path, "b/deep/x.jpg", "a/x.jpg", "c/notes.txt")
        assert scan(tmp_path, ENDINGS).folders == ("a", "b", "c")

    @pytest.mark.parametrize("kind", [str, Path, os.fsencode])
    def test_any_kind_of_path(self, kind: Any, tmp_path: Path) -> None:
        touch(tmp_path, "x.jpg")
        assert names(scan(kind(tmp_path), ENDINGS)) == ["x.jpg"]

    def test_slashes_at_the_end(self, tmp_path: Path) -> None:
        touch(tmp_path, "a.jpg", "b/c.jpg")
        wanted = [f"{tmp_path}/a.jpg", f"{tmp_path}/b/c.jpg"]
        for entry in (f"{tmp_path}/", f"{tmp_path}//"):
            found = scan(entry, ENDINGS)
            assert [found.url(number) for number in range(len(found))] == wanted
        assert scan(f"{tmp_path}//*.jpg", ENDINGS).url(0) == f"{tmp_path}/a.jpg"

    def test_the_home_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(touch(tmp_path, "data/x.jpg")))
        assert scan("~/data", ENDINGS).path(0) == os.fsencode(tmp_path / "data/x.jpg")

    def test_a_folder_with_the_characters_of_a_glob(self, tmp_path: Path) -> None:
        touch(tmp_path, "a[1]*?/x[2].jpg", "a1/x2.jpg")
        assert names(scan(tmp_path / "a[1]*?", ENDINGS)) == ["x[2].jpg"]
        assert names(scan(tmp_path / "a[1]*?" / "x[2].jpg", ENDINGS)) == ["x[2].jpg"]


class TestLinks:
    def test_are_followed(self, tmp_path: Path) -> None:
        touch(tmp_path, "elsewhere/inner/a.jpg", "elsewhere/b.jpg", "data/c.jpg")
        (tmp_path / "data/folder").symlink_to("../elsewhere")
        (tmp_path / "data/file.png").symlink_to("../elsewhere/b.jpg")
        (tmp_path / "data/text.jpg").symlink_to("../elsewhere/b.jpg")
        assert names(scan(tmp_path / "data", ENDINGS)) == [
            "c.jpg",
            "file.png",
            "folder/b.jpg",
            "folder/inner/a.jpg",
            "text.jpg",
        ]

    def test_that_dangle_or_lead_to_themselves_are_no_files(self, tmp_path: Path) -> None:
        touch(tmp_path, "real.jpg")
        (tmp_path / "dangling.jpg").symlink_to("nothing.jpg")
        (tmp_path / "self.jpg").symlink_to("self.jpg")
        (tmp_path / "folder").symlink_to("folder")
        (tmp_path / "ping").symlink_to("pong")
        (tmp_path / "pong").symlink_to("ping")
        for _ in range(2):  # listed, and cached
            with pytest.warns(
                HeadraceWarning,
                match=r": 5 links lead to what does not exist, .*: fix or remove '.*'$",
            ):
                found = scan(tmp_path, ENDINGS)
            assert names(found) == ["real.jpg"] and found.folders == ()
        with pytest.warns(HeadraceWarning, match=r"\*\.jpg: 2 links lead to what does not exist"):
            assert names(scan(str(tmp_path / "*.jpg"), ENDINGS)) == ["real.jpg"]
        with pytest.raises(
            DataNotFoundError,
            match=r"dangling\.jpg is a link to nothing\.jpg, which does not exist",
        ):
            scan(tmp_path / "dangling.jpg", ENDINGS)

    @pytest.mark.parametrize("target", [".", "..", "../..", "../../a"])
    def test_loops_end(self, tmp_path: Path, target: str) -> None:
        touch(tmp_path, "a/b/x.jpg")
        (tmp_path / "a/b/again").symlink_to(target)
        assert names(scan(tmp_path, ENDINGS)) == ["a/b/x.jpg"]
        assert names(scan(str(tmp_path / "**/*.jpg"), ENDINGS)) == ["a/b/x.jpg"]

    def test_two_folders_that_link_to_each_other(self, tmp_path: Path) -> None:
        touch(tmp_path, "a/x.jpg", "b/y.jpg")
        (tmp_path / "a/to_b").symlink_to("../b")
        (tmp_path / "b/to_a").symlink_to("../a")
        wanted = ["a/to_b/y.jpg", "a/x.jpg", "b/to_a/x.jpg", "b/y.jpg"]
        assert names(scan(tmp_path, ENDINGS)) == wanted
        assert names(scan(str(tmp_path / "**/*.jpg"), ENDINGS)) == wanted


class TestOtherPaths:
    def test_a_file_is_taken_whatever_its_ending(self, tmp_path: Path) -> None:
        touch(tmp_path, "x.data")
        found = scan(tmp_path / "x.data", ENDINGS)
        assert names(found) == ["x.data"] and found.folders == ()
        assert found.path(0) == os.fsencode(tmp_path / "x.data")

    def test_relative_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(touch(tmp_path, "d/x.jpg", "y.jpg"))
        wanted_of = {
            "d": ["x.jpg"],
            ".": ["d/x.jpg", "y.jpg"],
            "y.jpg": ["y.jpg"],
            "*.jpg": ["y.jpg"],
            "?/*": ["d/x.jpg"],
        }
        for path, wanted in wanted_of.items():
            found = scan(path, ENDINGS)
            assert names(found) == wanted
            assert all(os.path.isfile(found.path(i)) for i in range(len(wanted)))

    def test_globs(self, tmp_path: Path) -> None:
        touch(tmp_path, "a/1.jpg", "a/2.png", "a/3.txt", "b/1.jpg", "b/c/1.JPG", "d.jpg")
        for pattern, wanted in {
            "*/1.*": ["a/1.jpg", "b/1.jpg"],
            "a/[12].*": ["1.jpg", "2.png"],
            "**/*.*": ["a/1.jpg", "a/2.png", "b/1.jpg", "b/c/1.JPG", "d.jpg"],
            "b/**/*": ["1.jpg", "c/1.JPG"],
        }.items():
            found = scan(str(tmp_path / pattern), ENDINGS)
            assert names(found) == wanted, pattern
            assert all(os.path.isfile(found.path(i)) for i in range(len(wanted)))

    def test_the_names_of_a_glob_begin_where_its_wildcards_do(self, tmp_path: Path) -> None:
        touch(tmp_path, "train/cat/1.jpg", "train/dog/1.jpg")
        assert scan(str(tmp_path / "train/*/*.jpg"), ENDINGS).folders == ("cat", "dog")

    def test_lists(self, tmp_path: Path) -> None:
        touch(tmp_path, "one/b/1.jpg", "one/c/3.jpg", "two/a/1.jpg", "two/b/2.jpg", "single.data")
        entries = [
            tmp_path / "two",
            str(tmp_path / "one"),
            tmp_path / "single.data",
            str(tmp_path / "one/b/*.jpg"),
        ]
        found = scan(entries, ENDINGS)
        assert names(found) == ["1.jpg", "a/1.jpg", "b/1.jpg", "b/2.jpg", "c/3.jpg", "single.data"]
        assert found.folders == ("a", "b", "c")
        roots = ["one/b", "two", "one", "two", "one", "."]
        assert [found.path(i) for i in range(6)] == [
            os.fsencode(tmp_path / r / n) for r, n in zip(roots, names(found), strict=True)
        ]
        assert names(scan(tuple(entries), ENDINGS)) == names(found)
        with pytest.raises(ConfigError, match=r"gives its paths once: pass list\(...\) of it"):
            scan(iter(entries), ENDINGS)

    def test_the_order_of_a_list_does_not_matter(self, tmp_path: Path) -> None:
        touch(tmp_path, "one/b.jpg", "two/a.jpg", "three/c.jpg")
        folders = [tmp_path / n for n in ("one", "two", "three")]
        assert (
            names(scan(folders, ENDINGS))
            == names(scan(folders[::-1], ENDINGS))
            == ["a.jpg", "b.jpg", "c.jpg"]
        )


class TestErrors:
    @pytest.mark.parametrize("entry", ["missing", "missing/x.jpg", "missing*", "missing/**/*.jpg"])
    def test_a_missing_path(self, tmp_path: Path, entry: str) -> None:
        with pytest.raises(DataNotFoundError, match="missing") as caught:
            scan(str(tmp_path / entry), ENDINGS)
        assert isinstance(caught.value, FileNotFoundError) and "\n" not in str(caught.value)
        assert "exist" in str(caught.value) or str(caught.value).startswith("nothing matches")

    @pytest.mark.parametrize("entry", ["", "*", "**/*.jpg", "*.txt"])
    def test_nothing_that_fits(self, tmp_path: Path, entry: str) -> None:
        touch(tmp_path, "notes.txt", "sub/other.gif")
        with pytest.raises(
            DataNotFoundError,
            match="^nothing matches" if entry.endswith(".jpg") else r"\.jpg, \.png",
        ) as caught:
            scan(os.path.join(tmp_path, entry), ENDINGS)
        assert str(tmp_path) in str(caught.value)

    def test_one_missing_path_of_a_list(self, tmp_path: Path) -> None:
        touch(tmp_path, "there/x.jpg")
        with pytest.raises(DataNotFoundError, match="gone does not exist"):
            scan([tmp_path / "there", tmp_path / "gone"], ENDINGS)

    @pytest.mark.parametrize("first", [False, True])
    def test_one_path_of_a_list_without_files(self, tmp_path: Path, first: bool) -> None:
        touch(tmp_path, "there/x.jpg", "other/x.txt")
        paths = [tmp_path / "other", tmp_path / "there"]
        with pytest.raises(
            DataNotFoundError,
            match=r"other, one of 2 paths, has no file that ends in any of .*leave it out",
        ):
            scan(paths if first else paths[::-1], ENDINGS)

    @pytest.mark.parametrize("empty", ["", [], ["a", ""], b""])
    def test_nothing_given(self, empty: Any) -> None:
        with pytest.raises(DataNotFoundError, match="empty"):
            scan(empty, ENDINGS)

    @pytest.mark.parametrize("wrong", [None, 3, [3], [None], {"a": 1}.values()])
    def test_no_path_at_all(self, wrong: Any) -> None:
        with pytest.raises(ConfigError, match="data_path must be"):
            scan(wrong, ENDINGS)

    @pytest.mark.parametrize("below", ["", "sub"])
    def test_a_folder_that_may_not_be_listed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
    ) -> None:
        touch(tmp_path, "sub/x.jpg")
        refuse(monkeypatch, "scandir", tmp_path / below)
        with pytest.raises(AccessError, match="may not list") as caught:
            scan(tmp_path, ENDINGS)
        assert isinstance(caught.value, PermissionError) and str(tmp_path / below) in str(
            caught.value
        )

    def test_a_folder_that_goes_away_while_it_is_listed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        touch(tmp_path, "a/x.jpg")
        real = os.scandir

        def scandir(path: Any) -> Any:
            if os.fsdecode(path).endswith("/a"):
                raise FileNotFoundError(2, "No such file or directory", path)
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)
        with pytest.raises(DataNotFoundError, match="went away"):
            scan(tmp_path, ENDINGS)


SECRETS = ["hunter2", "s3cr3t", "TOKEN", "alice"]
URLS = [
    "https://alice:hunter2@host.org:8080/d/x.jpg?sig=s3cr3t&t=TOKEN",
    "https://alice:hunt@er2hunter2@host.org/d/x.jpg",
    "https://host.org/x.jpg?X-Amz-Signature=s3cr3t:TOKEN/hunter2",
    "zip://*.jpg::https://alice:hunter2@host.org/a.zip?sig=s3cr3t",
    "zip://d::https://host.org/a.zip?sig=s3cr3t::x",
    "s3://alice:hunter2@bucket/key",
    "https://alice@host.org?token=TOKEN",
]


class TestRedact:
    @pytest.mark.parametrize("url", URLS)
    def test_takes_out_credentials_and_queries(self, url: str) -> None:
        shown = redact(url)
        assert not any(secret in shown for secret in SECRETS)
        assert "host.org" in shown or "bucket/key" in shown

    @pytest.mark.parametrize("url", URLS)
    def test_in_the_midst_of_a_message(self, url: str) -> None:
        shown = redact(f"404, message='Not Found', url='{url}' (tried twice)")
        assert not any(secret in shown for secret in SECRETS)
        assert shown.startswith("404, message='Not Found'") and shown.endswith("(tried twice)")

    @pytest.mark.parametrize(
        "path",
        [
            "/data/a@b/c?d.jpg",
            "s3://bucket/a@b/x.jpg",
            "memory://a/b",
            "zip://x::file:///d/a.zip",
            "C:\\data",
        ],
    )
    def test_leaves_the_rest(self, path: str) -> None:
        assert redact(path) == path

    @given(st.text() | st.binary())
    def test_is_always_printable(self, path: str | bytes) -> None:
        redact(path).encode()

    def test_is_url(self) -> None:
        assert is_url("s3://b/k") and is_url("zip::a.zip") and is_url("memory://")
        assert (
            not is_url("/a/b")
            and not is_url("C:/x")
            and not is_url(Path("a"))
            and not is_url(b"s3://x")
        )
        assert not is_url("a::b.png") and not is_url("a/x://y")
        assert (
            chain_of("s3://b/a::b.png") == ["s3://b/a::b.png"]
            and named_part("s3://b/a::b.png") == "s3://b/a::b.png"
        )
        assert chain_of("simplecache::s3://b/a::b.png") == ["simplecache", "s3://b/a::b.png"]


def zipped(*members: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for member in members:
            archive.writestr(member, f"content of {member}")
    return stream.getvalue()


remote_parts = st.text("ab -.é", min_size=1, max_size=3).filter(
    lambda part: not part.startswith(".")
)
remote_names = st.lists(remote_parts, min_size=1, max_size=3).map(
    lambda parts: "/".join(parts) + ".jpg"
)


class _Listed(fsspec.AbstractFileSystem):
    """Lists what it was given."""

    protocol = "listed"
    cachable = False

    def __init__(self, listed: dict[str, list[str]]) -> None:
        super().__init__()
        self.listed = listed

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return {"name": path, "type": "directory"}

    def find(self, path: str, **kwargs: Any) -> list[str]:
        return self.listed[path]


def _server(filesystem: Any, **options: Any) -> RemoteFiles:
    """One of this file system."""
    files = RemoteFiles("memory://", RemoteOptions(**options))
    files._remote._filesystem.close()
    files._remote._filesystem = WorkerHandle(lambda: filesystem)
    return files


class TestRemote:
    def scan(self, url: str) -> FileSet:
        return scan(url, ENDINGS)

    def test_a_folder(self, memory: Any) -> None:
        for name in ("b/2.jpg", "a/1.PNG", "a/n.txt", "a-b/1.jpg", "caf\xe9/1.jpg"):
            memory.pipe(f"/top/{name}", b"x")
        for url in ("memory://top", "memory://top/", "memory:///top"):
            found = self.scan(url)
            assert names(found) == ["a/1.PNG", "a-b/1.jpg", "b/2.jpg", "café/1.jpg"]
            assert found.folders == ("a", "a-b", "b", "café") and found.url
            assert all(memory.isfile(os.fsdecode(found.path(i))) for i in range(4))

    def test_the_root_itself(self, memory: Any) -> None:
        memory.pipe("/cat/1.jpg", b"x")
        memory.pipe("/dog/1.jpg", b"x")
        found = self.scan("memory://")
        assert names(found) == ["cat/1.jpg", "dog/1.jpg"] and found.folders == ("cat", "dog")
        assert memory.isfile(os.fsdecode(found.path(1)))

    def test_files_and_globs(self, memory: Any) -> None:
        for name in ("a/1.jpg", "a/2.png", "b/1.jpg", "b/x.data"):
            memory.pipe(f"/top/{name}", b"x")
        assert names(self.scan("memory://top/b/x.data")) == ["x.data"]
        assert names(self.scan("memory://top/*/1.jpg")) == ["a/1.jpg", "b/1.jpg"]
        assert names(self.scan("memory://top/**/*")) == ["a/1.jpg", "a/2.png", "b/1.jpg"]

    def test_names_with_the_characters_of_a_glob(self, memory: Any) -> None:
        memory.pipe("/odd[1]/x?.jpg", b"x")
        memory.pipe("/odd1/x1.jpg", b"x")
        assert names(self.scan("memory://odd[1]")) == ["x?.jpg"]
        assert names(self.scan("memory://odd[1]/x?.jpg")) == ["x?.jpg"]
        # nothing has this name: a pattern
        assert names(self.scan("memory://odd[1]/*.jpg")) == ["odd1/x1.jpg"]

    @pytest.mark.parametrize(
        ("before", "wanted"),
        [
            ("zip", ["cat/1.jpg", "dog/2.jpg", "top.png"]),
            ("zip://", ["cat/1.jpg", "dog/2.jpg", "top.png"]),
            ("zip://cat", ["1.jpg"]),
            ("zip://cat/1.jpg", ["1.jpg"]),
            ("zip://*/*.jpg", ["cat/1.jpg", "dog/2.jpg"]),
        ],
    )
    def test_archives(self, memory: Any, tmp_path: Path, before: str, wanted: list[str]) -> None:
        data = zipped("cat/1.jpg", "dog/2.jpg", "top.png", "notes.txt")
        memory.pipe("/archive.zip", data)
        (tmp_path / "archive.zip").write_bytes(data)
        for after in (
            "memory://archive.zip",
            f"file://{tmp_path}/archive.zip",
            f"{tmp_path}/archive.zip",
        ):
            url = f"{before}::{after}"
            found = self.scan(url)
            assert names(found) == wanted
            content = open_filesystem(url).cat_file(os.fsdecode(found.path(0)))
            assert content.startswith(b"content of") and content.endswith(os.fsencode(wanted[0]))

    def test_local_files_by_url(self, tmp_path: Path) -> None:
        touch(tmp_path, b"caf\xe9/x.jpg", "a/y.jpg")
        found = self.scan(f"file://{tmp_path}")
        assert list(found.names) == [b"a/y.jpg", b"caf\xe9/x.jpg"]
        assert os.path.isfile(found.path(1))

    @pytest.mark.slow
    @settings(deadline=None)
    @given(st.lists(st.lists(remote_names, min_size=1), min_size=1, max_size=3))
    def test_are_sorted_by_parts_however_they_are_listed(self, lists: list[list[str]]) -> None:
        server = _server(
            _Listed(
                {
                    f"root{i}": [f"root{i}/{name}" for name in listed]
                    for i, listed in enumerate(lists)
                }
            )
        )
        wanted = sorted(
            (n.encode().replace(b"/", b"\0"), n.encode(), i)
            for i, listed in enumerate(lists)
            for n in listed
        )
        found = scan([f"listed://root{i}" for i in range(len(lists))], ENDINGS, server)
        assert list(found.names) == [name for _, name, _ in wanted]
        assert [found.path(i) for i in range(len(wanted))] == [
            b"root%d/" % i + name for _, name, i in wanted
        ]
        assert list(found.folders) == sorted(
            {n.partition("/")[0] for listed in lists for n in listed if "/" in n}, key=os.fsencode
        )

    def test_paths_of_urls(self) -> None:
        memory = fsspec.filesystem("memory")
        assert path_in("memory://a/b", memory) == "/a/b"
        cached = fsspec.filesystem("simplecache", target_protocol="memory")
        assert path_in("simplecache::memory://a/b", cached) == "/a/b"
        cached = fsspec.filesystem("simplecache", target_protocol="file")
        assert (
            path_in("simplecache::file:///a/b", cached)
            == path_in("simplecache:///a/b", cached)
            == "/a/b"
        )

    @pytest.mark.parametrize(
        "url", ["memory://nowhere", "memory://nowhere/x.jpg", "zip::memory://no.zip"]
    )
    def test_what_is_missing(self, memory: Any, url: str) -> None:
        with pytest.raises(
            DataNotFoundError, match=r"(nowhere|no\.zip).*(does not exist|there is no such file)"
        ):
            self.scan(url)

    @pytest.mark.parametrize("kind", ["zip", "tar"])
    def test_an_archive_that_is_none(self, memory: Any, kind: str) -> None:
        memory.pipe("/archive", b"nothing of the kind" * 100)
        with pytest.raises(FormatError, match=f"{kind}::memory://archive: the archive is damaged"):
            self.scan(f"{kind}::memory://archive")

    def test_a_folder_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "x.jpg").write_bytes(b"x")
        with pytest.raises(DataNotFoundError, match=r"x\.jpg/y does not exist"):
            self.scan(f"file://{tmp_path}/x.jpg/y")

    @pytest.mark.parametrize("url", ["memory://there/*.gif", "memory://there", "memory://nowhere*"])
    def test_nothing_that_fits(self, memory: Any, url: str) -> None:
        memory.pipe("/there/x.txt", b"x")
        with pytest.raises(
            DataNotFoundError, match="^nothing matches" if "*" in url else r"\.jpg, \.png"
        ):
            self.scan(url)

    def test_an_unknown_protocol(self) -> None:
        with pytest.raises(ConfigError, match="nosuch://"):
            open_filesystem("nosuch://alice:hunter2@bucket")


class _Failing(fsspec.AbstractFileSystem):
    """Fails with a message that shows the URL as it was given."""

    protocol = "failing"
    error: Callable[[str], Exception] = FileNotFoundError

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        raise type(self).error(f"Forbidden: {path}")


@pytest.mark.parametrize(
    "error", [FileNotFoundError, PermissionError, ConnectionError, RuntimeError, OSError]
)
def test_no_secret_shows_in_a_traceback(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Failing, "error", error)
    url = "failing://alice:hunter2@host.org/data?sig=s3cr3t"
    with pytest.raises(HeadraceError) as caught:
        scan(url, ENDINGS, _server(_Failing(), retries=0))
    shown = f"{caught.value} {caught.value!r} {caught.value.__cause__!r}"
    assert "host.org/data" in shown and not any(secret in shown for secret in SECRETS)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
