"""Where experts rest: which bytes of which file, and how they become an expert in a slot."""
