"""Makes finished samples of decoded values: splits off the target, seeds the generators, calls
the transforms (law 1).
"""

from __future__ import annotations

import copy
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils.data import get_worker_info

from headrace.datasets.core.format import SampleFormat
from headrace.datasets.core.reader import nothing_readable
from headrace.datasets.core.warnings import naming
from headrace.datasets.wrapped import parts_of
from headrace.errors import ConfigError, FormatError, SampleError, warn
from headrace.order.request import BatchRequest
from headrace.order.seeding import (
    SampleSeeder,
    preserved_rng,
    random_names,
    rng_states,
    warn_off_main_thread,
)

Key = tuple[int, int, int, int]
"""What the random numbers of a sample follow from: seed, epoch, index in the whole dataset, and
how often the order drew it before.
"""
_WITHOUT_GENERATORS = (
    "sample_source",
    "sample_reader",
    "sample_finisher",
    "left_of_budget",
    "block_memory",
)


class Finisher:
    """Finishes the samples of a dataset, and seeds the random generators that its transforms draw
    from.

    It belongs to one dataset or view, which its methods are given and whose indices requests have.
    It is not pickled: a copy of the dataset holds copies of the generators.
    """

    def __init__(self) -> None:
        self._seeder: SampleSeeder | None = None
        self._seeded: tuple[Any, ...] = ()  # the transforms that the seeder knows
        # the transforms have not been called since the seeder looked for generators
        self._is_untried = True
        self._has_warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Finisher, ()

    def finish(
        self, dataset: Any, request: BatchRequest, values: list[Any], is_plain: bool = False
    ) -> tuple[list[Any], list[int]]:
        """The samples of a batch without those that are left out, and the index of each.

        Args:
            request: names the samples.
            values: for each the decoded value, or a SampleError. Emptied: decoded and finished
                samples of a whole batch need not be there at once.
            is_plain: True under a plain DataLoader, which names no epoch.

        Raises:
            SampleError: none of the samples can be read.
        """
        failure: SampleError | None = None
        is_random, format_, replacement = (
            is_random_in(dataset),
            dataset.sample_format,
            dataset.sample_reader.replacement,
        )
        may_repeat = is_plain and is_random and dataset.may_repeat_draws(len(request))
        samples: list[Any] = []
        indices: list[int] = []
        with self._restoring(dataset, is_random):
            last, seconds, clock = None, [0.0] * len(values), time.perf_counter
            start = clock()
            for number, (index, value) in enumerate(zip(request, values, strict=True)):
                if not isinstance(value, SampleError):
                    last = _key(dataset, request, number)
                    value = self._finish(
                        dataset, format_, index, value, last if is_random else None
                    )
                values[number], made = None, [value]
                if isinstance(value, SampleError):
                    failure, made = (
                        failure or value,
                        replacement(index, dataset.source_of(index), value),
                    )
                samples += made
                indices += [index] * len(made)
                now = clock()
                seconds[number], start = now - start, now
            dataset.sample_reader.count_each("transform", seconds)
            dataset.sample_reader.counts["transform_seconds"] += sum(seconds)
            if last is not None and may_repeat and not self._has_warned:
                self._warn_of_repeats(dataset, last)
        if failure is not None and not samples:
            raise nothing_readable(failure, len(request))
        return samples, indices

    def draw(
        self, dataset: Any, request: BatchRequest, value: Callable[[int], Any]
    ) -> Sequence[Any]:
        """What the format draws for each sample, or the SampleError that it met; `value` gives
        that of a position in the batch.
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
                seeder(*_key(dataset, request, number))
                try:
                    with naming(format_.decodes_late, dataset.source_of, index):
                        drawn.append(format_.draw(given))
                except FormatError as error:
                    if not format_.decodes_late:
                        raise
                    drawn.append(
                        dataset.sample_reader.failed(
                            int(dataset.whole_indices(index)), "can't be decoded", error
                        )
                    )
        return drawn

    @contextmanager
    def _restoring(self, dataset: Any, is_random: bool) -> Iterator[None]:
        """In the training's own process: the random generators go on afterwards as if nothing
        had been drawn.
        """
        if not is_random or get_worker_info() is not None:
            yield
            return
        warn_off_main_thread()
        with preserved_rng(self.seeder(dataset)):
            yield

    def _finish(
        self, dataset: Any, format_: SampleFormat, index: int, value: Any, key: Key | None
    ) -> Any:
        """The finished sample; or a SampleError, where it turned out here that it can't be
        decoded. (`key`: of its random numbers.)
        """
        try:
            value, target = dataset.split_target(index, value)
            with naming(format_.names_warnings, dataset.source_of, index):
                if key is None:
                    value, target = format_.to_pair(value, target)
                else:
                    value, target = self._call_seeded(dataset, format_, value, target, key)
            sample = dataset.make_sample(value, target)
        except Exception as error:
            if format_.decodes_late and isinstance(error, FormatError):
                return dataset.sample_reader.failed(
                    int(dataset.whole_indices(index)), "can't be decoded", error
                )
            error.add_note(
                f"headrace: while transforming sample {index} ({dataset.source_of(index)})"
            )
            raise
        return _with_index(sample, index) if dataset.return_index else sample

    def _call_seeded(
        self, dataset: Any, format_: SampleFormat, value: Any, target: Any, key: Key
    ) -> tuple[Any, Any]:
        seeder = self.seeder(dataset)
        untouched = copy.deepcopy((value, target)) if self._is_untried else None
        seeder(*key)
        made = _call(dataset, *format_.to_pair(value, target))
        if untouched is not None:
            self._is_untried = False
            now = SampleSeeder(*dataset.seeded_objects())
            # some transforms make theirs when they are first called: draw again
            if len(now.generators) != len(seeder.generators):
                self._seeder = now
                now(*key)
                made = _call(dataset, *format_.to_pair(*untouched))
        return made

    def seeder(self, dataset: Any) -> SampleSeeder:
        """Seeds whatever the dataset's transforms draw from."""
        transforms = transforms_of(dataset)
        # equal ones hold other generators
        if self._seeder is None or not all(map(operator.is_, self._seeded, transforms)):
            self._seeder, self._seeded, self._is_untried = (
                SampleSeeder(*dataset.seeded_objects()),
                transforms,
                True,
            )
        return self._seeder

    def _warn_of_repeats(self, dataset: Any, key: Key) -> None:
        """Warns if the transforms of the last sample drew anything: they draw the same in each
        epoch that nobody names.
        """
        self._has_warned = True
        after = rng_states()
        self.seeder(dataset)(*key)
        if rng_states() != after:
            warn(
                f"{type(dataset).__name__}: the random transforms draw the same numbers in each "
                "epoch, since nobody says which epoch it "
                "is: call dataset.set_epoch(epoch) before each one, or use "
                "headrace.create_dataloader, which does"
            )


def _key(dataset: Any, request: BatchRequest, number: int) -> Key:
    return (
        request.seed,
        request.epoch,
        dataset.seed_index(request[number]),
        request.draws[number] if request.draws else 0,
    )


def transforms_of(dataset: Any) -> tuple[Any, Any, Any]:
    """The callables that a user gave."""
    return dataset.transforms, dataset.transform, dataset.target_transform


def is_transformed(dataset: Any) -> bool:
    """True if the user gave a transform."""
    return not (dataset.transforms is dataset.transform is dataset.target_transform is None)


def public_attributes(dataset: Any) -> dict[str, Any]:
    """The attributes of a dataset that may hold random generators which transforms draw from."""
    own = {
        name: value
        for name, value in vars(dataset).items()
        if not (name.startswith("_") or name in _WITHOUT_GENERATORS)
    }
    return {**own, "on_error": dataset.on_error}


def is_random_in(dataset: Any) -> bool:
    """True if finishing a sample may draw random numbers."""
    return dataset.sample_format.draws or is_transformed(dataset)


def random_steps_in(dataset: Any) -> list[str]:
    """The names of what transforms samples at random in a dataset, headrace's or another, and in
    those inside of it.
    """
    holders = list[Any]()
    for part in parts_of(dataset):
        sample_format = getattr(part, "sample_format", None)
        holders += sample_format.random_steps() if isinstance(sample_format, SampleFormat) else []
        holders += [
            getattr(part, name, None) for name in ("transforms", "transform", "target_transform")
        ]
    return random_names(*holders)


def _call(dataset: Any, value: Any, target: Any) -> tuple[Any, Any]:
    if dataset.transforms is not None:
        value, target = dataset.transforms(value, target)
    if dataset.transform is not None:
        value = dataset.transform(value)
    if dataset.target_transform is not None:
        target = dataset.target_transform(target)
    return value, target


def _with_index(sample: Any, index: int) -> Any:
    if isinstance(sample, dict):
        if "index" in sample:
            raise ConfigError(
                "samples have a field 'index' of their own, which return_index=True would "
                "replace: rename or omit it"
            )
        return {**sample, "index": index}
    return (*sample, index) if type(sample) is tuple else (sample, index)
