"""A conversation in the terminal: `python -m runtime chat`."""
