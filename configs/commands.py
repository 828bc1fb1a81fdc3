"""The commands of every program, each declared once: for `moecast` and for `python -m PROGRAM`."""

from configs.command import Command

CHECK_MODEL = "runtime.store.model_source:check_model"
CHECK_TEXT_MODEL = "runtime.store.model_source:check_text_model"
CHECKS = {
    **dict.fromkeys(("generate", "chat", "serve"), CHECK_TEXT_MODEL),
    "doctor": "runtime.store.model_source:check_examined_model",
}
"""Checks of the commands that need more, or less, than a checkpoint."""

RUN = ("model", "model.local_only", "budget", "predictor", "system")
"""Basic options of the commands that run a model."""

MODEL_COMMANDS = tuple(
    Command(
        name=name,
        config=config,
        run=f"runtime.commands.{name}:run",
        check=CHECKS.get(name, CHECK_MODEL),
        summary=summary,
        example=example,
        basic=basic,
        positional=("model", "prompt") if name == "generate" else ("model",),
        resumes=name in ("batch", "pack"),
    )
    for name, config, summary, example, basic in (
        (
            "generate",
            "runtime.config:GenerateConfig",
            "Continues a prompt with a model whose experts stay within a memory budget.",
            'qwen2-moe-tiny prompt="The heart pumps blood" budget=50%',
            (*RUN, "prompt", "max_new_tokens", "temperature", "device", "verify"),
        ),
        (
            "chat",
            "runtime.generation.config:ChatConfig",
            "Talks with a model in the terminal.",
            "Qwen/Qwen3-30B-A3B model.local_only=false budget=50%",
            (*RUN, "system_prompt", "max_new_tokens", "temperature", "device"),
        ),
        (
            "serve",
            "runtime.serving.config:ServeConfig",
            "Runs an OpenAI-compatible server, whose clients share one budget.",
            "Qwen/Qwen3-30B-A3B model.local_only=false budget=50% port=8000",
            (*RUN, "host", "port", "api_key", "max_running", "kv_budget", "record", "device"),
        ),
        (
            "batch",
            "runtime.generation.config:BatchConfig",
            "Continues a file of prompts at the highest throughput; resumes if interrupted.",
            "qwen2-moe-tiny input=prompts.jsonl output=answers.jsonl budget=25%",
            (*RUN, "input", "output", "max_new_tokens", "temperature", "overwrite", "device"),
        ),
        (
            "verify",
            "runtime.config:VerifyModelConfig",
            "Compares logits and tokens with plain Transformers, bit by bit.",
            "qwen2-moe-tiny budget=15%,50%",
            (*RUN, "prompts", "max_new_tokens", "reference", "device"),
        ),
        (
            "bench",
            "runtime.tools.bench.config:BenchConfig",
            "Compares systems on this machine: same model and prompts, every token checked.",
            "qwen2-moe-tiny system=on-demand,promoe,moecast budget=25%",
            (*RUN, "batch_size", "max_new_tokens", "repetitions", "verify", "device", "run_dir"),
        ),
        (
            "doctor",
            "runtime.config:DoctorConfig",
            "Measures this machine with a model and suggests a budget.",
            "qwen2-moe-tiny",
            ("model", "model.local_only", "config_only", "budget", "digests"),
        ),
        (
            "pack",
            "runtime.config:PackConfig",
            "Repacks a model's experts for direct reads, optionally quantised.",
            "qwen2-moe-tiny output=packed",
            (
                *("model", "model.local_only", "output", "quantise", "group_size"),
                *("dense_output", "overwrite"),
            ),
        ),
        (
            "inflate",
            "runtime.config:InflateConfig",
            "Writes a copy of a model with larger experts that compute the same.",
            "qwen2-moe-tiny total_size=256MiB output=inflated",
            ("model", "output", "total_size", "expert_size"),
        ),
    )
)

RUNTIME = (
    *MODEL_COMMANDS,
    Command(
        name="monitor",
        config="runtime.serving.config:MonitorConfig",
        run="runtime.commands.monitor:run",
        summary="Writes alert rules for Prometheus and a dashboard for Grafana.",
        example="monitoring",
        positional=("output",),
        keeps_run=False,
    ),
)

DATA = ("data", "data.path", "data.num_prompts", "data.max_new_tokens")
"""Basic options of the prompts that a trace is recorded from."""

COLLECT = (
    Command(
        name="",
        config="collect.config:CollectConfig",
        run="collect.commands:record",
        check=CHECK_TEXT_MODEL,
        summary="Runs prompts through a model and records its hidden states and routing.",
        positional=("model",),
        resumes=True,
        example="qwen2-moe-tiny data=jsonl data.path=prompts.jsonl output=trace",
        basic=("model", "model.local_only", *DATA, "output", "budget", "launcher"),
    ),
    Command(
        name="import",
        config="collect.config:ImportConfig",
        run="collect.commands:import_log",
        summary="Makes a routing-only trace from a published routing log (JSON lines).",
        positional=("source",),
        example="routing.jsonl output=trace model_id=ORG/NAME",
        basic=("source", "output", "model_id", "num_experts", "split", "origin"),
    ),
)

TRAIN = (
    Command(
        name="",
        config="train.config:TrainConfig",
        run="train.commands:train",
        check=CHECK_MODEL,
        summary=(
            "Collects a trace if there is none, trains the predictors of all layers together, "
            "scores them and baselines, exports ONNX and writes zoo entries. By default those "
            "of the system `moecast`: `residual` and `reuse`."
        ),
        positional=("model",),
        resumes=True,
        example="qwen2-moe-tiny run_dir=runs/mine",
        basic=("model", "model.local_only", "predictor", "trace", *DATA, "max_epochs", "run_dir"),
    ),
    Command(
        name="reuse",
        config="train.config:TrainConfig",
        run="train.reuse_training:train_reuse",
        check=CHECK_MODEL,
        summary=(
            "Trains the predictor of reuse eviction and compares its hit rates with those of "
            "every other policy."
        ),
        positional=("model",),
        resumes=True,
        example="qwen2-moe-tiny run_dir=runs/reuse",
        basic=("model", "model.local_only", "trace", *DATA, "max_epochs", "run_dir"),
    ),
    Command(
        name="report",
        config="train.config:ReportConfig",
        run="train.report.build:report",
        summary="Makes report.html of a finished run again, from its results and its trace.",
        positional=("run_dir",),
        example="runs/mine",
        basic=("run_dir", "trace"),
        keeps_run=False,
        records=False,
    ),
)

EVALUATE = (
    Command(
        name="",
        config="train.evaluate.config:EvaluateConfig",
        run="train.evaluate.commands:evaluate",
        check="train.evaluate.config:check_model",
        summary=(
            "Replays the held-out requests of one trace through every system, on every machine, "
            "budget and batch size given, and ranks the systems: table, JSON, HTML report."
        ),
        positional=("model",),
        resumes=True,
        example="qwen2-moe-tiny system=promoe,moecast budget=25%,50% batch_size=1",
        basic=(
            *("model", "trace", "system", "hardware", "shape", "budget", "batch_size"),
            *("predictor", "entries", "run_dir"),
        ),
    ),
)

REFERENCE = (
    Command(
        name="",
        config="train.reference.config:ReferenceConfig",
        run="train.reference.commands:run",
        summary="Trains, audits and writes the reference model qwen2-moe-tiny.",
        example="corpus.root=texts",
        basic=("corpus.root", "output", "prompts", "run_dir"),
    ),
)

ZOO_BASIC = {
    "pull": ("name", "system", "zoo", "all", "locked", "output", "require_signature"),
    "score": ("name", "model", "trace", *DATA, "max_drop", "json"),
}
"""Options of `zoo` commands that have groups of options, without the groups' own."""

ZOO = tuple(
    Command(
        name=name,
        config=config if ":" in config else f"zoo.config:{config}",
        run=run if "." in run else f"zoo.commands.{run}",
        summary=summary,
        example=example,
        positional=positional,
        basic=ZOO_BASIC.get(name, ()),
        keeps_run=False,
    )
    for name, config, run, positional, example, summary in (
        (
            "list",
            "ListConfig",
            "list:list_entries",
            (),
            "model=qwen2-moe-tiny",
            "Lists the entries that `predictor=` accepts.",
        ),
        (
            "show",
            "ShowConfig",
            "list:show",
            ("name",),
            "qwen2-moe-tiny/stride",
            "Shows an entry's card and manifest.",
        ),
        (
            "verify",
            "VerifyEntryConfig",
            "list:verify",
            ("name",),
            "qwen2-moe-tiny/stride",
            "Checks the digest of every file of an entry.",
        ),
        (
            "compare",
            "CompareConfig",
            "list:compare",
            ("name", "other"),
            "qwen2-moe-tiny/residual qwen2-moe-tiny/stride",
            "Compares two entries: held-out metrics, latency, bytes and accuracy by layer.",
        ),
        (
            "score",
            "train.config:ScoreConfig",
            "train.score:score",
            ("name",),
            "qwen2-moe-tiny/residual data=jsonl data.path=prompts.jsonl",
            "Scores an entry on your prompts next to its card, and says whether it fits them.",
        ),
        (
            "promote",
            "PromoteConfig",
            "publish:promote",
            ("name", "alias"),
            "qwen2-moe-tiny/stride@candidate production max_drop=0.01",
            "Gives a version an alias, unless its metrics are worse than those of the one there.",
        ),
        (
            "pull",
            "runtime.commands.config:PullForSystemConfig",
            "runtime.commands.pull:run",
            ("name",),
            "qwen2-moe-tiny zoo=https://example.org/zoo",
            "Copies entries from another zoo into the user's: one, or all that a system needs.",
        ),
        (
            "lock",
            "LockConfig",
            "pull:lock",
            (),
            "names=qwen2-moe-tiny/stride",
            "Writes zoo.lock: the digest of each entry, and a zoo that other machines reach.",
        ),
        (
            "push",
            "PushConfig",
            "publish:push",
            ("path",),
            "runs/mine zoo=hf://ORG/NAME",
            "Publishes entries in a zoo, by default the user's.",
        ),
        (
            "sign",
            "SignConfig",
            "publish:sign",
            ("path",),
            "runs/mine/entries/stride key=private.pem",
            "Signs an entry's folder (OpenSSF model signing).",
        ),
        (
            "index",
            "IndexConfig",
            "publish:index",
            ("path",),
            "runs/mine/entries output=zoo",
            "Makes a zoo of a folder of entries, for a web server.",
        ),
        (
            "rm",
            "RemoveConfig",
            "publish:remove",
            ("name",),
            "qwen2-moe-tiny/stride",
            "Removes an entry, or a version of it, from a zoo.",
        ),
        (
            "gc",
            "CollectGarbageConfig",
            "publish:collect_garbage",
            (),
            "",
            "Removes the files that no entry references.",
        ),
    )
)

PROGRAMS = {
    "runtime": RUNTIME,
    "collect": COLLECT,
    "train": TRAIN,
    "train.evaluate": EVALUATE,
    "train.reference": REFERENCE,
    "zoo": ZOO,
}
"""By the package that `python -m` runs."""
