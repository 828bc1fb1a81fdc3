"""Rows of quantised weights as GGUF files have them: ggml's types, and its kernels."""
