"""Memory of models that share one machine: dense weights, KV caches, experts, the processes."""

from collections.abc import Sequence
from dataclasses import dataclass

from predictors.units import MIB
from runtime.config import ShapeConfig
from runtime.presets import load_shape

KV_BYTES_PER_VALUE = 2
"""Keys and values are kept in the model's dtype, bfloat16."""
PROCESS_BYTES = 1024 * MIB
"""Interpreter, PyTorch, Transformers, the predictors and buffers of one server: an assumption on
the safe side; a server of the reference model has 400 MiB for the program alone."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model's parts that its shape does not describe, from its config.json."""

    shape: str
    """Name in `configs/shape`."""
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    def kv_bytes_per_token(self, shape: ShapeConfig) -> int:
        """Returns the bytes of a token's keys and values in all layers, with full attention."""
        values = 2 * self.num_kv_heads * self.head_dim
        return shape.num_layers * values * KV_BYTES_PER_VALUE

    def dense_bytes(self, shape: ShapeConfig) -> int:
        """Returns the bytes of all weights but experts: layers, embedding and output.

        Norms are left out; embedding and output are two tables in all of `MODELS`.
        """
        tables = 2 * self.vocab_size * shape.hidden_size * shape.bytes_per_weight
        return round(shape.num_layers * shape.layer_bytes + tables)


MODELS = (
    ServedModel(shape="qwen1.5-moe", num_kv_heads=16, head_dim=128, vocab_size=151936),
    ServedModel(shape="qwen3-30b-a3b", num_kv_heads=4, head_dim=128, vocab_size=151936),
    ServedModel(shape="phi-3.5-moe", num_kv_heads=8, head_dim=128, vocab_size=32064),
    ServedModel(shape="mixtral-8x7b", num_kv_heads=8, head_dim=128, vocab_size=32000),
)


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """Bytes of one model with its users, and the experts that fit next to them."""

    shape: str
    users: int
    context_tokens: int
    """Prompt and answer of each user."""
    kv_bytes_per_token: int
    kv_bytes: int
    dense_bytes: int
    experts_bytes: int
    """All experts."""

    @property
    def fixed_bytes(self) -> int:
        """Memory that the model takes without any expert."""
        return self.dense_bytes + self.kv_bytes + PROCESS_BYTES


@dataclass(frozen=True, kw_only=True)
class MachinePlan:
    """Models on one machine; the memory that is left is for experts."""

    memory_bytes: int
    models: list[ModelMemory]
    left_bytes: int
    """Negative: that much is missing before the first expert is loaded."""
    expert_share: float
    """Share of each model's experts that fit if the rest is divided by the size of all experts."""


def count_memory(model: ServedModel, *, users: int, context_tokens: int) -> ModelMemory:
    shape = load_shape(model.shape)
    per_token = model.kv_bytes_per_token(shape)
    return ModelMemory(
        shape=model.shape,
        users=users,
        context_tokens=context_tokens,
        kv_bytes_per_token=per_token,
        kv_bytes=users * context_tokens * per_token,
        dense_bytes=model.dense_bytes(shape),
        experts_bytes=shape.num_layers * shape.num_experts * shape.expert_bytes,
    )


def plan_machine(memory_bytes: int, models: Sequence[ModelMemory]) -> MachinePlan:
    """Returns the experts that fit, where every model keeps its dense weights and KV caches."""
    left = memory_bytes - sum(model.fixed_bytes for model in models)
    needed = sum(model.experts_bytes for model in models)
    return MachinePlan(
        memory_bytes=memory_bytes,
        models=list(models),
        left_bytes=left,
        expert_share=min(1.0, max(0, left) / needed),
    )
