"""Other programs as clients, unmodified, each in its environment.

lm-eval's `local-completions` runs a small task (`tasks/`), whose log-likelihoods must be plain
Transformers'. locust and aiperf put load on the server and must see no failure. Tests connect
openai, litellm and other libraries (`tests/engines/test_clients.py`).
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from benchmarks.cloze import TASKS, run_harness
from benchmarks.environments import OFFLINE, interpreter, is_built
from benchmarks.greedy import generate_greedy
from benchmarks.process import ProcessFailed, run_program
from benchmarks.reports import describe_machine, print_line, write_part
from benchmarks.serving.config import ClientsConfig
from benchmarks.serving.rows import ClientResult
from benchmarks.serving.server import ServerProcess, run_server
from benchmarks.tables.serving import clients_row
from predictors.errors import MoecastError, unknown
from runtime.config import ModelConfig
from runtime.hf.loading import load_plain
from runtime.store.model_source import resolve

HERE = Path(__file__).parent
KEY = "a-key-of-this-benchmark"
TOLERANCE_NATS = 1e-3
"""lm-eval adds rounded numbers of the JSON answer."""
TIMEOUT_SECONDS = 900.0


class PlainModel:
    """The model in plain Transformers: every expert in memory, no server, no budget."""

    def __init__(self, folder: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        self._model = load_plain(folder, dtype="auto")

    @torch.inference_mode()
    def continuation(self, prompt: str, num_tokens: int) -> str:
        """Returns the greedy text of exactly `num_tokens` tokens."""
        inputs = torch.tensor([self.tokenizer(prompt)["input_ids"]])
        return self.tokenizer.decode(generate_greedy(self._model, inputs, num_tokens)[0])

    @torch.inference_mode()
    def loglikelihood(self, context: str, continuation: str) -> float:
        """Returns the nats of the continuation's tokens; both texts are encoded together."""
        whole = self.tokenizer(context + continuation)["input_ids"]
        start = len(self.tokenizer(context)["input_ids"])
        logits = self._model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
        return sum(float(logits[place - 1, whole[place]]) for place in range(start, len(whole)))


@dataclass(frozen=True)
class ClientContext:
    """The server that the clients use, and their folders."""

    target: ServerProcess
    model: str
    folder: Path
    """Folder of the model, for its tokenizer."""
    plain: PlainModel
    scratch: Path
    environments: Path

    def run(self, name: str, *words: str | Path, **variables: str) -> str:
        """Runs a program of an environment, offline; returns its output.

        Raises:
            ProcessFailed: it failed, or the environment is not built.
        """
        return run_program(
            [interpreter(name, self.environments), *words],
            timeout_seconds=TIMEOUT_SECONDS,
            folder=self.scratch,
            environment={
                **OFFLINE,
                "HF_HOME": str(self.scratch / "hub"),
                **variables,
            },
        )

    def installed_version(self, name: str) -> str:
        program = f"from importlib.metadata import version; print(version({name!r}))"
        return self.run(name, "-c", program).strip()


def run_lm_eval(context: ClientContext) -> ClientResult:
    """Runs a task of choices and one of continuations; compares log-likelihoods and texts."""
    output = context.scratch / "lm-eval"
    results = run_harness(
        context.target,
        "moecast_cloze,moecast_continue",
        TASKS,
        name=context.model,
        model=context.folder,
        output=output,
        environments=context.environments,
        at_once=4,
        key=KEY,
    )
    worst, choices = 0.0, 0
    for line in next(output.rglob("samples_moecast_cloze_*.jsonl")).read_text().splitlines():
        sample = json.loads(line)
        document = sample["doc"]
        for choice, (nats, _) in zip(document["choices"], sample["filtered_resps"], strict=True):
            ours = context.plain.loglikelihood(document["context"], f" {choice}")
            worst, choices = max(worst, abs(float(nats) - ours)), choices + 1
    continued = [
        json.loads(line)
        for line in next(output.rglob("samples_moecast_continue_*.jsonl")).read_text().splitlines()
    ]
    same = 0
    for sample in continued:
        # lm-eval ends the text at a line break.
        ours = context.plain.continuation(sample["doc"]["context"], 12).partition("\n")[0]
        same += sample["resps"][0][0].partition("\n")[0] == ours
    return ClientResult(
        works=worst <= TOLERANCE_NATS and same == len(continued),
        version=results["lm_eval_version"],
        figures={
            "accuracy": results["results"]["moecast_cloze"]["acc,none"],
            "choices": choices,
            "worst_difference_nats": worst,
            "continuations": len(continued),
            "continuations_equal": same,
        },
    )


def run_locust(context: ClientContext) -> ClientResult:
    """Runs four users for ten seconds."""
    printed = context.run(
        "locust",
        *("-m", "locust", "-f", HERE / "workers" / "locustfile.py", "--headless", "--json"),
        *("--users", "4", "--spawn-rate", "4", "--run-time", "10s", "--host", context.target.url),
        MOECAST_API_KEY=KEY,
    )
    rows = json.loads(printed[printed.index("[") :])
    requests, failures = (sum(row[key] for row in rows) for key in ("num_requests", "num_failures"))
    return ClientResult(
        works=requests > 0 and failures == 0,
        version=context.installed_version("locust"),
        figures={"requests": requests, "failures": failures},
    )


def run_aiperf(context: ClientContext) -> ClientResult:
    """Runs 12 requests; the tokenizer must be in the Hub cache, under a name with an owner."""
    snapshot = context.scratch / "hub/hub/models--local--tokenizer/snapshots/0"
    snapshot.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(context.folder / name, snapshot)
    reference = snapshot.parents[1] / "refs/main"
    reference.parent.mkdir(exist_ok=True)
    reference.write_text("0")
    output = context.scratch / "aiperf"
    context.run(
        "aiperf",
        *("-m", "aiperf", "profile", "--model", context.model, "--url", context.target.url),
        *("--endpoint-type", "chat", "--streaming", "--api-key", KEY),
        *("--tokenizer", "local/tokenizer", "--request-count", "12", "--concurrency", "3"),
        *("--synthetic-input-tokens-mean", "24", "--output-tokens-mean", "8"),
        *("--ui", "none", "--artifact-dir", output),
    )
    profile = json.loads(next(output.rglob("profile_export_aiperf.json")).read_text())
    failures = (profile.get("error_request_count") or {}).get("avg", 0)
    requests = profile["request_count"]["avg"]
    return ClientResult(
        works=requests == 12 and not failures,
        version=context.installed_version("aiperf"),
        figures={"requests": requests, "failures": failures},
    )


CLIENTS: dict[str, Callable[[ClientContext], ClientResult]] = {
    "lm-eval": run_lm_eval,
    "locust": run_locust,
    "aiperf": run_aiperf,
}


def run_clients(config: ClientsConfig) -> None:
    for name in config.client:
        if name not in CLIENTS:
            raise MoecastError(unknown("client", name, CLIENTS))
    machine = describe_machine()
    folder = resolve(ModelConfig())
    results: dict[str, ClientResult] = {}
    with (
        tempfile.TemporaryDirectory() as scratch,
        run_server(environment={"MOECAST_API_KEY": KEY}) as target,
    ):
        context = ClientContext(
            target=target,
            model=ModelConfig().name,
            folder=folder,
            plain=PlainModel(folder),
            scratch=Path(scratch),
            environments=config.environments,
        )
        for name in config.client or CLIENTS:
            try:
                results[name] = CLIENTS[name](context)
            except ProcessFailed as error:
                works = False if is_built(name, config.environments) else None
                results[name] = ClientResult(works=works, why=str(error))
    part = write_part(config, "clients", machine=machine, clients=results)
    print_line("; ".join(clients_row(part)))
