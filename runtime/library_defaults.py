"""Defaults of the libraries that PyTorch computes with, which read them from the environment."""

import os

from predictors.files import is_offline

WAIT_POLICY = "OMP_WAIT_POLICY"
MOST_COMPILED = 128
"""Products that oneDNN keeps compiled, .3 MiB each. The experts of a prompt of 1,900 tokens have
some 110, with their numbers of tokens rounded as in `runtime.hf.linear`, other layers 10."""
DEFAULTS = {
    WAIT_POLICY: "passive",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(MOST_COMPILED),
    "LRU_CACHE_CAPACITY": "1",
}


def set_library_defaults() -> None:
    """Set variables for this process and its children, unless the user set them.

    OpenMP's threads spin while they wait for each other. A spinning thread occupies a core that
    another program needs: two programs that spin slow each other down by more than ten times. The
    OpenMP runtime reads the variable when PyTorch loads it: it has no effect after PyTorch was
    imported.

    oneDNN keeps 1,024 compiled products, and PyTorch a list of as many more
    (LRU_CACHE_CAPACITY), which saves no time: in 100 prompts a server of a model of 50 MiB grew by
    640 MiB.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if is_offline():
        # The Hub's client, and data sets, do not know our variable.
        os.environ["HF_HUB_OFFLINE"] = "1"
