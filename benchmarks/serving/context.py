"""A model that is told its context is longer, for requests that shall not end by themselves."""

import json
from pathlib import Path

from runtime.config import ModelConfig
from runtime.store.model_source import resolve


def with_context(folder: Path, tokens: int, *, model: Path | None = None) -> Path:
    """A folder with links to the weights and a changed `max_position_embeddings`.

    Rotary positions go on for ever: only the text gets worse, which no benchmark here reads.

    Args:
        model: whose; the reference model unless told.
    """
    source = resolve(ModelConfig()) if model is None else model
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name not in ("config.json", "digests.json"):
            (folder / path.name).symlink_to(path.resolve())
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = tokens
    (folder / "config.json").write_text(json.dumps(config))
    return folder
