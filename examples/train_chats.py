"""Trains a tiny language model on chats, by the assistant's turns alone. Needs transformers.

python examples/train_chats.py                               # chats of its own, about sums
python examples/train_chats.py chats.jsonl --mode streaming
"""

import argparse
import json
import random
import sys
from pathlib import Path

import tokenizers
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from headrace import HeadraceError, TextDataset, create_dataloader, seed_everything

WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight")
TEMPLATE = (
    "{% for one in messages %}<{{ one.role }}>{% if one.role == 'assistant' %}{% generation %}"
    "{{ one.content + '\n' }}{% endgeneration %}{% else %}{{ one.content + '\n' }}{% endif %}"
    "{% endfor %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Each character is a token. In its place goes `AutoTokenizer.from_pretrained(...)` of a chat
    model.
    """
    letters = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({chr(code): code for code in range(128)}, unk_token="\x7f")
    )
    any_letter = tokenizers.Regex(r"[\s\S]")
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split(any_letter, "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="\x00")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_chats(path: Path) -> Path:
    """Writes records as OpenAI and TRL have them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(600):
            pairs = [
                (random.randrange(5), random.randrange(5)) for _ in range(random.randint(1, 3))
            ]
            turns = [
                (("user", f"{one} + {other}?"), ("assistant", WORDS[one + other]))
                for one, other in pairs
            ]
            file.write(
                json.dumps(
                    {
                        "messages": [
                            {"role": role, "content": text} for turn in turns for role, text in turn
                        ]
                    }
                )
                + "\n"
            )
    return path


def train(given: argparse.Namespace) -> None:
    seed_everything(7)
    chats = TextDataset(
        given.path or make_chats(Path("out/chats.jsonl")),
        tokenizer=make_tokenizer(),
        unit="chat",
        loading_mode=given.mode,
    )
    model = nn.ModuleList(
        [nn.Embedding(128, 32), nn.GRU(32, 64, batch_first=True), nn.Linear(64, 128)]
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with create_dataloader(chats, batch_size=32, num_workers=given.workers, seed=7) as loader:
        for epoch in range(given.epochs):
            total, tokens, count = 0.0, 0, 0
            for batch in loader:  # input_ids, labels, attention_mask: int64 [32, longest]
                # those of the next tokens
                scores, labels = (
                    model[2](model[1](model[0](batch["input_ids"]))[0]),
                    batch["labels"][:, 1:],
                )
                loss = nn.functional.cross_entropy(
                    scores[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100
                )
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                learned = int((labels != -100).sum())
                total, tokens, count = (
                    total + loss.item() * learned,
                    tokens + int(batch["attention_mask"].sum()),
                    count + learned,
                )
            print(
                f"epoch {epoch + 1}: loss {total / count:.4f} of {count:,} labels, in {tokens:,} "
                "tokens"
            )
    print(
        "the last chat's labels:",
        repr("".join(chr(label) for label in labels[-1].tolist() if label >= 0)),
    )


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "path", nargs="?", type=Path, help="a .jsonl with messages; without: a file is made, in ./out"
)
parser.add_argument("--mode", default="lazy", help="lazy, eager, cached or streaming")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--workers", type=int)
if __name__ == "__main__":
    try:
        train(parser.parse_args())
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
