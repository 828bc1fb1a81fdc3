"""Models of which some layers have fewer experts than the others."""

import logging

import pytest
import torch

from tests.builders.families.build import save_family
from tests.builders.families.outputs import outputs
from tests.builders.models import plain_eager
from tests.builders.packed import assert_same
from tests.builders.served import serving, settle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return save_family(tmp_path_factory.mktemp("uneven") / "tiny", "dots3_note")


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, torch.Tensor]:
    return outputs(plain_eager(folder, dtype=torch.float32))


@pytest.fixture(autouse=True)
def no_errors(caplog: pytest.LogCaptureFixture):
    yield
    assert [one.message for one in caplog.records if one.levelno >= logging.ERROR] == []


SYSTEMS = {"moecast": "50%", "promoe": "100%", "moe-infinity-sequence": "50%", "klotski": "100%"}


@pytest.mark.parametrize(("system", "budget"), SYSTEMS.items())
def test_uneven_layers__are_served_as_they_are(folder, expected, system, budget):
    """Experts that some layers do not have are not read."""
    with serving(folder, budget=budget, dtype=torch.float32, system=system) as model:
        assert_same(outputs(model), expected)


def test_uneven_layers__are_complete_when_every_expert_is_there(folder):
    with serving(folder, budget="100%", dtype=torch.float32, system="moecast") as model:
        engine = model.moecast.engine
        assert engine.cache.num_slots == 8 + 8 + 4
        settle(engine)
        assert engine.cache.is_complete
