"""Options of the reference model's training; the defaults made the published model."""

from dataclasses import dataclass, field
from pathlib import Path

from predictors.config import RunConfig
from predictors.errors import MoecastError


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    root: Path | None = None
    """Folder with `text/openstax`, `text/novels`, `instruct/` and `prompts/gsm8k_train.jsonl`."""
    num_tokens: int = 16_000_000
    """Tokens drawn into the training file, by the mixture of `train/reference/corpus.py`."""


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    steps: int = 1_250
    """Optimiser steps; the learning rate rises over the first 50, and falls linearly over the last
    fifth."""
    batch_size: int = 6
    """Windows in a step."""
    context: int = 512
    """Tokens in a training window."""
    seed: int = 0
    """Seed of the initial weights and of the order of the windows."""


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(RunConfig):
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    output: Path | None = None
    """Folder of the trained model; default: RUN_DIR/qwen2-moe-tiny."""
    prompts: Path | None = None
    """Folder for prompts of several kinds, to train and score predictors with; then only these are
    written, and no model is trained."""
    threads: int | None = None
    """CPU threads of torch; its own choice unless given."""

    def __post_init__(self) -> None:
        if self.fit.steps < 1:
            raise MoecastError(f"fit.steps={self.fit.steps}: must be at least 1")
