"""Finds a model in the Hub's cache, or downloads it on request."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from runtime.config import ModelConfig
from runtime.errors import CheckpointError
from runtime.store.model_check import CONFIG, check_quantisation, list_names

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""Files of a checkpoint that are used."""


def find_snapshot(config: ModelConfig) -> Path:
    """Returns the folder of a model's snapshot; downloads it unless `local_only`.

    The configuration is fetched first: a model that cannot be served is refused before its weights
    are downloaded.

    Raises:
        CheckpointError: it is not on this machine, or could not be downloaded.
    """
    from huggingface_hub import snapshot_download

    if not config.local_only:
        check_quantisation(config.id, json.loads(fetch_config(config).read_bytes()))
    return _fetch(
        config,
        lambda: snapshot_download(
            config.id,
            revision=config.revision,
            allow_patterns=PATTERNS,
            local_files_only=config.local_only,
        ),
    )


def _fetch(config: ModelConfig, download: Callable[[], str]) -> Path:
    try:
        return Path(download())
    except OSError as error:
        raise CheckpointError(explain_failure(config, error)) from error


def find_cached_config(config: ModelConfig) -> Path | None:
    """Returns the folder of a model's configuration in the Hub's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(config.id, CONFIG, revision=config.revision)
    return Path(file).parent if isinstance(file, str) else None


def fetch_config(config: ModelConfig) -> Path:
    """Downloads `config.json`, or with `local_only` finds it in the cache; returns the file.

    Raises:
        CheckpointError: it is not there.
    """
    from huggingface_hub import hf_hub_download

    return _fetch(
        config,
        lambda: hf_hub_download(
            config.id, CONFIG, revision=config.revision, local_files_only=config.local_only
        ),
    )


def explain_failure(config: ModelConfig, error: OSError) -> str:
    """Explains in one sentence why a model of the Hub could not be had, and what to do."""
    from huggingface_hub.errors import (
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = f"model {config.id!r}"
    if config.local_only:
        return f"{name} is not on this machine: {explain_missing(config.id)}"
    reason = error.__cause__ or error
    if isinstance(reason, OfflineModeIsEnabled) or isinstance(error, OfflineModeIsEnabled):
        return f"{name} is not on this machine, and HF_HUB_OFFLINE forbids to download it: unset it"
    if isinstance(error, (RepositoryNotFoundError, RevisionNotFoundError)):
        # The library says whether it is the name, the revision, or that the model is gated.
        return (
            f"{name}: {' '.join(str(error).split())} Check the spelling; for a gated or private "
            "model log in with hf auth login, or set HF_TOKEN, and accept its terms at "
            f"https://huggingface.co/{config.id}"
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return (
            f"{config.id} on the Hub has no {CONFIG}, so Transformers cannot load it (a GGUF "
            "repository?); give the original checkpoint's id"
        )
    line = " ".join(str(reason).split())
    return (
        f"{name} could not be downloaded ({type(reason).__name__}: {line}). Check the network and "
        "the free disk space and run the command again, which continues the download; or copy the "
        "model's folder to this machine and give its path"
    )


def explain_missing(model_id: str) -> str:
    """Explains what there is in place of a model that is not on this machine."""
    hint = (
        "download it from the Hub with model.local_only=false (in Python local_only=False), or "
        "give a folder"
    )
    if cached := cached_models():
        hint += f". In the Hub's cache: {list_names(cached)}"
    parent = nearest_parent(Path(model_id))
    if parent != Path():
        hint += f". There is no such folder either: {describe_folders(parent)}"
    return hint


def nearest_parent(folder: Path) -> Path:
    """Returns the deepest folder on the way to a missing one."""
    return next(path for path in (*folder.parents, Path("/")) if path.is_dir())


def describe_folders(parent: Path) -> str:
    """Lists the folders in one."""
    folders = sorted(path.name for path in parent.iterdir() if path.is_dir())
    visible = [name for name in folders if not name.startswith(".")]
    return f"{parent} has {list_names(visible)}" if visible else f"{parent} has no folders"


def cached_models() -> list[str]:
    """Returns the ids of the models in the Hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    names = (folder.name for folder in Path(HF_HUB_CACHE).glob("models--*--*"))
    return sorted("/".join(name.split("--")[1:]) for name in names)
