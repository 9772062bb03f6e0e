"""Datasets of integers that several tests load."""

from collections.abc import Iterator

from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset[int]):
    """`n` integers from `first` on."""

    def __init__(self, n: int = 12, first: int = 0) -> None:
        self.n, self.first = n, first

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return self.first + index


class Stream(IterableDataset[int]):
    """Integers whose number nobody knows beforehand, the same in each worker."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))
