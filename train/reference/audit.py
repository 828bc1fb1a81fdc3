"""Is the reference model any good: loss against n-gram baselines, balance and skew of its routing.

Shape suffixes: T tokens, L layers, E experts, K top_k.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import Qwen2MoeForCausalLM

WINDOW = 512
MOST_WINDOWS, LRU_TOKENS = 200, 3_000
"""Held-out windows, and tokens through a cache, that figures are taken on."""
BIGRAM_WEIGHT = 0.75
"""Interpolation of bigram with unigram; fitted roughly, the comparison does not hang on it."""


def ngram_losses(
    train: NDArray[np.uint16], held_out: NDArray[np.uint16], vocab: int
) -> dict[str, float]:
    """Nats per held-out token of an add-one unigram and an interpolated bigram model."""
    counts = np.bincount(train, minlength=vocab) + 1.0
    unigram = counts / counts.sum()
    pairs = train[:-1].astype(np.int64) * vocab + train[1:]
    seen, times = np.unique(pairs, return_counts=True)
    wanted = held_out[:-1].astype(np.int64) * vocab + held_out[1:]
    place = np.minimum(np.searchsorted(seen, wanted), len(seen) - 1)
    joint = np.where(seen[place] == wanted, times[place], 0)
    first = np.bincount(train[:-1], minlength=vocab)[held_out[:-1]]
    conditional = joint / np.maximum(first, 1)
    mixed = BIGRAM_WEIGHT * conditional + (1 - BIGRAM_WEIGHT) * unigram[held_out[1:]]
    return {
        "unigram": float(-np.log(unigram[held_out[1:]]).mean()),
        "bigram": float(-np.log(mixed).mean()),
    }


def entropy_share(counts_E: NDArray[np.int64]) -> float:
    """Entropy of the experts' shares over that of an even spread."""
    shares = counts_E[counts_E > 0] / counts_E.sum()
    return float(-(shares * np.log(shares)).sum() / np.log(len(counts_E)))


def lru_hit_rate(experts_TK: NDArray[np.int64], capacity: int) -> float:
    """Share of the tokens' experts that a least-recently-used cache holds when they come."""
    fetch = lru_cache(maxsize=capacity)(lambda _: None)
    for expert in experts_TK.ravel().tolist():
        fetch(expert)
    return fetch.cache_info().hits / experts_TK.size


@torch.no_grad()
def audit(
    model: Qwen2MoeForCausalLM, train: NDArray[np.uint16], held_out: NDArray[np.uint16]
) -> dict[str, Any]:
    """Figures for the card, from the first windows of the held-out tokens."""
    model.eval()
    num_experts, top_k = model.config.num_experts, model.config.num_experts_per_tok
    losses: list[float] = []
    chosen: list[NDArray[np.int64]] = []
    num_windows = min(MOST_WINDOWS, (len(held_out) - 1) // WINDOW)
    for i in range(num_windows):
        window = torch.from_numpy(held_out[i * WINDOW : (i + 1) * WINDOW + 1].astype(np.int64))
        output = model(window[None, :-1], output_router_logits=True)
        losses.append(F.cross_entropy(output.logits[0], window[1:]).item())
        layers = [logits.topk(top_k, dim=-1).indices for logits in output.router_logits]
        chosen.append(torch.stack(layers).numpy())
    experts_LTK = np.concatenate(chosen, axis=1)
    used = held_out[: num_windows * WINDOW + 1]
    rows = []
    for layer, experts_TK in enumerate(experts_LTK):
        counts = np.bincount(experts_TK.ravel(), minlength=num_experts)
        documents = [
            entropy_share(np.bincount(part[layer].ravel(), minlength=num_experts))
            for part in chosen
        ]
        rows.append(
            {
                "entropy_share": entropy_share(counts),
                "largest_share": float(counts.max() / counts.sum()),
                "request_entropy_share": float(np.mean(documents)),
                "lru_hit_rate_50": lru_hit_rate(experts_TK[:LRU_TOKENS], num_experts // 2),
            }
        )
    return {
        "loss_nats": {
            "model": float(np.mean(losses)),
            **ngram_losses(train, used, model.config.vocab_size),
            "tokens": len(used) - 1,
        },
        "routing": {
            "layers": rows,
            "lru_hit_rate_50": float(np.mean([row["lru_hit_rate_50"] for row in rows])),
        },
    }
