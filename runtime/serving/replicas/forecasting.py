"""What a request's prompt will need, forecast before it has a replica.

A zoo entry that answers to the tokens alone (`token`) and the model's tokenizer: no model, no
Torch.
"""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from predictors.base import Predictor, Signal
from predictors.spec import ModelSpec
from runtime.errors import CheckpointError
from runtime.policy.routing import Mass, expected_mass

log = logging.getLogger(__name__)

MOST_TOKENS = 2048
"""Of a prompt, the last ones: a longer one needs nearly every expert anyway."""
MOST_CHARACTERS = 8 * MOST_TOKENS


class Forecaster:
    """Prompts of one model."""

    def __init__(self, spec: ModelSpec, predictor: Predictor, tokenizer: Tokenizer):
        self._spec, self._predictor, self._tokenizer = spec, predictor, tokenizer

    def mass(self, path: str, body: bytes) -> Mass | None:
        """`[L, E]`; None where the request has no prompt that can be read."""
        prompt = prompt_of(path, body)
        if not prompt:
            return None
        ids = self._tokenizer.encode(prompt[-MOST_CHARACTERS:]).ids[-MOST_TOKENS:]
        if not ids:
            return None
        tokens_T = np.array(ids, dtype=np.int64)
        forecasts = self._predictor.begin_step(tokens_T, np.zeros_like(tokens_T))
        return expected_mass(
            forecasts, num_layers=self._spec.num_layers, num_experts=self._spec.num_experts
        )


def forecaster_of(spec: ModelSpec, *, name: str, folder: Path, kind: str) -> Forecaster | None:
    """None where the zoo has no entry of that kind for the model: then load alone decides.

    Raises:
        CheckpointError: the entry needs more than tokens, or the model has no tokenizer.
        ZooError: the entry is damaged.
    """
    from runtime.engine.forecasters import forecaster

    predictor = forecaster(kind, spec, name=name)
    if predictor is None:
        log.warning(
            "requests go by load alone: there is no zoo entry %s/%s. `python -m train "
            "predictor=%s` makes one",
            name,
            kind,
            kind,
        )
        return None
    if predictor.signals != {Signal.TOKENS}:
        raise CheckpointError(
            f"forecaster={kind} needs {', '.join(sorted(predictor.signals))}: before a request has "
            "a replica there are its tokens only; use forecaster=token"
        )
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{file} is not there: prompts can not be read without it")
    return Forecaster(spec, predictor, Tokenizer.from_file(str(file)))


def prompt_of(path: str, body: bytes) -> str:
    """The text of a completion's or chat's prompt.

    Empty where there is none to be read, of which the server will tell the client.
    """
    if not path.endswith("/completions"):
        return ""
    try:
        asked = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(asked, dict):
        return ""
    if isinstance(asked.get("messages"), list):
        return "\n".join(content_of(message) for message in asked["messages"])
    prompt: Any = asked.get("prompt")
    if isinstance(prompt, list):
        prompt = prompt[0] if prompt else ""
    return prompt if isinstance(prompt, str) else ""


def content_of(message: object) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""
