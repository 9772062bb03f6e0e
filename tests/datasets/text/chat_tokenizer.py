"""A fast tokenizer of transformers, made in memory: its tokens are characters and special words."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

UNMARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}"
)
"""Does not say which tokens are the assistant's."""
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
{%- endfor %}"""
"""The same text, with the assistant's turns marked as TRL marks them."""
CALLS = MARKED.replace(
    "message.content + '<|im_end|>'", "(message.content or message.tool_calls) ~ '<|im_end|>'"
)
"""Knows messages that call tools."""
PAD, START, END, UNKNOWN = range(4)
FIRST = 4
"""The id of the first character of `string.printable`."""


def chat_tokenizer(template: Any = MARKED) -> PreTrainedTokenizerFast:
    words = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|unknown|>", *string.printable]
    numbers = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(numbers, unk_token=words[UNKNOWN]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=words[PAD],
        eos_token=words[END],
        unk_token=words[UNKNOWN],
        additional_special_tokens=[words[START]],
    )
    made.chat_template = template
    return made
