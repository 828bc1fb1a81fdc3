"""The command `generate`: continue a prompt; text to stdout, statistics to stderr."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from predictors.errors import MoecastError
from predictors.table import Table
from predictors.units import MIB
from runtime.commands.progress import print_auto_budget, print_line, strip_control_characters
from runtime.config import DenseFormat, GenerateConfig
from runtime.engine.loading import load_served
from runtime.engine.memory import freeze_objects
from runtime.generation.answer import Answer
from runtime.generation.config import ChatConfig
from runtime.generation.drafting import DraftPace, drafting_options, load_draft_model
from runtime.generation.sampling import drawing_options
from runtime.hf.decode_step import apply_decode_threads, read_decode_threads
from runtime.hf.forced_routing import MEANINGLESS, force_routing
from runtime.hf.grouped import set_reference
from runtime.hf.layers import find_moe_layers
from runtime.hf.loading import load_plain, read_config, refuse_plain
from runtime.hf.model_faults import check_length, check_tokens
from runtime.hf.tokens import context_length, load_tokenizer
from runtime.presets import describe_choice
from runtime.store.model_source import resolve


class ReferenceMismatch(RuntimeError):
    """An internal error: the served model generated other tokens than plain Transformers."""


def run(config: GenerateConfig) -> dict[str, Any]:
    """Write the text as it is generated, then the statistics; returns both with the token ids."""
    notes = Console(stderr=True)
    if config.verify:
        refuse_plain(resolve(config.model))
        if config.model.dense_format is not DenseFormat.OWN:
            raise MoecastError(
                f"verify=true: plain Transformers has no {config.model.dense_format.value} layers; "
                f"compare with the same kernels: moecast verify {describe_choice(config.model)} "
                f"model.dense_format={config.model.dense_format.value}"
            )
    folder = resolve(config.model)
    # Refused before any weights are read.
    tokenizer = load_tokenizer(folder)
    prompt_tokens = encode(config.prompt, tokenizer, read_config(folder), config.max_new_tokens)
    draft_model = load_draft_model(config.draft, config.model)
    model = load_served(
        config,
        budget=config.budget,
        forced_routing=config.routing is not None,
        draft_model=draft_model,
    )
    with model.moecast as handle, force_routing(handle.layers, config.routing):
        print_auto_budget(handle)
        if config.routing is not None:
            print_line(MEANINGLESS, notes)
        freeze_objects()
        if sys.stdout.isatty():
            Console().print(config.prompt, style="bold", end="", markup=False, highlight=False)
        pace = DraftPace()
        drafting = drafting_options(model, config.draft, pace, draft_model=draft_model)
        try:
            tokens, answer = generate(
                model, tokenizer, prompt_tokens, config, write_text, **drafting
            )
        finally:
            write_text("\n")
        stats = handle.stats()
        spec = handle.spec.as_dict()
        reference, plain_name = None, ""
        if config.verify:
            kernels = config.model.decode_kernels
            plain = load_plain(handle.folder, dtype=model.dtype, decode_kernels=kernels)
            # The number that was chosen for the size of the served experts.
            apply_decode_threads(plain, read_decode_threads(model), expert_bytes=1)
            plain_name = f"plain Transformers {set_reference(plain, handle.exact).value}"
            with force_routing(find_moe_layers(plain), config.routing):
                reference, _ = generate(plain, tokenizer, prompt_tokens, config, lambda _: None)
    times = {
        "num_prompt_tokens": len(prompt_tokens),
        "num_tokens": answer.num_tokens,
        "first_token_seconds": answer.first_token_seconds,
        "seconds": answer.seconds,
    }
    make_stats_table(stats, config, answer, len(prompt_tokens)).print(notes)
    if reference is not None:
        if reference != tokens:
            raise ReferenceMismatch(
                f"plain Transformers generated {reference}, this run {tokens}{note_drafts(config)}"
            )
        print_line(f"verified: the same {len(tokens)} tokens as {plain_name}", notes)
    return {
        "model": spec,
        "prompt": config.prompt,
        "note": None if config.routing is None else MEANINGLESS,
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "verified": None if reference is None else True,
        "answer": times,
        "drafts": None if config.draft is None else asdict(pace),
        "stats": stats,
    }


def note_drafts(config: GenerateConfig) -> str:
    if config.draft is None:
        return ""
    return (
        ": with draft= last bits differ, and between equally likely tokens so may the choice; "
        "without it, the numbers are the same to the last bit"
    )


def encode(
    prompt: str, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, max_new_tokens: int
) -> list[int]:
    """Encode the prompt.

    Raises:
        MoecastError: the prompt has no tokens.
        CheckpointError: prompt and answer do not fit in the model's context.
    """
    tokens = tokenizer(prompt)["input_ids"]
    if not tokens:
        raise MoecastError(f"prompt={prompt!r} has no tokens")
    check_tokens(tokens, config)
    check_length(len(tokens), max_new_tokens, context_length(config))
    return tokens


def write_text(text: str) -> None:
    """Write to stdout: as it is to a file or pipe, without control characters to a terminal."""
    sys.stdout.write(strip_control_characters(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: list[int],
    config: GenerateConfig,
    write: Callable[[str], None],
    **drafting: Any,
) -> tuple[list[int], Answer]:
    """Return the ids of the new tokens, and their times; text goes to `write` as it comes."""
    torch.manual_seed(config.seed)
    answer = Answer(lambda delta: write(delta.text))
    tokens = answer.generate(
        model,
        tokenizer,
        prompt_tokens,
        max_new_tokens=config.max_new_tokens,
        **drawing_options(config.temperature),
        **drafting,
    )
    answer.end()
    return tokens, answer


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{100 * value:.1f} %"


def _milliseconds(value: float | None) -> str:
    return "not measured" if value is None else f"{1000 * value:.1f} ms"


def _mebibytes(value: int) -> str:
    return f"{value / MIB:.1f} MiB"


def make_stats_table(
    stats: dict[str, Any],
    config: GenerateConfig | ChatConfig,
    answer: Answer | None = None,
    num_prompt_tokens: int = 0,
) -> Table:
    """Make a table of speed, hits, bytes and memory.

    Args:
        stats: of the engine.
        config: names the system and the budget.
        answer: one generated text, for its throughput.
        num_prompt_tokens: of its prompt.
    """
    prefill = _milliseconds(stats["ttft_seconds"])
    decode = f"{_milliseconds(stats['tpot_seconds'])} per token"
    if answer is not None and (first := answer.first_token_seconds) is not None:
        prefill = f"{_milliseconds(first)}, {num_prompt_tokens / first:.1f} tokens/s"
        if (tpot := answer.tpot_seconds) is not None:
            decode = f"{1 / tpot:.1f} tokens/s, {_milliseconds(tpot)} per token"
    return Table.facts(
        {
            "prefill: time to first token (TTFT)": prefill,
            "decode: time per output token (TPOT)": decode,
            "experts requested": f"{stats['requests']}",
            "hits": f"{stats['hits']} ({_share(stats['hit_rate'])})",
            "joined in transfer": f"{stats['joins']}",
            "misses": f"{stats['misses']}",
            "predicted and fetched in time (FetchRate)": _share(stats["fetch_rate"]),
            "needed experts predicted and in time": _share(stats["promoe_good_pred"]),
            "bytes moved": _mebibytes(stats["bytes_moved"]),
            "bytes prefetched": _mebibytes(stats["bytes_prefetched"]),
            "bytes prefetched and wasted": _mebibytes(stats["bytes_wasted"]),
            "time waiting for experts": _milliseconds(stats["stall_seconds"]),
            "time in the predictor": _milliseconds(stats["predictor_seconds"]),
            "memory for experts": _mebibytes(stats["arena_bytes"]),
            "peak memory of the process": _mebibytes(stats["peak_memory_bytes"]),
        },
        f"system {config.system.name}, budget {config.budget}",
    )
