"""Random models of many shapes, and predictors for them that were never trained.

Weights are small, so that a step is mostly bookkeeping, and random: times of the control plane do
not depend on their values. Untrained predictors have the layers, widths and inputs of trained ones
and cost the same. `stride` forecasts at random, so that what it prefetches is wasted; an untrained
`residual` is the routers themselves (`skip`). Both are exported as training exports them.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig

from benchmarks.random_model import write_checkpoint
from predictors.config import PredictorConfig
from runtime.config import ModelConfig
from runtime.hf.loading import build_skeleton
from train.export import quantise
from train.networks import PlainStack, network_specs
from train.nonlearned import RouterWeights
from train.pipeline import HORIZONS
from train.residual import ResidualStack
from train.reuse import ReuseStack
from zoo.entry import write_entry
from zoo.manifest import name_entry

DTYPE = "float32"
"""Has the same kernels on all processors, unlike bfloat16."""
VOCABULARY = 512
NAME = "random"


@dataclass(frozen=True, kw_only=True)
class RandomShape:
    """Sizes of a random model."""

    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int = 256
    expert_width: int = 40

    @property
    def name(self) -> str:
        return f"{self.num_layers}x{self.num_experts}"


SHAPES = {
    shape.name: shape
    for shape in (
        RandomShape(num_layers=12, num_experts=8, top_k=2),
        RandomShape(num_layers=12, num_experts=60, top_k=4),
        RandomShape(num_layers=24, num_experts=64, top_k=8),
        RandomShape(num_layers=48, num_experts=128, top_k=8),
        # Narrower: its 30,720 experts are in memory four times.
        RandomShape(num_layers=60, num_experts=512, top_k=10, hidden_size=64, expert_width=16),
    )
}
"""Those of Mixtral, of the model that this repository contains (and its widths), OLMoE,
Qwen3-30B-A3B and Qwen3-Next, rounded."""


def make_config(shape: RandomShape) -> Qwen3MoeConfig:
    """Return the configuration of a Qwen3-MoE of this shape."""
    heads = 4
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        dtype=DTYPE,
        vocab_size=VOCABULARY,
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.expert_width,
        moe_intermediate_size=shape.expert_width,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=shape.hidden_size // heads,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )


def write_model(shape: RandomShape, folder: Path, *, seed: int) -> ModelConfig:
    """Write a random checkpoint into a new folder."""
    write_checkpoint(make_config(shape), folder, seed=seed, quiet=True)
    return ModelConfig(name=NAME, id=str(folder), dtype=DTYPE)


@torch.no_grad()
def write_predictors(model: ModelConfig, folder: Path, *, seed: int) -> None:
    """Write untrained entries of the kinds stride, residual and reuse, a folder for each."""
    torch.manual_seed(seed)
    spec = build_skeleton(Path(model.id), dtype=DTYPE).spec(Path(model.id), model)
    routers, width = RouterWeights(model, spec), PredictorConfig().width
    # One after another: those of the largest model take a gigabyte each.
    for make in (
        lambda: PlainStack(spec, network_specs(spec, ["stride"]), width=width, loss="bce"),
        lambda: ResidualStack(spec, routers.weights[0], None, horizons=HORIZONS),
        lambda: ReuseStack(spec),
    ):
        for predictor in map(quantise, make().export(spec).values()):
            name = name_entry(NAME, predictor.kind)
            write_entry(folder / predictor.kind, predictor, name=name)
