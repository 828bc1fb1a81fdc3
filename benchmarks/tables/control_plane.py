"""Tables of what serving adds to plain Transformers."""

from benchmarks.control_plane.run import ControlPlaneCell, ControlPlaneReport
from benchmarks.control_plane.sections import MODEL, SECTIONS
from benchmarks.reports import read_report
from benchmarks.tables.markdown import format_figure, format_percent, markdown_table
from benchmarks.tables.origins import origin_line

SUMMARY = ["model", "budget", "system", "TPOT", "of plain", "added per layer", "hits"]
SUMMARY += ["other threads per layer", "calls per layer"]


def control_plane_tables() -> list[str]:
    """Returns the times of whole steps, and of their sections."""
    report = read_report("control_plane", ControlPlaneReport)
    if report is None:
        return []
    failed = [
        f"{cell.shape.name} at {cell.budget} was not measured: {cell.failed}."
        for cell in report.cells
        if cell.failed is not None
    ]
    different = [
        f"{cell.shape.name} at {cell.budget}: {row.system} gave other tokens."
        for cell in report.cells
        for row in cell.rows
        if not row.same_tokens
    ]
    return [
        "## Measured",
        "",
        f"Random models of layers x experts in float32, on {report.machine.cores} cores of "
        f"{report.machine.cpu}, threads for computing: {report.machine.threads}; medians of "
        f"{report.repetitions} turns of {report.steps} decode steps; ratios and differences are "
        "taken within a turn. \\* with a thread for the predictor:",
        "",
        *markdown_table(SUMMARY, [line for cell in report.cells for line in summary_lines(cell)]),
        "",
        "Where the time of a step goes on the model's thread, in µs per layer; the last column is "
        "the sum over the TPOT:",
        "",
        *markdown_table(
            ["model", "budget", "system", *SECTIONS, MODEL, "sum"],
            [line for cell in report.cells for line in section_lines(cell)],
        ),
        "",
        *[line for text in (*failed, *different) for line in (text, "")],
        *origin_line("control_plane"),
    ]


def summary_lines(cell: ControlPlaneCell) -> list[list[str]]:
    return [
        [
            cell.shape.name,
            cell.budget,
            row.system + " \\*" * row.has_predictor_thread,
            format_figure(1e3 * row.tpot_seconds, 1, " ms"),
            format_figure(row.over_plain, 2, "x"),
            format_figure(1e6 * row.added_seconds_per_layer, 0, " µs"),
            format_percent(row.hit_rate),
            format_figure(1e6 * row.other_threads_seconds, 0, " µs"),
            format_figure(row.calls, 0),
        ]
        for row in cell.rows
    ]


def section_lines(cell: ControlPlaneCell) -> list[list[str]]:
    return [
        [
            cell.shape.name,
            cell.budget,
            row.system,
            *[format_figure(1e6 * row.section_seconds[name], 0) for name in (*SECTIONS, MODEL)],
            format_figure(row.sections_over_tpot, 2),
        ]
        for row in cell.rows
    ]
