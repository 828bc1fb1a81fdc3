"""The recipe from end to end: corpus, tokenizer, training, audit, publication."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer

from predictors.errors import MoecastError
from train.reference import corpus, tokenizer
from train.reference.audit import audit
from train.reference.config import ReferenceConfig
from train.reference.fit import fit
from train.reference.publish import publish


def run(config: ReferenceConfig) -> dict[str, Any]:
    """Train and write the model; a killed run resumes when it is given the same `run_dir`."""
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
    fitted = config.fit
    report["trained_tokens"] = fitted.steps * fitted.batch_size * fitted.context
    output = config.output or folder / "qwen2-moe-tiny"
    publish(model, Tokenizer.from_file(str(folder / "tokenizer.json")), output, audit=report)
    Console().print((output / "README.md").read_text(), markup=False)
    return report


def prepare(config: ReferenceConfig, folder: Path) -> None:
    """Tokenizer and packed tokens, unless an earlier run made them."""
    if (folder / "held_out.bin").exists():
        return
    root = config.corpus.root
    if root is None or not (root / "text/openstax").is_dir():
        raise MoecastError(
            f"corpus.root={root}: give the folder that holds text/openstax, text/novels, instruct "
            "and prompts/gsm8k_train.jsonl (corpus.root=PATH); train/reference/card.md lists them"
        )
    folder.mkdir(parents=True, exist_ok=True)
    sources = corpus.documents(root)
    learnt = tokenizer.fit(sources, seed=config.fit.seed)
    learnt.save(str(folder / "tokenizer.json"))
    corpus.pack(config.corpus, learnt, folder, seed=config.fit.seed)
