"""`python -m runtime.tools.verify.child REQUEST.json`: answers and measures, alone in a process.

What is measured here is one model's memory, and nobody else's.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from predictors.errors import MoecastError
from runtime.engine.loading import first_device, load_served
from runtime.engine.machine import peak_memory_bytes
from runtime.engine.plain import load_plain
from runtime.store.model_source import resolve
from runtime.tools.verify.answers import answer
from runtime.tools.verify.reference import load_lazy
from runtime.tools.verify.request import Request, Side, loaded

USAGE = 2
"""Exit code for what the user can mend, as everywhere."""


def main(path: str) -> int:
    """Exit code: 0, or 2 with the reason as one line on stderr."""
    try:
        respond(loaded(Path(path).read_text()))
    except MoecastError as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return USAGE
    return 0


def respond(request: Request) -> None:
    """Loads the side that is asked for, and writes answers and a report."""
    config = request.config
    if request.side is Side.SERVED:
        model = load_served(config, budget=request.budget)
    elif request.side is Side.LAZY:
        model = load_lazy(resolve(config.model), config.model.dtype)
    else:
        dtype = "auto" if config.model.dtype == "auto" else getattr(torch, config.model.dtype)
        model = load_plain(resolve(config.model), dtype=dtype).to(first_device(config))
    for number, prompt in enumerate(request.prompts):
        answer(
            model,
            prompt,
            request.output,
            number,
            max_new_tokens=config.max_new_tokens,
            seed=config.seed,
        )
    report = describe(model)
    if request.side is Side.SERVED:
        report["stats"] = model.moecast.stats()
        model.moecast.close()
    (request.output / "report.json").write_text(json.dumps(report))


def describe(model: torch.nn.Module) -> dict[str, Any]:
    """What was run, and its memory in bytes."""
    tensors = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    return {
        "class": type(model).__name__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "experts_implementation": model.config._experts_implementation,
        "weights_bytes": sum(tensors.values()),
        "peak_memory_bytes": peak_memory_bytes(),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
