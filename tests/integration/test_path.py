"""The whole path as a user walks it: train, generate, the zoo, and the refusals on the way."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from configs.program import run_program
from runtime.config import BUILTIN_MODELS, DecodeKernels
from runtime.hf.loading import load_plain

MODEL = BUILTIN_MODELS / "qwen2_moe_tiny"
PROMPT = "The heart pumps blood"
TOKENS = 12


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a program's command in this process, from a folder: importing PyTorch takes seconds.

    Returns its exit code and what it wrote to stderr.
    """

    def run(folder: Path, program: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.chdir(folder)
        code = run_program(program, arguments)
        return code, capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A small run of the front door."""
    folder = tmp_path_factory.mktemp("work")
    arguments = (
        *("model=qwen2-moe-tiny", "predictor=stride", "run_dir=runs/r"),
        *("data.num_prompts=10", "data.max_new_tokens=4", "data.max_prompt_tokens=24"),
        *("max_epochs=1", "batch_size=64", "replay_tokens=8", "score_shifted=false"),
        "figures=false",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_program("train", arguments) == 0
    return folder


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What plain Transformers generates, computed here and not by the code under test."""
    plain = load_plain(MODEL, dtype="auto", decode_kernels=DecodeKernels.LIBRARY)
    inputs = AutoTokenizer.from_pretrained(MODEL)(PROMPT, return_tensors="pt")
    output = plain.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("budget", ["15%", "100%"])
def test_generate__tokens_are_those_of_plain_transformers(trained, expected, call, budget):
    arguments = (
        *("runtime", "generate", "model=qwen2-moe-tiny", "predictor=runs/r/entries/stride"),
        *(f"budget={budget}", f"prompt={PROMPT}", f"max_new_tokens={TOKENS}"),
        *("model.decode_kernels=library", f"run_dir=runs/{budget.strip('%')}"),
    )
    code, errors = call(trained, *arguments)
    assert code == 0, errors
    results = json.loads((trained / f"runs/{budget.strip('%')}/results.json").read_text())
    assert results["tokens"] == expected
    stats = results["stats"]
    assert stats["requests"] == stats["hits"] + stats["joins"] + stats["misses"]
    reads_all = budget == "100%"  # when it is loaded
    assert (stats["bytes_prefetched"] == 0) == (stats["misses"] == 0) == reads_all
    assert stats["arena_bytes"] <= 720 * 122_880 * float(budget.strip("%")) / 100 + 40_960
    if budget != "100%":  # where every expert may be there before the first forecast
        assert stats["fetch_rate"] is not None


WRONG_USE = [
    (("train", "model=qwen2-moe-tinny"), "qwen2-moe-tiny"),
    (("runtime", "generate", "predictor=strde"), "zoo list"),
    (("runtime", "generate", "model=qwen1.5-moe"), "not on this machine"),
    (("runtime", "generate", "budget=1KiB"), "the least budget is"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG_USE)
def test_commands__wrong_use_names_the_cause_in_one_line(tmp_path, call, arguments, says):
    code, errors = call(tmp_path, *arguments)
    assert code == 2, errors
    assert says in errors
    assert "Traceback" not in errors


def test_models__an_altered_reference_model_is_refused(tmp_path, call, monkeypatch):
    copy = tmp_path / "models" / MODEL.name
    shutil.copytree(MODEL, copy)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[1_000_000] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    monkeypatch.setattr("runtime.store.model_source.BUILTIN_MODELS", copy.parent)
    code, errors = call(tmp_path, "runtime", "generate")
    assert code == 2
    assert "was altered" in errors
