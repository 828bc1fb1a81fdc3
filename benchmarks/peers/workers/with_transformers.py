"""Plain Transformers; weights that need no conversion stay mapped from the file.

`options.experts` is the implementation of the experts: eager reads the chosen ones only.
"""

import torch
from greedy import greedy_answers
from peer_worker import AnswerFunction, PeerRequest, main
from transformers import AutoModelForCausalLM


def load(request: PeerRequest) -> AnswerFunction:
    torch.set_num_threads(request.threads)
    model = AutoModelForCausalLM.from_pretrained(
        request.weights,
        dtype=getattr(torch, request.dtype),
        local_files_only=True,
        trust_remote_code=False,
        experts_implementation=request.options.get("experts"),
    )
    return greedy_answers(model.eval())


if __name__ == "__main__":
    main(load, ("torch", "transformers"))
