"""The cache folder, with and without a home."""

import os
import tempfile
from pathlib import Path

import pytest

from headrace import ConfigError, HeadraceWarning
from headrace.io import paths
from headrace.io.paths import cache_folder, with_index


@pytest.mark.parametrize("home", ["/", "a/relative/one", "/etc/passwd/none"])
def test_a_home_that_is_none(tmp_path: Path, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    paths._private_folder.cache_clear()
    try:
        with pytest.warns(HeadraceWarning, match="no home folder that can be written to"):
            made = cache_folder(None)
        assert made == cache_folder(None) == tmp_path / f"headrace-{os.geteuid()}"  # said once
        assert made.stat().st_mode & 0o777 == 0o700
    finally:
        paths._private_folder.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder(None) == tmp_path / "x" / "headrace"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder(None) == tmp_path / ".cache" / "headrace"


def test_a_home_of_nobody_in_cache_dir() -> None:
    with pytest.raises(ConfigError, match="not a known home folder"):
        cache_folder("~nobody-at-all/cache")


def test_the_name_of_an_index() -> None:
    assert with_index("s3://b/a.h5") == "s3://b/a.h5.index"
    assert with_index("https://h/a.tar?key=1") == "https://h/a.tar.index?key=1"
    assert with_index("simplecache::s3://b/a") == "simplecache::s3://b/a.index"
