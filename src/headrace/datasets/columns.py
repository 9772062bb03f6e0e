"""Rows of a container that another package reads, as dicts of their columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np
import torch

from headrace.core.dataset import BaseDataset
from headrace.core.modes import LoadingMode, ModeName
from headrace.core.options import PathOptions, check_arguments, split_options
from headrace.datasets.members import DECODERS, decoded
from headrace.errors import FormatError
from headrace.formats.registry import format_of, open_columns
from headrace.formats.resolve.expressions import DataPath, entries_of
from headrace.io.paths import redact


class ColumnsDataset(BaseDataset):
    """Rows of a container whose format another package registered (see docs/own_format.md).

    A sample is a dict of the values of a row: arrays as tensors of their shape and dtype; encoded
    bytes decoded where the format says what they are; all else as the format gives it.

    Args:
        data_path: a path, folder, glob or URL, or a list of these.
        columns: the names of the columns that samples have. None: all. A str: samples are the
            values of this column.
        transform, loading_mode, **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Raises:
        ConfigError: an option is invalid; or the files are of a format that headrace reads itself.
        DataNotFoundError, FormatError, AccessError, RemoteError: nothing is there; it can't be
            read.
        MissingNameError: there is no such column.
    """

    reads_urls = True

    def __init__(
        self,
        data_path: DataPath,
        columns: str | Sequence[str] | None = None,
        *,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        reach, common = split_options(options)
        format_ = format_of(data_path, reach)
        if format_.open is None:
            shown = redact(entries_of(data_path)[0])
            raise FormatError(f"{shown} holds {format_.name}: use {format_.dataset}")
        self._column = columns if isinstance(columns, str) else None
        if isinstance(columns, str):
            columns = [columns]
        opened = open_columns(data_path, format_, reach, columns or ())
        names = list(columns or opened.names)
        source = opened.rows(names) if self._column is None else opened.column(self._column)
        self._decoders = {
            name: DECODERS[opened.decoders[name]] for name in names if name in opened.decoders
        }
        super().__init__(source, transform=transform, loading_mode=loading_mode, **common)

    def decode(self, record: Any) -> Any:
        if self._column is not None:
            return self._decoded(self._column, record)
        return {name: self._decoded(name, value) for name, value in record.items()}

    def _decoded(self, column: str, value: Any) -> Any:
        decode = self._decoders.get(column)
        if decode is not None:
            return decoded(value, decode, f"column {column!r}", self.budget.left)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return torch.from_numpy(value)
        return value
