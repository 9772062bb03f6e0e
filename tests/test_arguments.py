"""The checks of arguments that all doors share."""

import pytest
import torch

from headrace import ConfigError
from headrace.arguments import check_callable, check_names

KNOWN = ("batch_size", "num_workers", "shuffle", "image_size")


def test_an_unknown_name_gets_hint_then_nearest_then_the_list() -> None:
    check_names("door", ["shuffle"], KNOWN)
    for name, said in [
        ("bs", "door has no 'bs': use batch_size"),
        ("batchsize", "door has no 'batchsize': did you mean batch_size?"),
        ("imageSize", "door has no 'imageSize': did you mean image_size?"),
        ("shufle", "door has no 'shufle': did you mean shuffle?"),
        ("xyz", "door has no 'xyz': it has batch_size, image_size, num_workers, shuffle"),
    ]:
        with pytest.raises(ConfigError) as refused:
            check_names("door", [name], KNOWN)
        assert str(refused.value) == said


def test_a_class_of_callables_is_no_callable() -> None:
    for passing in (None, len, str, torch.Tensor, torch.nn.Identity(), lambda x: x):
        check_callable("transform", passing)
    with pytest.raises(
        ConfigError, match=r"^transform is the class Identity, .*: write Identity\(\.\.\.\)$"
    ):
        check_callable("transform", torch.nn.Identity)
    with pytest.raises(ConfigError, match=r"^transform must be a callable, not 3$"):
        check_callable("transform", 3)
