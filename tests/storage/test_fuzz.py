"""Damaged files give an error of headrace's own, or what zarr-python makes of them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.storage.fuzz import NAMES, Asker, Mutation, damaged
from tests.storage.specimens import Specimen, specimens

ANY = st.integers(0, 2**32 - 1)
MUTATIONS = st.lists(st.builds(Mutation, st.sampled_from(NAMES), ANY, ANY, ANY), max_size=4)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "examples",
    [pytest.param(200, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.nightly)],
)
def test_damaged_files(examples: int) -> None:
    with Asker() as asker:

        @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from([*specimens().values()]), MUTATIONS, st.integers(0, 3))
        def check(specimen: Specimen, mutations: list[Mutation], way: int) -> None:
            files = damaged(specimen.kind, specimen.files, mutations)
            defect = asker.defect(specimen.kind, files, way, len(mutations) > 1)
            assert not defect, specimen.name

        check()
