"""What opened data say of themselves: `explain()` and `headrace info` show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Column:
    """An array or a column, how it is read, and what its part of one random sample costs.

    Attributes:
        name: of it; "rows" and the like where it has none.
        read_by: by which path, and why.
        sample: dtype and shape of the part, or what else is known of it.
        total, stored: bytes of all of it, decoded and as stored; 0: not known.
        nbytes: of the part, decoded, on average; 0: not known.
        chunks: that are decoded as a whole for it, on average; 0: none.
        chunk: extents of one.
        decoded: bytes of these.
        read: stored bytes that are read, about; 0: not known.
    """

    name: str
    read_by: str
    sample: str = ""
    total: int = 0
    stored: int = 0
    nbytes: int = 0
    chunks: float = 0
    chunk: tuple[int, ...] = ()
    decoded: int = 0
    read: int = 0

    @property
    def amplification(self) -> float:
        """Bytes that are decoded for each byte of a sample."""
        if self.nbytes:
            return self.decoded / self.nbytes
        return 1.0


@dataclass(slots=True)
class Description:
    """What opened data say of themselves.

    Attributes:
        columns: of which a sample has a part each.
        facts: what else there is to know, by a name.
        files: how many there are.
        stored: bytes of them, about; 0: not known.
        samples, fingerprint: of the dataset.
        opens_as: the call that opens it.
        held: bytes of all samples in memory; None: not known without reading them.
        classes: samples of each class; None: there are no classes.
    """

    columns: list[Column] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    files: int = 1
    stored: int = 0
    samples: int = 0
    fingerprint: str = ""
    opens_as: str = ""
    held: int | None = None
    classes: dict[str, int] | None = None

    @property
    def ways(self) -> dict[str, str]:
        """By which path each column is read, and why; and the other facts."""
        return {column.name: column.read_by for column in self.columns} | self.facts


def joined(parts: Sequence[Description]) -> Description:
    """Several files as one; where they are read in several ways, each of these."""
    columns = list(parts[0].columns)
    for number, column in enumerate(columns):
        ways = [part.columns[number].read_by for part in parts if number < len(part.columns)]
        column.read_by = "; or ".join(dict.fromkeys(ways))
    stored = [part.stored for part in parts]
    return Description(
        columns,
        parts[0].facts,
        sum(part.files for part in parts),
        sum(stored) if all(stored) else 0,
    )
