"""Declares the keywords of `open_dataset`, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from headrace.casting import DTypeArgument
from headrace.core.modes import LoadingMode, ModeName
from headrace.core.options import SharedOptions
from headrace.io.remote.options import RemoteKeywords
from headrace.io.resolve.expressions import DataPath as DataPath

if TYPE_CHECKING:
    import numpy.typing as npt

    from headrace.datasets.image.labels import TargetsArgument
    from headrace.storage.text.lines import Newline
    from headrace.storage.zarr.ome import Scale
    from headrace.storage.zarr.volumes import Extents


class FormatOptions(SharedOptions, RemoteKeywords, total=False):
    """Keywords of the datasets that `open_dataset` opens, except `StreamingDataset` and except
    names that a loader takes too.
    """

    transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None
    loading_mode: LoadingMode | ModeName
    # images
    image_size: int | tuple[int, int] | None
    targets: TargetsArgument  # of sparse matrices: names of columns of obs, or an array
    color: Literal["RGB", "L"]
    normalize: bool | Literal["host"]
    transform_input: Literal["pil", "tensor", "numpy"]
    decode: Literal["fast", "exact"]
    label_separator: str | None
    delimiter: str | None  # of tables of labels, and of texts
    unused_targets: Literal["raise", "skip"]
    masks: bool
    # texts
    column: str | None  # of a table, an HDF5 file, a Zarr store or tars
    tokenizer: Any
    max_length: int | None
    unit: Literal["file", "line", "record", "chat"] | None
    chat_template: str | None
    text_field: str | Callable[[Any], str]
    target_field: str | None
    labels: Literal["folders"] | None
    packing: bool
    end_token: int | None
    newline: Newline
    encoding: str | None  # of texts: a str
    errors: str
    # sparse matrices
    group: str
    layout: Literal["dense", "csr", "pairs"]
    columns: str | Sequence[str] | Sequence[int] | npt.NDArray[Any] | None  # of tables: names
    join: Literal["inner", "outer"] | None
    # tables
    image_column: str | None
    # arrays
    dataset_name: str | Sequence[str] | None
    target_name: str | Sequence[str] | None  # of arrays: a str
    dtype: DTypeArgument | Mapping[str, DTypeArgument] | None  # of several: of episodes
    axis: int | str
    decode_cf: bool
    direct: bool
    patch_shape: Extents | int | None
    stride: Extents | int | None  # of texts: an int
    scale: Scale | None
    edges: Literal["drop", "pad", "shift"]
    boxes: Sequence[tuple[Sequence[int], Sequence[int]]] | None
    missing: Literal["fill", "error"]
    # episodes
    keys: str | Sequence[str] | None
    groups: str | None
    episodes: str | Sequence[str] | None
    window: int | Mapping[str, int] | None
    pad_before: int
    pad_after: int | None
    static: Sequence[str]


class OpenOptions(FormatOptions, total=False):
    """Keywords that `open_dataset` takes."""

    pad: Literal["reflect", "edge", "constant"]
    max_memory_usage: float | int | str
    seed: int
