"""Launches, copies, waits and calls of a decode step on a device do not grow unseen."""

import pytest

from tests.devices.count import ALLOWED, CELLS, COUNTS, count_cell, write_model

pytestmark = pytest.mark.timeout(330)
SLACK = 0.25
"""One more in a step of four layers is no growth."""
TOKENS = 0.25
"""The step's token goes to the host, once for all layers."""


@pytest.mark.parametrize("cell", CELLS)
def test_counts__have_not_grown(cell):
    now, before = COUNTS.now[cell], COUNTS.committed[cell]
    assert not [
        f"{name}: {now[name]} per layer and token, {before[name]} committed"
        for name in before
        if now[name] > (1 + ALLOWED) * before[name] + SLACK
    ], "if that is wanted, write the new counts: python -m tests.devices.count"


@pytest.mark.parametrize("cell", CELLS)
def test_counts__of_waits_are_one_a_layer_or_none(cell):
    """None where the host need not know which of the experts, all there, are computed."""
    is_looked_up = "grouped, 100%" in cell and "on-demand" not in cell
    now, waits = COUNTS.now[cell], 0.0 if is_looked_up else 1.0
    assert now["synchronisations"] == waits + TOKENS
    assert now["copies to the host"] == waits + TOKENS + (TOKENS if is_looked_up else 0.0)


@pytest.mark.parametrize("cell", ["promoe, grouped, 25%", "promoe, grouped, 100%"])
def test_counts__of_launches_do_not_go_by_the_experts_of_a_token(tmp_path, cell):
    few, many = count_cell(write_model(tmp_path, top_k=1), cell), COUNTS.now[cell]
    assert many["launches"] == few["launches"]
