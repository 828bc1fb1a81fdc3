"""moecast, with the system that `options.system` names."""

import torch
from greedy import greedy_answers
from peer_worker import AnswerFunction, PeerRequest, main

from runtime import load as load_served
from runtime.config import ModelConfig
from runtime.presets import load_system


def load(request: PeerRequest) -> AnswerFunction:
    torch.set_num_threads(request.threads)
    model = load_served(
        ModelConfig(id=request.weights, dtype=request.dtype),
        budget=request.budget_bytes,
        system=load_system(request.options["system"]),
        device="cpu",
        store=request.store,
    )
    return greedy_answers(model)


if __name__ == "__main__":
    main(load, ("torch", "transformers"))
