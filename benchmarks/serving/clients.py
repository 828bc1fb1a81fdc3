"""Other people's programs as clients, unmodified, each in an environment of its own.

    python -m benchmarks.serving.environments
    python -m benchmarks.serving.clients

openai and litellm run checks (`workers/`): answers equal to plain Transformers', streams equal to
whole answers, refusals as each client's own exceptions. lm-eval's `local-completions` runs a small
task (`tasks/`), whose log-likelihoods must be plain Transformers'. locust and aiperf put load on it
and must see no failure. `only=openai,litellm` runs some of them; `folder=PATH` is where the
environments are.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import interpreter, is_built
from benchmarks.serving.environments import FOLDER, REQUIREMENTS
from benchmarks.serving.expected import Plain
from benchmarks.serving.results import here, keep
from benchmarks.serving.server import Server, server
from runtime.config import ModelConfig
from runtime.store.model_source import resolve

HERE = Path(__file__).parent
KEY = "a-key-of-this-benchmark"
PROMPT = "The heart pumps blood through the body, and the lungs"
NEW_TOKENS = 24
TOLERANCE_NATS = 1e-3
"""lm-eval adds up what JSON carries of each token; the server's own are plain Transformers'."""


@dataclass(frozen=True)
class Bench:
    """What a client is run with."""

    target: Server
    model: str
    folder: Path
    """Of the model: its tokenizer is there."""
    plain: Plain
    scratch: Path
    environments: Path

    def run(self, name: str, *words: str | Path, cwd: Path | None = None, **variables: str) -> str:
        """A program of an environment, offline; what it printed.

        Raises:
            ClientFailed: it failed.
        """
        quiet = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.scratch / "hub"), "NO_PROXY": "*"}
        command = [interpreter(name, self.environments).absolute(), *words]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=cwd or self.scratch,
            env=os.environ | quiet | variables,
            check=False,
            timeout=900,
        )
        if done.returncode != 0:
            raise ClientFailed(
                f"exit code {done.returncode}: {(done.stderr or done.stdout)[-1500:]}"
            )
        return done.stdout


class ClientFailed(RuntimeError):
    """A client ended in an error; says what it wrote."""


def checked(name: str) -> Callable[[Bench], dict[str, Any]]:
    """A worker that checks by itself."""

    def run(bench: Bench) -> dict[str, Any]:
        order = {
            "url": bench.target.api,
            "model": bench.model,
            "key": KEY,
            "prompt": PROMPT,
            "tokens": NEW_TOKENS,
            "expected": bench.plain.continuation(PROMPT, NEW_TOKENS),
        }
        path = bench.scratch / f"{name}.json"
        path.write_text(json.dumps(order))
        printed = bench.run(name, HERE / "workers" / f"with_{name}.py", path)
        found = json.loads(printed.splitlines()[-1])
        return found | {"works": not any(found["checks"].values())}

    return run


def lm_eval(bench: Bench) -> dict[str, Any]:
    """A task of choices and one of continuations; each choice's log-likelihood beside ours."""
    output = bench.scratch / "lm-eval"
    model = (
        f"model={bench.model},base_url={bench.target.api}/completions,num_concurrent=4,"
        f"max_retries=1,tokenizer_backend=huggingface,tokenizer={bench.folder.absolute()}"
    )
    bench.run(
        "lm-eval",
        *("-m", "lm_eval", "--model", "local-completions", "--model_args", model),
        *("--tasks", "moecast_cloze,moecast_continue", "--include_path", HERE / "tasks"),
        *("--batch_size", "4", "--log_samples", "--output_path", output),
        cwd=HERE / "tasks",  # where the task's data are
        OPENAI_API_KEY=KEY,
    )
    results = json.loads(next(output.rglob("results_*.json")).read_text())
    worst, choices = 0.0, 0
    for line in next(output.rglob("samples_moecast_cloze_*.jsonl")).read_text().splitlines():
        sample = json.loads(line)
        document = sample["doc"]
        for choice, (told, _) in zip(document["choices"], sample["filtered_resps"], strict=True):
            ours = bench.plain.loglikelihood(document["context"], f" {choice}")
            worst, choices = max(worst, abs(float(told) - ours)), choices + 1
    continued = [
        json.loads(line)
        for line in next(output.rglob("samples_moecast_continue_*.jsonl")).read_text().splitlines()
    ]
    same = 0
    for sample in continued:
        # lm-eval ends the text at a line break.
        ours = bench.plain.continuation(sample["doc"]["context"], 12).partition("\n")[0]
        same += sample["resps"][0][0].partition("\n")[0] == ours
    return {
        "version": results["lm_eval_version"],
        "accuracy": results["results"]["moecast_cloze"]["acc,none"],
        "choices": choices,
        "worst_difference_nats": worst,
        "continuations": len(continued),
        "continuations_equal": same,
        "works": worst <= TOLERANCE_NATS and same == len(continued),
    }


def locust(bench: Bench) -> dict[str, Any]:
    """Four users for ten seconds."""
    printed = bench.run(
        "locust",
        *("-m", "locust", "-f", HERE / "workers" / "locustfile.py", "--headless", "--json"),
        *("--users", "4", "--spawn-rate", "4", "--run-time", "10s", "--host", bench.target.url),
        MOECAST_API_KEY=KEY,
    )
    rows = json.loads(printed[printed.index("[") :])
    requests, failures = (sum(row[key] for row in rows) for key in ("num_requests", "num_failures"))
    return {
        "version": installed(bench, "locust"),
        "requests": requests,
        "failures": failures,
        "works": requests > 0 and failures == 0,
    }


def aiperf(bench: Bench) -> dict[str, Any]:
    """Its tokenizer must be in the layout of the Hub's cache, under a name with an owner."""
    snapshot = bench.scratch / "hub/hub/models--local--tokenizer/snapshots/0"
    snapshot.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(bench.folder / name, snapshot)
    reference = snapshot.parents[1] / "refs/main"
    reference.parent.mkdir(exist_ok=True)
    reference.write_text("0")
    output = bench.scratch / "aiperf"
    bench.run(
        "aiperf",
        *("-m", "aiperf", "profile", "--model", bench.model, "--url", bench.target.url),
        *("--endpoint-type", "chat", "--streaming", "--api-key", KEY),
        *("--tokenizer", "local/tokenizer", "--request-count", "12", "--concurrency", "3"),
        *("--synthetic-input-tokens-mean", "24", "--output-tokens-mean", "8"),
        *("--ui", "none", "--artifact-dir", output),
    )
    found = json.loads(next(output.rglob("profile_export_aiperf.json")).read_text())
    errors = found.get("error_request_count") or {}
    requests = found["request_count"]["avg"]
    return {
        "version": installed(bench, "aiperf"),
        "requests": requests,
        "failures": errors.get("avg", 0),
        "works": requests == 12 and not errors.get("avg", 0),
    }


def installed(bench: Bench, name: str) -> str:
    asked = f"from importlib.metadata import version; print(version({name!r}))"
    return bench.run(name, "-c", asked).strip()


CLIENTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "openai": checked("openai"),
    "litellm": checked("litellm"),
    "lm-eval": lm_eval,
    "locust": locust,
    "aiperf": aiperf,
}


def main(arguments: dict[str, str]) -> None:
    described = here()
    environments = Path(arguments.get("folder", FOLDER))
    wanted = arguments["only"].split(",") if "only" in arguments else list(CLIENTS)
    folder = resolve(ModelConfig())
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as scratch,
        server(environment={"MOECAST_API_KEY": KEY}) as target,
    ):
        bench = Bench(
            target=target,
            model=ModelConfig().name,
            folder=folder,
            plain=Plain(folder),
            scratch=Path(scratch),
            environments=environments,
        )
        for name in wanted:
            if not is_built(name, environments, REQUIREMENTS):
                said = "no environment: python -m benchmarks.serving.environments"
                found[name] = {"works": None, "why": f"{said} only={name}"}
                continue
            try:
                found[name] = CLIENTS[name](bench)
            except ClientFailed as error:
                found[name] = {"works": False, "why": str(error)}
    keep("clients", {"clients": found}, arguments, described)


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
