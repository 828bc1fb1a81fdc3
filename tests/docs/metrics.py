"""Writes the metrics from their definitions."""

from predictors.metrics import DEFINITIONS
from runtime.serving.observe.metric_definitions import EXPERT_METRICS, REQUEST_METRICS

COMMON = ("model_name", "engine")
"""Labels of nearly all metrics, named once above the lists."""


def render_predictor_metrics() -> str:
    """Returns a table of the metrics of predictors."""
    rows = [f"| `{name}` | {capitalize(meaning)}. |" for name, meaning in DEFINITIONS.items()]
    return "\n".join(["| metric | meaning |", "|---|---|", *rows]) + "\n"


def render_metrics() -> str:
    """Returns a list of the requests' metrics and one of the experts'."""
    lines: list[str] = []
    for heading, metrics in (("Requests", REQUEST_METRICS), ("Experts", EXPERT_METRICS)):
        lines += [f"### {heading}", ""]
        lines += [*map(write_row, metrics), ""]
    return "\n".join(lines)


def write_row(metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels if label not in COMMON)
    by = f" By {labels}." if labels else ""
    return f"* `{metric.name}` ({metric.kind}): {metric.help}{by}"


def capitalize(text: str) -> str:
    return (text[0].upper() + text[1:]).replace("|", "\\|")
