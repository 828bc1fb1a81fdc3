"""What `doctor` found, as a person reads it."""

from typing import Any

from rich.console import Console
from rich.table import Table

from predictors.units import GIB, MIB


def show(console: Console, name: str, report: dict[str, Any]) -> None:
    """Machine, model, bandwidths, outlook, and what to do."""
    console.print(facts_table(name, report))
    console.print(bandwidth_table(report["bandwidth"]))
    if report["outlook"] is None:
        line(console, f"no outlook: {report['outlook_rests_on']}")
    else:
        console.print(outlook_table(report["outlook"]))
        line(console, f"the outlook rests on {report['outlook_rests_on']}")
    budget = report["suggested_budget_bytes"]
    if budget is None:
        line(
            console, "too little memory is free for this model: free some, or use a larger machine"
        )
        return
    share = min(100.0, 100 * budget / max(1, report["model"]["experts_bytes"]))
    line(console, f"suggested: budget={budget // MIB + 1}MiB ({share:.0f} % of all experts)")


def line(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def facts_table(name: str, report: dict[str, Any]) -> Table:
    """Versions, hardware, files and the model."""
    hardware, model, files = report["hardware"], report["model"], report["files"]
    gpus = [f"{gpu['name']}, {size(gpu['memory_bytes'])}" for gpu in hardware["gpus"]]
    table = Table(title=f"{name} on this machine", show_header=False)
    table.add_column("what")
    table.add_column("value", overflow="fold")
    rows = {
        "versions": ", ".join(f"{k} {v or 'not installed'}" for k, v in report["versions"].items()),
        "processor": f"{hardware['processor']}, {hardware['cores']} cores, {hardware['simd']}",
        "memory": f"{size(hardware['memory_bytes'])}, "
        f"{size(hardware['available_memory_bytes'])} available",
        "GPUs": "; ".join(gpus) or "none",
        "disk": f"{size(hardware['disk_free_bytes'])} free of {size(hardware['disk_bytes'])}",
        "files": f"{files['files']} in {report['folder']}, {size(files['bytes'])}, "
        f"{files['tensors']} tensors, whole; digests: {files['digests']}",
        "experts": f"{model['num_layers']} layers of {model['num_experts']}, "
        f"{model['top_k']} for each token, {model['expert_bytes'] / MIB:.2f} MiB each in "
        f"{model['dtype']}, together {size(model['experts_bytes'])}",
        "other weights": size(model["non_expert_bytes"]),
    }
    for what, value in rows.items():
        table.add_row(what, value)
    return table


def bandwidth_table(bandwidth: dict[str, Any]) -> Table:
    """Of the disk by size of a read; memory and links below."""
    rates = [f"memory (a copy, read and written) {rate(bandwidth['memory_bytes_per_second'])}"]
    rates += [f"to GPU {i} {rate(r)}" for i, r in enumerate(bandwidth["links_bytes_per_second"])]
    table = Table(title="reads of the model's files", caption="; ".join(rates))
    for column in ("size", "as the runtime reads", "cold page cache", "from the page cache"):
        table.add_column(column, justify="right")
    for row in bandwidth["disk"]:
        ways = (rate(row[way]) for way in ("direct", "cold", "cached"))
        table.add_row(f"{row['read_bytes'] // 1024} KiB", *ways)
    return table


def outlook_table(rows: list[dict[str, Any]]) -> Table:
    """Each budget's cost and, for each system, its figures."""
    table = Table(title="what to expect of each budget (simulated)")
    for column in ("budget", "experts", "process", "system", "TPOT", "hits", "stalled"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        if "error" in row:
            table.add_row(row["budget"], "too small")
            continue
        cells = [row["budget"], size(row["bytes"]), size(row["process_bytes"])]
        for name, figures in row["systems"].items():
            tpot = figures["tpot_seconds"]
            table.add_row(
                *cells,
                name,
                "not measured" if tpot is None else f"{1000 * tpot:.1f} ms",
                share(figures["hit_rate"]),
                share(figures["stall_share"]),
            )
            cells = [""] * len(cells)
    return table


def share(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.0f} %"


def size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def rate(bytes_per_second: float | None) -> str:
    return "not measured" if bytes_per_second is None else f"{bytes_per_second / MIB:,.0f} MiB/s"
