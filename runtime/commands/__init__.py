"""What each command of `python -m runtime` does with its typed configuration."""
