"""Resolves a model's name to its folder and its identity."""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from predictors.files import expand_home, require_plain_file
from predictors.spec import config_hash
from runtime.config import BUILTIN, BUILTIN_MODELS, DoctorConfig, ModelConfig
from runtime.errors import CheckpointError
from runtime.store.gguf.header import check_gguf, is_gguf, read_header
from runtime.store.hub_snapshot import (
    HUB_ID,
    SNAPSHOTS,
    describe_folders,
    fetch_config,
    find_cached_snapshot,
    find_snapshot,
    nearest_parent,
)
from runtime.store.model_check import (
    CONFIG,
    SUFFIX,
    check_folder,
    check_tokenizer,
    list_weight_files,
    read_config_file,
    read_json_object,
    read_raw_header,
)

DIGESTS = "digests.json"
"""File `{name: sha256}` of models that ship with the project."""
INFLATED = "inflated.json"
"""File that `inflate` writes: the identity of the original model."""
WITHOUT_EXPERTS = "without_experts.json"
"""File that `pack` writes with a model without its experts: the whole checkpoint's identity and
fingerprint, and the fingerprint of the weights that are left."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Files of weights, also in formats that are not served."""


class ModelCommandConfig(Protocol):
    """Options of a command with a model."""

    @property
    def model(self) -> ModelConfig: ...


def check_model(config: ModelCommandConfig) -> None:
    """Refuses a model that cannot be served, before anything heavy is imported.

    Raises:
        CheckpointError: as `resolve`.
    """
    resolve(config.model)


def check_text_model(config: ModelCommandConfig) -> None:
    """Checks the model as `check_model` does, and that it has a tokenizer."""
    check_tokenizer(resolve(config.model))


def check_examined_model(config: DoctorConfig) -> None:
    """Checks the model as `check_model` does, or its configuration where weights are not needed."""
    if find_config_folder(config) is None:
        check_model(config)


def find_config_folder(config: DoctorConfig) -> Path | None:
    """Return the folder of the configuration to plan from; None where weights are to be examined.

    Raises:
        CheckpointError: `config_only` and no configuration, or one of a model without experts.
    """
    model = config.model
    folder = None if model.id == BUILTIN else expand_home(model.id)
    if folder is not None and not folder.is_dir() and HUB_ID.fullmatch(model.id):
        if model.local_only:
            folder = find_cached_snapshot(model)
        elif config.config_only:
            folder = fetch_config(model).parent
    if not config.config_only and (folder is None or not has_config_alone(folder)):
        return None
    if folder is None or not folder.is_dir():
        # Of a bundled model, or to say that there is none.
        return resolve(model)
    check_folder(folder, with_weights=False)
    return folder


def has_config_alone(folder: Path) -> bool:
    """Whether a folder has a configuration and no weights, or all but those of its experts."""
    if not (folder / CONFIG).is_file():
        return False
    return has_no_experts(folder) or not any(
        file.suffix in WEIGHT_SUFFIXES for file in folder.iterdir()
    )


def resolve(config: ModelConfig) -> Path:
    """Return the model's folder: bundled, local, in the Hub's cache, or downloaded on request.

    Raises:
        CheckpointError: it is not there, cannot be served, or a bundled file was altered.
    """
    folder = find_folder(config)
    if is_gguf(folder):
        check_gguf(folder)
    elif config.id != BUILTIN:
        check_folder(folder)
    return folder


def find_folder(config: ModelConfig) -> Path:
    """Return the folder, or GGUF file, of a model of any architecture.

    Raises:
        CheckpointError: it is not there, or a bundled file was altered.
    """
    if config.id == BUILTIN:
        folder = BUILTIN_MODELS / config.name.replace("-", "_")
        if not (folder / CONFIG).is_file():
            raise CheckpointError(f"{folder} has no {CONFIG}: install moecast again")
        _check_digests(folder)
        return folder
    folder = require_plain_file(expand_home(config.id), CheckpointError)
    if folder.is_file():
        if is_gguf(folder):
            return folder
        raise CheckpointError(
            f"{folder} is a file, not named *.gguf: give the model's folder, "
            f"{folder.absolute().parent}"
        )
    if not folder.is_dir():
        if not HUB_ID.fullmatch(config.id):
            raise CheckpointError(
                f"model {config.id!r} is not on this machine: there is no such folder or file, and "
                f"a model of the Hub is ORG/NAME. {describe_folders(nearest_parent(folder))}"
            )
        folder = find_snapshot(config)
    return folder


def read_digests(folder: Path) -> dict[str, str]:
    """Return the known sha256 of files by name; none but of models that ship with the project.

    Raises:
        CheckpointError: the file that lists them is damaged.
    """
    file = folder / DIGESTS
    listed = read_json_object(file) if file.is_file() else {}
    if not all(isinstance(digest, str) for digest in listed.values()):
        raise CheckpointError(f"{file} is damaged: it needs a sha256 for each name; fetch it again")
    return listed


@lru_cache(maxsize=8)
def _check_digests(folder: Path) -> None:
    if not (folder / DIGESTS).is_file():
        raise CheckpointError(f"{folder / DIGESTS} is missing: install moecast again")
    for name, expected in read_digests(folder).items():
        require_digest(folder / name, expected, otherwise="install moecast again")


def require_digest(file: Path, expected: str, *, otherwise: str) -> None:
    """Raise CheckpointError, which says what to do `otherwise`, if a file has another sha256."""
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != expected:
        raise CheckpointError(
            f"{file} was altered: sha256 is {digest}, expected {expected}; {otherwise}"
        )


def find_revision(folder: Path) -> str:
    """Return the commit of a Hub snapshot, or the sha256 over the headers of the weights files.

    A header has every tensor's name, shape, dtype and offset: it distinguishes checkpoints without
    reading gigabytes.
    """
    if is_gguf(folder):
        return read_header(folder).digest
    if folder.parent.name == SNAPSHOTS:
        return folder.name
    digest = hashlib.sha256()
    for file in list_weight_files(folder):
        digest.update(file.name.encode() + read_raw_header(file))
    # Of the weights alone: a better card does not make another model.
    known = sorted(item for item in read_digests(folder).items() if item[0].endswith(SUFFIX))
    digest.update("".join(listed for _, listed in known).encode())
    return digest.hexdigest()


def identity(folder: Path, config: ModelConfig) -> dict[str, str]:
    """The part of a `ModelSpec` that names the model; of an inflated one, the original's.

    Zero neurons change no routing: what was trained for the original predicts it as well.
    """
    if is_gguf(folder):
        header = read_header(folder)
        own = {k: v for k, v in header.metadata.items() if k.startswith(f"{header.architecture}.")}
        return {
            "model_id": config.name,
            "revision": config.revision or find_revision(folder),
            "config_hash": config_hash({**own, "model_type": header.architecture}),
        }
    inflated = folder / INFLATED
    if inflated.is_file() and config.revision is None:
        return _read_origin(inflated)["origin"]
    if has_no_experts(folder) and config.revision is None:
        return read_without_experts(folder)["origin"]
    # A snapshot's commit says more than the branch, or the beginning of a commit, that was given.
    revision = None if folder.parent.name == SNAPSHOTS else config.revision
    is_folder = config.id == BUILTIN or expand_home(config.id).is_dir()
    return {
        "model_id": config.name if is_folder else config.id,
        "revision": revision or find_revision(folder),
        "config_hash": config_hash(read_config_file(folder)),
    }


SAMPLES = 64
"""Samples per file, evenly spaced: several in every layer if a file holds few layers."""
SAMPLE_BYTES = 4096


def fingerprint(folder: Path) -> str:
    """Return the sha256 over name, size and samples of every weights file; reads 256 KiB of each.

    It distinguishes checkpoints before and after training, not ones that differ in a few bytes. For
    a folder without experts it is that of the checkpoint that the folder was made from.

    Raises:
        CheckpointError: the weights in a folder without experts were altered.
    """
    if not has_no_experts(folder):
        return sample_weights(folder)
    record = read_without_experts(folder)
    if sample_weights(folder) != record["dense_fingerprint"]:
        raise CheckpointError(
            f"{folder} was altered: its weights are not those that {WITHOUT_EXPERTS} describes; "
            "pack the model again (moecast pack MODEL output=PATH dense_output=PATH)"
        )
    return record["fingerprint"]


def has_no_experts(folder: Path) -> bool:
    """Whether a folder has a model without its experts, which are in a packed store alone."""
    return (folder / WITHOUT_EXPERTS).is_file()


def read_without_experts(folder: Path) -> dict[str, Any]:
    """Return the description of a model without its experts.

    Raises:
        CheckpointError: it is damaged.
    """
    file = folder / WITHOUT_EXPERTS
    record = _read_origin(file)
    if set(record) != {"origin", "fingerprint", "dense_fingerprint"}:
        raise CheckpointError(f"{file} is damaged: it needs origin and two fingerprints")
    return record


IDENTITY = frozenset({"model_id", "revision", "config_hash"})


def _read_origin(file: Path) -> dict[str, Any]:
    """Return a file's record of the model that its folder was made from: its identity is `origin`.

    Raises:
        CheckpointError: it is damaged.
    """
    record = read_json_object(file)
    origin = record.get("origin")
    is_object = isinstance(origin, dict) and set(origin) == IDENTITY
    if not is_object or not all(isinstance(value, str) for value in record["origin"].values()):
        raise CheckpointError(f"{file} is damaged: its origin is no identity of a model")
    return record


def describe_without_experts(
    folder: Path, *, fingerprint: str, origin: Mapping[str, str]
) -> dict[str, Any]:
    """Return the description of the model without experts in `folder`.

    Args:
        fingerprint: of the whole checkpoint.
        origin: `identity` of the whole checkpoint.
    """
    return {
        "origin": dict(origin),
        "fingerprint": fingerprint,
        "dense_fingerprint": sample_weights(folder),
    }


def sample_weights(folder: Path) -> str:
    """Return the sha256 over name, size and samples of the weights files that are there."""
    digest = hashlib.sha256()
    for file in list_weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb", buffering=0) as handle:
            for i in range(SAMPLES):
                handle.seek(i * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(handle.read(SAMPLE_BYTES))
    return digest.hexdigest()
