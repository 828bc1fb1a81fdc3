"""promoe figures 10, 12 and 14 (with 15), as its text gives them (7.2, 7.3, 7.4)."""

from dataclasses import replace
from typing import Any

from benchmarks.papers.claim import Claim, Part, average, most
from benchmarks.papers.ground import Ground, machine, mean, shape_named

SHAPES = ("deepseek-moe", "deepseek-v2-lite", "qwen1.5-moe", "qwen2-moe-int4", "mixtral-8x7b-int4")
"""Table 1 in the precision of 7.1."""
SHARE = 0.5
"""Cache rate of figures 10 and 12: their text gives none; that of the example in 2.2."""
RATES = (0.2, 0.4, 0.6, 0.8)
"""Cache rates of figures 14 and 15, which are in the drawings only."""
STEPS = ("prefetch", "chunked", "early_preemption", "reordered")
NO_PYTHON = (
    "no interpreter in a replay: llama.cpp, without one too, shows promoe {llama} (7.2), for want "
    "of computation to hide transfers behind"
)


def figure_10(ground: Ground) -> Part:
    part, names = Part(), ("promoe", "static", "on-demand", "oracle")
    hardware = machine("rtx4090-pcie4")
    cells: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for shape in map(shape_named, SHAPES):
        for name in names:
            cell = ground.run(ground.systems[name], shape, hardware, share=SHARE)
            cells[name].append(part.keep(cell, figure="promoe 10"))
    published = {
        ("ttft_seconds", "static"): ("prefill", 1.42, 1.61, "1.36x"),
        ("ttft_seconds", "on-demand"): ("prefill", 2.21, 2.48, "2.12x"),
        ("tpot_seconds", "static"): ("decode", 1.47, 1.77, "1.49x"),
        ("tpot_seconds", "on-demand"): ("decode", 1.31, 1.46, "1.09x"),
    }
    for (key, base), (phase, value, up_to, llama) in published.items():
        bound = average(cells["oracle"], cells[base], key)
        for what, paper, ours in (
            ("mean", value, average(cells["promoe"], cells[base], key)),
            ("up to", up_to, most(cells["promoe"], cells[base], key)),
        ):
            part.claims.append(
                Claim(
                    paper="promoe",
                    where="figure 10, 7.2",
                    what=f"{phase}: promoe over {base}, {what} of five models",
                    paper_value=paper,
                    ours=ours,
                    reason=f"bound over {base}: {bound:.2f}x; " + NO_PYTHON.format(llama=llama),
                )
            )
    return part


def figure_12(ground: Ground) -> Part:
    """Techniques one after another, from on-demand LRU with nothing."""
    part, hardware = Part(), machine("rtx4090-pcie4")
    base = replace(ground.systems["promoe"], **dict.fromkeys(STEPS, False), name="base")
    arms = [base]
    for step in STEPS:
        arms.append(replace(arms[-1], **{step: True}, name=f"+ {step}"))
    cells: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for shape in map(shape_named, SHAPES):
        for arm in arms:
            cell = ground.run(arm, shape, hardware, share=SHARE)
            cells[arm.name].append(part.keep(cell, figure="promoe 12"))
    published = (
        ("prefill", "ttft_seconds", "+ prefetch", "about 1, or below"),
        ("prefill", "ttft_seconds", "+ early_preemption", 1.27),
        ("prefill", "ttft_seconds", "+ reordered", 2.39),
        ("decode", "tpot_seconds", "+ reordered", 1.35),
    )
    for phase, key, arm, value in published:
        part.claims.append(
            Claim(
                paper="promoe",
                where="figure 12, 7.3",
                what=f"{phase}: techniques up to '{arm}' over the LRU baseline, mean of models",
                paper_value=value,
                ours=average(cells[arm], cells["base"], key),
                reason="these prompts leave experts out, so that LRU thrashes less"
                if phase == "prefill"
                else NO_PYTHON.format(llama="1.09x over LRU"),
            )
        )
    return part


def figure_14(ground: Ground) -> Part:
    part, names = Part(), ("promoe", "static", "on-demand", "oracle")
    hardware = machine("rtx4090-pcie4")
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for model in ("deepseek-moe", "qwen2-moe-int4"):
        for rate in RATES:
            for name in names:
                system = ground.systems[name]
                cell = ground.run(system, shape_named(model), hardware, share=rate)
                cells.setdefault((model, name), []).append(part.keep(cell, figure="promoe 14"))

    def over(model: str, base: str, key: str, system: str = "promoe") -> float:
        return average(cells[model, system], cells[model, base], key)

    ds, qw = "deepseek-moe", "qwen2-moe-int4"
    rows: list[tuple[str, float, float, float]] = []
    for model, base, value in (
        (ds, "on-demand", 1.72),
        (qw, "on-demand", 1.82),
        (ds, "static", 1.22),
        (qw, "static", 1.39),
    ):
        own, bound = (over(model, base, "ttft_seconds", one) for one in ("promoe", "oracle"))
        rows.append((f"prefill, {model}: promoe over {base}", value, own, bound))
    for base, value in (("static", 1.60), ("on-demand", 1.29)):
        own, bound = (
            mean([over(model, base, "tpot_seconds", one) for model in (ds, qw)])
            for one in ("promoe", "oracle")
        )
        rows.append((f"decode, both models: promoe over {base}", value, own, bound))
    for what, value, ours, bound in rows:
        part.claims.append(
            Claim(
                paper="promoe",
                where="figures 14 and 15, 7.4",
                what=f"{what}, mean of cache rates",
                paper_value=value,
                ours=ours,
                reason=f"cache rates {', '.join(f'{rate:.0%}' for rate in RATES)}, which the text "
                f"does not give; bound: {bound:.2f}x",
            )
        )
    shares = {
        (ds, "promoe"): 0.2561,
        (qw, "promoe"): 0.2920,
        (ds, "on-demand"): 0.4552,
        (qw, "on-demand"): 0.5089,
    }
    for (model, name), value in shares.items():
        part.claims.append(
            Claim(
                paper="promoe",
                where="figures 14 and 15, 7.4",
                what=f"decode, {model}: share of the time that {name} waits for experts",
                paper_value=value,
                ours=mean([cell["decode_stall_share"] for cell in cells[model, name]]),
                reason="computation takes longer in the paper: an interpreter between kernels",
            )
        )
    return part


FIGURES = (("figure 10", figure_10), ("figure 12", figure_12), ("figure 14", figure_14))
