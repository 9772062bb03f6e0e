"""Collating texts and tokens into what a language model is trained on."""

import dataclasses
import pickle
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from headrace import CollateError, ConfigError, TextCollator, collators, create_dataloader, document_mask
from headrace.memory.ring import Ring
from headrace.testing.contract import same
from tests.collate.tokenizers import CLS, IDS, MASK, PAD, SEP, TEXTS, WORDS, HuggingFace, SentencePiece, Tiktoken, Tokenizers, encode

pytestmark = pytest.mark.quick_every(2)


class Texts(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": " ".join(WORDS[5 + (index + k) % 6] for k in range(index % 7 + 3)), "number": index}


def masked(**options: Any) -> TextCollator:
    return TextCollator(labels="masked", mask_token_id=MASK, vocab_size=1000, special_token_ids=[CLS, SEP, MASK], **options)


# -- what comes of it


def test_causal() -> None:
    batch = TextCollator()([{"input_ids": [5, 6, 7], "id": "a"}, {"input_ids": [0], "id": "b"}])
    assert list(batch) == ["input_ids", "id", "attention_mask", "labels"]
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 0, 0]] and batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[5, 6, 7], [0, -100, -100]]  # a token of the padding's id has a label
    assert all(batch[name].dtype == torch.int64 for name in ("input_ids", "attention_mask", "labels")) and batch["id"] == ["a", "b"]


@pytest.mark.parametrize(
    "wrap", [list, np.array, torch.tensor, lambda ids: np.array(ids, "u2"), lambda ids: torch.tensor(ids, dtype=torch.int32), UserDict]
)
def test_samples_of_all_kinds(wrap: Any) -> None:
    samples = [UserDict(input_ids=[1, 2]), UserDict(input_ids=[3])] if wrap is UserDict else [wrap([1, 2]), wrap([3])]
    batch = TextCollator(pad_token_id=9)(samples)
    assert type(batch) is dict and batch["input_ids"].dtype == torch.int64
    assert batch["input_ids"].tolist() == [[1, 2], [3, 9]] and batch["labels"].tolist() == [[1, 2], [3, -100]]


@pytest.mark.parametrize("tokenizer", [encode, HuggingFace(), Tokenizers(), Tokenizers(pads=True), Tiktoken(), SentencePiece()])
def test_texts_are_tokenised(tokenizer: Any) -> None:
    collate = TextCollator(tokenizer, padding_side="right", pad_token_id=PAD)
    batch = collate([{"text": text, "n": n} for n, text in enumerate(TEXTS)])
    added = [CLS] if isinstance(tokenizer, (HuggingFace, Tokenizers)) else []
    lengths = [4 + 2 * len(added), 2 + 2 * len(added), 2 * len(added)]
    assert batch["attention_mask"].sum(1).tolist() == lengths and batch["input_ids"].shape == (3, lengths[0])
    assert batch["input_ids"][0].tolist() == [*added, *encode(TEXTS[0]), *([SEP] if added else [])]
    assert "text" not in batch and "special_tokens_mask" not in batch and batch["n"].tolist() == [0, 1, 2]
    assert ("token_type_ids" in batch) == isinstance(tokenizer, HuggingFace)
    plain = collate(TEXTS)
    assert same(plain["input_ids"], batch["input_ids"]) and same(plain["labels"], batch["labels"])


def test_targets() -> None:
    batch = TextCollator(encode)([("the mill", 1), ("river", 0)])
    assert batch["labels"].tolist() == [1, 0] and batch["input_ids"].shape == (2, 2)
    batch = TextCollator()([([1, 2], [3, 4]), ([5], [6])])  # one a token
    assert batch["labels"].tolist() == [[3, 4], [6, -100]]
    batch = TextCollator(encode)([({"text": "the mill", "n": 1}, None)])  # no target
    assert batch["labels"].tolist() == batch["input_ids"].tolist() and batch["n"].tolist() == [1]
    batch = TextCollator()([{"input_ids": [1], "labels": torch.tensor([0.5, 1])}, {"input_ids": [1, 2], "labels": torch.zeros(2)}])
    assert batch["labels"].tolist() == [[0.5, 1], [0, 0]]
    batch = TextCollator()([{"input_ids": [1], "labels": [-100, 3, 4]}, {"input_ids": [1, 2], "labels": [5]}])  # of a decoder
    assert batch["labels"].tolist() == [[-100, 3, 4], [5, -100, -100]] and batch["input_ids"].shape == (2, 2)
    assert TextCollator()([{"input_ids": [1], "labels": "good"}])["labels"] == ["good"]


def test_a_class_label_becomes_labels() -> None:
    samples = [{"text": "the mill", "label": 1, "n": 7}, {"text": "river", "label": 0, "n": 8}]
    for labels in ({}, {"labels": None}):
        batch = TextCollator(encode, **labels)(samples)
        assert batch["labels"].tolist() == [1, 0] and "label" not in batch and batch["n"].tolist() == [7, 8]
    assert TextCollator(encode)([{"text": "the mill", "label": torch.tensor([0.0, 1.0])}])["labels"].tolist() == [
        [0.0, 1.0]
    ]  # several classes
    assert samples[0]["label"] == 1, "the samples stay as they were"
    assert collators.get("text")([{"input_ids": [1, 2], "label": 1}, {"input_ids": [3], "label": 0}])["labels"].tolist() == [1, 0]


def test_a_language_model_keeps_the_class_under_label() -> None:
    samples = [{"text": "the mill", "label": 1}, {"text": "river", "label": 0}]
    batch = TextCollator(encode, labels="causal")(samples)
    assert batch["label"].tolist() == [1, 0] and batch["labels"][:, 0].tolist() == batch["input_ids"][:, 0].tolist()
    batch = masked(tokenizer=encode)(samples)
    assert batch["label"].tolist() == [1, 0] and batch["labels"].shape == batch["input_ids"].shape


@pytest.mark.parametrize(
    ("options", "sample", "said"),
    [
        ({}, {"text": "river", "label": 1, "labels": 2}, "has 'label' and 'labels'.* leave one out .*labels='causal'"),
        ({"labels": None}, ({"text": "river", "label": 1}, 2), "has 'label' and 'labels'"),
        ({"labels": "causal"}, {"text": "river", "labels": 2}, "a class at 'labels'.* leave labels= out .*'label'"),
        ({"labels": "causal"}, ("river", 2), "a class at 'labels', and labels='causal' makes"),
    ],
)
def test_labels_of_two_meanings_are_refused(options: dict[str, Any], sample: Any, said: str) -> None:
    with pytest.raises(CollateError, match=said):
        TextCollator(encode, **options)([sample])


def test_no_labels() -> None:
    assert list(TextCollator(encode, labels=None)(["river"])) == ["input_ids", "attention_mask"]
    assert TextCollator(labels=None)([([1], 3)])["labels"].tolist() == [3]


def test_fields_with_one_number_a_token() -> None:
    samples = [{"input_ids": [1, 2, 3], "token_type_ids": [0, 1, 1], "attention_mask": [True, True, False], "parts": [7, 8, 9]}]
    samples.append({"input_ids": [4], "token_type_ids": [1], "attention_mask": [True], "parts": [1]})
    batch = TextCollator(pad_values={"parts": -1, "token_type_ids": 3})(samples)
    assert batch["token_type_ids"].tolist() == [[0, 1, 1], [1, 3, 3]] and batch["parts"].tolist() == [[7, 8, 9], [1, -1, -1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]] and batch["attention_mask"].dtype == torch.int64
    assert batch["labels"].tolist() == [[1, 2, -100], [4, -100, -100]]  # the sample's own padding has no label either


def test_ids_and_texts_in_one_batch() -> None:
    for collate in (TextCollator(Tokenizers()), TextCollator(Tokenizers(), labels="masked")):
        batch = collate([{"text": "river"}, {"input_ids": [5, 6]}])
        assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_the_tokenizer_says_where_and_with_what_to_pad() -> None:
    batch = TextCollator(Tokenizers(pads=True))([[5, 6], [7]])
    assert batch["input_ids"].tolist() == [[5, 6], [77, 7]] and batch["labels"].tolist() == [[5, 6], [-100, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1], [0, 1]]
    batch = TextCollator(Tokenizers(pads=True), padding_side="right", pad_token_id=3)([[5, 6], [7]])
    assert batch["input_ids"].tolist() == [[5, 6], [7, 3]]


def test_samples_of_no_length_and_batches_of_one() -> None:
    for collate in (TextCollator(encode), masked(tokenizer=encode)):
        assert all(batch.shape == (1, 0) and batch.dtype == torch.int64 for batch in collate([""]).values())
        batch = collate(["", "the mill"])
        assert batch["attention_mask"].tolist() == [[0, 0], [1, 1]] and batch["labels"][0].tolist() == [-100, -100]
        assert collate([torch.zeros(0, dtype=torch.int64)])["input_ids"].shape == (1, 0)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 50), max_size=9), min_size=1, max_size=5),
    st.sampled_from(["right", "left"]),
    st.sampled_from([None, 4]),
    st.sampled_from(["longest", "max_length"]),
)
def test_the_ids_come_back_by_their_mask(ids: list[list[int]], side: str, multiple: int | None, padding: str) -> None:
    batch = TextCollator(padding=padding, max_length=12, pad_to_multiple_of=multiple, padding_side=side, pad_token_id=7)(ids)
    length = 12 if padding == "max_length" else -(-max(map(len, ids)) // (multiple or 1)) * (multiple or 1)
    assert batch["input_ids"].shape == batch["labels"].shape == (len(ids), length)
    counts = batch["attention_mask"] == 1
    assert [row[mask].tolist() for row, mask in zip(batch["input_ids"], counts, strict=True)] == ids
    assert torch.equal(batch["labels"], batch["input_ids"].where(counts, -100)) and bool((batch["input_ids"][~counts] == 7).all())


def test_truncation() -> None:
    batch = TextCollator(HuggingFace(), max_length=4, truncation=True)(TEXTS)
    assert batch["input_ids"][0].tolist() == [CLS, IDS["the"], IDS["mill"], SEP] and batch["input_ids"].shape == (3, 4)
    cut = TextCollator(max_length=2, truncation=True)([{"input_ids": [1, 2, 3], "token_type_ids": [4, 5, 6], "labels": [7, 8, 9]}])
    assert [cut[name].tolist() for name in ("input_ids", "token_type_ids", "labels")] == [[[1, 2]], [[4, 5]], [[7, 8]]]


# -- masked


def test_eighty_ten_ten() -> None:
    torch.manual_seed(5)
    ids = torch.arange(100_000) % 900 + 100
    ids[::10] = CLS
    batch = masked()([ids.reshape(10, -1)[n] for n in range(10)])
    before, after, labels = ids.reshape(10, -1), batch["input_ids"], batch["labels"]
    chosen, special = labels != -100, before == CLS
    assert not (chosen & special).any() and torch.equal(after[~chosen], before[~chosen]) and torch.equal(labels[chosen], before[chosen])
    assert chosen[~special].float().mean().item() == pytest.approx(0.15, abs=0.005)
    became, was = after[chosen], before[chosen]
    assert (became == MASK).float().mean().item() == pytest.approx(0.8, abs=0.015)
    assert (became == was).float().mean().item() == pytest.approx(0.1, abs=0.015)
    words = became[(became != MASK) & (became != was)]
    assert len(words) / len(became) == pytest.approx(0.1, abs=0.015)
    assert words.min() < 50 and words.max() > 950 and len(words.unique()) > 500  # of the whole vocabulary


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 20), max_size=12), min_size=1, max_size=4), st.integers(0, 2**40), st.sampled_from(["right", "left"])
)
def test_the_seed_decides_and_labels_are_what_was(ids: list[list[int]], seed: int, side: str) -> None:
    collate = masked(mlm_probability=0.5, padding_side=side)
    torch.manual_seed(seed)
    batch = collate(ids)
    plain = TextCollator(padding_side=side)(ids)
    chosen = batch["labels"] != -100
    assert torch.equal(batch["attention_mask"], plain["attention_mask"]) and not (chosen & (plain["attention_mask"] == 0)).any()
    assert not (chosen & torch.isin(plain["input_ids"], torch.tensor([CLS, SEP, MASK]))).any()
    assert torch.equal(batch["input_ids"].where(~chosen, batch["labels"]), plain["input_ids"])
    torch.manual_seed(seed)
    assert same(collate(ids), batch)


def test_every_token_may_be_chosen() -> None:
    batch = masked(mlm_probability=1)([[10] * 50, [CLS, 11, SEP]])
    assert (batch["labels"][0] == 10).all() and batch["labels"][1].tolist() == [-100, 11, -100, *[-100] * 47]


@pytest.mark.parametrize("tokenizer", [HuggingFace(), Tokenizers()])
def test_masked_texts(tokenizer: Any) -> None:
    batch = TextCollator(tokenizer, labels="masked", mlm_probability=1)(TEXTS)
    assert batch["labels"][0].tolist() == [-100, *encode(TEXTS[0]), -100] and batch["labels"][2].tolist() == [-100] * 6
    assert int(batch["input_ids"].max()) < len(WORDS) and "special_tokens_mask" not in batch


def test_a_mask_of_special_tokens_counts() -> None:
    batch = masked(mlm_probability=1)([{"input_ids": [10, 11, 12], "special_tokens_mask": [0, 1, 0]}, {"input_ids": [13]}])
    assert batch["labels"].tolist() == [[10, -100, 12], [13, -100, -100]] and "special_tokens_mask" not in batch
    padded = masked(mlm_probability=1)([{"input_ids": [10, 0], "attention_mask": [1, 0]}])
    assert padded["labels"].tolist() == [[10, -100]]


def test_samples_stay_as_they_were() -> None:
    ids = torch.full((20,), 10)
    masked(mlm_probability=1)([ids])
    record = {"text": "river", "n": 1}
    TextCollator(encode)([record])
    assert (ids == 10).all() and record == {"text": "river", "n": 1}


@pytest.mark.slow
def test_the_loader_seeds_it(make_loader: Any) -> None:
    collate = TextCollator(HuggingFace(), labels="masked", mlm_probability=0.5)

    def epochs(loader: Any) -> list[Any]:
        return [batch for epoch in range(2) for batch in (loader.set_epoch(epoch), *loader) if batch is not None]

    options: dict[str, Any] = {"batch_size": 8, "seed": 3, "collate_fn": collate}
    here = epochs(create_dataloader(Texts(), num_workers=0, **options))
    assert len(here) == 8 and not same(here[0]["labels"], here[1]["labels"])
    for start, workers in (("spawn", 1), ("forkserver", 2)):
        there = epochs(make_loader(Texts(), num_workers=workers, multiprocessing_context=start, **options))
        assert len(there) == 8 and all(same(a, b) for a, b in zip(here, there, strict=True))
    other = epochs(create_dataloader(Texts(), num_workers=0, **{**options, "seed": 4}))
    assert not all(same(a["labels"], b["labels"]) for a, b in zip(here, other, strict=True))


# -- what is refused


@pytest.mark.parametrize(
    ("collate", "samples", "said"),
    [
        (TextCollator(), ["a text"], r"sample 0 is a text, and there is no tokenizer: pass TextCollator\(tokenizer=...\)"),
        (TextCollator(), [{"input_ids": [1]}, {"text": "a"}], "sample 1 is a text, and there is no tokenizer"),
        (TextCollator(encode), [{"body": "a"}], "sample 0 has neither 'input_ids' nor a text at 'text'; it has: 'body'"),
        (TextCollator(encode), [{}], "it has: nothing"),
        (TextCollator(encode, text_field="body"), [{"body": 3}], "nor a text at 'body'"),
        (TextCollator(encode), ["a", 5], "sample 1 is 'int': TextCollator takes texts"),
        (TextCollator(), [([1], 2, 3)], "sample 0 is 'tuple'"),
        (TextCollator(), [torch.zeros(1, 4, dtype=torch.int64)], r"is int64 \[1, 4\]: it must be a sequence of integers \(use \[0\]"),
        (TextCollator(), [torch.zeros(4)], r"\['input_ids'\] is float32 \[4\]: it must be a sequence of integers"),
        (TextCollator(), [[1], [1.5]], "sample 1 at .*'list'"),
        (TextCollator(), [[True]], "sequence of integers"),
        (TextCollator(), [[2**63]], "sequence of integers"),
        (TextCollator(), [{"input_ids": "text"}], "'str': it must be a sequence of integers"),
        (TextCollator(), [{"input_ids": None}], "'NoneType': it must be a sequence of integers"),
        (TextCollator(), [{"input_ids": [1, 2], "token_type_ids": [0]}], r"sample 0 has 2 ids, and 1 numbers at \['token_type_ids'\]"),
        (TextCollator(), [{"input_ids": [1], "attention_mask": 1}], r"has 1 ids, and a 'int' at \['attention_mask'\]"),
        (TextCollator(pad_values={"parts": 0}), [{"input_ids": [1], "parts": [1, 2]}], "2 numbers at"),
        (TextCollator(pad_values={"parts": 0.5}), [{"input_ids": [1], "parts": [1]}], "pad_value=0.5 is no value of int64"),
        (TextCollator(), [{"input_ids": [1], "n": 1}, {"input_ids": [1]}], r"sample 1 has the keys \['attention_mask', 'input_ids'\]"),
        (TextCollator(max_length=2), [[1], [1, 2, 3]], r"sample 1 at \['input_ids'\] is 3 long, and max_length is 2: pass truncation=True"),
        (TextCollator(encode, max_length=2), ["the mill wheel"], "is 3 long, and max_length is 2"),
        (masked(), [([1], [2])], "sample 0 has labels, and labels='masked' makes its own"),
        (TextCollator(lambda text: "text"), ["a"], "no list of ids"),
        (TextCollator(), [], "needs a sample at least"),
    ],
)
def test_what_can_t_be_collated(collate: TextCollator, samples: list[Any], said: str) -> None:
    with pytest.raises((CollateError, ConfigError), match=said) as refused:
        collate(samples)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"labels": "mlm"}, "labels must be"),
        ({"labels": True}, "labels must be"),
        ({"labels": "masked"}, "needs mask_token_id, and there is no tokenizer: pass a tokenizer with a mask token, or mask_token_id="),
        ({"labels": "masked", "mask_token_id": 4}, "needs vocab_size, and there is no tokenizer"),
        ({"labels": "masked", "tokenizer": Tiktoken()}, "needs mask_token_id, and the Tiktoken has none"),
        ({"mlm_probability": 0}, "mlm_probability must be"),
        ({"mlm_probability": 15}, "mlm_probability must be"),
        ({"mlm_probability": True}, "mlm_probability must be"),
        ({"tokenizer": "bert-base-uncased"}, "tokenizer is a str"),
        ({"tokenizer": [{"text": "a"}]}, "tokenizer is a list"),  # the class itself as collate_fn
        ({"pad_token_id": -1}, "pad_token_id must be"),
        ({"pad_token_id": "[PAD]"}, "pad_token_id must be"),
        ({"vocab_size": True}, "vocab_size must be"),
        ({"vocab_size": 0}, "vocab_size must be an integer of at least 1"),
        ({"special_token_ids": ["[CLS]"]}, "special_token_ids must hold integers"),
        ({"special_token_ids": [1.5]}, "special_token_ids must hold integers"),
        ({"pad_values": {"parts": "x"}}, "pad_values must be a mapping"),
        ({"pad_values": ["parts"]}, "pad_values must be a mapping"),
        ({"padding": "yes"}, "padding must be"),
        ({"truncation": True}, "pass max_length="),
        ({"padding_side": "both"}, "padding_side must be"),
    ],
)
def test_arguments(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TextCollator(**options)


# -- on its way


def test_it_lies_in_the_ring_slot_where_there_is_one() -> None:
    ring = Ring(1)
    with ring.arena(0) as arena:
        for collate in (TextCollator(), masked()):
            batch = collate([[1, 2], [3]])
            assert all(arena.offset_of(part.data_ptr(), part.numel() * 8) is not None for part in batch.values())


def test_by_name_by_modality_and_pickled() -> None:
    batch = next(iter(create_dataloader([[1, 2], [3]], batch_size=2, shuffle=False, num_workers=0, collate_fn="text")))
    assert batch["labels"].tolist() == [[1, 2], [3, -100]]
    collate = pickle.loads(pickle.dumps(collators.get("text", tokenizer=HuggingFace(), padding="max_length", max_length=8)))
    assert collate(["river"])["input_ids"].tolist() == [[CLS, IDS["river"], SEP, *[PAD] * 5]]


def test_dataclasses_are_no_records() -> None:
    @dataclasses.dataclass
    class Sample:
        input_ids: list[int]

    with pytest.raises(CollateError, match="sample 0 is 'Sample'"):
        TextCollator()([Sample([1])])


# --- masks of packed blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_document_mask_is_what_two_loops_say(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 3], [0, 0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6]], dtype=dtype)
    mask = document_mask(ids)
    assert mask.shape == (3, 1, 7, 7) and mask.dtype == torch.bool
    for block in range(3):
        for i in range(7):
            for j in range(7):
                assert mask[block, 0, i, j] == (ids[block, i] == ids[block, j] and j <= i)


def test_document_mask_isolates_documents() -> None:
    query, key, value = torch.randn(3, 1, 2, 6, 4, generator=torch.Generator().manual_seed(0)).unbind()
    attend = torch.nn.functional.scaled_dot_product_attention
    found = attend(query, key, value, attn_mask=document_mask(torch.tensor([[0, 0, 1, 1, 1, 1]])))
    for part in (slice(0, 2), slice(2, 6)):
        alone = attend(query[:, :, part], key[:, :, part], value[:, :, part], is_causal=True)
        assert torch.allclose(found[:, :, part], alone, atol=1e-6)


@pytest.mark.parametrize("ids", [torch.zeros(4, dtype=torch.int64), torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.bool), [[0, 1]]])
def test_document_mask_of_something_else(ids: Any) -> None:
    with pytest.raises(ConfigError, match=r"document_ids is .*: it must be a tensor of integers \[batch, length\]"):
        document_mask(ids)
