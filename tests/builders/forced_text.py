"""Answers with a given text, from models whose language is too weak to write it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from runtime.serving import choice
from tests.builders.plain_answers import TOKENIZER, ids

END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
Force = Callable[..., None]
"""`force_text` for the time of a test."""


class Forced(LogitsProcessor):
    """Leaves only the next token of a text, and then the end of the turn, or any token."""

    def __init__(self, text: str, num_prompt: int, *, is_whole: bool):
        self._tokens = [*ids(text), *[END] * is_whole]
        self._num_prompt = num_prompt
        self._is_whole = is_whole

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        number = input_ids.shape[1] - self._num_prompt
        if number >= len(self._tokens) and not self._is_whole:
            return scores
        number = min(number, len(self._tokens) - 1)
        forced = torch.full_like(scores, float("-inf"))
        forced[0, self._tokens[number]] = 0.0
        return forced


def force_text(monkeypatch: pytest.MonkeyPatch, *texts: str, is_whole: bool = True) -> None:
    """Make all answers of servers in this process these texts, one after another.

    The last one is that of all further answers, too.

    Args:
        is_whole: the answers end with the texts; else the model goes on.
    """
    make = choice.make_logits_processors
    waiting = list(texts)

    def forced(*args: Any, num_prompt: int, **options: Any) -> LogitsProcessorList:
        processors = make(*args, num_prompt=num_prompt, **options)
        text = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        processors.append(Forced(text, num_prompt, is_whole=is_whole))
        return processors

    monkeypatch.setattr(choice, "make_logits_processors", forced)


HERMES_TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
For each call: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}
{{ "\\n<tool_call>\\n" }}{"name": "{{ call.function.name }}", \
"arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% elif enable_thinking is defined %}<think>

</think>

{% endif %}{% endif %}"""
"""A template as Qwen's, in few lines."""
