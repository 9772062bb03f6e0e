"""What the tests of files share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder of the files that the module names in CONTENT; for the fixture `server`."""
    made = tmp_path_factory.mktemp("served")
    for name, content in request.module.CONTENT.items():
        (made / name).write_bytes(content)
    return made
