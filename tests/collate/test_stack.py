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

from headrace import CollateError, TextCollator, VisionCollator, list_collate, pad_collate
from headrace.collate import stack_collate
from headrace.memory.ring import Ring
from headrace.testing.contract import same

DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]
ARRAYS = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16"]
Point = namedtuple("Point", "x y")


class Row(NamedTuple):
    value: torch.Tensor
    name: str


# -- tensors and arrays


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (1, 2, 2)])
def test_tensors_keep_their_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    samples = [torch.full(shape, number, dtype=dtype) for number in range(4)]
    batch = stack_collate(samples)
    assert batch.dtype == dtype and batch.shape == (4, *shape)
    assert same(batch, torch.stack(samples)) and same(batch, default_collate(samples))


@pytest.mark.parametrize("dtype", ARRAYS)
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_arrays_of_any_byte_order_keep_their_dtype(dtype: str, order: str, shape: tuple[int, ...]) -> None:
    samples = [np.full(shape, number, np.dtype(dtype).newbyteorder(order)) for number in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = stack_collate(samples)
    assert batch.numpy().dtype == np.dtype(dtype) and batch.shape == (3, *shape)
    assert np.array_equal(batch.numpy(), np.stack(samples))


@pytest.mark.parametrize("dtype", ARRAYS)
def test_numpy_scalars(dtype: str) -> None:
    scalars = [np.dtype(dtype).type(number) for number in range(3)]
    batch = stack_collate(scalars)
    assert batch.shape == (3,) and batch.numpy().dtype == np.dtype(dtype) and batch.tolist() == [s.item() for s in scalars]


def test_read_only_and_turned_arrays() -> None:
    frozen = np.arange(6.0).reshape(2, 3)
    frozen.flags.writeable = False
    bytes_ = np.frombuffer(bytes(range(6)), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(stack_collate([frozen, frozen])[1], torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
        assert stack_collate([bytes_, bytes_]).tolist() == [list(range(6))] * 2
        assert stack_collate([frozen[::-1, ::-1]])[0, 0].tolist() == [5, 4, 3]
        assert stack_collate([frozen.T, frozen.T]).shape == (2, 3, 2)
        assert stack_collate([np.broadcast_to(np.int16(3), (2, 2))]).tolist() == [[[3, 3], [3, 3]]]
    batch = stack_collate([frozen, frozen])
    batch.fill_(0)
    assert frozen[1, 2] == 5


def test_a_batch_is_a_copy() -> None:
    samples = [torch.zeros(3), torch.zeros(3)]
    stack_collate(samples).fill_(1)
    assert samples[0].sum() == 0
    one = np.zeros(3)
    stack_collate([one]).fill_(1)
    assert one.sum() == 0


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
    with ring.arena(0) as arena:
        batch = stack_collate([{"x": torch.arange(3), "n": 4.5}] * 2)
        inside = ring.map(0, 1)
        assert bytes(inside[:8]) == bytes(8) and inside[8] == 1  # 0, 1, 2, ... as int64
        assert arena is not None
    assert batch["x"].tolist() == [[0, 1, 2]] * 2 and batch["n"].tolist() == [4.5] * 2


# -- numbers and the rest


@pytest.mark.parametrize(
    ("samples", "dtype"),
    [
        ([1, 2, 3], torch.int64),
        ([1.5, 2.0], torch.float64),
        ([1, 2.5], torch.float64),
        ([True, False], torch.bool),
        ([True, 2], torch.int64),
        ([-(2**63), 2**63 - 1], torch.int64),
        ([float("nan"), float("inf")], torch.float64),
    ],
)
def test_numbers(samples: list[Any], dtype: torch.dtype) -> None:
    batch = stack_collate(samples)
    assert batch.dtype == dtype and batch.shape == (len(samples),)
    assert all(a == b or (a != a and b != b) for a, b in zip(batch.tolist(), samples, strict=True))


@pytest.mark.parametrize(
    "samples",
    [
        ["a", "b"], [b"a", b"b"], [object(), object()], [{1, 2}, {3}], [range(3), range(3)], ["a", None],
        [np.array(["a"]), np.array(["b"])], [np.datetime64("2020-01-01")] * 2, [np.array([None])] * 2, [np.str_("a")] * 2,
        [int, float], [1 + 2j, 3j],
    ],
)  # fmt: skip
def test_what_is_no_tensor_stays_a_list(samples: list[Any]) -> None:
    batch = stack_collate(samples)
    assert type(batch) is list and all(a is b for a, b in zip(batch, samples, strict=True))


def test_list_collate() -> None:
    samples = (torch.zeros(2), torch.zeros(3))
    batch = list_collate(samples)
    assert type(batch) is list and batch[0] is samples[0] and batch[1] is samples[1]


# -- structures


def sample(number: int) -> dict[str, Any]:
    t = torch.tensor([number, number])
    return {
        "tensor": t,
        "tuple": (t, f"text {number}"),
        "list": [t, {"deep": (number, None)}],
        "point": Point(number, t),
        "row": Row(t, f"row {number}"),
        "empty": (),
        "nothing": [],
        "no": {},
    }


def test_structures_are_kept() -> None:
    batch = stack_collate([sample(1), sample(2)])
    stacked = torch.tensor([[1, 1], [2, 2]])
    expected = {
        "tensor": stacked,
        "tuple": (stacked, ["text 1", "text 2"]),
        "list": [stacked, {"deep": (torch.tensor([1, 2]), [None, None])}],
        "point": Point(torch.tensor([1, 2]), stacked),
        "row": Row(stacked, ["row 1", "row 2"]),
        "empty": (),
        "nothing": [],
        "no": {},
    }
    assert same(batch, expected)
    assert [type(value) for value in batch.values()] == [type(value) for value in expected.values()]


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
    assert type(batch) is Example and batch.image.shape == (2, 3) and batch.name == ["a", "b"] and batch.size.tolist() == [3, 3]
    frozen = stack_collate([Frozen(torch.zeros(3), (1, "a")), Frozen(torch.ones(3), (2, "b"))])
    assert type(frozen) is Frozen and frozen.image.shape == (2, 3)
    assert frozen.parts[0].tolist() == [1, 2] and frozen.parts[1] == ["a", "b"]
    checked = stack_collate([Checked(torch.ones(3), 2), Checked(torch.ones(3), 3)])
    assert checked.image.tolist() == [[2, 2, 2], [3, 3, 3]]


def test_a_dataclass_sample_is_left_as_it_was() -> None:
    samples = [Example(torch.zeros(3), "a"), Example(torch.ones(3), "b")]
    stack_collate(samples)
    assert samples[0].image.shape == (3,) and samples[0].name == "a"


def test_mappings() -> None:
    ordered = stack_collate([OrderedDict(b=1, a=torch.zeros(2))] * 2)
    assert type(ordered) is OrderedDict and list(ordered) == ["b", "a"] and ordered["b"].tolist() == [1, 1]
    user = stack_collate([UserDict({"a": 1})] * 3)
    assert type(user) is UserDict and user["a"].tolist() == [1, 1, 1]
    default = stack_collate([defaultdict(list, {"a": 1})] * 2)
    assert type(default) is defaultdict and default["a"].tolist() == [1, 1] and default["b"] == []
    assert stack_collate([{1: 2, None: "x"}, {None: "y", 1: 3}]) == {1: pytest.approx(torch.tensor([2, 3])), None: ["x", "y"]}


def test_torch_s_own_tuples() -> None:
    found = [torch.arange(6.0).reshape(2, 3).max(1) for _ in range(2)]
    batch = stack_collate([{"size": torch.Size([2, 3]), "found": f} for f in found])
    assert [part.tolist() for part in batch["size"]] == [[2, 2], [3, 3]]
    assert [part.shape for part in batch["found"]] == [(2, 2), (2, 2)]


@pytest.mark.parametrize(
    "samples",
    [
        [torch.zeros(2), torch.ones(2)],
        [np.zeros(2), np.ones(2)],
        [np.float32(1), np.float32(2)],
        [1, 2],
        [1.5, 2.5],
        ["a", "b"],
        [{"a": 1, "b": [torch.zeros(1), {"c": "x"}]}] * 2,
        [[1, torch.zeros(2)], [2, torch.ones(2)]],
        [Point(1, torch.zeros(2))] * 3,
        [OrderedDict(a=1)] * 2,
    ],
)
def test_it_gives_what_torch_s_default_collate_gives(samples: list[Any]) -> None:
    ours, theirs = stack_collate(samples), default_collate(samples)
    assert same(ours, theirs)


def test_tuples_stay_tuples() -> None:
    samples = [(torch.zeros(2), 1), (torch.ones(2), 2)]
    assert type(stack_collate(samples)) is tuple and type(default_collate(samples)) is list
    assert same(list(stack_collate(samples)), default_collate(samples))


# -- what can't be stacked


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([torch.zeros(2), torch.zeros(3)], r"sample 1 is float32 \[3\], sample 0 is float32 \[2\]"),
        ([torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.int8)], r"sample 2 is int8 \[2\]"),
        ([np.zeros(2), np.zeros((1, 2))], r"sample 1 is float64 \[1, 2\]"),
        ([np.zeros(2), np.zeros(2, np.float32)], r"sample 1 is float32 \[2\]"),
        ([np.zeros(2), None], "sample 1 is 'NoneType'"),
        ([torch.zeros(2), "text"], "sample 1 is 'str'"),
        ([np.float32(1), np.float64(1)], "sample 1 is float64"),
        ([np.zeros(2), np.float64(1)], r"sample 1 is float64 \[\]"),
        ([np.float32(1), "text"], "sample 1"),
        ([np.float32(1), None], "sample 1"),
        ([{"a": 1}, {"b": 1}], r"sample 1 has the keys \['b'\], sample 0 has the keys \['a'\]"),
        ([{"a": 1}, {"a": 1, "b": 2}], r"keys \['a', 'b'\]"),
        ([{"a": 1}, 3], "sample 1"),
        ([(1, 2), (1, 2, 3)], "sample 1.*2 fields"),
        ([[1], []], "sample 1.*1 fields"),
        ([(1, 2), 5], "sample 1.*2 fields"),
        ([Point(1, 2), (1,)], "2 fields"),
        ([2**64, 1], "sample 0 is 18446744073709551616, which does not fit"),
        ([{"n": 1}, {"n": -(2**64)}], r"at \['n'\]: sample 1 is -18446744073709551616, which does not fit"),
        ([Example(torch.zeros(2), "a"), "text"], "sample 1 is 'str'"),
        ([Example(torch.zeros(2), "a"), Frozen(torch.zeros(2))], "sample 1 is 'Frozen'"),
    ],
)
def test_what_differs_is_named(samples: list[Any], said: str) -> None:
    with pytest.raises(CollateError, match=said) as refused:
        stack_collate(samples)
    assert "or a function of your own" in str(refused.value) or "dtype" in str(refused.value)


def test_the_remedy_fits_what_differs() -> None:
    def remedy(samples: list[Any], collate: Any = stack_collate) -> str:
        with pytest.raises(CollateError) as refused:
            collate(samples)
        return str(refused.value).split(". ", 1)[1]

    assert 'collate_fn="pad"' in (shapes := remedy([torch.zeros(2), torch.zeros(3)])) and "image_size=" in shapes and "dtype" not in shapes
    dtypes = remedy([torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.int64)])
    assert dtypes.startswith("Give all one dtype: cast them") and ".to(torch.float16)" in dtypes and "shape" not in dtypes
    assert "the same keys" in remedy([{"a": 1}, {"b": 1}]) and "one type" in remedy([torch.zeros(2), None])
    padded = remedy([{"a": torch.zeros(2, 2)}, {"a": torch.zeros(3, 2)}], pad_collate())
    assert "fields=" in padded and '"pad"' not in padded
    assert "dtype" in remedy([{"a": [1]}, {"a": torch.zeros(2)}], pad_collate())
    ids = [{"input_ids": [1], "x": torch.zeros(1)}, {"input_ids": [1, 2], "x": torch.zeros(2)}]
    assert "pad_values=" in (texts := remedy(ids, TextCollator())) and '"pad"' not in texts
    image = torch.zeros(3, 4, 4, dtype=torch.uint8)
    pictures = remedy([(image, torch.zeros(1)), (image, torch.zeros(2))], VisionCollator())
    assert "lists=" in pictures and '"pad"' not in pictures


@pytest.mark.parametrize(
    ("wrap", "place"),
    [
        (lambda t: {"image": t}, "at ['image']"),
        (lambda t: (1, t), "at [1]"),
        (lambda t: {"a": [0, {"b": (t,)}]}, "at ['a'][1]['b'][0]"),
        (lambda t: Point(1, t), "at [1]"),
        (lambda t: {"e": Frozen(torch.zeros(1), (t,))}, "at ['e'].parts[0]"),
    ],
)
def test_the_place_is_named(wrap: Any, place: str) -> None:
    with pytest.raises(CollateError) as refused:
        stack_collate([wrap(torch.zeros(2)), wrap(torch.zeros(3))])
    assert f"{place}: sample 1" in str(refused.value)
    with pytest.raises(CollateError) as refused:
        stack_collate([wrap({"a": 1}), wrap({"b": 1})])
    assert f"{place}: sample 1" in str(refused.value)


# -- transforms without their last step

PHOTO = Image.new("RGB", (5, 4))


@pytest.mark.parametrize("samples", [[PHOTO] * 2, [(PHOTO, 1)] * 2, [{"image": PHOTO}] * 2, [("a", 1), (PHOTO, 1)]])
def test_pil_images_are_refused_with_the_remedy(samples: list[Any]) -> None:
    with pytest.raises(CollateError, match=r"is a PIL image \(RGB, 5 x 4\).*v2\.ToImage\(\) or PILToTensor\(\).*transform_input='tensor'"):
        stack_collate(samples)


@pytest.mark.parametrize("samples", [[None, None], [(None, 1), (None, 2)], [[None, 1], [None, 2]]])
def test_inputs_of_none_are_refused_with_the_remedy(samples: list[Any]) -> None:
    with pytest.raises(
        CollateError,
        match=r"is None, and so are all others of the batch: the transform .*returned nothing; end it with a return of the value",
    ):
        stack_collate(samples)


def test_none_stays_where_it_may_stand() -> None:
    x = torch.zeros(2)
    assert stack_collate([(x, None), (x, None)])[1] == [None, None]
    assert stack_collate([{"mask": None}] * 2) == {"mask": [None, None]}
    assert list_collate([PHOTO, None]) == [PHOTO, None]


# -- what the order of the samples does not decide


@pytest.mark.parametrize("numbers", [[1, np.int64(2)], [True, np.bool_(False)], [1.5, np.float32(2), 3], [1, np.uint8(2), np.int64(3)]])
def test_numbers_of_python_and_numpy_are_numbers(numbers: list[Any]) -> None:
    for samples in (numbers, numbers[::-1]):
        assert same(stack_collate(samples), stack_collate([getattr(one, "item", lambda one=one: one)() for one in samples]))
    assert same(stack_collate(numbers), default_collate([getattr(one, "item", lambda one=one: one)() for one in numbers]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, torch.zeros(2)),
        (None, np.zeros(2)),
        ("a", {"a": 1}),
        (None, (1, 2)),
        (3, torch.zeros(2)),
        ("a", [1]),
        (None, Row(torch.ones(1), "")),
    ],
)
def test_mixtures_are_refused_in_any_order(one: Any, other: Any) -> None:
    for samples in ([one, other], [other, one], [one, one, other]):
        with pytest.raises(CollateError):
            stack_collate([(torch.ones(1), sample) for sample in samples])


@pytest.mark.parametrize("collate", [stack_collate, pad_collate()])
@pytest.mark.parametrize("field", [np.longdouble(1), np.ones(3, np.longdouble), np.ones((2, 3), np.clongdouble)])
def test_long_doubles_name_their_field(collate: Any, field: Any) -> None:
    for samples in ([{"x": field}] * 2, [{"x": 1.0}, {"x": field}]):
        with pytest.raises(CollateError, match=r"at \['x'\]: sample [01] is .*long.*|at \['x'\]: .*float128|complex256"):
            collate(samples)
    with pytest.raises(CollateError, match=r"torch does not have. Cast it .* with \.astype\("):
        stack_collate([{"x": field}] * 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("collate", [stack_collate, pad_collate()])
def test_nested_tensors_are_refused_with_the_remedy(collate: Any) -> None:
    nested = torch.nested.nested_tensor([torch.arange(3), torch.arange(2)])
    for samples in ([(nested, 1)] * 2, [(torch.ones(3), 1), (nested, 1)]):
        with pytest.raises(CollateError, match=r"at \[0\].* a nested tensor"):
            collate(samples)


def test_texts_and_what_is_missing_stay_a_list() -> None:
    for values in (["a", "b"], [None, 1, None], [1, None], ["a", None], [object, "a"]):
        assert stack_collate([{"field": value} for value in values]) == {"field": values}


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


class SlottedFields(Fields):
    __slots__ = ()


def test_samples_of_a_mapping_of_one_s_own_stay_as_they_are() -> None:
    for made in (Fields, SlottedFields):
        samples = [made(x=torch.tensor([float(i)])) for i in range(2)]
        for _ in range(2):
            batch = stack_collate(samples)
            assert type(batch) is made and batch["x"].tolist() == [[0.0], [1.0]]
        assert [sample["x"].tolist() for sample in samples] == [[0.0], [1.0]]
