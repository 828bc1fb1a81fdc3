"""`verify`: what it compares, what it finds, and how its child processes end."""

import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from predictors.errors import MoecastError
from runtime.commands import verify
from runtime.config import Exact, ModelConfig, VerifyModelConfig, VerifyReference
from runtime.hf.loading import load_plain
from runtime.tools.child_process import ChildFailure
from runtime.tools.verify import reference, report, sides
from runtime.tools.verify.reference import load_lazy, plain_bytes, token_prompts
from runtime.tools.verify.report import NotExact
from runtime.tools.verify.report import verify as verify_model
from tests.builders.families.build import save_family
from tests.builders.families.outputs import outputs
from tests.builders.families.table import FAMILIES
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.packed import assert_same


def settings(folder: Path, *, reference=VerifyReference.PLAIN, **model) -> VerifyModelConfig:
    options = {"device": "cpu", "budget": ["30%"], "max_new_tokens": 5, "reference": reference}
    return VerifyModelConfig(model=ModelConfig(name="tiny", id=str(folder), **model), **options)


def run_plain(folder: Path, output: Path) -> object:
    """Runs the side of plain Transformers."""
    options = {"config": settings(folder), "prompts": [[5, 6]], "output": output}
    return sides.run_side(sides.VerifyTask(side=sides.VerifySide.PLAIN, **options))


def kept(folder: Path, *, logits, tokens, steps) -> Path:
    folder.mkdir()
    save_file({"logits": torch.tensor(logits)}, sides.answer_path(folder, 0, "prompt"))
    save_file({"tokens": torch.tensor(tokens)}, sides.answer_path(folder, 0, "tokens"))
    np.array(steps, dtype=np.float32).tofile(sides.answer_path(folder, 0, "steps"))
    return folder


SAME = {"logits": [[1.0, 2.0], [3.0, 4.0]], "tokens": [7, 8], "steps": [[0.5, 1.5], [2.5, 3.5]]}


def test_verify__in_python_returns_the_same_report(tiny, monkeypatch, capsys):
    compared = verify_model(tiny, budget=0.5, max_new_tokens=2, system="on-demand")
    (row,) = compared.rows
    assert (compared.is_equal, row.budget, row.tokens_compared) == (True, "0.5", 6)
    monkeypatch.setattr(verify, "compare_budgets", lambda *_, **__: compared)
    for is_finite in (True, False):
        found = sides.PromptComparison(prompt=0, is_finite=is_finite)
        compared.rows[0] = replace(row, prompts=[found])
        verify.run(settings(tiny))
        assert ("NaN or infinite" in capsys.readouterr().out) == (not is_finite)
    differing = sides.PromptComparison(prompt=0, equal=False)
    compared.rows[0] = replace(row, equal=False, prompts=[differing])
    with pytest.raises(NotExact, match=r"at budgets 0\.5"):
        compared.require_equal()


COMPARED = [
    (Exact.AUTO, VerifyReference.PLAIN, "experts_implementation=eager"),
    (Exact.GROUPED, VerifyReference.PLAIN, "experts_implementation=grouped_mm"),
    *((Exact.SHARED, known, "each new token in a batch of 8 copies") for known in VerifyReference),
]


@pytest.mark.parametrize(("exact", "reference", "how"), COMPARED)
def test_verify__a_served_model_is_the_plain_one(tmp_path, exact, reference, how):
    folder = tiny_qwen2_moe(tmp_path / "model", dtype=torch.bfloat16)
    results = verify.run(settings(folder, exact=exact, reference=reference))
    (row,) = results["rows"]
    # Random prompts of 7, 16 and 33 tokens, five new ones each.
    assert row["equal"]
    assert (row["tokens_compared"], row["logit_positions_compared"]) == (15, 56 + 15)
    assert row["misses"] > 0
    known = row["non_expert_bytes"] + row["arena_bytes"]
    assert row["overhead_bytes"] == row["peak_memory_bytes"] - known
    for said in ("Transformers", how, "bfloat16 on cpu", "no tokenizer"):
        assert said in results["compared"]


def test_verify__grouped_experts_have_no_lazy_reference(tiny):
    with pytest.raises(MoecastError, match="one expert at a time.*reference=plain"):
        verify.run(settings(tiny, exact=Exact.GROUPED, reference=VerifyReference.LAZY))


def test_verify__a_difference_is_a_failure_that_says_where(tiny, monkeypatch):

    def altered(asked):
        done = sides.run_side(asked)
        if asked.side is sides.VerifySide.SERVED:
            file = sides.answer_path(asked.output, 0, "steps")
            steps = np.fromfile(file, dtype=np.float32)
            steps[64] = np.nan  # of the second new token, with a vocabulary of 64
            steps.tofile(file)
        return done

    monkeypatch.setattr(report, "run_side", altered)
    with pytest.raises(NotExact, match=r"budgets 30%.*position 1 of logits of new") as failure:
        verify.run(settings(tiny))
    assert "'max_abs_difference': None" in str(failure.value)


def differing(first: str, most: float | None) -> dict[str, object]:
    return {"first_logits_that_differ": first, "max_abs_difference": most}


NAN = {"logits": [[float("nan"), 0.0]]}
DIFFERENCES = [
    ({}, {}, {"first_token_that_differs": None, "max_abs_difference": 0.0}),
    ({"steps": [[0.5, -math.inf], [2.5, 3.5]]}, {}, {"is_finite": True}),
    (NAN, {}, {"is_finite": False}),
    (NAN, {"logits": [[float("nan"), -0.0]]}, {}),
    ({}, {"tokens": [7, 9]}, {"first_token_that_differs": 1}),
    ({}, {"tokens": [7]}, {"first_token_that_differs": 1}),
    ({}, {"logits": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]}, {}),
    ({}, {"steps": [[0.5, 1.5], [2.5, 3.0]]}, differing("position 1 of logits of new tokens", 0.5)),
    ({}, {"logits": [[float("nan"), 2.0], [3.0, 4.0]]}, differing("position 0 of logits", None)),
]
"""Values on both sides and those that one side has in their place, with the comparison."""


@pytest.mark.parametrize(("both", "change", "expected"), DIFFERENCES)
def test_compare__finds_the_first_difference(tmp_path, both, change, expected):
    """Bit by bit: NaN is NaN, zero is not minus zero."""
    left = kept(tmp_path / "left", **(SAME | both))
    right = kept(tmp_path / "right", **(SAME | both | change))
    row = asdict(sides.compare_answers(left, right, 0))
    expected = {"equal": not change, **expected}
    assert {key: row[key] for key in expected} == expected


def test_answer__is_what_generate_and_forward_give(tiny, tmp_path):
    model = plain_eager(tiny)
    sides.write_answers(model, [5, 6, 7], tmp_path, 0, max_new_tokens=4, seed=0)
    found = sides.read_answers(tmp_path, 0)
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(found["logits"], model(tokens).logits[0])
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    output = model.generate(tokens, max_new_tokens=4, **options)
    assert torch.equal(found["tokens"], output.sequences[0, 3:])
    assert torch.equal(found["logits of new tokens"], torch.cat(output.logits))


# One tensor per expert, stacked with biases, and an encoder's module with a custom loop.
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "switch_transformers"])
def test_load_lazy__is_plain_eager(tmp_path, name):
    folder = save_family(tmp_path / "model", FAMILIES[name])
    plain, lazy = load_plain(folder, dtype="auto"), load_lazy(ModelConfig(id=str(folder)))
    assert_same(outputs(lazy), outputs(plain))


def test_prompts__without_tokenizer_are_random_by_seed(tiny):
    tokens, described = token_prompts(tiny, ["unread"], seed=3)
    assert [len(ids) for ids in tokens] == [7, 16, 33]
    assert all(4 <= one < 64 for ids in tokens for one in ids)
    assert described == "3 prompts of random tokens, seed 3 (the model has no tokenizer)"
    assert token_prompts(tiny, [], seed=3)[0] == tokens != token_prompts(tiny, [], seed=4)[0]


def test_verify__refuses_a_reference_that_does_not_fit_with_advice(tmp_path, monkeypatch):
    folder = tiny_qwen2_moe(tmp_path / "model", dtype=torch.bfloat16)
    weights = sum(parameter.nbytes for parameter in plain_eager(folder).parameters())
    assert plain_bytes(folder, "auto") - reference.PROCESS_BYTES == int(1.1 * weights)
    needed = plain_bytes(folder, "float32")
    assert needed - reference.PROCESS_BYTES == int(1.1 * 2 * weights)
    monkeypatch.setattr(reference, "available_memory_bytes", lambda: needed - 1)
    with pytest.raises(MoecastError, match=rf"{needed} bytes.*{needed - 1} are.*reference=lazy"):
        verify.run(settings(folder, dtype="float32"))


def test_side__a_user_error_keeps_its_message(tmp_path):
    with pytest.raises(MoecastError, match=r"nowhere.*is not on this machine"):
        run_plain(tmp_path / "nowhere", tmp_path / "out")


def test_side__a_killed_child_is_named(tmp_path, monkeypatch):
    failure = ChildFailure("the process was killed by signal 9")
    monkeypatch.setattr(sides, "run_in_child", lambda *_: failure)
    with pytest.raises(sides.ChildFailed, match=r"side plain: .* killed by signal 9"):
        run_plain(tmp_path, tmp_path / "out")
