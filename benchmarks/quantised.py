"""Quality of the reference model on held-out text in the formats that it can be served in.

Every variant is packed and served as users would, with all experts in memory. The experts are
inflated to a width that kernels for integers can multiply; what they compute stays the same.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

import runtime
from benchmarks.cloze import CHOICES, DOCUMENTS, measure_accuracy, write_task
from benchmarks.config import QuantisedConfig
from benchmarks.greedy import generate_greedy
from benchmarks.reports import print_line, write_report
from runtime.commands import inflate, pack
from runtime.config import (
    REFERENCE_MODEL,
    DenseFormat,
    InflateConfig,
    ModelConfig,
    PackConfig,
    Quantise,
)
from runtime.generation.batch.dense_placement import ATTENTION_CODING
from runtime.generation.loading import configure_model
from runtime.hf.tokens import load_tokenizer
from runtime.store.packed.coding import decode, encode, quantise_half_quadratic

WINDOW, WINDOWS = 512, 100
PROMPT_TOKENS, NEW_TOKENS, PROMPTS = 32, 32, 32
EXPERT_SIZE = "96KiB"
"""In bfloat16: 64 neurons."""
MODEL_OPTIONS = ("name", "id", "dtype", "dense_format")
"""Options of the model for the server that lm-evaluation-harness asks."""


@dataclass(frozen=True, kw_only=True)
class ServedFormat:
    """A format of the model."""

    name: str
    dtype: str = "bfloat16"
    quantise: Quantise = Quantise.NONE
    dense: DenseFormat = DenseFormat.OWN
    attention: bool = False
    """Attention too (Klotski, section 7), as `moecast batch quantise_attention=true` serves it."""
    asks_harness: bool = False
    """Ask lm-evaluation-harness, too, which takes minutes."""


VARIANTS = (
    ServedFormat(name="bfloat16", asks_harness=True),
    ServedFormat(name="float32", dtype="float32"),
    ServedFormat(name="q8_0", quantise=Quantise.Q8_0, asks_harness=True),
    ServedFormat(name="q8_0, dense layers too", quantise=Quantise.Q8_0, dense=DenseFormat.Q8_0),
    ServedFormat(name="q6_K", quantise=Quantise.Q6_K),
    ServedFormat(name="q4_K", quantise=Quantise.Q4_K, asks_harness=True),
    ServedFormat(name="q4_K, dense layers in q8_0", quantise=Quantise.Q4_K, dense=DenseFormat.Q8_0),
    ServedFormat(
        name="q4_K, dense layers too",
        quantise=Quantise.Q4_K,
        dense=DenseFormat.Q4_K,
        asks_harness=True,
    ),
    ServedFormat(name="q4_0", quantise=Quantise.Q4_0),
    ServedFormat(name="q3_K", quantise=Quantise.Q3_K),
    ServedFormat(name="q2_K", quantise=Quantise.Q2_K),
    ServedFormat(name="hqq, groups of 64", quantise=Quantise.HQQ),
    ServedFormat(name="hqq, groups of 64, attention too", quantise=Quantise.HQQ, attention=True),
)
"""The first is what the others are compared with."""


@dataclass(frozen=True, kw_only=True)
class QuantisedRow:
    experts: str
    """Format of the experts."""
    bytes_ratio: float
    """Size of an expert relative to bfloat16."""
    nats: float
    """Mean loss per token."""
    nats_more: float
    """Loss above bfloat16's."""
    most_likely_token_same: float
    """Share of tokens after which the most likely token is bfloat16's."""
    greedy_tokens_before_first_difference: float
    accuracy: float | None
    """Share of right answers in lm-evaluation-harness, through the server; None: not asked."""


class Quality(NamedTuple):
    nats: float
    likely_T: Tensor
    greedy: Tensor
    """Greedy continuation of each prompt."""


@contextmanager
def pack_variant(inflated: Path, variant: ServedFormat) -> Iterator[tuple[ModelConfig, Path]]:
    """Packs the model in this format; yields its configuration and the store."""
    model = ModelConfig(name=REFERENCE_MODEL, id=str(inflated), dtype=variant.dtype)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        pack.run(PackConfig(model=model, output=store, quantise=variant.quantise))
        yield replace(model, dense_format=variant.dense), store


@contextmanager
def serve(model: ModelConfig, store: Path, variant: ServedFormat) -> Iterator[PreTrainedModel]:
    served = runtime.load(model, store=store, budget="100%", system="on-demand")
    if variant.attention:
        quantise_attention(served)
    with served.moecast:
        yield served


@torch.no_grad()
def quantise_attention(model: nn.Module) -> None:
    """Rounds the weights of attention's projections to what they would be decoded to."""
    coding = ATTENTION_CODING
    for name, module in model.named_modules():
        if not (isinstance(module, nn.Linear) and ".self_attn." in name):
            continue
        flat = module.weight.data.view(-1)
        stored = torch.empty(coding.num_bytes(len(flat), flat.dtype), dtype=torch.uint8)
        encode(coding, quantise_half_quadratic(coding, flat), stored)
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
    rows: list[QuantisedRow] = []
    accuracy: float | None
    reference: Quality | None = None
    plain_bytes = 0
    with tempfile.TemporaryDirectory() as folder:
        inflated = Path(folder) / "inflated"
        inflate.run(
            InflateConfig(
                model=replace(configure_model(REFERENCE_MODEL), dtype="bfloat16"),
                expert_size=EXPERT_SIZE,
                output=inflated,
            )
        )
        task = Path(folder)
        write_task(task, tokens, load_tokenizer(inflated))
        for variant in VARIANTS:
            with pack_variant(inflated, variant) as (packed, store):
                with serve(packed, store, variant) as model:
                    quality = measure(model, tokens)
                    num_bytes = model.moecast.engine.store.layouts[0].num_bytes
                options = {
                    **{f"model.{key}": getattr(packed, key) for key in MODEL_OPTIONS},
                    **{"store.path": store, "budget": "100%", "system": "on-demand"},
                }
                accuracy = (
                    measure_accuracy(task, inflated, options, environments=config.environments)
                    if variant.asks_harness
                    else None
                )
            plain_bytes = plain_bytes or num_bytes
            reference = reference or quality
            same = (quality.greedy == reference.greedy).long().cumprod(1)
            rows.append(
                QuantisedRow(
                    experts=variant.name,
                    bytes_ratio=num_bytes / plain_bytes,
                    nats=quality.nats,
                    nats_more=quality.nats - reference.nats,
                    most_likely_token_same=(
                        (quality.likely_T == reference.likely_T).float().mean().item()
                    ),
                    greedy_tokens_before_first_difference=same.sum(1).float().mean().item(),
                    accuracy=accuracy,
                )
            )
            print_line(str(rows[-1]))
    write_report(
        config,
        windows=WINDOWS,
        tokens=WINDOWS * WINDOW,
        prompts=PROMPTS,
        new_tokens=NEW_TOKENS,
        # Of lm-evaluation-harness' task: documents, and continuations of each, one of them right.
        documents=DOCUMENTS,
        choices=CHOICES,
        rows=rows,
    )
