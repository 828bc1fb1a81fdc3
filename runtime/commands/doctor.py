"""`python -m runtime doctor`: this machine, this model, which budget; or which machines."""

from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from predictors.base import Predictor
from predictors.spec import ModelSpec
from runtime.commands import capacity
from runtime.commands.diagnosis import show
from runtime.commands.progress import progress
from runtime.config import DoctorConfig
from runtime.engine.forecasters import load_system_predictor
from runtime.engine.memory import available_memory_bytes
from runtime.hf.layers import attach_experts, build_skip_predictor
from runtime.hf.loading import StrippedModel, load_stripped
from runtime.policy.systems import PROMOE, load_system
from runtime.profiling.bandwidth import disk_bandwidth, link_bandwidth, memory_bandwidth
from runtime.profiling.facts import hardware, versions
from runtime.profiling.local import measure_stripped
from runtime.store.base import ExpertStore, max_slot_bytes
from runtime.store.model_source import resolve
from runtime.store.on_demand import OnDemandReader
from runtime.tools.doctor.model_files import check_files, list_weight_files
from runtime.tools.doctor.outlook import outlook, suggestion
from runtime.tools.doctor.recording import record
from runtime.tools.verify.reference import token_prompts

PROMPTS = ["The heart pumps blood", "It was a dark and stormy night", "Return a new list"]
STAGES = 4


def run(config: DoctorConfig) -> dict[str, Any]:
    """Looks at everything, or at what a load needs; shows it, and returns it."""
    if config.users is not None:
        return capacity.run(config)
    console = Console()
    folder = resolve(config.model)
    available = available_memory_bytes()
    with progress(console, "examining", total=STAGES) as advance:
        report: dict[str, Any] = {
            "versions": versions(),
            "hardware": hardware(folder),
            "folder": str(folder),
            "files": check_files(folder, digests=config.digests),
        }
        advance(1)
        report["bandwidth"] = {
            "disk": disk_bandwidth(list_weight_files(folder), seed=config.seed),
            "memory_bytes_per_second": memory_bandwidth(),
            "links_bytes_per_second": link_bandwidth(),
        }
        advance(1)
        stripped = load_stripped(folder, config.model.dtype)
        model, store = stripped.model, stripped.open_store()
        spec = stripped.spec(folder, config.model)
        report["model"] = described(model, spec, store)
        measured = measure_stripped(stripped, store)
        attach_experts(stripped.layers, OnDemandReader(store, keep_bytes=available // 2))
        report["measured"] = measured.as_dict()
        advance(1)
        report |= expectations(config, folder, stripped, store, spec, measured)
        store.close()
        advance(1)
    sizes = report["model"]
    report["suggested_budget_bytes"] = suggestion(
        total_bytes=sizes["experts_bytes"] + store.scratch_bytes,
        least_bytes=spec.top_k * sizes["expert_bytes"] + store.scratch_bytes,
        resident_bytes=sizes["non_expert_bytes"],
        available_bytes=available,
    )
    show(console, config.model.name, report)
    return report


def described(model: PreTrainedModel, spec: ModelSpec, store: ExpertStore) -> dict[str, Any]:
    """The model's sizes; bytes as they are in memory."""
    tensors = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    size = max_slot_bytes(store)
    return {
        **spec.as_dict(),
        "class": type(model).__name__,
        "expert_bytes": size,
        "experts_bytes": size * spec.num_layers * spec.num_experts,
        "non_expert_bytes": sum(tensors.values()),
        "scratch_bytes": store.scratch_bytes,
    }


def expectations(
    config: DoctorConfig,
    folder: Path,
    stripped: StrippedModel,
    store: ExpertStore,
    spec: ModelSpec,
    measured: Any,
) -> dict[str, Any]:
    """The outlook and what it rests on, or why there is none."""
    model = stripped.model
    if model.config.is_encoder_decoder or not model.can_generate():
        reason = "only decoders' routing is replayed; measure with benchmarks"
        return {"outlook": None, "outlook_rests_on": reason}
    prompts, what = token_prompts(folder, PROMPTS, seed=config.seed)
    steps = record(model, prompts, seconds=config.seconds)
    decodes = sum(len(step.tokens_T) == 1 for step in steps)
    predictor: Predictor | None = (
        load_system_predictor(
            load_system(PROMOE), spec, name=config.model.name, chosen=config.predictor
        )
        if config.predictor is not None
        else build_skip_predictor(stripped.layers, {"spec": spec})
    )
    named = config.predictor or ("the next layer's own router" if predictor else "none")
    resident = described(model, spec, store)["non_expert_bytes"]
    rows = outlook(
        steps,
        spec=spec,
        hardware=measured,
        predictor=predictor,
        budgets=config.budgets,
        slot_bytes=max_slot_bytes(store),
        scratch_bytes=store.scratch_bytes,
        resident_bytes=resident,
    )
    return {
        "outlook": rows,
        "outlook_rests_on": (
            f"this model's routing of {len(steps) - decodes} prompts ({what}) and {decodes} tokens "
            "that it generated now, replayed from an empty arena with the reads and the "
            f"computation just measured on the CPU; predictor for promoe: {named}"
        ),
    }
