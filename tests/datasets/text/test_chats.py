"""Chats: which tokens are labels, by every kind of template and tokenizer, and an error wherever
that can't be told.
"""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import (
    BaseDataset,
    CharTokenizer,
    ConfigError,
    HeadraceWarning,
    MemoryEfficientDataset,
    SampleError,
    TextCollator,
    TextDataset,
    create_dataloader,
    open_dataset,
    pack,
    verify,
)
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.datasets.text.chat_tokenizer import CHATML, MARKED, ChatTokenizer
from tests.servers.ranges import RangeServer

SYSTEM, USER, ASSISTANT = (
    {"role": role, "content": f"{role} says"} for role in ("system", "user", "assistant")
)
CHAT = [
    SYSTEM,
    USER,
    {"role": "assistant", "content": "one"},
    USER,
    {"role": "assistant", "content": "\n two "},
]
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


def opened(path: Path, template: str = CHATML, **options: Any) -> TextDataset:
    tokenizer = options.pop("tokenizer", None) or ChatTokenizer(template)
    return TextDataset(path, tokenizer=tokenizer, unit="chat", **options)


def learned(sample: dict[str, torch.Tensor]) -> str:
    """The text whose tokens are labels; they stand where their ids do."""
    ids, labels = sample["input_ids"], sample["labels"]
    assert ids.dtype == labels.dtype == torch.int64 and ids.shape == labels.shape
    assert torch.equal(ids[labels != -100], labels[labels != -100])
    return ChatTokenizer().decode(labels[labels != -100])


def whole(sample: dict[str, torch.Tensor]) -> str:
    return ChatTokenizer().decode(sample["input_ids"])


def failure(path: Path, template: str = CHATML, **options: Any) -> str:
    with pytest.raises(SampleError) as caught:
        opened(path, template, **options)[0]
    return str(caught.value)


class TestLabels:
    @pytest.mark.parametrize("is_fast", [True, False])
    @pytest.mark.parametrize("template", [CHATML, MARKED])
    def test_only_assistants_turns_are_labels(
        self, template: str, is_fast: bool, tmp_path: Path
    ) -> None:
        dataset = opened(write(tmp_path, CHAT), tokenizer=ChatTokenizer(template, is_fast))
        assert (
            whole(dataset[0]) == dataset.text_of(0)
            and dataset.text_of(0).count("<|im_start|>") == 5
        )
        assert learned(dataset[0]) == LEARNED and dataset.targets is None

    def test_white_space_behind_the_end_token_is_none(self, tmp_path: Path) -> None:
        sample = opened(write(tmp_path, [USER, ASSISTANT]))[0]
        # <|im_end|>, then a newline
        assert sample["labels"][-1] == -100 and sample["labels"][-2] == 2

    def test_without_an_end_token_all_of_a_turn_counts(self, tmp_path: Path) -> None:
        plain = (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if "
            "add_generation_prompt %}assistant: {% endif %}"
        )
        plain = plain.replace("}}\n{%", "}}{{ '\n' }}{%")
        for is_fast in (True, False):
            assert (
                learned(
                    opened(write(tmp_path, CHAT[:4]), tokenizer=ChatTokenizer(plain, is_fast))[0]
                )
                == "one\n"
            )

    def test_weight_zero_is_not_learned(self, tmp_path: Path) -> None:
        chat = [
            USER,
            {**ASSISTANT, "weight": 0},
            USER,
            {"role": "assistant", "content": "two", "weight": 1},
        ]
        for template in (CHATML, MARKED):
            assert learned(opened(write(tmp_path, chat), template)[0]) == "two<|im_end|>"

    def test_a_token_across_the_beginning_counts(self, tmp_path: Path) -> None:
        path = write(tmp_path, [USER, {"role": "assistant", "content": "\nwell"}])
        sample = opened(path, tokenizer=ChatTokenizer(joins="\n\n"))[0]
        assert [int(sample["labels"][place]) for place in (-7, -6)] == [9, ord("w") + 16]
        assert "a token lies across" in failure(
            path, tokenizer=ChatTokenizer(is_fast=False, joins="\n\n")
        )

    def test_a_token_across_the_end_is_an_error(self, tmp_path: Path) -> None:
        plain = "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"
        path = write(tmp_path, [USER, ASSISTANT, {"role": "user", "content": "\nmore"}])
        assert "the token '\\n\\n' lies across the end" in failure(
            path, tokenizer=ChatTokenizer(plain, joins="\n\n")
        )

    def test_tools_and_options_go_to_the_template(self, tmp_path: Path) -> None:
        template = "{{ tools[0].name }} {{ mood }}|" + CHATML
        for tools in ([{"name": "saw"}], '[{"name": "saw"}]'):
            path = write(tmp_path, CHAT, tools=tools, chat_template_kwargs={"mood": "calm"})
            assert (
                opened(path, template).text_of(0).startswith("saw calm|")
                and learned(opened(path, template)[0]) == LEARNED
            )
        assert "chat_template_kwargs hold tokenize" in failure(
            write(tmp_path, CHAT, chat_template_kwargs={"tokenize": True})
        )
        assert "its field 'tools' is {'name': 'saw'}: it must be a list" in failure(
            write(tmp_path, CHAT, tools={"name": "saw"})
        )

    def test_a_template_instead_of_the_tokenizers(self, tmp_path: Path) -> None:
        path = write(tmp_path, CHAT)
        dataset = TextDataset(path, tokenizer=ChatTokenizer(None), chat_template=MARKED)
        assert same(dataset[0], opened(path, MARKED)[0]) and "chat_template=" in repr(dataset)


class TestMessages:
    def test_sharegpt(self, tmp_path: Path) -> None:
        chat = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
        dataset = opened(write(tmp_path, chat, field="conversations", system="be kind"))
        assert learned(dataset[0]) == "yes<|im_end|>" and dataset.text_of(0).startswith(
            "<|im_start|>system\nbe kind<|im_end|>"
        )
        assert "message 1 of 1 is from 'alien': it must be from one of 'human'" in failure(
            write(tmp_path, [{"from": "alien", "value": "hi"}], field="conversations")
        )

    def test_parts_of_text_are_joined(self, tmp_path: Path) -> None:
        parts = [{"type": "text", "text": "yes"}, {"type": "text", "text": ", no"}]
        assert (
            learned(opened(write(tmp_path, [USER, {"role": "assistant", "content": parts}]))[0])
            == "yes, no<|im_end|>"
        )
        image = [{"type": "image_url", "image_url": {"url": "x"}}]
        assert "message 1 of 2 has at part 1 of its content" in failure(
            write(tmp_path, [{"role": "user", "content": image}, ASSISTANT])
        )

    def test_a_system_field_comes_first(self, tmp_path: Path) -> None:
        """Beside messages of either form; where these begin with one, it must be the same."""
        for field, chat in (
            ("messages", CHAT[1:]),
            ("conversations", CHAT[1:]),
            ("messages", [{"role": "system", "content": "be kind\n"}, *CHAT[1:]]),
        ):
            assert (
                opened(write(tmp_path, chat, field=field, system="be kind"))
                .text_of(0)
                .startswith("<|im_start|>system\nbe kind")
            )
            assert opened(tmp_path / "a.jsonl").text_of(0).count("be kind") == 1
        assert same(
            opened(write(tmp_path, CHAT, system=" "))[0],
            opened(write(tmp_path / "b", CHAT, system=None))[0],
        )
        assert (
            "its field 'system' and its first message, the system's, are different texts"
            in failure(write(tmp_path, CHAT, system="no"))
        )
        assert "its field 'system' is ['no']: it must be a text" in failure(
            write(tmp_path, CHAT[1:], system=["no"])
        )
        made = opened(
            write(tmp_path, CHAT[1:], system=3), text_field=lambda record: record["messages"]
        )
        assert "system" not in made.text_of(0)

    def test_a_null_field_holds_no_chat(self, tmp_path: Path) -> None:
        """As where records of both forms were joined."""
        path = write(tmp_path, json.dumps({"messages": None, "conversations": CHAT}), CHAT)
        assert TextDataset(path, tokenizer=ChatTokenizer()).is_of_chats and same(
            opened(path)[0], opened(path)[1]
        )

    def test_a_callable_that_raises_is_named(self, tmp_path: Path) -> None:
        path = write(tmp_path, CHAT)
        assert "line 1: text_field raised KeyError: 'dialog'" in failure(
            path, text_field=lambda record: record["dialog"]
        )
        with pytest.raises(SampleError, match=r"line 1: text_field raised KeyError: 'dialog'"):
            TextDataset(path, unit="record", text_field=lambda record: record["dialog"])[0]

    def test_a_field_or_callable_for_messages(self, tmp_path: Path) -> None:
        assert (
            learned(opened(write(tmp_path, CHAT, field="dialog"), text_field="dialog")[0])
            == LEARNED
        )
        (tmp_path / "b.json").write_text(json.dumps([{"q": "why?", "a": "so"}]))

        def messages(record: Any) -> Any:
            return [
                {"role": "user", "content": record["q"]},
                {"role": "assistant", "content": record["a"]},
            ]

        assert learned(opened(tmp_path / "b.json", text_field=messages)[0]) == "so<|im_end|>"

    def test_messages_as_the_text_of_a_cell(self, tmp_path: Path) -> None:
        cell = json.dumps(CHAT).replace('"', '""')
        (tmp_path / "a.csv").write_text(f'id,messages\n1,"{cell}"\n')
        assert learned(opened(tmp_path / "a.csv")[0]) == LEARNED

    def test_tool_calls_instead_of_a_content(self, tmp_path: Path) -> None:
        call = {"role": "assistant", "content": None, "tool_calls": [{"name": "saw"}]}
        chat = [
            USER,
            call,
            {"role": "tool", "content": "sawn"},
            {"role": "assistant", "content": "done"},
        ]
        knowing = CHATML.replace(
            "message['content']", "(message.content or message.tool_calls[0].name)"
        )
        assert learned(opened(write(tmp_path, chat), knowing)[0]) == "saw<|im_end|>done<|im_end|>"
        naive = CHATML.replace("message['content']", "message['content'] ~ ''")
        assert "writes 'None' for message 2, whose content is null" in failure(
            write(tmp_path, chat), naive
        )
        assert "the chat template can't render it" in failure(write(tmp_path, chat))

    @pytest.mark.parametrize(
        ("chat", "said"),
        [
            (
                [SYSTEM, USER],
                "it has no assistant's turn, so there is nothing to learn from it; its roles are "
                "system, user",
            ),
            ([USER, {**ASSISTANT, "weight": 0}], "every assistant's turn has the weight 0"),
            ([], "its messages are []"),
            ([USER, {**ASSISTANT, "weight": 2}], "message 2 of 2 has the weight 2"),
            ("hello", "no JSON"),
            (
                [{"from": ["human"], "value": "x"}, ASSISTANT],
                "message 1 of 2 is from ['human']: it must be from one of",
            ),
            (
                [USER, {"role": "assistant", "content": " "}],
                r"message 2 of 2 (assistant) has an empty content",
            ),
            (
                [{"role": "user"}, ASSISTANT],
                "message 1 of 2 (user) has no content, and no 'tool_calls'",
            ),
            (
                [{"role": "user", "content": 3}, ASSISTANT],
                "message 1 of 2 (user) has a content of type int",
            ),
            ([{"content": "x"}, ASSISTANT], "message 1 of 2 is {'content': 'x'}: it must be"),
            (["x"], "message 1 of 1 is 'x'"),
            ([{"role": 3, "content": "x"}, ASSISTANT], "message 1 of 2 has the role 3"),
            (
                '{"prompt": "x"}',
                "it has no field 'messages' or 'conversations'; it has 'prompt': pass text_field=",
            ),
            ('{"messages": [{"role": "user", "con', "no JSON"),
            ('{"messages": 3}', "its messages are 3"),
            ("[3]", "message 1 of 1 is 3"),
        ],
    )
    def test_what_is_no_chat_is_named(self, chat: Any, said: str, tmp_path: Path) -> None:
        path = write(tmp_path, CHAT, chat, CHAT)
        with pytest.raises(SampleError) as caught:
            opened(path)[1]
        assert f"{path}, line 2: " in str(caught.value) and said in str(caught.value)
        skipping = opened(path, on_error="skip")
        assert [
            len(batch["labels"])
            for batch in create_dataloader(skipping, batch_size=3, num_workers=0, shuffle=False)
        ] == [2]


class TestTemplates:
    def test_what_cant_be_told_is_an_error(self, tmp_path: Path) -> None:
        path = write(tmp_path, CHAT)
        thought = "('<think>' if loop.last and message.role == 'assistant' else '')"
        last_differs = CHATML.replace("message['content']", f"{thought} + message['content']")
        said = failure(path, last_differs)
        assert (
            "message 3, the assistant's, as '<think>one" in said and "{% generation %}" in said
        ), said
        other_prompt = CHATML.replace(
            "'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'"
        )
        assert "what precedes message 3 as '<think>' by itself and as 'one" in failure(
            path, other_prompt
        )
        no_prompt = CHATML.partition("{% if add")[0]
        assert "writes '<|im_start|>assistant' before message 3" in failure(path, no_prompt)
        assert "it begins with the assistant's turn" in failure(
            write(tmp_path, [ASSISTANT, USER, ASSISTANT])
        )

    def test_a_template_without_a_prompt_may_need_none(self, tmp_path: Path) -> None:
        llama = (
            "{% for m in messages %}{{ '[I] ' + m.content + ' [/I]' if m.role == 'user' else ' ' "
            "+ m.content + '<|im_end|>' }}{% endfor %}"
        )
        assert learned(opened(write(tmp_path, CHAT[1:3]), llama)[0]) == " one<|im_end|>"

    def test_messages_left_out_in_silence_are_an_error(self, tmp_path: Path) -> None:
        some = (
            "{% for message in messages if message.role != 'critic' %}" + CHATML.partition("%}")[2]
        )
        said = failure(
            write(tmp_path, [USER, {"role": "critic", "content": "no"}, ASSISTANT]), some
        )
        assert (
            "the chat template leaves out message 2 of 3: it does not know the role 'critic'"
            in said
        )
        strict = (
            "{% if messages[0].role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}"
            + CHATML
        )
        assert "the chat template can't render it: no critics" in failure(
            write(tmp_path, [{**USER, "role": "critic"}, ASSISTANT]), strict
        )

    def test_marks_that_enclose_nothing_or_too_much(self, tmp_path: Path) -> None:
        path = write(tmp_path, CHAT)
        nothing = MARKED.replace("message.role == 'assistant'", "message.role == 'model'")
        assert "marks nothing in it as the assistant's" in failure(path, nothing)
        filtered = MARKED.replace(
            "{%- generation %}", "{%- filter trim %}{%- generation %}"
        ).replace("{%- endgeneration %}", "{%- endgeneration %}{%- endfilter %}")
        assert "writes another text where its {% generation %} tags stand" in failure(
            path, filtered
        )
        once = MARKED.replace("message.role == 'assistant'", "loop.last")
        chat = [USER, {**ASSISTANT, "weight": 0}, USER, ASSISTANT]
        assert learned(opened(path, once)[0]) == "\n two <|im_end|>"
        assert "marks 1 stretches in it, of 2 assistant's turns" in failure(
            write(tmp_path, chat), once
        )
        assert "U+E000" in failure(
            write(tmp_path, [USER, {"role": "assistant", "content": "\ue000"}]), MARKED
        )

    def test_tokenizers_that_make_no_sense(self, tmp_path: Path) -> None:
        """Ids below 0 or beyond int32 would change which tokens are labels."""
        path = write(tmp_path, CHAT)

        class Wrong(ChatTokenizer):
            """Gives what no tokenizer should."""

            def __init__(self, number: int, is_fast: bool) -> None:
                super().__init__(is_fast=is_fast)
                self.number = number

            def _id(self, token: str) -> int:
                return self.number

        for number in (-5, 2**31):
            for is_fast in (True, False):
                said = failure(path, tokenizer=Wrong(number, is_fast))
                assert (
                    f"the tokenizer gave ids from {number} to {number}: they must be at least 0, "
                    "and fit int32" in said
                )

        class Bare(ChatTokenizer):
            def __call__(self, text: str, **_: Any) -> dict[str, Any]:
                return {"input_ids": [ord(letter) for letter in text]}

            def apply_chat_template(self, *messages: Any, **options: Any) -> Any:
                return super().apply_chat_template(*messages, **options) if self.is_fast else [1, 2]

        assert "is_fast is True, and it gives no offset_mapping" in failure(path, tokenizer=Bare())
        assert "of the tokenizer gave a list and no text" in failure(
            path, tokenizer=Bare(is_fast=False)
        )

    def test_tokenizers_that_know_no_chats(self, tmp_path: Path) -> None:
        path = write(tmp_path, CHAT)
        with pytest.raises(
            ConfigError, match=r"the CharTokenizer has no apply_chat_template: pass tokenizer="
        ):
            TextDataset(path, unit="chat")
        with pytest.raises(
            ConfigError, match=r"the ChatTokenizer has no chat template: pass chat_template="
        ):
            TextDataset(path, unit="chat", tokenizer=ChatTokenizer(None))
        with pytest.raises(
            SampleError,
            match=(
                r"it has no field 'text'.*'messages' holds a chat: from Python its unit is "
                r"'chat'"
            ),
        ):
            TextDataset(path)[0]

    def test_options_that_chats_have_not(self, tmp_path: Path) -> None:
        path, tokenizer = write(tmp_path, CHAT), ChatTokenizer()
        for options, said in (
            ({"stride": 2, "max_length": 4}, "stride=2 can't be given for chats"),
            ({"labels": "folders"}, "labels='folders' can't"),
            (
                {"packing": True, "max_length": 4, "end_token": 0},
                "end_token=0 can't be given for chats",
            ),
        ):
            for unit in ("chat", None):
                with pytest.raises(ConfigError, match=said):
                    TextDataset(path, tokenizer=tokenizer, unit=unit, **options)
        for wrong, said in (
            ({"target_field": "n"}, "target_field can't be given for chats"),
            ({"chat_template": 3}, "chat_template must be a text"),
        ):
            with pytest.raises(ConfigError, match=said):
                opened(path, **wrong)
        with pytest.raises(
            ConfigError, match=r"chat_template is for chats: pass unit='chat', not unit='line'"
        ):
            TextDataset(path, unit="line", chat_template="x")
        with pytest.raises(ConfigError, match="end_token=0 can't be given for chats"):
            pack(opened(path), tmp_path / "a.h5", end_token=0)


class TestSamples:
    def test_cut_at_max_length(self, tmp_path: Path) -> None:
        path = write(tmp_path, CHAT)
        full = opened(path)[0]
        cut = opened(path, max_length=60)[0]
        assert len(cut["labels"]) == 60 and all(
            torch.equal(cut[name], full[name][:60]) for name in full
        )
        assert "its first 10 tokens hold none of the assistant's, which begin at token" in failure(
            path, max_length=10
        )

    def test_found_without_being_named(self, tmp_path: Path) -> None:
        path, tokenizer = write(tmp_path, CHAT), ChatTokenizer()
        (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        for found in (path, tmp_path, tmp_path / "b.jsonl.gz"):
            dataset = open_dataset(found, tokenizer=tokenizer, cache_dir=tmp_path / "cache")
            assert type(dataset) is TextDataset and learned(dataset[0]) == LEARNED
        with MemoryEfficientDataset(path, tokenizer=tokenizer) as held:
            assert learned(held[0]) == LEARNED
        rows = write(tmp_path / "rows", json.dumps({"text": "one", "messages": CHAT}))
        assert "labels" not in TextDataset(rows, tokenizer=CharTokenizer())[0]
        assert not TextDataset(write(tmp_path / "bad", "{", "{"), tokenizer=tokenizer).is_of_chats

    def test_batches_are_padded_by_both_ways(self, tmp_path: Path) -> None:
        path = write(tmp_path, CHAT, CHAT[:3], CHAT[1:])
        for mode in ("lazy", "cached"):
            with opened(path, loading_mode=mode) as dataset:
                for collate in (None, dataset_collate()):
                    options = {} if collate is None else {"collate_fn": collate}
                    batch = next(
                        iter(
                            create_dataloader(
                                dataset, batch_size=3, num_workers=0, shuffle=False, **options
                            )
                        )
                    )
                    assert (
                        batch["labels"].shape
                        == batch["input_ids"].shape
                        == batch["attention_mask"].shape
                    )
                    for row in range(3):
                        inside = batch["attention_mask"][row] == 1
                        assert torch.equal(batch["labels"][row][inside], dataset[row]["labels"])
                        assert (batch["labels"][row][~inside] == -100).all() and not batch[
                            "input_ids"
                        ][row][~inside].any()

    def test_bytes_of_records_are_their_lengths(self, tmp_path: Path) -> None:
        path = write(tmp_path, CHAT, CHAT[:3])
        dataset = opened(path)
        assert dataset.lengths().tolist() == [
            len(line) + 1 for line in path.read_text().splitlines()
        ]
        loader = create_dataloader(dataset, batch_size=1, num_workers=0, bucket_by_length=True)
        assert len(list(loader)) == 2

    def test_a_transform_gets_both(self, tmp_path: Path) -> None:
        assert sorted(opened(write(tmp_path, CHAT), transform=dict.copy)[0]) == [
            "input_ids",
            "labels",
        ]
        assert learned(pickle.loads(pickle.dumps(opened(write(tmp_path, CHAT))))[0]) == LEARNED


@pytest.mark.parametrize("packing", [False, True])
def test_streams_resume_here_and_by_url(packing: bool, tmp_path: Path) -> None:
    path = write(
        tmp_path / "chats",
        *([USER, {"role": "assistant", "content": f"{'so ' * (n % 5)}{n}"}] for n in range(40)),
    )
    options: Any = {"loading_mode": "streaming", "cache_dir": tmp_path / "cache", "progress": False}
    options |= {"packing": True, "max_length": 32} if packing else {}

    def loader_of(place: Any) -> Any:
        return create_dataloader(opened(place, **options), batch_size=4, num_workers=0, seed=5)

    with (
        RangeServer(path.parent) as server,
        loader_of(path) as local,
        loader_of(f"{server.url}/{path.name}") as remote,
    ):
        whole = list(local)
        assert same(list(remote), whole) and all((batch["labels"] == -100).any() for batch in whole)
    for first, second in ((path, "url"), ("url", path)):
        with RangeServer(path.parent) as server:
            places = [
                f"{server.url}/{path.name}" if place == "url" else place
                for place in (first, second)
            ]
            with loader_of(places[0]) as begun, loader_of(places[1]) as resumed:
                batches = iter(begun)
                received = [next(batches) for _ in range(3)]
                resumed.load_state_dict(begun.state_dict())
                del batches
                assert same(received + list(resumed), whole)


def test_labels_padded_otherwise_are_so_in_batches(tmp_path: Path) -> None:
    dataset = opened(write(tmp_path, CHAT, CHAT[:3]))
    collate = TextCollator(pad_values={"labels": -1})
    batch = next(
        iter(
            create_dataloader(
                dataset, batch_size=2, num_workers=0, shuffle=False, collate_fn=collate
            )
        )
    )
    assert same(batch, collate([dataset[0], dataset[1]])) and batch["labels"][1, -1] == -1


def dataset_collate() -> Any:
    from headrace import TextCollator

    class Own(TextCollator):
        """A subclass sees the samples one by one."""

    return Own()


class TestBlocksAndPacks:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write(
            tmp_path,
            *([*CHAT[:2], {"role": "assistant", "content": f"answer {n}"}] for n in range(9)),
        )

    def test_blocks_hold_labels(self, path: Path, tmp_path: Path) -> None:
        for tokenizer in (ChatTokenizer(MARKED), ChatTokenizer()):
            chats = opened(path, tokenizer=tokenizer)
            blocks = opened(
                path, tokenizer=tokenizer, packing=True, max_length=32, cache_dir=tmp_path / "cache"
            )
            joined = {
                name: torch.cat([blocks[n][name] for n in range(len(blocks))])
                for name in ("input_ids", "labels")
            }
            for name, ids in joined.items():
                assert torch.equal(ids, torch.cat([chats[n][name] for n in range(9)])[: len(ids)])
            batch = next(
                iter(create_dataloader(blocks, batch_size=2, num_workers=0, shuffle=False))
            )
            assert all(
                torch.equal(batch[name][1], blocks[1][name]) for name in blocks[1]
            ) and "straight" in blocks_way(blocks)

    def test_other_templates_make_other_tokens(self, path: Path, tmp_path: Path) -> None:
        options: Any = {"packing": True, "max_length": 16, "cache_dir": tmp_path / "cache"}
        one, other = (
            opened(path, **options),
            opened(path, CHATML.replace("im_start", "start"), **options),
        )
        assert one.fingerprint != other.fingerprint and not same(one[0], other[0])
        assert len(list((tmp_path / "cache").rglob("*tokens*"))) == 2, list(
            (tmp_path / "cache").rglob("*")
        )

    @pytest.mark.parametrize("shard_size", [None, 400])
    def test_packed_chats_are_the_same(
        self, shard_size: int | None, path: Path, tmp_path: Path
    ) -> None:
        chats, target = opened(path), tmp_path / ("packed" if shard_size else "a.h5")
        pack(chats, target, shard_size=shard_size, workers=1, progress=False)
        packed = TextDataset(target)
        assert (
            not verify(target).bad
            and len(packed) == 9
            and packed.fingerprint == chats.fingerprint
            and packed.is_of_chats
        )
        assert all(same(packed[n], chats[n]) for n in range(9))
        options: Any = {"packing": True, "max_length": 32}
        assert same(TextDataset(target, **options)[1], opened(path, **options)[1])
        assert (
            TextDataset(target, **options).fingerprint
            == opened(path, cache_dir=tmp_path / "cache", **options).fingerprint
        )
        batch = next(iter(create_dataloader(packed, batch_size=2, num_workers=0, shuffle=False)))
        assert (
            torch.equal(batch["labels"][1], chats[1]["labels"])
            and batch["labels"].min() == -100
            and batch["input_ids"].min() > 0
        )
        with pytest.raises(
            SampleError, match="its first 4 tokens hold none of the assistant's: raise max_length"
        ):
            TextDataset(target, max_length=4)[0]
        again = tmp_path / "again.h5"
        pack(packed, again, workers=1, progress=False)
        assert same(TextDataset(again)[3], chats[3])
        with pytest.raises(
            ConfigError, match=r"unit='chat': .* holds tokens, so packing has decided this"
        ):
            TextDataset(target, unit="chat")
        with pytest.raises(ConfigError, match="stride=2 can't be given for chats"):
            TextDataset(target, max_length=4, stride=2)

    def test_chats_that_cant_be_read_are_left_out(self, path: Path, tmp_path: Path) -> None:
        path.write_text(path.read_text() + json.dumps({"messages": [USER]}) + "\n")
        with pytest.warns(HeadraceWarning):
            result = pack(
                opened(path, on_error="skip"), tmp_path / "a.h5", workers=1, progress=False
            )
        assert len(TextDataset(tmp_path / "a.h5")) == 9 and result


def blocks_way(dataset: TextDataset) -> str:
    return str(create_dataloader(dataset, batch_size=2, num_workers=0).explain())


@pytest.mark.slow
class TestChatsKeepTheLaws(DatasetContract):
    """24 chats in two files."""

    options: Any = {}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.base = tmp_path_factory.getbasetemp() / f"contract-{type(self).__name__}"
        if not self.base.exists():
            chats = [
                [USER, {"role": "assistant", "content": f"{'so ' * (n % 5)}{n}"}] for n in range(24)
            ]
            write(self.base / "data", *chats[:10])
            write(self.base / "data", *chats[10:], name="b.jsonl")
            write(self.base / "bad", *(chats[n] if n not in (3, 17) else [USER] for n in range(24)))

    def make(self, **options: Any) -> BaseDataset:
        return opened(self.base / "data", cache_dir=self.base / "cache", **self.options, **options)

    def make_bad(self, **options: Any) -> tuple[BaseDataset, list[int]] | None:
        return opened(self.base / "bad", **options), [3, 17]


@pytest.mark.slow
class TestBlocksOfChatsKeepTheLaws(TestChatsKeepTheLaws):
    options = {"packing": True, "max_length": 16}  # noqa: RUF012

    def make_bad(self, **options: Any) -> None:
        return None


@pytest.mark.slow
class TestRowsOfChatsKeepTheLaws(TestBlocksOfChatsKeepTheLaws):
    options = {"packing": "bfd", "max_length": 70}  # noqa: RUF012
