"""`moecast inflate`: write a model whose experts have more bytes and equal outputs."""

import shlex
import time
from typing import Any

from rich.console import Console

from predictors.files import expand_home
from predictors.units import MIB
from runtime.commands.progress import print_line, progress
from runtime.config import InflateConfig
from runtime.errors import CheckpointError
from runtime.policy.budget import parse_size
from runtime.presets import model_names
from runtime.store.gguf.header import is_gguf
from runtime.store.model_source import identity, resolve
from runtime.tools.inflate import FIELD, plan_inflation, write_inflated

FIGURES = ("neurons_before", "neurons", "expert_bytes_before", "expert_bytes", "num_experts")
"""Fields of the plan that the results have."""


def run(config: InflateConfig) -> dict[str, Any]:
    """Write the checkpoint and print its sizes."""
    output = expand_home(config.output).resolve()
    if output.exists():
        raise CheckpointError(f"{output} exists; remove it or give another output=PATH")
    folder = resolve(config.model)
    if is_gguf(folder):
        raise CheckpointError(
            f"{folder}: inflate reads safetensors files; give the original checkpoint"
        )
    sizes = {
        f"{name.removesuffix('_size')}_bytes": parse_size(size, name=name)
        for name in ("expert_size", "total_size")
        if (size := getattr(config, name)) is not None
    }
    plan = plan_inflation(folder, dtype=config.model.dtype, **sizes)
    total = plan.num_experts * plan.expert_bytes
    print_line(
        f"{FIELD} {plan.neurons_before} -> {plan.neurons}: each expert grows from "
        f"{plan.expert_bytes_before / MIB:.2f} MiB to {plan.expert_bytes / MIB:.2f} MiB, "
        f"all {plan.num_experts} take {total / MIB:.1f} MiB; the checkpoint takes "
        f"{plan.num_bytes / MIB:.1f} MiB"
    )
    started = time.monotonic()
    with progress(Console(stderr=True), "inflating", total=plan.num_bytes) as advance:
        write_inflated(plan, output, origin=identity(folder, config.model), advance=advance)
    seconds = time.monotonic() - started
    # The model's short name is needed to find the original's predictors.
    key = "model" if config.model.name in model_names() else "model.name"
    chosen = shlex.join([f"{key}={config.model.name}", f"model.id={output}"])
    print_line(f"{output}: written in {seconds:.1f} s; next: moecast verify {chosen} budget=25%")
    return {
        "output": str(output),
        "source": str(folder),
        "field": FIELD,
        **{name: getattr(plan, name) for name in FIGURES},
        "experts_bytes": total,
        "checkpoint_bytes": plan.num_bytes,
        "experts_dtype": config.model.dtype,
        "seconds": seconds,
    }
