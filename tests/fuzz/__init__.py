"""Fuzzers of everything that moecast parses from elsewhere.

`python -m tests.fuzz TARGET` runs atheris on one, `make fuzz` on all; `test_corpus.py` replays the
corpus with mutations that need no atheris.
"""
