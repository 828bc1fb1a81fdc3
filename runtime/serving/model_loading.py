"""Loads the served model in the engine thread."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from runtime.config import BUILTIN
from runtime.engine.loading import KVReserve, load_served
from runtime.errors import CheckpointError
from runtime.generation.drafting import drafting_options, load_draft_model
from runtime.generation.lockstep.group import LockstepGroup
from runtime.hf.kv import measure_cache_size
from runtime.hf.tokens import load_tokenizer
from runtime.policy.budget import parse_size
from runtime.serving.config import ServeConfig
from runtime.serving.model_info import KVCacheBudget, ModelInfo, read_model_info


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """The engine thread's model, with the group that steps its sequences in lockstep."""

    model: PreTrainedModel
    group: LockstepGroup
    info: ModelInfo
    drafting: Mapping[str, Any] = field(default_factory=dict)
    """Options of `generate` by which drafted tokens are verified."""


def load_model(config: ServeConfig) -> LoadedModel:
    """Load the model, its predictor and its tokenizer.

    Raises:
        MoecastError: the model, its predictor, its tokenizer or the chat template is missing or
            invalid, or the budget is too small.
    """
    kv_budget = None if config.kv_budget is None else parse_size(config.kv_budget, name="kv_budget")
    with ExitStack() as on_failure:
        reserve = KVReserve(num_sequences=config.max_running, num_bytes=kv_budget)
        draft_model = load_draft_model(config.draft, config.model)
        model = load_served(config, budget=config.budget, kv_reserve=reserve)
        on_failure.callback(model.close)
        budget = None if kv_budget is None else KVCacheBudget(measure_cache_size(model), kv_budget)
        folder = model.moecast.folder
        tokenizer = load_tokenizer(folder)
        try:
            info = read_model_info(
                model,
                tokenizer,
                name=config.model.name,
                aliases=frozenset({config.model.name, config.model.id} - {BUILTIN}),
                chat_template=config.chat_template,
                kv_budget=budget,
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"chat_template={config.chat_template} is not usable ({error}); name a file "
                "with a chat template (Jinja)"
            ) from error
        drafting = drafting_options(model, config.draft, draft_model=draft_model)
        on_failure.pop_all()
    return LoadedModel(model=model, group=LockstepGroup(model), info=info, drafting=drafting)
