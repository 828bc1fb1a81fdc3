"""One live run, as a worker process: `benchmarks.klotski.variants REQUEST.json REPORT.json`."""

import importlib
import inspect
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

import runtime
from benchmarks.klotski.measures import (
    ExpertSpans,
    measure_reads,
    measure_shares,
)
from benchmarks.klotski.rows import VariantFigures, VariantRequest
from runtime.config import ModelConfig, SystemConfig
from runtime.generation.batch.generate_many import run_micro_batches
from runtime.generation.batch.memory_plan import make_kv_caches, parse_kv_budget
from runtime.generation.batch.prompts import BatchPrompt, make_batches
from runtime.generation.batch.result_journal import BatchResult
from runtime.generation.config import GroupConfig
from runtime.presets import ON_DEMAND, load_system

VARIANTS = ("on-demand", "simple", "multi", "hot", "klotski")
"""Single batches on demand; then the rows of table 3: whole next layers in single batches, the same
in groups, only hot experts, and in Klotski's order."""
MODULES = (
    "argparse", "asyncio", "collections", "csv", "dataclasses", "datetime", "decimal", "difflib",
    "email", "enum", "fractions", "functools", "heapq", "html", "http.client", "inspect",
    "ipaddress", "itertools", "json", "logging", "mailbox", "math", "numbers", "optparse", "os",
    "pathlib", "pdb", "pickle", "pydoc", "random", "re", "shutil", "socket", "statistics",
    "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "turtle", "typing",
    "unittest", "urllib.parse", "uuid", "weakref", "xml.dom.minidom", "zipfile",
)  # fmt: skip
"""Modules whose docstrings are the prompts: the same on every machine with this Python."""


@dataclass(frozen=True, kw_only=True)
class VariantReport(VariantFigures):
    """The report of the process."""

    answers: list[list[int]]


def variant_system(variant: str) -> SystemConfig:
    """Returns the system of a variant."""
    if variant == "on-demand":
        return load_system(ON_DEMAND)
    system = load_system("klotski")
    if variant in ("simple", "multi"):
        # Every expert of the next layer, by id, as offloading of dense models does.
        return replace(system, predictor="dependency", reordered=False, hot_first=False)
    if variant == "hot":
        return replace(system, reordered=False, hot_first=False)
    return system


def list_docstrings() -> Iterator[str]:
    """Yields the modules' docstrings in a fixed order."""
    for name in MODULES:
        module = importlib.import_module(name)
        classes = (member for _, member in inspect.getmembers(module, inspect.isclass))
        for owner in (module, *classes):
            for _, member in inspect.getmembers(owner):
                text, where = inspect.getdoc(member), getattr(member, "__module__", None)
                if text and str(where).startswith(name.partition(".")[0]):
                    yield text


def make_prompts(model: Path, count: int, *, num_tokens: int, new_tokens: int) -> list[BatchPrompt]:
    """Returns `count` prompts of `num_tokens`, each of another docstring."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    prompts: list[BatchPrompt] = []
    for text in dict.fromkeys(list_docstrings()):
        tokens = tokenizer(text)["input_ids"]
        if len(tokens) >= num_tokens:
            prompts.append(BatchPrompt(len(prompts), tuple(tokens[:num_tokens]), new_tokens))
        if len(prompts) == count:
            return prompts
    raise ValueError(f"got {len(prompts)} docstrings of {num_tokens} tokens, expected {count}")


def run_variant(request: VariantRequest) -> VariantReport:
    """Serves all batches once."""
    torch.set_num_threads(request.threads)
    model_path = Path(request.model)
    prompts = make_prompts(
        model_path,
        request.batch_size * request.num_batches,
        num_tokens=request.prompt_tokens,
        new_tokens=request.new_tokens,
    )
    batches = make_batches(prompts, request.batch_size)
    model = runtime.load(
        ModelConfig(name=model_path.name, id=request.model, dtype="float32"),
        system=variant_system(request.variant),
        budget=request.budget,
    )
    model.generation_config.eos_token_id = None  # every answer has all its tokens
    config = GroupConfig(kv_budget=request.kv_budget)
    answers: dict[int | str, list[int]] = {}
    spans = ExpertSpans()

    def emit(result: BatchResult) -> None:
        answers[result.id] = result.tokens

    with model.moecast as handle:
        weights_bytes = sum(weight.nbytes for weight in model.parameters())
        handle.engine.swap_timeline(spans)
        caches = make_kv_caches(model, config, parse_kv_budget(config, model.device))
        start = time.perf_counter()
        done = run_micro_batches(model, batches, n=request.n, caches=caches, emit=emit)
        seconds = time.perf_counter() - start
        stats = handle.stats()
        return VariantReport(
            tokens=done.num_tokens,
            seconds=seconds,
            tokens_per_second=done.num_tokens / seconds,
            steps=[round(end - begin, 4) for begin, end in spans.steps],
            steady=measure_shares(spans),
            reads_per_step=measure_reads(spans),
            bytes_moved=stats["bytes_moved"],
            hit_rate=stats["hit_rate"],
            arena_bytes=stats["arena_bytes"],
            weights_bytes=weights_bytes,
            peak_memory_bytes=stats["peak_memory_bytes"],
            answers=[answers[prompt.id] for prompt in prompts],
        )


if __name__ == "__main__":
    request = VariantRequest(**json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(asdict(run_variant(request))))
