"""Prompts for the published predictors: every kind, and none on both sides."""

import json
from pathlib import Path

import pytest

from configs.program import run_program
from train.reference.corpus import NUM_HELD_OUT, NUM_TRAINING, write_prompts

# Docstrings of the standard library are part of the corpus: old modules warn when imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def read(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    for name in ("text/openstax", "text/novels", "instruct/gpteacher", "prompts"):
        (root / name).mkdir(parents=True)
    words = [f"word{number}" for number in range(40_000)]
    (root / "text/openstax/physics.txt").write_text(" ".join(words))
    (root / "text/novels/novel.txt").write_text(" ".join(reversed(words)))
    turns = [{"instruction": f"ask {n}", "input": "", "response": f"reply {n}"} for n in range(100)]
    (root / "instruct/gpteacher/roleplay.json").write_text(json.dumps(turns))
    for name, keys in (
        ("instruct/t0_templates_sample.jsonl", ("prompt", "completion")),
        ("instruct/natural_instructions_bb.jsonl", ("prompt", "target")),
        ("prompts/gsm8k_train.jsonl", ("question", "answer")),
    ):
        rows = [{key: f"{key} {n} of {name}" for key in keys} for n in range(40)]
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def test_prompts__of_every_kind_are_held_out_from_the_mixture(corpus, tmp_path):
    counts = write_prompts(corpus, tmp_path, seed=0)
    mixture = read(tmp_path / "train.jsonl")
    assert counts.keys() == {"docs", "code", "chat", "instructions", "books", "train"}
    trained = {row["prompt"] for row in mixture}
    for kind in counts.keys() - {"train"}:
        held_out = read(tmp_path / f"{kind}.jsonl")
        assert 0 < len(held_out) == counts[kind] <= NUM_HELD_OUT
        assert {row["kind"] for row in held_out} == {kind}
        assert trained.isdisjoint(row["prompt"] for row in held_out)
        assert 0 < sum(row["kind"] == kind for row in mixture) <= NUM_TRAINING
    assert len(trained) == len(mixture) == counts["train"]


def test_prompts__are_equal_for_equal_seeds(corpus, tmp_path):
    written = []
    for name, seed in (("first", 0), ("second", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        write_prompts(corpus, tmp_path / name, seed=seed)
        written.append((tmp_path / name / "train.jsonl").read_bytes())
    assert written[0] == written[1] != written[2]


def test_prompts__need_the_corpus(tmp_path, capsys):
    command = [f"corpus.root={tmp_path}", f"prompts={tmp_path / 'out'}", f"run_dir={tmp_path}"]
    assert run_program("train.reference", command) == 2
    assert "text/openstax" in capsys.readouterr().err
