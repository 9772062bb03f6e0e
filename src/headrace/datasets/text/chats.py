"""Records that hold conversations, as ids of which the assistant's are supervised."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.decoder import Failed
from headrace.datasets.text.marked import mark
from headrace.datasets.text.options import CHAT, TextOptions
from headrace.datasets.text.units import TokenizedTexts, decoded
from headrace.errors import ConfigError, FormatError
from headrace.storage.text.chats import ASSISTANT, Chat, chat_field, chat_of
from headrace.storage.text.source import LinesSource

_LOOKED_AT = 8  # records by which the kind of all is told
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")


class ChatTexts(TokenizedTexts):
    """Each record is a chat, which the tokenizer's chat template renders.

    Args:
        source: the records' bytes.
        options: of the dataset.

    Raises:
        ConfigError: the tokenizer has no chat template, or one that doesn't mark the assistant's
            turns; or an option has no meaning for chats.
    """

    name = CHAT
    source: Any

    def __init__(self, source: Any, options: TextOptions) -> None:
        super().__init__(source, options)
        options.check_chats()
        tokenizer = options.tokenizer
        template = options.chat_template
        _check_template(tokenizer, template)
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        about = json.dumps([tokenizer.chat_template, template], default=repr)
        self._template_identity = hashlib.blake2b(about.encode(), digest_size=16).hexdigest()

    @property
    def identity(self) -> str | None:
        known = super().identity
        return None if known is None else f"{known}|chat:{self._template_identity}"

    def chat(self, index: int, record: Any) -> Chat:
        """The chat of a record.

        Raises:
            FormatError: it holds none.
        """
        encoding, errors = self.source.codec
        row = self.source.fields(
            index, decoded(record, encoding, errors, lambda: self.source.offset_of(index))
        )
        return chat_of(row, self.options.text_field)

    def text_and_target(self, index: int, record: Any) -> tuple[str, Any]:
        return self._applied(self.chat(index, record), tokenize=False), None

    def decode_batch(self, items: Sequence[tuple[int, Any]], failed: Failed) -> list[Any]:
        made: list[Any] = []
        for number, (index, record) in enumerate(items):
            try:
                made.append(self._cut(self._encoded(self.chat(index, record))))
            except Exception as error:
                made.append(failed(number, "can't be decoded", error))
        return made

    def _applied(self, chat: Chat, **how: Any) -> Any:
        """What the tokenizer's template makes of a chat."""
        reserved = self._reserved & chat.options.keys()
        if reserved:
            raise FormatError(
                f"its chat_template_kwargs hold {', '.join(sorted(reserved))}, which is not the "
                "template's: leave it out"
            )
        apply = self.options.tokenizer.apply_chat_template
        given = {**chat.options, **how}
        if self.options.chat_template is not None:
            given["chat_template"] = self.options.chat_template
        try:
            return apply(chat.messages, tools=chat.tools, **given)
        except MemoryError:
            raise
        except Exception as error:
            raise FormatError(
                f"the chat template can't render it: {error or type(error).__name__}"
            ) from error

    def _encoded(self, chat: Chat) -> npt.NDArray[np.int32]:
        """The ids of a chat with their marks: int32 [tokens]."""
        made = self._applied(chat, return_dict=True, return_assistant_tokens_mask=True)
        is_supervised = np.array(made["assistant_masks"], bool)
        if not is_supervised.any():
            raise FormatError(
                "the chat template marks no token of it as the assistant's: its {% generation %} "
                "must enclose each turn"
            )
        turns = [
            is_trained
            for is_trained, message in zip(chat.is_trained, chat.messages, strict=True)
            if message["role"] == ASSISTANT
        ]
        if not all(turns):
            begins = np.diff(is_supervised, prepend=False) & is_supervised
            if begins.sum() != len(turns):
                raise FormatError(
                    f"the chat template marks {begins.sum()} stretches of tokens in it, of "
                    f"{len(turns)} assistant's turns, so it can't be told which of them have the "
                    "weight 0: leave 'weight' out, or pass chat_template= one that marks each turn"
                )
            is_supervised &= np.array(turns)[np.cumsum(begins) - 1]
        return mark(np.array(made["input_ids"]), is_supervised)

    def _cut(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        most = self.options.max_length
        if most is None or len(ids) <= most:
            return ids
        cut = ids[:most].copy()  # a view would hold all of it
        if not (cut >= 0).any():
            first = int(np.argmax(ids >= 0))
            raise FormatError(
                f"its first {most:,} tokens hold none of the assistant's, which begin at token "
                f"{first:,}: raise max_length above {first:,}"
            )
        return cut


def has_template(tokenizer: Any) -> bool:
    """True if a tokenizer has a chat template of its own."""
    applies = callable(getattr(tokenizer, "apply_chat_template", None))
    return applies and bool(getattr(tokenizer, "chat_template", None))


def _check_template(tokenizer: Any, template: str | None) -> None:
    """Raises a ConfigError unless a tokenizer's template, or one for it, can say which tokens are
    the assistant's.
    """
    needs = (
        f"chats need a tokenizer with a chat template, and the {type(tokenizer).__name__} has no"
    )
    if not callable(getattr(tokenizer, "apply_chat_template", None)):
        raise ConfigError(f"{needs} apply_chat_template: pass tokenizer= one of HuggingFace's")
    if template is None and not has_template(tokenizer):
        raise ConfigError(
            f"{needs} chat template: pass chat_template=, or tokenizer= of a chat model"
        )
    if not tokenizer.is_fast:
        raise ConfigError(f"{needs} offsets of tokens: pass tokenizer= a fast one of HuggingFace's")
    try:
        source = tokenizer.get_chat_template(template)
    except ValueError as error:  # of several templates none is the default
        raise ConfigError(f"chat_template={template!r}: {error}") from error
    if not _MARKS.search(source):
        raise ConfigError(
            "the chat template doesn't mark the assistant's turns, so it can't be told which "
            "tokens are labels: pass chat_template= a copy of it that writes each of these turns "
            "between {% generation %} and {% endgeneration %}"
        )


def hold_chats(source: LinesSource) -> bool:
    """True if the first of some records that can be read holds a chat."""
    for index in range(min(len(source), _LOOKED_AT)):
        try:
            text = source.read([index])[0].decode(*source.codec)
            return chat_field(source.fields(index, text)) is not None
        except (FormatError, UnicodeDecodeError):
            continue  # which is an error of that sample
    return False
