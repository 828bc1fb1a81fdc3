"""The expressions of the shipped alert rules and dashboard."""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from runtime.serving.monitoring import ALERTS, DASHBOARD, FOLDER


def read_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / ALERTS).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def read_dashboard() -> dict[str, Any]:
    return json.loads((FOLDER / DASHBOARD).read_text())


def dashboard_expressions(window: str) -> dict[str, str]:
    """By panel and target; `window` replaces Grafana's interval, and all models are chosen."""
    expressions = {}
    for panel in read_dashboard()["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", window)
            text = re.sub(r"\$(model_name|instance)", ".*", text)
            expressions[f"{panel['title']} {target['refId']}"] = text
    return expressions


def dashboard_variables() -> dict[str, tuple[str, str]]:
    """Selector and label of each variable that is a query of label values."""
    found = {}
    for variable in read_dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            query = variable["query"]["query"].replace("$model_name", ".*")
            found[variable["name"]] = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()
    return found


def rule_expressions() -> dict[str, str]:
    return {rule.get("alert") or rule["record"]: rule["expr"] for rule in read_rules()}


GROUPING = re.compile(r"\b(?:by|without|on|group_left) ?\(([^)]*)\)")
SELECTOR = re.compile(r"(?<!\w)([a-zA-Z_:][\w:]*)\b(?!\s*\()(?:\{([^}]*)\})?")


def read_selectors(expression: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each metric of an expression with the names of the labels that it is selected by."""
    for name, selector in SELECTOR.findall(re.sub(r"\[[^\]]*\]", "", GROUPING.sub("", expression))):
        yield name, re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)


def read_grouping(expression: str) -> set[str]:
    """Returns the labels that an expression aggregates or matches by."""
    return set(re.findall(r"\w+", " ".join(GROUPING.findall(expression))))
