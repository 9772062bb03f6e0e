"""Conversations in records: messages with a role and a content each, checked, in the form that chat
templates take.

A record holds ``messages: [{"role": ..., "content": ...}, ...]`` as OpenAI and TRL have it, or
``conversations: [{"from": ..., "value": ...}, ...]`` as ShareGPT has it, and may hold ``system``,
``tools`` and ``chat_template_kwargs``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.errors import FormatError
from headrace.formats.text.records import TEXT_FIELD, field_of, made_by

CHAT_FIELDS = ("messages", "conversations")
"""The fields that hold a chat, where none is named; the first that a record has counts, and null
is none.
"""
SYSTEM = "system"
"""A field of a record: a message that comes first."""
TOOLS = "tools"
OPTIONS = "chat_template_kwargs"
"""Further fields, which the template is given."""
ASSISTANT = "assistant"
_SENDERS = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "chatgpt": ASSISTANT,
    "model": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_INSTEAD = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""What a message may have instead of a content."""
_FORM = '{"role": ..., "content": ...}'


class Chat(NamedTuple):
    """A conversation.

    Attributes:
        messages: each has a "role", and a "content" or something instead of it; what is None is
            left out.
        is_trained: for each message whether it is supervised: assistant's turns, but those of
            ``"weight": 0``.
        tools: descriptions of tools, or None.
        options: further arguments of the template.
    """

    messages: list[dict[str, Any]]
    is_trained: list[bool]
    tools: list[Any] | None
    options: dict[str, Any]


def are_messages(value: Any) -> bool:
    """True if a value is a list of messages."""
    return isinstance(value, list) and bool(value) and all(map(_has_role, value))


def chat_field(record: Any) -> str | None:
    """The field of a record that holds a chat; None: it holds none, or a text beside it."""
    if isinstance(record, Mapping) and not isinstance(record.get(TEXT_FIELD), str):
        for name in CHAT_FIELDS:
            if are_messages(record.get(name)):
                return name
    return None


def _has_role(message: Any) -> bool:
    return isinstance(message, Mapping) and ("role" in message or "from" in message)


def chat_of(record: Any, field: str | Callable[[Any], Any]) -> Chat:
    """The chat of a record.

    Args:
        record: as its file has it.
        field: the name of the field that holds the messages, or a callable from the record to them;
            "text": see `CHAT_FIELDS`.

    Raises:
        FormatError: there is none, or it is not of the form above.
    """
    given = _messages_of(record, field)
    if isinstance(given, str):  # as cells of tables hold them
        given = _json_field({"messages": given}, "messages", list)
    if not isinstance(given, list) or not given:
        raise FormatError(
            f"its messages are {_short(given)}: they must be a list of at least one {_FORM}"
        )
    messages = []
    weights = []
    for number, message in enumerate(given, 1):
        try:
            one, weight = _message(message)
        except FormatError as error:
            raise FormatError(f"message {number} of {len(given)} {error}") from None
        messages.append(one)
        weights.append(weight)
    fields = record
    if not isinstance(record, Mapping):
        fields = {}
    system = None if callable(field) else fields.get(SYSTEM)
    if _is_missing(system, messages[0]):
        messages.insert(0, {"role": "system", "content": system})
        weights.insert(0, 1)
    is_trained = [
        message["role"] == ASSISTANT and weight != 0
        for message, weight in zip(messages, weights, strict=True)
    ]
    if not any(is_trained):
        roles = ", ".join(message["role"] for message in messages)
        raise FormatError(
            "it has no assistant's turn, or each of them has the weight 0, so there is nothing to "
            f"learn from it; its roles are {roles}"
        )
    tools = _json_field(fields, TOOLS, list)
    return Chat(messages, is_trained, tools, _json_field(fields, OPTIONS, dict) or {})


def _is_missing(system: Any, first: Mapping[str, Any]) -> bool:
    """True if the field `SYSTEM` of a record holds a message that its messages, of which the
    first is given, have not.
    """
    if system is None or (isinstance(system, str) and not system.strip()):
        return False
    if not isinstance(system, str):
        raise FormatError(
            f"its field {SYSTEM!r} is {_short(system)}: it must be a text, or pass as text_field= "
            "a callable, which leaves it out"
        )
    if first["role"] not in ("system", "developer"):
        return True
    if (first.get("content") or "").strip() != system.strip():
        raise FormatError(
            f"its field {SYSTEM!r} and its first message, the {first['role']}'s, are different "
            "texts: leave one of them out"
        )
    return False


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


def _message(message: Any) -> tuple[dict[str, Any], float]:
    """A message as templates take it, and its weight."""
    if not _has_role(message):
        raise FormatError(f"is {_short(message)}: it must be {_FORM}")
    if "role" in message:
        made = {key: value for key, value in message.items() if value is not None}
        role = message["role"]
        if not isinstance(role, str) or not role:
            raise FormatError(f"has the role {_short(role)}: it must be a text such as 'user'")
    else:
        sender = message["from"]
        if not isinstance(sender, str) or sender not in _SENDERS:
            raise FormatError(
                f"is from {_short(sender)}: it must be from one of {', '.join(map(repr, _SENDERS))}"
            )
        role = _SENDERS[sender]
        made = {"role": role, "content": message.get("value")}
    weight = made.pop("weight", 1)
    if weight not in (0, 1):
        raise FormatError(f"has the weight {_short(weight)}: it must be 0 or 1")
    content = made.get("content")
    if isinstance(content, list):
        content = "".join(_text_of_part(part, number) for number, part in enumerate(content, 1))
        made["content"] = content
    if any(made.get(name) for name in _INSTEAD) and content is None:
        return made, weight
    if not isinstance(content, str):
        has = "no content"
        if content is not None:
            has = f"a content of type {type(content).__name__}"
        raise FormatError(f"({role}) has {has}: give it a text, or a list of parts of text")
    if role == ASSISTANT and not content.strip() and not any(map(made.get, _INSTEAD)):
        raise FormatError("(assistant) has an empty content, so there is nothing to learn from it")
    return made, weight


def _text_of_part(part: Any, number: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in ("text", None):
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise FormatError(
        f'has at part {number} of its content {_short(part)}: only parts {{"type": "text", '
        f'"text": ...}} are read'
    )


def _json_field(record: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field that holds JSON, or its text; None where it holds nothing."""
    value = record.get(name)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"its field {name!r} is a text and no JSON: {error}") from None
    if value is None or (isinstance(value, (str, Sequence, Mapping)) and not value):
        return None
    if not isinstance(value, kind):
        raise FormatError(f"its field {name!r} is {_short(value)}, and no {kind.__name__} of JSON")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."
