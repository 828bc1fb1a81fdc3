"""What a load needs, as a person reads it: a table in the terminal, and a page."""

from typing import Any, Literal

from rich.table import Table

from predictors.units import GIB
from runtime.tools.report.page import Page

COLUMNS = {
    "machine": "hardware",
    "users each": "users_of_a_machine",
    "machines": "machines",
    "budget": "budget_bytes",
    "of experts": "budget_share",
    "memory": "memory_bytes",
    "behind the link": "behind_link_bytes",
    "TPOT": "tpot_seconds",
    "TTFT": "ttft_seconds",
    "hits": "hit_rate",
    "link busy": "link_share",
    "system": "system",
}
NOTE = (
    "Each machine alone, with the smallest budget for experts that gives every user the rate. "
    "Memory: budget, the other weights of the layers, 300 MiB for the process; embeddings and "
    "the caches of the users' contexts come on top. Behind the link: what host memory or the "
    "disk has to hold."
)


def cell(key: str, value: Any) -> str:
    """A value as it is shown."""
    if value is None:
        return "-"
    if key.endswith("_bytes"):
        return f"{value / GIB:.1f} GiB"
    if key.endswith("_seconds"):
        return f"{1000 * value:.1f} ms"
    if key.endswith(("_share", "_rate")):
        return f"{100 * value:.0f} %"
    return str(value)


IN_THE_TERMINAL = ("machine", "machines", "users each", "budget", "TPOT", "TTFT", "hits")


def capacity_table(rows: list[dict[str, Any]]) -> Table:
    """One row for each machine that can."""
    table = Table(title="what each machine needs (simulated)")
    for column in IN_THE_TERMINAL:
        justify: Literal["left", "right"] = "left" if column == "machine" else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for row in rows:
        if "error" not in row:
            table.add_row(*(cell(COLUMNS[name], row[COLUMNS[name]]) for name in IN_THE_TERMINAL))
    return table


def capacity_page(report: dict[str, Any]) -> Page:
    """The same with what it rests on, and the sources of the machines' figures."""
    load = report["load"]
    page = Page(
        f"Capacity: {report['shape']['name']}",
        f"{load['users']} users, {load['tokens_per_second']:g} tokens a second each",
    )
    page.text("What it rests on", [report["rests_on"]])
    fit = [row for row in report["capacity"] if "error" not in row]
    page.table(
        "What each machine needs",
        list(COLUMNS),
        [[cell(key, row[key]) for key in COLUMNS.values()] for row in fit],
        note=NOTE,
        name="capacity",
    )
    unfit = [row for row in report["capacity"] if "error" in row]
    if unfit:
        page.table(
            "Machines that can not",
            ["machine", "why"],
            [[row["hardware"], row["error"]] for row in unfit],
        )
    page.table(
        "Machines", ["machine", "source"], [[m["name"], m["source"]] for m in report["machines"]]
    )
    return page
