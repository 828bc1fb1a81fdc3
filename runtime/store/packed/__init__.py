"""A model's experts repacked once: one aligned, checksummed record each."""

from runtime.store.packed.store import PackedStore, open_store

__all__ = ["PackedStore", "open_store"]
