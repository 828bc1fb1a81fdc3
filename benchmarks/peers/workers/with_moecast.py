"""moecast, with the system that `options.system` names (a file of `configs/system/`)."""

from pathlib import Path

import torch
import yaml
from generating import generating
from measured import Answer, Request, main

from runtime import load as load_served
from runtime.config import ModelConfig, SystemConfig


def load(request: Request) -> Answer:
    torch.set_num_threads(request.threads)
    text = Path(request.options["systems"], f"{request.options['system']}.yaml").read_text()
    values = {key: value for key, value in yaml.safe_load(text).items() if key != "defaults"}
    model = load_served(
        ModelConfig(id=request.weights, dtype="float32"),
        budget=request.budget_bytes,
        system=SystemConfig(**values),
        device="cpu",
        entries=Path(request.options["entries"]) if "entries" in request.options else None,
    )
    return generating(model)


if __name__ == "__main__":
    main(load, ("torch", "transformers"))
