"""Stacking: batches keep the structure and the dtypes of their samples."""

import dataclasses
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from headrace import CollateError, list_collate, pad_collate
from headrace.collate import stack_collate
from headrace.memory.ring import Arena, Ring
from headrace.testing.contract import same

NAMES = "uint8 int8 int16 int32 int64 bool float16 bfloat16 float32 float64 complex64 complex128"
DTYPES: list[torch.dtype] = [getattr(torch, name) for name in NAMES.split()]
ARRAYS = "? u1 i1 u2 i2 u4 i4 u8 i8 f2 f4 f8 c8 c16"
Point = namedtuple("Point", "x y")


class Row(NamedTuple):
    value: torch.Tensor
    name: str


def test_read_only_and_turned_arrays() -> None:
    frozen = np.arange(6.0).reshape(2, 3)
    frozen.flags.writeable = False
    bytes_ = np.frombuffer(bytes(range(6)), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stack_collate([frozen, frozen]).tolist() == [[[0, 1, 2], [3, 4, 5]]] * 2
        assert stack_collate([bytes_, bytes_]).tolist() == [list(range(6))] * 2
        assert stack_collate([frozen[::-1, ::-1]])[0, 0].tolist() == [5, 4, 3]
        assert stack_collate([frozen.T, frozen.T]).shape == (2, 3, 2)
        assert stack_collate([np.broadcast_to(np.int16(3), (2, 2))]).tolist() == [[[3, 3], [3, 3]]]
    batch = stack_collate([frozen, frozen])
    batch.fill_(0)
    assert frozen[1, 2] == 5


@pytest.mark.slow
def test_tensors_of_special_kinds() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert stack_collate([parameter, parameter]).requires_grad
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(stack_collate([sparse, sparse]).to_dense()[1], torch.eye(3))
    assert stack_collate([torch.empty(2, device="meta")] * 2).device.type == "meta"
    turned = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)[0]
    assert torch.equal(stack_collate([turned, turned])[1], turned)
    conjugate = torch.tensor([1 + 2j]).conj()
    assert stack_collate([conjugate, conjugate]).tolist() == [[1 - 2j], [1 - 2j]]


def test_a_batch_lies_in_the_ring_slot_where_there_is_one() -> None:
    ring = Ring(1)
    with Arena(ring, 0) as arena:
        arena.least = 0
        batch = stack_collate([{"x": torch.arange(3), "n": 4.5}] * 2)
        inside = ring.map(0, 1)
        assert bytes(inside[:8]) == bytes(8) and inside[8] == 1  # 0, 1, 2, ... as int64
    assert batch["x"].tolist() == [[0, 1, 2]] * 2 and batch["n"].tolist() == [4.5] * 2


def sample(number: int) -> dict[str, Any]:
    t = torch.tensor([number, number])
    return {
        "tuple": (t, f"text {number}"),
        "list": [t, {"deep": (number, None)}],
        "point": Point(number, t),
        "row": Row(t, f"row {number}"),
        "empty": (),
        "nothing": [],
        "no": {},
    }


def test_structures_are_kept() -> None:
    stacked, numbers = torch.tensor([[1, 1], [2, 2]]), torch.tensor([1, 2])
    expected = {
        "tuple": (stacked, ["text 1", "text 2"]),
        "list": [stacked, {"deep": (numbers, [None, None])}],
        "point": Point(numbers, stacked),
        "row": Row(stacked, ["row 1", "row 2"]),
        "empty": (),
        "nothing": [],
        "no": {},
    }
    assert same(stack_collate([sample(1), sample(2)]), expected)


@dataclasses.dataclass
class Example:
    image: torch.Tensor
    name: str
    size: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.size = self.image.shape[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    image: torch.Tensor
    parts: tuple[Any, ...] = ()


@dataclasses.dataclass
class Checked:
    image: torch.Tensor
    scale: dataclasses.InitVar[int]

    def __post_init__(self, scale: int) -> None:
        if self.image.ndim != 1:
            raise ValueError("an image of this class has one dimension")
        self.image = self.image * scale


def test_dataclasses() -> None:
    batch = stack_collate([Example(torch.zeros(3), "a"), Example(torch.ones(3), "b")])
    assert type(batch) is Example and batch.name == ["a", "b"]
    assert batch.image.shape == (2, 3) and batch.size.tolist() == [3, 3]
    frozen = stack_collate([Frozen(torch.zeros(3), (1, "a")), Frozen(torch.ones(3), (2, "b"))])
    assert type(frozen) is Frozen and frozen.image.shape == (2, 3)
    assert frozen.parts[0].tolist() == [1, 2] and frozen.parts[1] == ["a", "b"]
    checked = stack_collate([Checked(torch.ones(3), 2), Checked(torch.ones(3), 3)])
    assert checked.image.tolist() == [[2, 2, 2], [3, 3, 3]]


def test_mappings() -> None:
    ordered = stack_collate([OrderedDict(b=1, a=torch.zeros(2))] * 2)
    assert type(ordered) is OrderedDict and list(ordered) == ["b", "a"]
    assert ordered["b"].tolist() == [1, 1]
    user = stack_collate([UserDict({"a": 1})] * 3)
    assert type(user) is UserDict and user["a"].tolist() == [1, 1, 1]
    default = stack_collate([defaultdict(list, {"a": 1})] * 2)
    assert type(default) is defaultdict and default["a"].tolist() == [1, 1] and default["b"] == []
    mixed = stack_collate([{1: 2, None: "x"}, {None: "y", 1: 3}])
    assert same(mixed, {1: torch.tensor([2, 3]), None: ["x", "y"]})


class Fields(MutableMapping[str, Any]):
    """Keeps its fields in a dict, which a shallow copy shares."""

    def __init__(self, **fields: Any) -> None:
        self._fields_of = fields

    def __getitem__(self, key: str) -> Any:
        return self._fields_of[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._fields_of[key] = value

    def __delitem__(self, key: str) -> None:
        del self._fields_of[key]

    def __iter__(self) -> Any:
        return iter(self._fields_of)

    def __len__(self) -> int:
        return len(self._fields_of)


def test_samples_of_a_mapping_of_one_s_own_stay_as_they_are() -> None:
    samples = [Fields(x=torch.tensor([float(i)])) for i in range(2)]
    for _ in range(2):
        batch = stack_collate(samples)
        assert type(batch) is Fields and batch["x"].tolist() == [[0.0], [1.0]]
        assert [sample["x"].tolist() for sample in samples] == [[0.0], [1.0]]


def test_tensors_and_arrays_keep_their_dtype() -> None:
    for shape in ((), (3,), (2, 0, 3)):
        for dtype in DTYPES:
            samples = [torch.full(shape, number, dtype=dtype) for number in range(4)]
            batch = stack_collate(samples)
            assert batch.dtype == dtype and batch.shape == (4, *shape)
            assert same(batch, default_collate(samples))
            batch.fill_(1)
            assert not samples[0].any()  # the batch is a copy
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for name in ARRAYS.split():
                for order in "<>":
                    dtype = np.dtype(name).newbyteorder(order)
                    arrays = [np.full(shape, number, dtype) for number in range(3)]
                    made = stack_collate(arrays).numpy()
                    assert made.dtype == np.dtype(name) and np.array_equal(made, np.stack(arrays))
                scalars = stack_collate([np.dtype(name).type(number) for number in range(3)])
                assert scalars.numpy().dtype == np.dtype(name) and scalars.tolist()[:2] == [0, 1]


def test_numbers() -> None:
    tables: list[tuple[list[Any], torch.dtype]] = [
        ([1, 2, 3], torch.int64),
        ([1, 2.5], torch.float64),
        ([True, False], torch.bool),
        ([True, 2], torch.int64),
        ([-(2**63), 2**63 - 1], torch.int64),
        ([float("nan"), float("inf")], torch.float64),
        ([1, np.int64(2)], torch.int64),
        ([True, np.bool_(False)], torch.bool),
        ([1.5, np.float32(2), 3], torch.float64),
    ]
    for samples, dtype in tables:
        for numbers in (samples, samples[::-1]):
            batch = stack_collate(numbers)
            assert batch.dtype == dtype
            np.testing.assert_array_equal(batch.numpy(), np.array(numbers))


def test_what_is_no_tensor_stays_a_list() -> None:
    for samples in (
        ["a", "b"],
        [b"a", b"b"],
        [object(), object()],
        [{1, 2}, {3}],
        [range(3)] * 2,
        [None, None, "a"],
        [None, 1, None],
        [np.array(["a"])] * 2,
        [np.datetime64("2020-01-01")] * 2,
        [np.array([None])] * 2,
        [int, float],
        [1 + 2j, 3j],
    ):
        batch = stack_collate([{"field": value} for value in samples])["field"]
        assert type(batch) is list and all(a is b for a, b in zip(batch, samples, strict=True))
        listed = list_collate(tuple(samples))
        assert type(listed) is list and listed[0] is samples[0]
    x = torch.zeros(2)
    batch = stack_collate([(x, None), (x, None)])
    assert type(batch) is tuple and batch[0].shape == (2, 2) and batch[1] == [None, None]


PHOTO = Image.new("RGB", (5, 4))


REFUSED: list[tuple[list[Any], str]] = [
    ([torch.zeros(2), torch.zeros(3)], "sample 1 is float32 [3], sample 0 is float32 [2]"),
    ([np.zeros(2), np.zeros(2, np.float32)], "sample 1 is float32 [2]"),
    ([torch.zeros(2), "text"], "sample 1 is 'str'"),
    ([np.zeros(2), np.float64(1)], "sample 1 is float64 []"),
    ([(1, 2), (1, 2, 3)], "sample 1"),
    ([Point(1, 2), (1,)], "sample 1 has the fields '0', in a tuple"),
    ([{"n": 1}, {"n": -(2**64)}], "at ['n']: sample 1 is -18446744073709551616"),
    ([Example(torch.zeros(2), "a"), Frozen(torch.zeros(2))], "'parts', in a Frozen"),
    ([(PHOTO, 1)] * 2, "PILToTensor()"),
    ([torch.zeros(2), torch.zeros(2, 1)], 'collate_fn="pad"'),
    ([torch.zeros(2).half(), torch.zeros(2).long()], ".to(torch.float16)"),
    ([[None, 1], [None, 2]], "None"),
    ([{"x": np.ones(1)}, {"x": np.ones(1, np.clongdouble)}], "at ['x']"),
    ([{"x": np.longdouble(1)}] * 2, "at ['x']"),
    ([{"x": np.ones(1, np.longdouble)}] * 2, ".astype("),
    *(([one, (torch.ones(1), 1)], "sample 1") for one in (None, "a", 3)),
]


def test_what_differs_is_named() -> None:
    for samples, named in REFUSED:
        with pytest.raises(CollateError) as refused:
            stack_collate(samples)
        assert named in str(refused.value)


def test_the_place_is_named() -> None:
    for wrap, place in (
        (lambda t: {"a": [0, {"b": (t,)}]}, "at ['a'][1]['b'][0]"),
        (lambda t: Point(1, t), "at [1]"),
        (lambda t: {"e": Frozen(torch.zeros(1), (t,))}, "at ['e'].parts[0]"),
    ):
        for one, other in ((torch.zeros(2), torch.zeros(3)), ({"a": 1}, {"b": 1})):
            with pytest.raises(CollateError) as refused:
                stack_collate([wrap(one), wrap(other)])
            assert f"{place}: sample 1" in str(refused.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.arange(3), torch.arange(2)])
    for collate in (stack_collate, pad_collate()):
        for samples in ([(nested, 1)] * 2, [(torch.ones(3), 1), (nested, 1)]):
            with pytest.raises(CollateError, match=r"\[0\]"):
                collate(samples)


def test_torch_s_own_tuples() -> None:
    found = [torch.arange(6.0).reshape(2, 3).max(1) for _ in range(2)]
    batch = stack_collate([{"size": torch.Size([2, 3]), "found": f} for f in found])
    assert [part.tolist() for part in batch["size"]] == [[2, 2], [3, 3]]
    assert [part.shape for part in batch["found"]] == [(2, 2), (2, 2)]
