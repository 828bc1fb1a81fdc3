"""The simulator next to live runs: same steps, same forecasts, same hits where no clock decides."""

from dataclasses import replace

import pytest

from benchmarks import validate
from benchmarks.validate import ValidateCell
from predictors.errors import MoecastError
from runtime.config import BUILTIN_MODELS, SystemConfig
from runtime.presets import load_system
from runtime.sim.hardware import Overheads
from runtime.tools.verify.reference import token_prompts
from tests.builders.simulated import toy_machine

MODEL = "qwen2-moe-tiny"
MACHINE = toy_machine(
    transfer_fixed=1e-4, transfer_per_byte=0.0, layer_fixed=1e-3, expert_fixed=1e-4,
    expert_per_token=0.0, predictor_seconds=1e-4,
)  # fmt: skip


@pytest.fixture(scope="module")
def recorded():
    folder = BUILTIN_MODELS / "qwen2_moe_tiny"
    prompts, _ = token_prompts(folder, ["The heart pumps blood", "def read(path):"], seed=0)
    return prompts, *validate.record_steps(MODEL, prompts, 4)


# Of moecast so that no forecast is late, and with what klotski does, too.
DROPPING = replace(load_system("moecast"), synchronous=True, drop_used=True)


@pytest.mark.parametrize("system", [load_system("on-demand"), DROPPING], ids=lambda one: one.name)
def test_cell__is_the_same_work_live_and_simulated(recorded, monkeypatch, system):
    prompts, steps, tokens, spec = recorded
    inline = replace(MACHINE, overheads=Overheads(predictor_inline=True))
    measured = []

    def measure(model):
        measured.append(model.moecast.engine.cache.system)
        return inline

    monkeypatch.setattr(validate, "measure", measure)
    cell = ValidateCell("25%", system)
    validate.run_live(MODEL, cell, prompts, 4, tokens)
    machine = replace(MACHINE, layer_fixed=2e-3, predictor_seconds=9.0)
    row = validate.compare(cell, steps, spec, machine)
    # The machine of all cells, and the predictor of this one.
    assert (row.profile["layer_fixed"], row.profile["predictor_seconds"]) == (2e-3, 1e-4)
    assert row.system == system.name
    # First without what would move bytes while one token is repeated.
    switches = ("prefetch", "idle_prefetch", "drop_used")
    assert not any(getattr(measured[0], switch) for switch in switches)
    if not system.prefetch:
        assert len(measured) == 1
        assert row.hit_rate_difference == 0.0
        assert row.live.bytes_moved > 0
    else:
        assert len(measured) == 2
        assert row.live.predicted == row.simulated.predicted > 0


def test_take_predictor__keeps_how_the_machine_computes():
    slow = Overheads(step_seconds=0.5, compute_speed_transferring=0.1)
    system = replace(MACHINE, predictor_seconds=0.2, layer_fixed=9.0, overheads=slow)
    computing = replace(MACHINE, overheads=Overheads(step_seconds=0.1, predictor_inline=True))
    profile = validate.take_predictor(computing, system)
    assert (profile.layer_fixed, profile.predictor_seconds) == (1e-3, 0.2)
    assert profile.overheads == Overheads(step_seconds=0.1, predictor_inline=False)


def test_load_predictors__refuses_a_system_without_its_predictor(recorded):
    other = replace(recorded[-1], model_id="other", config_hash="other", routers=None)
    with pytest.raises(MoecastError, match=r"mine lacks a predictor for other: it serves on"):
        validate.load_predictors(SystemConfig(name="mine", predictor="stride"), other)
