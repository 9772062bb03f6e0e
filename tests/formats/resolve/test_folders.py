"""Listing a folder gives all its files in one order, however many threads do it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.formats.resolve.scanning import names_of, scan, touch


def listed(root: Path) -> list[str]:
    return names_of(scan(root, (".jpg",)))


class TestOrder:
    def test_parts_with_bytes_on_both_sides_of_a_slash(self, tmp_path: Path) -> None:
        parts = ["a", "b", "\x01", " ", "-", ".", "é"]
        made = [f"a{x}/{y}b/{z}.jpg" for x in parts for y in parts[:5] for z in parts[:5]]
        made += [f"a{x}{y}.jpg" for x in parts for y in parts]
        made += ["B/c.jpg", "a/b.jpg/2.jpg", "d/" * 300 + "x.jpg"]
        wanted = sorted(map(os.fsencode, made), key=lambda name: name.split(b"/"))
        touch(tmp_path, *made)
        assert list(map(os.fsencode, listed(tmp_path))) == wanted

    def test_does_not_depend_on_which_listing_comes_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = [f"{a}/{b}/{c}.jpg" for a in "abcd" for b in "abcd" for c in "xy"]
        touch(tmp_path, *made)
        real, waits = os.scandir, np.random.default_rng(0)

        def scandir(path: Any) -> Iterator[Any]:
            time.sleep(waits.uniform(0, 0.01))
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)
        assert [listed(tmp_path) for _ in range(5)] == [made] * 5
