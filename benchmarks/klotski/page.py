"""The results as a page: the paper's figures 12, 14 and 15 and its table 3, from this machine."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from predictors.units import MIB
from runtime.tools.report.page import Page, slug

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
ABLATION = ("simple pipeline", "+ multi batches", "+ only hot experts", "+ order (klotski)")


def page_of(results: Row) -> Page:
    """Tables of everything, and a figure for each of the paper's."""
    rows = [row for row in results["live"] if not row.get("failed")]
    page = Page("Batches in groups", f"klotski on {results['model']}, {results['budget']} budget")
    page.table("Arms", *arms_table(rows), note=ARMS_NOTE)
    by_name = {row["name"]: row for row in rows}
    add_groups(page, "figure-14", "Tokens a second against n", grid(rows))
    ablation = [by_name[name] for name in ABLATION if name in by_name]
    add_bars(page, ablation)
    shown = [by_name[name] for name in (ABLATION[0], ABLATION[-1]) if name in by_name]
    add_memory(page, shown)
    for row in shown:
        add_timeline(page, row)
    for environment in dict.fromkeys(cell["environment"] for cell in results["simulated"] or ()):
        cells = [cell for cell in results["simulated"] if cell["environment"] == environment]
        klotski = [(c["batch"], c["n"], c["tokens_per_second"]) for c in cells
                   if c["system"] == "klotski"]  # fmt: skip
        name = f"simulated-{slug(environment)}"
        add_groups(page, name, f"Simulated: {environment}", klotski)
    return page


ARMS_NOTE = (
    "Link: share of the steady state's time in which bytes move; compute: in which the computation "
    "does not wait for them; idle: neither. Reads: of one expert within one step of the group, at "
    "most. Beside: peak memory less weights and budget."
)


def arms_table(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """One line an arm."""
    columns = [
        "arm", "batch", "n", "tokens/s", "link", "compute", "idle", "reads", "GiB read",
        "beside MiB",
    ]  # fmt: skip
    return columns, [
        [
            row["name"],
            row["batch_size"],
            row["n"],
            round(row["tokens_per_second"], 2),
            round(row["steady"]["link"], 3),
            round(row["steady"]["compute"], 3),
            round(row["steady"]["both_idle"], 3),
            row["reads_per_step"]["most"],
            round(row["bytes_moved"] / 2**30, 2),
            round(beside(row) / MIB),
        ]
        for row in rows
    ]


def beside(row: Row) -> int:
    """Peak memory less weights and budget."""
    return row["peak_memory_bytes"] - row["weights_bytes"] - row["arena_bytes"]


def grid(rows: Sequence[Row]) -> list[tuple[int, int, float]]:
    """`(batch size, n, tokens a second)` of klotski's arms with caches in memory."""
    return sorted(
        (row["batch_size"], row["n"], row["tokens_per_second"])
        for row in rows
        if row["arm"] == "klotski" and row["kv_budget"] is None
    )


def add_groups(
    page: Page, name: str, heading: str, points: Sequence[tuple[int, int, float]]
) -> None:
    """A line for each batch size (figure 14)."""
    if not points:
        return

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for batch in dict.fromkeys(batch for batch, _, _ in points):
            line = [(n, speed) for one, n, speed in points if one == batch]
            axes.plot(*zip(*line, strict=True), marker="o", label=f"batch {batch}")
        axes.set_xlabel("n, batches of a group")
        axes.set_ylabel("tokens/s")
        axes.set_ylim(bottom=0)
        axes.legend()

    page.figure(name, heading, draw, ["batch", "n", "tokens/s"], [list(one) for one in points])


def add_bars(page: Page, rows: Sequence[Row]) -> None:
    """Table 3."""
    if not rows:
        return
    names = [row["name"] for row in rows]
    speeds = [row["tokens_per_second"] for row in rows]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.bar(names, speeds)
        axes.set_ylabel("tokens/s")

    page.figure(
        "table-3",
        "What each step adds",
        draw,
        ["step", "tokens/s"],
        [list(one) for one in zip(names, speeds, strict=True)],
    )


def add_memory(page: Page, rows: Sequence[Row]) -> None:
    """Figure 12: the process, and experts in the arena, over time."""
    if not rows:
        return

    def draw(figure: "Figure") -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        for row in rows:
            seconds = [at for at, _, _ in row["memory"]]
            above.plot(seconds, [size / MIB for _, size, _ in row["memory"]], label=row["name"])
            below.plot(seconds, [held for _, _, held in row["memory"]], label=row["name"])
        for row in rows[-1:]:
            limit = (row["weights_bytes"] + row["arena_bytes"]) / MIB
            above.axhline(limit, linestyle="--", color="C7", label="weights and budget")
        above.set_ylabel("resident, MiB")
        above.set_ylim(bottom=0)
        above.legend()
        below.set_ylabel("experts held")
        below.set_xlabel("seconds")

    page.figure(
        "figure-12",
        "Memory over time",
        draw,
        ["arm", "seconds", "resident bytes", "experts held"],
        [[row["name"], *sample] for row in rows for sample in row["memory"]],
        inches=(8.0, 5.0),
    )


LANES: dict[str, str] = {
    "transfers": "C0",
    "experts": "C2",
    "other layers": "C3",
    "stalls": "C7",
}


def add_timeline(page: Page, row: Row) -> None:
    """Figure 15: two layers of one step, what is busy when."""
    found = row["timeline"]
    if not found:
        return

    def lanes() -> Callable[["Figure"], None]:
        def draw(figure: "Figure") -> None:
            axes = figure.subplots()
            for place, (lane, colour) in enumerate(LANES.items()):
                spans = [(begin, end - begin) for begin, end in found[lane]]
                axes.broken_barh(spans, (place - 0.4, 0.8), facecolors=colour)
            axes.set_yticks(range(len(LANES)), list(LANES))
            axes.set_xlabel("ms")

        return draw

    name = f"figure-15-{slug(row['name'])}"
    page.figure(
        name,
        f"Layers {found['layers'][0]} and {found['layers'][1]} of one step: {row['name']}",
        lanes(),
        ["lane", "from ms", "to ms"],
        [[lane, *span] for lane in LANES for span in found[lane]],
    )
