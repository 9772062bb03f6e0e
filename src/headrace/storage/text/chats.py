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
from headrace.storage.text.records import TEXT_FIELD, field_of, made_by

CHAT_FIELDS = ("messages", "conversations")
"""The fields that hold a chat, where none is named; the first that a record has counts, and null
is none.
"""
SYSTEM, TOOLS, OPTIONS = "system", "tools", "chat_template_kwargs"
"""Further fields of a record: a message that comes first, and what its template is given."""
_FIRST_ROLES = ("system", "developer")
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
INSTEAD = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""What a message may have instead of a content."""


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


def chat_field(record: Any) -> str | None:
    """The field of a record that holds a chat; None: it holds none, or a text beside it."""
    if not isinstance(record, Mapping) or isinstance(record.get(TEXT_FIELD), str):
        return None
    for name in CHAT_FIELDS:
        messages = record.get(name)
        if (
            isinstance(messages, list)
            and messages
            and all(_has_role(message) for message in messages)
        ):
            return name
    return None


def _has_role(message: Any) -> bool:
    return isinstance(message, Mapping) and bool({"role", "from"} & message.keys())


def chat_of(record: Any, field: str | Callable[[Any], Any]) -> Chat:
    """The chat of a record.

    Args:
        record: as its file has it.
        field: the name of the field that holds the messages, or a callable from the record to them;
            "text": see `CHAT_FIELDS`.

    Raises:
        FormatError: there is none, or it is not of the form above.
    """
    messages = _messages_of(record, field)
    if isinstance(messages, str):  # as cells of tables hold them
        messages = _json_field({"messages": messages}, "messages", list, "a list of messages")
    if not isinstance(messages, list) or not messages:
        raise FormatError(
            f"its messages are {_short(messages)}: they must be a list of at least one {_FORM}"
        )
    made, weights = [], []
    for number, message in enumerate(messages, 1):
        try:
            one, weight = _message(message)
        except FormatError as error:
            raise FormatError(f"message {number} of {len(messages)} {error}") from None
        made.append(one)
        weights.append(weight)
    fields = record if isinstance(record, Mapping) else {}
    if not callable(field) and _is_missing(system := fields.get(SYSTEM), made[0]):
        made, weights = [{"role": "system", "content": system}, *made], [1, *weights]
    is_trained = [
        one["role"] == ASSISTANT and weight != 0 for one, weight in zip(made, weights, strict=True)
    ]
    if not any(is_trained):
        has = (
            "every assistant's turn has the weight 0"
            if any(one["role"] == ASSISTANT for one in made)
            else "it has no assistant's turn"
        )
        raise FormatError(
            f"{has}, so there is nothing to learn from it; its roles are "
            f"{', '.join(one['role'] for one in made)}"
        )
    tools = _json_field(fields, TOOLS, list, "a list of descriptions of tools")
    return Chat(
        made,
        is_trained,
        tools or None,
        _json_field(fields, OPTIONS, dict, "an object of keywords") or {},
    )


_FORM = '{"role": ..., "content": ...}'


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
    if first["role"] not in _FIRST_ROLES:
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
    if field == TEXT_FIELD and isinstance(record, Mapping):
        there = [name for name in CHAT_FIELDS if name in record]
        name = next(
            (name for name in there if record[name] is not None), there[0] if there else None
        )
        if name is None:
            has = ", ".join(map(repr, record)) or "none"
            raise FormatError(
                f"it has no field {' or '.join(map(repr, CHAT_FIELDS))}; it has {has}: pass "
                "text_field="
            )
        return record[name]
    return record if isinstance(record, list) and field == TEXT_FIELD else field_of(record, field)


def _message(message: Any) -> tuple[dict[str, Any], float]:
    """A message as templates take it, and its weight."""
    if not _has_role(message):
        raise FormatError(f"is {_short(message)}: it must be {_FORM}")
    if "role" in message:
        role, content = message["role"], message.get("content")
        made = {key: value for key, value in message.items() if value is not None}
        if not isinstance(role, str) or not role:
            raise FormatError(f"has the role {_short(role)}: it must be a text such as 'user'")
    else:
        sender, content = message["from"], message.get("value")
        if not isinstance(sender, str) or sender not in _SENDERS:
            raise FormatError(
                f"is from {_short(sender)}: it must be from one of {', '.join(map(repr, _SENDERS))}"
            )
        role = _SENDERS[sender]
        made = {"role": role, "content": content}
    weight = made.pop("weight", 1)
    if weight not in (0, 1):
        raise FormatError(f"has the weight {_short(weight)}: it must be 0 or 1")
    if isinstance(content, list):
        made["content"] = content = "".join(
            _text_of_part(part, number) for number, part in enumerate(content, 1)
        )
    has_instead = any(made.get(name) for name in INSTEAD)
    if content is None and not has_instead:
        raise FormatError(f"({role}) has no content, and no {INSTEAD[0]!r}: give it a text")
    if content is not None and not isinstance(content, str):
        raise FormatError(
            f"({role}) has a content of type {type(content).__name__}: it must be a text, or a "
            "list of parts"
        )
    if role == ASSISTANT and not has_instead and not (content or "").strip():
        raise FormatError("(assistant) has an empty content, so there is nothing to learn from it")
    return made, weight


def _text_of_part(part: Any, number: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in ("text", None) or not isinstance(text, str):
        raise FormatError(
            f'has at part {number} of its content {_short(part)}: only parts {{"type": "text", '
            f'"text": ...}} are read'
        )
    return text


def _json_field(record: Mapping[str, Any], name: str, kind: type, what: str) -> Any:
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
        raise FormatError(f"its field {name!r} is {_short(value)}: it must be {what}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
