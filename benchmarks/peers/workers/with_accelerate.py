"""Accelerate's disk offload: experts of the first layers stay in memory, the others on disk.

Accelerate moves whole tensors, and Transformers keeps all experts of a layer in two. One layer's
experts are in memory while it computes, so the budget leaves room for them.
"""

import torch
from greedy import greedy_answers
from peer_worker import AnswerFunction, PeerRequest, main
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def device_map(config: AutoConfig, budget_bytes: int, dtype: torch.dtype) -> dict[str, str]:
    """Places the experts of the first layers and all other weights in memory."""
    elements = 3 * config.hidden_size * config.moe_intermediate_size * config.num_experts
    fitting = budget_bytes // (elements * dtype.itemsize)
    kept = fitting if fitting >= config.num_hidden_layers else max(0, fitting - 1)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places["lm_head"] = "cpu"
    for layer in range(config.num_hidden_layers):
        for part in ("self_attn", "input_layernorm", "post_attention_layernorm"):
            places[f"model.layers.{layer}.{part}"] = "cpu"
        for part in ("gate", "shared_expert", "shared_expert_gate"):
            places[f"model.layers.{layer}.mlp.{part}"] = "cpu"
        places[f"model.layers.{layer}.mlp.experts"] = "cpu" if layer < kept else "disk"
    return places


def offloaded(request: PeerRequest) -> PreTrainedModel:
    """Loads the model with its weights placed as `device_map` says."""
    torch.set_num_threads(request.threads)
    dtype = getattr(torch, request.dtype)
    config = AutoConfig.from_pretrained(
        request.weights, local_files_only=True, trust_remote_code=False
    )
    model = AutoModelForCausalLM.from_pretrained(
        request.weights,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        experts_implementation="eager",
        device_map=device_map(config, request.budget_bytes, dtype),
        offload_folder=request.scratch,
    )
    return model.eval()


def load(request: PeerRequest) -> AnswerFunction:
    return greedy_answers(offloaded(request))


if __name__ == "__main__":
    main(load, ("accelerate", "torch", "transformers"))
