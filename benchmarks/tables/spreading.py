"""Tables of the simulated runs on more devices and machines."""

from typing import Any

from benchmarks.tables.markdown import figure, percent, result, table


def scaled() -> list[str]:
    """Devices and nodes, and what the paper says of figure 13."""
    found = result("scaling")
    if found is None:
        return []
    rows: list[dict[str, Any]] = found["rows"]
    fullest = {
        (row["shape"], row["machine"], row["nodes"], row["devices"]): row["tokens_per_second"]
        for row in rows
        if row["batch"] == found["batch_per_node"] * row["nodes"]
    }
    lines = []
    for row in rows:
        key = row["shape"], row["machine"], row["nodes"], row["devices"]
        if row["batch"] == found["batch"]:
            lines.append(
                [
                    row["shape"],
                    f"{row['nodes']} x {row['devices']} of {row['machine']}",
                    figure(row["latency_ms"], 1, " ms"),
                    percent(row["hit_rate"]),
                    figure(fullest.get(key), 0),
                ]
            )
    claims = [
        [one["where"], one["what"], figure(one["paper_value"], 2), figure(one["ours"], 2)]
        for one in found["claims"]
    ]
    columns = ["model", "devices", f"a token, {found['batch']} requests", "hits"]
    columns.append(f"tokens/s, {found['batch_per_node']} requests a node")
    return [
        f"`{found['system']}` with experts spread over devices and nodes, each device with an "
        "arena and a link of its own (simulated; the reference model's routing, the models' bytes "
        "and layers; `scaling.py` has the machines and what is assumed of the network):",
        "",
        *table(columns, lines),
        "",
        "What moe-infinity-sequence-level says of its figure 13, beside it:",
        "",
        *table(["where", "what", "paper", "ours"], claims),
        "",
        f"Why they differ: {found['claims'][0]['reason']}.",
        "",
    ]
