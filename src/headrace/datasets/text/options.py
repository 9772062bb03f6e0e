"""The arguments of `TextDataset`, checked before anything is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import ConfigError
from headrace.storage.text.lines import Newline


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What texts are, and how they become ids."""

    tokenizer: Any
    max_length: int | None
    text_field: str | Callable[[Any], str]
    target_field: str | None
    encoding: str
    errors: str
    cache_dir: str | os.PathLike[str] | None
    progress: bool | None
    chat_template: str | None = None
    delimiter: str | None = None


CHAT, BEST_FIT = "chat", "bfd"
OF_READING = ("cache_dir", "on_error", "progress", "max_memory_usage")
"""Options of a dataset of windows, blocks or rows that its documents are read with."""
UNITS = ("file", "line", "record", CHAT)
_NEWLINES = (None, "\n", "\r", "\r\n")


def check_text_options(
    max_length: int | None,
    unit: str | None,
    text_field: Any,
    target_field: str | None,
    labels: str | None,
    stride: int | None,
    packing: bool | str,
    end_token: int | None,
    newline: Newline,
    chat_template: str | None = None,
) -> None:
    """Refuses arguments that make no sense, and those that don't go together.

    Raises:
        ConfigError: there are such.
    """
    for name, value, least in (
        ("max_length", max_length, 1),
        ("stride", stride, 1),
        ("end_token", end_token, 0),
    ):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least
        ):
            raise ConfigError(
                f"{name} must be an integer of at least {least}, or None, not {value!r}"
            )
    for name, chosen, allowed in (
        ("unit", unit, (None, *UNITS)),
        ("labels", labels, (None, "folders")),
        ("newline", newline, _NEWLINES),
    ):
        if chosen not in allowed:
            raise ConfigError(
                f"{name} must be one of {', '.join(map(repr, allowed))}, not {chosen!r}"
            )
    if not isinstance(packing, bool) and packing != BEST_FIT:
        raise ConfigError(f"packing must be True, False or {BEST_FIT!r}, not {packing!r}")
    if not isinstance(text_field, str) and not callable(text_field):
        raise ConfigError(
            "text_field must be the name of one field, or a callable from a record to its text, "
            f"not {text_field!r}: of several fields "
            'pass for example lambda record: record["title"] + "\\n" + record["body"]'
        )
    if not isinstance(target_field, (str, type(None))):
        raise ConfigError(
            f"target_field must be the name of one field, or None, not {target_field!r}"
        )
    in_parts = bool(packing) or stride is not None
    if packing and stride is not None:
        raise ConfigError(
            "packing and stride can't be given together: a token is in one block or row, windows "
            "overlap"
        )
    if in_parts and max_length is None:
        given = f"packing={packing!r}" if packing else f"stride={stride}"
        raise ConfigError(
            f"{given} needs max_length=, the tokens of a sample: pass for example max_length=1024"
        )
    if stride is not None and max_length is not None and stride > max_length:
        raise ConfigError(
            f"stride={stride} is larger than max_length={max_length}: the tokens between two "
            "windows would be in none"
        )
    if end_token is not None and not in_parts:
        raise ConfigError(
            "end_token has a meaning with stride or packing only: elsewhere the tokenizer ends a "
            "text"
        )
    if not (chat_template is None or (isinstance(chat_template, str) and chat_template)):
        raise ConfigError(
            "chat_template must be a text, Jinja or the name of one of the tokenizer's, or None, "
            f"not {chat_template!r}"
        )
    if unit == CHAT:
        if target_field is not None:
            raise ConfigError(
                "target_field can't be given for chats, whose labels are the assistant's tokens: "
                "leave it out"
            )
        check_chat_options(True, stride, labels)
    elif chat_template is not None:
        raise ConfigError(f"chat_template is for chats: pass unit='chat', not unit={unit!r}")
    if target_field is not None and (
        unit not in (None, "record") or in_parts or labels is not None
    ):
        raise ConfigError(
            "target_field is a field of records: it goes with unit='record', without stride, "
            "packing and labels"
        )


def check_chat_options(are_chats: bool, stride: int | None, labels: str | None) -> None:
    """Refuses what has no meaning for chats, also where only their files have told that they are.

    Raises:
        ConfigError: there is such.
    """
    for name, value, why in (
        (
            "stride",
            stride,
            "windows would supervise a turn twice; packing=True makes blocks of them",
        ),
        ("labels", labels, "their labels are the assistant's tokens"),
    ):
        if are_chats and value is not None:
            raise ConfigError(f"{name}={value!r} can't be given for chats ({why}): leave it out")
