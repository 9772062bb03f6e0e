"""Padding: sequences of different lengths become one tensor, from which they can be got back."""

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from headrace import CollateError, ConfigError, pad_collate
from headrace.collate import Padded


class Row(NamedTuple):
    tokens: Any
    label: int


@dataclasses.dataclass
class Example:
    tokens: Any
    name: str


def listed(batch: Any) -> dict[str, Any]:
    return {name: value.tolist() for name, value in batch.items()}


def test_a_dict_gets_mask_and_lengths() -> None:
    samples = [{"tokens": torch.tensor([1, 2, 3]), "label": 7}, {"tokens": [4], "label": 8}]
    batch = pad_collate()(samples)
    assert list(batch) == ["tokens", "label", "attention_mask", "lengths"]
    assert listed(batch) == {
        "tokens": [[1, 2, 3], [4, 0, 0]],
        "label": [7, 8],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "lengths": [3, 1],
    }
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_a_mask_of_the_samples_stays_the_mask() -> None:
    masks = [[1, 1, 0], [1]]
    ids = [[5, 6, 7], [8]]
    samples = [{"input_ids": i, "attention_mask": m} for i, m in zip(ids, masks, strict=True)]
    assert listed(pad_collate(pad_value=9)(samples)) == {
        "input_ids": [[5, 6, 7], [8, 9, 9]],
        "attention_mask": [[1, 1, 0], [1, 0, 0]],
        "lengths": [3, 1],
    }
    alone = pad_collate()([{"attention_mask": mask} for mask in masks])
    assert listed(alone) == {"attention_mask": [[1, 1, 0], [1, 0, 0]], "lengths": [3, 1]}


def test_named_fields_only() -> None:
    samples = [{"a": [1], "b": torch.zeros(2)}, {"a": [1, 2], "b": torch.ones(2)}]
    batch = pad_collate(["a"], padding="max_length", max_length=3)(samples)
    assert batch["a"].shape == (2, 3) and batch["b"].shape == (2, 2) and "b_lengths" not in batch
    pairs = [(torch.zeros(2), torch.zeros(n, 4)) for n in (3, 1)]
    second = pad_collate(1)(pairs)
    assert second[0].shape == (2, 2) and second[1].values.shape == (2, 3, 4)
    for name in ("tokens", 0):
        assert pad_collate(name)([Row([1], 1), Row([1, 2], 2)]).tokens.values.shape == (2, 2)
    boxes = [{"in": {"ids": [[1, 2]] * n, "box": torch.zeros(4)}} for n in (1, 2)]
    nested = pad_collate("in.ids")(boxes)["in"]
    assert nested["ids"].tolist() == [[[1, 2], [0, 0]], [[1, 2], [1, 2]]]
    assert nested["box"].shape == (2, 4)


def test_lists_of_numbers_get_one_dtype() -> None:
    for samples, dtype in (
        ([[1], [2.5, 3]], torch.float64),
        ([[], [True]], torch.bool),
        ([[], []], torch.int64),
        ([[True], [2]], torch.int64),
        ([[], torch.tensor([1], dtype=torch.int8)], torch.int8),
        ([[np.float32(3)]], torch.float64),
        ([[np.uint8(3)], []], torch.int64),
    ):
        assert pad_collate()(samples).values.dtype == dtype, samples


LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@given(
    LENGTHS,
    st.sampled_from(["longest", "max_length"]),
    st.sampled_from([None, *range(1, 10)]),
    st.sampled_from([None, 1, 4, 8]),
    st.sampled_from(["right", "left"]),
    st.sampled_from(["int64", "float32", "uint8", "bool"]),
    st.integers(0, 1),
)
def test_cut_by_their_lengths_the_samples_come_back(
    lengths: list[int],
    padding: str,
    limit: int | None,
    multiple: int | None,
    side: str,
    dtype: str,
    value: int,
) -> None:
    """Or their beginnings, where they are truncated."""
    random = np.random.default_rng(len(lengths))
    rows = [random.integers(0, 5, length).astype(dtype) for length in lengths]
    limit = limit or (9 if padding == "max_length" else None)
    how: dict[str, Any] = {"truncation": limit is not None, "padding_side": side}
    padded = pad_collate(None, padding, limit, value, multiple, **how)(rows)
    rows = [row[:limit] for row in rows]
    length = padded.values.shape[1]
    target = limit if limit and padding == "max_length" else max(map(len, rows))
    assert padded.lengths.tolist() == list(map(len, rows))
    assert padded.attention_mask.shape == padded.values.shape
    assert target <= length < target + (multiple or 1) and length % (multiple or 1) == 0
    masks = padded.attention_mask.numpy().astype(bool)
    for row, values, mask in zip(rows, padded.values.numpy(), masks, strict=True):
        start = 0 if side == "right" else length - len(row)
        assert np.flatnonzero(mask).tolist() == list(range(start, start + len(row)))
        assert values.dtype == row.dtype and np.array_equal(values[mask], row)
        assert (values[~mask] == np.array(value, dtype)).all()


def test_sequences_of_all_kinds_keep_their_dtype() -> None:
    for dtype in ("?", "u1", "u2", "u4", "i8", ">i4", "f2", "f4", ">f8", "c16"):
        for rest in ((), (3,), (2, 0)):
            rows = [np.ones((length, *rest), dtype) for length in (2, 0, 3)]
            batch = pad_collate(fields="x")([{"x": row} for row in rows])
            assert batch["x"].numpy().dtype == np.dtype(dtype).newbyteorder("=")
            assert batch["x"].shape == (3, 3, *rest)
            assert batch["attention_mask"].tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
            for padded, row in zip(batch["x"], rows, strict=True):
                assert padded[: len(row)].all() and not padded[len(row) :].any()
    for wrap in (torch.tensor, np.array, list):
        padded = pad_collate()([wrap([1, 2]), wrap([3])])
        assert type(padded) is Padded and padded.values.dtype == torch.int64
        assert padded.values.tolist() == [[1, 2], [3, 0]] and padded.lengths.tolist() == [2, 1]
    halves = [torch.ones(n, dtype=torch.bfloat16) for n in (1, 2)]
    assert pad_collate()(halves).values.dtype == torch.bfloat16
    frozen = np.arange(6)
    frozen.flags.writeable = False
    assert pad_collate()([frozen[::-2], frozen[:1]]).values.tolist() == [[5, 3, 1], [0, 0, 0]]
    row = torch.ones(2, requires_grad=True)
    assert pad_collate()([row, torch.ones(3)]).values.requires_grad


def test_structures_are_kept() -> None:
    tuples = pad_collate()([(torch.tensor([1, 2]), "a", 3), (torch.tensor([1]), "b", 4)])
    assert type(tuples) is tuple and type(tuples[0]) is Padded
    assert tuples[1] == ["a", "b"] and tuples[2].tolist() == [3, 4]
    row = pad_collate()([Row([1], 1), Row([1, 2], 2)])
    assert type(row) is Row and row.tokens.lengths.tolist() == row.label.tolist() == [1, 2]
    example = pad_collate()([Example([1], "a"), Example([1, 2], "b")])
    assert type(example) is Example and example.name == ["a", "b"]
    assert example.tokens.values.tolist() == [[1, 0], [1, 2]]
    samples = [
        OrderedDict(source={"ids": [1] * n}, target={"ids": [2] * (4 - n)}, n=n) for n in (1, 3)
    ]
    nested = pad_collate()(samples)
    assert type(nested) is OrderedDict and list(nested) == ["source", "target", "n"]
    assert nested["source"]["lengths"].tolist() == [1, 3]
    assert nested["target"]["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    plain = {"n": torch.tensor(1), "image": torch.zeros(2, 2), "f": 1.5, "name": "a", "none": None}
    batch = pad_collate(padding="max_length", max_length=5)([{**plain, "names": ["x"]}] * 2)
    assert list(batch) == [*plain, "names"]
    assert batch["image"].shape == (2, 2, 2) and batch["names"] == [["x", "x"]]


def test_lengths_of_several_fields() -> None:
    samples = [{"target": [1], "input_ids": [1, 2]}, {"target": [1, 2, 3], "input_ids": [1]}]
    batch = pad_collate()(samples)
    # of input_ids
    assert batch["lengths"].tolist() == [2, 1] and batch["attention_mask"].shape == (2, 2)
    assert batch["target_lengths"].tolist() == [1, 3]
    assert batch["target_attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    samples = [{"input": [1, 2, 3], "sequence": [1] * length} for length in (2, 5)]
    batch = pad_collate()(samples)
    assert batch["lengths"].tolist() == [2, 5] and batch["input_lengths"].tolist() == [3, 3]
    # of one sample the lengths don't tell
    assert pad_collate()(samples[:1])["lengths"].tolist() == [2]
    assert pad_collate()([{"b": [1], "a": [1, 2]}])["lengths"].tolist() == [1]  # of the first


def test_samples_of_no_length() -> None:
    none = pad_collate(pad_to_multiple_of=4)([torch.zeros(0), torch.zeros(0)])
    assert none.values.shape == none.attention_mask.shape == (2, 0)
    assert none.lengths.tolist() == [0, 0]
    collate = pad_collate(padding="max_length", max_length=2, pad_value=0.5)
    filled = collate([np.zeros(0, np.float32)])
    assert filled.values.tolist() == [[0.5, 0.5]] and filled.attention_mask.tolist() == [[0, 0]]
    # rounded up beyond max_length, as HuggingFace's tokenizers do
    for padding in ("max_length", "longest"):
        collate = pad_collate(None, padding, 10, pad_to_multiple_of=8)
        assert collate([[1] * 9]).values.shape == (1, 16)


def test_values_of_the_padding() -> None:
    samples = [{"ids": row, "labels": row, "more": row} for row in ([1], [1, 2])]
    batch = pad_collate(pad_value={"ids": 50, "labels": -100})(samples)
    assert [batch[name][0].tolist() for name in samples[0]] == [[1, 50], [1, -100], [1, 0]]
    values: dict[str, Any] = {"f8": float("-inf"), "i8": 2.0, "?": True, "c8": 1j, "f2": 65504}
    for dtype, value in values.items():
        rows = [np.zeros(1, dtype), np.zeros(0, dtype)]
        assert pad_collate(pad_value=value)(rows).values[1, 0] == value


REFUSED: list[tuple[dict[str, Any], list[Any], str]] = [
    ({"max_length": 2}, [[1], [1, 2, 3]], "sample 1 has length 3"),
    ({}, [{"a": torch.zeros(1)}, {"a": [1]}], "at ['a']: sample 1 is int64 [1], sample 0"),
    ({}, [np.zeros(1), np.zeros(1, "f4")], ".to(torch.float64)"),
    ({"fields": "a"}, [{"a": torch.tensor(1)}], "sample 0 at ['a'] is int64 []"),
    ({"fields": "a"}, [{"a": [[1], [1, 2]]}], "sample 0 at ['a']"),
    ({}, [{"a": [1], "b": [1]}, {"a": [1]}], "sample 1 has the fields 'a', in a dict"),
    ({"fields": "b"}, [{"a": [1]}, {"a": [1, 2]}], "'b'"),
    ({"fields": 2}, [([1], 1)], "'0', '1'"),
    ({"fields": "a"}, [{"a": [1]}, {"a": None}], "sample 1 at ['a'] is 'NoneType'"),
    ({"pad_value": {"b": 1}}, [{"a": [1]}], "'b'"),
    ({"pad_value": 0.5}, [{"a": [1]}], "pad_value=0.5 does not fit int64"),
    ({"pad_value": 1e6}, [np.zeros(1, "f2")], "float16"),
    ({}, [{"x": {"a": [1], "attention_mask": 3}}], "'attention_mask' at ['x']"),
    ({}, [[1], [2**63]], "sample 1 is 'list'"),
    ({}, [], ""),
]


def test_what_can_not_be_padded() -> None:
    for options, samples, named in REFUSED:
        with pytest.raises((CollateError, ConfigError)) as refused:
            pad_collate(**options)(samples)
        assert named in str(refused.value) and "\n" not in str(refused.value)


BAD_OPTIONS: list[dict[str, Any]] = [
    {"padding": "longer"},
    {"truncation": 1, "max_length": 3},
    {"max_length": 0},
    {"max_length": None, "padding": "max_length"},
    {"max_length": None, "truncation": True},
    {"pad_to_multiple_of": 0},
    {"padding_side": "top"},
    {"pad_value": "0"},
    {"pad_value": {"a": None}},
    {"fields": [1.5]},
]


def test_bad_arguments() -> None:
    for options in BAD_OPTIONS:
        with pytest.raises(ConfigError, match=next(iter(options))):
            pad_collate(**options)
