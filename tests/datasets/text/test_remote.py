"""Parts of remote texts are those of a local copy. (That samples are, the remote contract says.)"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from headrace import TextDataset
from headrace.testing.contract import same
from tests.servers.ranges import RangeServer

TEXT = "the mill wheel\r\nturns in the grün\n\u0a0d\U0001f600\n\nriver" * 20
ROWS = [{"text": f"{n} " * (n % 7), "n": n} for n in range(40)]
CONTENTS = {
    "a/1.txt": TEXT.encode(),
    "b/2.txt.gz": gzip.compress(b"\xef\xbb\xbf" + TEXT.encode()),
    "a/3.jsonl": "\n\n".join(map(json.dumps, ROWS)).encode(),
    "b/4.json": json.dumps(ROWS[:7]).encode(),
    "b/5.csv": b"n,text\n" + b"".join(b'%d,"a ""b""\n%d"\n' % (n, n) for n in range(15)),
}
PARTS: dict[str, dict[str, Any]] = {
    "windows": {"unit": "file", "max_length": 40, "stride": 25},
    "blocks": {"unit": "line", "max_length": 40, "packing": True, "end_token": 0},
    "records": {"unit": "record", "max_length": 40, "packing": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    for name, content in CONTENTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def samples(dataset: TextDataset) -> list[Any]:
    return list(dataset.__getitems__(range(len(dataset))))


@pytest.mark.parametrize("what", PARTS)
def test_parts_of_local_files(what: str, server: RangeServer, folder: Path, tmp_path: Path) -> None:
    names = [name for name in CONTENTS if (".txt" in name) == (what in ("windows", "blocks"))]
    near = TextDataset([folder / name for name in names], cache_dir=tmp_path, **PARTS[what])
    for attempt in range(2):  # tokens are made, and kept
        urls = [f"{server.url}/{name}" for name in names]
        server.counts()
        with TextDataset(urls, cache_dir=tmp_path / "far", **PARTS[what]) as far:
            assert far.fingerprint == near.fingerprint
            assert same(samples(far), samples(near))
            assert len(far) > 3
        assert bool(server.counts()["ranges"]) == (attempt == 0)
