"""The figures of the comparison; each is a function that draws, and the rows that it draws from.

They show what the papers show: promoe figure 10 (latency against cache rate), 12 (ablation), 14
(prefetch distance), fmoe 9 and 10 (distribution), klotski 10 (batch sizes).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from train.evaluate.cells import TRUTH, WITHOUT
from train.evaluate.lines import looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
PANEL_INCHES = 4.0
LEGEND_INCHES = 1.0
"""Below the panels."""


@dataclass(frozen=True)
class Drawing:
    """What `Page.figure` takes."""

    name: str
    heading: str
    draw: Callable[["Figure"], None]
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    note: str
    inches: tuple[float, float]


def by_system(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["system"], []).append(row)
    return found


def share(budget: str) -> float | None:
    """A budget as a number for an axis, where it is a share."""
    return float(budget[:-1]) if budget.endswith("%") else None


def machines(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["hardware"] for row in rows))


def chosen(rows: Sequence[Row], keys: Sequence[str]) -> list[tuple[Any, ...]]:
    return [tuple(row[key] for key in keys) for row in rows]


def legend(figure: "Figure", axes: "Axes", columns: int = 4) -> None:
    """One legend for all panels, below them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def wide(panels: int, *, rows: int = 1) -> tuple[float, float]:
    """Size of a figure with so many panels side by side."""
    return (max(8.0, PANEL_INCHES * panels), 3.2 * rows + LEGEND_INCHES)


def against_budget(results: Row, batch: int) -> Drawing:
    """ProMoE figure 10: decode above, prefill below, a column for each machine."""
    rows = [row for row in results["rows"] if row["batch"] == batch]
    names = machines(rows)
    columns = ("hardware", "budget", "system", "tpot_ms", "ttft_ms")

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(2, len(names), squeeze=False, sharex=True)
        styles = styled(results)
        for place, machine in enumerate(names):
            here = [row for row in rows if row["hardware"] == machine]
            for axes, key in ((grid[0][place], "tpot_ms"), (grid[1][place], "ttft_ms")):
                budgets = list(dict.fromkeys(row["budget"] for row in here))
                ticks = axis_of(budgets)
                for system, own in by_system(here).items():
                    axes.plot(
                        [ticks[row["budget"]] for row in own],
                        [row[key] for row in own],
                        label=system,
                        **styles[system].settings(),
                    )
                axes.set_yscale("log")
                plain_numbers(axes)
                axes.set_xticks(list(ticks.values()), budgets)
            grid[0][place].set_title(f"{machine}: decode")
            grid[1][place].set_title(f"{machine}: prefill")
            grid[1][place].set_xlabel("memory for experts")
        grid[0][0].set_ylabel("TPOT, ms")
        grid[1][0].set_ylabel("TTFT, ms")
        legend(figure, grid[0][0])

    return Drawing(
        "latency-against-cache-rate",
        "Latency against cache rate",
        draw,
        columns,
        chosen(rows, columns),
        f"Medians, batch {batch}; as promoe figure 10. The vertical axes are logarithmic.",
        (wide(len(names))[0], 7.6),
    )


def axis_of(budgets: Sequence[str]) -> dict[str, float]:
    """Where each budget stands: shares by their size, sizes one after another."""
    shares = {budget: share(budget) for budget in budgets}
    if None in shares.values():
        return {budget: float(place) for place, budget in enumerate(budgets)}
    return {budget: value for budget, value in shares.items() if value is not None}


def plain_numbers(axes: "Axes") -> None:
    """12 rather than 1.2 x 10^1 on a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def styled(results: Row) -> Mapping[str, Any]:
    """The looks of the table's systems."""
    systems = list(dict.fromkeys(row["system"] for row in results["rows"]))
    return looks(
        systems,
        ours=results["ours"],
        subject=results["ablated"],
        baseline=results["baseline"],
        bound=results["bound"],
    )


def ablation(results: Row, subject: str) -> Drawing:
    """ProMoE figure 12: the techniques added one after another, as speed-ups over none of them."""
    rows = results["ablation"]
    names = machines(rows)
    stages = list(dict.fromkeys(row["system"] for row in rows))
    values = []
    for machine in names:
        here = {row["system"]: row for row in rows if row["hardware"] == machine}
        base = here[stages[0]]
        for stage in stages:
            row = here[stage]
            decode, prefill = (
                base[key] / row[key] if row[key] and base[key] else None
                for key in ("tpot_ms", "ttft_ms")
            )
            values.append((machine, stage, row["tpot_ms"], row["ttft_ms"], decode, prefill))

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(1, 2, squeeze=False, sharey=True)
        width = 0.8 / len(names)
        for axes, column, title in ((grid[0][0], 5, "prefill"), (grid[0][1], 4, "decode")):
            for place, machine in enumerate(names):
                heights = [one[column] or 0.0 for one in values if one[0] == machine]
                left = [i + (place - (len(names) - 1) / 2) * width for i in range(len(stages))]
                bars = axes.bar(left, heights, width * 0.92, label=machine, color=f"C{place}")
                axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
            axes.axhline(1.0, linewidth=1.0, color="C7", linestyle=":")
            axes.set_title(title)
            axes.set_xticks(range(len(stages)), [broken(one) for one in stages], fontsize=8.5)
            axes.grid(visible=False, axis="x")
        grid[0][0].set_ylabel("speed-up over base")
        legend(figure, grid[0][0])

    columns = ("hardware", "stage", "tpot_ms", "ttft_ms", "speedup_decode", "speedup_prefill")
    place = f"budget {rows[0]['budget']}, batch {rows[0]['batch']}"
    return Drawing(
        "ablation",
        f"Ablation of {subject}",
        draw,
        columns,
        values,
        f"{place}. Base: LRU without prefetching; then each technique is added to those before it, "
        "as in promoe figure 12.",
        (9.5, 4.4),
    )


def broken(stage: str) -> str:
    """`+ early preemption` on two lines: beside its neighbours it has no room for one."""
    first, _, last = stage.rpartition(" ")
    return f"{first}\n{last}" if " " in first else stage


def against_batch(results: Row, budget: str) -> Drawing:
    """Tokens a second against the number of requests that decode together."""
    rows = [row for row in results["rows"] if row["budget"] == budget]
    names = machines(rows)
    columns = ("hardware", "batch", "system", "tokens_per_second", "tpot_ms")

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(1, len(names), squeeze=False)
        styles = styled(results)
        for axes, machine in zip(grid[0], names, strict=True):
            here = [row for row in rows if row["hardware"] == machine]
            batches = sorted({row["batch"] for row in here})
            for system, own in by_system(here).items():
                axes.plot(
                    [batches.index(row["batch"]) for row in own],
                    [row["tokens_per_second"] for row in own],
                    label=system,
                    **styles[system].settings(),
                )
            axes.set_xticks(range(len(batches)), [str(one) for one in batches])
            axes.set_yscale("log")
            plain_numbers(axes)
            axes.set_title(machine)
            axes.set_xlabel("requests that decode together")
        grid[0][0].set_ylabel("generated tokens a second")
        legend(figure, grid[0][0])

    return Drawing(
        "batch-size",
        "Batch size",
        draw,
        columns,
        chosen(rows, columns),
        f"Budget {budget}; the vertical axes are logarithmic.",
        (wide(len(names))[0], 5.0),
    )


def against_distance(results: Row, subject: str) -> Drawing:
    """TPOT of one system when it forecasts so many layers ahead, and no other."""
    rows = results["distance"]
    names = machines(rows)
    columns = ("hardware", "system", "distance", "tpot_ms", "hit_rate", "stall_share")

    def draw(figure: "Figure") -> None:
        from runtime.tools.report.drawing import ink, muted

        grid = figure.subplots(1, len(names), squeeze=False)
        for axes, machine in zip(grid[0], names, strict=True):
            here = [row for row in rows if row["hardware"] == machine]
            lines = by_system(here)
            (without,) = lines.pop(WITHOUT)
            for place, (label, own) in enumerate(lines.items()):
                axes.plot(
                    [row["distance"] for row in own],
                    [row["tpot_ms"] for row in own],
                    label="the routing itself" if label == TRUTH else label,
                    color=ink() if label == TRUTH else f"C{place - 1}",
                    linestyle=":" if label == TRUTH else "-",
                    marker=".os^D"[place % 5],
                )
            axes.axhline(without["tpot_ms"], color=muted(), linewidth=1.2, label=WITHOUT)
            axes.set_title(machine)
            axes.set_xlabel("layers ahead")
            axes.set_ylim(bottom=0)
            axes.xaxis.get_major_locator().set_params(integer=True)
        grid[0][0].set_ylabel("TPOT, ms")
        legend(figure, grid[0][0], columns=5)

    place = f"budget {rows[0]['budget']}, batch {rows[0]['batch']}"
    return Drawing(
        "prefetch-distance",
        "Prefetch distance",
        draw,
        columns,
        chosen(rows, columns),
        f"{subject} with forecasts of one distance alone; {place}. `mlp, stride`: the paper's "
        "networks, one and two layers ahead. The routing itself: what a perfect forecast of that "
        "distance gives.",
        (wide(len(names))[0], 4.2),
    )


def distribution(results: Row, cells: Sequence[Row], budget: str, batch: int) -> Drawing:
    """The distribution of a decode step's time, each machine its own axis."""
    rows = [
        row
        for row in cells
        if (row["part"], row["budget"], row["batch"]) == ("table", budget, batch)
        and row["tpot_percentiles_ms"]
    ]
    names = machines(rows)
    values = [
        (row["hardware"], row["system"], percent, value)
        for row in rows
        for percent, value in enumerate(row["tpot_percentiles_ms"])
    ]

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(1, len(names), squeeze=False)
        styles = styled(results)
        for axes, machine in zip(grid[0], names, strict=True):
            for row in rows:
                if row["hardware"] == machine:
                    points = row["tpot_percentiles_ms"]
                    settings = {**styles[row["system"]].settings(), "marker": None}
                    axes.plot(points, range(len(points)), label=row["system"], **settings)
            axes.set_title(machine)
            axes.set_xlabel("time of a token, ms")
            axes.set_xlim(left=0)
        grid[0][0].set_ylabel("percent of tokens")
        legend(figure, grid[0][0])

    return Drawing(
        "latency-cdf",
        "Distribution of latency",
        draw,
        ("hardware", "system", "percent", "tpot_ms"),
        values,
        f"Budget {budget}, batch {batch}: share of decode steps that take no longer.",
        (wide(len(names))[0], 5.0),
    )
