"""A model's experts repacked once: one aligned, checksummed record each."""
