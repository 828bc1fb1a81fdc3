"""MoE-Infinity, as far as PyPI has it."""

from measured import Answer, OnToken, Request, main
from moe_infinity import MoE


def load(request: Request) -> Answer:
    model = MoE(request.weights, {"offload_path": request.scratch, "device_memory_ratio": 0.5})

    def answer(prompt: list[int], new_tokens: int, on_token: OnToken) -> None:
        for token in model.generate([prompt], max_new_tokens=new_tokens)[0][len(prompt) :]:
            on_token(token)

    return answer


if __name__ == "__main__":
    main(load, ("moe-infinity",))
