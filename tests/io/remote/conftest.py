"""What the tests of servers share."""

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.io.remote.client import Remote
from headrace.io.remote.options import RemoteOptions


@pytest.fixture
def remote_of() -> Iterator[Any]:
    """Makes servers of URLs, and closes them at the end."""
    made: list[Remote] = []

    def make(url: str, **options: Any) -> Remote:
        made.append(Remote(url, RemoteOptions(**{"deadline": 30, **options})))
        return made[-1]

    yield make
    for remote in made:
        remote.close()
