"""What experts stored as integers cost in quality: the reference model on held-out text.

    python benchmarks/quantised.py held_out=held_out.bin output=benchmarks/results/quantised.json

`held_out.bin` is what `python -m train.reference` keeps apart: token ids, uint16. Needs the
`quantise` extra. Every variant is plain Transformers with the weights that the packed store would
serve, which is what the served model equals bit for bit (tests/unit/runtime/store).
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.config import BUILTIN_MODELS
from runtime.engine.loading import load_stripped
from runtime.engine.plain import load_plain
from runtime.hf.layers import moe_layers
from runtime.store.checkpoint import CheckpointStore
from runtime.store.packed.coding import RAW, Coding
from runtime.store.packed.journal import aligned_bytes
from runtime.store.packed.layout import packed_layout
from runtime.store.packed.record import fill_record

FOLDER = BUILTIN_MODELS / "qwen2_moe_tiny"
WINDOW, WINDOWS = 512, 100
PROMPT_TOKENS, NEW_TOKENS, PROMPTS = 32, 32, 32
VARIANTS = {
    "float32": RAW,
    "int8, groups of 64": Coding(8, 64),
    "int4, groups of 64": Coding(4, 64),
    "int4, groups of 32": Coding(4, 32),
}


@torch.no_grad()
def put_experts(model, store: CheckpointStore, names: list[str], coding: Coding) -> float:
    """Replaces the experts by what a store with this coding gives; returns its size by theirs."""
    plain = packed = 0
    modules = dict(model.named_modules())
    for layer, source in enumerate(store.layouts):
        layout = packed_layout(source, coding=coding)
        slot, record = (
            torch.empty(source.num_bytes, dtype=torch.uint8),
            aligned_bytes(layout.num_bytes),
        )
        for expert in range(store.experts_per_layer[layer]):
            store.read(layer, expert, range(len(source.chunks)), slot)
            fill_record(layout, source.weights(slot), record)
            for name, value in layout.weights(record).items():
                getattr(modules[names[layer]], name)[expert] = value
            plain, packed = plain + source.num_bytes, packed + layout.num_bytes
    return packed / plain


@torch.no_grad()
def measure(model, tokens: Tensor) -> tuple[float, Tensor, Tensor]:
    """Nats a token, the most likely token everywhere, greedy continuations of the prompts."""
    losses, likely = [], []
    for window in tokens.unfold(0, WINDOW + 1, WINDOW)[:WINDOWS]:
        logits = model(window[None, :-1]).logits[0].float()
        losses.append(F.cross_entropy(logits, window[1:]).item())
        likely.append(logits.argmax(-1))
    prompts = tokens.unfold(0, PROMPT_TOKENS, WINDOW)[:PROMPTS]
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    return float(np.mean(losses)), torch.cat(likely), output[:, PROMPT_TOKENS:]


def main(arguments: dict[str, str]) -> None:
    tokens = torch.from_numpy(np.fromfile(arguments["held_out"], dtype=np.uint16).astype(np.int64))
    stripped, banks = load_stripped(FOLDER, "float32", torch.device("cpu"))
    names = [layer.name for layer in moe_layers(stripped)]
    store = CheckpointStore(stripped, [banks[name] for name in names])
    model = load_plain(FOLDER, dtype=torch.float32)
    rows: list[dict[str, Any]] = []
    reference = None
    for name, coding in VARIANTS.items():
        ratio = put_experts(model, store, names, coding)
        nats, likely, greedy = measure(model, tokens)
        reference = reference or (nats, likely, greedy)
        same = (greedy == reference[2]).long().cumprod(1)
        rows.append(
            {
                "experts": name,
                "bytes_ratio": ratio,
                "nats": nats,
                "nats_more": nats - reference[0],
                "most_likely_token_same": (likely == reference[1]).float().mean().item(),
                "greedy_tokens_before_first_difference": same.sum(1).float().mean().item(),
            }
        )
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
    results = {
        "windows": WINDOWS,
        "tokens": WINDOWS * WINDOW,
        "prompts": PROMPTS,
        "new_tokens": NEW_TOKENS,
        "rows": rows,
    }
    Path(arguments["output"]).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(dict(one.split("=", 1) for one in sys.argv[1:]))
