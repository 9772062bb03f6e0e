"""What the tests of files share."""

from pathlib import Path

import pytest

from tests.io.served import CONTENT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the files of `served`; for the fixture `server`."""
    made = tmp_path_factory.mktemp("served")
    for name, content in CONTENT.items():
        (made / name).write_bytes(content)
    return made
