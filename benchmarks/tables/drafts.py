"""The table of decoding with drafted tokens."""

from benchmarks.tables.markdown import format_percent, markdown_table, read_document
from benchmarks.tables.origins import origin_line

RESULTS_OF = ("drafts", "drafts_resident")
"""Files of results: with some and with all of the experts in memory."""


def drafts_tables() -> list[str]:
    """Returns how fast drafts are by kind of prompts, and how fast they could be."""
    tables = [line for name in RESULTS_OF for line in tables_of(name)]
    return ["## Drafted tokens, measured", "", *tables] if tables else []


def tables_of(name: str) -> list[str]:
    """Returns the tables of one file of results; none without it."""
    report = read_document(name)
    if report is None:
        return []
    kinds = [
        [
            row["kind"],
            f"{row['speed']:.2f}x",
            f"{row['lowest']:.2f} to {row['highest']:.2f}x",
            f"{row['tokens_per_step']:.2f}",
            format_percent(row["accepted"]),
            f"{row['same_tokens']} of {row['prompts'] * report['repetitions']}",
        ]
        for row in report["rows"]
    ]
    right = [
        [str(row["drafted"]), f"{1000 * row['step_seconds']:.0f} ms", f"{row['speed']:.2f}x"]
        for row in report["right"]
    ]
    return [
        f"Decoding with `draft=prompt-lookup` over decoding without; `system={report['system']}`, "
        f"{report['budget']} of the experts in memory, answers of {report['new_tokens']} tokens, "
        f"{report['machine']['threads']} thread:",
        "",
        *markdown_table(
            ["prompts", "speed", "by prompt", "tokens a step", "accepted", "same answers"], kinds
        ),
        "",
        "Drafts that are always right (the tokens of the answer without drafts), the bound of any "
        "draft of that length:",
        "",
        *markdown_table(["drafted tokens a step", "time of a step", "speed"], right),
        "",
        *origin_line(name),
        "",
    ]
