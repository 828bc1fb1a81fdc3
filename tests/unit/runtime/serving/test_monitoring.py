"""The shipped alert rules and dashboard name existing metrics and are what Grafana reads."""

import enum
import json
import re
import types
import typing
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, combinations, product, zip_longest
from typing import Any

import pytest
import yaml

from configs.program import run_program
from runtime.serving.monitoring import ALERTS, FILES, FOLDER, SCRAPING
from runtime.serving.observe.metric_definitions import DEFINITIONS, MetricKind
from runtime.serving.observe.metrics import ServerMetrics
from tests.builders import monitoring
from tests.docs.pages import DOCS

OF_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus adds to what it scrapes."""
HISTOGRAM: dict[str, list[str]] = {"_bucket": ["le"], "_sum": [], "_count": []}
"""The series of a histogram, with the labels that they have of their own."""
COLUMNS = 24
"""Width of Grafana's grid."""


def exposed_labels() -> dict[str, set[str]]:
    """Labels of every series that queries can name."""
    series: dict[str, set[str]] = {"up": set()}
    for metric in DEFINITIONS.values():
        parts = HISTOGRAM if metric.kind is MetricKind.HISTOGRAM else {"": []}
        series |= {metric.name + part: {*metric.labels, *own} for part, own in parts.items()}
    for family in ServerMetrics(model_name="m", max_running=1).registry.collect():
        for sample in family.samples:
            series.setdefault(sample.name, set(sample.labels))
    records = [rule["record"] for rule in monitoring.read_rules() if "record" in rule]
    return series | dict.fromkeys(records, {"model_name", "tier"})


def are_unique(ids: Iterable[Any]) -> bool:
    return max(Counter(ids).values()) == 1


EXPRESSIONS = monitoring.dashboard_expressions("5m") | monitoring.rule_expressions()


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expression__selects_existing_metrics_by_their_labels(name: str) -> None:
    expression, exposed = EXPRESSIONS[name], exposed_labels()
    selectors = list(monitoring.read_selectors(expression))
    assert selectors
    for name, labels in selectors:
        assert set(labels) <= exposed[name] | OF_PROMETHEUS
    known = OF_PROMETHEUS.union(*(exposed[name] for name, _ in selectors))
    assert monitoring.read_grouping(expression) <= known


@pytest.mark.parametrize("name", monitoring.dashboard_variables())
def test_variable__lists_a_label_that_the_panels_select_by(name: str) -> None:
    selector, label = monitoring.dashboard_variables()[name]
    assert label == name
    ((metric, _),) = monitoring.read_selectors(selector)
    assert label in exposed_labels()[metric] | OF_PROMETHEUS
    panels = monitoring.read_dashboard()["panels"]
    targets = [target for panel in panels for target in panel.get("targets", [])]
    assert any(f"${name}" in target["expr"] for target in targets)


def test_rules__have_what_a_person_needs() -> None:
    alerts = [rule for rule in monitoring.read_rules() if "alert" in rule]
    assert are_unique(rule["alert"] for rule in alerts)
    for rule in alerts:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert "$labels.instance" in rule["annotations"]["summary"]
    page = (DOCS / "monitoring.md").read_text()
    assert re.findall(r"^\| `(Moecast\w+)`", page, re.MULTILINE) == [one["alert"] for one in alerts]
    scraping = yaml.safe_load((FOLDER / SCRAPING).read_text())
    assert scraping["rule_files"] == [ALERTS]
    # The alert of a server that does not answer selects the job by its name.
    (job,) = scraping["scrape_configs"]
    assert monitoring.rule_expressions()["MoecastDown"] == f'up{{job="{job["job_name"]}"}} == 0'


def test_dashboard__is_complete_and_has_unique_ids() -> None:
    dashboard = monitoring.read_dashboard()
    assert dashboard["title"]
    assert "id" not in dashboard, "a number of the installation that it was exported from"
    assert 8 <= len(dashboard["uid"]) <= 40
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    source = variables["datasource"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    panels = dashboard["panels"]
    charts = [panel for panel in panels if panel["type"] != "row"]
    assert are_unique(panel["id"] for panel in panels)
    assert are_unique(panel["title"] for panel in charts)
    for one in (*charts, *[one for one in variables.values() if one["type"] == "query"]):
        assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert [panel for panel in panels if panel.get("targets")] == charts
    for panel in charts:
        assert are_unique(target["refId"] for target in panel["targets"])
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_dashboard__panels_are_within_the_grid_and_do_not_overlap() -> None:
    cells = [
        set(product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        for at in (panel["gridPos"] for panel in monitoring.read_dashboard()["panels"])
    ]
    assert all(0 <= x < COLUMNS and y >= 0 for one in cells for x, y in one)
    assert all(not first & second for first, second in combinations(cells, 2))


WIDER: dict[Any, Any] = {float: int | float, typing.Any: object}
"""Annotations of which more is an instance; a panel's options are objects of its type's class."""


def find_misfits(value: Any, annotation: Any, path: str) -> Iterator[str]:
    """Yields the paths of what does not fit the annotations of Grafana's classes."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        found = [list(find_misfits(value, option, path)) for option in arguments]
        yield from [] if [] in found else chain(*found)
    elif origin in (list, dict) and isinstance(value, origin):
        for key, item in value.items() if origin is dict else enumerate(value):
            yield from find_misfits(item, arguments[-1], f"{path}[{key!r}]")
    elif origin is typing.Literal or (origin is None and issubclass(annotation, enum.Enum)):
        allowed = arguments or [member.value for member in annotation]
        yield from [] if value in allowed else [f"{path}={value!r}: not one of {allowed}"]
    elif not isinstance(value, WIDER.get(annotation, origin or annotation)):
        yield f"{path}={value!r}: not {annotation}"
    else:
        for name, kind in typing.get_type_hints(type(value)).items():
            yield from find_misfits(getattr(value, name), kind, f"{path}.{name}")


def restrict(kept: Any, given: Any) -> Any:
    """Returns what Grafana's classes have kept of all that was given, without their defaults."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return {key: restrict(kept.get(key), value) for key, value in given.items()}
    if isinstance(given, list) and isinstance(kept, list):
        return [restrict(*pair) for pair in zip_longest(kept, given)]
    return kept


def test_dashboard__fits_grafanas_schema() -> None:
    """Grafana publishes its schemas as classes that are generated from them."""
    pytest.importorskip("grafana_foundation_sdk", reason="pip install 'moecast[dev]'")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    given = monitoring.read_dashboard()
    parsed = Dashboard.from_json(given)
    assert list(find_misfits(parsed, Dashboard, "dashboard")) == []
    assert restrict(json.loads(json.dumps(parsed, cls=JSONEncoder)), given) == given


def test_monitor__writes_the_files_once(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_program("runtime", ["monitor"]) == 0
    folder = tmp_path / "monitoring"
    shipped = {name: (FOLDER / name).read_bytes() for name in FILES}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == shipped
    assert "prometheus --config.file=monitoring/prometheus.yml" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"monitoring"}
    (folder / ALERTS).write_text("changed")
    (folder / SCRAPING).unlink()
    assert run_program("runtime", ["monitor"]) == 2
    assert "alerts.yml exists" in capsys.readouterr().err
    assert (folder / ALERTS).read_text() == "changed"
