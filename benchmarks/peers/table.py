"""The comparison as a table in Markdown, for people and for the README."""

from typing import Any

from predictors.units import MIB

COLUMNS = (
    "budget",
    "peer",
    "first token",
    "TPOT",
    "tokens/s (lowest to highest)",
    "against {reference}",
    "read per token",
    "own memory at most; with page cache, mean",
    "tokens as Transformers",
)


def markdown(report: dict[str, Any]) -> str:
    """Rows in the order of the report; one that did not run has its reason instead of figures."""
    reference = report["reference_peer"]
    head = [column.format(reference=reference) for column in COLUMNS]
    lines = [line(head), line(["---"] * len(head))]
    for row in report["rows"]:
        first = [row["budget"], f"`{row['peer']}`"]
        if "cannot_run" in row:
            reason = row["cannot_run"].replace("|", "/")
            lines.append(line([*first, f"did not run: {reason}", *[""] * (len(head) - 3)]))
        else:
            lines.append(line([*first, *figures(row, reference)]))
    return "\n".join(lines) + "\n"


def figures(row: dict[str, Any], reference: str) -> list[str]:
    """Everything after the names."""
    lowest, highest = row["tokens_per_second_range"]
    ratio = row.get(f"decode_over_{reference}")
    anonymous, charged = row["peak_anonymous_bytes"] / MIB, row["mean_charged_bytes"] / MIB
    return [
        f"{row['ttft_seconds']:.2f} s",
        f"{row['tpot_seconds'] * 1e3:.0f} ms",
        f"{row['tokens_per_second']:.2f} ({lowest:.2f} to {highest:.2f})",
        "" if ratio is None else f"{ratio:.1f}x",
        f"{row['read_bytes_per_token'] / MIB:.0f} MiB",
        f"{anonymous:.0f}; {charged:.0f} of {row['limit_bytes'] / MIB:.0f} MiB",
        row["tokens_as_transformers"],
    ]


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
