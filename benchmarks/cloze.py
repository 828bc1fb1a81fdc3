"""A task of lm-evaluation-harness, made from held-out text: which continuation is the text's own?

Unlike the loss, the answers come through the server, as the harness asks it.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.environments import interpreter
from benchmarks.process import run_program
from benchmarks.serving.server import run_server

TASK = "held_out_continuation"
DOCUMENTS, CHOICES = 100, 4
CONTEXT_TOKENS, CONTINUATION_TOKENS = 48, 8
STRIDE = 512
"""Distance between documents, in tokens."""
TIMEOUT_SECONDS = 1800.0

YAML = f"""\
task: {TASK}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {TASK}.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


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
    (folder / f"{TASK}.yaml").write_text(YAML)


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
    python = interpreter("lm-eval", environments)
    with tempfile.TemporaryDirectory() as scratch, run_server(options) as target:
        output = Path(scratch, "results")
        arguments = (
            f"model={target.model()},base_url={target.api}/completions,num_concurrent=1,"
            f"max_retries=1,tokenizer_backend=huggingface,tokenizer={model.absolute()}"
        )
        run_program(
            [
                *(python, "-m", "lm_eval", "--model", "local-completions"),
                *("--model_args", arguments, "--tasks", TASK, "--include_path", task),
                *("--batch_size", "1", "--output_path", output),
            ],
            timeout_seconds=TIMEOUT_SECONDS,
            folder=task,
            environment={"HF_HUB_OFFLINE": "1", "HF_HOME": str(Path(scratch, "hub")),
                         "NO_PROXY": "*", "OPENAI_API_KEY": "unused"},
        )  # fmt: skip
        results = json.loads(next(output.rglob("results_*.json")).read_text())
    return float(results["results"][TASK]["acc,none"])
