"""`moecast generate`: generate for one prompt and print the run's statistics."""

from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from predictors.errors import MoecastError
from runtime.commands.stats_table import make_stats_table
from runtime.config import GenerateConfig
from runtime.engine.loading import load_served
from runtime.errors import CheckpointError
from runtime.hf.loading import load_plain
from runtime.hf.tokens import context_length, load_tokenizer


class ReferenceMismatch(RuntimeError):
    """An internal error: the served model generated other tokens than plain Transformers."""


def run(config: GenerateConfig) -> dict[str, Any]:
    """Print text and statistics; returns both with the token ids."""
    console = Console()
    model = load_served(config, budget=config.budget)
    with model.moecast as handle:
        tokenizer = load_tokenizer(handle.folder)
        prompt_tokens = encode(config.prompt, tokenizer, model, config.max_new_tokens)
        tokens = generate(model, prompt_tokens, config)
        stats = handle.stats()
        spec = handle.spec.as_dict()
        reference = None
        if config.verify:
            plain = load_plain(handle.folder, dtype=model.dtype)
            reference = generate(plain, prompt_tokens, config)
    new_tokens = tokens[len(prompt_tokens) :]
    text = tokenizer.decode(new_tokens, skip_special_tokens=True)
    console.print(config.prompt, style="bold", end="", markup=False, highlight=False)
    console.print(text, markup=False, highlight=False)
    console.print()
    console.print(make_stats_table(stats, budget=config.budget, system=config.system.name))
    if reference is not None:
        if reference != tokens:
            raise ReferenceMismatch(f"plain Transformers generated {reference}, this run {tokens}")
        console.print(f"verified: the same {len(new_tokens)} tokens as plain Transformers eager")
    return {
        "model": spec,
        "prompt": config.prompt,
        "text": text,
        "prompt_tokens": prompt_tokens,
        "tokens": new_tokens,
        "verified": None if reference is None else True,
        "stats": stats,
    }


def encode(
    prompt: str, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, max_new_tokens: int
) -> list[int]:
    """Encode the prompt.

    Raises:
        MoecastError: the prompt has no tokens.
        CheckpointError: prompt and answer do not fit in the model's context.
    """
    tokens = tokenizer(prompt)["input_ids"]
    if not tokens:
        raise MoecastError(f"prompt={prompt!r} has no tokens")
    context = context_length(model.config)
    if context is not None and len(tokens) + max_new_tokens > context:
        raise CheckpointError(
            f"{len(tokens)} prompt tokens and max_new_tokens={max_new_tokens} exceed the model's "
            f"context of {context}; shorten the prompt or lower max_new_tokens"
        )
    return tokens


def generate(model: PreTrainedModel, prompt_tokens: list[int], config: GenerateConfig) -> list[int]:
    """Generate; returns the token ids of prompt and continuation."""
    torch.manual_seed(config.seed)
    sampling: dict[str, Any] = {"do_sample": False}
    if config.temperature > 0:
        sampling = {"do_sample": True, "temperature": config.temperature}
    inputs = torch.tensor([prompt_tokens], device=model.device)
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=config.max_new_tokens,
        **sampling,
    )
    return output[0].tolist()
