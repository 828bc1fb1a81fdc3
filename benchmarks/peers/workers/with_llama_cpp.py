"""llama.cpp: a GGUF file, mapped into memory or read into it.

`options.load` is `mapped` (llama.cpp's default, with `--no-repack`: repacked weights would be a
copy in memory) or `in-memory` (`--load-mode none`, weights repacked for this processor's kernels).
The functions of its C interface are called without llama-cpp-python's classes, whose time for each
token would be counted.
"""

import llama_cpp
import numpy as np
from peer_worker import AnswerFunction, OnToken, PeerRequest, main


def load(request: PeerRequest) -> AnswerFunction:
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    is_mapped = request.options["load"] == "mapped"
    model_params.load_mode = (
        llama_cpp.LLAMA_LOAD_MODE_MMAP if is_mapped else llama_cpp.LLAMA_LOAD_MODE_NONE
    )
    model_params.use_extra_bufts = not is_mapped
    model = llama_cpp.llama_model_load_from_file(request.weights.encode(), model_params)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {request.weights}")
    longest = max(map(len, request.warm_up + request.prompts))
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = longest + request.new_tokens
    params.n_batch, params.n_ubatch = longest, min(longest, 512)  # its own default
    params.n_threads = params.n_threads_batch = request.threads
    if request.dtype == "float32":
        # The precision of the other peers' KV caches.
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp cannot make a context")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def answer(prompt: list[int], new_tokens: int, on_token: OnToken) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        tokens = prompt
        for _ in range(new_tokens):
            array = (llama_cpp.llama_token * len(tokens))(*tokens)
            failed = llama_cpp.llama_decode(
                context, llama_cpp.llama_batch_get_one(array, len(tokens))
            )
            if failed:
                raise RuntimeError(f"llama_decode failed with {failed}")
            logits = llama_cpp.llama_get_logits_ith(context, -1)
            token = int(np.ctypeslib.as_array(logits, (vocab_size,)).argmax())
            if not on_token(token):
                return
            tokens = [token]

    return answer


if __name__ == "__main__":
    main(load, ("llama-cpp-python", "numpy"))
