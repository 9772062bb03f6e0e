"""The site of docs/ has every page and every public name; .ci/run builds it with `mkdocs build
--strict`.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import headrace
from headrace.core.options import COMMON, REMOTE
from headrace.loader.config import FIELDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def _pages(nav: Any) -> Iterator[str]:
    """The pages of a nav, in its order."""
    if isinstance(nav, str):
        yield nav
        return
    for part in nav.values() if isinstance(nav, dict) else nav:
        yield from _pages(part)


def test_the_nav_has_every_page_once_but_the_tables() -> None:
    pages = list(_pages(SITE["nav"]))
    linked = SITE["not_in_nav"].split()
    assert linked == ["benchmark_tables.md"]
    assert sorted(pages + linked) == sorted(
        str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")
    )
    assert pages[:2] == ["index.md", "start.md"]


def test_every_public_name_has_one_entry() -> None:
    pages = (path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.md")))
    entries = Counter(
        name
        for page in pages
        for name in re.findall(r"^::: headrace\.([\w.]+)$", page, re.MULTILINE)
    )
    for name in entries:  # those of packages too
        assert operator.attrgetter(name)(headrace) is not None
    assert Counter({name: n for name, n in entries.items() if "." not in name}) == Counter(
        headrace.__all__
    )
    assert max(entries.values()) == 1


def _options(section: str) -> list[str]:
    """The options in the table of a section of docs/configuration.md."""
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    page = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in page.splitlines() if line.startswith("|")][2:]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row[2])]


def test_the_options_are_those_of_the_code() -> None:
    assert sorted(_options("Loader options")) == sorted(FIELDS)
    assert sorted(_options("Dataset options")) == sorted(
        COMMON | REMOTE | {"loading_mode", "transform"}
    )


def test_the_front_page_begins_as_the_readme_does() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", DOCS / "index.md")]
    first, second = (" ".join(t.split("\n\n")[1].replace("**", "").split()) for t in texts)
    assert first == second
    assert len({alt for text in texts for alt in re.findall(r'alt="([^"]*)"', text)}) == 1
