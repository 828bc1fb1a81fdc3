"""Checks a model's folder by its JSON files, without PyTorch and Transformers.

Importing those takes seconds, in which the user would wait to be refused.
"""

import json
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from predictors.files import require_plain_file
from runtime.errors import CheckpointError
from runtime.store.gguf.header import is_gguf, read_header
from runtime.store.integer_scheme import METHODS, find_scheme, name_method

CONFIG = "config.json"
SETTINGS = "generation_config.json"
CARD = "README.md"
ADAPTER = "adapter_config.json"
"""File of an adapter of PEFT, which Transformers adds to the weights if peft is installed."""
SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
WEIGHTS, WEIGHTS_INDEX = f"model{SUFFIX}", f"model{INDEX_SUFFIX}"
NAMES_WEIGHTS = "transformers_weights"
"""Option of `config.json`: a file of weights, or an index, of another name."""
OF_A_RANK = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors$")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
)
"""Files of which every tokenizer has one."""

DEQUANTISED = ("fp8", "mxfp4")
"""Quantisation methods that Transformers reverses while loading, on request. By default it does
so only without a GPU that has kernels for them, and those kernels need whole banks of experts."""
EXPERT = re.compile("expert|moe", re.IGNORECASE)
BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?[\"']?([\w.-]+/[\w.-]+)", re.MULTILINE)
"""The original's repository in the front matter of a model card."""
TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".bpe")
"""Files besides the weights from which a model and its tokenizer are read."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format itself."""
MOST_LISTED = 8
"""Names that a message lists."""


def check_folder(folder: Path, *, with_weights: bool = True) -> None:
    """Checks that a folder holds a Mixture-of-Experts checkpoint that can be served.

    Args:
        with_weights: off: the configuration has to name experts, and no weights are looked at.

    Raises:
        CheckpointError: the folder is incomplete or of another format, or the model has no experts
            or is quantised in a way that is not served.
    """
    check_files(folder)
    config = read_config_file(folder)
    check_quantisation(folder, config)
    has_experts = mentions_experts(config)
    if with_weights:
        if (folder / SETTINGS).exists():
            # A damaged one would be left out, and tokens chosen, and ended, otherwise.
            read_json_object(folder / SETTINGS)
        files = list_weight_files(folder)
        # They have the tensors' names. A damaged one is explained where tensors are indexed.
        headers = (read_raw_header(file).decode(errors="replace") for file in files)
        has_experts = has_experts or any(map(EXPERT.search, headers))
    if not has_experts:
        named = config.get("architectures")
        names = ", ".join(map(str, named)) if isinstance(named, list) else ""
        kind = names or config.get("model_type", "unknown")
        raise CheckpointError(
            f"{folder} is not a Mixture-of-Experts model: {kind} has no experts that could be "
            "moved out of memory. Use it with plain Transformers"
        )


def check_files(folder: Path) -> None:
    """Refuses files that are not what their names say, and an adapter that would not be applied.

    Raises:
        CheckpointError: a link to nothing, a Git LFS pointer, a pipe, or an adapter.
    """
    for file in sorted(folder.iterdir()):
        if file.suffix in TEXT_SUFFIXES:
            require_plain_file(file, CheckpointError)
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"{folder} has an adapter ({ADAPTER}), which moecast does not apply. Merge it into the "
            "weights (peft: merge_and_unload, then save_pretrained) and give that folder; or, to "
            f"serve the weights without it, move {ADAPTER} out of the folder"
        )


def read_config_file(folder: Path) -> dict[str, Any]:
    """Returns the content of `config.json`; CheckpointError says what the folder has instead."""
    file = folder / CONFIG
    if not file.is_file():
        refuse_gguf_folder(folder)
        raise CheckpointError(
            f"{folder} has no {CONFIG}, so it is not a model in the Hub's layout; "
            f"{describe_content(folder)}"
        )
    return read_json_object(file)


def read_json_object(file: Path) -> dict[str, Any]:
    """Returns the content of a JSON file of a model; CheckpointError if it is no object."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is damaged (not a JSON object); fetch it again")
    return content


def refuse_gguf_folder(folder: Path) -> None:
    """Raises CheckpointError if a folder that lacks other files has GGUF files."""
    if gguf := sorted(folder.glob("*.gguf")):
        raise CheckpointError(
            f"{folder} has GGUF files, no safetensors files: give one of them, such as {gguf[0]}"
        )


def check_quantisation(where: Path | str, config: dict[str, Any]) -> None:
    """Refuses weights that are quantised in a way that is not served.

    Raises:
        CheckpointError: the message names the method and what to use or install.
    """
    quantised = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(quantised, dict):
        return
    method = name_method(quantised)
    if method == "fp8" and find_spec("accelerate") is None:
        raise CheckpointError(
            f"{where} is quantised with FP8, which Transformers reads with the package accelerate: "
            "pip install 'moecast[fp8]'"
        )
    if method in DEQUANTISED:
        return
    try:
        if find_scheme(where, quantised) is None:
            served = ", ".join([*DEQUANTISED, *METHODS])
            raise CheckpointError(
                f"{where} is quantised with {method}, which is not served (only {served} are)"
            )
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {explain_original(Path(where))}") from error


def explain_original(folder: Path) -> str:
    """Returns what to use in place of a checkpoint whose quantisation is not served."""
    card = folder / CARD
    base = BASE_MODEL.search(card.read_text(errors="replace")) if card.is_file() else None
    original = f"the original checkpoint, {base[1]}," if base else "the original checkpoint"
    return (
        f"Use {original} instead; to serve it with experts of 4 bits, pack it first: moecast pack "
        "MODEL output=FOLDER quantise=int4, then moecast generate MODEL store.path=FOLDER"
    )


def list_weight_files(folder: Path) -> list[Path]:
    """Lists the files that Transformers loads a model from, in its order; or its GGUF file.

    Other weights in the folder are not the model's: a variant, a copy in the format of its makers,
    what a conversion left. They are neither read nor counted.

    Raises:
        CheckpointError: there are none, or one is missing; the message says what the folder has.
    """
    if is_gguf(folder):
        return list(read_header(folder).files)
    first = find_weights(folder)
    if not is_index(first):
        return [first]
    names = sorted(set(read_weights_index(folder).values()))
    files = [require_plain_file(folder / name, CheckpointError) for name in names]
    if missing := [file.name for file in files if not file.exists()]:
        raise CheckpointError(
            f"{folder} is incomplete: {list_names(missing)} of {first.name} missing; fetch "
            "the model again (a Hub id with model.local_only=false continues a download)"
        )
    return files


def find_weights(folder: Path) -> Path:
    """Returns the file with a model's weights, or with their index.

    `from_pretrained` takes the file that `config.json` names, else a whole file before an index.

    Raises:
        CheckpointError: there is none; the message says what the folder has.
    """
    wanted = name_weights(folder)
    if ranks := sorted(filter(OF_A_RANK.match, (file.name for file in folder.iterdir()))):
        # These the library takes before any other.
        raise CheckpointError(
            f"{folder} has what the processes of a distributed training saved ({ranks[0]}); remove "
            "it, or load it with Transformers and save_pretrained(FOLDER)"
        )
    for name in wanted:
        if require_plain_file(folder / name, CheckpointError).is_file():
            return folder / name
    refuse_gguf_folder(folder)
    raise CheckpointError(
        f"{folder} has no {' and no '.join(wanted)}, from which experts are read; "
        f"{describe_content(folder)}. Other formats are converted by loading the model with "
        "Transformers and save_pretrained(FOLDER); of several files the index is needed too"
    )


def name_weights(folder: Path) -> list[str]:
    """Names the files that a model's weights, or their index, may be in; the first there is taken.

    Raises:
        CheckpointError: `config.json` is not there, or names no file in its folder.
    """
    named = read_config_file(folder).get(NAMES_WEIGHTS)
    if named is None:
        return [WEIGHTS, WEIGHTS_INDEX]
    if is_file_name(named) and named.endswith((SUFFIX, INDEX_SUFFIX)):
        return [named]
    raise CheckpointError(
        f"{folder / CONFIG}: {NAMES_WEIGHTS} is {named!r:.100}, which is no file name of weights "
        "in the model's folder; fetch the model again"
    )


def is_index(file: Path) -> bool:
    return file.name.endswith(INDEX_SUFFIX)


def read_weights_index(folder: Path) -> dict[str, str]:
    """Returns tensor name to file name; empty for a checkpoint of one file."""
    file = find_weights(folder)
    if not is_index(file):
        return {}
    content = read_json_object(file)
    listed = content.get("weight_map")
    if not (listed and isinstance(listed, dict) and isinstance(content.get("metadata"), dict)):
        raise CheckpointError(
            f"{file} is damaged (it needs weight_map and metadata, JSON objects); fetch it again"
        )
    for tensor, name in listed.items():
        # Transformers opens what stands here: never a file outside the model's folder.
        if not is_file_name(name) or not name.endswith(SUFFIX):
            raise CheckpointError(
                f"{file}: {tensor} is in {name!r}, which is no file name of weights in the model's "
                "folder; fetch the model again"
            )
    return listed


def is_file_name(name: Any) -> bool:
    """Whether it is a text that names a file in a folder, and none outside."""
    return isinstance(name, str) and bool(name) and not set(name) & set("/\\\0")


def read_raw_header(file: Path) -> bytes:
    """Returns the header of a safetensors file, damaged or not."""
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        return handle.read(min(length, MAX_HEADER_BYTES))


def mentions_experts(config: Any) -> bool:
    """Whether a configuration or a part of it names experts, other than as none."""
    # Not recursive: a file may be nested as deeply as its parser allows.
    left: list[tuple[str, Any]] = [("", config)]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [(key, part) for part in value]
        elif key in ("model_type", "architectures"):
            if EXPERT.search(str(value)):
                return True
        elif value and EXPERT.search(key):
            return True
    return False


def has_tokenizer(folder: Path) -> bool:
    if is_gguf(folder):
        return "tokenizer.ggml.tokens" in read_header(folder).metadata
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def check_tokenizer(folder: Path) -> None:
    """Raises CheckpointError, naming what the folder has, if it has no tokenizer."""
    if has_tokenizer(folder):
        return
    if is_gguf(folder):
        raise CheckpointError(
            f"{folder} has no tokenizer (tokenizer.ggml.tokens); convert the original checkpoint, "
            "with its tokenizer, again"
        )
    raise CheckpointError(
        f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES[:3])} or another); "
        f"{describe_content(folder)}. Copy the tokenizer files of the model that it was made "
        "from into it"
    )


def describe_content(folder: Path) -> str:
    """Describes what a folder has, for a message."""
    names = [path.name + "/" * path.is_dir() for path in folder.iterdir()]
    visible = sorted(name for name in names if not name.startswith("."))
    return f"it has {list_names(visible)}" if visible else "it is empty"


def list_names(names: Iterable[str]) -> str:
    """Returns the first names, and how many more there are."""
    known = list(names)
    shown = ", ".join(known[:MOST_LISTED])
    return shown if len(known) <= MOST_LISTED else f"{shown} and {len(known) - MOST_LISTED} more"
