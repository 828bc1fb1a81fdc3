"""The table of prompts' times over those of their bytes and their computation."""

from benchmarks.tables.markdown import markdown_table, read_document
from benchmarks.tables.origins import origin_line


def prefill_table() -> list[str]:
    """Returns each system's time of a prompt next to what it cannot be faster than."""
    report = read_document("prefill")
    if report is None:
        return []
    rows = [
        [
            row["system"],
            *(f"{row[name]:.2f} s" for name in ("seconds", "compute_seconds", "link_seconds")),
            f"{row['moved_mib']:,.0f} MiB",
            f"{row['over_bound']:.2f}x",
        ]
        for row in report["rows"]
    ]
    return [
        "## Prompts",
        "",
        f"A prompt of {report['prompt_tokens']} tokens with {report['budget']} of the experts in "
        f"memory (2 GiB in {report['dtype']}), next to the computation alone with all of them in "
        "memory, and to the time in which the disk alone reads the missing bytes. Medians of "
        f"{report['prompts']} prompts, measured in turn, ratios within a turn:",
        "",
        *markdown_table(
            ["system", "time", "computation", "disk", "missing", "over the larger"], rows
        ),
        "",
        *origin_line("prefill"),
    ]
