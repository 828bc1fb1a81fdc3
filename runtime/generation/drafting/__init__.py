"""Drafted tokens: several tokens that may come next, which one forward pass verifies."""
