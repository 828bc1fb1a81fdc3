"""All entries that a system takes for a model, pulled by the model's name."""

from pathlib import Path

import pytest

from tests.builders.entries import tiny_entry
from tests.builders.zoos import zoo
from zoo.load import find_entry, list_names


@pytest.fixture
def far(tmp_path: Path) -> str:
    """A zoo with the pair of system moecast, one of another system, and another model."""
    run = tmp_path / "run"
    for name in ("tiny/residual", "tiny/reuse", "tiny/stride", "half/residual"):
        tiny_entry(run / "entries" / name.replace("/", "-"), name=name)
    address = f"zoo={tmp_path / 'far'}"
    assert zoo("push", run, address, "alias=production") == 0
    return address


def pulled() -> set[str]:
    return {name for name in list_names() if name.startswith(("tiny/", "half/"))}


def test_pull__of_a_model_gets_what_the_system_takes(far: str) -> None:
    assert zoo("pull", "tiny@production", far) == 0
    assert pulled() == {"tiny/residual", "tiny/reuse"}
    for name in pulled():
        find_entry(f"{name}@production").verify()
    assert zoo("pull", "tiny", "system=promoe", far) == 0
    assert "tiny/stride" in pulled()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["half"], "has no half/reuse; one entry is pulled by its name: moecast zoo pull half/"),
        (["nothing"], "unknown zoo entry 'nothing/residual'"),
        (["tiny@12345678"], "names one entry, tiny stands for 2"),
        (["tiny", "system=on-demand"], "'tiny' is not NAME"),
    ],
)
def test_pull__of_a_model_gets_all_or_nothing(arguments, message, far, refused):
    error = refused("pull", *arguments, far)
    assert message in error
    assert error.count("\n") == 1
    assert not pulled()
