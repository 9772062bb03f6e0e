"""The checks of arguments that all doors share."""

import pytest
import torch

from headrace import ConfigError
from headrace.arguments import check_callable


def test_a_class_of_callables_is_no_callable() -> None:
    for passing in (None, len, str, torch.Tensor, torch.nn.Identity(), lambda x: x):
        check_callable("transform", passing)
    with pytest.raises(
        ConfigError, match=r"^transform is the class Identity, .*: write Identity\(\.\.\.\)$"
    ):
        check_callable("transform", torch.nn.Identity)
    with pytest.raises(ConfigError, match=r"^transform must be a callable, not 3$"):
        check_callable("transform", 3)
