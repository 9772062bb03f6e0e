"""A torch sampler that yields one rank's share of an order.

`OrderSampler` is a `torch.utils.data.DistributedSampler`, so that trainers and loops which look for
one find it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch.utils.data
from numpy.typing import ArrayLike

from headrace.arguments import check_integer, checks_keywords
from headrace.errors import StateError
from headrace.order.base import Order, Shuffle
from headrace.order.epoch import DEFAULT_TURNS, EpochOrder
from headrace.order.ranks import RankBatches
from headrace.order.shares import check_shared_once
from headrace.order.world import detect_world

STATE_VERSION = 1


class OrderSampler(torch.utils.data.DistributedSampler[int]):
    """Yields one rank's indices of an epoch, for the `sampler` argument of a DataLoader.

    ```python
    sampler = OrderSampler(dataset, batch_size=64, seed=7)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader: ...
    ```

    Without `set_epoch` the same epoch repeats, as with torch's sampler. torch.distributed need not
    be initialised.

    The state counts the global batches whose last index was yielded. A DataLoader with workers
    requests indices in advance, so the state may be some batches ahead of the training loop. The
    loader of `headrace.create_dataloader` counts received batches instead.

    With ``pad=False`` the ranks' last batches are changed so that all ranks have equally many (see
    `order.ranks`), but a DataLoader with `batch_size` forms batches itself. Pass a `RankBatches` as
    `batch_sampler` in this case.

    Args:
        dataset: the dataset, of which only the length is used, or the length itself.
        batch_size: number of samples per batch and rank, as passed to the DataLoader. It only
            defines the global batch.
        shuffle, seed, blocks, interleave, turns: see `EpochOrder`.
        rank, world_size: number of this rank, and number of ranks. None: see `detect_world`.
        drop_last: drop the incomplete global batch (torch's sampler drops only what is not
            divisible by the world size).
        pad: see `RankBatches`.
        order: an order of another kind, such as a `WeightedOrder`, made for the global batch;
            `shuffle`, `seed`, `blocks`, `interleave` and `turns` are then ignored.

    Attributes:
        dataset: the dataset, or a range of the length.
        num_replicas: the world size.
        rank, epoch, shuffle, seed, drop_last: the arguments, or the detected values.
        num_samples: number of indices of this rank in an epoch.
        total_size: number of indices of all ranks in an epoch, padding included.
        batches: the `RankBatches` of the current epoch.

    Raises:
        ConfigError: an argument is invalid.
    """

    @checks_keywords
    def __init__(
        self,
        dataset: Sized | int,
        *,
        batch_size: int = 1,
        shuffle: Shuffle = True,
        seed: int = 42,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        pad: bool = True,
        blocks: ArrayLike | None = None,
        interleave: int | None = None,
        turns: int = DEFAULT_TURNS,
        order: Order | None = None,
    ) -> None:
        world = detect_world(rank, world_size)
        if not isinstance(dataset, Sized):
            dataset = range(check_integer("dataset", dataset, 0))
        if order is None:
            order = EpochOrder(
                len(dataset),
                shuffle=shuffle,
                seed=seed,
                blocks=blocks,
                global_batch=batch_size * world.world_size,
                interleave=interleave,
                turns=turns,
            )
        super().__init__(
            dataset,  # type: ignore[arg-type]  # only its length counts
            num_replicas=world.world_size,
            rank=world.rank,
            shuffle=bool(order.shuffle),
            seed=order.seed,
            drop_last=drop_last,
        )
        self.batches: RankBatches = RankBatches(
            order, world.rank, world.world_size, batch_size, drop_last=drop_last, pad=pad
        )
        self.num_samples: int = self.batches.num_samples
        self.total_size: int = self.batches.total_size
        # "block" and its like count as true
        self.shuffle: bool | str = order.shuffle  # type: ignore[assignment]
        self._handed_out = 0  # global batches of the running iteration
        self._resume_at = 0  # global batch that the next iteration begins with

    def __len__(self) -> int:
        """Number of indices of a whole epoch on this rank, also if an iteration resumes within
        one.
        """
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        check_shared_once(self, self.batches.world_size)
        step = self._resume_at
        self._resume_at = 0
        self._handed_out = step
        return self._iterate(self.batches, step)

    def _iterate(self, batches: RankBatches, step: int) -> Iterator[int]:
        for number, indices in enumerate(batches.iter_from(step), step + 1):
            *others, last = indices.tolist()
            yield from others
            self._handed_out = number  # before the yield: who holds the last index has the batch
            yield last

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration. If it differs from the current one, a loaded
        position is dropped.
        """
        epoch = check_integer("epoch", epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            self.batches = self.batches.with_epoch(epoch)
            self._handed_out = self._resume_at = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state: plain values, the same on every rank.

        Returns:
            ``version``, ``epoch``, ``step`` (number of global batches yielded), ``samples`` (number
            of samples in them, over all ranks),
                and the parameters of the order.
        """
        return {
            "version": STATE_VERSION,
            "epoch": int(self.epoch),
            "step": self._handed_out,
            "samples": self.batches.samples_before(self._handed_out),
            "order": self._parameters(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a saved state: the next iteration starts with the first batch that was not
        yielded.

        The world size may differ from that of the saved state if it divides the global batch. After
        a state that was saved at the end of an epoch the next iteration is empty, unless
        `set_epoch` sets another epoch first.

        Args:
            state: the result of `state_dict`.

        Raises:
            StateError: the state has another version, or belongs to an order with other parameters;
                nothing is changed then.
        """
        if state.get("version") != STATE_VERSION:
            raise StateError(
                f"the state has version {state.get('version')!r}, this sampler reads "
                f"{STATE_VERSION}"
            )
        counts: list[Any] = [state.get(name) for name in ("epoch", "step", "samples")]
        saved = state.get("order")
        are_counts = all(type(count) is int and count >= 0 for count in counts)
        if not are_counts or not isinstance(saved, Mapping):
            raise StateError(f"the state is damaged: {dict(state)!r}")
        epoch, step, samples = counts
        differences = [
            f"{name}: {saved.get(name)!r} saved, {own!r} here"
            for name, own in self._parameters().items()
            if saved.get(name) != own
        ]
        if differences:
            raise StateError(f"the state is of another order ({'; '.join(differences)})")
        batches = self.batches.with_epoch(epoch)
        if samples == batches.samples_before(batches.steps):
            step = batches.steps  # the last batch may have another number here
        if batches.samples_before(step) != samples:
            raise StateError(
                f"the state was saved after {samples} samples, where with {self.num_replicas} "
                "ranks no batch ends (with pad=False the last two depend on the world size): load "
                "it with the world size that saved it"
            )
        self.epoch = epoch
        self.batches = batches
        self._handed_out = self._resume_at = step

    def _parameters(self) -> dict[str, Any]:
        parameters = self.batches.order.parameters()
        return {**parameters, "drop_last": self.drop_last, "pad": self.batches.pad}
