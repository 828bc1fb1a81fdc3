"""Loads what is served, in the thread that will work with it."""

from transformers import AutoTokenizer

from runtime.config import BUILTIN
from runtime.errors import CheckpointError
from runtime.group import Group
from runtime.loading import load_served
from runtime.serving.config import ServeConfig
from runtime.serving.facts import facts_of
from runtime.serving.service import Served


def name_of(config: ServeConfig) -> str:
    """What clients call the model."""
    return config.served_name or config.model.name


def open_served(config: ServeConfig) -> Served:
    """
    Raises:
        MoecastError: the model, its predictor, its tokenizer or the chat template is not there or
            is not what it should be, or the budget is too small.
    """
    model = load_served(config, budget=config.budget)
    folder = model.moecast.folder
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        facts = facts_of(
            model,
            tokenizer,
            name=name_of(config),
            aliases=frozenset({config.model.name, config.model.id} - {BUILTIN}),
            chat_template=config.chat_template,
        )
    except (OSError, ValueError) as error:
        model.close()
        raise CheckpointError(
            f"{folder}: the tokenizer or the chat template can not be read ({error}); a server "
            "needs tokenizer.json beside the weights"
        ) from error
    return Served(model=model, group=Group(model), facts=facts)
