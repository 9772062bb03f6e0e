"""The arguments of `TextDataset`, checked before anything is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from headrace.arguments import check_integer
from headrace.errors import ConfigError
from headrace.formats.text.records import TEXT_FIELD, delimiters_of
from headrace.tokenizer import vocabulary_of

CHAT = "chat"
_CHOICES: dict[str, tuple[Any, ...]] = {
    "unit": (None, "file", "line", "record", CHAT),
    "labels": (None, "folders"),
    "packing": (True, False),
}
_OF_FILES = ("text_field", "labels", "delimiter")
"""What has no meaning for a column of another container."""
_PACKED = (
    "unit",
    "column",
    "target_field",
    "end_token",
    "text_field",
    "labels",
    "encoding",
    "errors",
    "chat_template",
    "delimiter",
)
"""What packing has decided already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What texts are, how they become ids, and how ids become samples: see `TextDataset`.

    Raises:
        ConfigError: arguments make no sense, or don't go together.
    """

    tokenizer: Any
    max_length: int | None = None
    unit: str | None = None
    column: str | None = None
    text_field: str | Callable[[Any], str] = TEXT_FIELD
    target_field: str | None = None
    labels: str | None = None
    stride: int | None = None
    packing: bool = False
    end_token: int | None = None
    encoding: str = "utf-8"
    errors: str = "strict"
    chat_template: str | None = None
    delimiter: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        vocabulary_of(self.tokenizer)  # raises where it is none
        delimiters_of(self.delimiter)  # raises where it is none
        for name, least in (("max_length", 1), ("stride", 1), ("end_token", 0)):
            check_integer(name, getattr(self, name), least, optional=True)
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(
                    f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}"
                )
        if not isinstance(self.text_field, str) and not callable(self.text_field):
            raise ConfigError(
                "text_field must be the name of one field, or a callable from a record to its "
                f"text, not {self.text_field!r}: of several fields pass for example lambda record: "
                'record["title"] + "\\n" + record["body"]'
            )
        for name in ("column", "target_field", "chat_template"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ConfigError(f"{name} must be one text that is not empty, not {value!r}")
        self._check_parts()
        self._check_unit()

    def _check_parts(self) -> None:
        if self.packing and self.stride is not None:
            raise ConfigError(
                "packing and stride can't be given together: a token is in one block, windows "
                "overlap"
            )
        if not self.is_in_parts:
            if self.end_token is not None:
                raise ConfigError(
                    "end_token has a meaning with stride or packing only: elsewhere the tokenizer "
                    "ends a text"
                )
            return
        if self.max_length is None:
            raise ConfigError(
                "stride and packing need max_length=, the tokens of a sample: pass for example "
                "max_length=1024"
            )
        if self.stride is not None and self.stride > self.max_length:
            raise ConfigError(
                f"stride={self.stride} is larger than max_length={self.max_length}: the tokens "
                "between two windows would be in none"
            )

    def _check_unit(self) -> None:
        if self.unit == CHAT:
            self.check_chats()
        elif self.chat_template is not None:
            raise ConfigError(
                f"chat_template is for chats: pass unit='chat', not unit={self.unit!r}"
            )
        if self.column is not None:
            given = self._given(_OF_FILES)
            if given or self.unit in ("file", "line"):
                what = ", ".join(given) or f"unit={self.unit!r}"
                raise ConfigError(f"{what} has no meaning with column=: leave it out")
            if self.target_field is not None and self.packing:
                raise ConfigError(
                    "target_field can't be given with packing: a block is of several texts"
                )
            return
        is_plain = self.unit not in ("record", CHAT)
        if is_plain and self.text_field != TEXT_FIELD:
            raise ConfigError(
                f"text_field={self.text_field!r} is a field of records: pass unit='record' or "
                "unit='chat'"
            )
        has_other_labels = is_plain or self.is_in_parts or self.labels is not None
        if self.target_field is not None and has_other_labels:
            raise ConfigError(
                "target_field is a field of records: it goes with unit='record', without stride, "
                "packing and labels"
            )

    @property
    def is_in_parts(self) -> bool:
        """True if samples are windows or blocks, which all tokens are needed for."""
        return self.packing or self.stride is not None

    def check_chats(self) -> None:
        """Raises a ConfigError for what has no meaning for chats, which only their files may have
        told that they are.
        """
        for name, why in (
            ("target_field", "their labels are the assistant's tokens"),
            ("labels", "their labels are the assistant's tokens"),
            ("stride", "windows would supervise a turn twice; packing=True makes blocks of them"),
            ("end_token", "their template ends each turn"),
        ):
            value = getattr(self, name)
            if value is not None:
                raise ConfigError(
                    f"{name}={value!r} can't be given for chats ({why}): leave it out"
                )

    def of_documents(self) -> TextOptions:
        """Those of the same texts as whole documents, without targets."""
        return replace(
            self, max_length=None, target_field=None, stride=None, packing=False, end_token=None
        )

    def packed_already(self) -> dict[str, Any]:
        """What was given, and packing has decided, by name."""
        return self._given(_PACKED)

    def _given(self, names: tuple[str, ...]) -> dict[str, Any]:
        usual = {field.name: field.default for field in fields(self)}
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value != usual[name]}
