"""Chats by real tokenizers of transformers, built in memory: labels equal to its own masks, and
to those that TRL expects.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import SampleError, TextDataset, create_dataloader, pack
from headrace.testing.contract import same
from tests.datasets.text.chat_tokenizer import CHATML, MARKED

pytestmark = pytest.mark.integration

CONTENTS = ("hello there", "\n\nhow are you", "fine 😀, ", " and  you?\n")
CONTENTS += ("naïve — ok", "<b>x</b>\tend ")
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() "
    "+ ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module", params=[False, True], ids=["offsets", "trimmed offsets"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte-level BPE as GPT-2's, Llama 3's and Qwen's are."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HOME"] = str(tmp_path_factory.mktemp("huggingface"))
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, trim_offsets=request.param
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<s>"],
    )
    made.train_from_iterator([*CONTENTS, "user assistant system", "\n\n\n"] * 20, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )


def chats() -> list[list[dict[str, str]]]:
    """Of one to three turns, with and without a system's."""
    made = []
    for number in range(12):
        turns = []
        if number % 2:
            turns.append({"role": "system", "content": CONTENTS[number % 6]})
        for turn in range(number % 3 + 1):
            turns.append({"role": "user", "content": CONTENTS[(number + turn) % 6]})
            turns.append({"role": "assistant", "content": CONTENTS[(number + 3 * turn + 1) % 6]})
        made.append(turns)
    return made


def write(folder: Path, records: list[Any]) -> Path:
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "chats.jsonl"


def own_mask(tokenizer: Any, chat: Any) -> tuple[list[int], list[int]]:
    """Ids, and the mask that transformers itself makes of a template with tags."""
    made = tokenizer.apply_chat_template(
        chat, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    return made["input_ids"], made["assistant_masks"]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "tags"])
def test_labels_are_those_of_its_own_mask(template: str, tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, [{"messages": chat} for chat in chats()])
    dataset = TextDataset(path, tokenizer=tokenizer, chat_template=template)
    for chat, sample in zip(chats(), dataset, strict=True):
        ids, mask = own_mask(tokenizer, chat)
        assert sample["input_ids"].tolist() == ids
        assert sample["labels"].tolist() == [
            number if is_its else -100 for number, is_its in zip(ids, mask, strict=True)
        ]
        # a token may begin before the turn
        learned = tokenizer.decode(sample["labels"][sample["labels"] != -100]).replace("\n", "")
        assert learned == "".join(
            turn["content"].replace("\n", "") + "<|im_end|>"
            for turn in chat
            if turn["role"] == "assistant"
        )


def test_a_turn_of_a_template_without_a_prompt(tokenizer: Any, tmp_path: Path) -> None:
    """As TRL labels completions: all that follows the prompt."""
    path = write(tmp_path, [{"messages": chat} for chat in chats() if chat[0]["role"] == "user"])
    dataset = TextDataset(path, tokenizer=tokenizer, chat_template=LLAMA2)
    for sample in dataset:
        text = tokenizer.decode(sample["input_ids"])
        learned = "".join(part.partition("[/INST]")[2] for part in text.split("<s>"))
        assert tokenizer.decode(sample["labels"][sample["labels"] != -100]) == learned


def test_thoughts_of_the_last_turn_alone_are_an_error(tokenizer: Any, tmp_path: Path) -> None:
    """As of Qwen 3 and DeepSeek's: transformers renders turns that the model never wrote so."""
    thoughtful = CHATML.replace(
        "message['content']", "message['content'].split('</think>')[0 if loop.last else -1]"
    )
    chat = [
        {"role": role, "content": f"</think>{role}"}
        for role in ("user", "assistant", "user", "assistant")
    ]
    dataset = TextDataset(
        write(tmp_path, [{"messages": chat}]), tokenizer=tokenizer, chat_template=thoughtful
    )
    with pytest.raises(SampleError, match=r"by itself and as .* in the whole chat.*generation"):
        dataset[0]


def test_several_named_templates(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, [{"messages": chats()[2]}])
    tokenizer.chat_template = {"default": CHATML, "marked": MARKED}
    try:
        assert same(
            TextDataset(path, tokenizer=tokenizer)[0],
            TextDataset(path, tokenizer=tokenizer, chat_template="marked")[0],
        )
        tokenizer.chat_template = {"marked": MARKED}
        with pytest.raises(ValueError, match="no default"):
            TextDataset(path, tokenizer=tokenizer, unit="chat")
    finally:
        tokenizer.chat_template = None


def test_workers_and_packs(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, [{"messages": chat} for chat in chats()])
    dataset = TextDataset(path, tokenizer=tokenizer, chat_template=CHATML)
    with create_dataloader(
        dataset, batch_size=4, num_workers=2, shuffle=False, multiprocessing_context="spawn"
    ) as loader:
        batches = list(loader)
        labels = batches[1]["labels"][0][batches[1]["attention_mask"][0] == 1]
        assert torch.equal(labels, dataset[4]["labels"])
    del batches
    pack(dataset, tmp_path / "chats.h5", workers=1, progress=False)
    packed = TextDataset(tmp_path / "chats.h5")
    assert all(same(packed[number], dataset[number]) for number in range(12))
