"""The recipe from end to end: corpus, tokenizer, training, audit, publication."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer
from transformers import Qwen2MoeForCausalLM

from predictors.errors import MoecastError
from train.reference import corpus
from train.reference.audit import audit
from train.reference.config import ReferenceConfig
from train.reference.corpus import wrap_tokenizer, write_prompts
from train.reference.fit import fit


def run(config: ReferenceConfig) -> dict[str, Any]:
    """Train and write the model; a killed run resumes when it is given the same `run_dir`.

    With `prompts`, write these alone.
    """
    if config.prompts is not None:
        config.prompts.mkdir(parents=True, exist_ok=True)
        root = require_corpus(config.corpus.root)
        return write_prompts(root, config.prompts, seed=config.fit.seed)
    assert config.run_dir is not None
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folder = config.run_dir
    prepare(config, folder)
    model = fit(config.fit, folder)
    # The audit is of what ships: the weights rounded to bf16, computed in float32.
    model.to(torch.bfloat16).to(torch.float32)
    report = audit(
        model,
        np.fromfile(folder / "train.bin", dtype=np.uint16),
        np.fromfile(folder / "held_out.bin", dtype=np.uint16),
    )
    report["trained_tokens"] = config.fit.steps * config.fit.batch_size * config.fit.context
    output = config.output or folder / "qwen2-moe-tiny"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    publish(model, tokenizer, output, audit=report)
    loss, hits = report["loss_nats"], report["routing"]["lru_hit_rate_50"]
    Console().print(
        f"{output}: {loss['model']:.3f} nats per held-out token (bigram {loss['bigram']:.3f}); "
        f"an LRU cache of half the experts hits {hits:.3f}"
    )
    return report


def prepare(config: ReferenceConfig, folder: Path) -> None:
    """Tokenizer and packed tokens, unless an earlier run made them."""
    if (folder / "held_out.bin").exists():
        return
    root = require_corpus(config.corpus.root)
    folder.mkdir(parents=True, exist_ok=True)
    sources = corpus.documents(root)
    learnt = corpus.fit_tokenizer(sources, seed=config.fit.seed)
    learnt.save(str(folder / "tokenizer.json"))
    num_tokens = config.corpus.num_tokens
    corpus.pack(sources, learnt, folder, num_tokens=num_tokens, seed=config.fit.seed)


def require_corpus(root: Path | None) -> Path:
    """Return the folder of the corpus; MoecastError if it is not there."""
    if root is None or not (root / "text/openstax").is_dir():
        raise MoecastError(
            f"corpus.root={root}: give the folder that holds text/openstax, text/novels, instruct "
            "and prompts/gsm8k_train.jsonl (corpus.root=PATH); train/reference/card.md lists them"
        )
    return root


CARD = Path(__file__).parent / "card.md"


def publish(
    model: Qwen2MoeForCausalLM, tokenizer: Tokenizer, folder: Path, *, audit: dict[str, Any]
) -> None:
    """`folder` in the Hub's layout, with `audit.json` and `digests.json` over all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    wrap_tokenizer(tokenizer).save_pretrained(folder)
    (folder / "audit.json").write_text(json.dumps(audit, indent=2) + "\n")
    (folder / "README.md").write_text(card(audit))
    files = sorted(path for path in folder.iterdir() if path.name != "digests.json")
    for path in files:
        path.chmod(0o644)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (folder / "digests.json").write_text(json.dumps(digests, indent=2) + "\n")


def card(audit: dict[str, Any]) -> str:
    routing = audit["routing"]
    rows = "\n".join(
        f"| {layer} | {row['entropy_share']:.3f} | {row['largest_share']:.3f} "
        f"| {row['request_entropy_share']:.3f} | {row['lru_hit_rate_50']:.3f} |"
        for layer, row in enumerate(routing["layers"])
    )
    return CARD.read_text().format(
        tokens=audit["trained_tokens"] / 1e6,
        loss=audit["loss_nats"],
        worst_entropy=min(row["entropy_share"] for row in routing["layers"]),
        lru=routing["lru_hit_rate_50"],
        rows=rows,
    )
