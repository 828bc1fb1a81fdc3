"""ProMoE, figures 3 to 22: the numbers that its text gives (sections 2.2, 4 and 7)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.papers.cells import CellFigures, ReplayTable, max_ratio, mean, mean_ratio
from benchmarks.papers.claims import Comparison
from benchmarks.papers.paper_context import (
    load_hardware,
    load_shape,
    load_system,
    with_bits_per_weight,
)
from runtime.config import HardwareConfig, ShapeConfig

PAPER = "promoe"
SHAPES = ("deepseek-moe", "deepseek-v2-lite", "qwen1.5-moe", "qwen2-moe-int4", "mixtral-8x7b-int4")
"""Table 1 in the precision of section 7.1."""
MODELS = ("deepseek-moe", "qwen2-moe-int4")
"""DS-1 and QW-2, the models of figures 14 to 22."""
SHARE = 0.5
"""Cache rate of figures 10 to 12; their text gives none, so that of the example in section 2.2."""
RATES = (0.2, 0.4, 0.6, 0.8)
"""Cache rates of figures 14 to 16; the text gives none."""
BATCHES = (1, 2, 4)
STEPS = ("prefetch", "chunked", "early_preemption", "reordered")
PHASES = (("prefill", "ttft_seconds"), ("decode", "tpot_seconds"))
NAMES = ("promoe", "static", "on-demand")

INTERPRETER_US = 10.0
"""Time of a kernel's launch by an interpreter, twice the machine's: with it, LRU waits in about as
much of DeepSeek-MoE's decoding as in figure 14, which is of Transformers, in Python (45.52 %)."""
INTERPRETED = f"an interpreter takes {INTERPRETER_US:.0f} us for each kernel's launch"
MANY_PROMPTS = 8
TOGETHER = f"{MANY_PROMPTS} prompts in one prefill, which together use almost all experts"
UNKNOWN_RATES = f"cache rates {', '.join(f'{rate:.0%}' for rate in RATES)}: the text gives none"


def machine() -> HardwareConfig:
    return load_hardware("rtx4090-pcie4")


def interpreted_machine() -> HardwareConfig:
    return replace(machine(), kernel_us=INTERPRETER_US)


def replay_systems(
    table: ReplayTable,
    hardware: HardwareConfig,
    shapes: Iterable[ShapeConfig],
    *,
    shares: Sequence[float] = (SHARE,),
    batches: Sequence[int] = (1,),
) -> dict[str, list[CellFigures]]:
    systems = {name: load_system(name) for name in NAMES}
    return table.replay_all(systems, shapes, hardware, shares=shares, batches=batches)


def figures_3_4(table: ReplayTable) -> Iterator[Comparison]:
    on_demand = load_system("on-demand")
    for number, model in ((3, "deepseek-moe"), (4, "qwen2-moe-int4")):
        plain, interpreted = (
            table.replay(on_demand, load_shape(model), hardware, share=SHARE)
            for hardware in (machine(), interpreted_machine())
        )
        for phase in ("prefill", "decode"):
            share = f"{phase}_stall_share"
            yield Comparison(
                f"figure-{number}/{phase}",
                getattr(plain, share),
                change=INTERPRETED if number == 3 else "",
                changed=getattr(interpreted, share),
            )


def figure_8(table: ReplayTable) -> Iterator[Comparison]:
    """Compares accuracies: correct experts of the top_k that a predictor ranks first."""
    promoe = load_system("promoe")
    accuracy: dict[str, Any] = {}
    for name, system in (
        ("token", load_system("token")),
        ("skip", replace(promoe, predictor="skip", predictor_options={"horizon": 1})),
        ("learned", replace(promoe, predictor="mlp")),
        ("stride", promoe),
    ):
        cell = table.replay(
            system, load_shape("qwen1.5-moe"), machine(), share=SHARE, measures_accuracy=True
        )
        accuracy[name] = cell.accuracy
    for name in ("token", "skip", "learned"):
        yield Comparison(f"figure-8/{name}", accuracy[name], basis="the reference model, decode")
    yield Comparison(
        "figure-8/stride",
        accuracy["learned"] - accuracy["stride"],
        basis="the reference model, decode",
    )


def figures_10_11(table: ReplayTable) -> Iterator[Comparison]:
    """Figure 10 is of Transformers, in Python; figure 11 of llama.cpp, without an interpreter."""
    shapes = [load_shape(shape) for shape in SHAPES]
    runs = [
        replay_systems(table, hardware, shapes) for hardware in (machine(), interpreted_machine())
    ]
    basis = table.describe_basis(shapes)
    for phase, key in PHASES:
        for base in ("static", "on-demand"):
            for what, ratio in (("mean", mean_ratio), ("most", max_ratio)):
                plain, interpreted = (ratio(run["promoe"], run[base], key) for run in runs)
                name = f"{phase}/{base}/{what}"
                yield Comparison(
                    f"figure-10/{name}",
                    plain,
                    basis=basis,
                    change=INTERPRETED,
                    changed=interpreted,
                )
                yield Comparison(f"figure-11/{name}", plain, basis=basis)


def figure_12(table: ReplayTable) -> Iterator[Comparison]:
    """Switches techniques on one after another, from on-demand LRU with none."""
    options: dict[str, Any] = dict.fromkeys(STEPS, False)
    systems = {"base": replace(load_system("promoe"), **options)}
    for step in STEPS:
        options[step] = True
        systems[step.replace("_", "-")] = replace(systems["base"], **options)
    shapes = [load_shape(shape) for shape in SHAPES]
    plain, interpreted, together = (
        table.replay_all(systems, shapes, hardware, shares=[SHARE], batches=[batch])
        for hardware, batch in (
            (machine(), 1),
            (interpreted_machine(), 1),
            (machine(), MANY_PROMPTS),
        )
    )
    for phase, key, name in (
        ("prefill", "ttft_seconds", "prefetch"),
        ("prefill", "ttft_seconds", "early-preemption"),
        ("prefill", "ttft_seconds", "reordered"),
        ("decode", "tpot_seconds", "reordered"),
    ):
        changed = interpreted if phase == "decode" else together
        yield Comparison(
            f"figure-12/{phase}/{name}",
            mean_ratio(plain[name], plain["base"], key),
            basis=table.describe_basis(shapes),
            change=INTERPRETED if phase == "decode" else TOGETHER,
            changed=mean_ratio(changed[name], changed["base"], key),
        )


def figures_14_16(table: ReplayTable) -> Iterator[Comparison]:
    """Figures 14 and 15 are of Transformers, in Python; figure 16 of llama.cpp."""
    runs = [
        {
            model: replay_systems(table, hardware, [load_shape(model)], shares=RATES)
            for model in MODELS
        }
        for hardware in (machine(), interpreted_machine())
    ]

    def compare(name: str, ours: Sequence[Any], *, change: bool = True) -> Comparison:
        plain, interpreted = ours
        return Comparison(
            name,
            plain,
            basis="one routing",
            change=INTERPRETED if change else "",
            changed=interpreted if change else None,
            reason=UNKNOWN_RATES,
        )

    for model in MODELS:
        for what, ratio in (("mean", mean_ratio), ("most", max_ratio)):
            yield compare(
                f"figure-14/prefill/{model}/on-demand/{what}",
                [
                    ratio(run[model]["promoe"], run[model]["on-demand"], "ttft_seconds")
                    for run in runs
                ],
            )
        yield compare(
            f"figure-14/prefill/{model}/static/mean",
            [
                mean_ratio(run[model]["promoe"], run[model]["static"], "ttft_seconds")
                for run in runs
            ],
        )
        for name in ("promoe", "on-demand"):
            yield compare(
                f"figure-14/decode/{model}/{name}/stall",
                [mean(cell.decode_stall_share for cell in run[model][name]) for run in runs],
            )
    for base in ("static", "on-demand"):
        yield compare(
            f"figure-14/decode/{base}/mean",
            [
                mean(
                    mean_ratio(run[model]["promoe"], run[model][base], "tpot_seconds")
                    for model in MODELS
                )
                for run in runs
            ],
        )
    qw = MODELS[1]
    for name in ("promoe", "static"):
        for what, place in (("least-cache", 0), ("most-cache", -1)):
            yield compare(
                f"figure-15/prefill/{name}/{what}",
                [run[qw][name][place].prefill_stall_share for run in runs],
            )
    for phase, key in PHASES:
        for base in ("on-demand", "static"):
            value = mean_ratio(runs[0][qw]["promoe"], runs[0][qw][base], key)
            yield compare(f"figure-16/{phase}/{base}", [value, value], change=False)


def figures_17_20(table: ReplayTable) -> Iterator[Comparison]:
    """Batches: figures 17 and 18 are of llama.cpp, figure 20 of Transformers."""
    plain, interpreted = (
        {
            model: replay_systems(table, hardware, [load_shape(model)], batches=BATCHES)
            for model in models
        }
        for hardware, models in ((machine(), MODELS), (interpreted_machine(), MODELS[1:]))
    )
    qw = MODELS[1]
    for phase, key in PHASES:
        for base in ("on-demand", "static"):
            yield Comparison(
                f"figure-17/{phase}/{base}",
                mean(
                    mean_ratio(plain[model]["promoe"], plain[model][base], key) for model in MODELS
                ),
                basis=table.describe_basis(list(map(load_shape, MODELS))),
            )
            yield Comparison(
                f"figure-20/{phase}/{base}",
                mean_ratio(plain[qw]["promoe"], plain[qw][base], key),
                basis="one routing",
                change=INTERPRETED,
                changed=mean_ratio(interpreted[qw]["promoe"], interpreted[qw][base], key),
            )
    for place, batch in ((0, 1), (-1, 4)):
        promoe, on_demand = plain[qw]["promoe"][place], plain[qw]["on-demand"][place]
        yield Comparison(
            f"figure-18/decode/{batch}",
            on_demand.tpot_seconds / promoe.tpot_seconds,
            basis="one routing",
        )


def figure_22(table: ReplayTable) -> Iterator[Comparison]:
    shapes = [with_bits_per_weight(load_shape("deepseek-moe"), bits) for bits in (16, 8, 4)]
    cells = replay_systems(table, machine(), shapes)
    for phase, key in PHASES:
        for base in ("on-demand", "static"):
            yield Comparison(
                f"figure-22/{phase}/{base}",
                mean_ratio(cells["promoe"], cells[base], key),
                basis="three precisions, one routing",
            )


FIGURES = (figures_3_4, figure_8, figures_10_11, figure_12, figures_14_16, figures_17_20, figure_22)
