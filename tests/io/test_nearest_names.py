"""The names that a message lists."""

from headrace.io.paths import listed_names


def test_few_names_are_all_listed() -> None:
    assert listed_names([]) == "none"
    assert listed_names(["b", "a"], "c", repr) == "'a', 'b'"
    assert listed_names(map(str, range(10)), "x") == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"


def test_of_many_names_the_nearest_comes_first() -> None:
    names = [f"run/{i:05d}/{kind}" for i in range(10_000) for kind in ("images", "labels")]
    for wanted in ("run/00713/imagse", "RUN/00713/IMAGES", "00713/images", "run/0713/images"):
        found = listed_names(names, wanted)
        assert found.startswith("run/00713/images, "), wanted
        assert found.endswith(" and 19,990 more")
        assert found.count(",") == 10
    assert listed_names(names).startswith("run/00000/images, run/00000/labels, run/00001/images")
