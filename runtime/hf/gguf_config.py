"""Makes a configuration of a GGUF file's metadata, and refuses what it cannot express.

Transformers has such functions for a few architectures, which leave out values or take those of one
model for another's; here every value comes from the file, from llama.cpp's default, or from the
table of architectures.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from runtime.errors import CheckpointError
from runtime.store.gguf.architectures import (
    Architecture,
    read_architectures,
    read_translation,
)
from runtime.store.gguf.header import GgufHeader, find_tokens, read_header


def read_gguf_config(file: Path) -> PreTrainedConfig:
    """Return the configuration that a file's metadata say.

    Raises:
        CheckpointError: they lack a value, or have one that the model cannot have.
    """
    header = read_header(file)
    architecture = find_architecture(header)
    config_class = CONFIG_MAPPING[architecture.model_type]
    try:
        return config_class.from_dict(_Metadata(header, architecture).map(vars(config_class())))
    except CheckpointError:
        raise
    # Configuration classes raise exceptions of every type for values that they do not expect.
    except Exception as error:
        raise CheckpointError(
            f"{file} is damaged: its metadata make no {architecture.model_type} "
            f"({' '.join(str(error).split())}); fetch it again"
        ) from error


def find_architecture(header: GgufHeader) -> Architecture:
    architecture = read_architectures()[header.architecture]
    changes = dict(architecture.variant)
    for key, value in changes.pop("where", {}).items():
        if header.metadata.get(f"{header.architecture}.{key}") != value:
            return architecture
    return replace(architecture, **changes)


class _Metadata:
    """The metadata of a file's architecture, without its name in the keys."""

    def __init__(self, header: GgufHeader, architecture: Architecture):
        self._header, self._architecture = header, architecture
        self._known = read_translation()
        prefix = f"{header.architecture}."
        self._stated = {
            key.removeprefix(prefix): value
            for key, value in header.metadata.items()
            if key.startswith(prefix)
        }
        for key, value in self._stated.items():
            is_kept = key in self._known.arrays or key.startswith("rope.")
            if isinstance(value, tuple) and not is_kept:
                # Of each layer; those without attention have no heads.
                values = set(value) - ({0} if architecture.linear else set())
                if len(values) != 1:
                    raise self._refuse(key, value)
                self._stated[key] = values.pop()

    def map(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return values of the configuration, which has these fields."""
        for key in self._known.needed:
            self._need(key)
        stated, given, flags = self._stated, self._header.metadata, self._known.flags
        num_layers = stated["block_count"] - stated.get("nextn_predict_layers", 0)
        if not 1 <= num_layers <= len(self._header.tensors):
            raise CheckpointError(
                f"{self._header.file} is damaged: its metadata say {num_layers} layers, which its "
                f"{len(self._header.tensors)} tensors cannot be; fetch it again"
            )
        heads = stated["attention.head_count"]
        stated.setdefault("attention.head_count_kv", heads)
        head_dim = stated.pop("attention.key_length", stated["embedding_length"] // heads)
        if "attention_multiplier" in fields:
            stated.setdefault("attention.scale", head_dim**-0.5)
        values = {
            "num_hidden_layers": num_layers,
            "vocab_size": given.get("tokenizer.ggml.tokens", stated.get("vocab_size")),
            "tie_word_embeddings": "output.weight" not in self._header.tensors,
            "head_dim": head_dim,
            "bos_token_id": given.get("tokenizer.ggml.bos_token_id"),
            "pad_token_id": given.get("tokenizer.ggml.padding_token_id"),
            "eos_token_id": self._find_ends(),
            **{name: self._has(flags[name]) for name in flags if name in fields},
            **self._architecture.values,
        }
        if "kv_lora_rank" in fields:
            values |= self._map_latent_heads(head_dim)
        if "linear_value_head_dim" in fields:
            number = self._need("ssm.time_step_rank")
            values["linear_value_head_dim"] = self._need("ssm.inner_size") // number
        if "layer_types" in fields and (types := self._map_layers(num_layers)):
            values["layer_types"] = types
        values["rope_parameters"] = self._map_rope(values["head_dim"])
        self._map_fields(fields, values)
        window = stated.get("attention.sliding_window")
        if window and not self._architecture.window_step:
            raise self._refuse("attention.sliding_window", window)
        number = stated.get("expert_gating_func")
        if number is not None and self._known.gating.get(number) != self._architecture.gating:
            raise self._refuse("expert_gating_func", number)
        return values

    def _map_fields(self, fields: Mapping[str, Any], values: dict[str, Any]) -> None:
        always = {**self._known.defaults, **self._architecture.fixed}
        for key, value in {**self._known.defaults, **self._stated}.items():
            names = () if key in self._architecture.fixed else self._known.fields.get(key, ())
            name = next((name for name in names if name in fields), None)
            if name is not None and key in self._stated:
                values[name] = value
            elif name is not None:
                values.setdefault(name, value)
            elif key not in self._known.elsewhere and value != always.get(key):
                raise self._refuse(key, value)

    def _find_ends(self) -> int | list[int] | None:
        """Return the ids of the tokens that end a text, a turn or a message (a call of a tool)."""
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        named = [self._header.metadata[key] for key in keys if key in self._header.metadata]
        texts = self._architecture.ends
        ends = list(dict.fromkeys(named + (find_tokens(self._header, texts) if texts else [])))
        return ends if len(ends) > 1 else next(iter(ends), None)

    def _map_latent_heads(self, head_dim: int) -> dict[str, Any]:
        """Return the sizes of heads that are made of latent ones (DeepSeek).

        Newer files state those of the heads under names of their own.
        """
        stated = self._stated
        rotated = self._need("rope.dimension_count")
        stated["attention.head_count_kv"] = stated["attention.head_count"]
        value_dim = self._need("attention.value_length")
        return {
            "head_dim": rotated,
            "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": stated.get("attention.key_length_mla", head_dim) - rotated,
            "v_head_dim": stated.get("attention.value_length_mla", value_dim),
        }

    def _map_layers(self, num_layers: int) -> list[str]:
        """Return the kind of attention of each layer; none where it is the model's default."""
        step, window = self._architecture.window_step, self._stated.get("attention.sliding_window")
        if self._architecture.linear:
            tensors, linear = self._header.tensors, self._architecture.linear
            return [
                "full_attention" if f"blk.{layer}.attn_q.weight" in tensors else linear
                for layer in range(num_layers)
            ]
        pattern = self._stated.get("attention.sliding_window_pattern", step)
        if not isinstance(pattern, tuple):
            pattern = [(layer + 1) % pattern for layer in range(num_layers)] if pattern else []
        names = "full_attention", "sliding_attention"
        return [names[bool(window and one)] for one in pattern[:num_layers]]

    def _map_rope(self, head_dim: int) -> dict[str, Any]:
        stated = self._stated
        rope = {key: stated.pop(key) for key in list(stated) if key.startswith("rope.")}
        rope.pop("rope.scaling.finetuned", None)
        mapped = {
            "rope_type": "default",
            "rope_theta": rope.pop("rope.freq_base", 10000.0),
            **self._architecture.values.get("rope_parameters", {}),
        }
        rotated = rope.pop("rope.dimension_count", head_dim)
        if rotated != head_dim:
            mapped["partial_rotary_factor"] = rotated / head_dim
        if "mrope_interleaved" in mapped:
            sections = rope.pop("rope.dimension_sections")
            mapped["mrope_section"] = [size for size in sections if size]
        kind = rope.pop("rope.scaling.type", "none")
        if kind in self._known.scaling:
            mapped["rope_type"] = kind
            for key, name in self._known.scaling[kind].items():
                if f"rope.scaling.{key}" in rope:
                    mapped[name] = rope.pop(f"rope.scaling.{key}")
            if "rope.scaling.yarn_log_multiplier" in rope and kind == "yarn":
                scale = 10 * rope.pop("rope.scaling.yarn_log_multiplier")
                mapped |= {"mscale": scale, "mscale_all_dim": scale}
        elif kind != "none":
            raise self._refuse("rope.scaling.type", kind)
        for key, value in rope.items():
            if value != {"rope.freq_base_swa": mapped["rope_theta"]}.get(key, 1.0):
                raise self._refuse(key, value)
        return mapped

    def _has(self, tensor: str) -> bool:
        return any(name.endswith(f".{tensor}") for name in self._header.tensors)

    def _need(self, key: str) -> Any:
        if key not in self._stated:
            raise CheckpointError(
                f"{self._header.file} is damaged: it has no {self._header.architecture}.{key}"
            )
        return self._stated[key]

    def _refuse(self, key: str, value: object) -> CheckpointError:
        header = self._header
        return CheckpointError(
            f"{header.file} says {header.architecture}.{key} = {value}, which changes the result "
            f"and is not understood here of {self._architecture.models}; give the original "
            "checkpoint (config.json and safetensors files)"
        )
