"""Requests that a server records: the same bits as `collect`, whole requests, within bounds."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from collect.config import DataConfig, SourceKind
from collect.errors import TraceError
from collect.record import collect
from collect.recording import recording_settings
from collect.served.recorder import SIGNALS, SignalSampler
from collect.traces import Trace
from runtime.config import PROMPT_LOOKUP, Exact, ModelConfig
from runtime.generation.draft_pace import DraftPace
from runtime.serving.config import ServeConfig
from runtime.serving.model_loading import load_model
from tests.builders.recordable import LETTERS, prompts_file, recordable
from tests.builders.serving import RunningServer, running_server

NEW_TOKENS = 6


@contextmanager
def recording_server(
    model: ModelConfig, folder: Path, *, num_tokens: int = 100, max_bytes: int = 1 << 30, **options
) -> Iterator[tuple[RunningServer, SignalSampler]]:
    """A server that records every request, and what records it, closed at the end."""
    sampler = SignalSampler(folder, fraction=1.0, num_tokens=num_tokens, max_bytes=max_bytes)
    config = ServeConfig(model=model, budget="50%", **options)
    with running_server(
        lambda: load_model(config, on_loaded=sampler.attach),
        install=lambda service, _: service.add_observer(sampler),
    ) as server:
        yield server, sampler
    sampler.close()


def encode(text: str) -> list[int]:
    return [LETTERS.index(letter) + 1 for letter in text]


def ask(
    server: RunningServer, text: str | list[str], *, new_tokens: int = NEW_TOKENS, **options
) -> None:
    prompt = encode(text) if isinstance(text, str) else [encode(one) for one in text]
    body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, **options}
    with server.http() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


def test_recording__has_the_bits_of_collect(tmp_path: Path) -> None:
    model = recordable(tmp_path / "model")
    prompts = prompts_file(tmp_path / "prompts.jsonl", count=4)
    data = DataConfig(
        kind=SourceKind.JSONL, path=str(prompts), min_chars=1, max_new_tokens=NEW_TOKENS - 1
    )
    settings = recording_settings(data, batch_size=1)
    expected = collect(
        model, data, folder=tmp_path / "expected", signals=SIGNALS, settings=settings
    )
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    with recording_server(model, tmp_path / "served") as (server, _):
        for text in texts:
            ask(server, text)
    served = Trace.open(tmp_path / "served", model=expected.spec)
    assert served.num_tokens == expected.num_tokens
    np.testing.assert_array_equal(served.positions, expected.positions)
    np.testing.assert_array_equal(served.phases, expected.phases)
    assert (served.tokens == -1).all()
    for signal in SIGNALS:
        for layer in range(expected.spec.num_layers):
            np.testing.assert_array_equal(
                served.column(signal, layer)[:], expected.column(signal, layer)[:]
            )


def columns_of(trace: Trace) -> dict[tuple[str, int], np.ndarray]:
    return {
        (signal, layer): trace.column(signal, layer)[:]
        for signal in trace.signals
        for layer in range(trace.spec.num_layers)
    }


def rows_by_request(trace: Trace) -> dict[str, dict[tuple[str, int], np.ndarray]]:
    """Signals by the bytes of the first state, which is the first token's."""
    columns = columns_of(trace)
    found = {}
    for request in trace.request_table:
        rows = np.flatnonzero(trace.requests == request.index)
        own = {key: values[rows] for key, values in columns.items()}
        found[own["layer_input", 0].tobytes()] = own
    return found


TEXTS = ["the quick brown fox", "a lazy dog", "far away over the hill", "and", "jumps", "it runs"]


@pytest.mark.parametrize("exact", ["eager", "grouped", "shared"])
def test_recording__of_clients_at_once_has_the_bits_of_one(tmp_path: Path, exact: str) -> None:
    model = recordable(tmp_path / "model")
    model.exact = Exact(exact)
    with recording_server(model, tmp_path / "alone") as (server, _):
        for text in TEXTS:
            ask(server, text)
    with recording_server(model, tmp_path / "together") as (server, _):
        # The prompts of one request start together.
        ask(server, TEXTS)
        assert server.steps.num_steps <= NEW_TOKENS + 1
    alone = rows_by_request(Trace.open(tmp_path / "alone"))
    together = rows_by_request(Trace.open(tmp_path / "together"))
    assert len(alone) == len(TEXTS)
    assert alone.keys() == together.keys()
    for name, columns in alone.items():
        for key, values in columns.items():
            np.testing.assert_array_equal(together[name][key], values)


def test_recording__with_drafts_has_the_accepted_tokens_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether it pays depends on the machine.
    monkeypatch.setattr(DraftPace, "choose", lambda _, room: max(0, min(room, 4)))
    model = recordable(tmp_path / "model")
    text = "the the the the the the the the"
    with recording_server(model, tmp_path / "plain") as (server, _):
        ask(server, text, new_tokens=40)
    drafts = {"draft": PROMPT_LOOKUP}
    with recording_server(model, tmp_path / "drafted", **drafts) as (server, _):
        ask(server, text, new_tokens=40)
        assert server.steps.num_steps < 40, "no draft was accepted"
    plain, drafted = Trace.open(tmp_path / "plain"), Trace.open(tmp_path / "drafted")
    assert len(text) + 39 == plain.num_tokens == drafted.num_tokens
    np.testing.assert_array_equal(plain.positions, drafted.positions)
    for key, values in columns_of(plain).items():
        # Products of several tokens round differently.
        np.testing.assert_allclose(columns_of(drafted)[key], values, atol=1e-2)


def test_recording__is_of_the_rows_around_the_end_of_the_prompt(tmp_path: Path) -> None:
    model = recordable(tmp_path / "model")
    text = "a prompt of many letters"
    with recording_server(model, tmp_path / "whole") as (server, _):
        ask(server, text, new_tokens=12)
    with recording_server(model, tmp_path / "part", num_tokens=5) as (server, _):
        ask(server, text, new_tokens=12)
    whole, part = Trace.open(tmp_path / "whole"), Trace.open(tmp_path / "part")
    assert part.positions.tolist() == [*range(len(text) - 5, len(text) + 5)]
    assert part.request_table[0].prompt_tokens == part.request_table[0].generated_tokens == 5
    for key, values in columns_of(whole).items():
        np.testing.assert_array_equal(columns_of(part)[key], values[len(text) - 5 :][:10])


def test_recording__leaves_out_requests_that_end_early(tmp_path: Path) -> None:
    model = recordable(tmp_path / "model")
    with recording_server(model, tmp_path / "trace") as (server, sampler):
        server.steps.hold()
        body = {"prompt": encode("gone"), "max_tokens": 500, "stream": True, "ignore_eos": True}
        with server.http() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        server.steps.release()
        assert server.service.wait_idle(240)
        # Logits of the prompt are another forward pass; the answer has none.
        ask(server, "scored", new_tokens=0, echo=True, logprobs=1)
        ask(server, "kept")
    assert sampler.counts().num_requests == 1
    assert sampler.counts().num_dropped == 0
    assert len(Trace.open(tmp_path / "trace").request_table) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text(""), "cannot be written.*name another folder"),
        (lambda path: (path.mkdir(), (path / "x").write_text("")), "not empty"),
    ],
)
def test_folder__that_cannot_be_used_is_refused_before_serving(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    model = recordable(tmp_path / "model")
    make(tmp_path / "trace")
    sampler = SignalSampler(tmp_path / "trace", fraction=1.0, num_tokens=9, max_bytes=1 << 20)
    with pytest.raises(TraceError, match=message):
        load_model(ServeConfig(model=model, budget="50%"), on_loaded=sampler.attach)


def test_window__that_needs_too_much_memory_is_refused(tmp_path: Path) -> None:
    model = recordable(tmp_path / "model")
    sampler = SignalSampler(tmp_path / "trace", fraction=1.0, num_tokens=1 << 24, max_bytes=1)
    with pytest.raises(TraceError, match=r"record_tokens=16777216.*at most \d+"):
        load_model(ServeConfig(model=model, budget="50%"), on_loaded=sampler.attach)


def test_sample__is_drawn_for_each_request(tmp_path: Path) -> None:
    model = recordable(tmp_path / "model")
    drawn = iter([0.2, 0.31, 0.29, 0.3])
    sampler = SignalSampler(
        tmp_path / "trace",
        fraction=0.3,
        num_tokens=9,
        max_bytes=1 << 30,
        draw=lambda: next(drawn),
    )
    config = ServeConfig(model=model, budget="50%")
    with running_server(
        lambda: load_model(config, on_loaded=sampler.attach),
        install=lambda service, _: service.add_observer(sampler),
    ) as server:
        for text in TEXTS[:4]:
            ask(server, text)
    sampler.close()
    lengths = [one.prompt_tokens for one in Trace.open(tmp_path / "trace").request_table]
    assert lengths == [min(9, len(TEXTS[0])), min(9, len(TEXTS[2]))]
