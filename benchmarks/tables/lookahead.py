"""The table of eviction by what is known of coming tokens."""

from benchmarks.tables.markdown import format_percent, markdown_table, read_document
from benchmarks.tables.origins import origin_line

STREAMS = {
    "every token": "Every token alone, those of prompts too",
    "generated": "Generated tokens, after the step of their prompt",
}


RESULTS_OF = {
    "lookahead": "The reference model.",
    "lookahead_coarse": "A second model, of another shape: 7 layers of 32 experts with top-2 "
    "behind a layer without (`python -m train.reference shape=coarse`), and predictors trained by "
    "the same recipe.",
    "lookahead_published": "Published routing of a real model, one answer of Qwen3-30B-A3B: 48 "
    "layers of 128 experts. It has no hidden states, so that no learned predictor can be tried, "
    "and uses less than half of the experts.",
}
"""Files of results, and what they are of."""


def lookahead_tables() -> list[str]:
    """Returns the share of the gap that each policy closes, by model, prompts and budget."""
    return [line for name, model in RESULTS_OF.items() for line in tables_of(name, model)]


def tables_of(name: str, model: str) -> list[str]:
    """Returns the tables of one file of results; none without it."""
    report = read_document(name)
    if report is None:
        return []
    rows = report["rows"]
    prompts = list(dict.fromkeys(row["prompts"] for row in rows))
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    gaps = {
        (row["stream"], row["prompts"], row["budget"], row["policy"]): row["gap_closed"]
        for row in rows
    }
    lines: list[str] = [model, ""]
    tables: list[list[list[str]]] = []
    for stream, title in STREAMS.items():
        table = [
            [
                f"`{policy}`" if " " not in policy else policy,
                *(
                    " / ".join(
                        format_percent(gaps.get((stream, kind, budget, policy))).removesuffix(" %")
                        for budget in budgets
                    )
                    for kind in prompts
                ),
            ]
            for policy in policies
            if policy not in ("lru", "belady")
        ]
        # A log without prompts has the same tokens in both streams.
        if table in tables or not any(
            key[0] == stream and gap is not None for key, gap in gaps.items()
        ):
            continue
        tables.append(table)
        lines += [
            f"{title}: share of the gap between LRU and Belady that closes, in percent, with "
            f"{' / '.join(budgets)} of the experts in one arena ({report['tokens']:,} tokens of "
            "each kind of prompts; nothing is prefetched):",
            "",
            *markdown_table(["policy", *prompts], table),
            "",
        ]
    return [*lines, *origin_line(name), ""]
