"""Damaged files give what h5py and zarr-python make of them, or an error of headrace's own (see
fuzz.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.storage.fuzz import (
    COMPOSED,
    HUNG,
    ORIGINAL,
    ORIGINAL_BESIDE,
    REFUSED,
    SAME,
    STRICTER,
    Asker,
    Verdict,
    judge,
)
from tests.storage.mutations import NAMES, Mutation, damaged
from tests.storage.specimens import FOLDER, HDF5, Specimen, specimens

pytestmark = pytest.mark.slow

ANY = st.integers(0, 2**32 - 1)
MUTATIONS = st.lists(
    st.builds(Mutation, st.sampled_from(NAMES), ANY, ANY, ANY), min_size=1, max_size=4
)


def fuzz(examples: int) -> None:
    with Asker() as asker:

        @settings(
            max_examples=examples,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.sampled_from(specimens()), MUTATIONS)
        def check(specimen: Specimen, mutations: list[Mutation]) -> None:
            verdict, mutations = asker.minimal(specimen, mutations)
            assert not verdict.breaks, (specimen.name, mutations, verdict)

        check()


def test_some_hundred_damaged_files() -> None:
    fuzz(250)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_some_thousand_damaged_files() -> None:
    fuzz(4000)


def test_undamaged_files_are_read_as_the_libraries_read_them() -> None:
    with Asker() as asker:
        for specimen in specimens():
            asker.original(specimen)


# -- the judge and the mutations


ROW, OTHER, ERROR, ESCAPED = (
    ("value", 1),
    ("value", 2),
    ("error", "KeyError: x"),
    ("escaped", "KeyError: x"),
)
FOUND: dict[Any, Any] = {"length": ("value", 1), "how": ("value", "pread"), 0: ROW}


@pytest.mark.parametrize(
    ("library", "ours", "name"),
    [
        (ROW, ROW, SAME),
        (OTHER, ROW, ORIGINAL_BESIDE),
        (ERROR, ROW, ORIGINAL),
        (ROW, ERROR, STRICTER),
        (ROW, OTHER, "wrong rows"),
        (ERROR, OTHER, REFUSED),
        (ROW, ESCAPED, "an error that is not headrace's"),
    ],
)
def test_the_judge(library: Any, ours: Any, name: str) -> None:
    original = {"length": ("value", 1), 0: ROW}
    verdict = judge({**original, 0: library}, {**FOUND, 0: ours}, original)
    assert verdict.name == name and bool(verdict.breaks) == (
        name in ("wrong rows", REFUSED, "an error that is not headrace's")
    )
    assert judge({"open": ERROR}, FOUND, original).name == ORIGINAL
    assert judge(original, {"open": ERROR}, original).name == STRICTER
    assert judge(original, {"open": ESCAPED}, original).breaks
    assert judge(original, {**FOUND, "length": ("value", 2)}, original).name == "another length"


def test_two_damages_are_no_defect_where_each_alone_is_none() -> None:
    class Scripted(Asker):
        def verdict(self, specimen: Specimen, mutations: list[Mutation]) -> Verdict:
            return (
                Verdict(REFUSED, "row 0")
                if {m.name for m in mutations} >= wanted
                else Verdict(HUNG)
            )

    given = [Mutation(name, 0, 0, 0) for name in ("flip", "cut", "append")]
    specimen = Specimen("", HDF5, {})
    wanted = {"flip", "append"}
    assert Scripted().minimal(specimen, given) == (Verdict(COMPOSED), [given[0], given[2]])
    wanted = {"cut"}
    assert Scripted().minimal(specimen, given) == (Verdict(REFUSED, "row 0"), [given[1]])


@pytest.mark.parametrize("name", sorted(set(NAMES)))
def test_mutations_damage_and_are_repeatable(name: str) -> None:
    files = next(one.files for one in specimens() if one.kind == FOLDER)
    changed = 0
    for number in range(40):
        mutation = Mutation(name, number, 7 * number, 16 * number + 1)
        found = damaged(FOLDER, files, [mutation])
        assert found == damaged(FOLDER, files, [mutation])
        changed += found != files
    assert changed > 5
    assert isinstance(damaged(FOLDER, {"x/zarr.json": b""}, [Mutation(name, 1, 1, 1)]), dict)
