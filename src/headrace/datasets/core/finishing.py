"""Makes finished samples of decoded values: splits off the target, seeds the generators, calls the transforms (law 1)."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy.typing as npt
from torch.utils.data import get_worker_info

from headrace.datasets.core.format import SampleFormat
from headrace.datasets.core.reader import SampleReader
from headrace.errors import SampleError, warn
from headrace.order.request import BatchRequest
from headrace.order.seeding import SampleSeeder, preserved_rng, rng_states, warn_off_main_thread


class Finishable(Protocol):
    """A dataset, as far as finishing samples needs it. Indices are those of the dataset itself, which may be a view."""

    transform: Callable[[Any], Any] | None
    target_transform: Callable[[Any], Any] | None
    transforms: Callable[[Any, Any], tuple[Any, Any]] | None
    return_index: bool
    sample_reader: SampleReader

    @property
    def sample_format(self) -> SampleFormat: ...
    def split_target(self, index: int, value: Any) -> tuple[Any, Any]: ...
    def to_input(self, value: Any) -> Any: ...
    def make_sample(self, value: Any, target: Any) -> Any: ...
    def source_of(self, index: int) -> str: ...
    def whole_indices(self, indices: Any) -> npt.NDArray[Any]: ...
    def seed_index(self, index: int) -> int: ...
    def seeded_objects(self) -> Iterator[Any]: ...


class Finisher:
    """Finishes the samples of a dataset, and seeds the random generators that its transforms draw from.

    It belongs to one dataset or view, and is not pickled: a copy of the dataset holds copies of the generators.
    """

    def __init__(self) -> None:
        self._seeder: SampleSeeder | None = None
        self._seeded: tuple[Any, ...] = ()  # the transforms that the seeder knows
        self._is_untried = True  # the transforms have not been called since the seeder looked for generators
        self._has_warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Finisher, ()

    def finish(
        self, dataset: Finishable, request: BatchRequest, values: list[Any], may_repeat: Callable[[], bool]
    ) -> tuple[list[Any], list[int]]:
        """The samples of a batch without those that are left out, and the index of each.

        Args:
            dataset: that the request's indices are of.
            request: says what belongs to the batch.
            values: for each index the decoded value, or a SampleError. Emptied: decoded and finished samples of a whole batch need not be
                there at once.
            may_repeat: says whether the same draws may have come before; asked only if a warning is due.
        """
        is_random, replacement = is_random_in(dataset), dataset.sample_reader.replacement
        samples: list[Any] = []
        indices: list[int] = []
        with self._restoring(dataset, is_random):
            last = None
            for number, (index, value) in enumerate(zip(request, values, strict=True)):
                if not isinstance(value, SampleError):
                    last = request.seed, request.epoch, dataset.seed_index(index), request.draws[number] if request.draws else 0
                    value = self._finish(dataset, index, value, is_random, *last)
                values[number] = None
                made = replacement(index, dataset.source_of(index), value) if isinstance(value, SampleError) else [value]
                samples += made
                indices += [index] * len(made)
            if last is not None and is_random and not self._has_warned and may_repeat():
                self._warn_of_repeats(dataset, *last)
        return samples, indices

    def draw(self, dataset: Finishable, request: BatchRequest, value: Callable[[int], Any]) -> Sequence[Any]:
        """What the format draws for each sample, or the SampleError that it met.

        Args:
            dataset: that the request's indices are of.
            request: says what belongs to the batch.
            value: gives the value of a position in the batch, or a SampleError.
        """
        format_ = dataset.sample_format
        if not format_.draws:
            return [None] * len(request)
        seeder, drawn = self.seeder(dataset), []
        with self._restoring(dataset, True):
            for number, index in enumerate(request):
                given = value(number)
                if isinstance(given, SampleError):
                    drawn.append(given)
                    continue
                seeder(request.seed, request.epoch, dataset.seed_index(index), request.draws[number] if request.draws else 0)
                try:
                    with dataset.sample_reader.naming(int(dataset.whole_indices(index)), format_):
                        drawn.append(format_.draw(given))
                except Exception as error:
                    if not format_.is_decoding_error(error):
                        raise
                    drawn.append(dataset.sample_reader.failed(int(dataset.whole_indices(index)), "can't be decoded", error))
        return drawn

    @contextmanager
    def _restoring(self, dataset: Finishable, is_random: bool) -> Iterator[None]:
        """In the training's own process: the random generators go on afterwards as if nothing had been drawn."""
        if not is_random or get_worker_info() is not None:
            yield
            return
        warn_off_main_thread()
        with preserved_rng(self.seeder(dataset)):
            yield

    def _finish(self, dataset: Finishable, index: int, value: Any, is_random: bool, seed: int, epoch: int, key: int, k: int) -> Any:
        """The finished sample; or a SampleError, where it turned out here that it can't be decoded."""
        try:
            value, target = dataset.split_target(index, value)
            with dataset.sample_reader.naming(int(dataset.whole_indices(index)), dataset.sample_format):
                if is_random:
                    value, target = self._call_seeded(dataset, value, target, seed, epoch, key, k)
                else:
                    value = dataset.to_input(value)
        except Exception as error:
            if dataset.sample_format.is_decoding_error(error):
                return dataset.sample_reader.failed(int(dataset.whole_indices(index)), "can't be decoded", error)
            error.add_note(f"headrace: while transforming sample {index} ({dataset.source_of(index)})")
            raise
        sample = dataset.make_sample(value, target)
        return _with_index(sample, index) if dataset.return_index else sample

    def _call_seeded(self, dataset: Finishable, value: Any, target: Any, seed: int, epoch: int, key: int, k: int) -> tuple[Any, Any]:
        seeder = self.seeder(dataset)
        untouched = copy.deepcopy((value, target)) if self._is_untried else None
        seeder(seed, epoch, key, k)
        made = _call(dataset, dataset.to_input(value), target)
        if untouched is not None:
            self._is_untried = False
            now = SampleSeeder(*dataset.seeded_objects())
            if len(now.generators) != len(seeder.generators):  # some transforms make theirs when they are first called: draw again
                self._seeder = now
                now(seed, epoch, key, k)
                made = _call(dataset, dataset.to_input(untouched[0]), untouched[1])
        return made

    def seeder(self, dataset: Finishable) -> SampleSeeder:
        """Seeds whatever the dataset's transforms draw from."""
        transforms = transforms_of(dataset)
        if self._seeder is None or not all(map(operator.is_, self._seeded, transforms)):  # equal ones hold other generators
            self._seeder, self._seeded, self._is_untried = SampleSeeder(*dataset.seeded_objects()), transforms, True
        return self._seeder

    def _warn_of_repeats(self, dataset: Finishable, seed: int, epoch: int, key: int, k: int) -> None:
        """Warns if the transforms of the last sample drew anything: they draw the same in each epoch that nobody names."""
        self._has_warned = True
        after = rng_states()
        self.seeder(dataset)(seed, epoch, key, k)
        if rng_states() != after:
            warn(
                f"{type(dataset).__name__}: the random transforms draw the same numbers in each epoch, since nobody says which epoch it "
                "is: call dataset.set_epoch(epoch) before each one, or use headrace.create_dataloader, which does"
            )


def transforms_of(dataset: Finishable) -> tuple[Any, Any, Any]:
    """The callables that a user gave."""
    return dataset.transforms, dataset.transform, dataset.target_transform


def is_transformed(dataset: Finishable) -> bool:
    """True if the user gave a transform."""
    return any(transform is not None for transform in transforms_of(dataset))


def public_attributes(dataset: Any) -> dict[str, Any]:
    """The attributes of a dataset that may hold random generators which transforms draw from."""
    own = {name: value for name, value in vars(dataset).items() if name not in ("sample_reader", "sample_finisher")}
    return {**{name: value for name, value in own.items() if not name.startswith("_")}, "on_error": dataset.on_error}


def is_random_in(dataset: Finishable) -> bool:
    """True if finishing a sample may draw random numbers."""
    return dataset.sample_format.draws or is_transformed(dataset)


def _call(dataset: Finishable, value: Any, target: Any) -> tuple[Any, Any]:
    if dataset.transforms is not None:
        value, target = dataset.transforms(value, target)
    if dataset.transform is not None:
        value = dataset.transform(value)
    if dataset.target_transform is not None:
        target = dataset.target_transform(target)
    return value, target


def _with_index(sample: Any, index: int) -> Any:
    if isinstance(sample, dict):
        return {**sample, "index": index}
    return (*sample, index) if type(sample) is tuple else (sample, index)
