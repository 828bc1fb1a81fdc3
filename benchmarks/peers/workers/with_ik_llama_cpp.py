"""ik_llama.cpp: a GGUF file, mapped into memory or read into it and repacked.

`options.load` is `mapped` or `in-memory` (`--run-time-repack`). The fork's own settings for speed
are those of its programs: flash attention and the fused product of gate and up. As with llama.cpp,
functions of the C interface are called without the package's classes.
"""

import ik_llama_cpp._ctypes_api as ik
import numpy as np
from peer_worker import AnswerFunction, OnToken, PeerRequest, main


def load(request: PeerRequest) -> AnswerFunction:
    ik.llama_backend_init()
    model_params = ik.llama_model_default_params()
    model_params.use_mmap = request.options["load"] == "mapped"
    model_params.repack_tensors = not model_params.use_mmap
    model = ik.llama_model_load_from_file(request.weights.encode(), model_params)
    if not model:
        raise RuntimeError(f"ik_llama.cpp cannot load {request.weights}")
    longest = max(map(len, request.warm_up + request.prompts))
    params = ik.llama_context_default_params()
    params.n_ctx = longest + request.new_tokens
    params.n_batch, params.n_ubatch = longest, min(longest, 512)  # its own default
    params.n_threads = params.n_threads_batch = request.threads
    params.flash_attn = params.fused_moe_up_gate = params.fused_up_gate = True
    context = ik.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("ik_llama.cpp cannot make a context")
    vocab_size = ik.llama_vocab_n_tokens(ik.llama_model_get_vocab(model))
    batch = ik.llama_batch_init(longest, 0, 1)

    def decode(tokens: list[int], position: int) -> int:
        """Returns the most likely token after these."""
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, position + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = place == len(tokens) - 1
        if failed := ik.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode failed with {failed}")
        logits = ik.llama_get_logits_ith(context, len(tokens) - 1)
        return int(np.ctypeslib.as_array(logits, (vocab_size,)).argmax())

    def answer(prompt: list[int], new_tokens: int, on_token: OnToken) -> None:
        ik.llama_kv_cache_clear(context)
        tokens, position = prompt, 0
        for _ in range(new_tokens):
            token = decode(tokens, position)
            if not on_token(token):
                return
            tokens, position = [token], position + len(tokens)

    return answer


if __name__ == "__main__":
    main(load, ("ik-llama-cpp-python", "numpy"))
