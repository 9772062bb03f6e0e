"""A pack on a Dask cluster has the bytes of any other, though a worker is killed in the middle."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace import pack
from tests.packing.shared import contents
from tests.servers.s3 import S3Server

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SHARD = "8kB"


def run(photos: Path, dst: str, marker: Path, **options: Any) -> None:
    pytest.importorskip("distributed", reason="pip install -c constraints.txt -e '.[integration]'")
    script = Path(__file__).parent / "dask_pack.py"
    command = [sys.executable, script, photos, dst, SHARD, json.dumps(options), marker]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=marker.parent)
    assert done.returncode == 0, done.stderr[-3000:]


def test_to_a_folder(photos: Path, tmp_path: Path) -> None:
    run(photos, str(tmp_path / "out"), tmp_path / "killed")
    expected = contents(Path(pack(photos, tmp_path / "expected", shard_size=SHARD)))
    assert (
        contents(tmp_path / "out") == contents(tmp_path / "out-2") == expected
        and len(expected) > 10
    )


def test_to_a_store(photos: Path, tmp_path: Path) -> None:
    expected = contents(Path(pack(photos, tmp_path / "expected", shard_size=SHARD)))
    with S3Server() as server:
        client = server.client()
        client.create_bucket(Bucket="bucket")
        run(photos, "s3://bucket/out", tmp_path / "killed", **server.options)
        stored = {}
        for item in client.list_objects_v2(Bucket="bucket")["Contents"]:
            data = client.get_object(Bucket="bucket", Key=item["Key"])["Body"].read()
            stored[item["Key"].rpartition("/")[2]] = hashlib.sha256(data).hexdigest()
    assert stored == expected
