"""Batches in groups: klotski's figures on this machine and, simulated, on the paper's."""

from typing import Any

from benchmarks.tables.markdown import figure, percent, result, table

NAMES = (
    "single batch, on demand",
    "simple pipeline",
    "+ multi batches",
    "+ only hot experts",
    "+ order (klotski)",
    "caches on disk",
)


def grouped(*, every: bool = False) -> list[str]:
    """The ablation live; with `every`, also n against the batch size, live and simulated."""
    found = result("klotski")
    if found is None:
        return []
    rows: list[dict[str, Any]] = [row for row in found["live"] if not row.get("failed")]
    peer = found["accelerate"] or {}
    base = next((r["tokens_per_second"] for r in rows if r["name"] == NAMES[0]), None)
    lines = [
        [
            row["name"],
            str(row["batch_size"]),
            str(row["n"]),
            figure(row["tokens_per_second"], 1),
            times(row["tokens_per_second"], base),
            percent(row["steady"]["link"]),
            percent(row["steady"]["compute"]),
            str(row["reads_per_step"]["most"]),
        ]
        for row in rows
        if row["name"] in NAMES
    ]
    if peer.get("tokens_per_second"):
        speed = peer["tokens_per_second"]
        lines.append(
            [
                peer["name"],
                str(peer["rows"]),
                "1",
                figure(speed, 1),
                times(speed, base),
                "-",
                "-",
                "-",
            ]
        )
    text = [
        f"Batches in groups, live, {found['budget']} of the experts in memory, prompts of "
        f"{found['prompt_tokens']} tokens and {found['new_tokens']} new ones (tokens a second, "
        "prompts included; link and compute busy in the steady state; reads of one expert within "
        "one step of the group, at most):",
        "",
        *table(["arm", "batch", "n", "tokens/s", "over single", "link", "compute", "reads"], lines),
        "",
    ]
    if not every:
        return text
    points = {(r["batch_size"], r["n"]): r["tokens_per_second"] for r in rows
              if r["arm"] == "klotski" and r["kv_budget"] is None}  # fmt: skip
    text += ["Tokens a second against the batch size and n:", "", *by_n(points), ""]
    for environment in dict.fromkeys(c["environment"] for c in found["simulated"] or ()):
        cells = [c for c in found["simulated"] if c["environment"] == environment]
        simulated = {(c["batch"], c["n"]): c["tokens_per_second"] for c in cells
                     if c["system"] == "klotski"}  # fmt: skip
        text += [f"Simulated, {environment}, tokens a second:", "", *by_n(simulated), ""]
    if found["quality"]:
        text += [
            "Attention to 4 sinks and a window, teacher-forced on held-out text:",
            "",
            *table(
                ["window", "nats", "perplexity", "likeliest token as with all"],
                [
                    [
                        str(row["window"] or "all"),
                        figure(row["nats"]),
                        figure(row["perplexity"], 1),
                        percent(row["same_token_share"]),
                    ]
                    for row in found["quality"]
                ],
            ),
            "",
        ]
    return text


def times(speed: float, base: float | None) -> str:
    return figure(speed / base if base else None, 2, "x")


def by_n(points: dict[tuple[int, int], float]) -> list[str]:
    """A line for each batch size, a column for each n."""
    groups = sorted({n for _, n in points})
    return table(
        ["batch", *(f"n = {n}" for n in groups)],
        [
            [str(batch), *(figure(points.get((batch, n)), 1) for n in groups)]
            for batch in sorted({batch for batch, _ in points})
        ],
    )
