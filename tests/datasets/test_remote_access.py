"""Samples that a server denies, and folders that it shows as a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import (
    AccessError,
    ConfigError,
    DataNotFoundError,
    FormatError,
    ImageDataset,
    RemoteError,
    SampleError,
    StreamingDataset,
    TextDataset,
)
from tests.servers.plain import plain_server
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.slow

LINES = [f"line {number} {'x' * 5000}" for number in range(2000)]


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, tiny_photos: Path
) -> Iterator[tuple[RangeServer, list[str]]]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "lines.txt").write_text("\n".join(LINES))
    names = []
    for number, path in enumerate(sorted(tiny_photos.rglob("*.jpg")) * 3):
        names.append(f"{number}.jpg")
        (folder / names[-1]).write_bytes(path.read_bytes())
    with RangeServer(folder) as server:
        yield server, names


@pytest.fixture
def server(served: tuple[RangeServer, list[str]]) -> RangeServer:
    served[0].set(latency=0, bandwidth=0, faults={}, denied=[], seed=1)
    return served[0]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize(("mode", "workers"), [("lazy", 0), ("streaming", 0), ("streaming", 2)])
def test_credentials_that_expire_in_the_middle(
    server: RangeServer, tmp_path: Path, make_loader: Any, mode: str, workers: int, on_error: str
) -> None:
    """Nothing is left out: all samples of the shard are behind what is denied."""
    server.set(bandwidth=4e6)  # else all of it has been asked for when the first batch is there
    dataset = TextDataset(
        f"{server.url}/lines.txt",
        unit="line",
        loading_mode=mode,
        on_error=on_error,
        cache_dir=tmp_path,
    )
    loader = make_loader(
        dataset,
        batch_size=20,
        shuffle=False,
        num_workers=workers,
        prefetch_factor=1 if workers else None,
    )
    for batch in (batches := iter(loader)):
        assert len(batch["input_ids"]) == 20
        server.set(faults={"403": 1})
        break
    with pytest.raises(AccessError, match=r"lines\.txt, bytes .*access is denied.*storage_options"):
        for _ in batches:
            pass
    assert loader.get_stats()["skipped"] == 0


def test_one_file_that_is_denied_is_a_bad_sample(server: RangeServer, served: Any) -> None:
    urls = [f"{server.url}/{name}" for name in served[1]]
    with ImageDataset(urls, image_size=8, targets=None, on_error="skip") as dataset:
        server.set(denied=["3.jpg"])
        assert len(dataset.__getitems__([3, 0, 2])) == 2
        assert "access is denied" in dataset.sample_reader.take_report()["skipped_samples"][0][2]
        server.set(denied=served[1])
        with pytest.raises(AccessError, match=r"\.jpg: access is denied"):
            dataset.__getitems__([*range(len(dataset))])
    server.set(denied=[])
    with ImageDataset(urls, image_size=8, targets=None) as dataset:
        server.set(denied=["3.jpg"])
        with pytest.raises(
            SampleError,
            match=r"sample 3 can't be read: .*3\.jpg: access is denied.*storage_options[^;]*$",
        ):
            dataset.__getitems__([3, 0, 2])


# -- a server of the web shows a folder as a page


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("web")
    for name in ("texts/cat/1.txt", "texts/dog/2.txt", "shards/0.jsonl", "empty/page.htm"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "a line"}\n')
    with plain_server(folder) as url:
        yield url


@pytest.mark.parametrize("end", ["", "/"])
def test_a_folder_of_the_web(web: str, end: str, tmp_path: Path) -> None:
    with TextDataset(f"{web}/texts{end}", labels="folders") as texts:
        assert [
            (texts.text_of(number), texts.classes[texts.targets[number]]) for number in range(2)
        ] == [
            ('{"text": "a line"}\n', "cat"),
            ('{"text": "a line"}\n', "dog"),
        ]
    with pytest.raises(RemoteError, match=r"0\.jsonl: the server sends whole files"):
        StreamingDataset(f"{web}/shards{end}", cache_dir=tmp_path)
    with pytest.raises(DataNotFoundError, match=r"empty/? ends in any of \.txt"):
        TextDataset(f"{web}/empty{end}")
    with pytest.raises(DataNotFoundError, match=r"nothing/? does not exist"):
        TextDataset(f"{web}/nothing{end}")


def test_a_page_that_was_named(web: str) -> None:
    with TextDataset(f"{web}/empty/page.htm") as page:
        assert page.text_of(0) == '{"text": "a line"}\n'


def test_a_page_in_place_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokens.h5").write_text("<html>not found</html>")
    with pytest.raises(FormatError, match=r"tokens\.h5 is no HDF5 file"):
        TextDataset(tmp_path / "tokens.h5", max_length=8, packing=True)


def test_what_is_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("Install it")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    for protocol, extra in (("https", "http"), ("s3", "s3")):
        with pytest.raises(ConfigError, match=rf"Install it: pip install 'headrace\[{extra}\]'"):
            ImageDataset(f"{protocol}://bucket/a")
