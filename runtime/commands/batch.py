"""`moecast batch`: generate for a file of prompts at the highest throughput."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from predictors.files import expand_home
from predictors.table import Table
from predictors.units import MIB
from runtime.commands.progress import print_auto_budget, print_line, progress
from runtime.engine.memory import freeze_objects, peak_memory_bytes
from runtime.errors import StepMemoryError
from runtime.generation.batch.generate_many import BatchRunSummary, run_micro_batches
from runtime.generation.batch.memory_plan import PlannedRun, load_with_plan, make_kv_caches
from runtime.generation.batch.prompts import (
    Batch,
    PromptEncoder,
    find_tokenizer,
    make_batches,
    padding_share,
    read_prompts,
)
from runtime.generation.batch.result_journal import BatchResult, ResultJournal
from runtime.generation.config import BatchConfig, DensePlacement
from runtime.hf.loading import find_model_class, read_config
from runtime.hf.model_faults import check_generates
from runtime.store.model_source import identity, resolve


class PromptsFailed(RuntimeError):
    """Some prompts have no result because experts could not be read; written results are kept."""


def run(config: BatchConfig) -> dict[str, Any]:
    """Check the whole input, plan, and write a line for each finished prompt."""
    folder = resolve(config.model)
    model_config = read_config(folder)
    check_generates(find_model_class(model_config)[0], in_batches=True)
    encoder = PromptEncoder(model_config, find_tokenizer(folder))
    prompts, digest = read_prompts(config.input, encoder, max_new_tokens=config.max_new_tokens)
    batches = make_batches(prompts, config.batch_size)
    with ResultJournal(
        config.output,
        result_settings(config, folder, digest),
        known={prompt.id for prompt in prompts},
        overwrite=config.overwrite,
    ) as journal:
        left = [
            batch for batch in batches if any(prompt.id not in journal.done for prompt in batch)
        ]
        print_line(
            f"{len(prompts)} prompts, {len(journal.done)} of them done; {len(left)} batches of "
            f"{config.batch_size} to run, {100 * padding_share(batches):.1f} % padding"
        )
        if not left:
            return {"prompts": len(prompts), "written": 0, "output": str(config.output)}
        model, made = load_with_plan(config, left)
        freeze_objects()
        with model.moecast as handle:
            print_auto_budget(handle)
            show_plan(made)
            ran, seconds = run_left_batches(config, model, batches, made, journal, encoder)
            stats = handle.stats()
            stream = handle.dense_stream
            dense_bytes_read = 0 if stream is None else stream.bytes_read
    if ran.failed:
        error = ran.failed[0][1]
        again = "run the same command again to retry"
        if isinstance(error, StepMemoryError):
            again = "then run the command again"
        raise PromptsFailed(
            f"{len(prompts) - len(journal.done)} of {len(prompts)} prompts have no result: "
            f"{error}; the others are in {config.output}; {again}"
        )
    print_line(
        f"{ran.num_tokens} tokens in {seconds:.1f} s, {ran.num_tokens / seconds:.1f} tokens/s: "
        f"{config.output}"
    )
    return {
        "prompts": len(prompts),
        "written": ran.num_rows,
        "output": str(config.output),
        "tokens": ran.num_tokens,
        "seconds": seconds,
        "tokens_per_second": ran.num_tokens / seconds,
        "group_steps": ran.num_steps,
        "padding_share": padding_share(batches),
        "plan": made.plan.as_dict(),
        "costs": vars(made.measured.costs),
        "kv_budget": made.kv_budget,
        "dense": str(made.dense),
        "dense_bytes": made.dense_bytes,
        "dense_bytes_read": dense_bytes_read,
        "peak_memory_bytes": peak_memory_bytes(),
        "stats": stats,
    }


def result_settings(config: BatchConfig, folder: Path, digest: str) -> dict[str, Any]:
    """Return everything that results depend on; n, budgets and systems change no bit."""
    return {
        "input_sha256": digest,
        "model": {**identity(folder, config.model), "dtype": config.model.dtype},
        **{f"model.{name}": value for name, value in config.model.kernels.items()},
        "store": read_codings(config.store.path),
        "quantise_attention": config.quantise_attention or None,
        "batch_size": config.batch_size,
        "max_new_tokens": config.max_new_tokens,
        "temperature, seed": [config.temperature, config.seed] if config.temperature else None,
        "sinks, window": [config.sinks, config.window] if config.window else None,
    }


def read_codings(store: Path | None) -> list[list[str | int]] | None:
    """Return types and group sizes of a quantised packed store, else None."""
    if store is None:
        return None
    from runtime.store.packed.manifest import read_manifest

    contents, _ = read_manifest(expand_home(store))
    codings = {
        (part.kind, part.group_size)
        for layer in contents.layers
        for chunk in layer.chunks
        for part in chunk.parts
    }
    return sorted(map(list, codings)) if any(kind for kind, _ in codings) else None


def run_left_batches(
    config: BatchConfig,
    model: PreTrainedModel,
    batches: list[Batch],
    made: PlannedRun,
    journal: ResultJournal,
    encoder: PromptEncoder,
) -> tuple[BatchRunSummary, float]:
    """Run the unfinished batches; also returns the seconds that they took."""
    num_left = sum(prompt.id not in journal.done for batch in batches for prompt in batch)
    start = time.perf_counter()
    with progress(Console(stderr=True), "prompts", total=num_left) as advance:

        def emit(result: BatchResult) -> None:
            journal.append(result)
            advance(1)

        ran = run_micro_batches(
            model,
            batches,
            n=made.plan.n,
            caches=make_kv_caches(model, config, made.kv_budget),
            emit=emit,
            decode=encoder.decode,
            done=frozenset(journal.done),
            temperature=config.temperature,
            seed=config.seed,
        )
    return ran, time.perf_counter() - start


def show_plan(planned: PlannedRun) -> None:
    """Print both sides of each inequality at the chosen n, the measured costs, memory and notes."""
    plan, costs = planned.plan, planned.measured.costs
    cells = [
        [
            f"({row.number})",
            row.what,
            f"{1000 * row.computes:.2f} ms",
            f"{1000 * row.transfers:.2f} ms",
            "yes" if row.holds else "no",
        ]
        for row in plan.inequalities
    ]
    title = f"group of n={plan.n} batches (Klotski, section 7, inequalities 4 to 7)"
    columns = ("inequality", "condition", "computation", "transfers", "hidden")
    table = Table.of(columns, cells, title=title, left=2, importance=columns[::-1])
    table.print(Console())
    print_line(
        f"{'measured before' if planned.measured.was_known else 'measured'}: attention "
        f"{1000 * costs.attention:.2f} ms, gate {1000 * costs.gate:.2f} ms per batch; an expert "
        f"{1000 * costs.expert_fixed:.2f} ms and {1e6 * costs.expert_per_token:.1f} us per token; "
        f"its transfer {1000 * costs.expert_io:.2f} ms"
    )
    streams = planned.dense is DensePlacement.STREAM
    print_line(
        f"dense weights: {planned.dense_bytes / MIB:.1f} MiB "
        f"{'of buffers, read layer by layer' if streams else 'in memory'}; transfers of a layer's "
        f"{'take' if streams else 'would take'} {1000 * costs.attention_io:.2f} ms, of its gate's "
        f"{1000 * costs.gate_io:.2f} ms"
    )
    offloaded = f", {plan.offloaded_bytes / MIB:.1f} MiB offloaded" if plan.offloaded_bytes else ""
    print_line(f"KV caches of {plan.n} batches: {plan.kv_bytes / MIB:.1f} MiB{offloaded}")
    for note in plan.notes:
        print_line(f"note: {note}")
