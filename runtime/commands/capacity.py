"""`moecast doctor users=N tps=T`: machines, budgets and links for a load."""

from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from predictors.base import Predictor
from predictors.spec import ModelSpec
from predictors.table import Table
from predictors.units import GIB
from runtime.commands.progress import print_line, progress
from runtime.config import DoctorConfig, ShapeConfig
from runtime.engine.forecasters import load_system_predictor
from runtime.engine.memory import available_memory_bytes
from runtime.errors import CheckpointError
from runtime.hf.layers import attach_experts, build_skip_predictor
from runtime.hf.loading import StrippedModel, load_stripped
from runtime.presets import ON_DEMAND, PROMOE, load_system
from runtime.profiling.local import measure_stripped
from runtime.profiling.shapes import read_model_shape
from runtime.sim.hardware import Hardware, describe_hardware
from runtime.store.model_source import resolve
from runtime.store.on_demand import OnDemandReader
from runtime.tools.doctor.capacity import CapacityContext, CapacityRow, UserLoad, choose_system
from runtime.tools.doctor.routing_recorder import record_routing
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.verify.reference import token_prompts

REQUESTS = 32
"""Most recorded requests, and so the largest batch that is tried."""
PROMPT_CHARACTERS = 160
"""About forty tokens."""
SPARE_PROMPTS = ["The heart pumps blood", "It was a dark and stormy night", "Return a new list"]


def sample_texts(number: int) -> list[str]:
    """Cut different prompts from the reference pages that come with Python."""
    if find_spec("pydoc_data.topics") is None:
        return SPARE_PROMPTS
    from pydoc_data.topics import topics

    pages = " ".join(topics[name] for name in sorted(topics))
    distance = len(pages) // number
    return [pages[i * distance : i * distance + PROMPT_CHARACTERS] for i in range(number)]


def run(config: DoctorConfig) -> dict[str, Any]:
    """Record routing, replay it on every machine, print and write the requirements.

    Raises:
        CheckpointError: the model is missing or is not a decoder.
    """
    assert config.users is not None
    assert config.tps is not None
    console = Console()
    load = UserLoad(users=config.users, tokens_per_second=config.tps)
    machines = [
        machine for machine in config.hardware if not machine.measured or config.shape.is_own
    ]
    with progress(Console(stderr=True), "replaying", total=1 + len(machines)) as advance:
        context, local, basis = prepare_context(config)
        advance(1)
        rows = []
        for machine in machines:
            hardware: Hardware = (
                local if machine.measured else describe_hardware(machine, context.shape)
            )
            rows.append(choose_system(context, hardware, load, load_system(ON_DEMAND)))
            advance(1)
    report = {
        "load": asdict(load),
        "shape": asdict(context.shape),
        "rests_on": basis,
        "machines": [asdict(machine) for machine in machines],
        "capacity": [asdict(row) for row in rows],
    }
    make_capacity_table(rows).print(console)
    for row in rows:
        if row.error is not None:
            print_line(console, f"{row.hardware}: {row.error}")
    print_line(console, NOTE)
    print_line(console, f"based on {basis}")
    if config.run_dir is not None:
        path = make_capacity_report(report, rows).write(config.run_dir)
        print_line(Console(stderr=True), f"report: {path}")
    return report


def prepare_context(config: DoctorConfig) -> tuple[CapacityContext, Hardware, str]:
    """Record routing and measure this machine; also describes both."""
    folder = resolve(config.model)
    stripped = load_stripped(folder, config.model.dtype, dense_format=config.model.dense_format)
    model, store = stripped.model, stripped.open_store()
    if model.config.is_encoder_decoder or not model.can_generate():
        raise CheckpointError(
            f"{config.model.name}: only the routing of decoders is recorded; name a decoder with "
            "model=, and this model's bytes with shape="
        )
    spec = stripped.spec(folder, config.model)
    local = measure_stripped(stripped, store)
    attach_experts(stripped.layers, OnDemandReader(store, keep_bytes=available_memory_bytes() // 2))
    number = min(REQUESTS, config.users or 1)
    prompts, what = token_prompts(folder, sample_texts(number), seed=config.seed)
    steps = record_routing(model, prompts, seconds=config.seconds)
    predictor = load_forecaster(config, stripped, spec)
    store.close()
    shape = read_model_shape(config.model) if config.shape.is_own else config.shape
    context = CapacityContext(
        steps=steps, spec=spec, shape=shape, system=load_system(PROMOE), predictor=predictor
    )
    return context, local, describe_basis(context, shape, config.model.name, what)


def load_forecaster(
    config: DoctorConfig, stripped: StrippedModel, spec: ModelSpec
) -> Predictor | None:
    """Load the predictor for promoe: the configured one, else the next layer's own router."""
    if config.predictor is None:
        return build_skip_predictor(stripped.layers, {"spec": spec})
    name, chosen = config.model.name, config.predictor
    return load_system_predictor(load_system(PROMOE), spec, name=name, chosen=chosen)[0]


def describe_basis(context: CapacityContext, shape: ShapeConfig, name: str, prompts: str) -> str:
    """Describe the recorded routing, and how the shape differs from the recorded model."""
    spec, decodes = context.spec, sum(len(step.tokens_T) == 1 for step in context.steps)
    description = (
        f"{name}'s routing of {context.num_requests} requests ({prompts}) and {decodes} tokens "
        "generated now, replayed with the cache as a first replay left it; batches of at most "
        f"{context.num_requests}"
    )
    if (shape.num_experts, shape.top_k) != (spec.num_experts, spec.top_k):
        description += (
            f"; {shape.name} has {shape.num_experts} experts per layer and top_k "
            f"{shape.top_k}; the routing has {spec.num_experts} and {spec.top_k}"
        )
    return description


COLUMNS = {
    "machine": "hardware",
    "users each": "users_of_a_machine",
    "machines": "machines",
    "budget": "budget_bytes",
    "of experts": "budget_share",
    "memory": "memory_bytes",
    "host or disk": "behind_link_bytes",
    "TPOT": "tpot_seconds",
    "TTFT": "ttft_seconds",
    "hits": "hit_rate",
    "link busy": "link_share",
    "system": "system",
}
NOTE = (
    "For each machine, the smallest budget for experts that gives every user the throughput. "
    "Memory: budget, non-expert weights of the layers, and 300 MiB for the process; embeddings and "
    "KV caches are not included. Host or disk: bytes of experts that host memory or the disk has "
    "to hold."
)


def format_value(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key.endswith("_bytes"):
        return f"{value / GIB:.1f} GiB"
    if key.endswith("_seconds"):
        return f"{1000 * value:.1f} ms"
    if key.endswith(("_share", "_rate")):
        return f"{100 * value:.0f} %"
    return str(value)


IMPORTANCE = ("machines", "users each", "budget", "TPOT", "TTFT", "hits", "memory")


def make_capacity_table(rows: list[CapacityRow]) -> Table:
    """Make a table with a line for each machine that can serve the load."""
    cells = [
        [format_value(key, getattr(row, key)) for key in COLUMNS.values()]
        for row in rows
        if row.error is None
    ]
    return Table.of(
        list(COLUMNS),
        cells,
        title="requirements on each machine (simulated)",
        importance=IMPORTANCE,
        elsewhere="results.json and report.html have them",
    )


def make_capacity_report(report: dict[str, Any], rows: list[CapacityRow]) -> HtmlReport:
    """Make the HTML report, with the basis of the replays and the machines' sources."""
    load = report["load"]
    page = HtmlReport(
        f"Capacity: {report['shape']['name']}",
        f"{load['users']} users, {load['tokens_per_second']:g} tokens/s each",
    )
    page.text("Basis", [report["rests_on"]])
    feasible = [row for row in rows if row.error is None]
    page.table(
        "Requirements on each machine",
        list(COLUMNS),
        [[format_value(key, getattr(row, key)) for key in COLUMNS.values()] for row in feasible],
        note=NOTE,
        name="capacity",
    )
    infeasible = [row for row in rows if row.error is not None]
    if infeasible:
        page.table(
            "Machines that cannot serve the load",
            ["machine", "reason"],
            [[row.hardware, row.error] for row in infeasible],
        )
    page.table(
        "Machines", ["machine", "source"], [[m["name"], m["source"]] for m in report["machines"]]
    )
    return page
