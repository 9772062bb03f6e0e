"""What would make random samples faster, with the command that does so.

Gains are promises: what a change brings at least, on data in memory and in one process
(`headrace.inspecting.costs`); from a slow disk or a server it is more, by the bytes that need not
be read.
"""

from __future__ import annotations

import os
import posixpath
import shlex

from headrace.inspecting.costs import gain_of_packing, rounded_down
from headrace.inspecting.report import Access, Advice
from headrace.io.paths import named_part, redact
from headrace.memory.budget import format_size

# times that values are larger than what is stored, from which on compression is told of
_SMALLER = 2.5
_WORTH = 2.0  # gains below it are not worth a second copy of the data


def packed_name(path: str) -> str:
    """The name of a file to pack into, in the working folder."""
    name = (
        posixpath.basename(named_part(path).rstrip("/").replace(os.sep, "/")).strip(".") or "data"
    )
    while (root := os.path.splitext(name)[0]) not in ("", name) and len(name) - len(root) <= 6:
        name = root
    return f"{name}-packed.h5"


def for_rows(
    access: Access,
    path: str,
    kind: str,
    *,
    names_array: bool,
    height: int,
    opens_as: str | None = None,
) -> list[Advice]:
    """Advice for an array of which a sample is a row.

    Args:
        access: what a row costs.
        path: of the file or store.
        kind: of its dtype, as NumPy has it.
        names_array: True if the array must be named.
        height: rows of a chunk.
        opens_as: how it is opened in Python, where the command line can't say it.
    """
    gain = rounded_down(gain_of_packing(access))
    if gain < _WORTH or not access.nbytes:
        return []
    found: list[Advice] = []
    if opens_as is not None:
        found.append(
            Advice(
                _why(access), code=f"headrace.pack({opens_as}, {packed_name(path)!r})", gain=gain
            )
        )
    elif kind in "biuf":
        named = f" --dataset-name {shlex.quote(access.name)}" if names_array else ""
        command = (
            f"headrace pack {shlex.quote(redact(path))} {shlex.quote(packed_name(path))}{named}"
        )
        found.append(Advice(_why(access), command, gain=gain, nbytes=access.total))
        stored = int(access.read / max(1.0, access.chunks) * access.chunk_count)
        small = rounded_down(gain_of_packing(access, compressed=True))
        if access.total > _SMALLER * stored > 0 and small >= _WORTH:
            why = (
                f"{format_size(stored)} become {format_size(access.total)} so; compressed row by "
                "row it is less, and slower"
            )
            found.append(Advice(why, f"{command} --compression gzip --chunks 1", gain=small))
    if height > 1 and access.chunk_count > 1:
        why = f"all {height:,} rows of a chunk are used when it is decoded, once an epoch"
        found.append(Advice(why, code='create_dataloader(dataset, shuffle="block")'))
    return found


def for_patches(access: Access, chunks: tuple[int, ...]) -> list[Advice]:
    """Advice for a volume of which a sample is a patch, which is as large as what is asked for:
    the chunks are what they are.
    """
    if access.amplification < _WORTH * 2 or not access.chunks:
        return []
    return [
        Advice(
            f"a random patch decodes {access.chunks:.1f} chunks, {access.amplification:.0f} times "
            "its bytes",
            code=(
                f"ZarrDataset(path, patch_shape={chunks})  # patches as large as the chunks, or "
                "several"
            ),
        ),
        Advice(
            "patches that share chunks are read one after the other",
            code='create_dataloader(dataset, shuffle="block")',
        ),
    ]


def _why(access: Access) -> str:
    chunks = f"{access.chunks:,.0f} chunk{'s' * (access.chunks != 1)}"
    decoder = f" ({access.way})" if access.by_library else ""
    return (
        f"a random row of {format_size(access.nbytes or 0)} takes {chunks}, "
        f"{format_size(access.decoded)} to decode{decoder}"
    )
