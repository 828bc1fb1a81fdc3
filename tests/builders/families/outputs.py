"""What a model of any family computes of a few prompts, on the device that it is on."""

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def outputs(model: PreTrainedModel, *, num_tokens: int = 5) -> dict[str, Tensor]:
    """Two prompts of nine tokens; then the second padded on the left, as batches are.

    So many tokens follow the first prompt, and half of them the batch. Windows and chunks have
    eight, and blocks of indices four: the step of the fifth token begins one.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 90, (2, 9), generator=generator).to(model.device)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    # Diffusion models draw random numbers in every forward pass, greedy or not.
    torch.manual_seed(0)
    decoder = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    logits = model(input_ids=tokens, attention_mask=mask, **decoder).logits
    found = {
        "logits": model(input_ids=tokens, **decoder).logits,
        # Diffusion models have logits of the tokens to come, not of the prompt's.
        "logits of padded prompts": logits[mask.bool()] if logits.shape[1] == 9 else logits,
    }
    if model.can_generate():
        prompt = {"input_ids": tokens[:1]}
        batch = {"input_ids": tokens, "attention_mask": mask}
        runs = [("prompt", prompt, num_tokens), ("padded batch", batch, num_tokens // 2)]
        for name, inputs, length in runs:
            torch.manual_seed(0)
            options = {"max_new_tokens": length, "min_new_tokens": length, "pad_token_id": 0}
            result = model.generate(**inputs, **options, do_sample=False)
            found[f"tokens of a {name}"] = getattr(result, "sequences", result)
    return found
