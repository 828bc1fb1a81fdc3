"""Loads what is served, in the thread that will work with it."""

from contextlib import ExitStack

from transformers import AutoTokenizer, PreTrainedModel

from runtime.budget import parse_size
from runtime.config import BUILTIN
from runtime.engine.loading import load_served
from runtime.errors import CheckpointError
from runtime.generation.lockstep import LockstepGroup
from runtime.hf.kv import measure_cache_size
from runtime.serving.caches import CacheBudget
from runtime.serving.config import ServeConfig
from runtime.serving.facts import Facts, facts_of
from runtime.serving.service import Served


def name_of(config: ServeConfig) -> str:
    """What clients call the model."""
    return config.served_name or config.model.name


def open_served(config: ServeConfig) -> Served:
    """Load the model that is served, with its tokenizer and its facts.

    Raises:
        MoecastError: the model, its predictor, its tokenizer or the chat template is not there or
            is not what it should be, or the budget is too small.
    """
    kv_budget = None if config.kv_budget is None else parse_size(config.kv_budget, name="kv_budget")
    with ExitStack() as unless_opened:
        model = load_served(config, budget=config.budget)
        unless_opened.callback(model.close)
        caches = None if kv_budget is None else CacheBudget(measure_cache_size(model), kv_budget)
        facts = _facts(config, model, caches)
        unless_opened.pop_all()
    return Served(model=model, group=LockstepGroup(model), facts=facts)


def _facts(config: ServeConfig, model: PreTrainedModel, caches: CacheBudget | None) -> Facts:
    folder = model.moecast.folder
    try:
        return facts_of(
            model,
            AutoTokenizer.from_pretrained(folder, local_files_only=True),
            name=name_of(config),
            aliases=frozenset({config.model.name, config.model.id} - {BUILTIN}),
            chat_template=config.chat_template,
            caches=caches,
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: the tokenizer or the chat template can not be read ({error}); a server "
            "needs tokenizer.json beside the weights"
        ) from error
