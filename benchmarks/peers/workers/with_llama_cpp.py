"""llama.cpp through llama-cpp-python: a GGUF file, mapped into memory."""

from llama_cpp import GGML_TYPE_F32, Llama
from peer_worker import AnswerFunction, OnToken, PeerRequest, main

CONTEXT = 512


def load(request: PeerRequest) -> AnswerFunction:
    llama = Llama(
        request.weights,
        n_ctx=CONTEXT,
        n_threads=request.threads,
        n_threads_batch=request.threads,
        use_mmap=True,
        use_mlock=False,
        # The precision of the other peers' KV caches.
        type_k=GGML_TYPE_F32,
        type_v=GGML_TYPE_F32,
        verbose=False,
    )

    def answer(prompt: list[int], new_tokens: int, on_token: OnToken) -> None:
        llama.reset()
        for number, token in enumerate(llama.generate(prompt, temp=0.0, repeat_penalty=1.0), 1):
            if not on_token(token) or number == new_tokens:
                return

    return answer


if __name__ == "__main__":
    main(load, ("llama-cpp-python", "numpy"))
