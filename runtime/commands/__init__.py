"""Commands of `python -m runtime`, called with their typed configurations."""
