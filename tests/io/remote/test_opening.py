"""What can't change is said at once when something remote is opened; what may pass is asked for
again, and logged.
"""

import errno
import logging
import pickle
import socket
import ssl
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import (
    HDF5Dataset,
    ImageDataset,
    StreamingDataset,
    TextDataset,
    ZarrDataset,
    open_dataset,
)
from headrace.errors import HeadraceWarning, RemoteError
from headrace.io.remote import client as module
from headrace.io.remote import fsspec_calls
from headrace.io.remote.errors import judged
from tests.io.remote.reading import Range, read, remote_of_url
from tests.servers.plain import plain_server
from tests.servers.ranges import RangeServer


@pytest.fixture
def nobody() -> str:
    """A URL under which no server runs."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize(
    "make",
    [
        lambda url: HDF5Dataset(f"{url}/x.h5"),
        lambda url: ImageDataset(f"{url}/x.jpg"),
        lambda url: TextDataset(f"{url}/x.txt"),
        lambda url: ZarrDataset(f"{url}/x.zarr"),
        lambda url: StreamingDataset(f"{url}/x.tar"),
        lambda url: open_dataset(f"{url}/x"),
    ],
    ids=["hdf5", "image", "text", "zarr", "tar", "open_dataset"],
)
def test_refused_connection_is_given_up_soon(nobody: str, make: Any) -> None:
    with pytest.raises(
        RemoteError, match=r"3 attempts .*Connect.*: is the URL right, and does the server run\?"
    ):
        make(nobody)


def test_refused_s3_is_given_up_soon(nobody: str) -> None:
    options = {"endpoint_url": nobody, "key": "a", "secret": "b"}
    with pytest.raises(RemoteError, match=r"s3://bucket/x\.h5: 3 attempts .*Could not connect"):
        HDF5Dataset("s3://bucket/x.h5", storage_options=options)


def test_unknown_host_is_absent() -> None:
    error = ConnectionError("no way")
    error.__cause__ = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert judged(error, "x").is_absent and not judged(ConnectionResetError("reset"), "x").is_absent


def test_server_that_answered_may_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAIT", 0.001)
    (tmp_path / "a.bin").write_bytes(b"bytes")
    with RangeServer(tmp_path) as server:
        url = f"{server.url}/a.bin"
        remote = remote_of_url(url, retries=6)
        assert read(remote, [Range(url, 0, 5)]) == [b"bytes"]
    copied = pickle.loads(pickle.dumps(remote))  # as it travels to a worker
    for one in (remote, copied):
        with pytest.raises(RemoteError, match=r"7 attempts .*retries=6"):
            read(one, [Range(url, 0, 5)])
        one.close()


def test_server_without_ranges_is_refused_at_once(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["data"] = np.zeros(2_000_000, np.uint8)
    with (
        plain_server(tmp_path) as url,
        pytest.raises(RemoteError, match=r"x\.h5, bytes .*sends whole files .* Download the files"),
    ):
        HDF5Dataset(f"{url}/x.h5")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_lines_of_a_server_without_ranges_are_refused_at_opening(tmp_path: Path, name: str) -> None:
    """They are short enough to be read whole for the table of lines, so that it would show with
    the first sample.
    """
    (tmp_path / name).write_text('{"text": "a"}\n{"text": "b"}\n')
    said = rf"{name}: the server sends whole files .* Download the files"
    for make, options in ((TextDataset, {"unit": "line"}), (StreamingDataset, {})):
        with plain_server(tmp_path) as url, pytest.raises(RemoteError, match=said):
            make(f"{url}/{name}", cache_dir=tmp_path / "c", **options)


def test_untrusted_certificate_is_final() -> None:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_message = "self-signed certificate"
    with pytest.raises(
        RemoteError, match=r"https://x/y: .*not trusted \(self-signed certificate\)"
    ) as caught:
        judged(error, "https://x/y")
    assert caught.value.is_final


def test_full_disk_is_not_the_servers() -> None:
    # of fsspec's own cache, for example
    with pytest.raises(OSError, match="No space left on device"):
        judged(OSError(errno.ENOSPC, "No space left on device"), "https://x/y")


def test_each_retry_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_WAIT", 0.001)
    caplog.set_level(logging.INFO, "headrace")
    (tmp_path / "a.bin").write_bytes(b"bytes")
    with RangeServer(tmp_path, faults={"500": 1}, most=3) as server:
        url = f"{server.url}/a.bin"
        remote = remote_of_url(url, retries=5)
        assert read(remote, [Range(url, 0, 5)]) == [b"bytes"]
        remote.close()
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in told] == ["INFO", "WARNING", "WARNING"]
    assert "a.bin, bytes 0 to 5: attempt 3 failed (the server says 500)" in told[2][1]


def test_file_systems_without_private_names() -> None:
    """What they are used for has a public way, or is left out and said."""

    class Bare:
        protocol = "s3"

    with pytest.warns(HeadraceWarning, match="has no _call_s3, which headrace uses"):
        assert not fsspec_calls._has_s3_calls("bare", hasattr(Bare, "_call_s3"))
    assert (
        fsspec_calls.path_in("memory://a/b", Bare()) == "/a/b"
        and fsspec_calls.server_of("s3://bucket/key", Bare()) == {}
    )
