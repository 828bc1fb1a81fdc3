"""The commands of every program, each declared once: for `moecast` and for `python -m PROGRAM`."""

from configs.command import Command

CHECK_MODEL = "runtime.store.model_source:check_model"
CHECK_TEXT_MODEL = "runtime.store.model_source:check_text_model"

RUNTIME = tuple(
    Command(
        name=name,
        config=name,
        run=f"runtime.commands.{name}:run",
        check=CHECK_TEXT_MODEL if name in ("generate", "chat", "serve") else CHECK_MODEL,
        summary=summary,
        positional=("model", "prompt") if name == "generate" else ("model",),
        resumes=name in ("batch", "pack"),
    )
    for name, summary in (
        ("generate", "Continues a prompt with a model whose experts stay within a memory budget."),
        ("chat", "Talks with a model in the terminal."),
        ("serve", "Runs an OpenAI-compatible server, whose clients share one budget."),
        ("batch", "Continues a file of prompts at the highest throughput; resumes if interrupted."),
        ("verify", "Compares logits and tokens with plain Transformers, bit by bit."),
        ("bench", "Compares systems on this machine: same model and prompts, every token checked."),
        ("doctor", "Measures this machine with a model and suggests a budget."),
        ("pack", "Repacks a model's experts for direct reads, optionally quantised."),
        ("inflate", "Writes a copy of a model with larger experts that compute the same."),
    )
)

COLLECT = (
    Command(
        name="",
        config="collect",
        run="collect.commands:record",
        check=CHECK_TEXT_MODEL,
        summary="Runs prompts through a model and records its hidden states and routing.",
        positional=("model",),
        resumes=True,
    ),
    Command(
        name="import",
        config="import",
        run="collect.commands:import_log",
        summary="Makes a routing-only trace from a published routing log (JSON lines).",
        positional=("source",),
    ),
)

TRAIN = (
    Command(
        name="",
        config="train",
        run="train.commands:train",
        check=CHECK_MODEL,
        summary=(
            "Collects a trace if there is none, trains the predictors of all layers together, "
            "scores them and baselines, exports ONNX and writes zoo entries. By default those "
            "of the system `moecast`: `residual` and `reuse`."
        ),
        positional=("model",),
        resumes=True,
    ),
    Command(
        name="reuse",
        config="train",
        run="train.reuse_training:train_reuse",
        check=CHECK_MODEL,
        summary=(
            "Trains the predictor of reuse eviction and compares its hit rates with those of "
            "every other policy."
        ),
        positional=("model",),
        resumes=True,
    ),
    Command(
        name="report",
        config="report",
        run="train.report.build:report",
        summary="Makes report.html of a finished run again, from its results and its trace.",
        positional=("run_dir",),
        keeps_run=False,
        records=False,
    ),
)

EVALUATE = (
    Command(
        name="",
        config="evaluate",
        run="train.evaluate.commands:evaluate",
        check="train.evaluate.config:check_model",
        summary=(
            "Replays the held-out requests of one trace through every system, on every machine, "
            "budget and batch size given, and ranks the systems: table, JSON, HTML report."
        ),
        positional=("model",),
        resumes=True,
    ),
)

REFERENCE = (
    Command(
        name="",
        config="reference",
        run="train.reference.commands:run",
        summary="Trains, audits and writes the reference model qwen2-moe-tiny.",
    ),
)

ZOO = tuple(
    Command(
        name=name,
        config=f"zoo_{name}",
        run=f"zoo.commands.{run}",
        summary=summary,
        positional=(positional,) if positional else (),
        keeps_run=False,
    )
    for name, run, positional, summary in (
        ("list", "list:list_entries", None, "Lists the entries that `predictor=` accepts."),
        ("show", "list:show", "name", "Shows an entry's card and manifest."),
        ("verify", "list:verify", "name", "Checks the digest of every file of an entry."),
        ("pull", "pull:pull", "name", "Copies entries from another zoo into the user's."),
        ("lock", "pull:lock", None, "Writes zoo.lock, the digest of each entry."),
        ("push", "publish:push", "path", "Publishes entries in a zoo, by default the user's."),
        ("sign", "publish:sign", "path", "Signs an entry's folder (OpenSSF model signing)."),
        ("index", "publish:index", "path", "Makes a zoo of a folder of entries, for a web server."),
        ("rm", "publish:remove", "name", "Removes an entry, or a version of it, from a zoo."),
        ("gc", "publish:collect_garbage", None, "Removes the files that no entry references."),
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
