"""A path in place of a choice is answered with what to write."""

from pathlib import Path

import pytest

from configs.compose import compose_typed
from configs.errors import ConfigError


@pytest.mark.parametrize(
    ("root", "option", "message"),
    [
        ("train", "data=my.jsonl", "write data=jsonl data.path=my.jsonl"),
        ("train", "shifted=my.jsonl", "write shifted=jsonl shifted.path=my.jsonl"),
        ("collect", "data=notes.txt", "write data=text data.path=notes.txt"),
        ("collect", "data=texts", "write data=text data.path=texts"),
        ("collect", "data=ORG/NAME", "write data=hub data.path=ORG/NAME"),
        ("train", "predictor=runs/r/entries/mlp", "a kind to train.*generate predictor=runs/r"),
        ("generate", "system=mine.yaml", "--config mine.yaml"),
        ("bench", "system=lfu,mine.yaml", "--config mine.yaml"),
        ("train", "launcher=a/b", "launcher takes one of local, ray, slurm"),
    ],
)
def test_path__is_answered_with_what_to_write(
    root: str, option: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    with pytest.raises(ConfigError, match=message):
        compose_typed(root, [option])
