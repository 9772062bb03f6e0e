"""Prepares a checkout for the build of a release: compares the versions with the tag, and adds the
repository's URLs.

python tools/prepare_release.py v0.2.0 https://github.com/OWNER/REPOSITORY

The tag must name the version of pyproject.toml, of `headrace.__version__` and of CITATION.cff, and
CHANGELOG.md must have a dated section of it. Then pyproject.toml gets `[project.urls]`, and the
relative links of README.md become links into the repository at that tag, since PyPI shows the page
without the files beside it. Exit codes: 0 done, 2 something does not fit (nothing is written then).
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def mismatches(tag: str, root: Path = ROOT) -> list[str]:
    """What does not fit the tag, a line each; empty if all does."""

    def said(name: str, pattern: str) -> str | None:
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        return match[1] if match else None

    version = tag.removeprefix("v")
    versions = {
        "pyproject.toml": said("pyproject.toml", r'^version = "(.*)"$'),
        "src/headrace/__init__.py": said("src/headrace/__init__.py", r'^__version__ = "(.*)"$'),
        "CITATION.cff": said("CITATION.cff", r"^version: (.*)$"),
    }
    found = [
        f"{name}: version {one}, the tag is {tag}"
        for name, one in versions.items()
        if one != version
    ]
    if said("CHANGELOG.md", rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$") is None:
        found.append(f"CHANGELOG.md: no section '## [{version}] - YYYY-MM-DD'; rename [Unreleased]")
    if said("README.md", r"(not on PyPI yet)"):
        found.append("README.md: says that headrace is not on PyPI yet")
    return found


def with_absolute_links(readme: str, repository: str, tag: str) -> str:
    """The page with its relative links into the repository at the tag; pictures as raw files."""
    pages, files = f"{repository}/blob/{tag}/", f"{repository}/raw/{tag}/"
    relative = r"(?!https?:|#|mailto:)"
    readme = re.sub(rf"\]\({relative}", f"]({pages}", readme)
    return re.sub(rf'((?:src|srcset)="){relative}', rf"\g<1>{files}", readme)


def urls_of(repository: str) -> str:
    """The table `[project.urls]`."""
    addresses = {
        "Source": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    return "\n[project.urls]\n" + "".join(
        f'{name} = "{address}"\n' for name, address in addresses.items()
    )


def prepare(tag: str, repository: str, root: Path = ROOT) -> None:
    """Writes the URLs into pyproject.toml and README.md of a checkout."""
    project, readme = root / "pyproject.toml", root / "README.md"
    text = project.read_text(encoding="utf-8")
    if "urls" not in tomllib.loads(text)["project"]:
        project.write_text(
            text.replace("\n[project.scripts]\n", urls_of(repository) + "\n[project.scripts]\n", 1),
            encoding="utf-8",
        )
    readme.write_text(
        with_absolute_links(readme.read_text(encoding="utf-8"), repository.rstrip("/"), tag),
        encoding="utf-8",
    )


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    tag, repository = sys.argv[1:]
    found = mismatches(tag)
    for line in found:
        print(line, file=sys.stderr)
    if not found:
        prepare(tag, repository)
    return 2 if found else 0


if __name__ == "__main__":
    sys.exit(main())
