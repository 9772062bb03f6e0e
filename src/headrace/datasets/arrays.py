"""Reads rows of HDF5 files and Zarr arrays, and patches of Zarr volumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import numpy.typing as npt

from headrace.arguments import check_choice
from headrace.casting import DTypeArgument, as_tensor, cast, dtype_named
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder
from headrace.core.options import LoadingMode, ModeName, PathOptions, check_arguments
from headrace.core.views import ColumnTargets
from headrace.dtypes import ArraySpec
from headrace.errors import ConfigError, FormatError
from headrace.formats.arrays.rows import (
    ArraysSource,
    ConcatSource,
    as_value,
    concatenated,
    concatenated_rows,
    is_plain,
    long_doubles_in,
)
from headrace.formats.arrays.volumes import PADS, PatchSource
from headrace.formats.hdf5 import HDF5
from headrace.formats.hdf5.rows import HDF5Source
from headrace.formats.ome import (
    Extents,
    Scale,
    VolumeArray,
    check_row_targets,
    patch_source,
    volume_in,
)
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.source import sources_of
from headrace.formats.sparse.matrix import Column, column_of_group, joined_column
from headrace.formats.text.plain import check_encoding
from headrace.formats.tree import TreeSource
from headrace.formats.trees import open_trees
from headrace.formats.zarr.stores import ZARR
from headrace.formats.zarr.tree import objects_in
from headrace.io.remote.options import RemoteOptions


def as_input(value: Any) -> Any:
    """A value with tensors instead of arrays and NumPy scalars, also inside lists and dicts."""
    if isinstance(value, dict):
        return {name: as_input(one) for name, one in value.items()}
    if isinstance(value, list):
        return [as_input(one) for one in value]
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    array = np.asarray(value)
    return as_tensor(array if array.flags.writeable else array.copy())


class ArrayDecoder(Decoder):
    """Decodes rows: tensors, strings, dicts of compounds, rows of any length, and dicts of these.

    Args:
        dtype: dtype that numbers are cast to. None: unchanged.
        encoding: encoding of strings. None: strings are bytes.
        spec: shape and dtype of the records, if they are plain arrays of one spec.
        is_plain: True if records are plain arrays, possibly of several shapes.
        values: "bytes" or "str": the type that was packed as records of uint8 [n].
    """

    def __init__(
        self,
        dtype: np.dtype[Any] | None = None,
        encoding: str | None = "utf-8",
        spec: tuple[tuple[int, ...], np.dtype[Any]] | None = None,
        is_plain: bool = False,
        values: str | None = None,
    ) -> None:
        self.dtype = dtype
        self.is_plain: bool = is_plain and values is None
        self._values = values
        self._encoding = encoding
        self._spec: ArraySpec | None = None
        if self.is_plain and spec is not None and spec[1].kind in "biufc":
            self._spec = ArraySpec(spec[0], dtype or spec[1])
        self.stores_values: bool = self.is_plain and dtype is None
        self.casts_to = dtype if self.is_plain else None

    def decode(self, record: Any) -> Any:
        if isinstance(record, dict):
            return {name: self._decoded_row(row) for name, row in record.items()}
        return self._decoded_row(record)

    def _decoded_row(self, row: Any) -> Any:
        if self._values is not None:
            data = row.tobytes()
            if self._values == "str" and self._encoding is not None:
                return data.decode("utf-8")
            return data
        value = row
        if not self.is_plain:
            value = as_value(row, self._encoding)
        if self.dtype is not None and isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return cast(value, self.dtype)
        return value

    def value_spec(self) -> ArraySpec | None:
        return self._spec

    def to_input(self, value: Any) -> Any:
        return as_input(value)

    def sample_nbytes(self) -> int | None:
        if self._spec is None:
            return None
        return self._spec.nbytes


class ArrayDataset(BaseDataset):
    """Rows of arrays as tensors; several arrays as dicts of them. The common part of
    `HDF5Dataset` and `ZarrDataset`.
    """

    reads_urls = True
    classes: list[str] | None = None
    _decoder: ArrayDecoder

    def held_nbytes(self) -> int | None:
        if not self._decoder.is_plain or "decode" in self._overridden:
            return None
        sources = sources_of(self.sample_source)
        nbytes = sum(one.total_bytes for one in sources)
        if self._decoder.dtype is None:
            return int(nbytes)
        return int(nbytes * self._decoder.dtype.itemsize / max(1, sources[0].dtype.itemsize))


def joined_rows(
    sources: Sequence[ArraysSource], dtype: DTypeArgument | None, encoding: str | None = "utf-8"
) -> tuple[Any, ArrayDecoder]:
    """Joins sources of rows, and makes their decoder.

    Raises:
        ConfigError: `dtype` is not a dtype.
        FormatError: the sources have different rows, or numbers that torch does not support.
    """
    cast_to = dtype_named(dtype)
    source: Any = concatenated_rows(sources)
    first = sources[0]
    for name, of_name in first.dtypes.items():
        field = long_doubles_in(of_name)
        if field or (field == "" and cast_to is None):
            where = repr(name) if name else "it"
            if field:
                where += f", field {field!r},"
            raise FormatError(
                f"{first.path}: {where} holds long doubles ({of_name}), which torch does not have: "
                'pass dtype="float64" (or "complex128"), which keeps 15 digits; or convert fields'
            )
    plain = isinstance(first.name, str) and is_plain(first.dtype) and not first.holds_objects
    values = None if first.of_samples is None else first.of_samples.values
    return source, ArrayDecoder(cast_to, encoding, source.array_spec, plain, values)


def checked_names(dataset_name: Any, target_name: Any) -> str | tuple[str, ...] | None:
    """The name of an array, or a tuple of names.

    Raises:
        ConfigError: these, or the name of the targets, are not names.
    """
    if not (target_name is None or isinstance(target_name, str)):
        raise ConfigError(f"target_name must be the name of one array, not {target_name!r}")
    if dataset_name is None or isinstance(dataset_name, str):
        return dataset_name
    return checked_list("dataset_name", dataset_name)


def checked_list(argument: str, names: Any, least: int = 1) -> tuple[str, ...]:
    """A list of at least `least` names, or one name, as a tuple.

    Raises:
        ConfigError: it is something else, has too few names, or repeats one.
    """
    if isinstance(names, str):
        return (names,)
    is_list = isinstance(names, (Sequence, np.ndarray)) and not isinstance(names, bytes)
    if not is_list or len(names) < least or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{argument} must be a name or a list of names, not {names!r}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{argument} repeats a name: {list(names)!r}")
    return tuple(names)


def joined_targets(
    columns: Sequence[Any],
    sources: Sequence[ArraysSource],
    name: str | None,
    encoding: str | None = "utf-8",
) -> tuple[Any, list[str] | None]:
    """The concatenated targets of several files (None: no targets), and their class names (None:
    they are not categories). Strings are str, compounds dicts.

    Args:
        columns: the targets of each file; `Column` for tables of AnnData.
        sources: the sources of the files.
        name: name of the targets. None: no targets.
        encoding: encoding of strings.

    Raises:
        FormatError: targets are categories in some of the files only; or a string is not in that
            encoding.
    """
    if name is None:
        return None, None
    if any(isinstance(column, Column) for column in columns):
        tables = [column if isinstance(column, Column) else Column(column) for column in columns]
        joined = joined_column(tables, name)
        values = joined.values
        return values.tolist() if values.dtype == object else values, joined.categories
    arrays: list[Any] = list(columns)
    if all(is_plain(array.dtype) for array in arrays):
        return np.concatenate(arrays), None
    fields = arrays[0].dtype.fields or {}
    are_alike = len({array.dtype for array in arrays}) == 1
    if fields and are_alike and all(kind.base.kind in "biufc" for kind, *_ in fields.values()):
        return ColumnTargets.of_rows(np.concatenate(arrays)), None
    targets = []
    for array, source in zip(arrays, sources, strict=True):
        for row, value in enumerate(array):
            try:
                targets.append(as_value(value, encoding))
            except FormatError as error:
                raise FormatError(f"{source.path}: {name!r}, row {row}: {error}") from error
    return targets, None


class HDF5Dataset(ArrayDataset):
    """Rows of a dataset in HDF5 files, as tensors of its dtype. With `target_name` a sample is
    ``(row, target)``.

    With several dataset names, a sample is a dict with one row of each. Compound rows (PyTables)
    are dicts of their fields. Strings are str, rows of variable length (vlen) are arrays. Files
    that `headrace.pack` wrote are recognised: their samples are counted, encoded ones are 1-D uint8
    tensors, and ``bytes`` and ``str`` are returned as they were packed.

    Args:
        data_path: an HDF5 file; or several, as a folder (searched for .h5, .hdf5, .he5, .h5ad, .nc,
            .mat), a glob, a pattern with braces or a list. Their rows are concatenated: a list's in
            its order, others sorted. Or fsspec URLs of such files, all on one server.
        dataset_name: path of the dataset inside the files, or a list of paths. The first axis is
            the sample axis. None: "data", or the only dataset besides the targets.
        target_name: path of a dataset with one row per sample. For an AnnData file also a
            categorical column of `obs` ("obs/kind"): targets are class numbers (-1 for missing
            values).
        transform: a callable that is applied to the row as a tensor (or the dict, or the str).
        loading_mode: see `LoadingMode`.
        dtype: NumPy or torch dtype that numbers are cast to, also torch.bfloat16. None: unchanged.
        encoding: encoding of strings. None: strings, and packed ``str``, are returned as bytes.
        direct: True: read the files directly if their layout is supported, which is faster. False:
            always use h5py. Samples are the same; `explain()` names the path of each dataset and
            the reason.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Attributes:
        classes: class names of a categorical target. None: targets are not categories.

    Raises:
        ConfigError: paths and URLs are mixed, or a dtype or encoding is invalid.
        DataNotFoundError, FormatError: a file does not exist; it is not an HDF5 file; or its data
            can't be samples (a single value, references).
        AccessError, RemoteError: a file is not readable; a request to a server failed.
        MissingNameError: there is no such dataset, or there are several and no name was given; the
            message lists them.
        FileChangedError: a file changed since it was opened.
        BudgetError: a decoded chunk does not fit the memory budget.
    """

    def __init__(
        self,
        data_path: DataPath,
        dataset_name: str | Sequence[str] | None = None,
        *,
        target_name: str | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        dtype: DTypeArgument | None = None,
        direct: bool = True,
        encoding: str | None = "utf-8",
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        self.data_path = data_path
        names: Any = checked_names(dataset_name, target_name)
        codec = None if encoding is None else check_encoding(encoding, "strict")
        reach, common = RemoteOptions.split(options)
        paths, opened = open_trees(data_path, HDF5, reach, direct=direct)

        def open_one(path: str) -> tuple[HDF5Source, Any]:
            nonlocal names
            source = HDF5Source(path, names, opened, target_name)
            names = source.name  # of several files the first one decides
            return source, _targets(source, target_name)

        found = opened.each(paths, open_one, in_threads=True)
        sources, columns = zip(*found, strict=True)
        source, rows = joined_rows(sources, dtype, codec)
        targets, self.classes = joined_targets(columns, sources, target_name, codec)
        super().__init__(
            source,
            sample_decoder=rows,
            targets=targets,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )


def _targets(source: TreeSource, name: str | None) -> npt.NDArray[Any] | Column | None:
    """The targets of a file: an array, or a column of a table of AnnData; None: it has no name."""
    if name is None:
        return None
    if "/" in name.strip("/"):
        with source.tree() as tree:
            column = column_of_group(tree, name, len(source))
        if column is not None:
            return column
    return source.column(name)


class LabelledPatches(ArrayDecoder):
    """Pairs of a patch and a patch of labels.

    Args:
        dtype: that the numbers of patches are cast to, and labels are not; None: they stay as they
            are.
    """

    splits_targets = True
    always_pairs = True

    def __init__(self, dtype: np.dtype[Any] | None) -> None:
        super().__init__(dtype)
        self.stores_values = False

    def decode(self, record: Any) -> Any:
        patch, labels = record
        return patch if self.dtype is None else cast(patch, self.dtype), labels

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        return value[0], self.to_input(value[1])


class ZarrDataset(ArrayDataset):
    """Rows of Zarr arrays, or patches of volumes, as tensors of the array's dtype.

    Rows: the first axis is the sample axis. With `target_name` a sample is ``(row, target)``. With
    several names it is a dict with one row of each.

    Patches: with `patch_shape`. With `target_name` a sample is ``(patch, patch of the labels)``.
    Labels have the last axes of the volume. Labels of an OME-NGFF image may have voxels of another
    size; each voxel of the image then gets the label of the nearest one.

    Args:
        data_path: a Zarr store of version 2 or 3, as a folder, a zip file, or a URL (of a zip file:
            ending in .zip); or several, as a folder with stores in it (.zarr, .zarr.zip), a glob, a
            pattern with braces or a list. Rows or patches of several stores are concatenated. Or a
            `zarr.abc.store.Store`, or a list of such: zarr-python reads it, and it must be
            picklable if there are workers. A `LocalStore` is read as its folder.
        dataset_name: path of the array in the store, or (for rows) a list of paths. None: the only
            array. Or path of an image of OME-NGFF 0.4 or 0.5; None: the store itself.
        target_name: path of the targets: for rows an array with one row per sample, for patches an
            array of labels, for an OME-NGFF image the name of one of its labels. For rows of an
            AnnData store also a categorical column of `obs` ("obs/kind"): targets are class numbers
            (-1 for missing values).
        transform: a callable that is applied to the row or patch as a tensor. For patches with
            labels, `transforms` receives both.
        loading_mode: see `LoadingMode`.
        patch_shape: size of a patch along the last axes; -1: the whole axis. Earlier axes are
            whole. Or a dict of sizes by axis name, if the store names its axes. Or one size for all
            spatial axes: those of an OME-NGFF image, those named x, y and z, or else the last
            three; all other axes (channels, time) are whole. None: samples are rows.
        stride: step between patches along the same axes. None: `patch_shape`, so that patches don't
            overlap.
        scale: resolution level of an OME-NGFF image: the one with the voxel size nearest to this,
            in the image's unit. A number: the smallest extent of a voxel. Several: the extents
            along the spatial axes. A dict: the extents along the axes it names. None: the finest
            level.
        edges: what to do with the rest at the end of an axis: "drop" it, "pad" the last patch, or
            "shift" the last patch back, so that it overlaps. A volume that is smaller than a patch
            is an error, except with "pad".
        pad: for edges="pad": "reflect", "edge" or "constant" (the array's fill value; labels: 0).
        boxes: parts of the volume to take patches from, as pairs of corners (first, and one past
            the last) along the same axes. None: the whole volume.
        dtype: NumPy or torch dtype that numbers are cast to, also torch.bfloat16. Labels are not
            cast. None: unchanged.
        missing: chunks that were never written: "fill": use the fill value; "error": raise an
            error.
        direct: True: read the files directly if their layout is supported, which is faster. False:
            always use zarr-python. Samples are the same; `explain()` names the path of each array
            and the reason.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Attributes:
        classes: class names of a categorical target. None: targets are not categories.

    Raises:
        ConfigError: URLs of several servers, or URLs mixed with local paths; invalid sizes; an
            option for patches without `patch_shape`; no resolution level of about that scale; or
            labels whose axes or units differ from those of the image.
        DataNotFoundError, FormatError: a store does not exist; it is not a Zarr store, or its
            metadata are damaged.
        AccessError, RemoteError: a server refuses a request, or does not answer.
        MissingNameError: there is no such array, or there are several and no name was given; the
            message lists them. Over HTTP they are known only if the store has consolidated
            metadata.
        BudgetError: a decoded chunk does not fit the memory budget.
    """

    def __init__(
        self,
        data_path: DataPath | Any,
        dataset_name: str | Sequence[str] | None = None,
        *,
        target_name: str | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        patch_shape: Extents | int | None = None,
        stride: Extents | int | None = None,
        scale: Scale | None = None,
        edges: Literal["drop", "pad", "shift"] = "drop",
        pad: Literal["reflect", "edge", "constant"] = "reflect",
        boxes: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
        dtype: DTypeArgument | None = None,
        missing: Literal["fill", "error"] = "fill",
        direct: bool = True,
        **options: Unpack[PathOptions],
    ) -> None:
        named = [str(store) for store in objects_in(data_path)] or data_path
        check_arguments(self, named, options, transform=transform, loading_mode=loading_mode)
        self.data_path = data_path
        check_choice("missing", missing, ("fill", "error"))
        check_choice("pad", pad, PADS)
        name: Any = checked_names(dataset_name, target_name)
        is_one = not isinstance(name, tuple)
        given = {
            "stride": stride is not None,
            "boxes": boxes is not None,
            "edges": edges != "drop",
            "pad": pad != "reflect",
        }
        for option, is_given in given.items():
            if is_given and patch_shape is None:
                raise ConfigError(f"{option} is for patches: pass patch_shape too")
        if not is_one and (patch_shape is not None or scale is not None):
            raise ConfigError(
                "patches, and the levels of an image (scale=), come from one array of each "
                "store: pass one dataset_name"
            )
        reach, common = RemoteOptions.split(options)
        paths, opened = open_trees(data_path, ZARR, reach, direct=direct, missing=missing)
        self.fork_safe: bool = not opened.has_objects
        if boxes is not None and len(paths) > 1:
            raise ConfigError(
                f"boxes are parts of one volume, but data_path names {len(paths)} stores: make "
                "one dataset per store"
            )
        nodes = [*([name] if is_one else name), target_name]
        self._volumes: list[tuple[PatchSource, VolumeArray]] = []
        sources: list[TreeSource] = []
        kinds: list[str] = []
        for path in paths:
            if not is_one:
                sources.append(TreeSource(path, name, opened, target_name))
                continue
            with opened.tree(path, nodes) as tree:
                array = volume_in(tree, name, scale)
                if patch_shape is None:
                    if target_name is not None:
                        check_row_targets(tree, array, target_name)
                    sources.append(TreeSource(path, array.name, opened, target_name))
                    continue
                patches = patch_source(
                    tree, array, target_name, patch_shape, stride, edges, pad, boxes
                )
            self._volumes.append((patches, array))
            kinds.append(patches.patches_are)
            if array.image is not None:
                kinds[-1] += f" along {', '.join(array.image.names)}"
            if kinds[-1] != kinds[0]:
                raise FormatError(
                    f"{patches.path} and {self._volumes[0][0].path} can't be one dataset: "
                    f"patches of {kinds[-1]} here, and of {kinds[0]} there; earlier axes, and "
                    "those of extent -1 in patch_shape, are whole and must be equally long"
                )
        source: Any
        targets: Any = None
        if patch_shape is not None:
            source = concatenated([patches for patches, _ in self._volumes])
            cast_to = dtype_named(dtype)
            sample_decoder = ArrayDecoder(cast_to, None, source.array_spec, True)
            if target_name is not None:
                sample_decoder = LabelledPatches(cast_to)
        else:
            source, sample_decoder = joined_rows(sources, dtype)
            columns = [_targets(one, target_name) for one in sources]
            targets, self.classes = joined_targets(columns, sources, target_name)
        super().__init__(
            source,
            sample_decoder=sample_decoder,
            targets=targets,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )

    def corner_of(self, index: int) -> tuple[int, ...]:
        """Lowest corner of a patch in the volume, along the axes of `patch_shape`.

        Raises:
            ConfigError: samples are rows.
        """
        number, inner = self._place_of(index)
        return self._volumes[number][0].grid.corner(inner)

    def volume_of(self, index: int) -> int:
        """Number of the volume that contains a patch, among the stores of `data_path`.

        Raises:
            ConfigError: samples are rows.
        """
        return self._place_of(index)[0]

    def _place_of(self, index: int) -> tuple[int, int]:
        """The number of the volume, and that of the patch in it."""
        if not self._volumes:
            raise ConfigError("samples are rows, which have no corner: pass patch_shape")
        source: Any = self.sample_source
        whole = int(self.whole_indices(range(len(self))[index]))
        if isinstance(source, ConcatSource):
            return source.place(whole)
        return (0, whole)

    def position_of(self, index: int) -> tuple[float, ...]:
        """Position of the centre of a patch's lowest voxel, in the image's units, along the axes of
        `patch_shape`.

        Raises:
            ConfigError: samples are rows, or the volume is not an OME-NGFF image.
        """
        number, inner = self._place_of(index)
        patches, array = self._volumes[number]
        if array.image is None:
            raise ConfigError(
                f"{array.where} is not an OME-NGFF image, so its voxels have no position"
            )
        corner = patches.grid.corner(inner)
        position = array.image.scales[array.level, -len(corner) :] * corner
        position += array.image.translations[array.level, -len(corner) :]
        return tuple(position.tolist())

    @property
    def axes(self) -> tuple[str, ...] | None:
        """Names of the axes of a patch, such as ("c", "z", "y", "x"). None: the volume is not an
        OME-NGFF image.
        """
        image = self._volumes[0][1].image if self._volumes else None
        if image is None:
            return None
        return image.names

    @property
    def voxel_size(self) -> tuple[float, ...] | None:
        """Distance between voxels along each of `axes`, in the (first) image's units. None: the
        volume is not an OME-NGFF image.
        """
        array = self._volumes[0][1] if self._volumes else None
        if array is None or array.image is None:
            return None
        return tuple(array.image.scales[array.level].tolist())

    def held_nbytes(self) -> int | None:
        if not self._volumes:
            return super().held_nbytes()
        if "decode" in self._overridden:
            return None
        return sum(
            patches.sample_bytes(self._decoder.dtype) * len(patches) for patches, _ in self._volumes
        )
