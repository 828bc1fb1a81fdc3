"""Options of the reference model's training; the defaults made the published model."""

from dataclasses import dataclass, field
from pathlib import Path

from predictors.config import RunConfig
from predictors.errors import MoecastError


@dataclass(kw_only=True)
class CorpusConfig:
    root: Path | None = None
    """Folder with `text/openstax`, `text/novels`, `instruct/` and `prompts/gsm8k_train.jsonl`."""
    num_tokens: int = 16_000_000
    """Tokens drawn into the training file, by the mixture below."""
    mixture: dict[str, float] = field(
        default_factory=lambda: {
            "textbooks": 0.30,
            "novels": 0.18,
            "templates": 0.20,
            "instructions": 0.10,
            "roleplay": 0.08,
            "arithmetic": 0.06,
            "docstrings": 0.08,
        }
    )
    """Share of the training tokens taken from each source."""


@dataclass(kw_only=True)
class FitConfig:
    steps: int = 1_250
    """Optimiser steps; the learning rate is constant, then falls linearly over the last part."""
    batch_size: int = 6
    """Windows in a step."""
    context: int = 512
    """Tokens in a training window."""
    muon_lr: float = 0.02
    """Peak learning rate of the hidden matrices."""
    adam_lr: float = 3e-3
    """Peak learning rate of embeddings, routers and norms."""
    warmup: int = 50
    """Steps over which the learning rates rise."""
    decay_share: float = 0.2
    """Share of the steps at the end over which the learning rate falls to zero."""
    balance: float = 0.01
    """Weight of each layer's load-balancing loss (Switch Transformers, equation 4)."""
    z_loss: float = 1e-4
    """Weight of the squared log-partition of the router, which keeps its logits small."""
    seed: int = 0
    """Seed of the initial weights and of the order of the windows."""
    save_every: int = 50
    """Steps between checkpoints; a killed run resumes from the last one."""


@dataclass(kw_only=True)
class ReferenceConfig(RunConfig):
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    output: Path | None = None
    """Folder of the trained model; default: RUN_DIR/qwen2-moe-tiny."""
    audit_windows: int = 200
    """Held-out windows of 512 tokens that the card's figures are taken over."""
    threads: int | None = None
    """CPU threads of torch; its own choice unless given."""

    def __post_init__(self) -> None:
        if self.fit.steps < 1 or self.audit_windows < 1:
            raise MoecastError("fit.steps and audit_windows must be at least 1")


SCHEMAS: dict[str, type] = {"reference": ReferenceConfig}
