"""A tiny random model with a tokenizer, so that text can be run through it."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from collect.config import DataConfig, SourceKind
from runtime.config import ModelConfig
from tests.builders.models import set_fields, tiny_qwen2_moe

LETTERS = " abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,"


def recordable(folder: Path, *, end_token: int | None = None, **sizes: Any) -> ModelConfig:
    """One token a letter, 0 for the unknown; `end_token` is what the model takes for the end."""
    tiny_qwen2_moe(folder, **sizes)
    vocabulary = {"?": 0, **{letter: i + 1 for i, letter in enumerate(LETTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    set_fields(folder, "generation_config.json", eos_token_id=end_token)
    return ModelConfig(name="tiny", id=str(folder), dtype="float32")


def prompts_file(path: Path, *, count: int) -> Path:
    """JSON lines of different prompts of 3 to 23 letters."""
    words = "the quick brown fox jumps over a lazy dog and runs far away".split()  # noqa: SIM905
    lines = []
    for i in range(count):
        text = " ".join(words[(i + j) % len(words)] for j in range(1 + i % 4))
        text += f" {LETTERS[1 + i]}"
        lines.append(json.dumps({"prompt": text}))
    path.write_text("\n".join(lines))
    return path


def letters_data(folder: Path, *, count: int, new_tokens: int) -> DataConfig:
    """Prompts of `prompts_file`, written into the folder, and how they are recorded."""
    path = prompts_file(folder / "prompts.jsonl", count=count)
    letters = {"name": "letters", "kind": SourceKind.JSONL, "path": str(path)}
    return DataConfig(**letters, min_chars=1, max_new_tokens=new_tokens)


def recording_options(folder: Path) -> list[str]:
    """Makes a model and prompts; returns the options of a trace of some ten parts."""
    recordable(folder / "model", hidden_size=512, num_layers=4)
    prompts = prompts_file(folder / "prompts.jsonl", count=40)
    return [
        *("model.name=tiny", f"model.id={folder / 'model'}", "model.dtype=float32"),
        *("data=jsonl", f"data.path={prompts}", "data.min_chars=1", "data.max_new_tokens=8"),
        *("data.max_prompt_tokens=4000", "shard_mib=1", "temperature=1", "launcher.threads=1"),
    ]
