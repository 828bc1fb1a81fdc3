"""Other programs with the same weights, prompts and memory."""
