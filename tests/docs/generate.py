"""Writes the generated parts of the documentation: `python -m tests.docs.generate`."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.docs.catalogue import render_catalogue
from tests.docs.commands import render_commands
from tests.docs.families import render_families
from tests.docs.metrics import render_metrics, render_predictor_metrics
from tests.docs.pages import DOCS
from tests.docs.systems import render_systems

SECTIONS: Mapping[str, tuple[str, Callable[[], str]]] = {
    "commands": ("commands.md", render_commands),
    "catalogue": ("catalogue.md", render_catalogue),
    "systems": ("systems/index.md", render_systems),
    "predictor-metrics": ("metrics.md", render_predictor_metrics),
    "metrics": ("metrics.md", render_metrics),
    "families": ("families.md", render_families),
}
"""Name of a section, which its marks have, to its page below docs/ and its content."""


def split_page(name: str) -> tuple[Path, str, str, str]:
    """Returns a section's page, and its text before, between and after the section's marks."""
    page, _ = SECTIONS[name]
    path = DOCS / page
    before, begin, rest = path.read_text().partition(f"<!-- {name}: begin -->\n")
    content, end, after = rest.partition(f"<!-- {name}: end -->")
    assert begin, f"{page} has no mark where {name} begins"
    assert end, f"{page} has no mark where {name} ends"
    return path, before + begin, content, end + after


def main() -> None:
    for name, (page, render) in SECTIONS.items():
        path, before, content, after = split_page(name)
        new = render()
        if new != content:
            path.write_text(before + new + after)
            sys.stdout.write(f"docs/{page} is written anew\n")


if __name__ == "__main__":
    main()
