"""Trains a small language model on texts in all four loading modes, one after the other, or in one, and measures it on unseen blocks.

    python examples/train_text.py                              # a text of its own
    python examples/train_text.py books                        # a folder of texts, or a packed tokens.h5
    python examples/train_text.py books --mode streaming       # in one mode
    python examples/train_text.py books --bpe 1000             # pieces of words, by the package `tokenizers`

The texts are cut into blocks of tokens, whatever document they are of, one in twenty of which is held out. No token sees another document:
`document_mask` says which may attend to which. Perplexity is measured on the blocks that are held out, first before any training.

Exit status: 0; 1 where modes differ in a perplexity; 2 for an error; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads leave their cores to the workers instead of spinning

import torch
from torch import nn

from headrace import (
    CharTokenizer,
    ConfigError,
    HeadraceError,
    Loader,
    LoadingMode,
    TextDataset,
    create_dataloader,
    document_mask,
    seed_everything,
)

MODES = ["lazy", "eager", "cached", "streaming"]
HELD_OUT = 0.05


class Model(nn.Module):
    """A transformer of a few hundred thousand parameters, which gives a score to each token that could be the next."""

    def __init__(self, vocabulary: int, length: int, width: int = 96, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            found = layer(found, mask)
        return self.norm(found) @ self.tokens.weight.T


class Layer(nn.Module):
    """Attention, and two linear maps."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.maps = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.attend(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()
        found = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.maps(self.between(x))


def losses_of(model: Model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The cross entropy of each token but the first of each document, given those before it."""
    ids, documents = batch["input_ids"], batch["document_ids"]
    scores = model(ids[:, :-1], document_mask(documents[:, :-1]))
    follows = documents[:, 1:] == documents[:, :-1]
    return nn.functional.cross_entropy(scores[follows], ids[:, 1:][follows])


def make_text(path: Path) -> Path:
    """A text of about 300,000 characters in which words follow one another by rules, so that there is something to learn."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        random = torch.Generator().manual_seed(0)
        parts = [["the", "an old", "every", "no"], ["wheel", "miller", "river", "sluice"], ["turns", "waits for", "carries", "hears"],
                 ["the stone", "the water", "the grain", "the night"], ["slowly.", "again.", "at dawn.", "by itself."]]  # fmt: skip
        picks = torch.randint(4, (10_000, len(parts)), generator=random).tolist()
        lines = [" ".join(words[pick] for words, pick in zip(parts, row, strict=True)) for row in picks]
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")
        unfinished.replace(path)
    return path


def characters_of(path: Any) -> CharTokenizer:
    """A tokenizer of the characters that the texts have, so that ids are few."""
    with TextDataset(path, max_length=None) as texts:
        return CharTokenizer({letter for index in range(len(texts)) for letter in set(texts.text_of(index))})


def pieces_of(path: Any, size: int) -> Any:
    """A byte-level BPE tokenizer of `size` pieces, trained on the texts."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ConfigError("--bpe needs the package `tokenizers`: pip install tokenizers") from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    with TextDataset(path, max_length=None) as texts:
        tokenizer.train_from_iterator((texts.text_of(index) for index in range(len(texts))), trainer)
    return tokenizer


def open_blocks(given: argparse.Namespace, tokenizer: Any, mode: str) -> Any:
    """All blocks; a packed file brings its own tokens."""
    options = {} if tokenizer is None else {"tokenizer": tokenizer}
    if given.cache_dir is not None:
        options["cache_dir"] = given.cache_dir
    return TextDataset(given.path, max_length=given.length, packing=True, loading_mode=LoadingMode(mode), seed=given.seed, **options)


def kinds_of(blocks: Any) -> int:
    """How many kinds of tokens a model needs; of a packed file, whose tokenizer may have more or be unknown, what it holds."""
    if hasattr(blocks.tokenizer, "get_vocab_size"):
        return int(blocks.tokenizer.get_vocab_size())
    if blocks.tokenizer is not None and blocks.tokenizer.characters is not None:
        return int(blocks.tokenizer.vocab_size)
    return 1 + max((int(block["input_ids"].max()) for block in blocks), default=0)


def perplexity(model: Model, loader: Loader) -> float:
    """Of the blocks that are held out."""
    model.eval()
    with torch.no_grad():
        found = [losses_of(model, batch).item() for batch in loader]
    model.train()
    return math.exp(sum(found) / len(found))


def endless(loader: Loader) -> Iterator[Any]:
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def train(given: argparse.Namespace, tokenizer: Any, mode: str) -> list[float]:
    """Trains in one mode; the perplexities, the first before any training."""
    seed_everything(given.seed, deterministic=True)
    start = time.perf_counter()
    blocks = open_blocks(given, tokenizer, mode)
    size = kinds_of(blocks)
    held_out, seen = blocks.split(HELD_OUT, seed=given.seed)
    held_out = held_out.subset(range(min(len(held_out), given.measured)))
    options: dict[str, Any] = {"batch_size": given.batch_size, "seed": given.seed, "device": given.device}
    loader = create_dataloader(seen, shuffle="block", drop_last=len(seen) >= given.batch_size, num_workers=given.workers, **options)
    measured = create_dataloader(held_out, shuffle=False, num_workers=0, pad=False, **options)
    try:
        if not len(seen) or not len(held_out):
            raise ConfigError(f"{len(blocks):,} blocks of {given.length} tokens are too few to hold some out: take a smaller --length")
        model = Model(size, given.length).to(given.device)
        optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=given.steps, pct_start=0.1)
        print(
            f"{mode}: {len(seen):,} blocks of {given.length} tokens of {size:,} kinds, {time.perf_counter() - start:.2f} s to open",
            flush=True,
        )
        found, began, batches = [perplexity(model, measured)], time.perf_counter(), endless(loader)
        print(f"  {mode:<9}  step {0:>4}   perplexity {found[0]!r}", flush=True)
        for step in range(1, given.steps + 1):
            loss = losses_of(model, next(batches))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            if step % given.every == 0 or step == given.steps:
                speed = step * given.batch_size * given.length / (time.perf_counter() - began)
                found.append(perplexity(model, measured))
                waited = loader.get_stats()["wait_fraction"]
                print(
                    f"  {mode:<9}  step {step:>4}   perplexity {found[-1]!r:<20} {speed:>9,.0f} tokens/s   waited {waited:.0%}", flush=True
                )
        return found
    finally:
        for one in (loader, measured, blocks):
            one.close()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small language model on blocks of texts.")
    parser.add_argument("path", nargs="?", type=Path, help="folder of texts, a text, or a packed tokens.h5; without: makes a text")
    parser.add_argument("--mode", choices=MODES, help="without: all four, one after the other, with the same seeds")
    parser.add_argument("--bpe", type=int, metavar="SIZE", help="pieces of words, so many, instead of characters")
    parser.add_argument("--steps", type=int, default=200, help="batches to learn from (200)")
    parser.add_argument("--every", type=int, default=50, help="steps from one measurement to the next (50)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a block (128)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--measured", type=int, default=128, help="blocks that are held out, at most (128)")
    parser.add_argument("--workers", type=int, help="worker processes; without: chosen by headrace")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--cache-dir", type=Path, help="where tokens are kept (the user's cache folder)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the text that is made (./out)")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    if min(given.steps, given.every, given.batch_size, given.measured) < 1 or given.length < 2 or (given.bpe or 256) < 256:
        parser.error("--steps, --every, --batch-size and --measured must be at least 1, --length 2, and --bpe 256")
    if given.device == "auto":
        given.device = "cuda" if torch.cuda.is_available() else "cpu"
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    try:
        if given.path is None:
            given.path = make_text(given.out / "mill.txt")
        print(f"training on {given.path}, torch {torch.__version__} on {given.device}", flush=True)
        tokenizer = None
        if given.path.suffix != ".h5":
            tokenizer = characters_of(given.path) if given.bpe is None else pieces_of(given.path, given.bpe)
        runs = {mode: train(given, tokenizer, mode) for mode in ([given.mode] if given.mode else MODES)}
    except HeadraceError as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    first, *_, last = next(iter(runs.values()))
    print(f"\nperplexity of blocks that were held out: {first:.1f} before, {last:.2f} after ({first / last:.1f} times less)")
    equal = all(found == runs[next(iter(runs))] for found in runs.values())
    if len(runs) > 1:
        print(f"perplexities equal in all modes: {'yes' if equal else 'no'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
