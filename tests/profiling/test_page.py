"""The page of a profile needs nothing from elsewhere."""

from __future__ import annotations

import html
import re

from headrace.profiling.report.page import page_of
from tests.profiling.test_profile import made


def test_everything_is_in_the_page() -> None:
    page = page_of(made().as_dict())
    for wanted in (
        *("Decoding &amp; more holds the loop back.", "ceiling: the &lt;decoder&gt; alone"),
        *("x1.80 to x2.10", "samples/s, from 0 to 120.0 at most", "batch_size=4"),
    ):
        assert wanted in page
    assert not re.search(r"(src|href)=\"(?!data:,)", page)
    assert not any(word in page for word in ("url(", "<script", "@import"))
    assert page.count("<rect") == 9 * 8 and "default-src 'none'" in html.unescape(page)


def test_a_page_of_little() -> None:
    profile = made()
    for part in (profile.stages, profile.advice, profile.batches, profile.series):
        part.clear()
    profile.free_per_second = None
    page = page_of(profile.as_dict())
    assert "Nothing that headrace knows of" in page and "<svg" not in page
