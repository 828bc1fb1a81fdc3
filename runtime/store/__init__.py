"""Experts on disk: where their bytes are, and how they are read into slots."""
