"""Compares how fast random rows come out of sparse matrices on a disk, as AnnData wrote them.

    python benchmarks/sparse_rows.py [--cells 200000] [--genes 20000] [--density 0.05] [--quick]
    [--workers N] [--seconds S] [--rounds 5]
                                [--layouts dense csr] [--only NAME ...] [--work FOLDER] [--json]

Made cells of 14 plates, which follow one another in the file, in batches of 64: from an .h5ad file
as anndata writes it (contiguous), one that is compressed by gzip, and a Zarr store as annbatch lays
it out (shards, chunks of 32,768 values, Blosc with LZ4). Beside headrace stand scDataset over both
.h5ad files, AnnLoader over the first, and annbatch over its store, which it has converted and
shuffled itself where it is installed; and a bare loop that inflates each chunk of the gzip file
once, in as many processes, and makes nothing of it. All files are in the page cache. The table
shows beside the speed how well a batch is mixed: the mean entropy of the plates of a batch in bits;
a full shuffle of 14 plates has about 3.65.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from common import Contestant, Ratio, Section, add_options, run_sections, version_of
from folders import prepared, work_folder
from sparse_peers import Cells, ann_loader, annbatch_loader, inflating, ours, sc_dataset

PLATES, STEP = 14, 5000
CHUNK, SHARD = 32_768, 134_217_728  # values, of annbatch's stores
OWN, GZIP, STORE = "headrace, .h5ad", "headrace, .h5ad by gzip", "headrace, annbatch's store"
FULL = "headrace, .h5ad, full shuffle"
OWN_ALONE, STORE_ALONE = "headrace, .h5ad, no workers", "headrace, annbatch's store, no workers"
LIMIT = "limit: inflating alone, .h5ad by gzip"
SCDATASET, SCDATASET_GZIP = "scDataset, .h5ad", "scDataset, .h5ad by gzip"
ANNBATCH, ANNLOADER = "annbatch, its store", "AnnLoader, .h5ad"


def made_rows(
    cells: int, genes: int, density: float
) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Some cells at a time: values of each, their columns and the values."""
    for start in range(0, cells, STEP):
        random, count = np.random.default_rng([7, start]), min(STEP, cells - start)
        most = int(genes * density + 8 * np.sqrt(genes * density) + 16)
        columns = random.geometric(density, (count, most)).cumsum(1) - 1
        inside = columns < genes
        sizes = inside.sum(1)
        values = np.log1p(random.integers(1, 20, int(sizes.sum()))).astype("f4")
        yield sizes, columns[inside].astype("i4"), values


def write_h5ad(path: Path, cells: int, genes: int, density: float, **options: Any) -> None:
    """As anndata writes it: contiguous, or in HDF5's own chunks where it is compressed."""
    sizes = np.concatenate([sizes for sizes, _, _ in made_rows(cells, genes, density)])
    indptr = np.concatenate([[0], np.cumsum(sizes)]).astype("i4")
    with h5py.File(path, "w") as file:
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        matrix = file.create_group("X")
        matrix.attrs.update(
            {
                "encoding-type": "csr_matrix",
                "encoding-version": "0.1.0",
                "shape": np.array([cells, genes]),
            }
        )
        matrix.create_dataset("indptr", data=indptr, **options)
        columns = matrix.create_dataset("indices", (int(indptr[-1]),), "i4", **options)
        values = matrix.create_dataset("data", (int(indptr[-1]),), "f4", **options)
        start = 0
        for _, some, them in made_rows(cells, genes, density):
            columns[start : start + len(some)], values[start : start + len(some)] = some, them
            start += len(some)
        write_tables(file, cells, genes)


def write_tables(file: h5py.File, cells: int, genes: int) -> None:
    for name, index in (
        ("obs", [f"cell{n}" for n in range(cells)]),
        ("var", [f"gene{n}" for n in range(genes)]),
    ):
        frame = file.create_group(name)
        columns = np.array(["plate"] if name == "obs" else [], h5py.string_dtype())
        frame.attrs.update(
            {
                "encoding-type": "dataframe",
                "encoding-version": "0.2.0",
                "_index": "_index",
                "column-order": columns,
            }
        )
        write_strings(frame, "_index", index)
    plate = file["obs"].create_group("plate")
    plate.attrs.update(
        {"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False}
    )
    plate["codes"] = plate_of(cells)
    plate["codes"].attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    write_strings(plate, "categories", [f"plate{n:02d}" for n in range(PLATES)])


def plate_of(cells: int) -> np.ndarray[Any, Any]:
    return (np.arange(cells) * PLATES // cells).astype("i1")


def write_strings(group: h5py.Group, name: str, values: list[str]) -> None:
    group.create_dataset(name, data=np.array(values, object), dtype=h5py.string_dtype())
    group[name].attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})


def write_store(path: Path, h5ad: Path) -> None:
    """annbatch's own collection; where it is not installed, a store of the same layout by
    zarr-python, which is not shuffled.
    """
    if version_of(["annbatch"]) is not None:
        import annbatch

        annbatch.DatasetCollection(str(path)).add_adatas([str(h5ad)], shuffle=True)
        return
    import zarr

    root = zarr.open_group(path, mode="w", zarr_format=3)
    compressors = [zarr.codecs.BloscCodec(cname="lz4", clevel=3, shuffle="shuffle")]
    with h5py.File(h5ad) as file:
        part = root.create_group("dataset_0")
        part.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        matrix = part.create_group("X")
        told = {
            "encoding-type": "csr_matrix",
            "encoding-version": "0.1.0",
            "shape": [int(n) for n in file["X"].attrs["shape"]],
        }
        matrix.attrs.update(told)
        for name in ("indptr", "indices", "data"):
            values = file["X"][name]
            shard = min(SHARD, -(-len(values) // CHUNK) * CHUNK)
            array = matrix.create_array(
                name,
                shape=values.shape,
                dtype=values.dtype,
                chunks=(CHUNK,),
                shards=(shard,),
                compressors=compressors,
            )
            array[...] = values[...]
        obs = part.create_group("obs")
        obs.attrs.update(
            {
                "encoding-type": "dataframe",
                "encoding-version": "0.2.0",
                "_index": "_index",
                "column-order": ["plate"],
            }
        )
        plate = obs.create_group("plate")
        plate.attrs.update(
            {"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False}
        )
        plate.create_array("codes", data=file["obs/plate/codes"][...])
        names = plate.create_array("categories", shape=(PLATES,), dtype=str)
        names[...] = np.array([f"plate{n:02d}" for n in range(PLATES)], object)


def section(job: Cells, by_gzip: str, title: str) -> Section:
    stores = sorted(
        str(path)
        for path in Path(job.store).iterdir()
        if path.is_dir() and path.name.startswith("dataset_")
    )
    alone = replace(job, workers=0)
    contestants = [
        Contestant(OWN, ours, (job, job.h5ad, "block")),
        Contestant(OWN_ALONE, ours, (alone, job.h5ad, "block")),
        Contestant(GZIP, ours, (job, by_gzip, "block")),
        Contestant(STORE, ours, (job, stores, "block")),
        Contestant(STORE_ALONE, ours, (alone, stores, "block")),
        Contestant(LIMIT, inflating, (job, by_gzip)),
        Contestant(FULL, ours, (job, job.h5ad, True)),
        Contestant(SCDATASET, sc_dataset, (job, 16, 256), ("scDataset", "scdataset")),
        Contestant(
            SCDATASET_GZIP,
            sc_dataset,
            (replace(job, h5ad=by_gzip), 16, 256),
            ("scDataset", "scdataset"),
        ),
        Contestant(ANNBATCH, annbatch_loader, (job, 32, 256), ("annbatch",)),
        Contestant(ANNLOADER, ann_loader, (job,), ("anndata",)),
    ]
    pairs = [
        (OWN, SCDATASET),
        (OWN_ALONE, SCDATASET),
        (GZIP, SCDATASET),
        (GZIP, SCDATASET_GZIP),
        (GZIP, LIMIT),
        (LIMIT, SCDATASET),
        (STORE, ANNBATCH),
        (STORE_ALONE, ANNBATCH),
        (OWN, ANNBATCH),
        (OWN_ALONE, ANNBATCH),
        (FULL, ANNLOADER),
    ]
    return Section(
        title,
        "cells/s",
        OWN,
        contestants,
        [Ratio(f"{title}: {one} / {other}", one, (other,)) for one, other in pairs],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=200_000, help="rows (200000)")
    parser.add_argument("--genes", type=int, default=20_000, help="columns (20000)")
    parser.add_argument(
        "--density", type=float, default=0.05, help="share of values that are no zeros (0.05)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the cells, two seconds a round"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=8.0,
        help="after which an epoch is left by those that read rows one by one (8)",
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=["dense", "csr"],
        choices=["dense", "csr"],
        help="what a batch is",
    )
    parser.add_argument(
        "--work", help="a folder for the files, which stays; else they are written anew and removed"
    )
    add_options(parser)
    given = parser.parse_args()
    cells, seconds = (given.cells // 10, 2.0) if given.quick else (given.cells, given.seconds)
    size = (cells, given.genes, given.density)
    with work_folder(given.work) as work:
        name = f"{cells}x{given.genes}x{given.density}"
        plain = (
            prepared(work, f"h5ad {name}", lambda folder: write_h5ad(folder / "cells.h5ad", *size))
            / "cells.h5ad"
        )
        gzip = (
            prepared(
                work,
                f"gzip {name}",
                lambda folder: write_h5ad(folder / "cells.h5ad", *size, compression="gzip"),
            )
            / "cells.h5ad"
        )
        store = (
            prepared(
                work, f"store {name}", lambda folder: write_store(folder / "cells.zarr", plain)
            )
            / "cells.zarr"
        )
        for path in itertools.chain([plain, gzip], store.rglob("*")):  # into the page cache
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    while file.read(1 << 24):
                        pass
        sections = []
        for layout in given.layouts:
            job = Cells(str(plain), str(store), PLATES, layout, given.workers, seconds)
            sections.append(section(job, str(gzip), f"{cells:,} x {given.genes:,}, {layout}"))
        run_sections(sections, given, "random rows of sparse matrices")


if __name__ == "__main__":
    main()
