"""The path as a user walks it: training and generating with what was trained; altered weights."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from configs.program import run_program
from runtime.config import BUILTIN_MODELS, DecodeKernels
from runtime.hf.loading import load_plain

MODEL = BUILTIN_MODELS / "qwen2_moe_tiny"
PROMPT = "The heart pumps blood"
TOKENS = 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small run of the front door."""
    folder = tmp_path_factory.mktemp("work")
    arguments = (
        *("model=qwen2-moe-tiny", "predictor=stride", "run_dir=runs/r", "figures=false"),
        *("data.num_prompts=10", "data.max_new_tokens=4", "data.max_prompt_tokens=24"),
        *("max_epochs=1", "batch_size=64", "replay_tokens=8", "score_shifted=false"),
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
def test_generate__tokens_are_those_of_plain_transformers(trained, expected, monkeypatch, budget):
    monkeypatch.chdir(trained)
    arguments = (
        *("generate", "model=qwen2-moe-tiny", "predictor=runs/r/entries/stride"),
        *(f"budget={budget}", f"prompt={PROMPT}", f"max_new_tokens={TOKENS}"),
        *("model.decode_kernels=library", f"run_dir=runs/{budget.strip('%')}"),
    )
    assert run_program("runtime", arguments) == 0
    results = json.loads((trained / f"runs/{budget.strip('%')}/results.json").read_text())
    assert results["tokens"] == expected
    stats = results["stats"]
    assert stats["requests"] == stats["hits"] + stats["joins"] + stats["misses"]
    reads_all = budget == "100%"  # when it is loaded
    assert (stats["bytes_prefetched"] == 0) == (stats["misses"] == 0) == reads_all
    assert stats["arena_bytes"] <= 720 * 122_880 * float(budget.strip("%")) / 100 + 40_960
    if budget != "100%":  # where every expert may be there before the first forecast
        assert stats["fetch_rate"] is not None


def test_models__an_altered_reference_model_is_refused(tmp_path, capsys, monkeypatch):
    copy = shutil.copytree(MODEL, tmp_path / "models" / MODEL.name)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[1_000_000] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    monkeypatch.setattr("runtime.store.model_source.BUILTIN_MODELS", copy.parent)
    monkeypatch.chdir(tmp_path)
    assert run_program("runtime", ["generate"]) == 2
    assert "was altered" in capsys.readouterr().err
