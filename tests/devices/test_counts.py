"""Launches, copies and waits of a decode step on a device do not grow unseen."""

import json

import pytest

from tests.devices.count import ALLOWED, CELLS, COUNTS, NAMES, count_cell, write_model

SLACK = 0.25
"""Transfers that end a little earlier or later change a count by less."""
PREFETCHED = 2.0
"""The same where experts are prefetched: their number goes by the measured speed of copies."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("counted"))


@pytest.mark.parametrize("cell", CELLS)
def test_counts__have_not_grown(model, cell):
    now, before = count_cell(model, cell), json.loads(COUNTS.read_text())[cell]
    slack = SLACK if "on-demand" in cell or "100%" in cell else PREFETCHED
    grown = [
        f"{name}: {now[name]} per layer and token, {before[name]} committed"
        for name in NAMES
        if now[name] > (1 + ALLOWED) * before[name] + slack
    ]
    assert not grown, "if that is wanted, write the new counts: python -m tests.devices.count"
