"""An OpenAI-compatible server for a model whose experts stay within a memory budget.

`transformers serve` (5.23.0, measured on the reference model, 8 prompts of 48 tokens) does not fit:

1. Its continuous batching is not bitwise equal to `generate`: log-probabilities differ by 2e-6 to
   5e-6 in float32 (equal tokens), in bfloat16 by up to 0.08 (4 of 8 greedy answers differ; sdpa).
2. It has no API key, queue bound, body limit or metrics; `/reset` and `/load_model` are open.
3. It supports neither echo nor logprobs, ignores n and stop in batches, and has one generation
   config for all running requests; its threads would call the engine from outside the group.

Here FastAPI and uvicorn serve HTTP, and `runtime.generation.lockstep` runs the model's own
`generate`.
"""
