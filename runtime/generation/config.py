"""Settings of `moecast chat` and `moecast batch`."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from predictors.config import chosen, require_at_least
from predictors.errors import MoecastError
from runtime.config import AUTO, ServedConfig, SystemConfig, check_sampling


@dataclass(frozen=True, kw_only=True)
class ChatConfig(ServedConfig):
    """A chat in the terminal."""

    budget: str = AUTO
    """Memory for experts: auto (all, or what free memory allows), a size (4GiB), or a share of all
    experts (50% or 0.5)."""
    system_prompt: str | None = None
    """System prompt of the conversation."""
    max_new_tokens: int = 512
    """Most tokens of an answer."""
    temperature: float = 0.7
    """0: greedy; above: sampled, by `seed`."""
    top_p: float = 0.95
    """Sample from the most likely tokens that together have this probability."""
    draft: str | None = None
    """Verify drafted tokens, several in a step, where that pays: prompt-lookup (what followed the
    same text before), or a small model with the same tokenizer (a folder, or ORG/NAME). Last bits
    may differ."""
    prefix_cache: bool = True
    """Go on with the KV cache of the turn before. Last bits may differ."""
    chat_template: Path | None = None
    """File with a chat template (Jinja) that replaces the tokenizer's."""

    def __post_init__(self) -> None:
        require_at_least(self, max_new_tokens=1)
        check_sampling(self.temperature, self.top_p)


class Offload(StrEnum):
    """Offload target of KV caches that exceed `kv_budget`."""

    AUTO = "auto"
    HOST = "host"
    DISK = "disk"
    NONE = "none"


class DensePlacement(StrEnum):
    """Place of the layers' dense weights: attention, routers, shared experts."""

    AUTO = "auto"
    MEMORY = "memory"
    STREAM = "stream"


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Batching of prompts and grouping of batches; the keyword arguments of `generate_many`."""

    batch_size: int = 8
    """Prompts per batch: rows computed in one forward pass."""
    n: str = AUTO
    """Batches per group, which go through each layer together; auto: the planner's smallest number
    that hides transfers."""
    max_new_tokens: int = 64
    """Most tokens to generate for a prompt that names no limit."""
    temperature: float = 0.0
    """0: greedy; above: sampled, by `seed`."""
    kv_budget: str | None = None
    """Memory for the KV caches of a group; none: no limit but free memory."""
    kv_offload: Offload = Offload.AUTO
    """Target of KV caches beyond `kv_budget`: host (models on a GPU only), disk, or none (refuse);
    auto: host for models on a GPU, else disk."""
    dense: DensePlacement = DensePlacement.AUTO
    """Place of the weights of attention, routers and shared experts: memory, or stream (each
    layer's are read ahead of its computation); auto: stream where holding them in `memory` leaves
    transfers that computation does not hide."""
    sinks: int = 4
    """Number of first tokens that attention keeps if `window` is not 0."""
    window: int = 0
    """Attend to the first `sinks` and the last `window` tokens only; outputs change. 0: to all."""

    def __post_init__(self) -> None:
        require_at_least(self, batch_size=1, max_new_tokens=1, sinks=0, window=0)
        check_sampling(self.temperature)
        if self.n != AUTO and not (self.n.isdecimal() and int(self.n) > 0):
            raise MoecastError(f"n={self.n}: must be auto or a positive number of batches")
        if self.window and self.kv_budget is not None:
            raise MoecastError(
                f"window={self.window} with kv_budget={self.kv_budget}: the KV caches of a window "
                "are small and are never offloaded; leave kv_budget out"
            )

    @property
    def asked_n(self) -> int | None:
        """The user's `n`, or None for auto."""
        return None if self.n == AUTO else int(self.n)


@dataclass(frozen=True, kw_only=True)
class BatchConfig(GroupConfig, ServedConfig):
    system: SystemConfig = chosen(SystemConfig, "system", "klotski")
    input: Path
    """Prompts, one JSON object per line: `prompt`, `messages` or `tokens`, and optionally `id` and
    `max_new_tokens`."""
    output: Path
    """Results, one line per finished prompt: id, text, tokens, finish_reason. The same command
    resumes an interrupted run."""
    overwrite: bool = False
    """Delete the results in `output` and start again."""
    budget: str = AUTO
    """Memory for experts: auto (all, or what free memory allows), a size (4GiB), or a share of all
    experts (50% or 0.5)."""
    quantise_attention: bool = False
    """Quantise the matrices of attention to four bits, as quantise=hqq of `pack` does experts;
    outputs change."""
    memory: str | None = None
    """Memory for experts, KV caches and dense weights together, split by the planner; replaces
    `budget` and `kv_budget`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output(self.input, self.output)
        if self.memory is not None and self.kv_budget is not None:
            raise MoecastError(
                f"memory={self.memory} with kv_budget={self.kv_budget}: the planner splits memory "
                "itself; give memory, or budget and kv_budget"
            )


def check_output(input_file: Path, output: Path) -> None:
    """Raises MoecastError if results would be written over the prompts, under any name."""
    settings = output.with_name(f"{output.name}.settings.json") if output.name else output
    for target in (output, settings):
        try:
            is_same = target.resolve() == input_file.resolve() or target.samefile(input_file)
        except (OSError, RuntimeError, ValueError):
            # One of them does not exist or cannot be read; what opens it says so.
            continue
        if is_same:
            raise MoecastError(
                f"output={output} would overwrite input={input_file}: give another output"
            )
