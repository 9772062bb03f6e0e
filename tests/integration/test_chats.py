"""Chats by a byte-level BPE of transformers, trained in memory: which tokens are labels."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace import TextDataset
from tests.datasets.text.chat_tokenizer import MARKED

pytestmark = pytest.mark.integration

CONTENTS = ("hello there", "\n\nhow are you", "fine 😀, ", " and  you?\n")
CONTENTS += ("naïve — ok", "<b>x</b>\tend ")


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


def test_labels_are_the_contents_of_turns(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, [{"messages": chat} for chat in chats()])
    dataset = TextDataset(path, tokenizer=tokenizer, chat_template=MARKED)
    for chat, sample in zip(chats(), dataset, strict=True):
        assert sample["input_ids"].tolist() == tokenizer.encode(
            dataset.text_of(chats().index(chat)), add_special_tokens=False
        )
        # a token may begin before the turn
        learned = tokenizer.decode(sample["labels"][sample["labels"] != -100]).replace("\n", "")
        assert learned == "".join(
            turn["content"].replace("\n", "") + "<|im_end|>"
            for turn in chat
            if turn["role"] == "assistant"
        )
