"""The checks of arguments that all doors share."""

from typing import Any

import numpy as np
import pytest
import torch

import headrace
from headrace import ConfigError
from headrace.arguments import check_callable, check_names, described, nearest

KNOWN = ("batch_size", "num_workers", "shuffle", "image_size")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("batchsize", "batch_size"),
        ("imageSize", "image_size"),
        ("num_worker", "num_workers"),
        ("shufle", "shuffle"),
        ("epochs", None),
    ],
)
def test_the_nearest_name_whatever_case_and_underscores(given: str, meant: str | None) -> None:
    assert nearest(given, KNOWN) == meant


def test_an_unknown_name_gets_hint_then_nearest_then_the_list() -> None:
    check_names("door", ["shuffle"], KNOWN)
    for name, said in [
        ("bs", "door has no 'bs': use batch_size"),
        ("batchsize", "door has no 'batchsize': did you mean batch_size?"),
        ("xyz", "door has no 'xyz': it has batch_size, image_size, num_workers, shuffle"),
    ]:
        with pytest.raises(ConfigError) as refused:
            check_names("door", [name], KNOWN)
        assert str(refused.value) == said


@pytest.mark.parametrize(
    ("function", "word", "meant"),
    [
        (headrace.pack, "overwite", "overwrite"),
        (headrace.verify, "progres", "progress"),
        (headrace.write_index, "retrys", "retries"),
    ],
)
def test_functions_that_take_paths_propose_the_nearest_keyword(
    function: Any, word: str, meant: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"^{function.__name__} has no '{word}': did you mean {meant}\\?$"
    ):
        function("nowhere", **{word: True})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (3, "3"),
        ("photo", "'photo'"),
        ("x" * 100, "a str"),
        ([1], "a list"),
        (np.zeros(3), "a ndarray"),
        (int, "the class int"),
    ],
)
def test_a_refused_value_is_named_shortly(value: object, text: str) -> None:
    assert described(value) == text


def test_a_class_of_callables_is_no_callable() -> None:
    for passing in (None, len, str, torch.Tensor, torch.nn.Identity(), lambda x: x):
        check_callable("transform", passing)
    with pytest.raises(
        ConfigError, match=r"^transform is the class Identity, .*: write Identity\(\.\.\.\)$"
    ):
        check_callable("transform", torch.nn.Identity)
    with pytest.raises(ConfigError, match=r"^transform must be a callable, not 3$"):
        check_callable("transform", 3)
