"""The finished samples of a foreign dataset as records.

`FinishedSamples` is their source: each is read under random numbers of its own, and is at once made
a `PackedSample`, which shares no memory with the dataset. `Finished` is the dataset over it.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset

from headrace.arguments import described
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.format import SampleFormat
from headrace.datasets.wrapped import answers_batches, parts_of
from headrace.errors import ConfigError
from headrace.memory.anonymous import up
from headrace.memory.per_process import PerProcess
from headrace.memory.tree import is_dense, reduced
from headrace.order.request import BatchRequest, working_on
from headrace.order.seeding import SampleSeeder, preserved_rng, rng_states
from headrace.storage.source import Source

ALONE: Final[Any] = type("Alone", (), {"__repr__": lambda self: "ALONE"})()
"""The target of a finished sample that is no pair of input and target."""


class FinishedFormat(SampleFormat):
    """Samples that another dataset has finished: pairs of input and target where they are tuples of
    two, else inputs as a whole.

    Args:
        needs_pairs: True if transforms are called that get a target.
    """

    stores_values = False
    splits_targets = True
    always_pairs = True
    makes_plain_samples = False

    def __init__(self, needs_pairs: bool) -> None:
        self._needs_pairs = needs_pairs

    def split_target(
        self, value: PackedSample, index: int, dataset: BaseDataset
    ) -> tuple[Any, Any]:
        sample = value.open()
        if type(sample) is tuple and len(sample) == 2:
            return sample
        if self._needs_pairs:
            raise ConfigError(
                f"target_transform and transforms have no meaning here: sample {index} is no "
                "tuple of two, and so has no target; "
                "transform= gets it as a whole"
            )
        return sample, ALONE

    def make_sample(self, value: Any, target: Any, has_target: bool) -> Any:
        return value if target is ALONE else (value, target)


class Finished(BaseDataset):
    """The samples of any map-style dataset, as that dataset gives them.

    Args:
        dataset: has ``__getitem__`` and ``__len__``.
        seed: of what it draws at random.
        needs_pairs: see `FinishedFormat`.
    """

    def __init__(self, dataset: Any, seed: int, needs_pairs: bool = False) -> None:
        source = FinishedSamples(dataset, seed)
        super().__init__(
            source,
            sample_format=FinishedFormat(needs_pairs),
            targets=_targets_of(dataset, len(source)),
            seed=seed,
        )
        self.fork_safe: bool = all(getattr(part, "fork_safe", True) for part in parts_of(dataset))
        for name in ("classes", "class_to_idx"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))
        self.name: str = type(dataset).__name__
        self._has_fingerprint = isinstance(getattr(dataset, "fingerprint", None), str)

    def held_as(self) -> str:
        if not self._has_fingerprint:
            raise ConfigError(
                "shared='machine': nobody can tell whether another process holds the samples of "
                f"the same {self.name}: give it an "
                "attribute `fingerprint`, a text that says what its samples are"
            )
        return f"finished samples of {self.name}, seed {self.seed}"


class FinishedSamples(Source):
    """A foreign dataset's samples as records.

    What a sample draws at random depends on (seed, its index) alone: not on the epoch, the process,
    nor the samples around it. So does what headrace's own datasets inside of it draw.

    Args:
        dataset: has ``__getitem__`` and ``__len__``; ``__getitems__`` is used where there is one.
        seed: of the random numbers.

    Raises:
        ConfigError: it is no map-style dataset.
    """

    # the random generators of a process are common to its threads, and who knows about the dataset
    thread_safe = False

    def __init__(self, dataset: Any, seed: int) -> None:
        self._length = _length_of(dataset)
        self._dataset, self._seed = dataset, seed
        self._answers_batches = answers_batches(dataset)
        self._reset()

    def _reset(self) -> None:
        self._draws = False
        self._seeder: SampleSeeder | None = None
        # a thread of the parent may hold the parent's while it forks
        self._lock = PerProcess(threading.Lock)

    def __len__(self) -> int:
        return self._length

    def read(self, indices: Sequence[int]) -> list[PackedSample]:
        with self._lock.get(), working_on(BatchRequest((), self._seed, 0)):
            wanted, seeder = [int(i) for i in indices], self._seeder or SampleSeeder(self._dataset)
            with preserved_rng(seeder):
                packed = self._read(wanted, seeder)
            if self._seeder is None:
                self._seeder = SampleSeeder(self._dataset)
                # some datasets make their generators when they are first read
                if len(self._seeder.generators) != len(seeder.generators):
                    with preserved_rng(self._seeder):
                        packed = self._read(wanted, self._seeder)
            return packed

    def _read(self, indices: list[int], seeder: SampleSeeder) -> list[PackedSample]:
        if self._answers_batches and len(indices) > 1 and not self._draws:
            before = rng_states(seeder)
            samples = self._batch(indices)
            if rng_states(seeder) == before:
                return [PackedSample.of(sample) for sample in samples]
            # random numbers that depend on the whole batch: each sample has to be read by itself
            self._draws = True
        packed = []
        for index in indices:
            seeder(self._seed, 0, index)
            packed.append(
                PackedSample.of(
                    self._batch([index])[0] if self._answers_batches else self._dataset[index]
                )
            )
        return packed

    def _batch(self, indices: list[int]) -> Sequence[Any]:
        samples: Sequence[Any] = self._dataset.__getitems__(indices)
        if len(samples) != len(indices):
            raise ValueError(f"__getitems__ gave {len(samples)} samples for {len(indices)} indices")
        return samples

    def location(self, index: int) -> str:
        return f"{type(self._dataset).__name__}[{index}]"

    def fingerprint(self) -> str:
        own = getattr(self._dataset, "fingerprint", None)
        if isinstance(own, str):
            return own
        name = f"{type(self._dataset).__module__}.{type(self._dataset).__qualname__} {self._length}"
        return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("_draws", "_seeder", "_lock")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


class PackedSample:
    """A sample of any structure: its pickle, and behind one another the bytes of its arrays and
    tensors.

    Each `open` gives the same structure with types, dtypes, shapes and bits, over the memory of
    this object. A tensor takes its own bytes, and not those of the storage that it is a view of.
    """

    __slots__ = ("data", "head", "sizes")

    def __init__(self, head: bytes, sizes: list[int], data: npt.NDArray[np.uint8]) -> None:
        self.head: bytes = head
        self.sizes: list[int] = sizes
        self.data: npt.NDArray[np.uint8] = data

    @classmethod
    def of(cls, sample: Any) -> PackedSample:
        """A copy of a sample.

        Raises:
            TypeError: it can't be pickled; the message names the types in it.
        """
        pieces: list[memoryview] = []
        file = io.BytesIO()
        try:
            _Pickler(
                file, protocol=5, buffer_callback=lambda buffer: pieces.append(buffer.raw())
            ).dump(sample)
        except MemoryError:
            raise
        except Exception as error:
            raise TypeError(
                f"a sample must be picklable, so that it can be held, and {_type_of(sample)} is "
                f"not: {error}"
            ) from error
        sizes = [piece.nbytes for piece in pieces]
        packed = cls(file.getvalue(), sizes, np.empty(sum(map(up, sizes)), np.uint8))
        for buffer, piece in zip(packed._buffers(), pieces, strict=True):
            buffer[:] = np.frombuffer(piece, np.uint8)
        return packed

    def open(self) -> Any:
        """The sample. A second one from the same object would share its memory."""
        return pickle.loads(self.head, buffers=self._buffers())

    def _buffers(self) -> Iterator[npt.NDArray[np.uint8]]:
        at = 0
        for size in self.sizes:
            yield self.data[at : at + size]
            at += up(size)

    @property
    def nbytes(self) -> int:
        """Bytes of the sample."""
        return len(self.head) + self.data.nbytes

    def __len__(self) -> int:
        return self.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedSample, (self.head, self.sizes, self.data)


class _Pickler(pickle.Pickler):
    """Takes the bytes of plain tensors out of the pickle, as NumPy's arrays do by themselves."""

    def reducer_override(self, value: Any) -> Any:
        if not is_dense(value):
            return reduced(value)
        # a size of 1 keeps any stride
        flat = value.resolve_conj().resolve_neg().contiguous().as_strided((value.numel(),), (1,))
        return _tensor, (
            pickle.PickleBuffer(flat.view(torch.uint8).numpy().data),
            value.dtype,
            tuple(value.shape),
        )


def _tensor(
    data: npt.NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    if not data.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(data).view(dtype).reshape(shape)


def _type_of(sample: Any) -> str:
    items = (
        sample.values()
        if isinstance(sample, dict)
        else sample
        if isinstance(sample, (tuple, list))
        else ()
    )
    inside = ", ".join(dict.fromkeys(type(item).__name__ for item in items))
    return f"{type(sample).__name__} of {inside}" if inside else type(sample).__name__


def _length_of(dataset: Any) -> int:
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"data_path: {name} is an IterableDataset, which gives no sample by index: pass a "
            "map-style dataset, or a path"
        )
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"data_path: {name} is a mapping, whose keys are no indices: pass one of its values, "
            "or a path"
        )
    wanted = "pass a path, or a dataset with __getitem__ and __len__"
    if isinstance(dataset, type):
        raise ConfigError(f"data_path: {dataset.__name__} is a class: {wanted}")
    missing = [method for method in ("__getitem__", "__len__") if not hasattr(dataset, method)]
    if missing:
        what = described(dataset)
        raise ConfigError(
            f"data_path: {what} is no path and no map-style dataset, for it has no "
            f"{' and no '.join(missing)}: {wanted}"
        )
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise ConfigError(f"data_path: {name} has no length ({error}): {wanted}") from error


def _targets_of(dataset: Any, length: int) -> Any:
    """The `targets` of a foreign dataset, if they are one for each sample."""
    targets: Any = getattr(dataset, "targets", None)
    if isinstance(targets, torch.Tensor):
        targets = targets.numpy(force=True)
    is_column = isinstance(targets, (list, tuple)) or (
        isinstance(targets, np.ndarray) and targets.ndim
    )
    return targets if is_column and len(targets) == length else None
