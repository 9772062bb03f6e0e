"""A tokenizer with chats as HuggingFace's, whose tokens are characters and special words."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

_TOKEN = r"<\|[a-z_]+\|>|."
_WORDS = ["<|im_start|>", "<|im_end|>", "<|pad|>"]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Any role, and no tools."""
MARKED = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
"""The same text, with the assistant's turns marked as TRL marks them."""


class _Generation(Extension):
    """{% generation %} as a tag that writes what it encloses."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Any) -> str:
        return str(caller())


class ChatTokenizer:
    """Picklable; `joins` pairs of characters that become one token."""

    all_special_ids = (1, 2, 3)
    pad_token_id = 3

    def __init__(self, chat_template: Any = CHATML, is_fast: bool = True, joins: str = "") -> None:
        self.chat_template, self.is_fast, self.joins = chat_template, is_fast, joins
        self.fingerprint = f"{joins}"

    def __len__(self) -> int:
        return 0x110010

    def __call__(
        self,
        text: str,
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        **_: Any,
    ) -> dict[str, Any]:
        assert not add_special_tokens, "a template writes its special tokens itself"
        assert not return_offsets_mapping or self.is_fast, "slow tokenizers have no offsets"
        pattern = f"{re.escape(self.joins)}|{_TOKEN}" if self.joins else _TOKEN
        found = list(re.finditer(pattern, text, re.DOTALL))
        encoded: dict[str, Any] = {"input_ids": [self._id(match[0]) for match in found]}
        if return_offsets_mapping:
            encoded["offset_mapping"] = [match.span() for match in found]
        return encoded

    def _id(self, token: str) -> int:
        if token in _WORDS:
            return _WORDS.index(token) + 1
        return 9 if len(token) > 1 else ord(token) + 16

    def decode(self, ids: Any) -> str:
        return "".join(
            _WORDS[one - 1] if one < 4 else self.joins if one == 9 else chr(one - 16)
            for one in map(int, ids)
        )

    def apply_chat_template(
        self, messages: Any, *, tokenize: bool, chat_template: str | None = None, **options: Any
    ) -> str:
        assert not tokenize
        assert {"tools", "add_generation_prompt"} <= options.keys()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation]
        )
        environment.globals["raise_exception"] = _raise
        template = environment.from_string(chat_template or self.chat_template)
        return template.render(messages=messages, **options)


def _raise(message: str) -> None:
    raise ValueError(message)
