"""What attention to sinks and a window costs: the reference model on held-out text.

Texts are cut from the held-out requests, one after another. Teacher-forced: loss of each token and
whether the likeliest one is the whole attention's. What eight- and four-bit experts cost is
`benchmarks/quantised.py`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from collect.traces import Trace
from runtime.config import BUILTIN_MODELS
from runtime.engine.plain import load_plain
from runtime.generation.kv.cache_factory import SinkCacheFactory

LENGTH, ROWS, BEGIN = 160, 8, 64
"""Tokens of a text, texts, and where scoring begins: before it a window holds all."""
SINKS = 4
WINDOWS = (28, 60)


@torch.no_grad()
def quality(path: Path) -> list[dict[str, Any]]:
    """A row for each window; `window` 0 is attention to all."""
    trace = Trace.open(path)
    stream = np.asarray(trace.tokens)[trace.rows("held_out")]
    count = min(ROWS, len(stream) // LENGTH)
    texts = torch.from_numpy(stream[: count * LENGTH].astype(np.int64)).reshape(count, LENGTH)
    model = load_plain(BUILTIN_MODELS / "qwen2_moe_tiny", dtype=torch.float32)
    whole = model(texts[:, :-1]).logits[:, BEGIN - 1 :]
    rows = [row_of(0, whole, whole, texts)]
    for window in WINDOWS:
        caches = SinkCacheFactory(model, sinks=SINKS, window=window)
        cache = caches.make(torch.zeros(count, dtype=torch.long), max_cache_length=LENGTH)
        logits = [model(texts[:, :BEGIN], past_key_values=cache).logits[:, -1]]
        for at in range(BEGIN, LENGTH - 1):
            logits.append(model(texts[:, at : at + 1], past_key_values=cache).logits[:, -1])
        caches.end(cache)
        rows.append(row_of(window, torch.stack(logits, 1), whole, texts))
    return rows


def row_of(window: int, logits: Any, whole: Any, texts: Any) -> dict[str, Any]:
    """Nats a token, perplexity, and agreement with the whole attention."""
    targets = texts[:, BEGIN:]
    nats = float(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    same = (logits.argmax(-1) == whole.argmax(-1)).float().mean()
    return {
        "sinks": SINKS if window else None,
        "window": window or None,
        "nats": nats,
        "perplexity": float(np.exp(nats)),
        "same_token_share": float(same),
        "tokens": targets.numel(),
    }
