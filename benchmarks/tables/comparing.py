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
    shape, new_tokens = found["shape"]["name"], found["new_tokens"]
    return [
        f"Simulated decode, batch {batch}: held-out requests of the reference model replayed with "
        f"the bytes and the compute of {shape} ({new_tokens} generated tokens; median ms "
        "a token, and times faster than `on-demand`):",
        "",
        *table(["machine", "budget", *shown, "first", "`moecast` of the bound"], lines),
        "",
        f"Over {tally['cells']} cells (machines, budgets, batch sizes) and every system of the "
        f"five papers, `moecast` is first in {tally['first']}, and at most "
        f"{100 * tally['worst_behind_first']:.1f} % behind the first.",
        "",
    ]


def tpot(milliseconds: float, speed_up: float | None) -> str:
    return f"{milliseconds:.1f} ms" + ("" if speed_up is None else f" ({speed_up:.2f}x)")


def live(*, every: bool = False) -> list[str]:
    """The same live on this machine."""
    found = result("bench")
    if found is None:
        return []
    rows = [row for row in found["rows"] if row["batch"] == 1]
    names = list(dict.fromkeys(row["system"] for row in rows))
    shown = names if every else [one for one in names if one in SHORT]
    by = {(row["budget"], row["system"]): row for row in rows}
    lines = []
    for budget in dict.fromkeys(row["budget"] for row in rows):
        line = [budget]
        for name in shown:
            row = by.get((budget, name), {"failed": True})
            if row.get("failed"):
                line.append("-")
            else:
                text = tpot(1e3 * row["tpot_seconds"], row.get("tpot_speed_up"))
                line.append(f"{text}, hits {percent(row.get('decode_hit_rate'))}")
        lines.append(line)
    return [
        "Live decode of the reference model inflated to 2 GiB of experts, from the disk, "
        f"{found['repetitions']} runs of each system in turns, medians (TPOT, times faster than "
        "`on-demand`); the bound is simulated; all tokens are those of plain Transformers:",
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
