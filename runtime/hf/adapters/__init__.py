"""The ways in which Transformers' models keep a layer's routed experts, one file each."""
