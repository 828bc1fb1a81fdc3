"""Figures of systems before and after they followed their papers more closely."""

from benchmarks.tables.evaluation import read_evaluation
from benchmarks.tables.markdown import format_figure, markdown_table, read_document
from benchmarks.tables.origins import origin_line
from train.evaluate.table import describe_sample

BASELINE = "on-demand"

Figures = dict[tuple[str, str, str], float]
"""Median TPOT in ms by machine, budget and system."""


def changes_table() -> list[str]:
    """Returns median TPOT and speed-up of each system, earlier and now, for each machine."""
    earlier, report = read_document("earlier"), read_evaluation()
    if earlier is None or report is None:
        return []
    before: Figures = {
        (row["hardware"], row["budget"], row["system"]): row["tpot_ms"] for row in earlier["rows"]
    }
    current = [row for row in report["rows"] if row["batch"] == 1]
    now: Figures = {
        (row["hardware"], row["budget"], row["system"]): row["tpot_ms"] for row in current
    }
    machines = dict.fromkeys(machine for machine, _, _ in before)
    budgets = list(dict.fromkeys(budget for _, budget, _ in before))
    systems = dict.fromkeys(system for _, _, system in before)
    lines = []
    for machine in machines:
        rows = [
            [
                f"`{system}`",
                *(format_change(before, now, (machine, budget, system)) for budget in budgets),
            ]
            for system in systems
        ]
        lines += [f"On {machine}:", "", *markdown_table(["system", *budgets], rows), ""]
    return [
        "Median TPOT in ms at batch 1, earlier → now, and in brackets how many times faster than "
        f"`{BASELINE}` that is. Earlier: {describe_sample([earlier])}; now: "
        f"{describe_sample(current)}.",
        "",
        *lines,
        "Earlier:",
        "",
        *origin_line("earlier"),
        "Now:",
        "",
        *origin_line("evaluate"),
    ]


def format_change(before: Figures, now: Figures, place: tuple[str, str, str]) -> str:
    """Returns `20.0 → 10.0 (1.50x → 3.00x)`, with a dash for what was not measured."""
    base = (*place[:2], BASELINE)
    times = " → ".join(format_figure(figures.get(place), 1) for figures in (before, now))
    ratios = " → ".join(
        format_figure(figures[base] / figures[place] if place in figures else None, 2, "x")
        for figures in (before, now)
    )
    return f"{times} ({ratios})"
