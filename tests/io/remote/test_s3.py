"""S3: what lies there is read as what lies here. Against moto's server, through s3fs."""

import functools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("s3fs", reason="the extra `s3` is not installed")
pytest.importorskip("moto", reason="the extra `test` is not installed")

from headrace import ImageDataset, StreamingDataset, TextDataset
from headrace.errors import AccessError, DataNotFoundError, FileChangedError
from headrace.io.files import Version
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import BLOCK, RemoteFiles
from headrace.testing.contract import same
from tests.data.gallery import gallery_at, write_gallery
from tests.io.remote import reading
from tests.io.remote.reading import Range, read, versions_of
from tests.servers.s3 import S3Server

pytestmark = pytest.mark.slow

SIZE = 1_300_000
CONTENT = {key: random.Random(key).randbytes(SIZE) for key in ("one/a.bin", "other/a.bin")}
SECRETS = ("something", "AKIA")


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def server(running: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3Server:
    """With the buckets `one` and `other`, each with a.bin of other content; nobody's credentials
    lie about.
    """
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    running.reset()
    client = running.client()
    for key, content in CONTENT.items():
        bucket, _, name = key.partition("/")
        client.create_bucket(Bucket=bucket)
        client.put_object(Bucket=bucket, Key=name, Body=content)
    client.close()
    return running


@pytest.fixture
def remote_of(server: S3Server, remote_of: Any) -> Any:
    return functools.partial(remote_of, "s3://one/a.bin", storage_options=server.options, retries=2)


def some(version: Version | None = None, url: str = "s3://one/a.bin") -> list[Range]:
    return reading.some([url], SIZE, version=version)


def right(ranges: list[Range]) -> list[bytes]:
    return [CONTENT[one.path.removeprefix("s3://")][one.start : one.stop] for one in ranges]


def test_bytes_and_versions(server: S3Server, remote_of: Any) -> None:
    remote, url = remote_of(), "s3://one/a.bin"
    versions = versions_of(remote, [url, "s3://other/a.bin"])
    assert [version.size for version in versions] == [SIZE, SIZE]
    assert versions[0].tag != versions[1].tag
    for wanted in (some(), some(versions[0]), some(versions[1], "s3://other/a.bin")):
        assert read(remote, wanted) == right(wanted)
    assert remote.run(remote.find_files(["one/a.bin"])) == [CONTENT["one/a.bin"]]
    counts = remote.take_counts()
    assert counts["retries"] == 0
    assert counts["bytes_fetched"] > SIZE
    server.client().put_object(Bucket="one", Key="a.bin", Body=CONTENT["other/a.bin"])
    with pytest.raises(FileChangedError, match=r"s3://one/a\.bin"):
        read(remote, some(versions[0]))
    assert versions_of(remote, [url])[0] != versions[0]  # nobody has kept the old one


def test_a_key_or_a_bucket_that_is_missing(remote_of: Any) -> None:
    remote = remote_of()
    for url in ("s3://one/b.bin", "s3://nobody/a.bin"):
        with pytest.raises(DataNotFoundError, match=url):
            versions_of(remote, [url])
        for version in (None, Version(SIZE, '"of-yesterday"')):
            with pytest.raises(DataNotFoundError, match=url):
                read(remote, [Range(url, 0, 5, version)])


# -- credentials


def test_credentials(server: S3Server, remote_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    user = server.user()
    server.guard()
    place = {"endpoint_url": server.url}
    good = remote_of(storage_options={**user, **place})
    version = versions_of(good, ["s3://one/a.bin"])[0]
    assert read(good, some(version)) == right(some(version))

    for wrong in (
        {"key": "AKIANOBODY", "secret": "something"},
        {**user, "secret": "something"},
        {"anon": True},
        {"anon": False},  # and none there
    ):
        remote = remote_of(storage_options={**wrong, **place}, retries=5)
        with pytest.raises(AccessError, match=r"s3://one/a\.bin.*storage_options") as caught:
            versions_of(remote, ["s3://one/a.bin"])
        assert not any(secret in str(caught.value) for secret in SECRETS)
        with pytest.raises(AccessError, match=r"s3://one/a\.bin.*storage_options"):
            read(remote, some(version))
        assert remote.take_counts()["retries"] == 0

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", user["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", user["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    assert read(remote_of(storage_options={}), some(version)) == right(some(version))


def test_a_folder_of_a_bucket_that_is_not_ours(server: S3Server, tmp_path: Path) -> None:
    """Its policy is the usual one: the bucket may be listed, and what lies below a folder read;
    what has the folder's name may not.
    """
    client = server.client()
    for name in ("1.txt", "deep/2.txt"):
        client.put_object(Bucket="one", Key=f"texts/{name}", Body=b"a line\nand one more\n")
    read = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::one/texts/*"}
    user = server.user(
        {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "arn:aws:s3:::one"}, read
    )
    server.guard()
    options: dict[str, Any] = {
        "storage_options": {**user, "endpoint_url": server.url},
        "cache_dir": tmp_path,
        "retries": 0,
    }
    for end in ("", "/", "/*.txt", "/1.txt"):
        with TextDataset(f"s3://one/texts{end}", unit="line", **options) as lines:
            assert len(lines) == (2 if "." in end else 4) and lines.text_of(1) == "and one more"
    with StreamingDataset("s3://one/texts", **options) as lines:
        assert len(lines) == 4
    for place in ("one/elsewhere", "other"):
        with pytest.raises(AccessError, match=f"s3://{place}"):
            TextDataset(f"s3://{place}", unit="line", **options)


# -- the disk cache


def test_buckets_with_equal_keys_are_never_mixed(server: S3Server, tmp_path: Path) -> None:
    # for all that is known, the last is another server
    elsewhere = {**server.options, "endpoint_url": server.url.replace("127.0.0.1", "localhost")}
    urls = ["s3://one/a.bin", "s3://other/a.bin"]
    counts = []
    for options in (server.options, server.options, elsewhere):
        how = RemoteOptions(options, cache_dir=tmp_path, disk_cache_size=20 * BLOCK)
        cached = RemoteFiles(urls[0], how)
        for url, version in zip(urls, cached.learn(urls), strict=True):
            wanted = some(version, url)
            assert read(cached, wanted) == right(wanted)
        counts.append(cached.take_counts())
        cached.close()
    assert [count["bytes_fetched"] for count in counts] == [2 * SIZE, 0, 2 * SIZE]
    assert counts[1]["disk_hits"] > 0


# -- folders


ODD = ["x", "/x", "//w", "/e//x", "a::b", "zip::a", "x://y", "colon:", "q?x=1", "sp ace", " lead"]
ODD += ["plus+", "per%20cent", "hash#", "at@", "[br]", "st*r", "{a}", "\u00fc", "u\u0308"]
ODD += ["back\\slash", "quote'\"", "$HOME"]


def test_a_key_is_opaque(server: S3Server) -> None:
    odd = [f"d/{name}.txt" for name in ODD]
    lonely = ["/rooted.txt", "d/./hidden.txt"]
    client = server.client()
    for key in [*odd, *lonely]:
        client.put_object(Bucket="one", Key=key, Body=key.encode())
    client.close()

    def texts(path: Any) -> list[str]:
        with TextDataset(path, storage_options=server.options, unit="file") as dataset:
            return sorted(dataset.text_of(number) for number in range(len(dataset)))

    assert texts("s3://one/d") == texts([f"s3://one/{key}" for key in odd]) == sorted(odd)
    assert texts("s3://one") == sorted([*odd, "/rooted.txt"])
    assert texts("s3://one/d/*.txt") == sorted(key for key in odd if key.count("/") == 1)
    for key in [*odd[:6], *lonely]:
        assert texts(f"s3://one/{key}") == [key]


def test_all_formats(server: S3Server, tmp_path: Path, make_loader: Any) -> None:
    folder = tmp_path / "gallery"
    folder.mkdir()
    write_gallery(folder)
    client = server.client()
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"gallery/{path.relative_to(folder)}"
            client.put_object(Bucket="one", Key=key, Body=path.read_bytes())
    client.close()
    local = gallery_at(folder, tmp_path / "here")
    options = {"storage_options": server.options, "cache_dir": tmp_path / "there"}
    for nothing in ("s3://one/nothing", "s3://nobody/photos"):
        with pytest.raises(DataNotFoundError, match=nothing):
            ImageDataset(nothing, **options)
    for name, make in gallery_at("s3://one/gallery", tmp_path / "there").items():
        with local[name]() as here, make(**options) as there:
            assert len(there) == len(here) and there.fingerprint == here.fingerprint, name
            indices = [len(here) - 1, 0, 7]
            # connections of this process, which are no worker's
            assert same(there.__getitems__(indices), here.__getitems__(indices)), name
            assert "something" not in repr(there)
            if name in ("image files", "hdf5 chunks"):
                forked = {"num_workers": 2, "multiprocessing_context": "fork"}
                found = list(make_loader(there, batch_size=9, **forked))
                assert same(found, list(make_loader(here, batch_size=9, num_workers=0))), name
