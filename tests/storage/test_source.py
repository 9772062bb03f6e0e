"""Are four methods enough for a source?"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest

from headrace import Source


class Words(Source):
    """The least that a source can be."""

    words = ("one", "two", "three")

    def __len__(self) -> int:
        return len(self.words)

    def read(self, indices: Sequence[int]) -> list[str]:
        return [self.words[i] for i in indices]

    def fingerprint(self) -> str:
        return "words"


def test_the_rest_follows() -> None:
    source = Words()
    assert (len(source), source.read([2, 0, 2]), source.fingerprint()) == (3, ["three", "one", "three"], "words")
    assert source.blocks() is None
    assert source.location(1) == "Words[1]"
    assert pickle.loads(pickle.dumps(source)).read([1]) == ["two"]


@pytest.mark.parametrize("left_out", ["__len__", "read", "fingerprint"])
def test_what_must_be_there(left_out: str) -> None:
    methods = {name: getattr(Words, name) for name in ("__len__", "read", "fingerprint") if name != left_out}
    with pytest.raises(TypeError, match=left_out):
        type("Incomplete", (Source,), methods)()


def test_it_asks_for_no_more() -> None:
    assert Source.__abstractmethods__ == {"__len__", "read", "fingerprint"}
    source = Words()
    assert source.rows_like() is None and source.how() == {} and source.block_nbytes == 0 and source.take_counts() == {}
    assert source.run(str, 3) == ["0", "1", "2"]
    source.hold_chunks(5)
    source.close()
