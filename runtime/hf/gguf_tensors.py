"""Undoes what llama.cpp's converter does to tensors; `runtime.store.gguf.architectures` says where.

Each function takes the configuration and the stored tensors, in float32.
"""

import torch
from torch import Tensor
from transformers import PreTrainedConfig


def subtract_one(_config: PreTrainedConfig, weights: Tensor) -> Tensor:
    return weights - 1


def log_negative(_config: PreTrainedConfig, weights: Tensor) -> Tensor:
    return torch.log(-weights)


def join_rows(_config: PreTrainedConfig, *weights: Tensor) -> Tensor:
    return torch.cat(weights)


def split_pairs(config: PreTrainedConfig, rows: Tensor) -> Tensor:
    """Put the first halves of the pairs of rows that rotate together before the second ones."""
    pairs = rows.reshape(-1, config.head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def join_latent(_config: PreTrainedConfig, keys: Tensor, values: Tensor | None = None) -> Tensor:
    """Join each head's rows for keys, stored transposed, and for values (DeepSeek).

    Older files have them as they are.
    """
    if values is None:
        return keys
    return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)


def join_key_heads(config: PreTrainedConfig, qkv: Tensor, gates: Tensor | None = None) -> Tensor:
    """Put the rows of a key head together: its query, key, values and gates (Qwen3-Next).

    Older files have them so.
    """
    if gates is None:
        return qkv
    heads = config.linear_num_key_heads
    size = heads * config.linear_key_head_dim
    parts = [*qkv.split([size, size, len(qkv) - 2 * size]), gates]
    return torch.cat([part.view(heads, -1, part.shape[-1]) for part in parts], 1).flatten(0, 1)


def group_rows(config: PreTrainedConfig, rows: Tensor) -> Tensor:
    """Put the value heads of a key head together; stored are the first of all, then the second."""
    heads = config.linear_num_key_heads
    tiled = rows.reshape(config.linear_num_value_heads // heads, heads, -1)
    return tiled.transpose(0, 1).reshape(rows.shape)


def group_value_rows(config: PreTrainedConfig, rows: Tensor) -> Tensor:
    """As `group_rows`, after the rows of queries and keys."""
    size = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat([rows[:size], group_rows(config, rows[size:])])


def group_columns(config: PreTrainedConfig, columns: Tensor) -> Tensor:
    return group_rows(config, columns.T).T


def log_negative_of_groups(config: PreTrainedConfig, weights: Tensor) -> Tensor:
    return torch.log(-group_rows(config, weights))
