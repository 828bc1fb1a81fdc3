"""`moecast train` from a model's folder to zoo entries, and the refusals on the way."""

import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard

from configs.cli import main
from configs.commands import COLLECT, TRAIN
from predictors.base import Signal
from predictors.registry import KINDS, REUSE_PREDICTORS
from tests.builders.models import tiny_qwen2_moe
from tests.builders.traces import make_spec, make_trace
from train.eviction_eval import BUDGETS
from zoo.entry import ZooEntry, open_entry
from zoo.load import load_predictor


@pytest.fixture
def setup(tmp_path: Path) -> list[str]:
    """A model, and a finished trace that says it is of that model: nothing has to be recorded."""
    from runtime.config import ModelConfig
    from runtime.store.model_source import identity

    folder = tiny_qwen2_moe(tmp_path / "tiny", num_layers=4)
    model = ModelConfig(name="tiny", id=str(folder), dtype="float32")
    spec = make_spec(hidden_size=32)
    spec = type(spec)(**{**spec.as_dict(), **identity(folder, model)})
    make_trace(tmp_path / "trace", spec=spec, requests_per_unit=60)
    make_trace(tmp_path / "shifted", spec=spec, num_units=1, seed=1)
    return [
        f"model.id={folder}",
        "model.name=tiny",
        f"trace={tmp_path / 'trace'}",
        f"shifted_trace={tmp_path / 'shifted'}",
        f"run_dir={tmp_path / 'run'}",
        "predictor.width=32",
        "max_epochs=2",
        "batch_size=64",
        "replay_tokens=50",
    ]


def test_train__writes_every_figure_and_entries_that_load(
    setup: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = f"other_kinds={{chat: {tmp_path / 'shifted'}}}"
    assert main("train", TRAIN, [*setup, others]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    figures = results["predictors"]
    assert list(figures)[0] == "residual"
    assert {"stride", "mlp", "skip", "token", "popularity"} <= set(figures)
    for name, first in (("stride", 2), ("mlp", 1), ("skip", 1), ("token", 0), ("popularity", 0)):
        for metric in ("accuracy", "fetch_rate", "good_pred"):
            layers = figures[name][metric]
            assert len(layers) == 4
            assert [layer for layer, value in enumerate(layers) if value is None] == [*range(first)]
            assert all(0 <= value <= 1 for value in layers if value is not None)
        assert figures[name]["good_pred"][3] == pytest.approx(
            figures[name]["replay_accuracy"][3] * figures[name]["fetch_rate"][3]
        )
    for name in figures:
        entry = open_entry(tmp_path / "run" / "entries" / name)
        entry.verify()
        assert entry.manifest.metrics["accuracy"] == figures[name]["mean_accuracy"]
        predictor = load_predictor(tmp_path / "run" / "entries" / name, spec=entry.manifest.spec)
        tokens = np.zeros(2, np.int64)
        hidden = np.zeros((2, 32), np.float32)
        asked = [*predictor.begin_step(tokens, tokens)]
        if Signal.LAYER_INPUT in predictor.signals:
            asked += predictor.layer_input(0, hidden)
        asked += predictor.gate_input(0, hidden)
        assert asked[0].scores_TE.shape == (2, 8)
        check_card(entry, tmp_path)
        # Here the same prompts as the shifted ones.
        chat = figures[name]["other_kinds"]["chat"]
        assert chat["mean_accuracy"] == figures[name]["shifted"]["mean_accuracy"]
        assert f"| chat | {chat['mean_accuracy']:.4g} |" in entry.read("README.md").decode()
    assert results["parity"]["stride"]["same_top_k"] >= 0.999
    reuse = open_entry(results["entries"]["reuse"])
    assert reuse.manifest.kind == "reuse"
    check_card(reuse, tmp_path)
    shown, progress = capsys.readouterr()
    assert "mean over held-out tokens of |predicted top_k and chosen|" in shown
    assert f"`moecast zoo push {tmp_path / 'run'}`" in progress


def check_card(entry: ZooEntry, folder: Path) -> None:
    """Checks the record of the training and the figure: for others, so without local folders."""
    record = entry.training()
    assert record is not None
    assert record.trace.digest == entry.manifest.trace_digest
    assert record.trace.was_named
    assert record.options["max_epochs"] == 2
    assert record.versions.keys() >= {"torch", "transformers", "lightning"}
    assert str(folder) not in entry.read("training.json").decode()
    card = ModelCard(entry.read("README.md").decode())
    assert str(folder) not in card.content
    assert {
        result.metric_type for result in card.data.eval_results
    } <= entry.manifest.metrics.keys()
    assert "max_epochs=2" in card.text
    assert entry.read("figure.png").startswith(b"\x89PNG")


def test_train__run_again_resumes_to_the_same_weights(setup: list[str], tmp_path: Path) -> None:
    digests = []
    for _ in range(2):
        assert main("train", TRAIN, [*setup, "predictor=stride", "figures=false"]) == 0
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        digests.append(results["training"]["weights_digest"])
    assert results["training"]["resumed"]
    assert digests[0] == digests[1]


def test_train__refuses_other_settings_in_the_same_folder(
    setup: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    setup += ["predictor=stride", "figures=false"]
    assert main("train", TRAIN, setup) == 0
    assert main("train", TRAIN, [*setup, "lr=0.01"]) == 2
    assert "overwrite=true" in capsys.readouterr().err
    assert main("train", TRAIN, [*setup, "lr=0.01", "overwrite=true"]) == 0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("predictor=strid", "Did you mean 'stride'"),
        ("predictor.kind=strid", "Did you mean 'stride'"),
        ("batch_size=100000", "tokens to train on, a batch 100,000"),
        ("budget=1B", "the least budget is"),
    ],
)
def test_train__refuses_with_one_line(
    setup: list[str], argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("train", TRAIN, [*setup, argument]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_train__refuses_an_altered_trace(
    setup: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = sorted((tmp_path / "trace").glob("*.arrow"))[0]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert main("train", TRAIN, setup) == 2
    assert "damaged" in capsys.readouterr().err
    assert not (tmp_path / "run" / "entries").exists()


def test_train__all_makes_one_table_of_every_kind_and_entries_that_load(
    setup: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("train", TRAIN, [*setup, "predictor=all", "max_epochs=1", "drift=true"]) == 0
    shown = capsys.readouterr().out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    figures = results["predictors"]
    assert set(KINDS) <= set(figures)
    assert {"skip-2", "skip-3"} <= set(figures)
    for name, one in figures.items():
        assert name in shown
        assert set(one["hardware"]) == {"rtx4090-pcie4", "desktop-nvme4"}
        assert one["shifted"]["tokens"] == 200
        assert all(one["latency_us"][batch]["layer_p50"] >= 0 for batch in ("1", "8", "64"))
        loaded = load_predictor(tmp_path / "run" / "entries" / name, spec=None)
        assert loaded.kind == KINDS[name.split("-2")[0].split("-3")[0]].kind
    assert set(results["drift"]) == {"eam-sequence", "eam-request", "expert-map", "correlation"}
    assert "belady" in shown
    assert list(results["keeping"]["hit_rates"]["generated, per-layer"]) == list(BUDGETS)
    for kind, cls in REUSE_PREDICTORS.items():
        assert isinstance(load_predictor(results["entries"][kind], spec=None), cls)


def test_train__of_a_kind_that_is_not_learned_trains_nothing(
    setup: list[str], tmp_path: Path
) -> None:
    options = ["predictor=eam-request", "predictor.options={capacity: 7}", "score_shifted=false"]
    options += ["figures=false"]
    assert main("train", TRAIN, [*setup, *options]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert list(results["predictors"])[0] == "eam-request"
    assert results["training"] is None
    assert results["predictors"]["eam-request"]["shifted"] is None
    entry = open_entry(tmp_path / "run" / "entries" / "eam-request")
    assert entry.manifest.options["capacity"] == 7
    assert not (tmp_path / "run" / "report").exists()


def test_train__on_a_routing_log_skips_kinds_without_signals(
    setup: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    random = np.random.default_rng(0)
    lines = [
        {
            "request": request,
            "position": position,
            "layer": layer,
            "experts": random.permutation(8)[:2].tolist(),
        }
        for request in range(30)
        for position in range(4)
        for layer in range(3)
    ]
    log.write_text("\n".join(map(json.dumps, lines)))
    folder = tmp_path / "imported"
    importing = ["import", f"source={log}", f"output={folder}"]
    assert main("collect", COLLECT, importing) == 0
    options = ["predictor=eam-request", f"trace={folder}", "score_shifted=false"]
    assert main("train", TRAIN, [*setup, *options]) == 2
    assert "import it again with hidden_size=N" in capsys.readouterr().err
    options[1] += "-2"
    importing[2] += "-2"
    assert main("collect", COLLECT, [*importing, "hidden_size=32"]) == 0
    assert main("train", TRAIN, [*setup, *options]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert list(results["predictors"]) == ["eam-request", "popularity"]
    said = capsys.readouterr().err
    assert "left out, because the trace lacks their signals: ['skip']" in said
    assert "left out, because the trace has no token ids: ['token']" in said
