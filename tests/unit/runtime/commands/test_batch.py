"""`moecast batch`: from a file of prompts to a file of results."""

import json
import weakref
from dataclasses import replace
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest

from configs.compose import compose_typed
from predictors.errors import MoecastError
from runtime.commands import batch as command
from runtime.commands.batch import PromptsFailed, run
from runtime.commands.pack import choose_coding
from runtime.config import Quantise
from runtime.engine.memory import release_earlier_models
from runtime.errors import PlanError, PromptFileError, ResultFileError, TransferError
from runtime.generation.batch import memory_plan
from runtime.generation.config import BatchConfig
from tests.builders.packed import packed

COUNT = 14


@pytest.fixture(autouse=True)
def _cheap_runs(tmp_path_factory, monkeypatch):
    """One cache for all tests, and no collection of all objects of their process.

    It takes longer than a batch's answers.
    """
    monkeypatch.setenv("MOECAST_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(command, "freeze_objects", lambda: None)


def write_prompts(path: Path) -> Path:
    lines = [
        {"id": f"p{i}", "tokens": [1 + (7 * i + j) % 60 for j in range(2 + i % 9)]}
        | ({"max_new_tokens": 9} if i % 4 == 0 else {})
        for i in range(COUNT)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def options(folder: Path, tmp_path: Path, **more: object) -> list[str]:
    given = {"model.id": folder, "model.name": "tiny", "device": "cpu", "budget": "30%"}
    given |= {"input": tmp_path / "prompts.jsonl", "output": tmp_path / "out.jsonl"}
    given |= {"batch_size": 3, "n": 2, "max_new_tokens": 6, **more}
    return [f"{key}={value}" for key, value in given.items()]


def ran(folder: Path, tmp_path: Path, **more: object) -> dict:
    write_prompts(tmp_path / "prompts.jsonl")
    return run(compose_typed(BatchConfig, options(folder, tmp_path, **more))[0])


def results(path: Path) -> dict[str, dict]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["id"] for one in found}) == len(found)
    return {one["id"]: one for one in found}


def test_batch__writes_a_line_for_each_prompt_and_plans(folder, tmp_path):
    done = ran(folder, tmp_path, n="auto")
    found = results(tmp_path / "out.jsonl")
    assert sorted(found) == sorted(f"p{i}" for i in range(COUNT))
    assert {one["finish_reason"] for one in found.values()} == {"length"}
    assert (len(found["p4"]["tokens"]), len(found["p5"]["tokens"])) == (9, 6)
    assert done["written"] == COUNT
    assert done["tokens"] == sum(len(one["tokens"]) for one in found.values())
    assert [row["number"] for row in done["plan"]["inequalities"]] == [4, 5, 6, 7]
    assert 1 <= done["plan"]["n"] <= 5
    assert min(done["costs"]["attention"], done["costs"]["expert_io"]) > 0


def test_batch__again_has_nothing_to_do_and_other_settings_are_refused(folder, tmp_path):
    ran(folder, tmp_path)
    before = (tmp_path / "out.jsonl").read_bytes()
    # What changes no bit may change: n, budgets, systems.
    same = {"n": 1, "budget": "100%", "system": "on-demand", "kv_budget": "1MiB"}
    for more in (same, {"model.dense_format": "own"}):
        assert ran(folder, tmp_path, **more)["written"] == 0
    others = {
        "batch_size": 2, "temperature": 0.5, "window": 8, "max_new_tokens": 5,
        "model.dense_format": "int8", "model.exact": "grouped", "model.decode_kernels": "own",
        "model.decode_threads": 1,
    }  # fmt: skip
    for key, value in others.items():
        with pytest.raises(ResultFileError, match=rf"{key}(, seed)? was"):
            ran(folder, tmp_path, **{key: value})
    (tmp_path / "prompts.jsonl").write_text('{"id": "p0", "tokens": [1]}\n')
    with pytest.raises(ResultFileError, match="input_sha256 was"):
        run(compose_typed(BatchConfig, options(folder, tmp_path))[0])
    assert (tmp_path / "out.jsonl").read_bytes() == before
    ran(folder, tmp_path, batch_size=2, overwrite="true")
    assert len(results(tmp_path / "out.jsonl")) == COUNT


@pytest.mark.parametrize(
    "more", [{"kv_budget": "30kB"}, {"n": 4}, {"memory": "180kB", "n": "auto"}]
)
def test_batch__memory_changes_no_result(folder, tmp_path, more):
    ran(folder, tmp_path, output=tmp_path / "plain.jsonl", n=1, system="on-demand")
    done = ran(folder, tmp_path, **more)
    assert results(tmp_path / "out.jsonl") == results(tmp_path / "plain.jsonl")
    assert "kv_budget" not in more or done["plan"]["offloaded_bytes"] > 0
    if "memory" in more:
        # All dense weights would leave too little for experts and KV caches.
        assert done["dense"] == "stream"
        assert done["dense_bytes_read"] > 0
        total = done["stats"]["arena_bytes"] + done["plan"]["kv_bytes"] + done["dense_bytes"]
        assert total <= 180_000


@pytest.mark.parametrize("more", [{"memory": "180kB"}, {"budget": "auto"}])
def test_batch__the_first_model_is_freed_before_the_second_is_loaded(
    folder, tmp_path, monkeypatch, more
):
    real, loaded = memory_plan.load_served, []

    def load(*args, **kwargs):
        release_earlier_models()
        assert [model() for model in loaded] == [None] * len(loaded)
        model = real(*args, **kwargs)
        loaded.extend(map(weakref.ref, (model, next(model.parameters()))))
        if auto := model.moecast.auto_budget:
            model.moecast.auto_budget = replace(auto, num_bytes=1)
        return model

    monkeypatch.setattr(memory_plan, "load_served", load)
    ran(folder, tmp_path, n="auto", **more)
    assert len(loaded) == 4


def test_batch__quantised_attention_is_the_same_in_memory_and_streamed(
    folder, tmp_path, monkeypatch
):
    ran(folder, tmp_path)
    with pytest.raises(ResultFileError, match="quantise_attention was None and is True"):
        ran(folder, tmp_path, quantise_attention="true")
    options = {"quantise_attention": "true", "overwrite": "true"}
    plain, real = results(tmp_path / "out.jsonl"), command.load_with_plan

    def load(*args):
        model, planned = real(*args)
        assert model.moecast.dense_codes.stored == {}
        return model, planned

    monkeypatch.setattr(command, "load_with_plan", load)
    ran(folder, tmp_path, **options)
    quantised = results(tmp_path / "out.jsonl")
    assert quantised != plain
    done = ran(folder, tmp_path, **options, dense="stream")
    # Of 80,256 bytes of dense weights, shared experts and routers are not quantised.
    assert 0 < done["dense_bytes_read"] < 0.7 * 80_256 * done["group_steps"]
    assert results(tmp_path / "out.jsonl") == quantised


def test_batch__only_a_store_of_the_same_bits_is_no_other_setting(folder, tmp_path):
    ran(folder, tmp_path)
    store = packed(folder, tmp_path / "raw")
    assert ran(folder, tmp_path, **{"store.path": store})["written"] == 0
    store = packed(folder, tmp_path / "hqq", coding=choose_coding(Quantise.HQQ, 16))
    with pytest.raises(ResultFileError, match="store was None and is .*hqq.*16"):
        ran(folder, tmp_path, **{"store.path": store})
    assert ran(folder, tmp_path, **{"store.path": store, "overwrite": "true"})["written"] == COUNT


def test_batch__what_does_not_fit_is_refused_and_the_model_is_closed(folder, tmp_path):
    with pytest.raises(PlanError, match=r"n=4 needs \d+ bytes .* use n=\d"):
        ran(folder, tmp_path, n=4, kv_budget="60kB", kv_offload="none")
    with pytest.raises(PlanError, match="use at least kv_budget="):
        ran(folder, tmp_path, kv_budget="3kB")
    with pytest.raises(PlanError, match="least is memory="):
        ran(folder, tmp_path, memory="90kB", n="auto")


def test_batch__a_bad_line_stops_it_before_the_model_is_loaded(folder, tmp_path, monkeypatch):
    with write_prompts(tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "text"}\n')
    monkeypatch.setattr(command, "load_with_plan", None)
    with pytest.raises(PromptFileError, match=rf"line {COUNT + 1}: this model has no tokenizer"):
        run(compose_typed(BatchConfig, options(folder, tmp_path))[0])
    assert not (tmp_path / "out.jsonl").exists()


def test_batch__the_next_run_completes_failed_batches(folder, tmp_path, monkeypatch):
    ran(folder, tmp_path, output=tmp_path / "whole.jsonl", temperature=0.8)
    real = command.make_kv_caches

    def failing(*arguments):
        caches = real(*arguments)
        second_fails = [DEFAULT, TransferError("the disk is full"), *[DEFAULT] * COUNT]
        caches.make = Mock(wraps=caches.make, side_effect=second_fails)
        return caches

    monkeypatch.setattr(command, "make_kv_caches", failing)
    with pytest.raises(PromptsFailed, match=r"3 of 14 prompts have no result: the disk is full"):
        ran(folder, tmp_path, temperature=0.8)
    assert len(results(tmp_path / "out.jsonl")) == COUNT - 3
    monkeypatch.undo()
    assert ran(folder, tmp_path, temperature=0.8)["written"] == 3
    assert results(tmp_path / "out.jsonl") == results(tmp_path / "whole.jsonl")


PROMPTS = "F.settings.json"
"""An input that the settings of the output `F` would overwrite, too."""
OUTPUTS = ["F", PROMPTS, f"./{PROMPTS}", "link", "hard", f"sub/../{PROMPTS}"]


@pytest.mark.parametrize("output", OUTPUTS)
def test_config__output_may_not_be_the_input(output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write_prompts(tmp_path / PROMPTS)
    before = file.read_bytes()
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "hard").hardlink_to(file)
    with pytest.raises(MoecastError, match=f"output=.* would overwrite input={PROMPTS}"):
        compose_typed(BatchConfig, [f"input={PROMPTS}", f"output={output}", "overwrite=true"])
    assert file.read_bytes() == before
