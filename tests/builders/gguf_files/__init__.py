"""GGUF files that llama.cpp wrote, and what it computed with them; `make` says how."""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORDED: dict[str, Any] = json.loads((HERE / "recorded.json").read_text())
FILES = tuple(sorted(name.removesuffix(".gguf") for name in RECORDED["files"]))


def gguf_file(name: str) -> Path:
    return HERE / f"{name}.gguf"


def recorded(name: str) -> dict[str, Any]:
    """Return llama.cpp's `prompt` and `new` tokens, and the `logits` after the prompt."""
    return RECORDED["files"][f"{name}.gguf"]
