"""Plain Transformers; its weights stay mapped from the file where they need no conversion.

`options.experts`: eager reads the chosen experts only; without it, Transformers' own default.
"""

import torch
from generating import generating
from measured import Answer, Request, main
from transformers import AutoModelForCausalLM


def load(request: Request) -> Answer:
    torch.set_num_threads(request.threads)
    model = AutoModelForCausalLM.from_pretrained(
        request.weights,
        dtype=torch.float32,
        local_files_only=True,
        experts_implementation=request.options.get("experts"),
    )
    return generating(model.eval())


if __name__ == "__main__":
    main(load, ("torch", "transformers"))
