"""Memory of a process that only imports PyTorch and Transformers.

It depends on what is installed: Transformers imports Accelerate where it is, and with it more.
"""

import inspect
import subprocess
import sys
from pathlib import Path

from predictors.units import MIB
from runtime.engine.memory import peak_memory_bytes

ALLOWANCE_BYTES = 32 * MIB
"""Memory beside imports, weights and arena: activations, logits and KV caches of short prompts,
transfer threads, the predictor and its library."""


def measure_import_bytes(model_module: str) -> int:
    """Measure the peak memory of a new process that imports a model's module, and none of ours."""
    script = "\n".join(
        [
            "import resource, sys",
            "from pathlib import Path",
            inspect.getsource(peak_memory_bytes),
            f"import torch, transformers.modeling_utils, {model_module}",
            "print(peak_memory_bytes())",
        ]
    )
    # In a folder without modules: Python looks for imports in the current one first.
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(sys.executable).anchor, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout.splitlines()[-1])
