"""Caches of keys and values: kept, offloaded beyond a budget, or cut to sinks and a window."""
