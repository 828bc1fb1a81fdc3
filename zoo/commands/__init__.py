"""The zoo's command faces: each prints for people and returns the same as plain values."""
