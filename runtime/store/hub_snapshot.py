"""Finds a model in the Hub's cache, or downloads it on request."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from predictors.files import OFFLINE, explain_no_home, is_offline
from runtime.config import ModelConfig
from runtime.errors import CheckpointError
from runtime.store.model_check import (
    CONFIG,
    check_quantisation,
    list_names,
    name_weights,
    read_config_file,
    read_weights_index,
)

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
PATTERNS = ["*.json", "*.model", "*.txt", "*.jinja"]
"""Files of a checkpoint that are used, besides its weights."""
ELSEWHERE = ["*/*.json", "*/*.model", "*/*.txt"]
"""Files that are not: in folders with the model in other formats, such as original."""
SNAPSHOTS = "snapshots"
"""Folder of a cached repository: a folder for each commit."""
MAIN = "main"
"""Branch that a model without a revision is of."""
COMMIT_START = re.compile(r"[0-9a-f]{4,40}")


def find_snapshot(config: ModelConfig) -> Path:
    """Returns the folder of a model's snapshot; downloads it unless `local_only`.

    The configuration is fetched first: a model that cannot be served is refused before its weights
    are downloaded. Of several files with weights only the model's own are.

    Raises:
        CheckpointError: it is not on this machine, or could not be downloaded.
    """
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    if config.local_only or HF_HUB_OFFLINE or is_offline():
        folder = find_cached_snapshot(config)
        if folder is not None:
            return folder
        if config.local_only:
            raise CheckpointError(f"model {config.id!r} {explain_missing(config.id)}")
    if HF_HUB_CACHE.startswith("~"):
        raise CheckpointError(explain_no_home("HF_HOME"))
    fetched = fetch_config(config).parent
    check_quantisation(config.id, read_config_file(fetched))
    folder = _download(config, [*PATTERNS, *name_weights(fetched)])
    shards = sorted(set(read_weights_index(folder).values()))
    return _download(replace(config, revision=folder.name), shards) if shards else folder


def _download(config: ModelConfig, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    wanted = {"allow_patterns": patterns, "ignore_patterns": ELSEWHERE}
    with _explain_failures(config):
        return Path(snapshot_download(config.id, revision=config.revision, **wanted))


@contextmanager
def _explain_failures(config: ModelConfig) -> Iterator[None]:
    if is_offline():
        raise CheckpointError(
            f"model {config.id!r} is not on this machine, and {OFFLINE} forbids to download it: "
            "unset it"
        )
    try:
        yield
    except OSError as error:
        raise CheckpointError(explain_failure(config, error)) from error


def find_cached_snapshot(config: ModelConfig) -> Path | None:
    """Returns the folder of a model's snapshot in the Hub's cache; None if it has none.

    A revision may be the beginning of a commit, as the Hub's pages show it. The Hub's client writes
    no `refs` where a commit was downloaded, and copied caches may lack them: then a single snapshot
    is the one.

    Raises:
        CheckpointError: the cache has other revisions of the model, or several that may be meant.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    repository = Path(HF_HUB_CACHE, f"models--{config.id.replace('/', '--')}")
    snapshots = sorted(path.name for path in (repository / SNAPSHOTS).glob("*") if path.is_dir())
    if not snapshots:
        return None
    revision = config.revision or MAIN
    ref = repository / "refs" / revision
    commit = ref.read_text(errors="replace").strip() if ref.is_file() else revision
    found = [name for name in snapshots if name == commit]
    if not found and COMMIT_START.fullmatch(commit):
        found = [name for name in snapshots if name.startswith(commit)]
    if not found and config.revision is None and not ref.is_file() and len(snapshots) == 1:
        found = snapshots
    if len(found) != 1:
        raise CheckpointError(
            f"model {config.id!r}: the Hub's cache does not say which snapshot is revision "
            f"{revision!r}; it has {list_names(snapshots)}. Choose one with model.revision=COMMIT, "
            "or download the revision with model.local_only=false"
        )
    return repository / SNAPSHOTS / found[0]


def fetch_config(config: ModelConfig) -> Path:
    """Downloads `config.json`; returns the file.

    Raises:
        CheckpointError: it could not be downloaded.
    """
    from huggingface_hub import hf_hub_download

    with _explain_failures(config):
        return Path(hf_hub_download(config.id, CONFIG, revision=config.revision))


def explain_failure(config: ModelConfig, error: OSError) -> str:
    """Explains in one sentence why a model of the Hub could not be had, and what to do."""
    from huggingface_hub.errors import (
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = f"model {config.id!r}"
    reason = error.__cause__ or error
    if isinstance(reason, OfflineModeIsEnabled) or isinstance(error, OfflineModeIsEnabled):
        return f"{name} is not on this machine, and HF_HUB_OFFLINE forbids to download it: unset it"
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return f"{name} could not be downloaded ({error}); set HF_HOME to a folder for it"
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
            "repository, or an adapter?); give the original checkpoint's id"
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
        "is not on this machine: download it from the Hub with model.local_only=false (in Python "
        "local_only=False), or give a folder"
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
    """Returns the ids of the models of which the Hub's cache has a snapshot."""
    from huggingface_hub.constants import HF_HUB_CACHE

    snapshots = Path(HF_HUB_CACHE).glob(f"models--*--*/{SNAPSHOTS}/*")
    names = {folder.parent.parent.name for folder in snapshots}
    return sorted("/".join(name.split("--", 2)[1:]) for name in names)
