"""Eviction policies: which expert to evict when a slot is needed. Bookkeeping only."""
