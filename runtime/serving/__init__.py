"""An OpenAI-compatible server for a model whose experts stay within a memory budget.

Why not `transformers serve` (5.23.0, read and tried on the reference model, 8 prompts x 48 tokens):
1. Its continuous batching is not bitwise `generate`: log-probabilities differ by 2e-6 to 5e-6 in
   float32 (tokens equal); in bfloat16 by up to 0.08, and 4 of 8 greedy answers part (sdpa).
2. It has no key, no queue bound, no body limit, no metrics; `/reset` and `/load_model` are open.
3. It answers no echo and no logprobs, ignores n and stop in batches, and keeps one generation
   config for all that run together; its threads would call the engine from outside the group.
So FastAPI and uvicorn carry HTTP here, and `generation.lockstep` runs the model's own `generate`.
"""
