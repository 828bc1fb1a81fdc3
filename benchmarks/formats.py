"""Speed of the formats that experts can be served in: equal parameters, equal memory in bytes.

Each format is packed once from the same model, into a folder next to it. The budget is a share of
the float32 experts, in bytes, so that a smaller format keeps more experts. Runs are served in
turns, each in its own process, like those of `moecast bench`. A first request fills the arena, so
that the figures are those of a server that has been running for a while.
"""

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.config import FormatsConfig
from benchmarks.reports import describe_machine, print_line, write_report
from benchmarks.served import serve_once
from runtime.commands import pack
from runtime.config import DenseFormat, ModelConfig, PackConfig, Quantise, StoreConfig
from runtime.presets import load_system
from runtime.store.packed.store import open_store
from runtime.tools.bench.config import BenchConfig
from runtime.tools.bench.tasks import ServedRun, ServeTask, make_requests
from runtime.tools.comparison import Case, Condition, Variant


@dataclass(frozen=True)
class Format:
    dtype: str
    """Dtype of activations, and of weights that are not quantised."""
    quantise: Quantise = Quantise.NONE
    dense: DenseFormat = DenseFormat.OWN


FORMATS = {
    "float32": Format("float32"),
    "bfloat16": Format("bfloat16"),
    "int8": Format("bfloat16", Quantise.INT8),
    "int4": Format("bfloat16", Quantise.INT4, DenseFormat.INT4),
    "hqq": Format("bfloat16", Quantise.HQQ),
}
"""The first is what the others are compared with."""


@dataclass(frozen=True, kw_only=True)
class FormatRow:
    """Medians over the repetitions; ratios are taken within a repetition."""

    format: str
    system: str
    experts_bytes: int
    """All experts in this format."""
    share: float
    """Share of the experts that the budget holds."""
    ttft_seconds: float
    tpot_mean_seconds: float
    tpot_median_seconds: float
    tpot_p95_seconds: float
    decode_tokens_per_second: float
    over_float32: float
    """Generated tokens per second over those of float32 with the same system."""
    hit_rate: float
    overhead_bytes: int
    """Peak memory less weights other than experts and the arena."""
    tokens_equal: bool
    """The same tokens in every run of this format, whatever the system."""
    dense: DenseFormat = DenseFormat.OWN
    """Format of linear layers outside of the experts; absent from older results."""


def pack_once(model: ModelConfig, how: Format, output: Path) -> tuple[Path, int]:
    """Packs the experts, or verifies those of an earlier run; also returns their bytes."""
    pack.run(
        PackConfig(
            model=replace(model, dtype=how.dtype),
            output=output,
            quantise=how.quantise,
            run_dir=output.parent,
        )
    )
    store = open_store(output, None)
    store.close()
    num_bytes = [
        layout.num_bytes * number
        for layout, number in zip(store.layouts, store.experts_per_layer, strict=True)
    ]
    return output, sum(num_bytes)


def describe_runs(
    name: str,
    system: str,
    runs: Sequence[ServedRun],
    base: Sequence[ServedRun],
    *,
    experts_bytes: int,
    tokens_equal: bool,
    dense: DenseFormat,
) -> FormatRow:
    def speed(run: ServedRun) -> float:
        return len(run.tpot_seconds) / sum(run.tpot_seconds)

    steps = [seconds for run in runs for seconds in run.tpot_seconds]
    first = runs[0]
    return FormatRow(
        format=name,
        system=system,
        experts_bytes=experts_bytes,
        share=min(1.0, first.arena_bytes / experts_bytes),
        ttft_seconds=statistics.median(seconds for run in runs for seconds in run.ttft_seconds),
        tpot_mean_seconds=statistics.fmean(steps),
        tpot_median_seconds=statistics.median(steps),
        tpot_p95_seconds=statistics.quantiles(steps, n=20)[-1],
        decode_tokens_per_second=statistics.median(map(speed, runs)),
        over_float32=statistics.median(
            speed(run) / speed(other) for run, other in zip(runs, base, strict=True)
        ),
        hit_rate=statistics.median(run.decode["hits"] / run.decode["requests"] for run in runs),
        overhead_bytes=max(
            run.peak_memory_bytes - run.weights_bytes - run.arena_bytes for run in runs
        ),
        tokens_equal=tokens_equal,
        dense=dense,
    )


def run_formats(config: FormatsConfig) -> None:
    machine = describe_machine()
    model = ModelConfig(name="inflated", id=str(config.model))
    folder = config.model.with_name(f"{config.model.name}-formats")
    folder.mkdir(parents=True, exist_ok=True)
    stores = {name: pack_once(model, how, folder / name) for name, how in FORMATS.items()}
    share = float(config.budget.rstrip("%")) / 100
    budget_bytes = int(share * next(iter(stores.values()))[1])
    benches = {
        name: BenchConfig(
            model=replace(model, dtype=how.dtype, dense_format=how.dense),
            store=StoreConfig(path=stores[name][0]),
            system=[load_system(system) for system in config.system],
            requests=config.requests,
            max_new_tokens=config.new_tokens,
            warm_up_tokens=config.warm_up_tokens,
            device="cpu",
        )
        for name, how in FORMATS.items()
    }
    runs: dict[tuple[str, str], list[ServedRun]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        for repetition in range(config.repetitions):
            for name, bench in benches.items():
                requests, _ = make_requests(bench, config.model)
                for system in bench.system:
                    case = Case(
                        Variant(label=f"{name}, {system.name}", system=system),
                        Condition(str(budget_bytes), 1),
                    )
                    run = serve_once(
                        ServeTask(config=bench, case=case, requests=requests[1]),
                        [stores[name][0]],
                        Path(scratch, f"{repetition}-{name}-{system.name}"),
                    )
                    runs[name, system.name].append(run)
                    seconds = statistics.fmean(run.tpot_seconds)
                    print_line(f"{case.variant.label}: {1e3 * seconds:.1f} ms a token")
    rows = []
    for (name, label), own in runs.items():
        first = runs[name, benches[name].system[0].name][0]
        rows.append(
            describe_runs(
                name,
                label,
                own,
                runs[next(iter(FORMATS)), label],
                experts_bytes=stores[name][1],
                tokens_equal=all(run.tokens == first.tokens for run in own),
                dense=FORMATS[name].dense,
            )
        )
        print_line(str(rows[-1]))
    write_report(config, machine=machine, budget_bytes=budget_bytes, rows=rows)
