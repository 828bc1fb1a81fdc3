"""Writes the table of systems and their switches from `configs/system/`."""

from typing import Any

from runtime.config import SystemConfig
from runtime.presets import choice_names, load_system

SHOWN_APART = ("name", "predictor", "eviction", "prefetch")


def render_systems() -> str:
    """Returns a row for each system: predictor, eviction and switches that are not the default."""
    default = SystemConfig()
    lines = ["| system | fetches | evicts | other options |", "|---|---|---|---|"]
    for name in choice_names("system"):
        system = load_system(name)
        others = [
            f"`{option}={write_value(value)}`"
            for option, value in vars(system).items()
            if value != getattr(default, option) and option not in SHOWN_APART
        ]
        fetched = f"`{system.predictor}`" if system.prefetch else "on demand"
        lines.append(f"| `{name}` | {fetched} | `{system.eviction}` | {', '.join(others)} |")
    return "\n".join(lines) + "\n"


def write_value(value: Any) -> str:
    """Returns a value as a user writes it after `=`."""
    if isinstance(value, dict):
        inside = ", ".join(f"{key}: {write_value(item)}" for key, item in value.items())
        return f"{{{inside}}}"
    if isinstance(value, bool) or value is None:
        return str(value).lower().replace("none", "null")
    return str(value)
