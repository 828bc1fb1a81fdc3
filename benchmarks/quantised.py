"""Loss of the reference model on held-out text with experts stored as int8, int4 and HQQ.

Every variant is plain Transformers with the weights that the packed
store would serve, which equal the served model's bit for bit (tests/unit/runtime/store).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.config import QuantisedConfig
from benchmarks.greedy import generate_greedy
from benchmarks.reports import print_line, write_report
from runtime.commands.pack import choose_coding
from runtime.config import BUILTIN_MODELS, Quantise
from runtime.hf.loading import load_plain, load_stripped
from runtime.store.base import allocate_aligned
from runtime.store.checkpoint import CheckpointStore
from runtime.store.packed.coding import RAW, Coding, decode, encode
from runtime.store.packed.layout import build_packed_layout
from runtime.store.packed.quantise import quantise
from runtime.store.packed.writer import fill_record

FOLDER = BUILTIN_MODELS / "qwen2_moe_tiny"
WINDOW, WINDOWS = 512, 100
PROMPT_TOKENS, NEW_TOKENS, PROMPTS = 32, 32, 32
WITH_ATTENTION = "hqq, groups of 64, attention too"
"""The last variant, as in Klotski, section 7; `moecast batch quantise_attention=true` serves it."""
HQQ = choose_coding(Quantise.HQQ, 64)
VARIANTS = {
    "float32": RAW,
    "int8, groups of 64": Coding(8, 64),
    "int4, groups of 64": Coding(4, 64),
    "int4, groups of 32": Coding(4, 32),
    "hqq, groups of 64": HQQ,
    WITH_ATTENTION: HQQ,
}


@dataclass(frozen=True, kw_only=True)
class QuantisedRow:
    experts: str
    """Storage format of the experts."""
    bytes_ratio: float
    """Size relative to float32."""
    nats: float
    """Mean loss per token."""
    nats_more: float
    """Loss above float32's."""
    most_likely_token_same: float
    """Share of tokens after which the most likely token is float32's."""
    greedy_tokens_before_first_difference: float


@dataclass(frozen=True, kw_only=True)
class QuantisedReport:
    windows: int
    tokens: int
    prompts: int
    new_tokens: int
    rows: list[QuantisedRow]


class Quality(NamedTuple):
    nats: float
    likely_T: Tensor
    greedy: Tensor
    """Greedy continuation of each prompt."""


@torch.no_grad()
def replace_experts(
    model: nn.Module, store: CheckpointStore, names: list[str], coding: Coding
) -> float:
    """Replaces the experts by those that a store with this coding serves.

    Returns:
        The size of the coded experts relative to the original.
    """
    plain = packed = 0
    modules = dict(model.named_modules())
    for layer, source in enumerate(store.layouts):
        layout = build_packed_layout(source, coding=coding)
        slot = torch.empty(source.num_bytes, dtype=torch.uint8)
        record = allocate_aligned(layout.num_bytes)
        for expert in range(store.experts_per_layer[layer]):
            store.read(layer, expert, range(len(source.chunks)), slot)
            fill_record(layout, source.weights(slot), record)
            for name, value in layout.weights(record).items():
                getattr(modules[names[layer]], name)[expert] = value
            plain, packed = plain + source.num_bytes, packed + layout.num_bytes
    return packed / plain


@torch.no_grad()
def quantise_attention(model: nn.Module, coding: Coding) -> None:
    """Rounds the weights of attention's projections to what they would be decoded to."""
    for name, module in model.named_modules():
        if not (isinstance(module, nn.Linear) and ".self_attn." in name):
            continue
        flat = module.weight.data.view(-1)
        stored = torch.empty(coding.num_bytes(len(flat), flat.dtype), dtype=torch.uint8)
        encode(coding, quantise(coding, flat), stored)
        decode(coding, stored, flat)


@torch.no_grad()
def measure(model: PreTrainedModel, tokens: Tensor) -> Quality:
    losses, likely = [], []
    for window in tokens.unfold(0, WINDOW + 1, WINDOW)[:WINDOWS]:
        logits = model(window[None, :-1]).logits[0].float()
        losses.append(F.cross_entropy(logits, window[1:]).item())
        likely.append(logits.argmax(-1))
    prompts = tokens.unfold(0, PROMPT_TOKENS, WINDOW)[:PROMPTS]
    greedy = generate_greedy(model, prompts, NEW_TOKENS)
    return Quality(float(np.mean(losses)), torch.cat(likely), greedy)


def run_quantised(config: QuantisedConfig) -> None:
    tokens = torch.from_numpy(np.fromfile(config.held_out, dtype=np.uint16).astype(np.int64))
    stripped = load_stripped(FOLDER, "float32")
    names = [layer.name for layer in stripped.layers]
    store = stripped.open_store()
    model = load_plain(FOLDER, dtype=torch.float32)
    rows: list[QuantisedRow] = []
    reference: Quality | None = None
    for name, coding in VARIANTS.items():
        ratio = replace_experts(model, store, names, coding)
        if name == WITH_ATTENTION:
            quantise_attention(model, coding)
        quality = measure(model, tokens)
        reference = reference or quality
        same = (quality.greedy == reference.greedy).long().cumprod(1)
        rows.append(
            QuantisedRow(
                experts=name,
                bytes_ratio=ratio,
                nats=quality.nats,
                nats_more=quality.nats - reference.nats,
                most_likely_token_same=(
                    (quality.likely_T == reference.likely_T).float().mean().item()
                ),
                greedy_tokens_before_first_difference=same.sum(1).float().mean().item(),
            )
        )
        print_line(str(rows[-1]))
    report = QuantisedReport(
        windows=WINDOWS,
        tokens=WINDOWS * WINDOW,
        prompts=PROMPTS,
        new_tokens=NEW_TOKENS,
        rows=rows,
    )
    write_report(config, report)
