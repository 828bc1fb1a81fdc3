"""The options of each run of `-m`."""

import pytest

from configs.compose import expand_sweep
from predictors.errors import ConfigError
from runtime.config import GenerateConfig


def test_sweep__makes_every_combination() -> None:
    grid = [(seed, budget) for seed in (1, 2) for budget in ("5%", "6%")]
    runs = [[f"seed={seed}", f"budget={budget}", "verify=true"] for seed, budget in grid]
    assert expand_sweep(GenerateConfig, ["seed=1,2", "budget=5%,6%", "verify=true"]) == runs
    runs = [["devices=[cpu,cuda:1]"], ["devices=[cpu]"]]
    assert expand_sweep(GenerateConfig, ["devices=[cpu,cuda:1],[cpu]"]) == runs


SPLIT = [
    ("prompt='a, b'", ["a, b"]),
    ("prompt='a, b','c'", ["a, b", "c"]),
    ("prompt=it's (not", ["it's (not"]),
    ("prompt=https://a:b@c/d, 007,1.50 ,x y", ["https://a:b@c/d", "007", "1.50", "x y"]),
    ("prompt=", [""]),
    ("prompt=${oc.env:HOME}", ["${oc.env:HOME}"]),
]


@pytest.mark.parametrize(("argument", "values"), SPLIT)
def test_text__is_split_at_commas_outside_quotes(argument: str, values: list[str]) -> None:
    assert expand_sweep(GenerateConfig, [argument]) == [[f"prompt={value}"] for value in values]


NO_GRID = [
    ([f"{key}={',' * 100}" for key in ("seed", "max_new_tokens")], "-m makes 10,201 runs"),
    (["sede=1,2"], "unknown option 'sede'"),
]


@pytest.mark.parametrize(("arguments", "message"), NO_GRID)
def test_sweep__refuses_what_no_grid_can_be_made_of(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand_sweep(GenerateConfig, arguments)
