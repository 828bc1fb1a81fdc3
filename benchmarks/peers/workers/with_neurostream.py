"""neurostream: a GGUF file, whose weights stream from the disk past those that stay in memory.

Where all fit, all stay. Where not, all but the experts do, and the experts that the warm-up used
most, pinned as the package's own programs do. Sizes of blocks and numbers of workers are the
defaults, which its authors measured to be best.
"""

import torch
from neurostream import NeuroStream
from neurostream.model.qwen3 import KVCache
from peer_worker import AnswerFunction, OnToken, PeerRequest, main

ARENA_BYTES = 64 << 20
"""Reads on their way."""


def load(request: PeerRequest) -> AnswerFunction:
    torch.set_num_threads(request.threads)
    all_fit = request.budget_bytes >= request.experts_bytes
    engine = NeuroStream.load(
        request.weights,
        mem_budget=ARENA_BYTES,
        ram_budget=request.other_bytes + all_fit * request.experts_bytes,
        slab_budget=0 if all_fit else request.budget_bytes,
        device="cpu",
    )

    @torch.no_grad()
    def answer(prompt: list[int], new_tokens: int, on_token: OnToken) -> None:
        cache, tokens, position = KVCache(engine.cfg.n_layer), prompt, 0
        for _ in range(new_tokens):
            logits = engine.model.forward(torch.tensor(tokens), cache, start_pos=position)
            token = int(logits[-1].argmax())
            if not on_token(token):
                return
            tokens, position = [token], position + len(tokens)

    for prompt in request.warm_up:
        answer(prompt, 1, lambda _: False)
    engine.pin_hot_experts()
    return answer


if __name__ == "__main__":
    main(load, ("neurostream", "torch"))
