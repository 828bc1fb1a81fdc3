"""Counts of calls in a decode step, which may not grow unnoticed."""
