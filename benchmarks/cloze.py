"""A task of lm-evaluation-harness, made from held-out text: which continuation is the text's own?

Unlike the loss, the answers come through the server, as the harness asks it.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.environments import OFFLINE, interpreter
from benchmarks.process import run_program
from benchmarks.serving.server import ServerProcess, run_server

TASK = "held_out_continuation"
DOCUMENTS, CHOICES = 100, 4
CONTEXT_TOKENS, CONTINUATION_TOKENS = 48, 8
STRIDE = 512
"""Distance between documents, in tokens."""
TIMEOUT_SECONDS = 1800.0

TASKS = Path(__file__).parent / "serving" / "tasks"
"""Definitions of tasks, each `TASK.yaml`."""


def make_documents(tokens: Tensor, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Returns contexts, each with its continuation among those of the documents after it."""
    length = CONTEXT_TOKENS + CONTINUATION_TOKENS
    parts = []
    for window in tokens.unfold(0, length, STRIDE).split(1):
        texts = tokenizer.batch_decode(
            [window[0, :CONTEXT_TOKENS].tolist(), window[0, CONTEXT_TOKENS:].tolist()]
        )
        # A character that a border divides is no text.
        if not any("\N{REPLACEMENT CHARACTER}" in text for text in texts):
            parts.append(texts)
    parts = parts[:DOCUMENTS]
    documents = []
    for i, (context, _) in enumerate(parts):
        answer = i % CHOICES
        others = (parts[(i + k) % len(parts)][1] for k in range(CHOICES))
        own, *rest = others
        documents.append(
            {"context": context, "choices": [*rest[:answer], own, *rest[answer:]], "answer": answer}
        )
    return documents


def write_task(folder: Path, tokens: Tensor, tokenizer: PreTrainedTokenizerBase) -> None:
    lines = (json.dumps(document) for document in make_documents(tokens, tokenizer))
    (folder / f"{TASK}.jsonl").write_text("\n".join(lines) + "\n")
    shutil.copy(TASKS / f"{TASK}.yaml", folder)


def measure_accuracy(
    task: Path, model: Path, options: Mapping[str, Any], *, environments: Path
) -> float:
    """Serves the model and returns the share of documents whose own continuation is likeliest.

    Args:
        task: the folder of `write_task`.
        model: the model's folder, for its tokenizer.
        options: of `moecast serve`.

    Raises:
        ProcessFailed: the harness failed, or its environment is not built.
    """
    with tempfile.TemporaryDirectory() as scratch, run_server(options) as target:
        results = run_harness(
            target,
            TASK,
            task,
            name=target.model(),
            model=model,
            output=Path(scratch, "results"),
            environments=environments,
        )
    return float(results["results"][TASK]["acc,none"])


def run_harness(
    target: ServerProcess,
    tasks: str,
    folder: Path,
    *,
    name: str,
    model: Path,
    output: Path,
    environments: Path,
    at_once: int = 1,
    key: str = "unused",
) -> dict[str, Any]:
    """Lets lm-evaluation-harness ask the server; returns its results.

    Args:
        target: the server.
        tasks: names of tasks, with commas between them.
        folder: has their definitions and data.
        name: the served model's.
        model: the model's folder, for its tokenizer.
        output: a folder for the harness' files, those of all samples too.
        environments: has the harness.
        at_once: requests at a time, and texts of a request.
        key: the server's.

    Raises:
        ProcessFailed: the harness failed, or its environment is not built.
    """
    arguments = (
        f"model={name},base_url={target.api}/completions,num_concurrent={at_once},"
        f"max_retries=1,tokenizer_backend=huggingface,tokenizer={model.absolute()}"
    )
    run_program(
        [
            *(interpreter("lm-eval", environments), "-m", "lm_eval"),
            *("--model", "local-completions", "--model_args", arguments),
            *("--tasks", tasks, "--include_path", folder, "--batch_size", str(at_once)),
            *("--log_samples", "--output_path", output),
        ],
        timeout_seconds=TIMEOUT_SECONDS,
        folder=folder,
        environment={**OFFLINE, "HF_HOME": str(output / "hub"), "OPENAI_API_KEY": key},
    )
    return json.loads(next(output.rglob("results_*.json")).read_text())
