"""Eviction policies: which expert to evict when a slot is needed. Bookkeeping only."""

from runtime.compiled import extend_path

__path__ = extend_path(__path__, __name__)
