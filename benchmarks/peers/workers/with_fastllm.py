"""fastllm: a GGUF file with experts in memory, or read from the disk through a cache of its own.

`options.load` is `disk` (`--moe_device disk --moe_cpu_cache BYTES`) or `in-memory`.
"""

import ctypes

from ftllm import llm
from peer_worker import AnswerFunction, OnToken, PeerRequest, main


def load(request: PeerRequest) -> AnswerFunction:
    llm.set_cpu_threads(request.threads)
    is_on_disk = request.options["load"] == "disk"
    if is_on_disk:
        llm.set_moe_cpu_cache(request.budget_bytes)
    llm.set_device_map("cpu")
    llm.set_device_map("disk" if is_on_disk else "cpu", True)
    model = llm.model(request.weights)
    library = llm.fastllm_lib

    def answer(prompt: list[int], new_tokens: int, on_token: OnToken) -> None:
        none, no_list = model.stop_token_ctypes(None)
        handle = library.launch_response_llm_model(
            model.model,
            len(prompt),
            (ctypes.c_int * len(prompt))(*prompt),
            ctypes.c_int(new_tokens),
            ctypes.c_int(new_tokens),
            ctypes.c_bool(False),
            ctypes.c_float(1.0),
            ctypes.c_int(1),
            ctypes.c_float(1.0),
            ctypes.c_float(1.0),
            ctypes.c_bool(False),
            none,
            no_list,
        )
        wanted = True
        while (token := library.fetch_response_llm_model(model.model, handle)) >= 0:
            wanted = wanted and on_token(token)

    return answer


if __name__ == "__main__":
    main(load, ("ftllm",))
