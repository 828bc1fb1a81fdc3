"""MoE-Infinity: the package of this name on PyPI."""

from moe_infinity import MoE
from peer_worker import AnswerFunction, OnToken, PeerRequest, main


def load(request: PeerRequest) -> AnswerFunction:
    model = MoE(request.weights, {"offload_path": request.scratch, "device_memory_ratio": 0.5})

    def answer(prompt: list[int], new_tokens: int, on_token: OnToken) -> None:
        for token in model.generate([prompt], max_new_tokens=new_tokens)[0][len(prompt) :]:
            on_token(token)

    return answer


if __name__ == "__main__":
    main(load, ("moe-infinity",))
