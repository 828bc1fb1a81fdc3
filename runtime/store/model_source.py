"""Resolves a model's name to its folder and its identity."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from predictors.spec import config_hash
from runtime.config import BUILTIN, BUILTIN_MODELS, ModelConfig
from runtime.errors import CheckpointError

DIGESTS = "digests.json"
"""File `{name: sha256}` of models that ship with the project."""
INFLATED = "inflated.json"
"""File that `inflate` writes: the identity of the original model."""


def resolve(config: ModelConfig) -> Path:
    """Return the model's folder: bundled, local, in the Hub's cache, or downloaded on request.

    Raises:
        CheckpointError: it is not there, or a bundled file was altered.
    """
    if config.id == BUILTIN:
        folder = BUILTIN_MODELS / config.name.replace("-", "_")
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} has no config.json: install moecast again")
        _check_digests(folder)
        return folder
    folder = Path(config.id).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} has no config.json: not a model in the Hub's layout")
        return folder
    return _from_hub(config)


def _from_hub(config: ModelConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(
            snapshot_download(
                config.id,
                revision=config.revision,
                allow_patterns=patterns,
                local_files_only=config.local_only,
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        how = (
            "add model.local_only=false to fetch it from the Hub"
            if config.local_only
            else "the Hub could not be reached"
        )
        raise CheckpointError(
            f"model {config.id!r} is not on this machine ({type(error).__name__}): {how}, "
            "give a folder with model.id=PATH, or use the bundled model=qwen2-moe-tiny"
        ) from error


@lru_cache(maxsize=8)
def _check_digests(folder: Path) -> None:
    digests = folder / DIGESTS
    if not digests.is_file():
        raise CheckpointError(f"{digests} is missing: install moecast again")
    for name, expected in json.loads(digests.read_text()).items():
        with (folder / name).open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        if digest != expected:
            raise CheckpointError(
                f"{folder / name} was altered: sha256 is {digest}, expected {expected}; "
                "install moecast again"
            )


def find_revision(folder: Path) -> str:
    """Return the commit of a Hub snapshot, or the sha256 over the headers of the weights files.

    A header has every tensor's name, shape, dtype and offset: it distinguishes checkpoints without
    reading gigabytes.
    """
    if folder.parent.name == "snapshots":
        return folder.name
    digest = hashlib.sha256()
    for file in list_weight_files(folder):
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            digest.update(file.name.encode() + handle.read(min(length, 100_000_000)))
    known = folder / DIGESTS
    if known.is_file():
        # Of the weights alone: a better card does not make another model.
        listed = json.loads(known.read_text())
        digest.update("".join(listed[name] for name in sorted(listed) if is_weights(name)).encode())
    return digest.hexdigest()


def is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def list_weight_files(folder: Path) -> list[Path]:
    """List the model's safetensors files in order."""
    return sorted(file for file in folder.iterdir() if is_weights(file.name))


def identity(folder: Path, config: ModelConfig) -> dict[str, str]:
    """The part of a `ModelSpec` that names the model; of an inflated one, the original's.

    Zero neurons change no routing: what was trained for the original predicts it as well.
    """
    inflated = folder / INFLATED
    if inflated.is_file() and config.revision is None:
        return json.loads(inflated.read_text())["origin"]
    raw = json.loads((folder / "config.json").read_text())
    return {
        "model_id": config.name if config.id == BUILTIN or Path(config.id).is_dir() else config.id,
        "revision": config.revision or find_revision(folder),
        "config_hash": config_hash(raw),
    }


SAMPLES = 64
"""Samples per file, evenly spaced: several in every layer if a file holds few layers."""
SAMPLE_BYTES = 4096


def fingerprint(folder: Path) -> str:
    """Return the sha256 over name, size and samples of every weights file; reads 256 KiB of each.

    It distinguishes checkpoints before and after training, not ones that differ in a few bytes.
    """
    digest = hashlib.sha256()
    for file in list_weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb", buffering=0) as handle:
            for i in range(SAMPLES):
                handle.seek(i * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(handle.read(SAMPLE_BYTES))
    return digest.hexdigest()
