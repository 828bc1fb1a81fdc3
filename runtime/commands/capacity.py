"""`python -m runtime doctor users=N tps=T`: machines, budgets and links that a load needs."""

from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from runtime.commands.diagnosis import line
from runtime.commands.progress import progress
from runtime.config import DoctorConfig, ShapeConfig
from runtime.engine.forecasters import load_system_predictor
from runtime.engine.memory import available_memory_bytes
from runtime.errors import CheckpointError
from runtime.hf.layers import attach_experts, build_skip_predictor
from runtime.hf.loading import load_stripped
from runtime.policy.systems import ON_DEMAND, PROMOE, load_system
from runtime.profiling.local import measure_stripped
from runtime.profiling.shapes import own_shape
from runtime.sim.hardware import Hardware, describe_hardware
from runtime.store.model_source import resolve
from runtime.store.on_demand import OnDemandReader
from runtime.tools.doctor.capacity import Ground, Load, better
from runtime.tools.doctor.capacity_page import NOTE, capacity_page, capacity_table
from runtime.tools.doctor.recording import record
from runtime.tools.verify.reference import token_prompts

REQUESTS = 32
"""Recorded at most: no larger batch is tried."""
PROMPT_CHARACTERS = 160
"""Some forty tokens."""
SPARE_PROMPTS = ["The heart pumps blood", "It was a dark and stormy night", "Return a new list"]


def texts(number: int) -> list[str]:
    """That many prompts, of the reference pages that come with Python: no two alike."""
    if find_spec("pydoc_data.topics") is None:
        return SPARE_PROMPTS
    from pydoc_data.topics import topics

    pages = " ".join(topics[name] for name in sorted(topics))
    apart = len(pages) // number
    return [pages[i * apart : i * apart + PROMPT_CHARACTERS] for i in range(number)]


def run(config: DoctorConfig) -> dict[str, Any]:
    """Records routing, replays it on every machine, shows and writes what is needed.

    Raises:
        CheckpointError: the model is not here, or is no decoder.
    """
    assert config.users is not None
    assert config.tps is not None
    console = Console()
    load = Load(users=config.users, tokens_per_second=config.tps)
    machines = [one for one in config.hardware if not one.measured or config.shape.is_own]
    with progress(console, "replaying", total=1 + len(machines)) as advance:
        ground, local, rests_on = grounds(config)
        advance(1)
        rows = []
        for machine in machines:
            hardware: Hardware = (
                local if machine.measured else describe_hardware(machine, ground.shape)
            )
            rows.append(better(ground, hardware, load, load_system(ON_DEMAND)))
            advance(1)
    report = {
        "load": asdict(load),
        "shape": asdict(ground.shape),
        "rests_on": rests_on,
        "machines": [asdict(one) for one in machines],
        "capacity": rows,
    }
    console.print(capacity_table(rows))
    for row in rows:
        if "error" in row:
            line(console, f"{row['hardware']}: {row['error']}")
    line(console, NOTE)
    line(console, f"it rests on {rests_on}")
    if config.run_dir is not None:
        path = capacity_page(report).write(config.run_dir)
        line(console, f"page: {path}")
    return report


def grounds(config: DoctorConfig) -> tuple[Ground, Hardware, str]:
    """What replays rest on, this machine as measured, and both in words."""
    folder = resolve(config.model)
    stripped = load_stripped(folder, config.model.dtype)
    model, store = stripped.model, stripped.open_store()
    if model.config.is_encoder_decoder or not model.can_generate():
        raise CheckpointError(
            f"{config.model.name}: only decoders' routing is recorded; name another model, and "
            "this one's bytes with shape="
        )
    spec = stripped.spec(folder, config.model)
    local = measure_stripped(stripped, store)
    attach_experts(stripped.layers, OnDemandReader(store, keep_bytes=available_memory_bytes() // 2))
    number = min(REQUESTS, config.users or 1)
    prompts, what = token_prompts(folder, texts(number), seed=config.seed)
    steps = record(model, prompts, seconds=config.seconds)
    promoe = load_system(PROMOE)
    predictor = (
        load_system_predictor(promoe, spec, name=config.model.name, chosen=config.predictor)
        if config.predictor is not None
        else build_skip_predictor(stripped.layers, {"spec": spec})
    )
    store.close()
    shape = own_shape(config.model) if config.shape.is_own else config.shape
    ground = Ground(steps=steps, spec=spec, shape=shape, system=promoe, predictor=predictor)
    return ground, local, rests_on(ground, shape, config.model.name, what)


def rests_on(ground: Ground, shape: ShapeConfig, name: str, prompts: str) -> str:
    """One sentence, and another where the shape is not the routed model's."""
    spec, decodes = ground.spec, sum(len(step.tokens_T) == 1 for step in ground.steps)
    said = (
        f"{name}'s routing of {ground.num_requests} requests ({prompts}) and {decodes} tokens "
        "generated now, replayed a second time from the arena that a first time left; batches are "
        f"at most {ground.num_requests}"
    )
    if (shape.num_experts, shape.top_k) != (spec.num_experts, spec.top_k):
        said += (
            f"; {shape.name} has {shape.num_experts} experts a layer, {shape.top_k} for a token, "
            f"the routing is of {spec.num_experts} and {spec.top_k}"
        )
    return said
