"""Chats: records of messages, which the tokenizer's chat template renders.

A record has ``messages: [{"role": ..., "content": ...}, ...]`` (OpenAI, TRL) or ``conversations:
[{"from": ..., "value": ...}, ...]`` (ShareGPT), and optionally ``system``, ``tools`` and
``chat_template_kwargs``.

Ids of chats are marked: a supervised id is stored as it is, any other as -1 - id. So ids and labels
are cut, cached and packed like ids alone.
"""

from __future__ import annotations

import hashlib
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
"""The field of a record with the first message."""
TOOLS = "tools"
OPTIONS = "chat_template_kwargs"
"""Fields that are passed to the template."""
_ASSISTANT = "assistant"
_SENDERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), _ASSISTANT),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""The roles of ShareGPT's senders."""
_INSTEAD = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields that a message may have instead of content."""
_FORM = '{"role": ..., "content": ...}'
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")


def chat_of(
    record: Any, field: str | Callable[[Any], Any]
) -> tuple[list[dict[str, Any]], list[int]]:
    """The messages of a record, and the weight of each (0: the message is not supervised).

    Args:
        record: the record as stored.
        field: name of the field with the messages, or a callable from the record to them; "text":
            one of `CHAT_FIELDS`.

    Returns:
        Messages with "role", and "content" or something instead of it; None values are left out.

    Raises:
        FormatError: there are no messages, or they don't have the form above.
    """
    given = _messages_of(record, field)
    if isinstance(given, str):  # in cells of tables
        given = _json_field({"messages": given}, "messages", list)
    if not isinstance(given, list) or not given:
        raise FormatError(f"its messages must be a list of at least one {_FORM}, not {given!r:.60}")
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
            "it has no assistant's turn with a weight, so there is nothing to learn from it; its "
            f"roles are {', '.join(roles)}"
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
    raise FormatError(f"it has {has}, and no 'messages' or 'conversations': pass text_field=")


def _add_system(messages: list[dict[str, Any]], system: Any) -> None:
    """Puts the field `SYSTEM` first, unless there is a system message already."""
    if system is None or (isinstance(system, str) and not system.strip()):
        return
    if not isinstance(system, str):
        raise FormatError(f"its field {SYSTEM!r} must be a string, not {system!r:.60}")
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
    elif (first.get("content") or "").strip() != system.strip():
        raise FormatError(
            f"its field {SYSTEM!r} differs from its first message, the {first['role']}'s: leave "
            "one of them out"
        )


def _message(message: Any) -> dict[str, Any]:
    """A message as templates take it, with its weight if it has one."""
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
        raise FormatError(f"has the role {role!r:.60}: it must be a string such as 'user'")
    if made.get("weight", 1) not in (0, 1):
        raise FormatError(f"has the weight {made['weight']!r:.60}: it must be 0 or 1")
    content = made.get("content")
    if any(map(made.get, _INSTEAD)) and (content is None or isinstance(content, str)):
        return made
    if not isinstance(content, str):
        raise FormatError(f"({role}) has content that is not a string: {content!r:.60}")
    if role == _ASSISTANT and not content.strip():
        raise FormatError("(assistant) has empty content, so there is nothing to learn from it")
    return made


def _json_field(record: Any, name: str, kind: type) -> Any:
    """A field that holds JSON, parsed or as text; None if it is empty."""
    value = record.get(name) if isinstance(record, Mapping) else None
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"its field {name!r} is not JSON: {error}") from None
    if not value:
        return None
    if not isinstance(value, kind):
        raise FormatError(f"its field {name!r} must be a JSON {kind.__name__}, not {value!r:.60}")
    return value


class Chats(Texts):
    """Records that are chats, which the tokenizer's chat template renders.

    Args:
        source, options, value_of: see `Texts`.

    Raises:
        ConfigError: the tokenizer has no chat template, or one that does not mark the assistant's
            turns; or an option does not apply to chats.
    """

    def __init__(
        self, source: Any, options: TextOptions, value_of: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(source, options, CHAT, value_of)
        options.check_chats()
        _check_template(options.tokenizer, options.chat_template)

    @property
    def identity(self) -> str | None:
        known = super().identity
        if known is None:
            return None
        templates = [self.options.tokenizer.chat_template, self.options.chat_template]
        about = json.dumps(templates, default=repr).encode()
        return f"{known}|chat:{hashlib.blake2b(about, digest_size=16).hexdigest()}"

    def _applied(self, index: int, record: Any, **how: Any) -> tuple[Any, list[bool]]:
        """A chat rendered by the tokenizer's template, and which of the assistant's turns are
        supervised.
        """
        row = _plain(self.row(index, record))
        field = self.options.column or self.options.text_field
        if self.options.column is not None and not isinstance(row, dict):
            row = {field: row}
        messages, weights = chat_of(row, field)
        given = _json_field(row, OPTIONS, dict) or {}
        given["tools"] = _json_field(row, TOOLS, list)
        if self.options.chat_template is not None:
            given["chat_template"] = self.options.chat_template
        try:
            made = self.options.tokenizer.apply_chat_template(messages, **given, **how)
        except MemoryError:
            raise
        except Exception as error:
            what = error or type(error).__name__
            raise FormatError(f"the chat template can't render it: {what}") from error
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
            advice = "enclose each assistant's turn in {% generation %}"
            raise FormatError(f"the chat template marks no token: {advice}")
        if not all(turns):
            begins = np.diff(is_supervised, prepend=False) & is_supervised
            if begins.sum() != len(turns):
                marks = f"{begins.sum()} ranges of tokens for {len(turns)} assistant's turns"
                raise FormatError(f"the chat template marks {marks}: leave 'weight' out")
            is_supervised &= np.array(turns)[np.cumsum(begins) - 1]
        ids = np.array(made["input_ids"]).astype(np.int32)
        ids = np.where(is_supervised, ids, ~ids)
        most = self.options.max_length
        if most is None or len(ids) <= most:
            return ids
        check_supervised(ids[:most])
        return ids[:most].copy()  # a view would hold all of it


def _plain(value: Any) -> Any:
    """A value as in JSON. Null fields are left out: the structs of a table have the fields of all
    rows.
    """
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if one is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value


def _check_template(tokenizer: Any, template: str | None) -> None:
    """Raises a ConfigError unless the template can tell which tokens are the assistant's."""
    has_no = f"chats need a HuggingFace tokenizer, and the {type(tokenizer).__name__} has no"
    if not callable(getattr(tokenizer, "apply_chat_template", None)):
        raise ConfigError(f"{has_no} apply_chat_template: pass another tokenizer=")
    if template is None and not has_template(tokenizer):
        raise ConfigError(f"{has_no} chat template: pass chat_template=, or that of a chat model")
    if not tokenizer.is_fast:
        raise ConfigError(f"{has_no} offsets of tokens: pass a fast tokenizer")
    try:
        source = tokenizer.get_chat_template(template)
    except ValueError as error:  # none of several templates is the default
        raise ConfigError(f"chat_template={template!r}: {error}") from error
    if not _MARKS.search(source):
        raise ConfigError(
            "the chat template does not mark the assistant's turns, whose tokens are the labels: "
            "pass chat_template= a copy that encloses each in {% generation %} and "
            "{% endgeneration %}"
        )
