"""`moecast train` from a model's folder to zoo entries, and the refusals on the way."""

import json
import re
import shutil
from itertools import product

import numpy as np
import pytest
from huggingface_hub import ModelCard

from collect.traces import Trace
from collect.traces.layout import ROUTING_SIGNALS
from configs.program import run_program
from predictors.registry import KINDS
from predictors.reuse import ReusePredictor
from tests.builders.traced_model import make_traced_model, training_options
from tests.builders.traces import make_trace
from train.eviction_eval import BUDGETS, POLICIES, gap_closed
from zoo.entry import ZooEntry, open_entry
from zoo.load import load_predictor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and finished traces that say they are of that model: nothing has to be recorded."""
    folder = tmp_path_factory.mktemp("train")
    make_traced_model(folder, other="shifted")
    return folder


def options(folder, run_dir) -> list[str]:
    return [*training_options(folder, run_dir), f"shifted_trace={folder / 'shifted'}"]


@pytest.fixture
def setup(folder, tmp_path) -> list[str]:
    return options(folder, tmp_path / "run")


@pytest.fixture
def stride(folder, tmp_path, stride_run) -> list[str]:
    """The options of a training, which has been done in their folder."""
    shutil.copytree(stride_run, tmp_path / "run")
    return [*options(folder, tmp_path / "run"), "predictor=stride", "figures=false"]


@pytest.fixture(scope="module")
def stride_run(folder):
    given = [*options(folder, folder / "stride"), "predictor=stride", "figures=false"]
    assert run_program("train", given) == 0
    return folder / "stride"


def read_results(run_dir) -> dict:
    return json.loads((run_dir / "results.json").read_text())


def test_train__of_every_kind_writes_figures_and_entries_that_load(setup, folder, tmp_path, capsys):
    kinds = f"chat: {folder / 'shifted'}, own: {folder / 'trace'}"
    more = [f"other_kinds={{{kinds}}}", "predictor=all"]
    assert run_program("train", [*setup, *more]) == 0
    shown, progress = capsys.readouterr()
    results = read_results(tmp_path / "run")
    figures = results["predictors"]
    assert {*KINDS, "skip-2", "skip-3"} <= set(figures)
    for name, first in (("stride", 2), ("mlp", 1), ("skip", 1), ("token", 0), ("popularity", 0)):
        for metric in ("accuracy", "fetch_rate", "good_pred"):
            layers = figures[name][metric]
            assert [value is None for value in layers] == [True] * first + [False] * (4 - first)
            assert all(0 <= value <= 1 for value in layers if value is not None)
        replayed, fetched = (figures[name][key][3] for key in ("replay_accuracy", "fetch_rate"))
        assert figures[name]["good_pred"][3] == pytest.approx(replayed * fetched)
    for name, one in figures.items():
        assert name in shown
        assert set(one["hardware"]) == {"rtx4090-pcie4", "desktop-nvme4"}
        assert one["shifted"]["tokens"] == 200
        assert all(one["latency_us"][batch]["layer_p50"] >= 0 for batch in ("1", "8", "64"))
        entry = open_entry(tmp_path / "run" / "entries" / name)
        entry.verify()
        assert entry.manifest.metrics["accuracy"] == one["mean_accuracy"]
        loaded = load_predictor(tmp_path / "run" / "entries" / name, spec=entry.manifest.spec)
        assert loaded.kind == KINDS[name.removesuffix("-2").removesuffix("-3")].kind
        check_card(entry, folder)
        # Here the same prompts as the shifted ones.
        chat = one["other_kinds"]["chat"]
        assert chat["mean_accuracy"] == one["shifted"]["mean_accuracy"]
        shown_chat = re.search(r"\| chat +\| +([\d.]+) ", entry.read("README.md").decode())
        assert float(shown_chat[1]) == pytest.approx(chat["mean_accuracy"], abs=1e-3)
        assert one["other_kinds"]["own"]["mean_accuracy"] == one["mean_accuracy"]
    assert results["parity"]["stride"]["same_top_k"] >= 0.999
    assert "generated, per-layer" in results["keeping"]["hit_rates"]
    for stream in results["keeping"]["hit_rates"].values():
        assert list(stream) == list(BUDGETS)
        for rates in stream.values():
            assert list(rates) == list(POLICIES)
            assert all(0 <= one["decode"] <= 1 for one in rates.values())
            assert all(one["decode"] <= rates["belady"]["decode"] + 1e-9 for one in rates.values())
            assert rates["lru"]["decode_gap_closed"] in (0.0, None)
    reuse = open_entry(results["entries"]["reuse"])
    assert isinstance(load_predictor(reuse.where, spec=None), ReusePredictor)
    check_card(reuse, folder)
    assert "1 is rtx4090-pcie4, 2 is desktop-nvme4" in " ".join(shown.split())
    meaning = "mean over held-out tokens of |predicted top_k and chosen|"
    assert [text for text in (meaning, "gap closed", "belady") if text not in shown] == []
    assert f"`moecast zoo push {tmp_path / 'run'}`" in progress
    only = f"zoo={tmp_path / 'only'}"
    assert run_program("zoo", ["push", results["entries"]["reuse"], only]) == 0
    again = [*setup, "predictor=all", only, f"run_dir={tmp_path / 'again'}"]
    assert run_program("train", again) == 2
    assert "has only reuse" in capsys.readouterr().err


def check_card(entry: ZooEntry, folder) -> None:
    """Checks the record of the training and the figure: for others, so without local folders."""
    record = json.loads(entry.read("training.json"))
    assert record["trace"]["digest"] == entry.manifest.trace_digest
    assert (record["trace"]["was_named"], record["options"]["max_epochs"]) == (True, 2)
    assert record["versions"].keys() >= {"torch", "transformers", "lightning"}
    assert str(folder) not in entry.read("training.json").decode()
    card = ModelCard(entry.read("README.md").decode())
    assert (str(folder) in card.content, "max_epochs=2" in card.text) == (False, True)
    shown = {result.metric_type for result in card.data.eval_results}
    assert shown <= entry.manifest.metrics.keys()
    assert entry.read("figure.png").startswith(b"\x89PNG")


@pytest.mark.parametrize("missing", [None, "results.json", "entries/stride"])
def test_train__run_again_scores_only_what_is_not_finished(missing, stride, tmp_path, capsys):
    if missing is not None:
        (tmp_path / "run" / missing).rename(tmp_path / "lost")
    assert run_program("train", stride) == 0
    said = capsys.readouterr().err
    assert ("this training is finished" in said) == (missing is None)
    assert ("scoring stride" in said) == (missing is not None)
    assert read_results(tmp_path / "run")["training"]["resumed"] == (missing is not None)
    assert (tmp_path / "run/entries/stride/manifest.json").is_file()


def test_train__run_again_draws_a_report_that_was_not_finished(setup, tmp_path, capsys) -> None:
    given = [*setup, "predictor=popularity"]
    assert run_program("train", given) == 0
    page = tmp_path / "run" / "report" / "report.html"
    page.unlink()
    assert run_program("train", given) == 0
    assert "this training is finished" in capsys.readouterr().err
    assert page.is_file()


def test_train__names_the_entry_of_the_selected_kind(setup, tmp_path, capsys) -> None:
    given = ["predictor=skip", "predictor.options={horizon: 2}", "score_shifted=false"]
    assert run_program("train", [*setup, *given, "figures=false"]) == 0
    entry = open_entry(tmp_path / "run" / "entries" / "skip-2")
    assert entry.manifest.options["horizon"] == 2
    assert f" predictor={entry.where}` uses them" in capsys.readouterr().err


def test_train__of_a_zoo_scores_its_entries_again(stride, folder, tmp_path, capsys):
    zoo, again = f"zoo={tmp_path / 'zoo'}", tmp_path / "again"
    assert run_program("zoo", ["push", str(tmp_path / "run"), zoo]) == 0
    assert run_program("train", [*stride, zoo, f"run_dir={again}"]) == 0
    assert "training" not in capsys.readouterr().err
    first, second = read_results(tmp_path / "run"), read_results(again)
    assert (second["parity"], second["training"]) == (first["parity"], None)
    for name, one in first["predictors"].items():
        assert second["predictors"][name]["replay"] == one["replay"]
        entries = [open_entry(run / "entries" / name) for run in (tmp_path / "run", again)]
        for path in {"training.json", *entries[0].payload()}:
            assert entries[1].read(path) == entries[0].read(path)
    other = f"trace={folder / 'shifted'}"
    assert run_program("train", [*stride, zoo, other, f"run_dir={tmp_path / 'other'}"]) == 2
    assert "was trained on another trace" in capsys.readouterr().err


def test_train__refuses_other_settings_in_the_same_folder(stride, capsys):
    assert run_program("train", [*stride, "lr=0.01"]) == 2
    assert re.search(r"lr: 0.004 then, 0.01 now.*overwrite=true", capsys.readouterr().err)
    assert run_program("train", [*stride, "lr=0.01", "overwrite=true"]) == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("routing", "has no gate_input; collect one with signals="),
        ("nowhere", "is not a trace.*Leave other_kinds.x out to do without"),
    ],
)
def test_train__refuses_prompts_that_cannot_be_scored_before_it_trains(
    name, reason, setup, folder, tmp_path, capsys
):
    spec = Trace.open(folder / "trace").spec
    make_trace(tmp_path / "routing", spec=spec, signals=ROUTING_SIGNALS)
    given = [*setup, "predictor=popularity", f"other_kinds={{x: {tmp_path / name}}}"]
    assert run_program("train", given) == 2
    said = capsys.readouterr().err
    assert re.search(rf"other_kinds.x={tmp_path / name} {reason}", said)
    assert "counting the baselines" not in said


def test_train__on_a_routing_log_trains_nothing_and_skips_kinds_without_signals(
    setup, tmp_path, capsys
):
    log = tmp_path / "log.jsonl"
    random, lines = np.random.default_rng(0), []
    for request, position, layer in product(range(30), range(4), range(3)):
        where = {"request": request, "position": position, "layer": layer}
        lines.append(json.dumps(where | {"experts": random.permutation(8)[:2].tolist()}))
    log.write_text("\n".join(lines))
    chosen = [*setup, "predictor=eam-request", "predictor.options={capacity: 7}"]
    chosen += ["score_shifted=false", "figures=false"]
    for output, size in (("without", []), ("imported", ["hidden_size=32"])):
        importing = ["import", f"source={log}", f"output={tmp_path / output}", *size]
        assert run_program("collect", importing) == 0
    assert run_program("train", [*chosen, f"trace={tmp_path / 'without'}"]) == 2
    assert "import it again with hidden_size=N" in capsys.readouterr().err
    assert run_program("train", [*chosen, f"trace={tmp_path / 'imported'}"]) == 0
    results = read_results(tmp_path / "run")
    assert list(results["predictors"]) == ["eam-request", "popularity"]
    assert results["training"] is results["predictors"]["eam-request"]["shifted"] is None
    assert open_entry(results["entries"]["eam-request"]).manifest.options["capacity"] == 7
    assert not (tmp_path / "run" / "report").exists()
    said = capsys.readouterr().err
    assert "left out: skip: the trace lacks its signals" in said
    assert "left out: token: it needs token ids" in said


def test_gap_closed__is_nothing_where_there_is_no_gap() -> None:
    assert gap_closed(0.5, 0.8, 0.9) == pytest.approx(0.75)
    assert gap_closed(0.5, 0.5, 0.5) is gap_closed(None, 0.5, 0.9) is None
