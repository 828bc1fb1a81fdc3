"""The options of each run of `-m`."""

import pytest

from configs.errors import ConfigError
from configs.sweep import expand_sweep


def test_sweep__makes_every_combination() -> None:
    assert expand_sweep("generate", ["seed=1,2", "budget=5%,6%", "verify=true"]) == [
        [f"seed={seed}", f"budget={budget}", "verify=true"]
        for seed in (1, 2)
        for budget in ("5%", "6%")
    ]
    assert expand_sweep("generate", ["seed=range(0,4,2)"]) == [["seed=0"], ["seed=2"]]


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("prompt='a, b'", ["a, b"]),
        ("prompt='a, b','c'", ["a, b", "c"]),
        ("prompt=it's (not", ["it's (not"]),
        ("prompt=https://a:b@c/d, 007,1.50 ,x y", ["https://a:b@c/d", "007", "1.50", "x y"]),
        ("prompt=choice(a:b,'c,d')", ["a:b", "c,d"]),
        ("prompt=", [""]),
        ("prompt=${oc.env:HOME}", ["${oc.env:HOME}"]),
    ],
)
def test_text__is_split_at_commas_outside_quotes(argument: str, values: list[str]) -> None:
    assert expand_sweep("generate", [argument]) == [[f"prompt={value}"] for value in values]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["seed=range(0,1000000000)"], "-m makes 1,000,000,000 runs"),
        (["seed=shuffle(range(0,1000000000))"], "-m makes 1,000,000,000 runs"),
        (["seed=range(0,1e300)"], "runs of these options"),
        ([f"seed=range(0,1{'0' * 30})"], "runs of these options"),
        (["seed=range(0,101)", "max_new_tokens=range(1,102)"], "-m makes 10,201 runs"),
        (["temperature=range(0,inf)"], "has no end"),
        (["temperature=range(0,1,0)"], "has no end"),
        (["seed=glob(*)"], "a sweep takes values or a range"),
        (["system=glob(*)"], "a sweep takes values or a range"),
        (["temperature=interval(0,1)"], "a sweep takes values or a range"),
        (["seed=[1"], "seed"),
        ([f"seed={'[' * 3000}{']' * 3000}"], "nested too deeply"),
        (["sede=1,2"], "unknown option 'sede'"),
    ],
)
def test_sweep__refuses_what_no_grid_can_be_made_of(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand_sweep("generate", arguments)
