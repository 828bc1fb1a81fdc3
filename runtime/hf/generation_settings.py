"""Decides which options of a checkpoint's `generation_config.json` and `config.json` are in force.

Trainings leave their own there (`use_cache: false` of gradient checkpointing,
`output_router_logits: true` of a router's loss). Options that choose tokens are honoured, those by
which a runtime serves are replaced, and those that cannot be had are refused
(`generation_settings.yaml`); `tests/unit/runtime/hf/test_generation_settings.py` lists them all.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from predictors.typed_values import read_table
from runtime.errors import CheckpointError
from runtime.store.model_check import SETTINGS

log = logging.getLogger(__name__)

TABLES = read_table(Path(__file__).with_suffix(".yaml"))
REPLACED: Mapping[str, Any] = TABLES["replaced"]
REPLACED_IN_CONFIG: Mapping[str, Any] = TABLES["replaced_in_config"]
REFUSED: Mapping[str, str] = TABLES["refused"]
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
KINDS: Mapping[str, type] = {
    **dict.fromkeys(("do_sample", "renormalize_logits", "remove_invalid_values"), bool),
    **dict.fromkeys(("max_length", "max_new_tokens", "min_length", "min_new_tokens"), int),
}
"""Options of which the library takes anything at first: the text "false" would be true."""


def settle_generation(model: PreTrainedModel, folder: Path) -> None:
    """Replace or refuse the options of a loaded model that it cannot be served with.

    Raises:
        CheckpointError: an option is not supported, or nothing can be made of its value.
    """
    replaced = replace_options(model.config, REPLACED_IN_CONFIG)
    replaced |= replace_options(model.config.get_text_config(), REPLACED_IN_CONFIG)
    # Not models that classify, nor those whose own loop has options of its own.
    if isinstance(model, GenerationMixin):
        settings = model.generation_config
        replaced |= replace_options(settings, REPLACED)
        check_options(model, settings, folder / SETTINGS)
    if replaced:
        log.warning(
            "%s: not used are %s; in force are %s",
            folder,
            ", ".join(f"{name}={old!r:.40}" for name, (old, _) in replaced.items()),
            ", ".join(f"{name}={new}" for name, (_, new) in replaced.items()),
        )


def replace_options(settings: Any, used: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Put values in force; returns the others' names, with what they were and what they are."""
    replaced = {}
    for name, new in used.items():
        old = getattr(settings, name, None)
        if old not in (None, new):
            setattr(settings, name, new)
            replaced[name] = (old, new)
    return replaced


def check_options(model: Any, settings: Any, file: Path) -> None:
    """Raise CheckpointError for an option that is not supported, or would fail in every request."""
    for name, advice in REFUSED.items():
        value = getattr(settings, name, None)
        if value not in (None, False) and (name, value) != ("guidance_scale", 1):
            raise CheckpointError(f"{file}: {name} is not supported; {advice}")
    if settings.top_k == -1:  # as vLLM writes "all tokens"
        settings.top_k = 0
    for name in TOKEN_IDS:
        value = getattr(settings, name, None)
        given = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and abs(token) < 2**63 for token in given):
            raise CheckpointError(f"{file}: {name} is {value!r:.100}, no token id")
    for name, value in vars(settings).items():
        if value is None or name.startswith("_") or name in TOKEN_IDS:
            continue
        try:
            if type(value) is not KINDS.get(name, type(value)):
                raise TypeError(f"it is no {KINDS[name].__name__}")
            if name == "temperature":
                value = value or 1.0  # 0 says that a command's default is greedy
            if name == "temperature" and type(value) is int:
                settings.temperature = value = float(value)  # the library refuses 2 for 2.0
            choose_once(model, name, value)
        # Transformers raises exceptions of every type for values that it does not expect.
        except Exception as error:
            raise CheckpointError(
                f"{file}: nothing can be chosen with {name}={value!r:.100} "
                f"({' '.join(str(error).split())}); correct or remove it"
            ) from error


def choose_once(model: Any, name: str, value: Any) -> None:
    """Choose among equal scores after one token, as `generate` would with this option."""
    tokens_11 = torch.zeros(1, 1, dtype=torch.int64)
    settings: Any = GenerationConfig(do_sample=True, max_length=2)
    setattr(settings, name, value)
    settings._eos_token_tensor = tokens_11[0]
    processors = model._get_logits_processor(
        settings, input_ids_seq_length=1, encoder_input_ids=tokens_11, device="cpu", model_kwargs={}
    )
    processors(tokens_11, torch.zeros(1, model.config.get_text_config().vocab_size))
