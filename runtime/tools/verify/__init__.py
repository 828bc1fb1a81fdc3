"""Bitwise comparison of a served model with plain Transformers."""
