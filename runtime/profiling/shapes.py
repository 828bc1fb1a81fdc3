"""The shape of a downloaded model, for `shape=trace`."""

from runtime.config import ModelConfig, ShapeConfig
from runtime.hf.layers import find_top_k
from runtime.hf.loading import load_stripped
from runtime.store.base import max_slot_bytes
from runtime.store.model_source import resolve


def read_model_shape(config: ModelConfig) -> ShapeConfig:
    """Sizes read from the model's checkpoint, in the dtype that `config` loads it in.

    A layer's other weights are all that are neither experts nor embeddings, evenly divided over the
    layers with experts.

    Raises:
        CheckpointError: the model is not on this machine.
    """
    stripped = load_stripped(resolve(config), config.dtype)
    model, layers, store = stripped.model, stripped.layers, stripped.open_store()
    try:
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        ends_bytes = {t.data_ptr() for end in ends if end is not None for t in end.parameters()}
        others = {t.data_ptr(): t.nbytes for t in model.parameters()}
        body = sum(size for place, size in others.items() if place not in ends_bytes)
        text = model.config.get_text_config()
        return ShapeConfig(
            name=config.name,
            source=f"the checkpoint of {config.name}",
            num_layers=len(layers),
            num_experts=store.num_experts,
            top_k=find_top_k(model, layers),
            hidden_size=text.hidden_size,
            expert_bytes=max_slot_bytes(store),
            layer_bytes=body // len(layers),
        )
    finally:
        store.close()
