"""Finds the Transformers class to load a checkpoint with."""

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from runtime.errors import CheckpointError

GENERATING = (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)
"""Auto classes in order, for checkpoints that do not name their class."""

DEQUANTISED = ("fp8", "mxfp4")
"""Quantisation methods that Transformers reverses while loading, on request. By default it does
so only without a GPU that has kernels for them, and those kernels need whole banks of experts."""

NAMED_ONLY = (AutoModelForTokenClassification,)
"""Models that generate nothing: only for checkpoints made for them."""


def _classes(config: PreTrainedConfig, auto: Any) -> tuple[type[PreTrainedModel], ...]:
    mapping = auto._model_mapping
    if type(config) not in mapping:
        return ()
    found = mapping[type(config)]
    return tuple(found) if isinstance(found, (list, tuple)) else (found,)


def find_model_class(
    config: PreTrainedConfig,
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class, and the part of the configuration that it is built from.

    The checkpoint's own `architectures` come first: a model with vision is loaded with it, and one
    that was saved as a text model without. Next is the first that Transformers' auto classes know.

    Raises:
        CheckpointError: no class for this configuration that computes text.
    """
    generating = [cls for auto in GENERATING for cls in _classes(config, auto)]
    others = [cls for auto in NAMED_ONLY for cls in _classes(config, auto)]
    named = [cls for cls in generating + others if cls.__name__ in (config.architectures or ())]
    chosen = next(iter(named + generating), None)
    quantised = getattr(config, "quantization_config", None)
    if isinstance(quantised, dict) and quantised.get("quant_method") in DEQUANTISED:
        quantised["dequantize"] = True
    if chosen is None:
        raise CheckpointError(
            f"Transformers has no class that computes text for {type(config).__name__} "
            f"(architectures: {', '.join(config.architectures or ()) or 'none'})"
        )
    text = config.get_text_config()
    if text is not config and chosen.config_class is type(text):
        # As the auto classes do: a text class reads its part, and how the whole is quantised.
        if getattr(config, "quantization_config", None) is not None:
            text.quantization_config = config.quantization_config
        return chosen, text
    return chosen, config
