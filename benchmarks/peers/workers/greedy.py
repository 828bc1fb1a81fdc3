"""Greedy answers of anything with Transformers' `generate`, token by token."""

from typing import Any

import torch
from peer_worker import AnswerFunction, OnToken
from transformers import StoppingCriteriaList


class TokenStreamer:
    """Receives the tokens of `generate`; the first call has the prompt."""

    def __init__(self, on_token: OnToken) -> None:
        self.on_token, self.prompt_seen, self.is_done = on_token, False, False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_seen and not self.is_done:
            self.is_done = not self.on_token(int(value.reshape(-1)[0]))
        self.prompt_seen = True

    def end(self) -> None:
        pass


def greedy_answers(model: Any) -> AnswerFunction:
    """Returns the greedy answers of a Transformers model, or of a wrapper with its `generate`.

    No token ends them, as in the other programs: to suppress one takes longer than to look for it.
    """
    model.generation_config.eos_token_id = None

    def answer(prompt: list[int], new_tokens: int, on_token: OnToken) -> None:
        streamer = TokenStreamer(on_token)
        inputs = torch.tensor([prompt])

        def is_done(tokens: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return torch.full((len(tokens),), streamer.is_done)

        with torch.inference_mode():
            model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=new_tokens,
                do_sample=False,
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([is_done]),
            )

    return answer
