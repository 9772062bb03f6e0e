"""S3: what lies there is read as what lies here. Against moto's server, through s3fs."""

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("s3fs", reason="the extra `s3` is not installed")
pytest.importorskip("moto", reason="the extra `test` is not installed")

from headrace import ImageDataset, StreamingDataset, TextDataset, pack
from headrace.errors import AccessError, DataNotFoundError, FileChangedError, RemoteError
from headrace.io.cache.blocks import BLOCK
from headrace.io.files import Version
from headrace.io.remote.client import Remote
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from headrace.testing.contract import same
from tests.data.make import make_shards
from tests.io.remote.reading import Range, read, remote_of_url, versions_of
from tests.io.resolve.scanning import scan
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
def remote_of(server: S3Server) -> Iterator[Any]:
    made: list[Remote] = []

    def make(
        options: dict[str, Any] | None = None, url: str = "s3://one/a.bin", **more: Any
    ) -> Remote:
        made.append(
            remote_of_url(
                url,
                server.options if options is None else options,
                **{"deadline": 30, "retries": 2, **more},
            )
        )
        return made[-1]

    yield make
    for remote in made:
        remote.close()


def some(version: Version | None = None, url: str = "s3://one/a.bin") -> list[Range]:
    draws = random.Random(1)
    starts = [draws.randrange(SIZE) for _ in range(12)]
    return [
        Range(url, start, min(SIZE, start + draws.choice([0, 1, 700, 90_000])), version)
        for start in starts
    ]


def right(ranges: list[Range]) -> list[bytes]:
    return [CONTENT[one.path.removeprefix("s3://")][one.start : one.stop] for one in ranges]


# -- bytes and versions


def test_bytes_and_versions(remote_of: Any) -> None:
    remote = remote_of()
    versions = versions_of(remote, ["s3://one/a.bin", "s3://other/a.bin"])
    assert [one.size for one in versions] == [SIZE, SIZE]
    assert len({one.tag for one in versions}) == 2 and all(
        one.tag.startswith('"') for one in versions
    )
    for wanted in (some(), some(versions[0]), some(versions[1], "s3://other/a.bin")):
        assert read(remote, wanted) == right(wanted)
    assert remote.run(remote.find_files(["one/a.bin"])) == [CONTENT["one/a.bin"]]
    counts = remote.take_counts()
    assert counts["retries"] == 0 and counts["bytes_fetched"] > SIZE


def test_an_object_that_was_replaced(server: S3Server, remote_of: Any) -> None:
    remote = remote_of()
    version = versions_of(remote, ["s3://one/a.bin"])[0]
    server.client().put_object(Bucket="one", Key="a.bin", Body=CONTENT["other/a.bin"])
    with pytest.raises(FileChangedError, match=r"s3://one/a\.bin, bytes .*has been replaced"):
        read(remote, some(version))
    assert versions_of(remote, ["s3://one/a.bin"])[0] != version  # nobody has kept the old one


@pytest.mark.parametrize("url", ["s3://one/b.bin", "s3://nobody/a.bin"])
def test_a_key_or_a_bucket_that_is_missing(remote_of: Any, url: str) -> None:
    remote = remote_of()
    with pytest.raises(DataNotFoundError, match=f"{url}.*there is no such file"):
        versions_of(remote, [url])
    for version in (None, Version(SIZE, '"of-yesterday"')):
        with pytest.raises(DataNotFoundError, match=f"{url}.*there is no such file"):
            read(remote, [Range(url, 0, 5, version)])


def test_a_server_that_is_gone(remote_of: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        place = f"http://127.0.0.1:{gone.getsockname()[1]}"
    # s3fs itself tries again, for seconds
    remote = remote_of({"key": "a", "secret": "b", "endpoint_url": place}, retries=0, deadline=0.5)
    with pytest.raises(RemoteError, match=r"s3://one/a\.bin.* 1 attempt in"):
        read(remote, [Range("s3://one/a.bin", 0, 5)])


# -- credentials


def test_credentials(server: S3Server, remote_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    user = server.user()
    server.guard()
    place = {"endpoint_url": server.url}
    good = remote_of({**user, **place})
    version = versions_of(good, ["s3://one/a.bin"])[0]
    assert read(good, some(version)) == right(some(version))

    for wrong in (
        {"key": "AKIANOBODY", "secret": "something"},
        {**user, "secret": "something"},
        {"anon": True},
    ):
        remote = remote_of({**wrong, **place})
        for ask in (
            lambda remote: versions_of(remote, ["s3://one/a.bin"]),
            lambda remote: read(remote, some(version)),
        ):
            with pytest.raises(
                AccessError, match=r"s3://one/a\.bin.*access is denied.*storage_options"
            ) as caught:
                ask(remote)
            assert not any(secret in str(caught.value) for secret in SECRETS)

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", user["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", user["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    assert read(remote_of({}), some(version)) == right(some(version))


def test_credentials_that_expire_in_the_middle(server: S3Server, remote_of: Any) -> None:
    user = server.user()
    server.guard()
    remote = remote_of({**user, "endpoint_url": server.url})
    version = versions_of(remote, ["s3://one/a.bin"])[0]
    assert read(remote, some(version)) == right(some(version))
    server.guard(after=10**6)  # the one who takes the key away has none
    server.client("iam").delete_access_key(UserName="reader", AccessKeyId=user["key"])
    server.guard()
    remote.take_counts()
    with pytest.raises(AccessError, match=r"access is denied.*may have expired"):
        read(remote, [Range("s3://one/a.bin", 0, 5, version)])
    assert remote.take_counts()["retries"] == 0  # asking again would not help


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
        with pytest.raises(AccessError, match=f"s3://{place}.*access is denied"):
            TextDataset(f"s3://{place}", unit="line", **options)


def test_no_credentials_at_all(server: S3Server, remote_of: Any) -> None:
    server.guard()
    remote = remote_of({"endpoint_url": server.url, "anon": False}, retries=5)
    with pytest.raises(AccessError, match=r"s3://one/a\.bin.*access is denied.*storage_options"):
        versions_of(remote, ["s3://one/a.bin"])
    assert remote.take_counts()["retries"] == 0


# -- the disk cache


def test_buckets_with_equal_keys_are_never_mixed(server: S3Server, tmp_path: Path) -> None:
    def cached_by(options: dict[str, Any]) -> RemoteFiles:
        return RemoteFiles(
            "s3://one/a.bin", RemoteOptions(options, cache_dir=tmp_path, disk_cache_size=20 * BLOCK)
        )

    caches, urls = (
        [cached_by(server.options) for _ in range(2)],
        ["s3://one/a.bin", "s3://other/a.bin"],
    )
    versions = caches[0].learn(urls)
    for cached in caches:
        for url, version in zip(urls, versions, strict=True):
            wanted = some(version, url)
            assert read(cached, wanted) == right(wanted)
    counts = [cached.take_counts() for cached in caches]
    assert (
        counts[0]["bytes_fetched"] == 2 * SIZE
        and counts[1]["bytes_fetched"] == 0
        and counts[1]["disk_hits"] > 0
    )

    # for all that is known, another one
    elsewhere = {**server.options, "endpoint_url": server.url.replace("127.0.0.1", "localhost")}
    caches.append(cached_by(elsewhere))
    assert caches[2].learn(urls) == versions and read(caches[2], wanted) == right(wanted)
    assert caches[2].take_counts()["bytes_fetched"] == SIZE
    for cached in caches:
        cached.close()


# -- folders of images


@pytest.fixture
def images(server: S3Server, tiny_photos: Path) -> str:
    client = server.client()
    for path in sorted(tiny_photos.rglob("*")):
        if path.is_file():
            client.upload_file(str(path), "one", f"photos/{path.relative_to(tiny_photos)}")
    return "s3://one/photos"


def test_a_listing(server: S3Server, images: str, tiny_photos: Path) -> None:
    here, remote = (
        scan(tiny_photos, [".jpg", ".png"]),
        RemoteFiles(images, RemoteOptions(server.options)),
    )
    there = scan(images, [".jpg", ".png"], remote)
    assert [there.names[n] for n in range(len(there.names))] == [
        here.names[n] for n in range(len(here.names))
    ]
    assert there.folders == here.folders
    with pytest.raises(DataNotFoundError, match="s3://one/nothing does not exist"):
        scan("s3://one/nothing", [".jpg"], remote)
    with pytest.raises(DataNotFoundError, match="s3://nobody/photos"):
        scan("s3://nobody/photos", [".jpg"], remote)


ODD = [
    "d/x.txt",
    "d//x.txt",
    "d///w.txt",
    "d//e//x.txt",
    "d/a::b.txt",
    "d/zip::a.txt",
    "d/x://y.txt",
    "d/colon:.txt",
]
ODD += [
    "d/q?x=1.txt",
    "d/sp ace.txt",
    "d/ lead.txt",
    "d/plus+.txt",
    "d/per%20cent.txt",
    "d/hash#.txt",
    "d/at@.txt",
]
ODD += [
    "d/[br].txt",
    "d/st*r.txt",
    "d/{a}.txt",
    "d/\u00fc.txt",
    "d/u\u0308.txt",
    "d/back\\slash.txt",
    "d/quote'\".txt",
    "d/$HOME.txt",
]


def test_a_key_is_opaque(server: S3Server) -> None:
    client = server.client()
    for key in [*ODD, "/rooted.txt", "d/./hidden.txt"]:
        client.put_object(Bucket="one", Key=key, Body=key.encode())
    client.close()

    def texts(path: Any) -> list[str]:
        options = {
            "storage_options": server.options,
            "unit": "file",
            "tokenizer": lambda text: list(text.encode()),
        }
        with TextDataset(path, **options) as dataset:
            return sorted(
                bytes(dataset[number]["input_ids"].tolist()).decode()
                for number in range(len(dataset))
            )

    assert texts("s3://one/d") == texts([f"s3://one/{key}" for key in ODD]) == sorted(ODD)
    assert texts("s3://one") == sorted([*ODD, "/rooted.txt"])
    assert texts("s3://one/d/*.txt") == sorted(key for key in ODD if key.count("/") == 1)
    for key in [*ODD, "/rooted.txt", "d/./hidden.txt"]:
        assert texts(f"s3://one/{key}") == [key]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("workers", "method"),
    [
        pytest.param(0, None, marks=SLOW),
        (2, "fork"),
        pytest.param(2, "spawn", marks=SLOW),
        pytest.param(2, "forkserver", marks=SLOW),
    ],
)
def test_images(
    server: S3Server,
    images: str,
    tiny_photos: Path,
    make_loader: Any,
    workers: int,
    method: str | None,
) -> None:
    here = ImageDataset(tiny_photos, image_size=16)
    with ImageDataset(images, image_size=16, storage_options=server.options) as there:
        assert (
            there.classes == here.classes
            and list(there.targets) == list(here.targets)
            and there.fingerprint == here.fingerprint
        )
        assert "something" not in repr(there)
        there[0]  # connections of this process, which are no worker's
        options = {"batch_size": 2, "num_workers": workers, "multiprocessing_context": method}
        for expected, found in zip(
            make_loader(here, batch_size=2, num_workers=0),
            make_loader(there, **options),
            strict=True,
        ):
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# -- shards


@pytest.mark.parametrize(
    ("url", "workers"),
    [
        ("s3://one/shards", 0),
        pytest.param("s3://one/shards/*.tar", 0, marks=SLOW),
        pytest.param("s3://one/shards/part-{000..002}.tar", 2, marks=SLOW),
    ],
)
def test_shards(server: S3Server, tmp_path: Path, make_loader: Any, url: str, workers: int) -> None:
    folder = make_shards(tmp_path / "shards", (7, 0, 12))
    client = server.client()
    for path in folder.iterdir():
        client.upload_file(str(path), "one", f"shards/{path.name}")
    options = {
        "storage_options": server.options,
        "cache_dir": tmp_path / "cache",
        "return_index": True,
    }
    with (
        StreamingDataset(url, **options) as there,
        StreamingDataset(folder, return_index=True) as here,
    ):
        assert there.fingerprint == here.fingerprint
        found = list(make_loader(there, batch_size=4, num_workers=workers))
        expected = list(make_loader(here, batch_size=4, num_workers=0))
        for batch in (*found, *expected):
            del batch["__url__"]
        assert same(found, expected) and len(found) == 5


def test_packed_tokens(server: S3Server, tmp_path: Path, make_loader: Any) -> None:
    (tmp_path / "a.txt").write_text("".join("wheel " * (number % 9) + "\n" for number in range(60)))
    path = pack(
        TextDataset(tmp_path / "a.txt", unit="line", cache_dir=tmp_path),
        tmp_path / "tokens.h5",
        progress=False,
        workers=1,
    )
    server.client().put_object(Bucket="one", Key="run/tokens.h5", Body=path.read_bytes())
    options: dict[str, Any] = {
        "max_length": 8,
        "stride": 5,
        "loading_mode": "streaming",
        "cache_dir": tmp_path,
    }
    with (
        TextDataset("s3://one/run/tokens.h5", storage_options=server.options, **options) as there,
        TextDataset(path, **options) as here,
    ):
        far, near = (
            make_loader(there, batch_size=4, num_workers=1),
            make_loader(here, batch_size=4, num_workers=0),
        )
        assert all(same(a, b) for a, b in zip(far, near, strict=True))
