"""A tracked run in W&B and MLflow: its name and mode, its end, its report and its files."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pytest
import wandb

from collect.traces import Trace
from predictors.table import Table
from runtime.config import ModelConfig
from runtime.tools.report.html_report import HtmlReport
from tests.builders.wandb_files import WandbFile, read_wandb_files
from train.config import LoggerKind, TrainConfig
from train.errors import TrainError
from train.tracking import run as tracking
from train.tracking.loggers import is_mode_known, open_logger, shorten_name
from train.tracking.run import TrackedRun

VARIABLES = ("MODE", "API_KEY", "PROJECT", "ENTITY", "RUN_GROUP", "TAGS", "JOB_TYPE", "NAME")
KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No login, settings or servers but the test's."""
    for name in VARIABLES:
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    for name in ("DATA_DIR", "CACHE_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / name))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    yield
    # They keep the environment of the first run.
    wandb.teardown()
    mlflow.set_tracking_uri(None)


def make_config(run_dir: Path, **options) -> TrainConfig:
    return TrainConfig(run_dir=run_dir, **{"logger": ["wandb"], **options})


def track(config: TrainConfig, trace: Trace, work: Callable = id) -> WandbFile:
    """Returns what wandb has written; the tracked run does its `work` after the start."""
    with TrackedRun(config) as tracked:
        tracked.start(trace)
        work(tracked)
    return read_wandb_files(config.run_dir)[-1]


def test_wandb__environment_applies(tmp_path: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch):
    values = {"project": "routing", "entity": "team", "run_group": "night", "job_type": "sweep"}
    for name, value in (values | {"tags": "a,b"}).items():
        monkeypatch.setenv(f"WANDB_{name.upper()}", value)
    run = track(make_config(tmp_path / "mine"), trace).run
    assert {name: getattr(run, name) for name in values} == values
    assert (list(run.tags), run.display_name) == (["a", "b"], "mine")


def test_wandb__an_overwritten_run_folder_has_another_run(tmp_path: Path, trace: Trace) -> None:
    for overwrite in (False, True):
        track(make_config(tmp_path / "mine", overwrite=overwrite), trace)
    files = read_wandb_files(tmp_path / "mine")
    assert [file.run.project for file in files] == ["moecast"] * 2
    assert len({file.run.run_id for file in files}) == 2


MODES = [
    ({}, "", False),
    ({"WANDB_MODE": "online"}, "", True),
    ({"WANDB_API_KEY": KEY}, "", True),
    ({}, f"machine api.wandb.ai login user password {KEY}", True),
    ({}, f"machine elsewhere.org login user password {KEY}", False),
]


@pytest.mark.parametrize(("variables", "netrc", "known"), MODES)
def test_wandb__is_offline_only_if_nothing_else_was_said(
    variables: dict, netrc: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text(netrc)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_mode_known(wandb.setup().settings) == known


def test_wandb__a_failed_training_is_a_failed_run(tmp_path: Path, trace: Trace) -> None:
    with pytest.raises(ZeroDivisionError):
        track(make_config(tmp_path / "mine"), trace, lambda _: 1 / 0)
    (file,) = read_wandb_files(tmp_path / "mine")
    assert file.exit_code == 1


REFUSED_NAMES = [
    ("PROJECT", "a/b", "logger=wandb: Invalid project name 'a/b'"),
    ("TAGS", "t" * 65, "logger=wandb: .*Tag 't+...t+' is 65 characters"),
    *(
        (name, "n" * 129, f"WANDB_{name}=n{{129}}: 129 characters, at most 128 are allowed$")
        for name in ("RUN_GROUP", "NAME", "RUN_ID")
    ),
    ("DATA_DIR", "/proc/1/data", "logger=wandb: .*; set WANDB_DATA_DIR to a folder$"),
]


@pytest.mark.parametrize(("variable", "value", "reason"), REFUSED_NAMES)
def test_wandb__names_that_it_refuses_are_named_before_work_begins(
    variable: str, value: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"WANDB_{variable}", value)
    with pytest.raises(TrainError, match=f"^{reason}"):
        TrackedRun(make_config(tmp_path / "mine"))


def test_wandb__long_names_are_cut_and_stay_different(tmp_path: Path, trace: Trace) -> None:
    model = ModelConfig(name="m" * 140, id="m")
    (name,) = track(make_config(tmp_path / ("r" * 140), model=model), trace).artifacts
    assert len(name) == 128
    names = ["a b", "a-b", "a/b", "m" * 128, "m" * 140, "m" * 141]
    assert len({shorten_name(name) for name in names}) == len(names)
    assert shorten_name("tiny-residual") == "tiny-residual"


def test_wandb__rows_of_an_interrupted_run_go_on(tmp_path: Path) -> None:
    for _ in range(2):
        loggers = [open_logger(LoggerKind.WANDB, tmp_path, name) for name in "ab"]
        for logger in loggers:
            logger.log_metrics({"loss": 1.0}, step=0)
        loggers[0].experiment.finish()
    steps = [[row["_step"] for row in file.history] for file in read_wandb_files(tmp_path)]
    assert steps == [[0, 1], [2, 3]]


def test_report__is_logged_in_the_run_of_the_training(tmp_path: Path, trace: Trace) -> None:
    config = make_config(tmp_path / "mine", logger=["wandb", "mlflow"])
    page = HtmlReport("Title")
    page.add("Curve", Table.of(["x", "y"], [[0, None]]), lambda figure, _: figure.subplots())
    folder = tmp_path / "mine" / "report"
    track(config, trace, lambda tracked: tracked.log_report(page, page.write(folder)))
    (file,) = read_wandb_files(tmp_path / "mine")
    (row,) = [row for row in file.history if "report/page" in row]
    assert row["report/page"]["_type"] == "html-file"
    assert (row["report/curve"]["_type"], row["report/curve"]["caption"]) == ("image-file", "Curve")
    path = row["report/curve/values"]["path"]
    (table,) = (tmp_path / "mine" / "wandb").glob(f"offline-run-*/files/{path}")
    shown = json.loads(table.read_text())
    assert (shown["columns"], shown["data"]) == (["x", "y"], [[0, None]])

    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("moecast").experiment_id])
    files = {one.path for one in client.list_artifacts(run.info.run_id, "report")}
    assert files == {"report/report.html", "report/curve.png", "report/curve.csv"}


def test_mlflow__a_resumed_training_continues_its_run(tmp_path: Path, trace: Trace) -> None:
    run_dir = tmp_path / "mine"
    for resumed in (False, True):
        # An option that may differ when a training is resumed.
        config = make_config(run_dir, logger=["mlflow"], debug=resumed)
        with TrackedRun(config) as tracked:
            tracked.start(trace)
            for prefix in ("", "reuse"):
                (logger,) = tracked.loggers(prefix)
                logger.log_metrics({"val/loss": 2.0 - resumed}, step=int(resumed))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("moecast").experiment_id])
    for name in ("val/loss", "reuse-val/loss"):
        history = client.get_metric_history(run.info.run_id, name)
        assert [(one.step, one.value) for one in history] == [(0, 2.0), (1, 1.0)]
    assert run.data.params["trace_digest"] == trace.digest
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")

    (run_dir / "tracking.json").write_text(json.dumps({"mlflow": "f" * 32}))
    with pytest.raises(TrainError, match=r"logger=mlflow: .*tracking.json: remove that file"):
        TrackedRun(config).start({}, trace)


def test_logger__a_missing_package_is_an_error_with_the_command(tmp_path, monkeypatch):
    packages = {kind: ("surely_not_installed",) for kind in tracking.PACKAGES}
    monkeypatch.setattr(tracking, "PACKAGES", packages)
    for kind in packages:
        with pytest.raises(TrainError, match=rf"pip install 'moecast\[{kind}\]'$"):
            TrackedRun(make_config(tmp_path, logger=[kind.value]))
    with TrackedRun(make_config(tmp_path, logger=["csv"])) as tracked:
        assert tracked.loggers() == []
