"""Replays of drawn groups as cells of the papers' tables (Klotski, table 3 and figure 13)."""

import numpy as np

from benchmarks.klotski.environments import ENVIRONMENTS, describe_machine, make_predictor
from benchmarks.klotski.group_simulator import dense_seconds, make_group_machine
from benchmarks.klotski.prefetch_accuracy import count_hot
from benchmarks.klotski.workload import TokenPool, tile_spec
from benchmarks.papers.cells import (
    CellResult,
    DrawnGroups,
    PaperCell,
    StepTotals,
    total_step,
)
from collect.traces import Trace
from predictors.base import Predictor
from runtime.sim.lower_bound import bound_time
from runtime.sim.replay import replay


class GroupReplays:
    """Draws groups from one trace and replays them.

    Args:
        trace: A trace with generated tokens.
    """

    def __init__(self, trace: Trace):
        self._trace = trace
        self._pools: dict[str, TokenPool] = {}

    def pool(self, split: str) -> TokenPool:
        if split not in self._pools:
            self._pools[split] = TokenPool(self._trace, split=split)
        return self._pools[split]

    def run(self, cell: PaperCell, drawn: DrawnGroups) -> CellResult:
        """Replays groups one after another; the first fills the caches and is not measured."""
        environment = ENVIRONMENTS[drawn.environment]
        workload = environment.workload(
            batch=cell.batch // drawn.n,
            n=drawn.n,
            merges_experts=drawn.merges_experts,
            weight_ratio=drawn.weight_ratio,
        )
        machine = describe_machine(
            environment, workload, config=cell.hardware, weight_ratio=drawn.weight_ratio
        )
        spec = tile_spec(self._trace, cell.shape)
        slots = round(cell.share * spec.num_layers * spec.num_experts)
        rng = np.random.default_rng(0)
        steps = [
            step
            for _ in range(1 + drawn.groups)
            for step in workload.draw(self.pool("held_out"), rng)
        ]

        def new_predictor() -> Predictor | None:
            return make_predictor(cell.system, spec, self.pool("train"))

        totals: list[StepTotals] = []
        stats = replay(
            steps,
            new_predictor(),
            spec=spec,
            system=cell.system,
            hardware=machine,
            budget_slots=slots,
            make_machine=make_group_machine,
            on_step=lambda *step: totals.append(total_step(*step)),
        )
        bound = bound_time(
            steps, spec=spec, hardware=machine, num_slots=slots, dense_seconds=dense_seconds
        )
        bound.assert_holds(stats)
        ranked = []
        if cell.measures_accuracy:
            predictor = new_predictor()
            assert predictor is not None, cell
            ranked = list(count_hot(predictor, steps))
        return CellResult.of_replay(
            totals,
            slots=slots,
            warm_units=1,
            ranked=ranked,
            share_of_least_time=(bound.decode_seconds + bound.prefill_seconds)
            / stats.total_seconds,
        )
