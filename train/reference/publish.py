"""Writes the trained reference model as it ships: bf16 weights, tokenizer, card, digests."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen2MoeForCausalLM

from train.reference import tokenizer as reference_tokenizer

CARD = Path(__file__).parent / "card.md"


def publish(
    model: Qwen2MoeForCausalLM, tokenizer: Tokenizer, folder: Path, *, audit: dict[str, Any]
) -> None:
    """`folder` in the Hub's layout, with `audit.json` and `digests.json` over all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    reference_tokenizer.wrap(tokenizer).save_pretrained(folder)
    (folder / "audit.json").write_text(json.dumps(audit, indent=2) + "\n")
    (folder / "README.md").write_text(card(audit))
    files = sorted(path for path in folder.iterdir() if path.name != "digests.json")
    for path in files:
        path.chmod(0o644)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (folder / "digests.json").write_text(json.dumps(digests, indent=2) + "\n")


def card(audit: dict[str, Any]) -> str:
    """The model card, its figures taken from the audit."""
    loss, routing = audit["loss_nats"], audit["routing"]
    rows = "\n".join(
        f"| {layer} | {row['entropy_share']:.3f} | {row['largest_share']:.3f} "
        f"| {row['request_entropy_share']:.3f} | {row['lru_hit_rate_50']:.3f} |"
        for layer, row in enumerate(routing["layers"])
    )
    return CARD.read_text().format(
        tokens=f"{audit['trained_tokens'] / 1e6:.1f}",
        model_loss=f"{loss['model']:.3f}",
        unigram_loss=f"{loss['unigram']:.3f}",
        bigram_loss=f"{loss['bigram']:.3f}",
        held_out_tokens=f"{loss['tokens']:,}",
        worst_entropy=f"{min(row['entropy_share'] for row in routing['layers']):.3f}",
        lru=f"{routing['lru_hit_rate_50']:.3f}",
        rows=rows,
    )
