"""From what a system names to what it forecasts with."""

import numpy as np
import pytest

from predictors.baselines import DependencyPredictor, SkipPredictor
from predictors.errors import PredictorError
from runtime.config import ModelConfig, SystemConfig
from runtime.engine import forecasters
from runtime.engine.forecasters import load_system_predictors, locate_predictor
from runtime.presets import load_system
from tests.builders.entries import tiny_entry, tiny_spec, write_popularity
from tests.builders.zoos import publish
from zoo.catalog import Zoo
from zoo.errors import MismatchError, ZooError
from zoo.index import EntryReference, blob_path
from zoo.load import load_predictor
from zoo.storage import builtin_storage, cache_storage

SPEC, MODEL = tiny_spec(), ModelConfig(name="tiny")


def source(name, **options):
    return forecasters.AvailablePredictors(spec=SPEC, name=name, **options)


def popularity(folder, **changes):
    """An entry of a predictor that forecasts all layers when a step begins."""
    write_popularity(folder / "popularity", tiny_spec(**changes), [None, None])
    return folder


def own_routers(given):
    return SkipPredictor(routers_LED=np.zeros((2, 8, 4), np.float32), **given)


def publish_other(name):
    """Puts an entry for another model into the user's zoo."""
    publish(cache_storage(), name=name, spec=tiny_spec(revision="another"))


def test_locate__of_a_kind_is_the_models_entry(tmp_path):
    publish(cache_storage(), name="tiny/stride")
    for name in ("other/stride", "tiny/mlp"):
        publish_other(name)
    own = SPEC.identity
    assert locate_predictor("stride", own, name="Tiny") == "tiny/stride"
    assert locate_predictor("stride", own, name="renamed") == "tiny/stride"
    assert locate_predictor("mlp", own, name="renamed") is None
    assert locate_predictor("mlp", own, name="tiny") == "tiny/mlp", "loading it says what differs"
    assert locate_predictor("other/stride", own, name="tiny") == "other/stride"
    assert locate_predictor(tmp_path, own, name="tiny") == tmp_path
    (tmp_path / "stride").mkdir()
    assert locate_predictor("stride", own, name="tiny", entries=tmp_path) == tmp_path / "stride"


def test_locate__finds_a_version_that_another_models_hides():
    own = publish(cache_storage(), name="tiny/stride")
    publish_other("tiny/stride")
    found = locate_predictor("stride", SPEC.identity, name="tiny")
    assert found == f"tiny/stride@{own.digest[:12]}"
    builtin = Zoo(builtin_storage()).open(EntryReference("qwen2-moe-tiny/stride")).manifest
    publish_other("qwen2-moe-tiny/stride")
    found = locate_predictor("stride", builtin.spec.identity, name="qwen2-moe-tiny")
    assert load_predictor(found, spec=builtin.spec).kind == "stride"


def test_locate__a_damaged_entry_of_another_model_does_no_harm(caplog):
    publish_other("other/stride")
    digest = Zoo(cache_storage()).read_index().entries["other/stride"].latest
    (cache_storage().folder / blob_path(digest)).write_text("{}")
    assert locate_predictor("stride", SPEC.identity, name="tiny") is None
    assert "other/stride" in caplog.text
    assert locate_predictor("stride", SPEC.identity, name="other") == "other/stride"


def test_system__overrides_options_of_its_own_predictor_only(tmp_path):
    entries = popularity(tmp_path)
    system = SystemConfig(predictor="popularity", predictor_options={"ahead": 1})
    made, change = source("tiny", entries=entries).load_forecaster(system)
    assert (made.ahead, change) == (1, "")
    made, change = source("tiny").load_forecaster(system, str(entries / "popularity"))
    assert (made.ahead, change) == (None, "")


def test_system__without_an_entry_serves_on_demand_and_says_how_to_train_one(caplog):
    system = SystemConfig(name="some", predictor="token", reuse_predictor="reuse")
    made = load_system_predictors(system, SPEC, ModelConfig(name="nowhere", id="/models/nowhere"))
    assert made == forecasters.SystemPredictors()
    assert caplog.messages == [
        "no trained predictors for nowhere in float32: system some serves on demand (no token) and "
        "evicts by usage counts (no reuse). To train them: moecast train /models/nowhere"
    ]
    load_system_predictors(system, SPEC, ModelConfig(dtype="bfloat16"))
    assert caplog.text.endswith("moecast train qwen2-moe-tiny model.dtype=bfloat16\n")


def test_system__without_an_entry_uses_its_fallback():
    system = SystemConfig(name="ours", predictor="residual", fallback={"skip": {}})
    made, change = source("nowhere", makers={"skip": own_routers}).load_forecaster(system)
    assert (made.kind, change) == ("skip", "forecasts with skip (no residual)")
    assert source("nowhere").load_forecaster(system) == (None, "serves on demand (no residual)")
    # Without routers, from counts.
    made, change = source("nowhere").load_forecaster(load_system("moecast"))
    assert (made.kind, made.least) == ("correlation", 0.3)
    assert change == "forecasts with correlation (no residual)"


def test_system__uses_no_entry_that_does_not_match(tmp_path):
    entries = popularity(tmp_path, num_layers=2, revision="another")
    system = SystemConfig(name="some", predictor="popularity")
    made, change = source("tiny", entries=entries).load_forecaster(system)
    assert made is None
    assert change == f"serves on demand ({entries / 'popularity'} is for revision another)"
    kinds = {"predictor": "popularity", "reuse_predictor": "popularity"}
    ours = SystemConfig(name="ours", fallback={"dependency": {}}, **kinds)
    made, change = source("tiny", entries=entries).load_forecaster(ours)
    assert made.kind == "dependency"
    assert change.startswith("forecasts with dependency (")
    made, change = source("tiny", entries=entries).load_reuse(ours)
    assert made is None
    assert "is for revision another" in change
    with pytest.raises(MismatchError, match="another"):
        source("tiny").load_forecaster(system, str(entries / "popularity"))


def test_kinds_that_need_no_entry__are_made_also_where_one_does_not_match(tmp_path):
    assert isinstance(source("nowhere").load("dependency"), DependencyPredictor)
    assert source("nowhere", makers={"skip": own_routers}).load("skip", {"horizon": 1}).horizon == 1
    (tmp_path / "dependency").mkdir()
    tiny_entry(tmp_path / "dependency", name="tiny/dependency", spec=tiny_spec(revision="another"))
    assert isinstance(source("tiny", entries=tmp_path).load("dependency"), DependencyPredictor)


def test_chosen__is_never_left_out():
    with pytest.raises(ZooError, match=r"nowhere/token.*zoo list shows the entries"):
        source("nowhere").load_forecaster(SystemConfig(), "token")


def test_system__that_fetches_on_no_forecast_gets_none():
    assert source("tiny").load_forecaster(SystemConfig()) == (None, "")
    off = SystemConfig(prefetch=False, predictor="dependency")
    assert source("tiny").load_forecaster(off) == (None, "")


def test_oracle__is_refused_live():
    with pytest.raises(ValueError, match=r"oracle knows the future.*replays.*choose another"):
        source("tiny").load_forecaster(load_system("oracle"))


def test_run__stands_for_its_entries_of_the_kinds_that_the_system_names(tmp_path):
    run = tmp_path / "run"
    popularity(run / "entries")
    (run / "run.json").write_text("{}")
    system = SystemConfig(predictor="popularity")
    for chosen in (run, str(run)):
        loaded = load_system_predictors(system, SPEC, MODEL, chosen=chosen).forecast
        assert loaded.kind == "popularity"
    assert load_system_predictors(system, SPEC, MODEL, entries=run).forecast is not None
    with pytest.raises(PredictorError, match="has no stride.*it has popularity: name one"):
        load_system_predictors(SystemConfig(predictor="stride"), SPEC, MODEL, chosen=run)


def test_run__without_entries_is_refused_unless_a_kind_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "dependency"
    run.mkdir()
    (run / "run.json").write_text("{}")
    with pytest.raises(PredictorError, match="is a run without entries"):
        load_system_predictors(SystemConfig(), SPEC, MODEL, chosen=run)
    chosen = load_system_predictors(SystemConfig(), SPEC, MODEL, chosen="dependency")
    assert isinstance(chosen.forecast, DependencyPredictor)
