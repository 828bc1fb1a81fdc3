"""What plain Transformers says to the same prompts: every expert in memory, eager."""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from runtime.engine.plain import load_plain


class Plain:
    """The model without a server, without a budget."""

    def __init__(self, folder: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        # As configs/model/qwen2-moe-tiny.yaml has it served.
        self._model = load_plain(folder, dtype=torch.float32)

    @torch.inference_mode()
    def continuation(self, prompt: str, num_tokens: int) -> str:
        """The greedy text of exactly so many tokens."""
        inputs = torch.tensor([self.tokenizer(prompt)["input_ids"]])
        output = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=num_tokens,
            do_sample=False,
        )
        new = output[0, inputs.shape[1] :]
        assert len(new) == num_tokens, "the text ends by itself; take another prompt"
        return self.tokenizer.decode(new)

    @torch.inference_mode()
    def loglikelihood(self, context: str, continuation: str) -> float:
        """Of the continuation's tokens, in nats; both are encoded together, as lm-eval does."""
        whole = self.tokenizer(context + continuation)["input_ids"]
        start = len(self.tokenizer(context)["input_ids"])
        logits = self._model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
        return sum(float(logits[place - 1, whole[place]]) for place in range(start, len(whole)))
