"""Streams tar shards from an HTTP server, stops in the middle of an epoch, and goes on: each sample
comes exactly once.

python examples/stream_shards.py  # shards of its own, behind a server on this machine
# shards with "jpg" and "cls", all images of one size
python examples/stream_shards.py "https://server/train-{0000..0127}.tar"

Needs `pip install "headrace[http]"`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from serve_shards import make_shards, served

from headrace import HeadraceError, StreamingDataset, create_dataloader


def stream(url: str, given: argparse.Namespace) -> None:
    def make_loader() -> Any:
        dataset = StreamingDataset(url, buffer_size=200, cache_dir=given.out / "cache")
        return create_dataloader(dataset, batch_size=16, seed=7, num_workers=given.workers)

    seen = Counter[str]()
    with make_loader() as loader:
        print(f"{url}: {len(loader.dataset):,} samples, {len(loader)} batches")
        # {"jpg": uint8 [16, 3, H, W], "cls": int64 [16], "__key__": [...], ...}
        for number, batch in enumerate(loader, 1):
            seen.update(batch["__key__"])
            if number == 1:
                print(
                    f"first batch: jpg {tuple(batch['jpg'].shape)}, cls {batch['cls'][:8].tolist()}"
                )
            if number == len(loader) // 2:
                break
        state = loader.state_dict()
    with make_loader() as loader:  # as another job would
        loader.load_state_dict(state)
        for batch in loader:
            seen.update(batch["__key__"])
        once = len(seen) == len(loader.dataset) and set(seen.values()) == {1}
        print(
            f"stopped after batch {state['batches']}, went on: {len(seen):,} samples, each "
            f"exactly once: {'yes' if once else 'NO'}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "url", nargs="?", help="without: shards are made in --out, and served from there"
    )
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("out") / "stream")
    given = parser.parse_args()
    try:
        with (
            contextlib.nullcontext(given.url)
            if given.url
            else served(make_shards(given.out, given.images)) as url
        ):
            stream(url, given)
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
