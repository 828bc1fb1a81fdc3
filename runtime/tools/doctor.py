"""Parts of `doctor`: a model's files, its own routing, and replays of that at each budget.

Shape suffixes: T tokens of the step, D hidden size, E experts, K top_k.
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from predictors.base import Floats, Ints, Signal
from predictors.spec import ModelSpec
from runtime.engine.auto_budget import PROCESS_BYTES
from runtime.engine.forecasters import SystemPredictors
from runtime.errors import BudgetError
from runtime.hf.probes import Probes
from runtime.policy.budget import Budget, SlotRequirements, count_bytes, divide_slots
from runtime.presets import DEFAULT_SYSTEM, ON_DEMAND, load_system
from runtime.sim.hardware import Hardware
from runtime.sim.replay import replay
from runtime.sim.step import ArrayStep, RecordedStep
from runtime.store.gguf.header import is_gguf, read_header
from runtime.store.model_check import list_weight_files
from runtime.store.model_source import read_digests, require_digest
from runtime.store.tensor_index import read_tensor_index


def check_files(folder: Path, *, digests: bool) -> dict[str, Any]:
    """Check headers and sizes, and with `digests` the sha256 of each file if known.

    Raises:
        CheckpointError: a file is damaged, truncated, missing or altered.
    """
    files, has_digests = list_weight_files(folder), not is_gguf(folder)
    tensors = read_tensor_index(files) if has_digests else read_header(folder).tensors
    facts: dict[str, Any] = {
        "files": len(files),
        "tensors": len(tensors),
        "bytes": sum(file.stat().st_size for file in files),
        "digests": "not checked (digests=true checks them)"
        if has_digests
        else "not known of GGUF files",
    }
    if digests and has_digests:
        known = known_digests(folder, files)
        for file, expected in known.items():
            require_digest(file, expected, otherwise="download the model again")
        facts["digests"] = f"{len(known)} of {len(files)} files equal their known sha256"
    return facts


def known_digests(folder: Path, files: list[Path]) -> dict[Path, str]:
    """Return the known sha256 of files: of a bundled model, or from the Hub cache's blob names."""
    listed, known = read_digests(folder), {}
    for file in files:
        blob = file.resolve().name
        digest = listed.get(file.name) or (blob if re.fullmatch(r"[0-9a-f]{64}", blob) else None)
        if digest is not None:
            known[file] = digest
    return known


SIGNALS = {Signal.LAYER_INPUT, Signal.GATE_INPUT, Signal.ROUTED, Signal.LOGITS}
NEW_TOKENS = 48
"""New tokens after each prompt; ProMoE's figures are of sequences of about this length."""


class RoutingRecorder:
    """Keeps all signals of every step."""

    def __init__(self) -> None:
        self.steps: list[ArrayStep] = []
        self._experts: dict[int, Ints] = {}
        self._states: dict[tuple[Signal, int], Floats] = {}
        """Of the last step."""

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        self._experts, self._states = {}, {}
        step = ArrayStep(tokens_T.copy(), requests_T.copy(), self._experts, self._states)
        self.steps.append(step)

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        self._states[Signal.LAYER_INPUT, layer] = hidden_TD.copy()

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        self._states[Signal.GATE_INPUT, layer] = hidden_TD.copy()

    def routed(
        self, layer: int, experts_TK: Ints, logits_TE: Floats | None, weights_TK: Floats | None
    ) -> None:
        del weights_TK  # Replays use the experts and not their weights.
        self._experts[layer] = experts_TK.copy()
        if logits_TE is not None:
            self._states[Signal.LOGITS, layer] = logits_TE.copy()

    def end_step(self) -> None:
        """Do nothing: the step is complete."""


def record_routing(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, seconds: float
) -> list[ArrayStep]:
    """Record greedy generation until the time is up, but at least the first prompt's prefill."""
    recorder = RoutingRecorder()
    started = time.monotonic()
    with torch.no_grad(), Probes(model, SIGNALS, recorder):
        for number, prompt in enumerate(prompts):
            left = seconds * (number + 1) / len(prompts) - (time.monotonic() - started)
            if number and left <= 0:
                break
            inputs = torch.tensor([list(prompt)])
            model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                max_time=max(left, 0.0),
            )
    return recorder.steps


def sweep_budgets(
    steps: Sequence[RecordedStep],
    *,
    spec: ModelSpec,
    hardware: Hardware,
    predictors: SystemPredictors,
    budgets: Sequence[str],
    needs: SlotRequirements,
    resident_bytes: int,
) -> list[dict[str, Any]]:
    """Make a row for each budget: bytes, slots, memory of the process and each system's figures.

    Args:
        steps: What the model routed.
        spec: The model.
        hardware: The measured machine.
        predictors: Those of `DEFAULT_SYSTEM`, which is compared with fetching on demand.
        budgets: A row of a budget below the minimum has an `error` in place of figures.
        needs: The experts' sizes. In replays, all take the same time.
        resident_bytes: Weights besides experts, those of a draft model too.
    """
    systems = {ON_DEMAND: SystemPredictors(), DEFAULT_SYSTEM: predictors}
    rows: list[dict[str, Any]] = []
    for budget in budgets:
        try:
            (counts,) = divide_slots(Budget.parse(budget), needs, [needs.experts])
        except BudgetError as error:
            rows.append({"budget": budget, "error": str(error)})
            continue
        slots, figures = sum(counts.values()), {}
        for name, chosen in systems.items():
            stats = replay(
                steps,
                chosen.forecast and chosen.forecast.renewed(),
                spec=spec,
                system=load_system(name),
                hardware=hardware,
                budget_slots=slots,
                reuse_predictor=chosen.reuse and chosen.reuse.renewed(),
            )
            summary = stats.as_dict()
            total = sum(stats.ttft_seconds) + sum(stats.tpot_seconds)
            figures[name] = {
                "tpot_seconds": summary["tpot_seconds"],
                "ttft_seconds": summary["ttft_seconds"],
                "hit_rate": summary["decode"]["hit_rate"],
                "stall_share": stats.stall_seconds / total if total else None,
            }
        size = count_bytes(counts) + needs.scratch_bytes
        rows.append(
            {
                "budget": budget,
                "bytes": size,
                "slots": slots,
                "process_bytes": size + resident_bytes + PROCESS_BYTES,
                "systems": figures,
            }
        )
    return rows
