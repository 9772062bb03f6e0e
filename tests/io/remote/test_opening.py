"""What can't change is said at once when something remote is opened; what may pass is asked for
again, and logged.
"""

import errno
import pickle
import socket
import ssl
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import HDF5Dataset, StreamingDataset, TextDataset, ZarrDataset, open_dataset
from headrace.errors import ConfigError, RemoteError
from headrace.io.remote import client as module
from headrace.io.remote.requests import judged
from tests.io.remote.reading import Range, read
from tests.servers.plain import plain_server
from tests.servers.ranges import RangeServer


@pytest.fixture
def nobody() -> str:
    """A URL under which no server runs."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.slow
def test_refused_connection_is_given_up_soon(nobody: str) -> None:
    for make, name in [(HDF5Dataset, "x.h5"), (ZarrDataset, "x.zarr"), (open_dataset, "x")]:
        with pytest.raises(RemoteError, match=r"3 attempts .*is the URL right"):
            make(f"{nobody}/{name}")


@pytest.mark.slow
def test_refused_s3_is_given_up_soon(nobody: str) -> None:
    options = {"endpoint_url": nobody, "key": "a", "secret": "b"}
    with pytest.raises(RemoteError, match=r"s3://bucket/x\.h5: 3 attempts "):
        HDF5Dataset("s3://bucket/x.h5", storage_options=options)


def test_credentials_of_a_bucket_s_url_are_refused_unseen() -> None:
    with pytest.raises(ConfigError, match=r"^s3://bucket/a\.h5: .*storage_options=") as caught:
        open_dataset("s3://key:hunter2@bucket/a.h5")
    assert "hunter2" not in str(caught.value)


def test_server_that_answered_may_restart(
    tmp_path: Path, remote_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WAIT", 0.001)
    (tmp_path / "a.bin").write_bytes(b"bytes")
    with RangeServer(tmp_path) as server:
        url = f"{server.url}/a.bin"
        remote = remote_of(url, retries=6)
        assert read(remote, [Range(url, 0, 5)]) == [b"bytes"]
    copied = pickle.loads(pickle.dumps(remote))  # as it travels to a worker
    for one in (remote, copied):
        with pytest.raises(RemoteError, match=r"7 attempts .*retries=6"):
            read(one, [Range(url, 0, 5)])
        one.close()


def test_server_without_ranges_is_refused_at_once(tmp_path: Path) -> None:
    """Lines, too, which are short enough to be read whole for the table of lines, so that it would
    show with the first sample.
    """
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["data"] = np.zeros(2_000_000, np.uint8)
    lines: dict[str, Any] = {"unit": "line", "cache_dir": tmp_path / "c"}
    (tmp_path / "a.txt").write_text("a\nb\n")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    with plain_server(tmp_path) as url:
        for make, name, options in (
            (HDF5Dataset, "x.h5", {}),
            (TextDataset, "a.txt", lines),
            (StreamingDataset, "a.jsonl", {"cache_dir": tmp_path / "c"}),
        ):
            with pytest.raises(RemoteError, match=f"{name}.*sends whole files"):
                make(f"{url}/{name}", **options)


def test_errors_are_judged() -> None:
    unknown_host = ConnectionError("no way")
    unknown_host.__cause__ = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert judged(unknown_host, "x").is_absent
    assert not judged(ConnectionResetError("reset"), "x").is_absent
    untrusted = ssl.SSLCertVerificationError(1, "certificate verify failed")
    untrusted.verify_message = "self-signed certificate"
    with pytest.raises(RemoteError, match="self-signed certificate") as caught:
        judged(untrusted, "https://x/y")
    assert caught.value.is_final
    # a full disk is not the server's: that of fsspec's own cache, for example
    with pytest.raises(OSError, match="No space left on device"):
        judged(OSError(errno.ENOSPC, "No space left on device"), "https://x/y")
