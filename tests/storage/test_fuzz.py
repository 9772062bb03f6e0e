"""Damaged files give what h5py and zarr-python make of them, or an error of headrace's own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.storage.fuzz import NAMES, Asker, Mutation, judged
from tests.storage.specimens import Specimen, specimens

ANY = st.integers(0, 2**32 - 1)
MUTATIONS = st.lists(
    st.builds(Mutation, st.sampled_from(NAMES), ANY, ANY, ANY), min_size=1, max_size=4
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "examples",
    [pytest.param(200, marks=pytest.mark.slow), pytest.param(4000, marks=pytest.mark.nightly)],
)
def test_damaged_files(examples: int) -> None:
    with Asker() as asker:

        @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from([*specimens().values()]), MUTATIONS, st.integers(0, 3))
        def check(specimen: Specimen, mutations: list[Mutation], way: int) -> None:
            defect = asker.defect(specimen, mutations, way)
            assert not defect, specimen.name

        check()


@pytest.mark.slow
def test_undamaged_files_are_read_as_the_libraries_read_them() -> None:
    with Asker() as asker:
        for specimen in specimens().values():
            asker.original(specimen)


def test_the_law_has_teeth() -> None:
    length, how = ("value", 1), ("value", "pread")
    row, other, error = ("value", 1), ("value", 2), ("error", "KeyError")
    original: Any = {"length": length, "missed": ("value", False), 0: row}
    for library, ours, is_defect in (
        (row, row, False),
        (other, row, False),  # the original one
        (error, row, False),
        (row, error, False),
        (row, other, True),
        (error, other, True),
        (row, ("escaped", "KeyError"), True),
    ):
        found = judged({**original, 0: library}, {"length": length, "how": how, 0: ours}, original)
        assert bool(found) == is_defect
    assert not judged(original, {"open": error}, original)
    assert judged(original, {"open": ("escaped", "KeyError")}, original)
    assert judged(original, {**original, "length": ("value", 2)}, original)
