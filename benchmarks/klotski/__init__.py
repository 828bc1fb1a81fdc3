"""Batch groups live and simulated, after Klotski's figures 12, 14 and 15 and its table 3."""
