"""Networks of predictors, and the compiled code that computes them."""

import os

try:
    if os.environ.get("MOECAST_COMPILED") == "0":
        raise ImportError("MOECAST_COMPILED=0")
    from predictors.networks import kernels
except ImportError:  # there was no C compiler
    kernels = None  # type: ignore[assignment]
