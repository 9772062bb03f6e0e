"""Plans and packs the parts of a pack to Zarr.

The arrays of all parts are laid out before the first is packed, so which samples are left out is
found out first, by looking at all.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.core.dataset import BaseDataset
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, SampleError
from headrace.packing.beside.pairs import has_masks
from headrace.packing.destination import Destination
from headrace.packing.formats.versions import versions_of
from headrace.packing.jpeg import plan_reencoded, ratio_of
from headrace.packing.options import StoreOptions
from headrace.packing.parts import (
    NO_CHECKS,
    Checks,
    PartsPlan,
    bytes_of_checks,
    check_unchanged,
    checks_of,
    options_of,
    read_plan,
    rows_as_json,
)
from headrace.packing.plan import Packing, is_packed_as_stored, names_of
from headrace.packing.run import plan_file
from headrace.packing.samples import groups_of, with_progress, without
from headrace.packing.status import Sidecar
from headrace.packing.texts import is_of_texts
from headrace.packing.zarr.layout import (
    Stored,
    beside_options,
    check_dtype,
    flat_options,
    rows_options,
)
from headrace.packing.zarr.part import chunk_of, read_back, sum_of_objects, write_shards
from headrace.storage.arrays.packed import NAME_OFFSETS, TARGETS, are_targets
from headrace.storage.hdf5.filters import filter_versions


class PlannedZarr(NamedTuple):
    """A plan, and what was learned when it was made.

    Attributes:
        plan: of all parts.
        checks: of the samples.
        dataset: a view of those that are packed.
        read_sizes: [n] int64, bytes of each where it comes from; None: samples are known by their
            values.
    """

    plan: PartsPlan
    checks: Checks
    dataset: BaseDataset
    read_sizes: IntArray | None


def plan_zarr(
    dataset: BaseDataset,
    folder: Destination,
    shard_size: int,
    how: StoreOptions,
    workers: int,
    progress: bool | None,
) -> PlannedZarr:
    """The plan for a dataset.

    Raises:
        ConfigError: the dataset can't be packed, or not to Zarr.
        SampleError: see `pack`.
    """
    if is_of_texts(dataset):
        raise _not_held("texts")
    if not len(dataset):
        raise ConfigError("a dataset without samples can't be packed into parts")
    asked = _asked(dataset, shard_size, how)
    known = _known(read_plan(folder), dataset, asked, how, workers)
    if known is not None:
        return known
    packing = plan_file(dataset, how, workers, progress)
    left_out, is_as_stored = packing.left_out, is_packed_as_stored(dataset)
    if is_as_stored and dataset.on_error == "skip":
        left_out = _unreadable(dataset, packing, how, workers, progress)
        if left_out:
            packing = plan_file(without(dataset, left_out), how, workers, progress)
    view, plan = packing.dataset, packing.plan
    if plan.dtype.names and not has_masks(view):
        check_dtype("samples", plan.dtype)
    if plan.info.store == "ragged":
        raise _not_held(
            "arrays of several shapes" if plan.info.values is None else plan.info.values
        )
    checks = checks_of(names_of(view), plan.read_sizes) if is_as_stored else NO_CHECKS
    options: dict[str, Any] = {
        **asked,
        **plan.info.image,
        "left_out": [[number, why] for number, why in left_out.items()],
    }
    if versions := versions_of(view, plan, how):
        options["versions"] = versions
    if packing.rows is not None:
        options["rows"] = rows_as_json(packing.rows)
    sizes = plan.sizes
    if how.is_jpeg:
        # about: they are known when all are encoded
        sizes = (sizes * ratio_of(view, how, sizes)).astype(np.int64)
    options["zarr"] = zarr = _arrays(packing, sizes, shard_size)
    edges = [*range(0, len(view), zarr["samples"]), len(view)]
    read_sizes = plan.read_sizes if is_as_stored else None
    return PlannedZarr(
        PartsPlan.of(plan.info, view.fingerprint, edges, sizes, checks, options),
        checks,
        view,
        read_sizes,
    )


def _not_held(what: str) -> ConfigError:
    return ConfigError(
        f"format='zarr' holds samples of one shape and encoded images, and these are {what}: "
        "leave out format"
    )


def _asked(dataset: BaseDataset, shard_size: int, how: StoreOptions) -> dict[str, Any]:
    """What a plan has of the arguments of `pack`."""
    chunks = {
        name: value
        for name, value in (("compression", how.compression), ("chunks", how.chunks))
        if value is not None
    }
    return {"format": "zarr", **options_of(dataset, how, shard_size), **chunks}


def _known(
    plan: PartsPlan | None,
    dataset: BaseDataset,
    asked: dict[str, Any],
    how: StoreOptions,
    workers: int,
) -> PlannedZarr | None:
    """The plan that is there, if all samples were looked at when it was made, and it is of the
    same samples; else None.
    """
    is_as_stored = is_packed_as_stored(dataset)
    if plan is None or plan.zarr is None or (is_as_stored and asked["on_error"] != "skip"):
        return None
    if any(
        plan.options.get(name) != asked.get(name)
        for name in {*asked, "check", "jpeg", "compression", "chunks"}
    ):
        return None
    view = without(dataset, plan.left_out)
    if view.fingerprint != plan.fingerprint:
        return None
    if plan.rows is not None and not is_as_stored:
        versions = {} if how.compression is None else filter_versions(how.compression)
        is_same = how.store in (None, "decoded") and plan.options.get("versions", {}) == versions
        return PlannedZarr(plan, NO_CHECKS, view, None) if is_same else None
    packing = plan_file(view, how, workers, False)
    checks = checks_of(names_of(view), packing.plan.read_sizes)
    are_same = versions_of(view, packing.plan, how) == plan.options.get("versions", {})
    is_same = (
        are_same
        and packing.plan.info.store == plan.store
        and zlib.crc32(bytes_of_checks(checks)) == plan.samples
    )
    info = packing.plan.info
    is_same = (
        is_same
        and info.image.items() <= plan.options.items()
        and info.target_columns == plan.options.get("target_columns")
    )
    is_same = is_same and packing.rows == plan.rows
    return PlannedZarr(plan, checks, view, packing.plan.read_sizes) if is_same else None


def _unreadable(
    dataset: BaseDataset, packing: Packing, how: StoreOptions, workers: int, progress: bool | None
) -> dict[int, str]:
    """What is wrong with images that can't be read, by their numbers."""
    sizes = packing.plan.read_sizes
    if how.is_jpeg:  # what will be encoded anew is decoded
        packing = plan_file(dataset, StoreOptions("encoded"), workers, progress, read_sizes=sizes)
    groups, found = groups_of(packing.plan.sizes + sizes), dict[int, str]()
    workers = workers if dataset.sample_source.thread_safe else 0
    with with_progress(
        packing.prepare, groups, workers, progress, len(dataset), "looking at samples"
    ) as results:
        for group, samples in results:
            found |= {
                number: str(s[0])
                for number, s in zip(group, samples, strict=True)
                if isinstance(s[0], SampleError)
            }
    return found


def _arrays(packing: Packing, sizes: npt.NDArray[np.int64], shard_size: int) -> dict[str, Any]:
    """What a plan says of the arrays; `sizes` ([n]) are those of the samples as they are stored,
    about.
    """
    plan = packing.plan
    if plan.info.store == "decoded":
        arrays = rows_options(plan.shape, plan.dtype, shard_size, plan.chunks, plan.compression)
    else:
        arrays = flat_options(sizes, plan.sizes, shard_size)
    for name in filter(are_targets, plan.columns):
        check_dtype("targets", plan.columns[name].dtype)
    if (targets := plan.columns.get(TARGETS)) is not None:
        arrays["targets"] = {"dtype": targets.dtype.str, "shape": list(targets.shape[1:])}
    if (ends := plan.columns.get(NAME_OFFSETS)) is not None:
        firsts = np.arange(0, len(plan.sizes), arrays["samples"])
        arrays["names"] = max(1, int(np.add.reduceat(np.diff(ends), firsts).max()))
    return {**arrays, **beside_options(plan.columns, arrays["samples"])}


def pack_zarr_part(
    dataset: BaseDataset,
    folder: Destination,
    plan: PartsPlan,
    part: int,
    how: StoreOptions,
    workers: int,
    is_cancelled: Callable[[], bool],
    read_sizes: IntArray | None = None,
) -> Sidecar:
    """Packs a part, whatever is there of it; gives what its sidecar says.

    Args:
        dataset: the samples of the plan.
        folder, plan, part: of the pack, and the number of the part.
        how: samples are stored.
        workers: threads that read and decode.
        is_cancelled: see `PackJob.pack`.
        read_sizes: [samples of the part], as `PlannedZarr` has them; None: asked for, and compared
            with the plan.

    Raises:
        FileChangedError: a sample is not as it was when the plan was made.
        SampleError, WriteError, AccessError: see `pack`.
    """
    layout = plan.zarr
    assert layout is not None
    start, stop = plan.edges[part : part + 2]
    view = dataset.subset(np.arange(start, stop))
    packing = plan_file(view, how, workers, False, plan.rows, read_sizes)
    if read_sizes is None and is_packed_as_stored(view):
        check_unchanged(
            folder,
            plan,
            start,
            checks_of(names_of(view), packing.plan.read_sizes),
            dataset.source_of,
        )
    folder.remove(plan.sidecar_name(part))
    workers = workers if view.sample_source.thread_safe else 0
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(folder.part(array.key(part))) for array in layout.of_samples]
        for file in files:
            file.is_cancelled = is_cancelled
        if how.is_jpeg:
            with files[0].explained():
                packing = plan_reencoded(
                    view, how, os.path.dirname(files[0].path), workers, False, packing
                )
        with packing.spool or contextlib.nullcontext():
            columns = write_shards(files, packing, layout, part, workers)
        objects = read_back(files, layout, columns, part, max(1, workers))
    for name, column in columns.items():
        chunk, key = chunk_of(column, layout.arrays[name]), layout.arrays[name].key(part)
        folder.write(key, chunk)
        objects.append(Stored(key, len(chunk), zlib.crc32(chunk)))
    objects.sort(key=lambda stored: plan.objects(part).index(stored.name))
    nbytes = sum(stored.nbytes for stored in objects)
    return Sidecar(
        plan.digest, part, stop - start, nbytes, sum_of_objects(objects), objects=objects
    )
