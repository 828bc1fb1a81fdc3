"""Systems: simulated, live, beside other programs, beside the papers; the simulator beside live."""

from typing import Any

from benchmarks.peers.table import markdown as peers_table
from benchmarks.tables.markdown import figure, percent, result, table

SHORT = ("on-demand", "promoe", "moecast", "oracle")


def replayed(*, batch: int = 1, every: bool = False) -> list[str]:
    """TPOT of the systems on simulated machines."""
    found = result("evaluate")
    if found is None:
        return []
    rows: list[dict[str, Any]] = [row for row in found["rows"] if row["batch"] == batch]
    cells = list(dict.fromkeys((row["hardware"], row["budget"]) for row in rows))
    names = list(dict.fromkeys(row["system"] for row in rows))
    shown = names if every else [one for one in names if one in SHORT]
    by = {(row["hardware"], row["budget"], row["system"]): row for row in rows}
    winners = {
        (one["hardware"], one["budget"]): one for one in found["winners"] if one["batch"] == batch
    }
    lines = []
    for hardware, budget in cells:
        line = [hardware, budget]
        for name in shown:
            row = by.get((hardware, budget, name))
            line.append("-" if row is None else tpot(row["tpot_ms"], row["speedup_decode"]))
        won = winners[hardware, budget]
        line += [f"`{won['first']}`", percent(won["share_of_bound"])]
        lines.append(line)
    tally = found["tally"]
    behind = tally["worst_behind_first"]
    distance = (
        f"a token takes at least {-100 * behind:.1f} % less than the second's"
        if behind < 0
        else f"at worst {100 * behind:.1f} % behind the first"
    )
    shape, new_tokens = found["shape"]["name"], found["new_tokens"]
    return [
        f"Simulated decode, batch {batch}: held-out requests of the reference model replayed with "
        f"the bytes and the compute of {shape} ({new_tokens} generated tokens; median ms "
        "a token, and times faster than `on-demand`):",
        "",
        *table(["machine", "budget", *shown, "first", "`moecast` of the bound"], lines),
        "",
        f"Of {tally['cells']} cells (machines, budgets, batch sizes), with every system of the "
        f"five papers in each, `moecast` is first in {tally['first']}: {distance}.",
        "",
    ]


def tpot(milliseconds: float, speed_up: float | None) -> str:
    return f"{milliseconds:.1f} ms" + ("" if speed_up is None else f" ({speed_up:.2f}x)")


def live(*, every: bool = False) -> list[str]:
    """The same live on this machine; runs of different days are rows of their own."""
    reports = [one for one in (result("bench"), result("bench-10-75")) if one is not None]
    rows = [row for one in reports for row in one["rows"] if row["batch"] == 1]
    if not rows:
        return []
    names = list(dict.fromkeys(row["system"] for row in rows))
    shown = names if every else [one for one in SHORT if one in names]
    by = {(row["budget"], row["system"]): row for row in rows}
    budgets = sorted({row["budget"] for row in rows}, key=lambda one: float(one.rstrip("%")))
    lines = []
    for budget in budgets:
        line = [budget]
        for name in shown:
            row = by.get((budget, name), {"failed": True})
            if row.get("failed"):
                line.append("-")
            else:
                text = tpot(1e3 * row["tpot_seconds"], row.get("tpot_speed_up"))
                line.append(f"{text}, hits {percent(row.get('decode_hit_rate'))}")
        lines.append(line)
    machine = reports[0]["machine"]["hardware"]
    return [
        "Live decode of the reference model inflated to 2 GiB of experts (2.9 MiB each), read from "
        f"the disk past the page cache on {machine['cores']} cores of {machine['processor']} "
        f"(TPOT, times faster than `on-demand`): {reports[0]['compared']}. The bound is simulated; "
        "all tokens are those of plain Transformers:",
        "",
        *table(["budget", *shown], lines),
        "",
    ]


def validated() -> list[str]:
    """Simulated beside live."""
    found = result("validate")
    if found is None:
        return []
    rows = [
        [
            row["budget"],
            row["system"],
            figure(1e3 * row["live"]["tpot_seconds"], 1, " ms"),
            figure(1e3 * row["simulated"]["tpot_seconds"], 1, " ms"),
            figure(row["tpot_ratio"], 2),
            figure(100 * row["live"]["hit_rate"], 1, " %"),
            figure(100 * row["simulated"]["hit_rate"], 1, " %"),
        ]
        for row in found["rows"]
    ]
    columns = ["budget", "system", "TPOT live", "simulated", "ratio", "hits live", "simulated"]
    return [
        "The simulator beside live runs of the same steps on the same machine:",
        "",
        *table(columns, rows),
        "",
        f"{found['tpot_within']} of {len(rows)} within 10 % of the time, {found['hits_within']} "
        "within a point of the hit rate.",
        "",
    ]


def peers() -> list[str]:
    """Other programs on the same weights, prompts and memory."""
    found = result("peers")
    if found is None:
        return []
    return [
        "Other programs with the same weights (float32), prompts and memory, in turns, each in an "
        "environment of its own:",
        "",
        *peers_table(found).rstrip().splitlines(),
        "",
    ]


def papers() -> list[str]:
    """What the papers claim beside what replays give."""
    found = result("papers")
    if found is None:
        return []
    rows = [
        [
            one["paper"],
            one["where"],
            one["what"],
            figure(one["paper_value"], 2),
            figure(one["ours"], 2),
            one["reason"] or "",
        ]
        for one in found["claims"]
    ]
    columns = ["paper", "where", "what", "paper", "ours", "why they differ"]
    return ["What the papers claim, beside replays with their machines and models:", ""] + [
        *table(columns, rows),
        "",
    ]
