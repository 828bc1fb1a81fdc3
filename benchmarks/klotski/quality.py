"""Loss of the reference model on held-out text with attention to sinks and a window.

Texts are cut from the held-out requests, and teacher-forced. The loss with eight- and four-bit
experts is measured by `benchmarks/quantised.py`.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.klotski.rows import QualityRow
from collect.traces import Trace
from runtime.config import BUILTIN_MODELS
from runtime.generation.kv_caches import sink_caches
from runtime.hf.loading import load_plain

LENGTH, ROWS, BEGIN = 160, 8, 64
"""Tokens of a text, number of texts, and the first token that is scored; before it, a window holds
all tokens."""
SINKS = 4
WINDOWS = (28, 60)


@torch.no_grad()
def measure_quality(path: Path) -> list[QualityRow]:
    """Returns a row for attention to all tokens, and one for each window."""
    trace = Trace.open(path)
    stream = np.asarray(trace.tokens)[trace.rows("held_out")]
    count = min(ROWS, len(stream) // LENGTH)
    texts = torch.from_numpy(stream[: count * LENGTH].astype(np.int64)).reshape(count, LENGTH)
    model = load_plain(BUILTIN_MODELS / "qwen2_moe_tiny", dtype=torch.float32)
    whole = model(texts[:, :-1]).logits[:, BEGIN - 1 :]
    rows = [score(None, whole, whole, texts)]
    for window in WINDOWS:
        caches = sink_caches(model, sinks=SINKS, window=window)
        cache = caches.make(torch.zeros(count, dtype=torch.long), max_cache_length=LENGTH)
        logits = [model(texts[:, :BEGIN], past_key_values=cache).logits[:, -1]]
        for at in range(BEGIN, LENGTH - 1):
            logits.append(model(texts[:, at : at + 1], past_key_values=cache).logits[:, -1])
        rows.append(score(window, torch.stack(logits, 1), whole, texts))
    return rows


def score(window: int | None, logits: Tensor, whole: Tensor, texts: Tensor) -> QualityRow:
    """Scores logits, relative to those of attention to all tokens."""
    targets = texts[:, BEGIN:]
    nats = float(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    same = (logits.argmax(-1) == whole.argmax(-1)).float().mean()
    return QualityRow(
        sinks=SINKS if window else None,
        window=window,
        nats=nats,
        perplexity=float(np.exp(nats)),
        same_token_share=float(same),
        tokens=targets.numel(),
    )
