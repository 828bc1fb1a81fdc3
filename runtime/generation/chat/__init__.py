"""Chat in the terminal: `python -m runtime chat`."""
