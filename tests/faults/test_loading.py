"""Faults while a model is loaded, where Transformers maps files into memory."""

import pytest

from tests.builders.faults.rules import Rule

pytestmark = pytest.mark.faults

WEIGHTS = "*.safetensors"


RULES = [
    pytest.param(Rule("eio", WEIGHTS), id="everywhere"),
    pytest.param(Rule("eio", WEIGHTS, start=16384), id="beyond-the-header"),
    pytest.param(Rule("truncate", WEIGHTS, start=16384), id="truncated"),
]


@pytest.mark.parametrize("rule", RULES)
def test_loading__a_file_that_cannot_be_read_is_an_error_not_a_death(scenario, disk, rule):
    result = scenario("spoilt_while_loading", disk=disk, rule=rule)
    assert result["outcome"].startswith("error: ")
    assert "safetensors" in result["outcome"]
    assert result["after"]["outcome"] == "identical"
