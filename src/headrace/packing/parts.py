"""Plans a pack of several files, its parts, before the first of them is written.

The plan is a pure function of the dataset and the options, frozen in `plan.json`. Each process that
packs some of the parts makes the plan anew and compares it with the one that is there, so no
process needs to tell another what to do. Finished is a part whose sidecar names this plan.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import zlib
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from headrace.core.dataset import BaseDataset
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, FormatError, TargetExistsError
from headrace.io.packed_strings import PackedNames
from headrace.io.resolve.packs import PLAN, are_counts, are_texts
from headrace.memory.budget import format_size
from headrace.packing.columns import annotations_check
from headrace.packing.destination import Destination
from headrace.packing.options import PackOptions
from headrace.packing.plan import Rows
from headrace.sorting import distinct
from headrace.storage.arrays.packed import PackedInfo

VERSION = 1
"""Of the files of a pack beside its parts."""
_MOST_PARTS = 1_000_000


@dataclass(frozen=True)
class PartsPlan:
    """What a pack of several files holds.

    Attributes:
        kind, store: as `PackedInfo` has them.
        fingerprint: of the dataset.
        count: number of samples.
        edges: [parts + 1], the first sample of each part, and `count`.
        nbytes: [parts], bytes of the samples of each part as they are stored.
        options: what else decides the bytes, by name; under "versions" those of the libraries that
            do.
        classes: class names, or None.
        checks: [parts], a CRC of the names and sizes of the samples where they come from, by which
            a changed source is noticed; []: they are known by the fingerprint alone.
        version: of this layout.
    """

    kind: str
    store: str
    fingerprint: str
    count: int
    edges: list[int]
    nbytes: list[int]
    checks: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    classes: list[str] | None = None
    version: int = VERSION

    @classmethod
    def of(
        cls,
        info: PackedInfo,
        fingerprint: str,
        edges: list[int],
        sizes: IntArray,
        checks: list[int],
        options: dict[str, Any],
    ) -> PartsPlan:
        """The plan of samples that are as `info` says.

        Args:
            info: of a file of them.
            fingerprint, edges, checks, options: see the attributes.
            sizes: [n] int64, bytes of each sample as it is stored.
        """
        nbytes = np.add.reduceat(sizes, edges[:-1]).tolist()
        if info.target_columns is not None:
            options = {**options, "target_columns": info.target_columns}
        count = len(sizes)
        kind, store, classes = info.kind, info.store, info.classes
        return cls(kind, store, fingerprint, count, edges, nbytes, checks, options, classes)

    @cached_property
    def text(self) -> bytes:
        """The content of `plan.json`: the same for the same plan."""
        # `asdict` copies each number
        said = sorted((one.name, getattr(self, one.name)) for one in fields(self))
        lines = [f'"{name}": {json.dumps(value, sort_keys=True)}' for name, value in said]
        return ("{\n " + ",\n ".join(lines) + "\n}\n").encode("ascii")

    @cached_property
    def digest(self) -> str:
        """What tells this plan from others: 16 hexadecimal digits."""
        return hashlib.blake2b(self.text, digest_size=8).hexdigest()

    @property
    def parts(self) -> int:
        """The number of parts."""
        return len(self.nbytes)

    @property
    def rows(self) -> Rows | None:
        """What the samples of all parts have in common, where that is not known without reading
        them.
        """
        rows = self.options.get("rows")
        if rows is None:
            return None
        return Rows(rows["store"], _dtype(rows["dtype"]), tuple(rows["shape"]), rows.get("values"))

    def name(self, part: int) -> str:
        """What the file with the samples of a part is called."""
        return f"part-{part:05d}-of-{self.parts:05d}.h5"

    def sidecar_name(self, part: int) -> str:
        """What the sidecar of a part is called."""
        return f"part-{part:05d}-of-{self.parts:05d}.json"


def options_of(dataset: BaseDataset, how: PackOptions) -> dict[str, Any]:
    """What the options of a plan have of the arguments of `pack`, whatever the format;
    `compression` and `chunks` each format adds.
    """
    options: dict[str, Any] = {
        "shard_size": how.part_nbytes,
        "on_error": "skip" if dataset.on_error == "skip" else "raise",
    }
    options |= annotations_check(dataset)
    if how.check != "decode":
        options["check"] = how.check
    if how.is_jpeg:
        options["jpeg"] = {"max_size": how.max_size, "quality": how.quality}
        color = getattr(dataset, "color", "RGB")
        if color != "RGB":
            options["jpeg"]["color"] = color
    return options


def rows_as_json(rows: Rows) -> dict[str, Any]:
    """`Rows` as the options of a plan hold them."""
    dtype: Any = rows.dtype.str
    if rows.dtype.names:
        dtype = json.loads(json.dumps(rows.dtype.descr))  # lists, as they are when it is read
    values = {} if rows.values is None else {"values": rows.values}
    return {"store": rows.store, "dtype": dtype, "shape": list(rows.shape), **values}


def _dtype(value: Any) -> np.dtype[Any]:
    if isinstance(value, str):
        return np.dtype(value)
    return np.dtype([(name, _dtype(kind), *map(tuple, shape)) for name, kind, *shape in value])


def edges_of(sizes: IntArray, shard_size: int) -> list[int]:
    """Cuts samples into parts of about so many bytes, a sample more at most, as equal as they come.

    Args:
        sizes: [n] int64, bytes of each sample.
        shard_size: bytes.

    Raises:
        ConfigError: there would be too many parts.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    count = max(1, -(-total // max(1, shard_size)))
    if count > _MOST_PARTS:
        raise ConfigError(
            f"shard_size={shard_size:,} cuts {format_size(total)} into {count:,} parts: use a "
            "larger shard_size"
        )
    wanted = np.arange(1, count) * (total / count)
    inner = np.searchsorted(ends, wanted, side="left") + 1
    return distinct(np.concatenate([[0], np.minimum(inner, len(sizes)), [len(sizes)]])).tolist()  # type: ignore[no-any-return]


def checks_of(names: PackedNames | None, sizes: IntArray, edges: list[int]) -> list[int]:
    """The checks of a plan: of samples of these names (None: they have none) and sizes ([n] bytes),
    for each range of them.
    """
    texts = (b"%d " % size for size in sizes.tolist())
    if names is not None:
        texts = (b"%s%s " % pair for pair in zip(texts, names, strict=True))
    checks = []
    for start, stop in itertools.pairwise(edges):
        crc = 0
        for text in itertools.islice(texts, stop - start):
            crc = zlib.crc32(text, crc)
        checks.append(crc)
    return checks


def read_plan(folder: Destination) -> PartsPlan | None:
    """The plan of a pack; None: there is none.

    Raises:
        FormatError: it is damaged, of a later headrace, or no plan of headrace.
    """
    data = folder.read(PLAN)
    name = folder.shown_name(PLAN)
    if data is None:
        return None
    try:
        said = json.loads(data)
        if not isinstance(said, dict) or not {"version", "fingerprint"} <= said.keys():
            raise FormatError(f"{name} is no plan of headrace: leave it, and use another folder")
        if said["version"] > VERSION:
            raise FormatError(
                f"{name} was written by a later headrace (layout {said['version']}, this one "
                f"reads up to {VERSION})"
            )
        plan = PartsPlan(**said)
        _check_plan(plan)
        _ = plan.rows, plan.digest  # what can't be understood is said here
        return plan
    except FormatError:
        raise
    # a damaged file can hold anything, also what NumPy takes for code of a dtype
    except Exception as error:
        raise FormatError(
            f"{name} is damaged ({error}): remove it and pack again with overwrite=True "
            "(--overwrite); finished parts are kept"
        ) from error


def _check_plan(plan: PartsPlan) -> None:
    """Raises a ValueError for a value that no pack writes."""
    counts = [plan.count, plan.version, *plan.edges, *plan.nbytes, *plan.checks]
    if not are_counts(counts) or not isinstance(plan.options, dict):
        raise ValueError("a number or the options are wrong")
    if (
        len(plan.edges) != len(plan.nbytes) + 1
        or plan.edges != sorted(plan.edges)
        or (plan.edges[0], plan.edges[-1]) != (0, plan.count)
    ):
        raise ValueError("'edges' are wrong")
    if not are_texts([plan.kind, plan.store, plan.fingerprint, *(plan.classes or [])]):
        raise ValueError("a name is wrong")


def freeze(folder: Destination, plan: PartsPlan, overwrite: bool) -> bool:
    """Writes the plan, if there is none yet; True if it takes the place of another one.

    Raises:
        TargetExistsError: there is another one, and it may not be replaced; the message shows how
            they differ.
        WriteError, AccessError: it can't be written.
    """
    there = read_plan(folder)
    replaces = there is not None and there.digest != plan.digest
    if there is None or (overwrite and replaces):
        # another process made a plan at the same moment
        with contextlib.suppress(TargetExistsError):
            folder.write(PLAN, plan.text, overwrite)
        there = read_plan(folder)
    check_same(folder, there, plan)
    return replaces


def check_same(folder: Destination, there: PartsPlan | None, plan: PartsPlan) -> None:
    """Raises a TargetExistsError where the plan that is there is another one; the message shows
    how they differ.
    """
    if there is None or there.digest != plan.digest:
        how = "" if there is None else f" ({differences(there, plan)})"
        raise TargetExistsError(
            f"{folder.shown} holds the plan of another pack{how}: pack to another folder, or pass "
            "overwrite=True (--overwrite) to plan anew"
        )


def differences(there: PartsPlan, now: PartsPlan) -> str:
    """How two plans differ, in words."""
    before = _flat(there)
    after = _flat(now)
    said = []
    for name in dict.fromkeys([*before, *after]):
        one = before.get(name)
        other = after.get(name)
        if one != other:
            is_short = len(f"{one}{other}") < 80
            said.append(f"{name}: {one} there, {other} now" if is_short else f"other {name}")
    return "; ".join(said[:4]) or "another layout"


def _flat(plan: PartsPlan) -> dict[str, Any]:
    """What decides a plan, by what messages call it; what says most comes first."""
    options = dict(plan.options)
    versions = options.pop("versions", {})
    return {
        "samples": plan.count,
        "parts": plan.parts,
        "store": plan.store,
        "kind": plan.kind,
        "fingerprint": plan.fingerprint,
        "classes": plan.classes,
        **options,
        **{f"version of {name}": version for name, version in versions.items()},
        "sizes of parts": plan.edges,
        "names or sizes of samples": plan.checks,
    }
