"""Plans the parts of a pack by the dataset and the options alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from headrace.core.dataset import BaseDataset
from headrace.datasets.text.text import TextDataset
from headrace.dtypes import IntArray
from headrace.errors import ConfigError
from headrace.packing.beside.targets import as_column, crc_of_columns
from headrace.packing.destination import Destination
from headrace.packing.formats.layout import chunks_for
from headrace.packing.formats.versions import versions_of
from headrace.packing.jpeg import ratio_of
from headrace.packing.options import StoreOptions
from headrace.packing.parts import (
    NO_CHECKS,
    Checks,
    PartsPlan,
    checks_of,
    edges_of,
    options_of,
    read_plan,
    rows_as_json,
)
from headrace.packing.plan import Packing, are_files, is_packed_as_stored, names_of
from headrace.packing.run import plan_file, refuse_for_texts
from headrace.packing.texts import documents_of, estimate_tokens, is_of_texts
from headrace.storage.arrays.packed import TARGETS
from headrace.storage.hdf5.filters import filter_versions


class Planned(NamedTuple):
    """What `plan_parts` gives.

    Attributes:
        plan: the plan.
        checks: of the samples; none of a plan that was there already.
        read_sizes: [n] int64, bytes of each sample where it comes from; None: they were not asked
            for.
    """

    plan: PartsPlan
    checks: Checks = NO_CHECKS
    read_sizes: IntArray | None = None


def plan_parts(
    dataset: BaseDataset,
    folder: Destination | None,
    shard_size: int,
    how: StoreOptions,
    workers: int,
    progress: bool | None,
    is_share: bool = False,
) -> Planned:
    """The plan for a dataset. Reads the plan that is in the folder, if there is one, and writes
    nothing.

    Args:
        is_share: True for one of many jobs: where the plan that is there is that of this dataset,
            it does not ask for the size of each file again; those of the parts that it packs are
            compared then.

    Raises:
        ConfigError: the dataset can't be packed, or not into parts.
    """
    if is_of_texts(dataset):
        return _plan_texts(dataset, shard_size, how)
    frozen = None if folder is None else read_plan(folder)
    if (
        frozen is not None
        and frozen.fingerprint == dataset.fingerprint
        and _is_same(frozen, dataset, shard_size, how)
    ):
        return Planned(frozen)  # all samples were looked at when it was made
    if (
        is_share
        and frozen is not None
        and frozen.fingerprint == dataset.fingerprint
        and are_files(dataset.sample_source)
    ):
        file = plan_file(
            dataset, how, workers, progress, frozen.rows, np.zeros(len(dataset), np.int64)
        )
        plan = _plan_of(dataset, file, shard_size, how, NO_CHECKS, frozen.edges)
        if replace(plan, nbytes=frozen.nbytes, samples=frozen.samples) == frozen:
            return Planned(frozen)
    file = plan_file(dataset, how, workers, progress)
    if not len(dataset):
        raise ConfigError("a dataset without samples can't be packed into parts")
    sizes = file.plan.read_sizes if is_packed_as_stored(dataset) else None
    checks = NO_CHECKS if sizes is None else checks_of(names_of(dataset), sizes)
    return Planned(_plan_of(dataset, file, shard_size, how, checks), checks, sizes)


def _plan_of(
    dataset: BaseDataset,
    file: Packing,
    shard_size: int,
    how: StoreOptions,
    checks: Checks,
    edges: list[int] | None = None,
) -> PartsPlan:
    """The plan for a dataset, by that of one file of it. `edges` are those of another plan."""
    options = {**options_of(dataset, how, shard_size), **file.plan.info.image}
    if file.plan.chunks is not None:
        options["compression"], options["chunks"] = file.plan.compression, file.plan.chunks
    if versions := versions_of(dataset, file.plan, how):
        options["versions"] = versions
    if file.rows is not None:
        options["rows"] = rows_as_json(file.rows)
    sizes = np.zeros(len(dataset), np.int64)
    sizes[np.setdiff1d(np.arange(len(dataset)), list(file.left_out))] = file.plan.sizes
    if edges is None:
        if how.is_jpeg:
            # about: they are known when all are encoded
            sizes = (sizes * ratio_of(dataset, how, sizes)).astype(np.int64)
        edges = edges_of(sizes, shard_size)
    return PartsPlan.of(file.plan.info, dataset.fingerprint, edges, sizes, checks, options)


def _is_same(frozen: PartsPlan, dataset: BaseDataset, shard_size: int, how: StoreOptions) -> bool:
    """True if a plan of samples that had to be looked at is what these arguments give of the
    same dataset.
    """
    rows = frozen.rows
    if (
        rows is None
        or is_packed_as_stored(dataset)
        or how.store not in (None, "decoded")
        or (how.check, how.end_token) != ("decode", None)
        or (rows.store != "decoded" and how.is_chunked)
    ):
        return False
    chunks = chunks_for(how, math.prod(rows.shape) * rows.dtype.itemsize)
    compression = None if chunks is None else how.compression
    wanted = {
        **options_of(dataset, how, shard_size), "compression": compression, "chunks": chunks,
        "versions": None if compression is None else filter_versions(compression),
    }  # fmt: skip
    return all(frozen.options.get(name) == value for name, value in wanted.items())


def _plan_texts(dataset: TextDataset, shard_size: int, how: StoreOptions) -> Planned:
    """`plan_parts` of texts: parts are cut by bytes of the texts, so that each job tokenises its
    own parts alone.
    """
    refuse_for_texts(how)
    documents = documents_of(dataset, how.end_token)
    if not len(documents.chosen):
        raise ConfigError("a dataset without samples can't be packed into parts")
    info, sizes = documents.info(), documents.sizes()
    checks = checks_of(documents.names, sizes)
    options = {**options_of(documents.dataset, how, shard_size), **info.text}
    targets = documents.targets()
    if targets is not None and not documents.are_files:
        # of all: each part alone might seem to have targets of one kind
        options["annotations"] = crc_of_columns({TARGETS: as_column(targets)})
    if documents.tokens is None:
        estimate = estimate_tokens(documents, sizes)
        options["tokens"] = estimate.crc
        sizes = (sizes * estimate.tokens_per_byte).astype(np.int64)
    plan = PartsPlan.of(
        info, documents.fingerprint, edges_of(sizes, shard_size), sizes, checks, options
    )
    return Planned(plan, checks)
