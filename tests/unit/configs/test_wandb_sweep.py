"""The sweep of Weights & Biases that the documentation shows: wandb itself expands its command."""

import re
from functools import partial

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from configs.arguments import read_arguments
from configs.commands import PROGRAMS
from configs.compose import compose_typed, declared_type
from tests.docs.pages import DOCS
from train.config import TrainConfig

PAGE = (DOCS / "tracking.md").read_text()
SWEEP = yaml.safe_load(re.search(r"```yaml\n(program: moecast\n.*?)```", PAGE, re.DOTALL)[1])


@pytest.mark.parametrize("last", [False, True])
def test_sweep__runs_commands_that_have_these_options(last: bool) -> None:
    values = {}
    for key, parameter in SWEEP["parameters"].items():
        choices = parameter.get("values") or [float(parameter["min"]), float(parameter["max"])]
        values[key] = choices[-1 if last else 0]
    # The command that wandb's agent runs for one set of values.
    words = create_sweep_command_args({"args": {key: {"value": values[key]} for key in values}})
    macros = {f"${{{name}}}": given for name, given in words.items()}
    program, name, *argv = [word for part in SWEEP["command"] for word in macros.get(part, [part])]
    assert (program, name) == ("moecast", "train")
    find_type = partial(declared_type, TrainConfig)
    arguments = read_arguments(argv, PROGRAMS["train"][0].positional, find_type=find_type)
    config, _ = compose_typed(TrainConfig, arguments.options)
    assert (config.predictor.width, config.lr, config.loss) == tuple(values.values())
    assert config.logger == ["wandb"]
    assert f"`{SWEEP['metric']['name']}`" in PAGE
