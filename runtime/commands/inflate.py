"""`moecast inflate`: write a model whose experts have more bytes and equal outputs."""

import time
from typing import Any

from rich.console import Console

from predictors.files import expand_home
from predictors.units import MIB
from runtime.commands.progress import print_line, progress
from runtime.config import InflateConfig
from runtime.errors import CheckpointError
from runtime.policy.budget import parse_size
from runtime.store.gguf.header import is_gguf
from runtime.store.model_source import identity, resolve
from runtime.tools.inflate.checkpoint import partial_folder, write_checkpoint
from runtime.tools.inflate.inflation_plan import make_plan


def run(config: InflateConfig) -> dict[str, Any]:
    """Write the checkpoint and print its sizes."""
    console = Console()
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
    plan = make_plan(folder, dtype=config.model.dtype, **sizes)
    total = plan.num_experts * plan.expert_bytes
    print_line(
        console,
        f"{plan.width.field} {plan.width.neurons} -> {plan.neurons}: each expert grows from "
        f"{plan.expert_bytes_before / MIB:.2f} MiB to {plan.expert_bytes / MIB:.2f} MiB, "
        f"all {plan.num_experts} take {total / MIB:.1f} MiB; the checkpoint takes "
        f"{plan.num_bytes / MIB:.1f} MiB",
    )
    if partial_folder(output).exists():
        print_line(console, f"resuming in {partial_folder(output)}")
    started = time.monotonic()
    with progress(Console(stderr=True), "inflating", total=plan.num_bytes) as advance:
        shards = write_checkpoint(
            plan, output, origin=identity(folder, config.model), advance=advance
        )
    seconds = time.monotonic() - started
    # The model's short name is needed to find the original's predictors.
    command = f"moecast verify model={config.model.name} model.id={output} budget=25%"
    print_line(
        console,
        f"{output}: {shards} files in {seconds:.1f} s; next: {command}",
    )
    return {
        "output": str(output),
        "source": str(folder),
        "field": plan.width.field,
        "neurons_before": plan.width.neurons,
        "neurons": plan.neurons,
        "expert_bytes_before": plan.expert_bytes_before,
        "expert_bytes": plan.expert_bytes,
        "num_experts": plan.num_experts,
        "experts_bytes": total,
        "checkpoint_bytes": plan.num_bytes,
        "experts_dtype": config.model.dtype,
        "files_written": shards,
        "seconds": seconds,
    }
