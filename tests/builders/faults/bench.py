"""The model under test, what plain Transformers answers, and what a request's outcome is called."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

import runtime
from predictors.baselines import PopularityPredictor
from predictors.spec import ModelSpec
from runtime.config import ModelConfig, SystemConfig
from runtime.errors import CheckpointError, TransferError
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.packed import pack_model

TOKENS = torch.arange(12).reshape(1, 12)
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


@dataclass(frozen=True)
class Bench:
    """Made once; every scenario is a fork that finds it in memory."""

    folder: Path
    """With `disk`, which holds `model`, the checkpoint, and `packed`, a store of it."""
    spec: ModelSpec
    logits_TV: Tensor
    tokens_T: Tensor

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    def predictor(self) -> PopularityPredictor:
        """Forecasts the same experts of every layer, some of them rightly, so that reads run ahead
        of the router and some experts are never used."""
        shares = np.random.default_rng(0).random((self.spec.num_layers, self.spec.num_experts))
        return PopularityPredictor(self.spec, shares)

    def load(self, mode: str, disk: Path, *, system: SystemConfig | None = None) -> PreTrainedModel:
        """Serves the model from room for about a third of the experts.

        Args:
            mode: prefetch, on-demand, packed (with prefetching), tiers (with a second arena below
                the one that computes).
            disk: `self.disk`, or where it is mounted.
        """
        return runtime.load(
            ModelConfig(name="tiny", id=str(disk / "model")),
            budget="20%" if mode == "tiers" else "35%",
            host_budget="35%" if mode == "tiers" else None, device="cpu",
            predictor=None if mode == "on-demand" else self.predictor(),
            system=system or SystemConfig(), store=disk / "packed" if mode == "packed" else None,
        )  # fmt: skip

    def ask(self, model: PreTrainedModel) -> str:
        """`identical`, `wrong`, or `error: ...` where moecast refused in its own words; any other
        exception is let through and fails the scenario."""
        try:
            with torch.no_grad():
                logits_TV = model(TOKENS).logits
                tokens_T = model.generate(TOKENS, **GREEDY)
        except (TransferError, CheckpointError) as error:
            return f"error: {error}"
        same = torch.equal(logits_TV, self.logits_TV) and torch.equal(tokens_T, self.tokens_T)
        return "identical" if same else "wrong"


def make_bench(folder: Path) -> Bench:
    """Builds the model and the store, answers the request plainly, learns the specification."""
    disk = folder / "disk"
    # Tensors of 64 KiB: the least that is read past the page cache.
    tiny_qwen2_moe(disk / "model", num_layers=3, num_experts=16, hidden_size=256, expert_width=64)
    pack_model(disk / "model", disk / "packed")
    plain = plain_eager(disk / "model")
    with torch.no_grad():
        logits_TV, tokens_T = plain(TOKENS).logits, plain.generate(TOKENS, **GREEDY)
    with runtime.load(ModelConfig(name="tiny", id=str(disk / "model"))).moecast as handle:
        spec = handle.spec
    return Bench(folder, spec, logits_TV, tokens_T)
