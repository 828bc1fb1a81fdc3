"""A path in place of a choice is answered with what to write."""

from pathlib import Path

import pytest

from collect.config import CollectConfig
from configs.compose import compose_typed
from predictors.errors import ConfigError
from runtime.config import GenerateConfig
from runtime.tools.bench.config import BenchConfig
from train.config import TrainConfig


@pytest.mark.parametrize(
    ("schema", "option", "message"),
    [
        (TrainConfig, "data=my.jsonl", "write data=jsonl data.path=my.jsonl"),
        (TrainConfig, "shifted=my.jsonl", "write shifted=jsonl shifted.path=my.jsonl"),
        (CollectConfig, "data=notes.txt", "write data=text data.path=notes.txt"),
        (CollectConfig, "data=texts", "write data=text data.path=texts"),
        (CollectConfig, "data=ORG/NAME", "write data=hub data.path=ORG/NAME"),
        (TrainConfig, "predictor=runs/r/entries/mlp", "a kind to train.*generate predictor=runs/r"),
        (GenerateConfig, "system=mine.yaml", "--config mine.yaml"),
        (BenchConfig, "system=lfu,mine.yaml", "--config mine.yaml"),
        (TrainConfig, "launcher=a/b", "launcher takes one of local, ray, slurm"),
    ],
)
def test_path__is_answered_with_what_to_write(
    schema: type, option: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    with pytest.raises(ConfigError, match=message):
        compose_typed(schema, [option])
