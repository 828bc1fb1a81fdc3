"""Trains the reference model: one loop, checkpointed, resumable, deterministic by seed."""

import json
import logging
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from predictors.files import write_atomic
from train.checkpoint import from_bytes, to_bytes
from train.errors import TrainError
from train.reference.config import FitConfig

log = logging.getLogger(__name__)

MUON_LR, ADAM_LR = 0.02, 3e-3
"""Peak learning rates of the hidden matrices, and of embeddings, routers and norms."""
WARMUP_STEPS = 50
DECAY_SHARE = 0.2
"""Share of the steps at the end over which the learning rate falls to zero."""
BALANCE_LOSS = 0.01
"""Weight of each layer's load-balancing loss (Switch Transformers, equation 4)."""
Z_LOSS = 1e-4
"""Weight of the squared log-partition of the router, which keeps its logits small."""
CHECKPOINT = "checkpoint.ckpt"
SAVE_EVERY = 50
"""Steps between checkpoints; a killed run resumes from the last one."""


def architecture() -> Qwen2MoeConfig:
    """Return the model's configuration: 28 M parameters, narrow experts as in Qwen1.5-MoE.

    An expert is 60 KiB in bf16 (width 40), so that each linear layer is whole pages of 4 KiB: a
    transfer of one never needs a partial page.
    """
    return Qwen2MoeConfig(
        num_hidden_layers=12,
        intermediate_size=160,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=160,
        vocab_size=8_192,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=2_048,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        router_aux_loss_coef=0.0,
    )


def balance_losses(router_logits: tuple[Tensor, ...], top_k: int) -> tuple[Tensor, Tensor]:
    """Sums over layers: `E x sum_e(share_e x probability_e)`, and the mean squared log-partition.

    Per layer, unlike the model's own loss, which adds all layers up first and lets one layer's
    favourites be balanced by another's.
    """
    balance = z = torch.zeros(())
    for logits_TE in router_logits:
        num_experts = logits_TE.size(-1)
        chosen = logits_TE.topk(top_k, dim=-1).indices
        share_E = torch.bincount(chosen.flatten(), minlength=num_experts) / chosen.numel()
        balance = balance + num_experts * (share_E * logits_TE.softmax(-1).mean(0)).sum()
        z = z + logits_TE.logsumexp(-1).square().mean()
    return balance, z


def learning_rate(step: int, config: FitConfig) -> float:
    """Factor on the peak rates: warm-up, plateau, linear decay."""
    left = (config.steps - step) / max(1, DECAY_SHARE * config.steps)
    return min(1.0, (step + 1) / WARMUP_STEPS, left)


def make_optimisers(model: Qwen2MoeForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for embeddings, routers, norms and biases."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        router = name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
        hidden = parameter.dim() >= 2 and "embed" not in name and not router
        (matrices if hidden else rest).append(parameter)
    return [
        Muon(matrices, lr=MUON_LR),
        torch.optim.AdamW(rest, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def windows(tokens: np.ndarray, config: FitConfig, step: int) -> Tensor:
    """Return the step's batch, `(batch, context + 1)`; an epoch has each window once, shuffled."""
    count = (len(tokens) - 1) // config.context
    rows = []
    for i in range(step * config.batch_size, (step + 1) * config.batch_size):
        epoch, place = divmod(i, count)
        order = np.random.default_rng([config.seed, epoch]).permutation(count)
        start = int(order[place]) * config.context
        rows.append(tokens[start : start + config.context + 1].astype(np.int64))
    return torch.from_numpy(np.stack(rows))


def save(folder: Path, model, optims: list[torch.optim.Optimizer], step: int) -> None:
    """Atomic: a kill at any point leaves the previous or the new checkpoint."""
    weights = model.state_dict()
    weights.pop("lm_head.weight", None)  # tied to the embedding
    states = [optimiser.state_dict() for optimiser in optims]
    tree = {"step": step, "weights": dict(weights), "optimisers": states}
    write_atomic(folder / CHECKPOINT, to_bytes(tree))


def restore(folder: Path, model, optims: list[torch.optim.Optimizer]) -> int:
    """Load the last checkpoint and return the step to resume at; 0 if there is none."""
    path = folder / CHECKPOINT
    if not path.exists():
        return 0
    saved = from_bytes(path.read_bytes(), what=str(path))
    model.load_state_dict(saved["weights"], strict=False)
    for optimiser, state in zip(optims, saved["optimisers"], strict=True):
        optimiser.load_state_dict(state)
    return int(saved["step"])


def fit(config: FitConfig, folder: Path) -> Qwen2MoeForCausalLM:
    """Trains on `folder/train.bin`; appends a line a step to `folder/log.jsonl`."""
    torch.manual_seed(config.seed)
    model = Qwen2MoeForCausalLM._from_config(
        architecture(), experts_implementation="grouped_mm", attn_implementation="sdpa"
    )
    optims = make_optimisers(model)
    first = restore(folder, model, optims)
    tokens = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
    top_k = model.config.num_experts_per_tok
    with (folder / "log.jsonl").open("a") as lines:
        for step in range(first, config.steps):
            start = time.monotonic()
            batch = windows(tokens, config, step)
            output = model.model(batch[:, :-1], output_router_logits=True, use_cache=False)
            logits = F.linear(output.last_hidden_state, model.lm_head.weight)
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            balance, z = balance_losses(output.router_logits, top_k)
            (loss + BALANCE_LOSS * balance + Z_LOSS * z).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            factor = learning_rate(step, config)
            for optimiser, peak in zip(optims, (MUON_LR, ADAM_LR), strict=True):
                optimiser.param_groups[0]["lr"] = peak * factor
                optimiser.step()
                optimiser.zero_grad()
            row = {
                "step": step,
                "loss": round(loss.item(), 4),
                "balance": round(balance.item() / len(output.router_logits), 4),
                "grad_norm": round(float(norm), 3),
                "seconds": round(time.monotonic() - start, 2),
            }
            if not math.isfinite(row["loss"]):
                raise TrainError(
                    f"the training diverged in step {step}: {row}. The checkpoint before it is "
                    f"{folder / CHECKPOINT}; lower MUON_LR and ADAM_LR"
                )
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == config.steps:
                save(folder, model, optims, step + 1)
                log.info("%s", row)
    return model


# Quintic Newton-Schulz coefficients of K. Jordan, "Muon: an optimizer for hidden layers in neural
# networks" (2024): they push every singular value into about [0.7, 1.2].
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of `(..., rows, columns)`, approximately."""
    a, b, c = COEFFICIENTS
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: `torch.optim.Muon` takes 2-D parameters only, experts are 3-D."""

    def __init__(self, params, *, lr: float):
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                buffer = state["momentum"]
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, parameter.size(-2) / parameter.size(-1)) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)
