"""Chats: which tokens are labels, and an error wherever that can't be told."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import (
    CharTokenizer,
    ConfigError,
    MemoryEfficientDataset,
    SampleError,
    TextCollator,
    TextDataset,
    create_dataloader,
    open_dataset,
    pack,
    verify,
)
from headrace.testing.contract import same
from tests.datasets.text.chat_tokenizer import CALLS, END, MARKED, UNMARKED, chat_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")

SYSTEM, USER, ASSISTANT = (
    {"role": role, "content": f"{role} says"} for role in ("system", "user", "assistant")
)


def answer(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


CHAT = [SYSTEM, USER, answer("one"), USER, answer("\n two ")]
LEARNED = "one<|im_end|>\n two <|im_end|>"


def write(
    folder: Path, *chats: Any, name: str = "a.jsonl", field: str = "messages", **fields: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        chat if isinstance(chat, str) else json.dumps({field: chat, **fields}) for chat in chats
    ]
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


def opened(path: Any, template: str = MARKED, **options: Any) -> TextDataset:
    tokenizer = options.pop("tokenizer", None) or chat_tokenizer(template)
    return TextDataset(path, tokenizer=tokenizer, unit="chat", **options)


def learned(sample: dict[str, torch.Tensor]) -> str:
    """The text whose tokens are labels; they stand where their ids do."""
    ids, labels = sample["input_ids"], sample["labels"]
    assert ids.dtype == labels.dtype == torch.int64
    assert ids.shape == labels.shape
    assert torch.equal(ids[labels != -100], labels[labels != -100])
    return str(chat_tokenizer().decode(labels[labels != -100]))


def failure(path: Path, template: str = MARKED, **options: Any) -> str:
    with pytest.raises(SampleError) as caught:
        opened(path, template, **options)[0]
    return str(caught.value)


def loader_of(dataset: Any, batch_size: int, **options: Any) -> Any:
    return create_dataloader(
        dataset, batch_size=batch_size, **{"num_workers": 0, "shuffle": False, **options}
    )


class TestLabels:
    def test_answers_alone_are_labels(self, tmp_path: Path) -> None:
        dataset, tokenizer = opened(write(tmp_path, CHAT)), chat_tokenizer()
        assert tokenizer.decode(dataset[0]["input_ids"]) == dataset.text_of(0)
        assert dataset.text_of(0) == tokenizer.apply_chat_template(CHAT, tokenize=False)
        assert learned(dataset[0]) == LEARNED
        assert dataset[0]["labels"][-2:].tolist() == [END, -100]  # then a newline
        assert dataset.targets is None

    def test_weight_zero_is_not_learned(self, tmp_path: Path) -> None:
        chat = [USER, answer("one", weight=0), USER, answer("two", weight=1)]
        assert learned(opened(write(tmp_path, chat))[0]) == "two<|im_end|>"
        last = MARKED.replace("message.role == 'assistant'", "loop.last")
        assert learned(opened(write(tmp_path, CHAT), last)[0]) == "\n two <|im_end|>"
        assert "1 ranges of tokens for 2" in failure(write(tmp_path, chat), last)

    def test_tools_and_options_go_to_the_template(self, tmp_path: Path) -> None:
        template = "{{ tools[0].name }} {{ mood }}|" + MARKED
        for tools in ([{"name": "saw"}], '[{"name": "saw"}]'):
            path = write(tmp_path, CHAT, tools=tools, chat_template_kwargs={"mood": "calm"})
            assert opened(path, template).text_of(0).startswith("saw calm|")
            assert learned(opened(path, template)[0]) == LEARNED
        assert "'tools'" in failure(write(tmp_path, CHAT, tools={"name": "saw"}))
        path = write(tmp_path, CHAT, chat_template_kwargs={"return_dict": True})
        assert "multiple values for keyword argument 'return_dict'" in failure(path)

    def test_a_template_instead_of_the_tokenizers(self, tmp_path: Path) -> None:
        path = write(tmp_path, CHAT)
        for own in (None, UNMARKED):
            dataset = TextDataset(path, tokenizer=chat_tokenizer(own), chat_template=MARKED)
            assert same(dataset[0], opened(path, MARKED)[0])
            assert "chat_template=" in repr(dataset)

    def test_a_template_by_its_name(self, tmp_path: Path) -> None:
        path = write(tmp_path, CHAT)
        tokenizer = chat_tokenizer({"default": UNMARKED, "marked": MARKED})
        dataset = TextDataset(path, tokenizer=tokenizer, chat_template="marked")
        assert same(dataset[0], opened(path)[0])
        with pytest.raises(ConfigError, match="no default"):
            opened(path, tokenizer=chat_tokenizer({"marked": MARKED}))


class TestMessages:
    def test_sharegpt(self, tmp_path: Path) -> None:
        chat = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
        dataset = opened(write(tmp_path, chat, field="conversations", system="be kind"))
        assert learned(dataset[0]) == "yes<|im_end|>"
        assert dataset.text_of(0).startswith("<|im_start|>system\nbe kind<|im_end|>")
        path = write(tmp_path, [{"from": "alien", "value": "hi"}], field="conversations")
        assert "'alien'" in failure(path)

    def test_a_system_field_comes_first(self, tmp_path: Path) -> None:
        """Beside messages of either form; where these begin with one, it must be the same."""
        own = {"role": "system", "content": "be kind\n"}
        for field, chat in (
            ("messages", CHAT[1:]),
            ("conversations", CHAT[1:]),
            ("messages", [own, *CHAT[1:]]),
        ):
            dataset = opened(write(tmp_path, chat, field=field, system="be kind"))
            assert dataset.text_of(0).startswith("<|im_start|>system\nbe kind")
            assert dataset.text_of(0).count("be kind") == 1
        blank, null = write(tmp_path, CHAT, system=" "), write(tmp_path / "b", CHAT, system=None)
        assert same(opened(blank)[0], opened(null)[0])
        assert "differs from its first" in failure(write(tmp_path, CHAT, system="no"))
        assert "['no']" in failure(write(tmp_path, CHAT[1:], system=["no"]))
        path = write(tmp_path, CHAT[1:], system=3)
        made = opened(path, text_field=lambda record: record["messages"])
        assert "system" not in made.text_of(0)

    def test_a_null_field_holds_no_chat(self, tmp_path: Path) -> None:
        """As where records of both forms were joined."""
        path = write(tmp_path, json.dumps({"messages": None, "conversations": CHAT}), CHAT)
        assert TextDataset(path, tokenizer=chat_tokenizer()).document_unit == "chat"
        assert same(opened(path)[0], opened(path)[1])

    def test_a_field_callable_or_cell_of_messages(self, tmp_path: Path) -> None:
        path = write(tmp_path, CHAT, field="dialog")
        assert learned(opened(path, text_field="dialog")[0]) == LEARNED
        (tmp_path / "b.json").write_text(json.dumps([{"q": "why?", "a": "so"}]))

        def messages(record: Any) -> Any:
            return [{"role": "user", "content": record["q"]}, answer(record["a"])]

        assert learned(opened(tmp_path / "b.json", text_field=messages)[0]) == "so<|im_end|>"
        assert "record 1: text_field raised KeyError: 'q'" in failure(path, text_field=messages)
        cell = json.dumps(CHAT).replace('"', '""')
        (tmp_path / "a.csv").write_text(f'id,messages\n1,"{cell}"\n')
        assert learned(opened(tmp_path / "a.csv")[0]) == LEARNED

    def test_tool_calls_instead_of_a_content(self, tmp_path: Path) -> None:
        call = answer(None, tool_calls=["saw"])
        path = write(tmp_path, [USER, call, {"role": "tool", "content": "sawn"}, answer("done")])
        assert learned(opened(path, CALLS)[0]) == "['saw']<|im_end|>done<|im_end|>"
        assert "can't render" in failure(path)

    def test_what_is_no_chat_is_named(self, tmp_path: Path) -> None:
        bad: list[tuple[Any, str]] = [
            ([SYSTEM, USER], "system, user"),
            ([USER, answer("x", weight=0)], "with a weight"),
            ([USER, answer("x", weight=2)], "message 2 of 2 has the weight 2"),
            ([], "[]"),
            ("hello", "not JSON"),
            ([{"from": ["human"], "value": "x"}, ASSISTANT], "message 1 of 2 is from ['human']"),
            ([USER, answer(" ")], "message 2 of 2 (assistant) has empty content"),
            ([{"role": "user"}, ASSISTANT], "message 1 of 2 (user) has content that is not"),
            ([{"role": "user", "content": 3}, ASSISTANT], "message 1 of 2 (user)"),
            ([{"content": "x"}, ASSISTANT], "message 1 of 2 is {'content': 'x'}"),
            (["x"], "message 1 of 1 is 'x'"),
            ([{"role": 3, "content": "x"}, ASSISTANT], "message 1 of 2 has the role 3"),
            ('{"prompt": "x"}', "it has 'prompt'"),
            ('{"messages": [{"role": "user", "con', "not JSON"),
            ('{"messages": 3}', "must be a list of at least one"),
            ("[3]", "message 1 of 1 is 3"),
        ]
        for chat, said in bad:
            path = write(tmp_path, CHAT, chat, CHAT)
            with pytest.raises(SampleError) as caught:
                opened(path)[1]
            assert f"{path}, record 2: " in str(caught.value)
            assert said in str(caught.value)
        (batch,) = loader_of(opened(path, on_error="skip"), 3)
        assert len(batch["labels"]) == 2


class TestTemplates:
    def test_a_template_without_marks_says_what_to_add(self, tmp_path: Path) -> None:
        path = write(tmp_path, CHAT)
        for options in ({"unit": "chat"}, {}, {"packing": True, "max_length": 8}):
            with pytest.raises(ConfigError, match=r"in {% generation %} and {% endgenerat"):
                TextDataset(path, tokenizer=chat_tokenizer(UNMARKED), **options)

    def test_marks_that_enclose_nothing(self, tmp_path: Path) -> None:
        nothing = MARKED.replace("message.role == 'assistant'", "message.role == 'model'")
        assert "marks no token" in failure(write(tmp_path, CHAT), nothing)

    def test_a_template_that_raises(self, tmp_path: Path) -> None:
        path = write(tmp_path, [USER, {"role": "critic", "content": "no"}, ASSISTANT])
        raising = "{{ raise_exception('no critics') }}"
        strict = "{% if messages[1].role == 'critic' %}" + raising + "{% endif %}" + MARKED
        assert "no critics" in failure(path, strict)

    def test_a_tokenizer_without_offsets(self, tmp_path: Path) -> None:
        tokenizer = chat_tokenizer()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(tokenizer), "is_fast", False)
            with pytest.raises(ConfigError, match="pass a fast tokenizer"):
                opened(write(tmp_path, CHAT), tokenizer=tokenizer)

    def test_options_that_chats_have_not(self, tmp_path: Path) -> None:
        path, tokenizer = write(tmp_path, CHAT), chat_tokenizer()
        bad: list[tuple[dict[str, Any], str]] = [
            ({"unit": "chat"}, "CharTokenizer"),
            ({"unit": "chat", "tokenizer": chat_tokenizer(None)}, "chat_template="),
            ({"unit": "chat", "tokenizer": tokenizer, "target_field": "n"}, "target_field"),
            ({"unit": "chat", "tokenizer": tokenizer, "chat_template": 3}, "chat_template"),
            ({"unit": "line", "chat_template": "x"}, "unit='line'"),
        ]
        for unit in ("chat", None):
            chats: Any = {"unit": unit, "tokenizer": tokenizer, "max_length": 4}
            bad.append(({**chats, "stride": 2}, "stride=2"))
            bad.append(({**chats, "labels": "folders"}, "labels='folders'"))
            bad.append(({**chats, "packing": True, "end_token": 0}, "end_token=0"))
        for options, said in bad:
            with pytest.raises(ConfigError, match=said):
                TextDataset(path, **options)
        with pytest.raises(SampleError, match="it has 'messages'"):
            TextDataset(path)[0]
        with pytest.raises(ConfigError, match="end_token=0"):
            pack(opened(path), tmp_path / "a.h5", end_token=0)


class TestSamples:
    def test_cut_at_max_length(self, tmp_path: Path) -> None:
        path = write(tmp_path, CHAT)
        full, cut = opened(path)[0], opened(path, max_length=60)[0]
        assert same(cut, {name: column[:60] for name, column in full.items()})
        assert "its first 10 tokens" in failure(path, max_length=10)

    def test_found_without_being_named(self, tmp_path: Path) -> None:
        path, tokenizer = write(tmp_path, CHAT), chat_tokenizer()
        (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        for found in (path, tmp_path, tmp_path / "b.jsonl.gz"):
            dataset = open_dataset(found, tokenizer=tokenizer)
            assert type(dataset) is TextDataset
            assert learned(dataset[0]) == LEARNED
        with MemoryEfficientDataset(path, tokenizer=tokenizer) as held:
            assert learned(held[0]) == LEARNED
        rows = write(tmp_path / "rows", json.dumps({"text": "one", "messages": CHAT}))
        assert "labels" not in TextDataset(rows, tokenizer=CharTokenizer())[0]
        path = write(tmp_path / "bad", "{", "{")
        assert TextDataset(path, tokenizer=tokenizer).document_unit == "record"

    def test_batches_are_padded_by_both_ways(self, tmp_path: Path) -> None:
        class Own(TextCollator):
            """A subclass sees the samples one by one."""

        path = write(tmp_path, CHAT, CHAT[:3], CHAT[1:])
        for mode in ("lazy", "cached"):
            with opened(path, loading_mode=mode) as dataset:
                for options in ({}, {"collate_fn": Own()}):
                    batch = next(iter(loader_of(dataset, 3, **options)))
                    for row in range(3):
                        inside = batch["attention_mask"][row] == 1
                        assert torch.equal(batch["labels"][row][inside], dataset[row]["labels"])
                        assert (batch["labels"][row][~inside] == -100).all()
                        assert not batch["input_ids"][row][~inside].any()
                collate = TextCollator(pad_values={"labels": -1})
                batch = next(iter(loader_of(dataset, 2, collate_fn=collate)))
                assert same(batch, collate([dataset[0], dataset[1]]))
                assert batch["labels"][1, -1] == -1

    def test_bytes_of_records_are_their_lengths(self, tmp_path: Path) -> None:
        path = write(tmp_path, CHAT, CHAT[:3])
        lines, dataset = path.read_text().splitlines(keepends=True), opened(path)
        assert dataset.lengths().tolist() == list(map(len, lines))
        assert len(list(loader_of(dataset, 1, shuffle=True, bucket_by_length=True))) == 2


class TestBlocksAndPacks:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write(tmp_path, *([*CHAT[:2], answer(f"answer {n}")] for n in range(9)))

    def test_blocks_hold_labels(self, path: Path) -> None:
        chats = opened(path)
        blocks = opened(path, packing=True, max_length=32)
        for name in ("input_ids", "labels"):
            joined = torch.cat([blocks[n][name] for n in range(len(blocks))])
            expected = torch.cat([chats[n][name] for n in range(9)])
            assert torch.equal(joined, expected[: len(expected) // 32 * 32])
        batch = next(iter(loader_of(blocks, 2)))
        assert same({name: column[1] for name, column in batch.items()}, blocks[1])

    def test_other_templates_make_other_tokens(self, path: Path, tmp_path: Path) -> None:
        options: Any = {"packing": True, "max_length": 16, "cache_dir": tmp_path / "cache"}
        one = opened(path, **options)
        other = opened(path, MARKED.replace("im_start", "start"), **options)
        assert one.fingerprint != other.fingerprint
        assert not same(one[0], other[0])
        assert len(list((tmp_path / "cache").rglob("*tokens*"))) == 2

    @pytest.mark.parametrize("shard_size", [None, 400])
    def test_packed_chats_are_the_same(self, shard_size: Any, path: Path, tmp_path: Path) -> None:
        chats, target = opened(path), tmp_path / ("packed" if shard_size else "a.h5")
        pack(chats, target, shard_size=shard_size, workers=1, progress=False)
        assert not verify(target).bad
        packed = TextDataset(target)
        assert packed.document_unit == "chat"
        assert packed.fingerprint == chats.fingerprint
        assert [same(packed[n], chats[n]) for n in range(len(packed))] == [True] * 9
        options: Any = {"packing": True, "max_length": 32}
        blocks, expected = TextDataset(target, **options), opened(path, **options)
        assert same(blocks[1], expected[1])
        assert blocks.fingerprint == expected.fingerprint
        batch = next(iter(loader_of(packed, 2)))
        assert torch.equal(batch["labels"][1], chats[1]["labels"])
        assert batch["input_ids"].min() > 0
        with pytest.raises(SampleError, match="its first 4 tokens"):
            TextDataset(target, max_length=4)[0]
        pack(packed, tmp_path / "again.h5", workers=1, progress=False)
        assert same(TextDataset(tmp_path / "again.h5")[3], chats[3])
        for wrong in ({"unit": "chat"}, {"max_length": 4, "stride": 2}):
            with pytest.raises(ConfigError):
                TextDataset(target, **wrong)
