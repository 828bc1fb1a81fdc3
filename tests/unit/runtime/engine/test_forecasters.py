"""From what a system names to what it forecasts with."""

import numpy as np
import pytest

from predictors.baselines import DependencyPredictor, PopularityPredictor, SkipPredictor
from runtime.config import SystemConfig
from runtime.engine.forecasters import (
    load_forecaster,
    load_reuse_predictor,
    load_system_predictor,
    locate_predictor,
)
from tests.builders.entries import tiny_entry, tiny_spec
from zoo.catalog import WritableZoo
from zoo.entry import open_entry, write_entry
from zoo.errors import MismatchError, ZooError
from zoo.index import blob_path
from zoo.locations import cache_storage

SPEC = tiny_spec()


def popularity(folder, **changes):
    """An entry of a predictor that forecasts all layers when a step begins."""
    spec = tiny_spec(**changes)
    made = PopularityPredictor(spec, np.full((2, 8), 0.25, np.float32))
    write_entry(
        folder / "popularity",
        name="tiny/popularity",
        kind=made.kind,
        options=made.options(),
        spec=spec,
        signals=made.signals,
        files=made.files(),
        metrics={"held_out": {}},
        trace_digest=None,
        parity={},
    )
    return folder


def publish(folder, name, **changes):
    """Puts an entry into the user's zoo."""
    tiny_entry(folder / name, name=name, spec=tiny_spec(**changes))
    WritableZoo(cache_storage()).add(open_entry(folder / name))


def test_locate__of_a_kind_is_the_models_entry(tmp_path):
    publish(tmp_path, "tiny/stride")
    publish(tmp_path, "other/stride", revision="another")
    publish(tmp_path, "tiny/mlp", revision="another")
    own = SPEC.identity
    assert locate_predictor("stride", own, name="Tiny") == "tiny/stride"
    assert locate_predictor("stride", own, name="renamed") == "tiny/stride"
    assert locate_predictor("mlp", own, name="renamed") is None
    assert locate_predictor("mlp", own, name="tiny") == "tiny/mlp", "loading it says what differs"
    assert locate_predictor("other/stride", own, name="tiny") == "other/stride"
    assert locate_predictor(tmp_path, own, name="tiny") == tmp_path
    (tmp_path / "stride").mkdir()
    found = locate_predictor("stride", own, name="tiny", entries=tmp_path)
    assert found == tmp_path / "stride"


def test_locate__a_damaged_entry_of_another_model_does_no_harm(tmp_path, caplog):
    publish(tmp_path, "other/stride", revision="another")
    zoo = WritableZoo(cache_storage())
    digest = zoo.read_index().entries["other/stride"].latest
    (zoo.storage.folder / blob_path(digest)).write_text("{}")
    assert locate_predictor("stride", SPEC.identity, name="tiny") is None
    assert "other/stride" in caplog.text
    assert locate_predictor("stride", SPEC.identity, name="other") == "other/stride"


def test_system__overrides_options_of_its_own_predictor_only(tmp_path):
    entries = popularity(tmp_path)
    system = SystemConfig(predictor="popularity", predictor_options={"ahead": 1})
    made = load_system_predictor(system, SPEC, name="tiny", entries=entries)
    assert made.ahead == 1
    chosen = str(entries / "popularity")
    assert load_system_predictor(system, SPEC, name="tiny", chosen=chosen).ahead is None


def test_system__without_an_entry_serves_on_demand_and_says_so(caplog):
    system = SystemConfig(name="some", predictor="token", reuse_predictor="reuse")
    assert load_system_predictor(system, SPEC, name="nowhere") is None
    assert load_reuse_predictor(system, SPEC, name="nowhere") is None
    said = [record.getMessage() for record in caplog.records]
    assert "some serves on demand: there is no zoo entry nowhere/token" in said[0]
    assert "some evicts by usage counts: there is no zoo entry nowhere/reuse" in said[1]


def test_system__without_an_entry_uses_its_fallback_and_warns(caplog):
    def own_routers(given):
        return SkipPredictor(routers_LED=np.zeros((2, 8, 4), np.float32), **given)

    system = SystemConfig(name="ours", predictor="residual", fallback="skip")
    makers = {"skip": own_routers}
    made = load_system_predictor(system, SPEC, name="nowhere", makers=makers)
    assert made.kind == "skip"
    assert "ours forecasts with skip: there is no zoo entry nowhere/residual" in caplog.text
    caplog.clear()
    assert load_system_predictor(system, SPEC, name="nowhere") is None
    assert "ours serves on demand" in caplog.text


def test_system__serves_on_demand_if_the_entry_does_not_match(tmp_path, caplog):
    entries = popularity(tmp_path, num_layers=2, revision="another")
    system = SystemConfig(name="some", predictor="popularity")
    assert load_system_predictor(system, SPEC, name="tiny", entries=entries) is None
    assert "some serves on demand" in caplog.text
    assert "another" in caplog.text
    caplog.clear()
    ours = SystemConfig(
        name="ours", predictor="popularity", fallback="dependency", reuse_predictor="popularity"
    )
    made = load_system_predictor(ours, SPEC, name="tiny", entries=entries)
    assert made.kind == "dependency"
    assert load_reuse_predictor(ours, SPEC, name="tiny", entries=entries) is None
    said = [record.getMessage() for record in caplog.records]
    assert "ours forecasts with dependency: the zoo entry tiny/popularity" in said[0]
    assert "ours evicts by usage counts: the zoo entry tiny/popularity" in said[1]
    chosen = str(entries / "popularity")
    with pytest.raises(MismatchError, match="another"):
        load_system_predictor(system, SPEC, name="tiny", chosen=chosen)


def test_chosen__is_never_left_out():
    with pytest.raises(ZooError, match="nowhere/token"):
        load_system_predictor(SystemConfig(), SPEC, name="nowhere", chosen="token")


def test_kinds_that_need_no_entry__are_made():
    assert isinstance(load_forecaster("dependency", SPEC, name="nowhere"), DependencyPredictor)

    def own_routers(given):
        return SkipPredictor(routers_LED=np.zeros((2, 8, 4), np.float32), **given)

    options = {"horizon": 1}
    made = load_forecaster(
        "skip", SPEC, name="nowhere", options=options, makers={"skip": own_routers}
    )
    assert made.horizon == 1


def test_system__that_fetches_on_no_forecast_gets_none():
    assert load_system_predictor(SystemConfig(), SPEC, name="tiny") is None
    off = SystemConfig(prefetch=False, predictor="dependency")
    assert load_system_predictor(off, SPEC, name="tiny") is None


def test_oracle__is_refused_live():
    with pytest.raises(ValueError, match=r"bound knows the future.*replays.*choose another"):
        load_system_predictor(SystemConfig(name="bound", predictor="oracle"), SPEC, name="tiny")
