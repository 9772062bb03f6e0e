"""Trains a small language model on texts, and measures its perplexity on blocks of them that it has
not seen.

    python examples/train_text.py                              # a text of its own, in ./out
    # a folder of texts, or a packed tokens.h5 of any tokenizer
    python examples/train_text.py books --mode streaming

Texts are cut into blocks of tokens, whatever document they are of. `document_mask` keeps a token
from seeing another document.
"""

import argparse
import itertools
import math
import os
from pathlib import Path

# torch's threads leave their cores to the workers instead of spinning
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from make_text import make_text
from torch import nn

from headrace import (
    CharTokenizer,
    HeadraceError,
    Loader,
    TextDataset,
    create_dataloader,
    seed_everything,
)
from headrace.collate import document_mask


class Model(nn.Module):
    """A transformer of a few hundred thousand parameters, which gives a score to each token that
    could be the next.
    """

    def __init__(self, vocabulary: int, length: int, width: int = 96) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, 2, nn.LayerNorm(width), enable_nested_tensor=False
        )
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The scores [batch, length, vocabulary]; the mask [batch, 1, length, length] is True
        where a token sees another.
        """
        hidden = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        # one of each of 4 heads
        return self.layers(hidden, ~mask.repeat(1, 4, 1, 1).flatten(0, 1)) @ self.tokens.weight.T


def loss_of(model: Model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The cross entropy of each token but the first of each document, given those before it."""
    ids, documents = batch["input_ids"], batch["document_ids"]  # int64 [batch, length]
    scores = model(ids[:, :-1], document_mask(documents[:, :-1]))
    follows = documents[:, 1:] == documents[:, :-1]
    return nn.functional.cross_entropy(scores[follows], ids[:, 1:][follows])


def perplexity(model: Model, loader: Loader) -> float:
    with torch.no_grad():
        losses = [loss_of(model, batch).item() for batch in loader]
    return math.exp(sum(losses) / len(losses))


def train(given: argparse.Namespace) -> None:
    seed_everything(given.seed, deterministic=True)
    path, tokenizer = given.path or make_text(Path("out") / "mill.txt"), None
    if path.suffix != ".h5":  # a packed file has its tokens
        with TextDataset(path, max_length=None) as texts:
            tokenizer = CharTokenizer(
                {letter for index in range(len(texts)) for letter in set(texts.text_of(index))}
            )
    options = {"max_length": given.length, "packing": True, "seed": given.seed} | (
        {"tokenizer": tokenizer} if tokenizer else {}
    )
    blocks = TextDataset(path, loading_mode=given.mode, **options)
    vocabulary = (
        len(tokenizer) if tokenizer else 1 + max(int(block["input_ids"].max()) for block in blocks)
    )
    unseen, seen = blocks.split(0.05, seed=given.seed)
    options = {
        "batch_size": given.batch_size,
        "num_workers": given.workers,
        "seed": given.seed,
        "device": given.device,
    }
    loader = create_dataloader(
        seen, shuffle="block", drop_last=len(seen) >= given.batch_size, **options
    )
    measured = create_dataloader(
        unseen.subset(range(min(len(unseen), 128))), shuffle=False, pad=False, **options
    )
    model = Model(vocabulary, given.length).to(given.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    print(
        f"{path}: {len(seen):,} blocks of {given.length} tokens of {vocabulary:,} kinds, torch "
        f"{torch.__version__}",
        flush=True,
    )
    # each epoch in an order of its own
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    with blocks, loader, measured:
        for step in range(given.steps + 1):
            if step % 50 == 0 or step == given.steps:
                print(
                    f"step {step:>4}   perplexity of unseen blocks {perplexity(model, measured)!r}",
                    flush=True,
                )
            if step < given.steps:
                loss = loss_of(model, next(batches))
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", nargs="?", type=Path, help="without: a text is made, in ./out")
    parser.add_argument("--mode", default="lazy", help="lazy, eager, cached or streaming")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in (
        ("steps", 200),
        ("length", 128),
        ("batch-size", 16),
        ("seed", 42),
        ("workers", None),
    ):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            help=f"default: {default or 'chosen by headrace'}",
        )
    try:
        train(parser.parse_args())
    except HeadraceError as error:
        parser.exit(2, f"error: {str(error).splitlines()[0]}\n")


if __name__ == "__main__":
    main()
