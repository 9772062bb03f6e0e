"""Padding collate functions: sequences of different lengths become one tensor, from which they can be got back."""

import dataclasses
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from headrace import (
    CharTokenizer,
    CollateError,
    ConfigError,
    Padded,
    TextCollator,
    VisionCollator,
    collators,
    create_dataloader,
    pad_collate,
    variable_length_collate,
)
from headrace.memory.ring import Ring
from headrace.testing.contract import same

pytestmark = pytest.mark.quick_every(3)

DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]


class Row(NamedTuple):
    tokens: Any
    label: int


@dataclasses.dataclass
class Example:
    tokens: Any
    name: str


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(index), "name": f"sentence {index}", "label": index}


# -- what comes of it


def test_a_dict_gets_mask_and_lengths() -> None:
    batch = pad_collate()([{"tokens": torch.tensor([1, 2, 3]), "label": 7}, {"tokens": torch.tensor([4]), "label": 8}])
    assert list(batch) == ["tokens", "label", "attention_mask", "lengths"]
    assert batch["tokens"].tolist() == [[1, 2, 3], [4, 0, 0]] and batch["label"].tolist() == [7, 8]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]] and batch["lengths"].tolist() == [3, 1]
    assert {batch[name].dtype for name in batch} == {torch.int64}


def test_lengths_are_those_of_the_sequence() -> None:
    samples = [{"input": [1, 2, 3], "sequence": [1] * length} for length in (2, 5)]
    batch = pad_collate()(samples)
    assert batch["lengths"].tolist() == [2, 5] and batch["attention_mask"].shape == (2, 5)
    assert batch["input_lengths"].tolist() == [3, 3] and batch["input_attention_mask"].shape == (2, 3)
    assert pad_collate()(samples[:1])["lengths"].tolist() == [2]  # of one sample the lengths don't tell


@pytest.mark.parametrize("wrap", [torch.tensor, np.array, list])
def test_tensors_arrays_and_lists(wrap: Any) -> None:
    padded = pad_collate()([wrap([1, 2]), wrap([3])])
    assert type(padded) is Padded and padded.values.tolist() == [[1, 2], [3, 0]] and padded.values.dtype == torch.int64
    assert padded.attention_mask.tolist() == [[1, 1], [1, 0]] and padded.lengths.tolist() == [2, 1]
    values = pad_collate()([wrap([1.5]), wrap([2.5, 3.5])]).values
    assert values.tolist() == [[1.5, 0], [2.5, 3.5]] and values.dtype == (torch.float32 if wrap is torch.tensor else torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rest", [(), (3,), (2, 0)])
def test_dtypes_and_further_dimensions_are_kept(dtype: torch.dtype, rest: tuple[int, ...]) -> None:
    rows = [torch.ones((length, *rest), dtype=dtype) for length in (2, 0, 3)]
    batch = pad_collate(fields="x")([{"x": row} for row in rows])
    assert batch["x"].dtype == dtype and batch["x"].shape == (3, 3, *rest) and batch["attention_mask"].shape == (3, 3)
    for number, row in enumerate(rows):
        assert same(batch["x"][number, : len(row)], row) and not batch["x"][number, len(row) :].any()


def test_arrays_of_all_kinds() -> None:
    for dtype in ("?", "u1", "u2", "u4", ">i4", "f2", ">f8", "c16"):
        values = pad_collate()([np.ones(2, dtype), np.ones(1, dtype)]).values
        assert values.numpy().dtype == np.dtype(dtype).newbyteorder("=") and values.numpy().tolist() == [[1, 1], [1, 0]]
    frozen = np.arange(6)
    frozen.flags.writeable = False
    assert pad_collate()([frozen[::-2], frozen[:1]]).values.tolist() == [[5, 3, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("samples", "dtype", "values"),
    [
        ([[1], [2.5, 3]], torch.float64, [[1, 0], [2.5, 3]]),
        ([[], [True]], torch.bool, [[False], [True]]),
        ([[], [1.5]], torch.float64, [[0], [1.5]]),
        ([[], []], torch.int64, [[], []]),
        ([[], torch.tensor([1], dtype=torch.int8)], torch.int8, [[0], [1]]),
        ([[True], [2]], torch.int64, [[1], [2]]),
        ([[np.int32(3)], [4, 5]], torch.int64, [[3, 0], [4, 5]]),
        ([[np.uint8(3)], []], torch.int64, [[3], [0]]),
        ([[np.float32(3)]], torch.float64, [[3]]),
    ],
)
def test_lists(samples: list[Any], dtype: torch.dtype, values: list[Any]) -> None:
    padded = pad_collate()(samples)
    assert padded.values.dtype == dtype and padded.values.tolist() == values


def test_structures_are_kept() -> None:
    tuples = pad_collate()([(torch.tensor([1, 2]), "a", 3), (torch.tensor([1]), "b", 4)])
    assert type(tuples) is tuple and type(tuples[0]) is Padded and tuples[1] == ["a", "b"] and tuples[2].tolist() == [3, 4]
    row = pad_collate()([Row([1], 1), Row([1, 2], 2)])
    assert type(row) is Row and row.tokens.lengths.tolist() == [1, 2] and row.label.tolist() == [1, 2]
    example = pad_collate()([Example([1], "a"), Example([1, 2], "b")])
    assert type(example) is Example and example.tokens.values.tolist() == [[1, 0], [1, 2]] and example.name == ["a", "b"]
    ordered = pad_collate()([OrderedDict(b=[1], a="x"), OrderedDict(b=[1, 2], a="y")])
    assert type(ordered) is OrderedDict and list(ordered) == ["b", "a", "attention_mask", "lengths"]


def test_nested_dicts_have_masks_of_their_own() -> None:
    samples = [{"source": {"ids": [1] * n}, "target": {"ids": [2] * (4 - n)}, "n": n} for n in (1, 3)]
    batch = pad_collate()(samples)
    assert list(batch) == ["source", "target", "n"]
    assert batch["source"]["lengths"].tolist() == [1, 3] and batch["target"]["lengths"].tolist() == [3, 1]
    assert batch["target"]["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_several_fields_of_a_dict() -> None:
    batch = pad_collate()([{"target": [1], "input_ids": [1, 2]}, {"target": [1, 2, 3], "input_ids": [1]}])
    assert batch["lengths"].tolist() == [2, 1] and batch["attention_mask"].shape == (2, 2)  # of input_ids
    assert batch["target_lengths"].tolist() == [1, 3] and batch["target_attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    batch = pad_collate()([{"b": [1], "a": [1, 2]}])
    assert batch["lengths"].tolist() == [1] and batch["a_lengths"].tolist() == [2]  # of the first


def test_a_mask_of_the_samples_stays_the_mask() -> None:
    samples = [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 0]}, {"input_ids": [8], "attention_mask": [1]}]
    batch = pad_collate(pad_value=9)(samples)
    assert list(batch) == ["input_ids", "attention_mask", "lengths"]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]] and batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    alone = pad_collate()([{"attention_mask": [1]}, {"attention_mask": [1, 1]}])
    assert alone["attention_mask"].tolist() == [[1, 0], [1, 1]] and alone["lengths"].tolist() == [1, 2]


def test_a_batch_of_one_and_samples_of_no_length() -> None:
    one = pad_collate()([torch.tensor([1, 2])])
    assert one.values.tolist() == [[1, 2]] and one.attention_mask.tolist() == [[1, 1]] and one.lengths.tolist() == [2]
    none = pad_collate(pad_to_multiple_of=4)([torch.zeros(0), torch.zeros(0)])
    assert none.values.shape == none.attention_mask.shape == (2, 0) and none.lengths.tolist() == [0, 0]
    filled = pad_collate(padding="max_length", max_length=2, pad_value=0.5)([np.zeros(0, np.float32)])
    assert filled.values.tolist() == [[0.5, 0.5]] and filled.attention_mask.tolist() == [[0, 0]]


def test_what_is_no_sequence_is_stacked() -> None:
    samples = [{"n": torch.tensor(1), "image": torch.zeros(2, 2), "f": 1.5, "name": "a", "none": None, "names": ["x"]}] * 2
    batch = pad_collate(padding="max_length", max_length=5)(samples)
    assert batch["n"].shape == (2,) and batch["image"].shape == (2, 2, 2) and batch["f"].tolist() == [1.5, 1.5]
    assert batch["name"] == ["a", "a"] and batch["none"] == [None, None] and batch["names"] == [["x", "x"]]
    assert list(batch) == list(samples[0])


def test_named_fields_only() -> None:
    samples = [{"a": [1], "b": torch.zeros(2)}, {"a": [1, 2], "b": torch.ones(2)}]
    batch = pad_collate(["a"], padding="max_length", max_length=3)(samples)
    assert batch["a"].shape == (2, 3) and batch["b"].shape == (2, 2) and "b_lengths" not in batch
    second = pad_collate(1)([(torch.zeros(2), torch.zeros(3, 4)), (torch.zeros(2), torch.zeros(1, 4))])
    assert second[0].shape == (2, 2) and second[1].values.shape == (2, 3, 4)
    assert pad_collate("tokens")([Row([1], 1), Row([1, 2], 2)]).tokens.values.shape == (2, 2)
    assert pad_collate(0)([Row([1], 1), Row([1, 2], 2)]).tokens.values.shape == (2, 2)
    assert pad_collate("tokens")([Example([1], "a"), Example([1, 2], "b")]).tokens.lengths.tolist() == [1, 2]
    nested = pad_collate("in.ids")(
        [{"in": {"ids": [[1, 2]], "box": torch.zeros(4)}}, {"in": {"ids": [[1, 2], [3, 4]], "box": torch.zeros(4)}}]
    )
    assert nested["in"]["ids"].tolist() == [[[1, 2], [0, 0]], [[1, 2], [3, 4]]] and nested["in"]["box"].shape == (2, 4)
    assert pad_collate("a.b")([{"a.b": [1]}, {"a.b": [1, 2]}])["lengths"].tolist() == [1, 2]


def test_values_by_field() -> None:
    samples = [{"ids": [1], "labels": [1], "more": [1]}, {"ids": [1, 2], "labels": [1, 2], "more": [1, 2]}]
    batch = pad_collate(pad_value={"ids": 50, "labels": -100})(samples)
    assert batch["ids"].tolist() == [[1, 50], [1, 2]] and batch["labels"][0].tolist() == [1, -100] and batch["more"][0].tolist() == [1, 0]


# -- lengths

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@settings(deadline=None)
@given(
    LENGTHS,
    st.sampled_from(["longest", "max_length"]),
    st.sampled_from([None, 1, 4, 8]),
    st.sampled_from(["right", "left"]),
    st.sampled_from(["int64", "float32", "uint8", "bool"]),
    st.integers(0, 1),
)
def test_cut_by_their_lengths_the_samples_come_back(
    lengths: list[int], padding: str, multiple: int | None, side: str, dtype: str, value: int
) -> None:
    random = np.random.default_rng(len(lengths))
    rows = [random.integers(0, 5, length).astype(dtype) for length in lengths]
    limit = 9 if padding == "max_length" else None
    padded = pad_collate(None, padding, limit, value, multiple, padding_side=side)(rows)
    length = padded.values.shape[1]
    target = 9 if limit else max(lengths)
    assert padded.lengths.tolist() == lengths and padded.attention_mask.shape == padded.values.shape
    assert target <= length < target + (multiple or 1) and length % (multiple or 1) == 0
    for row, values, mask in zip(rows, padded.values.numpy(), padded.attention_mask.numpy().astype(bool), strict=True):
        own = slice(0, len(row)) if side == "right" else slice(length - len(row), length)
        assert values.dtype == row.dtype and np.array_equal(values[own], row) and np.array_equal(values[mask], row)
        assert mask[own].all() and mask.sum() == len(row) and (values[~mask] == np.array(value, dtype)).all()


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 9), st.sampled_from(["longest", "max_length"]))
def test_truncation_cuts_the_end(lengths: list[int], limit: int, padding: str) -> None:
    padded = pad_collate(padding=padding, max_length=limit, truncation=True)([torch.arange(length) for length in lengths])
    kept = [min(length, limit) for length in lengths]
    assert padded.lengths.tolist() == kept and padded.values.shape[1] == (limit if padding == "max_length" else max(kept))
    assert all(row[:end].tolist() == list(range(end)) for row, end in zip(padded.values, kept, strict=True))


def test_a_length_is_rounded_up_beyond_max_length_too() -> None:  # as HuggingFace's tokenizers do
    assert pad_collate(padding="max_length", max_length=10, pad_to_multiple_of=8)([[1]]).values.shape == (1, 16)
    assert pad_collate(max_length=10, pad_to_multiple_of=8)([[1] * 9]).values.shape == (1, 16)


# -- what is refused


@pytest.mark.parametrize(
    ("options", "samples", "said"),
    [
        ({"max_length": 2}, [[1], [1, 2, 3]], r"sample 1 is 3 long, and max_length is 2: pass truncation=True"),
        ({"max_length": 2, "padding": "max_length"}, [{"a": [1, 2, 3]}], r"sample 0 at \['a'\] is 3 long"),
        ({}, [{"a": torch.zeros(1)}, {"a": torch.zeros(1, dtype=torch.int64)}], r"at \['a'\] is int64 \[1\], sample 0 is float32 \[1\]"),
        ({}, [np.zeros(1), np.zeros(1, "f4")], r"sample 1 is float32 \[1\], sample 0 is float64 \[1\]"),
        ({}, [torch.zeros(1), torch.zeros(1, 2)], r"sample 1 is float32 \[1, 2\].*differ in length only"),
        ({}, [torch.zeros(1), torch.tensor(1.0)], r"sample 1 is float32 \[\]"),
        ({"fields": "a"}, [{"a": torch.zeros(1, 2)}, {"a": torch.zeros(1, 3)}], r"\['a'\] is float32 \[1, 3\]"),
        ({"fields": "a"}, [{"a": torch.tensor(1)}], r"sample 0 at \['a'\] is int64 \[\].*leave it out of fields"),
        ({"fields": "a"}, [{"a": 3}], r"sample 0 at \['a'\] is 'int'.*a tensor, an array or a list of numbers"),
        ({"fields": "a"}, [{"a": [1]}, {"a": "text"}], r"sample 1 at \['a'\] is 'str'"),
        ({"fields": "a"}, [{"a": [1]}, {"a": None}], r"sample 1 at \['a'\] is 'NoneType'"),
        ({"fields": "a"}, [{"a": ["x"]}], r"sample 0 at \['a'\] is a list of something else"),
        ({"fields": "a"}, [{"a": [[1], [1, 2]]}], r"sample 0 at \['a'\] is a list of something else"),
        ({}, [{"a": [1]}, {"b": [1]}], r"sample 1 has the keys \['b'\], sample 0 has the keys \['a'\]"),
        ({}, [{"a": [1], "b": [1]}, {"a": [1]}], r"sample 1 has the keys \['a'\]"),
        ({}, [(1, [1]), (1,)], "sample 1.*2 fields"),
        ({"fields": "b"}, [{"a": [1]}, {"a": [1]}], "fields: the samples have no field 'b' of that kind; they have: 'a'"),
        ({"fields": "b"}, [{"a": [1]}, {"a": [1, 2]}], "fields: the samples have no field 'b'"),  # not: can't be stacked
        ({"fields": ["a", 2]}, [{"a": [1]}], "no field '2'"),
        ({"fields": 2}, [([1], 1)], "no field '2' of that kind; they have: the positions 0 to 1"),
        ({"fields": "x"}, [Row([1], 1)], "they have: 'tokens', 'label'"),
        ({"fields": "x"}, [Example([1], "a")], "they have: 'tokens', 'name'"),
        ({"fields": "x"}, [[1], [2]], "no field 'x'"),
        ({"pad_value": {"b": 1}}, [{"a": [1]}], "pad_value: the samples have no field 'b'"),
        ({"pad_value": 0.5}, [{"a": [1]}], r"pad_value=0.5 is no value of int64, the dtype of the samples at \['a'\]"),
        ({"pad_value": -1}, [np.zeros(1, "u1")], "pad_value=-1 is no value of uint8"),
        ({"pad_value": 256}, [np.zeros(1, "u1")], "pad_value=256"),
        ({"pad_value": float("nan")}, [[1]], "pad_value=nan is no value of int64"),
        ({"pad_value": 1e6}, [np.zeros(1, "f2")], "is no value of float16"),
        ({"pad_value": 2}, [[True]], "is no value of bool"),
        ({"pad_value": 1j}, [[1.5]], "is no value of float64"),
        ({}, [{"a": [1], "lengths": 3}], "the samples have a field 'lengths' already, where pad_collate puts the lengths of 'a'"),
        ({}, [{"x": {"a": [1], "attention_mask": 3}}], r"'attention_mask' already at \['x'\]"),
        ({}, [{"a": [1], "b": [1], "b_lengths": 3}], "'b_lengths' already"),
        ({}, [[1], [2**63]], "sample 1 holds 9223372036854775808: what is to be padded must be of int64"),
        ({"fields": "a"}, [{"a": [2**70]}], r"\['a'\] is a list of something else"),
        ({"pad_value": 10**400}, [[1]], "is no value of int64"),
        ({"pad_value": 10**400}, [[1.5]], "is no value of float64"),
        ({}, [], "needs a sample at least"),
    ],
)  # fmt: skip
def test_what_can_t_be_padded(options: dict[str, Any], samples: list[Any], said: str) -> None:
    with pytest.raises((CollateError, ConfigError), match=said) as refused:
        pad_collate(**options)(samples)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"padding": "longer"}, "padding must be"),
        ({"padding": "max_length"}, "pass max_length="),
        ({"truncation": True}, "pass max_length="),
        ({"truncation": 1, "max_length": 3}, "truncation must be"),
        ({"max_length": 0}, "max_length must be"),
        ({"max_length": True}, "max_length must be"),
        ({"max_length": 1.5}, "max_length must be"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of must be"),
        ({"padding_side": "top"}, "padding_side must be"),
        ({"pad_value": "0"}, "pad_value must be a number"),
        ({"pad_value": {"a": None}}, "pad_value must be a number"),
        ({"fields": [1.5]}, "fields must hold"),
        ({"fields": True}, "fields must hold"),
        ({"fields": [torch.zeros(2)]}, r"pad_collate\(\), with brackets"),
    ],
)
def test_arguments(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        pad_collate(**options)


def test_dtypes_that_differ_get_a_dtype() -> None:
    with pytest.raises(CollateError, match=r"Give all one dtype: .*\.to\(torch\.float64\)"):
        pad_collate()([np.zeros(1), np.zeros(1, "f4")])


# -- as they are


def test_variable_length() -> None:
    inputs, targets = variable_length_collate([(torch.arange(3), 1), (np.zeros((2, 2), "f4"), 0), ([1.5, 2], 5), ([], 7)])
    assert type(inputs) is list and [tuple(part.shape) for part in inputs] == [(3,), (2, 2), (2,), (0,)]
    assert [part.dtype for part in inputs] == [torch.int64, torch.float32, torch.float64, torch.int64] and targets.tolist() == [1, 0, 5, 7]
    assert collators.get("variable_length") is variable_length_collate
    row = variable_length_collate([Row([1], 1), Row([2, 3], 0)])
    assert type(row) is Row and row.tokens[1].tolist() == [2, 3] and row.label.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([([1], 1), [1, 2, 3]], "sample 1 is 'list': variable_length_collate needs pairs"),
        ([([1], 1), ("text", 1)], r"sample 1 at \[0\] is 'str': an input must be"),
        ([([1], [1]), ([1], [1, 2])], r"at \[1\]: sample 1 has 2, sample 0 has 1 fields. Give targets of one shape"),
        ([], "needs a sample at least"),
    ],
)
def test_no_pairs_of_variable_length(samples: list[Any], said: str) -> None:
    with pytest.raises((CollateError, ConfigError), match=said):
        variable_length_collate(samples)


def test_variable_lengths_cross_to_workers(make_loader: Any) -> None:
    samples = [(torch.arange(n), n) for n in range(4)]
    for workers in (0, 1):
        loader = make_loader(samples, batch_size=4, shuffle=False, num_workers=workers, collate_fn=variable_length_collate)
        inputs, targets = next(iter(loader))
        assert [part.tolist() for part in inputs] == [list(range(n)) for n in range(4)] and targets.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("collate", "said"),
    [
        (pad_collate(), "pad_collate()"),
        (pad_collate(["a", 1], pad_value={"a": 3}, truncation=False), "pad_collate(fields=['a', 1], pad_value={'a': 3})"),
        (TextCollator(len, max_length=8, truncation=True), "TextCollator(tokenizer=len, max_length=8, truncation=True)"),
        (TextCollator(CharTokenizer()), "TextCollator(tokenizer=<CharTokenizer>)"),
        (VisionCollator("cifar10"), "VisionCollator(statistics='cifar10')"),
        (VisionCollator(mean=np.zeros(3), std=[0.5] * 3), "VisionCollator(mean=<ndarray>, std=[0.5, 0.5, 0.5])"),
    ],
)
def test_collators_have_a_short_repr(collate: Any, said: str) -> None:
    assert repr(collate) == said and repr(pickle.loads(pickle.dumps(collate))) == said


def test_values_that_fit() -> None:
    assert pad_collate(pad_value=float("-inf"))([[1.5], []]).values[1, 0] == float("-inf")
    assert pad_collate(pad_value=2.0)([[1], []]).values.tolist() == [[1], [2]]
    assert pad_collate(pad_value=True)([[False], []]).values.tolist() == [[False], [True]]
    assert pad_collate(pad_value=1j)([np.zeros(1, "c8"), np.zeros(0, "c8")]).values.tolist() == [[0], [1j]]
    assert pad_collate(pad_value=65504)([np.zeros(0, "f2"), np.zeros(1, "f2")]).values[0, 0] == 65504


# -- on its way


def test_batch_lies_in_ring_slot_and_is_a_copy() -> None:
    rows = [torch.tensor([1, 2]), torch.tensor([3])]
    pad_collate()(rows).values.fill_(9)
    assert rows[0].tolist() == [1, 2]
    ring = Ring(1)
    with ring.arena(0) as arena:
        padded = pad_collate()(rows)
        assert all(arena.offset_of(part.data_ptr(), part.numel() * 8) is not None for part in padded)


def test_gradients_pass() -> None:
    row = torch.ones(2, requires_grad=True)
    pad_collate()([row, torch.ones(3)]).values.sum().backward()
    assert row.grad is not None and row.grad.tolist() == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_workers_give_what_the_main_process_gives(start: str, make_loader: Any) -> None:
    collate = pad_collate("input_ids", pad_to_multiple_of=4, pad_value=-1)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "collate_fn": collate}
    here = list(create_dataloader(Sentences(), num_workers=0, **options))
    there = list(make_loader(Sentences(), num_workers=1, multiprocessing_context=start, **options))
    assert len(here) == 3 and all(same(a, b) for a, b in zip(here, there, strict=True))
    assert (
        here[2]["input_ids"].shape == (2, 12)
        and here[2]["name"] == ["sentence 8", "sentence 9"]
        and here[0]["lengths"].tolist() == [0, 1, 2, 3]
    )


def test_by_name_and_pickled() -> None:
    batches = list(create_dataloader(Sentences(), batch_size=10, num_workers=0, shuffle=False, collate_fn="pad"))
    assert batches[0]["input_ids"].shape == (10, 9)
    padded = pickle.loads(pickle.dumps(collators.get("pad", padding="max_length", max_length=4)))([[1], [2, 3]])
    assert padded.values.shape == (2, 4) and pickle.loads(pickle.dumps(padded)).lengths.tolist() == [1, 2]
