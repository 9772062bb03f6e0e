"""Files are found in one order, and messages keep secrets."""

from __future__ import annotations

import itertools
import os
import traceback
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, strategies as st

from headrace.errors import (
    AccessError,
    ConfigError,
    DataNotFoundError,
    FormatError,
    HeadraceError,
    HeadraceWarning,
)
from headrace.io.paths import chain_of, is_url, named_part, redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote.requests import open_filesystem
from tests.formats.resolve.scanning import names_of, scan, touch

ENDINGS = (".jpg", ".png")


def found_in(path: Any) -> list[str]:
    return names_of(scan(path, ENDINGS))


class TestFolder:
    def test_extensions_count_in_any_case(self, tmp_path: Path) -> None:
        touch(tmp_path, "a.jpg", "b.JPG", "d.PNG", "e.jpeg", "g.jpg.txt", "jpg", ".jpg", "h.jpg ")
        touch(tmp_path, "folder.jpg/inner.Jpg")
        assert found_in(tmp_path) == ["a.jpg", "b.JPG", "d.PNG", "folder.jpg/inner.Jpg"]
        assert names_of(scan(tmp_path, (".TXT",))) == ["g.jpg.txt"]

    def test_names_that_are_no_utf8(self, tmp_path: Path) -> None:
        touch(tmp_path, b"caf\xe9/na\xefve.jpg", "plain.jpg")
        for place in (tmp_path, f"file://{tmp_path}"):
            found = scan(place, ENDINGS)
            assert list(found.names) == [b"caf\xe9/na\xefve.jpg", b"plain.jpg"]
            assert os.path.isfile(found.path(0))
            assert [os.fsencode(folder) for folder in found.folders] == [b"caf\xe9"]
        assert redact(found.path(0)).endswith("caf\\udce9/na\\udcefve.jpg")

    def test_first_level_folders_are_listed_with_and_without_files(self, tmp_path: Path) -> None:
        touch(tmp_path, "b/deep/x.jpg", "a/x.jpg", "c/notes.txt")
        assert scan(tmp_path, ENDINGS).folders == ("a", "b", "c")

    def test_any_way_to_write_its_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        touch(tmp_path, "a.jpg", "b/c.jpg")
        monkeypatch.setenv("HOME", str(tmp_path))
        wanted = [f"{tmp_path}/a.jpg", f"{tmp_path}/b/c.jpg"]
        for place in (tmp_path, str(tmp_path), os.fsencode(tmp_path), f"{tmp_path}//", "~"):
            found = scan(place, ENDINGS)
            assert [found.url(number) for number in range(2)] == wanted, place
        assert scan(f"{tmp_path}//*.jpg", ENDINGS).url(0) == wanted[0]

    def test_names_with_the_characters_of_a_glob(self, tmp_path: Path) -> None:
        touch(tmp_path, "a[1]*?/x[2].jpg", "a1/x2.jpg")
        assert found_in(tmp_path / "a[1]*?") == ["x[2].jpg"]
        assert found_in(tmp_path / "a[1]*?" / "x[2].jpg") == ["x[2].jpg"]


class TestLinks:
    def test_that_dangle_or_lead_to_themselves_are_no_files(self, tmp_path: Path) -> None:
        touch(tmp_path, "real.jpg")
        links = {"dangling.jpg": "nothing.jpg", "self.jpg": "self.jpg", "folder": "folder"}
        for name, target in {**links, "ping": "pong", "pong": "ping"}.items():
            (tmp_path / name).symlink_to(target)
        for _ in range(2):  # listed, and cached
            with pytest.warns(HeadraceWarning, match=r": 5 links "):
                found = scan(tmp_path, ENDINGS)
            assert names_of(found) == ["real.jpg"]
            assert found.folders == ()
        with pytest.warns(HeadraceWarning, match=r"\*\.jpg: 2 links "):
            assert found_in(str(tmp_path / "*.jpg")) == ["real.jpg"]
        with pytest.raises(DataNotFoundError, match=r"dangling\.jpg is a link to nothing\.jpg"):
            scan(tmp_path / "dangling.jpg", ENDINGS)

    def test_loops_end(self, tmp_path: Path) -> None:
        touch(tmp_path, "a/b/x.jpg")
        for target in (".", "../..", "../../a"):
            (tmp_path / "a/b/again").symlink_to(target)
            assert found_in(tmp_path) == ["a/b/x.jpg"]
            assert found_in(str(tmp_path / "**/*.jpg")) == ["a/b/x.jpg"]
            (tmp_path / "a/b/again").unlink()
        for name, target in (("one", "."), ("two", "../.."), ("three", "../../a")):
            (tmp_path / "a/b" / name).symlink_to(target)
        # each of several might be followed through each other, without an end
        assert found_in(str(tmp_path / "**/*.jpg")) == ["a/b/x.jpg"]
        assert found_in(tmp_path) == ["a/b/x.jpg"]

    def test_two_folders_that_link_to_each_other(self, tmp_path: Path) -> None:
        touch(tmp_path, "a/x.jpg", "b/y.jpg")
        (tmp_path / "a/to_b").symlink_to("../b")
        (tmp_path / "b/to_a").symlink_to("../a")
        wanted = ["a/to_b/y.jpg", "a/x.jpg", "b/to_a/x.jpg", "b/y.jpg"]
        assert found_in(tmp_path) == wanted
        assert found_in(str(tmp_path / "**/*.jpg")) == wanted


class TestOtherPaths:
    def test_a_file_is_taken_whatever_its_ending(self, tmp_path: Path) -> None:
        found = scan(touch(tmp_path, "x.data") / "x.data", ENDINGS)
        assert names_of(found) == ["x.data"]
        assert found.folders == ()
        assert found.path(0) == os.fsencode(tmp_path / "x.data")

    def test_names_begin_where_the_wildcards_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        touch(tmp_path, "a/1.jpg", "a/3.txt", "b/c/1.JPG")
        monkeypatch.chdir(tmp_path)
        for path in ("*/*.*", f"{tmp_path}/*/*.*"):
            assert (found_in(path), scan(path, ENDINGS).folders) == (["a/1.jpg"], ("a",)), path
        assert found_in("b/**/*") == ["c/1.JPG"]

    def test_lists_whatever_their_order(self, tmp_path: Path) -> None:
        touch(tmp_path, "one/b/1.jpg", "one/c/3.jpg", "two/a/1.jpg", "two/b/2.jpg", "single.data")
        entries = [tmp_path / "two", str(tmp_path / "one"), tmp_path / "single.data"]
        entries.append(str(tmp_path / "one/b/*.jpg"))
        wanted = ["one/b/1.jpg", "two/a/1.jpg", "one/b/1.jpg", "two/b/2.jpg", "one/c/3.jpg"]
        wanted = [f"{tmp_path}/{name}" for name in (*wanted, "single.data")]
        for given_as in (entries, tuple(entries), entries[::-1]):
            found = scan(given_as, ENDINGS)
            assert [os.fsdecode(found.path(number)) for number in range(6)] == wanted
            assert found.folders == ("a", "b", "c")
        with pytest.raises(ConfigError):
            scan(iter(entries), ENDINGS)


class TestErrors:
    def test_a_missing_path_and_nothing_that_fits(self, tmp_path: Path) -> None:
        touch(tmp_path, "notes.txt", "sub/other.gif")
        missing = ["missing", "missing/x.jpg", "missing*", "missing/**/*.jpg"]
        for entry in [*missing, "", "*", "**/*.jpg", "*.txt"]:
            with pytest.raises(DataNotFoundError, match=str(tmp_path)) as caught:
                scan(os.path.join(tmp_path, entry), ENDINGS)
            assert isinstance(caught.value, FileNotFoundError)

    def test_no_path_at_all(self) -> None:
        for empty in ("", [], ["a", ""], b""):
            with pytest.raises(DataNotFoundError):
                scan(empty, ENDINGS)
        for wrong in (None, 3, [3], {"a": 1}.values()):
            with pytest.raises(ConfigError):
                scan(wrong, ENDINGS)

    @pytest.mark.parametrize(
        ("error", "wanted"),
        [(PermissionError, AccessError), (FileNotFoundError, DataNotFoundError)],
    )
    def test_a_folder_that_can_not_be_listed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, wanted: Any
    ) -> None:
        touch(tmp_path, "sub/x.jpg")
        real = os.scandir
        for refused in (tmp_path, tmp_path / "sub"):

            def scandir(path: Any, refused: Path = refused) -> Any:
                if os.fsdecode(path) == str(refused):
                    raise error(1, "no", path)
                return real(path)

            monkeypatch.setattr(os, "scandir", scandir)
            with pytest.raises(wanted, match=str(refused)):
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
    def test_takes_out_credentials_and_queries(self) -> None:
        said = ("404, message='Not Found', url='", "' (tried twice)")
        for url, (before, after) in itertools.product(URLS, (("", ""), said)):
            shown = redact(f"{before}{url}{after}")
            assert not any(secret in shown for secret in SECRETS), url
            assert "host.org" in shown or "bucket/key" in shown
            assert shown.startswith(before)
            assert shown.endswith(after.lstrip("'"))

    def test_leaves_the_rest(self) -> None:
        paths = ["/data/a@b/c?d.jpg", "s3://bucket/a@b/x.jpg", "zip://x::file:///d/a.zip", "C:\\x"]
        assert list(map(redact, paths)) == paths

    @given(st.text() | st.binary())
    def test_is_always_printable(self, path: str | bytes) -> None:
        redact(path).encode()


def test_what_is_a_url_and_a_chain() -> None:
    assert all(map(is_url, ("s3://b/k", "zip::a.zip", "memory://")))
    assert not any(map(is_url, ("/a/b", "C:/x", Path("a"), b"s3://x", "a::b.png", "a/x://y")))
    assert chain_of("s3://b/a::b.png") == ["s3://b/a::b.png"]
    assert named_part("s3://b/a::b.png") == "s3://b/a::b.png"
    assert chain_of("simplecache::s3://b/a::b.png") == ["simplecache", "s3://b/a::b.png"]


class TestRemote:
    def test_a_folder(self, memory: Any) -> None:
        for name in ("b/2.jpg", "a/1.PNG", "a/n.txt", "a-b/1.jpg", "caf\xe9/1.jpg"):
            memory.pipe(f"/top/{name}", b"x")
        for url in ("memory://top", "memory:///top/", "memory://"):
            found = scan(url, ENDINGS)
            begin = "top/" if url == "memory://" else ""
            wanted = ["a/1.PNG", "a-b/1.jpg", "b/2.jpg", "café/1.jpg"]
            assert names_of(found) == [begin + name for name in wanted], url
            assert found.folders == (("top",) if begin else ("a", "a-b", "b", "café"))
            assert all(memory.isfile(os.fsdecode(found.path(i))) for i in range(4))

    def test_what_is_missing(self, memory: Any, tmp_path: Path) -> None:
        touch(tmp_path, "x.jpg")
        memory.pipe("/there/x.txt", b"x")
        for url, said in {
            "memory://nowhere": "nowhere",
            "memory://nowhere/x.jpg": "nowhere",
            "memory://nowhere*": "nowhere",
            "memory://there": r"\.jpg, \.png",
            "memory://there/*.gif": "gif",
            "zip::memory://no.zip": r"no\.zip",
            f"file://{tmp_path}/x.jpg/y": r"x\.jpg/y",
        }.items():
            with pytest.raises(DataNotFoundError, match=said):
                scan(url, ENDINGS)

    def test_what_can_not_be_opened(self, memory: Any) -> None:
        memory.pipe("/archive", b"nothing of the kind" * 100)
        for kind in ("zip", "tar"):
            with pytest.raises(FormatError, match=f"{kind}::memory://archive"):
                scan(f"{kind}::memory://archive", ENDINGS)
        with pytest.raises(ConfigError, match="nosuch://"):
            open_filesystem("nosuch://alice:hunter2@bucket")


class _Failing(fsspec.AbstractFileSystem):
    """Fails with a message that shows the URL and the options as they were given."""

    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        error = self.storage_options["error"]
        raise error(f"Forbidden: {path} {kwargs}")

    ls = info


def test_no_secret_shows_in_a_traceback() -> None:
    fsspec.register_implementation("failing", _Failing, clobber=True)
    url = "failing://alice:hunter2@host.org/data?sig=s3cr3t"
    for error in (FileNotFoundError, PermissionError, RuntimeError, OSError):
        given = {"error": error, "secret": "TOKEN"}
        reach = RemoteOptions(storage_options=given, retries=0)
        with pytest.raises(HeadraceError) as caught:
            scan(url, ENDINGS, reach)
        shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
        assert "host.org/data" in shown
        assert not any(secret in shown for secret in SECRETS), shown
