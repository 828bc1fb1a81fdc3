"""KV caches: Transformers' own, offloaded beyond a budget, or cut to sinks and a window."""
