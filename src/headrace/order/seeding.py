"""Seeds the random generators that a sample's transform draws from.

The seeds follow from (seed, epoch, index, k), whichever process transforms the sample, and whatever
it did before.
"""

from __future__ import annotations

import logging
import operator
import os
import pickle
import random
import struct
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch

from headrace.arguments import checks_keywords
from headrace.errors import warn

Generator: TypeAlias = np.random.Generator | np.random.RandomState | random.Random | torch.Generator

_GLOBAL: tuple[Generator, ...] = (random._inst, np.random.mtrand._rand, torch.default_generator)
_MAX_DEPTH = 12
_MAX_ITEMS = 1_000  # of a container: a dataset may hold a list of all its samples
_MAX_OBJECTS = 100_000
_PLAIN = (int, float, complex, str, bytes, bytearray, range, os.PathLike, type(None))
# from these, everything that is loaded can be reached
_OF_PROGRAM = (types.ModuleType, type, logging.Logger)
_OPAQUE = (*_PLAIN, *_OF_PROGRAM, np.ndarray, np.generic, torch.Tensor)
_RANDOM = {"AugMix", "AutoAugment", "ColorJitter", "CutMix", "ElasticTransform", "GaussianNoise"}
_RANDOM |= {"MixUp", "ScaleJitter", "TrivialAugmentWide"}
"""Random transforms of torchvision, and of albumentations, whose names don't begin with "Random".
"""
OF_SAMPLER = -1
OF_STREAM = -2
OF_COLLATE = -3
OF_STEP = -4
"""Keys of random streams other than those of samples, in place of an index."""
_FOUR = struct.Struct("<4q")
_SEEDS = struct.Struct("<QQQ")
_32_BITS = (1 << 32) - 1
_63_BITS = (1 << 63) - 1


def sample_seeds(seed: int, epoch: int, index: int, k: int = 0) -> tuple[int, int, int]:
    """Derives the seeds of a sample's random generators.

    Args:
        seed: seed of the order; any integer.
        epoch: epoch number.
        index: index of the sample.
        k: 0 in a permutation; the position where an order may repeat an index.

    Returns:
        Independent seeds for `random` (64 bits), for numpy's legacy generator (32 bits) and for
        torch (63 bits).
    """
    try:
        message = _FOUR.pack(seed, epoch, index, k)
    # an integer beyond 64 bits; the text, being longer, is never what another call packs
    except struct.error:
        text = ",".join(str(operator.index(part)) for part in (seed, epoch, index, k))
        message = text.encode().rjust(64)
    first, second, third = _SEEDS.unpack(blake2b(message, digest_size=24).digest())
    return first, second & _32_BITS, third & _63_BITS


class SampleSeeder:
    """Seeds the random generators that the transforms of a sample may draw from.

    These are the global ones of `random`, `numpy.random` and torch (CPU), and those that the
    holders hold: each `numpy.random.Generator`, `numpy.random.RandomState`, `random.Random` and
    `torch.Generator` in their attributes, in items of lists, tuples and dicts, in arguments of
    `functools.partial`, in objects of bound methods and in closures, and so on inside of these. Not
    looked into: sets and `__slots__`, which have no order or no common form; arrays and tensors;
    what comes after the first 1,000 items of a container, or after 100,000 objects in all.

    The k-th generator, holder by holder, gets the k-th stream: pass what holds the transforms
    before anything that may differ between processes. Not thread-safe, as the global generators are
    not. Pickled along with its holders, it goes on seeding what they hold.

    Args:
        *holders: datasets, transforms, or other objects.

    Attributes:
        generators: those of the holders, in the order of their streams.
    """

    def __init__(self, *holders: object) -> None:
        self.generators: list[Generator] = [
            one
            for one in _reachable(holders)
            if isinstance(one, Generator) and not isinstance(one, random.SystemRandom)
        ]  # the system's has no state to set

    def __call__(self, seed: int, epoch: int, index: int, k: int = 0) -> None:
        """Seeds everything for one sample; the arguments are those of `sample_seeds`."""
        seeds = sample_seeds(seed, epoch, index, k)
        random.seed(seeds[0])
        np.random.seed(seeds[1])
        torch.default_generator.manual_seed(seeds[2])
        for ordinal, generator in enumerate(self.generators):
            _reseed(generator, sample_seeds(seeds[2], seeds[1], ordinal))


@contextmanager
def preserved_rng(seeder: SampleSeeder | None = None) -> Iterator[None]:
    """Context that restores the states of the global generators, and of those that a seeder has
    found.
    """
    states = _states(seeder)
    try:
        yield
    finally:
        _put_back(states)


def warn_off_main_thread() -> None:
    """Warns if a thread other than the main one seeds and restores the global generators."""
    if threading.current_thread() is not threading.main_thread():
        warn(
            "random transforms run in a thread beside the main one: both draw from the global "
            "random generators, and numbers that the main thread draws meanwhile may come again; "
            "load in worker processes (num_workers > 0)"
        )


def rng_states(seeder: SampleSeeder | None = None) -> bytes:
    """The states of the global generators, and of those that a seeder has found, as bytes. They
    are equal if nothing was drawn in between.
    """
    return pickle.dumps(
        [
            state.numpy() if isinstance(state, torch.Tensor) else state
            for _, state in _states(seeder)
        ]
    )


def _states(seeder: SampleSeeder | None) -> list[tuple[Generator, Any]]:
    """The global generators, and those that a seeder has found, with their states."""
    held = [] if seeder is None else seeder.generators
    states: list[tuple[Generator, Any]] = []
    for generator in (*_GLOBAL, *held):
        state: Any
        if isinstance(generator, np.random.Generator):
            state = generator.bit_generator.state
        elif isinstance(generator, np.random.RandomState):
            state = generator.get_state(legacy=False)
        elif isinstance(generator, torch.Generator):
            state = generator.get_state()
        else:
            state = generator.getstate()
        states.append((generator, state))
    return states


def _put_back(states: list[tuple[Generator, Any]]) -> None:
    for generator, state in states:
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            generator.set_state(state)


class Draws:
    """A random stream of its own for work that is done in pieces.

    The first ``with draws():`` seeds the generators by (seed, epoch, key, k); each further one
    continues where the last has ended, whatever was drawn in between.

    Args:
        seeder: knows the generators.
        seed, epoch, key, k: the key of the stream; `key` is negative and takes the place of the
            index of a sample.
    """

    def __init__(self, seeder: SampleSeeder, seed: int, epoch: int, key: int, k: int = 0) -> None:
        self._seeder = seeder
        self._start = (seed, epoch, key, k)
        self._left: list[tuple[Generator, Any]] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with preserved_rng(self._seeder):
            if self._left is None:
                self._seeder(*self._start)
            else:
                _put_back(self._left)
            try:
                yield
            finally:
                self._left = _states(self._seeder)


@checks_keywords
def seed_everything(
    seed: int, deterministic: bool = False
) -> tuple[Callable[[int], None], torch.Generator]:
    """Seeds the global generators of `random`, `numpy.random` and torch, on all devices.

    Args:
        seed: any integer. Within [0, 2**32) each generator receives it unchanged.
        deterministic: also make torch use deterministic algorithms only:
            `torch.use_deterministic_algorithms`, cuDNN without benchmarks, and a workspace for
            cuBLAS (`CUBLAS_WORKSPACE_CONFIG`, if it isn't set). This is slower, and operations
            without a deterministic algorithm raise errors. Results are bit-identical on the same
            kind of device, with the same number of threads and the same release of torch; otherwise
            the order of additions differs.

    Returns:
        ``(worker_init_fn, generator)`` for a plain `torch.utils.data.DataLoader`: a function that
        seeds `random` and `numpy.random` of a
            worker, and a generator with the seed. A `Loader` needs neither: it seeds each sample.
    """
    seed = operator.index(seed)  # a numpy integer too
    random.seed(seed)
    np.random.seed(seed & _32_BITS)
    torch.manual_seed(seed & _63_BITS)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    return _seed_worker, torch.Generator(device="cpu").manual_seed(seed & _63_BITS)


def _seed_worker(worker: int) -> None:
    """Seeds a worker of a plain DataLoader, for which torch seeds its own generator only."""
    seed = torch.initial_seed() & _32_BITS
    random.seed(seed)
    np.random.seed(seed)


def random_names(*holders: object) -> list[str]:
    """Names of what draws random numbers among the objects that `SampleSeeder` looks at: random
    generators, and classes and functions whose names say so.
    """
    names = dict[str, None]()
    for item in _reachable(holders):
        name = getattr(item, "__name__", type(item).__name__)
        if isinstance(item, Generator):
            names["a random generator"] = None
        elif isinstance(name, str) and (name.lower().startswith("random") or name in _RANDOM):
            names[name] = None
    return list(names)


def _reachable(holders: Iterable[object]) -> Iterator[object]:
    """Yields the objects that can be reached from each holder, nearest first. Generators are not
    looked into.
    """
    # keeps the objects alive, since the id of a temporary one may be reused
    seen: dict[int, object] = {}
    for holder in holders:
        queue = deque([(holder, 0)])
        while queue and len(seen) < _MAX_OBJECTS:
            item, depth = queue.popleft()
            if isinstance(item, _OPAQUE) or id(item) in seen:
                continue
            seen[id(item)] = item
            yield item
            if depth < _MAX_DEPTH and not isinstance(item, Generator):
                queue.extend((inner, depth + 1) for inner in _inside(item))


def _inside(item: object) -> Iterator[object]:
    """Yields the objects inside an object, in the same order in every process."""
    if isinstance(item, dict):
        yield from islice(item.values(), _MAX_ITEMS)
    elif isinstance(item, list | tuple):
        yield from islice(item, _MAX_ITEMS)
    elif isinstance(item, partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, types.MethodType | types.BuiltinMethodType):
        yield item.__self__
    elif isinstance(item, types.FunctionType):
        for cell in item.__closure__ or ():
            with suppress(ValueError):  # a cell that is still empty
                yield cell.cell_contents
    with suppress(TypeError):  # an object without attributes
        yield from islice(vars(item).values(), _MAX_ITEMS)


def _reseed(generator: Generator, seeds: tuple[int, int, int]) -> None:
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seeds[0]).state
    elif isinstance(generator, np.random.RandomState):
        try:
            generator.seed(seeds[1])
        except TypeError:  # numpy seeds only those over a MT19937
            name = generator.get_state(legacy=False)["bit_generator"]
            generator.set_state(
                {**getattr(np.random, name)(seeds[1]).state, "has_gauss": 0, "gauss": 0.0}
            )
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seeds[2])
    else:
        generator.seed(seeds[0])
