"""Memory that PyTorch and Transformers take whatever they compute.

It depends on what is installed, as Transformers imports Accelerate where it is, and on the
processor, for which oneDNN writes the code of its products.
"""

import inspect
import subprocess
import sys
from pathlib import Path

from predictors.units import MIB
from runtime.engine.memory import peak_memory_bytes

ALLOWANCE_BYTES = 40 * MIB
"""Memory in addition to libraries, weights and arena: activations, logits and KV caches of short
prompts, transfer threads, the predictor and its library."""


FEW_PRODUCTS = """
for rows in (1, 7, 16, 33):
    for width in (64, 96, 128):
        matrix = torch.ones(width, 64, dtype={dtype})
        torch.nn.functional.linear(torch.ones(rows, 64, dtype={dtype}), matrix)
"""


def measure_library_bytes(model_module: str, dtype: str) -> int:
    """Measure the peak memory of a new process that multiplies a few small matrices.

    It imports a model's module of Transformers, and none of ours.

    Args:
        dtype: of the matrices: `bfloat16`.
    """
    script = "\n".join(
        [
            "import resource, sys",
            "from pathlib import Path",
            inspect.getsource(peak_memory_bytes),
            f"import torch, transformers.modeling_utils, {model_module}",
            FEW_PRODUCTS.format(dtype=f"torch.{dtype}"),
            "print(peak_memory_bytes())",
        ]
    )
    # In a folder without modules: Python looks for imports in the current one first.
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(sys.executable).anchor, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout.splitlines()[-1])
