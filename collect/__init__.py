"""Runs prompts through a model and records what predictors learn from."""
