"""A tokenizer's chat template: conversations to ids, and which of these are the assistant's.

The characters of the assistant's turns are found in the rendered text: where the template has ``{%
generation %}``, between its tags; else by rendering the chat up to each turn, which must give a
prefix of the whole. The tokens over these characters are supervised. Where a prefix does not fit,
that is an error: no label is a guess.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.datasets.text.marked import mark
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, FormatError
from headrace.storage.text.chats import ASSISTANT, INSTEAD, Chat
from headrace.tokenizer import ids_in, vocabulary_of

_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_OPEN, _CLOSE = "\ue000", "\ue001"  # private characters that stand for the tags
_USUAL_ROLES = ("system", "user", ASSISTANT, "tool")
_RESERVED = frozenset(
    (
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    )
)
_REMEDY = (
    "pass chat_template= one that encloses the assistant's turns in {% generation %} and {% "
    "endgeneration %}"
)

Spans = list[tuple[int, int]]
"""Where stretches of characters, or of tokens, begin and end."""


def has_template(tokenizer: Any) -> bool:
    """True if a tokenizer has a chat template of its own."""
    return callable(getattr(tokenizer, "apply_chat_template", None)) and bool(
        getattr(tokenizer, "chat_template", None)
    )


class ChatTemplate:
    """Renders chats, and makes ids of them. Picklable, if the tokenizer is.

    Args:
        tokenizer: a HuggingFace tokenizer, or what has ``apply_chat_template`` and is called with a
            text as these are.
        template: instead of the tokenizer's own: Jinja, or the name of one of several that it has.

    Attributes:
        identity: tells the template from others.

    Raises:
        ConfigError: there is none.
    """

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        applies = callable(getattr(tokenizer, "apply_chat_template", None))
        if not applies or not (template or has_template(tokenizer)):
            missing = "no chat template" if applies else "no apply_chat_template"
            remedy = (
                "pass chat_template=, or tokenizer= of a chat model"
                if applies
                else "pass tokenizer= one of HuggingFace's"
            )
            raise ConfigError(
                f"chats need a tokenizer with a chat template, and the {type(tokenizer).__name__} "
                f"has {missing}: {remedy}"
            )
        self._tokenizer, self._given = tokenizer, template
        own = getattr(tokenizer, "chat_template", None)
        self.identity: str = hashlib.blake2b(
            json.dumps([own, template], default=repr).encode(), digest_size=16
        ).hexdigest()
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {number for number, token in added.items() if token.special} | {
            *vocabulary_of(tokenizer).special
        }
        try:
            self._source(None)
        except ValueError as error:  # of several templates none is the default
            raise ConfigError(f"chat_template={template!r}: {error}") from error

    def text_of(self, chat: Chat) -> str:
        """The rendered chat.

        Raises:
            FormatError: the template can't render it, or leaves a message out.
        """
        if reserved := _RESERVED & chat.options.keys():
            raise FormatError(
                f"its chat_template_kwargs hold {', '.join(sorted(reserved))}, which is not the "
                "template's: leave it out"
            )
        text = self._render(chat, chat.messages)
        self._check_none_is_left_out(chat, text)
        return text

    def encode(self, chat: Chat) -> npt.NDArray[np.int32]:
        """The ids of a chat with their marks: int32 [tokens], see `headrace.datasets.text.marked`.

        Raises:
            FormatError: the template can't render it, or it can't be told which tokens are the
                assistant's.
        """
        text, source = self.text_of(chat), self._source(chat.tools)
        has_tags = _TAG.search(source) is not None
        spans = (
            self._between_tags(chat, text, source) if has_tags else self._by_prefixes(chat, text)
        )
        is_fast = bool(getattr(self._tokenizer, "is_fast", False))
        ids, stretches = (
            self._by_offsets(text, spans, not has_tags)
            if is_fast
            else self._by_counts(text, spans, not has_tags)
        )
        supervised = np.zeros(len(ids), bool)
        for begin, end in stretches:
            supervised[begin:end] = True
        return mark(ids, supervised)

    # -- rendering

    def _source(self, tools: list[Any] | None) -> str:
        """The Jinja of the template."""
        if callable(resolve := getattr(self._tokenizer, "get_chat_template", None)):
            return str(resolve(self._given, tools))
        return str(self._given or self._tokenizer.chat_template)

    def _render(
        self,
        chat: Chat,
        messages: list[dict[str, Any]],
        prompts: bool = False,
        source: str | None = None,
    ) -> str:
        """Some messages as a text; `prompts`: followed by what begins an assistant's turn;
        `source`: another template.
        """
        template = source or self._given
        given = {} if template is None else {"chat_template": template}
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=chat.tools,
                tokenize=False,
                add_generation_prompt=prompts,
                **given,
                **chat.options,
            )
        except MemoryError:
            raise
        except Exception as error:
            raise FormatError(
                f"the chat template can't render it: {error or type(error).__name__}"
            ) from error
        if not isinstance(text, str):
            raise ConfigError(
                "apply_chat_template(tokenize=False) of the tokenizer gave a "
                f"{type(text).__name__} and no text: pass another"
            )
        return text

    def _check_none_is_left_out(self, chat: Chat, text: str) -> None:
        """Raises a FormatError where a template passes over a message in silence, or writes None
        for a content that is not there.
        """
        messages = chat.messages
        without = [
            number
            for number, message in enumerate(messages, 1)
            if message.get("content", "") is None
        ]
        if without and "None" in text:
            blank = self._render(
                chat, [{**message, "content": message.get("content") or ""} for message in messages]
            )
            if text.count("None") > blank.count("None"):
                raise FormatError(
                    f"the chat template writes 'None' for message {without[0]}, whose content is "
                    "null: write an empty text there, or pass "
                    "chat_template= one that knows tool calls"
                )
        for number, message in enumerate(messages):
            role, content = message["role"], message.get("content") or ""
            if (
                role == ASSISTANT
                or (role in _USUAL_ROLES and content.strip() in text)
                or len(messages) == 1
            ):
                continue
            with contextlib.suppress(_NotRenderedError):
                if self._rest(chat, number) == text:
                    raise FormatError(
                        f"the chat template leaves out message {number + 1} of {len(messages)}: "
                        f"it does not know the role {role!r}; give "
                        "the message a role that it knows, or pass chat_template="
                    )

    def _rest(self, chat: Chat, number: int) -> str:
        """The chat without a message."""
        try:
            return self._render(chat, chat.messages[:number] + chat.messages[number + 1 :])
        except FormatError as error:
            raise _NotRenderedError from error

    # -- the characters of the assistant's turns

    def _between_tags(self, chat: Chat, text: str, source: str) -> Spans:
        """By the tags of the template, in whose place characters are written that nothing else
        has.
        """
        if _OPEN in text or _CLOSE in text:
            raise FormatError(
                "it holds U+E000 or U+E001, by which a chat template's {% generation %} is "
                "followed: remove the character"
            )

        def written(tag: re.Match[str]) -> str:
            return (
                f"{{%{tag[1]} if true %}}{{{{ '{_CLOSE if tag[2] else _OPEN}' }}}}{{% endif "
                f"{tag[3]}%}}"
            )

        pieces = re.split(
            f"([{_OPEN}{_CLOSE}])",
            self._render(chat, chat.messages, source=_TAG.sub(written, source)),
        )
        at, spans = 0, Spans()
        for piece in pieces:
            if piece == _OPEN:
                spans.append((at, -1))
            elif piece == _CLOSE:
                spans[-1] = (spans[-1][0], at)
            else:
                at += len(piece)
        if "".join(pieces[::2]) != text or pieces[1::2] != [_OPEN, _CLOSE] * len(spans):
            raise FormatError(
                "the chat template writes another text where its {% generation %} tags stand than "
                "without them, so they can't be followed: "
                "have the tags enclose what is written, not what is kept in a variable or passed "
                "to a filter"
            )
        turns = [
            trains
            for trains, message in zip(chat.is_trained, chat.messages, strict=True)
            if message["role"] == ASSISTANT
        ]
        if not all(turns):
            if len(turns) != len(spans):
                raise FormatError(
                    f"the chat template marks {len(spans)} stretches in it, of {len(turns)} "
                    "assistant's turns, so it can't be told which "
                    "of them have the weight 0: leave 'weight' out, or pass chat_template= one "
                    "that marks each turn"
                )
            spans = [span for span, trains in zip(spans, turns, strict=True) if trains]
        if not any(begin < end for begin, end in spans):
            raise FormatError(
                "the chat template marks nothing in it as the assistant's: its {% generation %} "
                "must enclose each turn"
            )
        return [(begin, end) for begin, end in spans if begin < end]

    def _by_prefixes(self, chat: Chat, text: str) -> Spans:
        """By what the template makes of the messages up to each turn."""
        spans = Spans()
        for number, message in enumerate(chat.messages):
            if not chat.is_trained[number]:
                continue
            begin = self._prefix(chat, text, number, True)
            end = (
                len(text)
                if number + 1 == len(chat.messages)
                else self._prefix(chat, text, number + 1, False)
            )
            if begin >= end:
                raise FormatError(
                    f"the chat template leaves out message {number + 1}, the assistant's: {_REMEDY}"
                )
            content = (message.get("content") or "").strip()
            is_found = content and content in text[begin:end] and not any(map(message.get, INSTEAD))
            before = text[begin:end].partition(content)[0].strip() if is_found else ""
            if before and self._prefix(chat, text, number, False) == begin:
                raise FormatError(
                    f"the chat template writes {before[-40:]!r} before message {number + 1}, and "
                    "nothing of it where add_generation_prompt "
                    f"is True, so it can't be told where the assistant's turn begins: {_REMEDY}, "
                    "or that has a generation prompt"
                )
            spans.append((begin, end))
        return spans

    def _prefix(self, chat: Chat, text: str, count: int, prompts: bool) -> int:
        """Characters of the first messages."""
        if count == 0:
            raise FormatError(
                "it begins with the assistant's turn, before which nothing can be rendered: "
                f"{_REMEDY}, or begin with another"
            )
        prefix = self._render(chat, chat.messages[:count], prompts)
        if not text.startswith(prefix):
            same = next(
                (at for at, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b),
                min(len(prefix), len(text)),
            )
            what = (
                f"what precedes message {count + 1}"
                if prompts
                else f"message {count}, the assistant's,"
            )
            raise FormatError(
                f"the chat template renders {what} as {prefix[same : same + 30]!r} by itself and "
                f"as {text[same : same + 30]!r} in the "
                f"whole chat, so it can't be told which tokens are the assistant's: {_REMEDY}"
            )
        return len(prefix)

    # -- the tokens over them

    def _by_offsets(self, text: str, spans: Spans, trims: bool) -> tuple[IntArray, Spans]:
        """Ids, and the tokens of each span, of a tokenizer that says where each token lies.
        `trims`: see `_trimmed`.
        """
        encoded = self._tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            padding=False,
            truncation=False,
        )
        if "offset_mapping" not in encoded:
            raise ConfigError(
                "the tokenizer's is_fast is True, and it gives no offset_mapping: give it one, or "
                "set is_fast to False"
            )
        ids, offsets = (
            ids_in(encoded["input_ids"]),
            np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2),
        )
        if len(ids) != len(offsets):
            raise ConfigError(
                f"the tokenizer gave {len(ids):,} ids and {len(offsets):,} offsets for a text: it "
                "must give one for each id"
            )
        ends = np.maximum.accumulate(offsets[:, 1]) if len(ids) else offsets[:, 1]
        before = np.concatenate([[0], ends])[:-1]
        # white space that was cut off lies there too
        begins = np.where(offsets[:, 0] < offsets[:, 1], offsets[:, 0], before)
        stretches, following = Spans(), {begin for begin, _ in spans}
        for begin, end in spans:
            inside = np.flatnonzero((ends > begin) & (begins < end))
            if not inside.size:
                continue
            first, last = int(inside[0]), int(inside[-1]) + 1
            if ends[last - 1] > end and end not in following:
                raise FormatError(
                    f"the token {text[begins[last - 1] : ends[last - 1]]!r} lies across the end "
                    "of an assistant's turn: pass "
                    "chat_template= one with a special token there"
                )
            blank = last
            while blank > first and not text[begins[blank - 1] : ends[blank - 1]].strip():
                blank -= 1
            stretches.append((first, self._trimmed(ids, first, blank, last) if trims else last))
        return ids, stretches

    def _by_counts(self, text: str, spans: Spans, trims: bool) -> tuple[IntArray, Spans]:
        """The same of a tokenizer that gives ids alone: those of the text up to a span must
        begin the ids of all of it.
        """
        ids = self._ids(text)
        stretches = Spans()
        for begin, end in spans:
            first, last = (
                len(ids) if at == len(text) else self._count(ids, text[:at]) for at in (begin, end)
            )
            blank = last
            while (
                trims
                and blank > first
                and not str(self._tokenizer.decode(ids[blank - 1 : last].tolist())).strip()
            ):
                blank -= 1
            stretches.append((first, self._trimmed(ids, first, blank, last) if trims else last))
        return ids, stretches

    def _trimmed(self, ids: IntArray, first: int, blank: int, last: int) -> int:
        """Where the tokens of a turn end: behind its end-of-turn token, where white space (from
        `blank` on) is all that follows.
        """
        return blank if blank > first and int(ids[blank - 1]) in self._special else last

    def _count(self, ids: IntArray, text: str) -> int:
        part = self._ids(text)
        if not np.array_equal(ids[: len(part)], part):
            raise FormatError(
                f"a token lies across {text[-30:]!r} and what follows, so it can't be told which "
                "tokens are the assistant's: use a fast "
                "tokenizer, which says where each token lies, or pass chat_template= one with "
                "special tokens there"
            )
        return len(part)

    def _ids(self, text: str) -> IntArray:
        encoded = self._tokenizer(text, add_special_tokens=False, padding=False, truncation=False)
        return ids_in(encoded["input_ids"])


class _NotRenderedError(Exception):
    """A part of a chat can't be rendered, which says nothing of the whole."""
