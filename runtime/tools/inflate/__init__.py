"""Inflation: append zero neurons to experts, which changes their bytes and no output."""
