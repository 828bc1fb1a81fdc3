"""Recording: a trace contains what the model computed, for prompt and generated tokens."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from collect.config import LauncherConfig
from collect.errors import TraceError
from collect.plan import RecordingJob, RecordingSettings, encode_prompts, recording_settings
from collect.record import collect
from collect.traces import Trace
from collect.traces.layout import ROUTING_SIGNALS
from predictors.errors import DiskFullError
from predictors.metrics import Phase
from runtime.config import DecodeKernels, ModelConfig
from runtime.hf import decode_step
from tests.builders.models import plain_eager
from tests.builders.recordable import letters_data, recordable
from tests.builders.traces import make_spec

TOLERANCE = 2e-3
"""Half precision of values around 1, and sums in another order through padding and cache."""


make_data = partial(letters_data, count=6, new_tokens=4)


def reference(folder: str, tokens: list[int]) -> list[np.ndarray]:
    """Each layer's router logits `[T, E]`, from one pass of plain Transformers over all tokens."""
    with torch.no_grad():
        output = plain_eager(Path(folder))(torch.tensor([tokens]), output_router_logits=True)
    return [logits.reshape(len(tokens), -1).numpy() for logits in output.router_logits]


def rows_of(trace: Trace, request: int) -> np.ndarray:
    return np.flatnonzero(trace.requests == request)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A finished trace of six prompts."""
    folder = tmp_path_factory.mktemp("recorded")
    model, data = recordable(folder / "model"), make_data(folder)
    trace = collect(model, data, folder=folder / "trace")
    return SimpleNamespace(model=model, data=data, trace=trace)


def test_collect__records_what_the_model_computes(recorded: SimpleNamespace) -> None:
    trace = recorded.trace
    assert len(trace.request_table) == 6
    for request in trace.request_table:
        rows = rows_of(trace, request.index)
        assert request.generated_tokens == 4
        assert len(rows) == request.prompt_tokens + 4
        assert (np.diff(rows) == 1).all()
        np.testing.assert_array_equal(trace.positions[rows], np.arange(len(rows)))
        phases = [Phase.PREFILL] * request.prompt_tokens + [Phase.DECODE] * 4
        np.testing.assert_array_equal(trace.phases[rows], phases)
        for layer, logits in enumerate(reference(recorded.model.id, trace.tokens[rows].tolist())):
            recorded_TE = trace.column("gate_logits", layer)[rows]
            np.testing.assert_allclose(recorded_TE, logits, atol=TOLERANCE, rtol=TOLERANCE)
            chosen = np.sort(np.argsort(-logits, axis=1)[:, :2], axis=1)
            assert (chosen == np.sort(trace.column("experts", layer)[rows], axis=1)).mean() > 0.98


def test_collect__generated_tokens_are_the_models_own(recorded: SimpleNamespace) -> None:
    trace, plain = recorded.trace, plain_eager(Path(recorded.model.id))
    for request in trace.request_table:
        tokens = trace.tokens[rows_of(trace, request.index)].tolist()
        prompt = torch.tensor([tokens[: request.prompt_tokens]])
        with torch.no_grad():
            alone = plain.generate(prompt, max_new_tokens=4, do_sample=False)
        assert alone[0].tolist() == tokens


def test_collect__drops_rows_from_the_end_token_on(recorded, tmp_path: Path) -> None:
    free = recorded.trace
    end = int(np.bincount(free.tokens[free.phases == Phase.DECODE]).argmax())
    model = recordable(tmp_path / "model", end_token=end)
    ended = collect(model, recorded.data, folder=tmp_path / "ended")
    assert any(request.generated_tokens < 4 for request in ended.request_table)
    for request in free.request_table:
        tokens = free.tokens[rows_of(free, request.index)]
        kept = request.prompt_tokens
        while kept < len(tokens) and tokens[kept] != end:
            kept += 1
        np.testing.assert_array_equal(ended.tokens[rows_of(ended, request.index)], tokens[:kept])


def test_collect__workers_make_the_same_trace_and_other_seeds_another(tmp_path, monkeypatch):
    # One worker, which needs seconds to import all; several are those of test_engines.py.
    monkeypatch.setattr(LauncherConfig, "is_in_process", False)
    model, data = recordable(tmp_path / "model"), make_data(tmp_path, count=4)
    settings = recording_settings(data, batch_size=2, shard_bytes=1, temperature=1.0, seed=7)
    alone = collect(model, data, folder=tmp_path / "alone", settings=settings)
    launched: list[dict[str, int]] = []
    launcher = {"launcher": LauncherConfig(workers=1, threads=1), "logs": tmp_path / "logs"}
    options = {"folder": tmp_path / "many", "settings": settings, **launcher}
    launch = partial(collect, model, data, on_launched=launched.append, **options)
    assert launch().digest == alone.digest
    assert launched == [{"units": 4, "retried": 0}]
    # It is there: no worker is started.
    assert launch().digest == alone.digest
    assert len(launched) == 1
    other = collect(model, data, folder=tmp_path / "other", settings=replace(settings, seed=8))
    assert other.tokens.tolist() != alone.tokens.tolist()


def test_recording_job__is_the_same_in_another_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = replace(recordable(tmp_path / "model"), id="model")
    data = replace(make_data(tmp_path), path="prompts.jsonl")
    settings = recording_settings(data)
    job = RecordingJob(model, data, "trace", ROUTING_SIGNALS, settings, "100%")
    text = json.dumps(job.to_json())
    spec = make_spec()
    plan, _ = job.plan(spec)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    there = RecordingJob.from_json(json.loads(text))
    assert there.plan(spec)[0] == plan
    assert there.where == str(tmp_path / "trace")
    builtin = RecordingJob(ModelConfig(), data, "s3://b/t", ROUTING_SIGNALS, settings, "1GiB")
    record = builtin.to_json()
    assert (record["model"]["id"], record["where"]) == ("builtin", "s3://b/t")


def test_recording_job__decides_for_all_workers_which_kernels_are_faster(tmp_path, monkeypatch):
    data = make_data(tmp_path)
    settings = recording_settings(data)
    for ratio, kernels in ((2.0, "own"), (1.0, "library")):
        monkeypatch.setattr(decode_step, "measure_kernel_speedup", lambda *_, found=ratio: found)
        half, whole = ModelConfig(dtype="float16"), ModelConfig(dtype="float32")
        own = ModelConfig(decode_kernels=DecodeKernels.OWN)
        for model, expected in ((half, kernels), (whole, "library"), (own, "own")):
            job = RecordingJob(model, data, "trace", ROUTING_SIGNALS, settings, "100%")
            there = RecordingJob.from_json(json.loads(json.dumps(job.to_json())))
            assert there.model.decode_kernels.value == expected


def test_collect__full_disk_is_reported_before_any_write(tmp_path, monkeypatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=123_456)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DiskFullError, match=r"needs up to 16,8.* bytes, 123,456 are free"):
        collect(recordable(tmp_path / "model"), make_data(tmp_path), folder=tmp_path / "trace")
    assert not (tmp_path / "trace").exists()


def test_collect__refuses_the_trace_of_another_model(recorded, tmp_path: Path) -> None:
    other = recordable(tmp_path / "b", num_experts=16)
    with pytest.raises(TraceError, match=r"num_experts: .*16.*8"):
        collect(other, recorded.data, folder=recorded.trace.path)


def test_collect__overflow_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converter = "runtime.hf.probes.to_floats"
    monkeypatch.setattr(converter, lambda x: 1e6 * x.reshape(-1, x.shape[-1]).numpy())
    with pytest.raises(TraceError, match=r"of layer 0 contains .*not finite in half precision"):
        collect(recordable(tmp_path / "model"), make_data(tmp_path), folder=tmp_path / "trace")


def test_encode__cuts_a_chat_inside_the_users_turn(tmp_path: Path) -> None:
    recordable(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = "A{{ messages[0].content }}B"
    settings = RecordingSettings(new_tokens=0, max_prompt_tokens=5, chat=True)
    encoded = encode_prompts(["abcdefgh", "ab"], tokenizer, settings)
    assert [tokenizer.decode(one.tokens) for one in encoded] == ["AabcB", "AabB"]
