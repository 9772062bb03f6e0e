"""Chats: records of messages with a role and a content each, which the tokenizer's chat template
renders.

A record holds ``messages: [{"role": ..., "content": ...}, ...]`` as OpenAI and TRL have it, or
``conversations: [{"from": ..., "value": ...}, ...]`` as ShareGPT has it, and may hold ``system``,
``tools`` and ``chat_template_kwargs``.

Ids of chats are marked: an id that is supervised stands for itself, another one is stored as
-1 - id. So ids and labels are cut, cached and packed as ids alone are.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.decoder import Failed
from headrace.datasets.text.decoders import (
    CHAT,
    CHAT_FIELDS,
    TextOptions,
    Texts,
    check_supervised,
    has_role,
    has_template,
)
from headrace.errors import ConfigError, FormatError
from headrace.formats.text.records import TEXT_FIELD, field_of, made_by

SYSTEM = "system"
"""A field of a record: a message that comes first."""
TOOLS = "tools"
OPTIONS = "chat_template_kwargs"
"""Further fields, which the template is given."""
_ASSISTANT = "assistant"
_SENDERS = {
    "human": "user",
    "user": "user",
    "gpt": _ASSISTANT,
    "assistant": _ASSISTANT,
    "chatgpt": _ASSISTANT,
    "model": _ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_INSTEAD = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""What a message may have instead of a content."""
_FORM = '{"role": ..., "content": ...}'
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")


def chat_of(
    record: Any, field: str | Callable[[Any], Any]
) -> tuple[list[dict[str, Any]], list[int]]:
    """The messages of a record, and the weight of each: 0 if it is not supervised, though it is
    the assistant's.

    Args:
        record: as its file has it.
        field: the name of the field that holds the messages, or a callable from the record to them;
            "text": see `CHAT_FIELDS`.

    Returns:
        Messages with a "role", and a "content" or something instead of it; what is None is left
        out.

    Raises:
        FormatError: there is none, or it is not of the form above.
    """
    given = _messages_of(record, field)
    if isinstance(given, str):  # as cells of tables hold them
        given = _json_field({"messages": given}, "messages", list)
    if not isinstance(given, list) or not given:
        raise FormatError(
            f"its messages are {given!r:.60}: they must be a list of at least one {_FORM}"
        )
    messages = []
    for number, message in enumerate(given, 1):
        try:
            messages.append(_message(message))
        except FormatError as error:
            raise FormatError(f"message {number} of {len(given)} {error}") from None
    if isinstance(record, Mapping) and not callable(field):
        _add_system(messages, record.get(SYSTEM))
    weights = [message.pop("weight", 1) for message in messages]
    roles = [message["role"] for message in messages]
    if (_ASSISTANT, 1) not in zip(roles, weights, strict=True):
        raise FormatError(
            "it has no assistant's turn, or each of them has the weight 0, so there is nothing to "
            f"learn from it; its roles are {', '.join(roles)}"
        )
    return messages, weights


def _messages_of(record: Any, field: str | Callable[[Any], Any]) -> Any:
    if callable(field):
        return made_by(field, record)
    if field != TEXT_FIELD or not isinstance(record, (Mapping, list)):
        return field_of(record, field)
    if isinstance(record, list):
        return record
    for name in CHAT_FIELDS:
        if record.get(name) is not None:
            return record[name]
    has = ", ".join(map(repr, record)) or "none"
    raise FormatError(
        f"it has no field {' or '.join(map(repr, CHAT_FIELDS))}; it has {has}: pass text_field="
    )


def _add_system(messages: list[dict[str, Any]], system: Any) -> None:
    """Puts the field `SYSTEM` in front, unless a system's message is there already."""
    if system is None or (isinstance(system, str) and not system.strip()):
        return
    if not isinstance(system, str):
        raise FormatError(
            f"its field {SYSTEM!r} is {system!r:.60}: it must be a text, or pass as text_field= "
            "a callable, which leaves it out"
        )
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
    elif (first.get("content") or "").strip() != system.strip():
        raise FormatError(
            f"its field {SYSTEM!r} and its first message, the {first['role']}'s, are different "
            "texts: leave one of them out"
        )


def _message(message: Any) -> dict[str, Any]:
    """A message as templates take it, perhaps with its weight."""
    if not has_role(message):
        raise FormatError(f"is {message!r:.60}: it must be {_FORM}")
    made = {key: value for key, value in message.items() if value is not None}
    if "role" not in message:
        sender = message["from"]
        if not isinstance(sender, str) or sender not in _SENDERS:
            raise FormatError(
                f"is from {sender!r:.60}: it must be from one of {', '.join(map(repr, _SENDERS))}"
            )
        made = {"role": _SENDERS[sender], "content": message.get("value")}
    role = made.get("role")
    if not isinstance(role, str) or not role:
        raise FormatError(f"has the role {role!r:.60}: it must be a text such as 'user'")
    if made.get("weight", 1) not in (0, 1):
        raise FormatError(f"has the weight {made['weight']!r:.60}: it must be 0 or 1")
    content = made.get("content")
    if isinstance(content, list):
        joined = ""
        for number, part in enumerate(content, 1):
            text = part
            if isinstance(part, Mapping) and part.get("type") in ("text", None):
                text = part.get("text")
            if not isinstance(text, str):
                raise FormatError(
                    f"has at part {number} of its content {part!r:.60}: only parts "
                    f'{{"type": "text", "text": ...}} are read'
                )
            joined += text
        made["content"] = content = joined
    if any(map(made.get, _INSTEAD)) and (content is None or isinstance(content, str)):
        return made
    if not isinstance(content, str):
        raise FormatError(
            f"({role}) has no content that is a text, or a list of parts of text: it is "
            f"{content!r:.60}"
        )
    if role == _ASSISTANT and not content.strip():
        raise FormatError("(assistant) has an empty content, so there is nothing to learn from it")
    return made


def _json_field(record: Any, name: str, kind: type) -> Any:
    """A field that holds JSON, or its text; None where it holds nothing."""
    value = record.get(name) if isinstance(record, Mapping) else None
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"its field {name!r} is a text and no JSON: {error}") from None
    if not value:
        return None
    if not isinstance(value, kind):
        raise FormatError(f"its field {name!r} is {value!r:.60}, and no {kind.__name__} of JSON")
    return value


class Chats(Texts):
    """Each record is a chat, which the tokenizer's chat template renders.

    Args:
        source, options, value_of: as for `Texts`.

    Raises:
        ConfigError: the tokenizer has no chat template, or one that doesn't mark the assistant's
            turns; or an option has no meaning for chats.
    """

    def __init__(
        self, source: Any, options: TextOptions, value_of: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(source, options, CHAT, value_of)
        options.check_chats()
        tokenizer = options.tokenizer
        _check_template(tokenizer, options.chat_template)
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        about = json.dumps([tokenizer.chat_template, options.chat_template], default=repr)
        self._template_identity = hashlib.blake2b(about.encode(), digest_size=16).hexdigest()

    @property
    def identity(self) -> str | None:
        known = super().identity
        return None if known is None else f"{known}|chat:{self._template_identity}"

    def _applied(self, index: int, record: Any, **how: Any) -> tuple[Any, list[bool]]:
        """What the tokenizer's template makes of a chat, and which of the assistant's turns are
        supervised.
        """
        row = _plain(self.row(index, record))
        field = self.options.column or self.options.text_field
        if self.options.column is not None and not isinstance(row, dict):
            row = {field: row}
        messages, weights = chat_of(row, field)
        given = _json_field(row, OPTIONS, dict) or {}
        reserved = self._reserved & given.keys()
        if reserved:
            raise FormatError(
                f"its chat_template_kwargs hold {', '.join(sorted(reserved))}, which is not the "
                "template's: leave it out"
            )
        given["tools"] = _json_field(row, TOOLS, list)
        if self.options.chat_template is not None:
            given["chat_template"] = self.options.chat_template
        try:
            made = self.options.tokenizer.apply_chat_template(messages, **given, **how)
        except MemoryError:
            raise
        except Exception as error:
            raise FormatError(
                f"the chat template can't render it: {error or type(error).__name__}"
            ) from error
        each = zip(messages, weights, strict=True)
        return made, [weight != 0 for message, weight in each if message["role"] == _ASSISTANT]

    def text_and_target(self, index: int, record: Any) -> tuple[Any, Any]:
        return self._applied(index, record, tokenize=False)[0], None

    def decode_batch(self, items: Sequence[tuple[int, Any]], failed: Failed) -> list[Any]:
        made: list[Any] = []
        for number, (index, record) in enumerate(items):
            try:
                made.append(self._encoded(index, record))
            except Exception as error:
                made.append(failed(number, "can't be decoded", error))
        return made

    def _encoded(self, index: int, record: Any) -> npt.NDArray[np.int32]:
        """The ids of a chat with their marks: int32 [tokens]."""
        how = {"return_dict": True, "return_assistant_tokens_mask": True}
        made, turns = self._applied(index, record, **how)
        is_supervised = np.array(made["assistant_masks"], bool)
        if not is_supervised.any():
            raise FormatError(
                "the chat template marks no token of it as the assistant's: its {% generation %} "
                "must enclose each turn"
            )
        if not all(turns):
            begins = np.diff(is_supervised, prepend=False) & is_supervised
            if begins.sum() != len(turns):
                raise FormatError(
                    f"the chat template marks {begins.sum()} stretches of tokens in it, of "
                    f"{len(turns)} assistant's turns, so it can't be told which of them have the "
                    "weight 0: leave 'weight' out, or pass chat_template= one that marks each turn"
                )
            is_supervised &= np.array(turns)[np.cumsum(begins) - 1]
        ids = np.array(made["input_ids"]).astype(np.int32)
        ids = np.where(is_supervised, ids, ~ids)
        most = self.options.max_length
        if most is None or len(ids) <= most:
            return ids
        check_supervised(ids[:most])
        return ids[:most].copy()  # a view would hold all of it


def _plain(value: Any) -> Any:
    """A value as JSON has it: what is null in a struct of a table, as fields are that other rows
    have, is left out.
    """
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if one is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value


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
