"""Models of which some layers have fewer experts than the others."""

import logging

import pytest
import torch

from tests.builders.families.build import save_family
from tests.builders.models import plain_eager
from tests.builders.served import serving, settle

COUNTS = [8, 8, 4]
"""Experts of the layers of `dots3_note`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return save_family(tmp_path_factory.mktemp("uneven") / "tiny", "dots3_note")


@pytest.fixture(scope="module")
def expected(folder) -> list[int]:
    return generate(plain_eager(folder, dtype=torch.float32))


def generate(model) -> list[int]:
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    return model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)[0].tolist()


@pytest.fixture(autouse=True)
def no_errors(caplog: pytest.LogCaptureFixture):
    yield
    assert [one.message for one in caplog.records if one.levelno >= logging.ERROR] == []


SYSTEMS = {"moecast": "50%", "promoe": "100%", "moe-infinity-sequence": "50%", "klotski": "100%"}


@pytest.mark.parametrize(("system", "budget"), SYSTEMS.items())
def test_uneven_layers__are_served_without_reading_experts_that_do_not_exist(
    folder, expected, system, budget
):
    with serving(folder, budget=budget, dtype=torch.float32, system=system) as model:
        assert generate(model) == expected


def test_uneven_layers__are_complete_when_every_expert_is_there(folder):
    with serving(folder, budget="100%", dtype=torch.float32, system="moecast") as model:
        engine = model.moecast.engine
        assert engine.cache.num_slots == sum(COUNTS)
        settle(engine)
        assert engine.cache.is_complete
