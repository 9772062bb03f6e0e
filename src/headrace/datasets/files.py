"""Files of any kind as samples, decoded by a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

from headrace.arguments import check_callable, check_choice, described
from headrace.core.dataset import BaseDataset
from headrace.core.options import UNSET, LoadingMode, ModeName, PathOptions, check_arguments
from headrace.datasets.image.image import checked_targets, labels_of
from headrace.datasets.image.labels import TargetsArgument, Wanted
from headrace.errors import ConfigError
from headrace.formats.files import FilesSource
from headrace.formats.resolve.resolver import DataPath
from headrace.io.remote.options import RemoteOptions


class FilesDataset(BaseDataset):
    """Files of any kind, such as audio, DICOM or point clouds, decoded by a function of your own.

    A sample is ``(input, target)``, or the input alone if there are no targets.

    Args:
        data_path: a folder (searched recursively and sorted), a file, a glob, a pattern with
            braces, fsspec URLs, or a list of these.
        extensions: ending of the files to read in any case, such as ".wav", or several.
        decode: a callable from the bytes of a file to the sample's input, such as an array, a
            tensor or a dict. It must be deterministic, and may run in several threads at once. Its
            exceptions are errors of the sample (`on_error`). Workers that are not forked receive it
            by pickle: define it in a module.
        transform: a callable that is applied to the input, or a list of callables.
        loading_mode: see `LoadingMode`.
        targets: as in `ImageDataset`, without masks: by default class folders, or labels by file
            name (a mapping, a DataFrame, or the path of a table), a callable that takes the path,
            one value for each file of a list, or None.
        target_name, label_separator, delimiter, unused_targets: options of tables of labels; see
            `ImageDataset`.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Attributes:
        classes, class_to_idx: sorted class names, and their numbers.
        label_columns, column_classes: see `ImageDataset`.

    Raises:
        DataNotFoundError: the path does not exist, or contains no such files.
        ConfigError: an argument is invalid, or files have no targets; the message names them.
    """

    reads_urls = True
    sample_source: FilesSource

    def __init__(
        self,
        data_path: DataPath,
        extensions: str | Sequence[str],
        decode: Callable[[bytes], Any],
        *,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        targets: TargetsArgument = UNSET,
        target_name: str | Sequence[str] | None = None,
        label_separator: str | None = None,
        delimiter: str | None = None,
        unused_targets: Literal["raise", "skip"] = "raise",
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        endings = (extensions,) if isinstance(extensions, str) else extensions
        is_listed = isinstance(endings, (list, tuple)) and len(endings) > 0
        if not is_listed or not all(isinstance(one, str) and one[:1] == "." for one in endings):
            raise ConfigError(
                "extensions must be the ending of the files, such as '.wav', or a list of endings, "
                f"not {extensions!r:.60}"
            )
        if not callable(decode):
            raise ConfigError(
                "decode must be a callable from the bytes of a file to a sample's input, not "
                f"{described(decode)}"
            )
        check_callable("decode", decode)
        check_choice("unused_targets", unused_targets, ("raise", "skip"))
        self.data_path = data_path
        self._decode = decode
        if targets is not UNSET:
            targets = checked_targets(targets, data_path)
        wanted = Wanted(
            targets, target_name, label_separator, delimiter, unused_targets=unused_targets
        )
        reach, common = RemoteOptions.split(options)
        source = FilesSource(data_path, endings, reach)
        try:
            labels = labels_of(wanted, source.listing, reach)
        except BaseException:
            source.close()
            raise
        self.classes: list[str] = labels.classes
        self.class_to_idx: dict[str, int] = dict(
            zip(self.classes, range(len(self.classes)), strict=True)
        )
        self.label_columns: dict[str, Any] = dict(labels.columns)
        self.column_classes: dict[str, list[str]] = dict(labels.column_classes)
        super().__init__(
            source,
            targets=labels.targets,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )

    def decode(self, record: bytes) -> Any:
        return self._decode(record)

    def held_nbytes(self) -> int | None:
        if not self.holds_encoded:
            return None
        return int(self.sample_source.sizes().sum())
