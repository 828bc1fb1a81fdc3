"""Configuration of `moecast collect`: prompts, workers (`launcher=`), recording, import."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from collect.traces.layout import ALL_SIGNALS
from predictors.config import RunConfig, chosen, require_at_least
from predictors.errors import MoecastError, unknown
from runtime.config import REFERENCE_MODEL, ModelConfig, check_sampling


class SourceKind(StrEnum):
    """Source of prompts."""

    PYDOCS = "pydocs"
    PYSOURCE = "pysource"
    JSONL = "jsonl"
    TEXT = "text"
    HUB = "hub"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    name: str = "pydocs"
    """Short name, as in `data=NAME`; written to the trace with each request."""
    kind: SourceKind = SourceKind.PYDOCS
    """pydocs: Python's language reference; pysource: the source code of its standard library;
    jsonl: a local file; text: a local file or folder; hub: a data set of the Hugging Face Hub."""
    path: str | None = None
    """The local file or folder (jsonl, text), or the data set's OWNER/NAME on the Hub."""
    subset: str | None = None
    """Configuration of the Hub data set, if it has several."""
    split: str = "train"
    """Split of the Hub data set."""
    files: str | None = None
    """A single file of the Hub data set; default: all of it."""
    revision: str | None = None
    """Commit of the Hub data set."""
    fields: list[str] = field(default_factory=list)
    """Keys whose texts make the prompt; a conversation gives its first user turn. Default: the
    first of prompt, text, question, instruction, content, messages, conversations."""
    chat: bool = False
    """Wrap each prompt in the model's chat template."""
    min_chars: int = 32
    """Characters below which a text is skipped."""
    num_prompts: int = 512
    """Most prompts to take; long texts are cut into several."""
    max_prompt_tokens: int = 256
    """Most tokens of a prompt; longer ones are cut."""
    max_new_tokens: int = 32
    """Most tokens to generate and record after each prompt."""

    def __post_init__(self) -> None:
        least = {"num_prompts": 1, "max_prompt_tokens": 1, "min_chars": 1, "max_new_tokens": 0}
        require_at_least(self, "data.", **least)


class LauncherKind(StrEnum):
    """The engine that runs the workers."""

    LOCAL = "local"
    RAY = "ray"
    SLURM = "slurm"


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    kind: LauncherKind = LauncherKind.LOCAL
    """local: processes of this machine; ray: actors; slurm: a job array (submitit)."""
    workers: int = 1
    """Workers, each with its own copy of the model; a single local worker is the command's own
    process."""
    retries: int = 3
    """Retries of a unit that failed or whose worker died."""
    threads: int | None = None
    """CPU threads of each worker; default: the cores of this machine divided by the workers."""
    ray_address: str | None = None
    """ray: a running cluster to join (HOST:PORT, or auto), with a token. Default: Ray is started on
    this machine, on loopback."""
    cpus: int = 1
    """ray, slurm: cores that each worker requests."""
    gpus: int = 0
    """GPUs of each worker; local: taken from those that are visible."""
    partition: str | None = None
    """slurm: the partition that the jobs are submitted to."""
    cluster: str | None = None
    """slurm: submitit's executor; `local` runs the jobs on this machine, for a trial."""
    options: dict[str, Any] = field(default_factory=dict)
    """slurm: more parameters of submitit, such as {timeout_min: 600, mem_gb: 64, slurm_account:
    NAME}. A job that reaches its time limit (24 hours by default) is replaced."""

    def __post_init__(self) -> None:
        least = {"workers": 1, "cpus": 1, "threads": 1, "retries": 0, "gpus": 0}
        require_at_least(self, "launcher.", **least)
        if self.ray_address is not None and self.kind is not LauncherKind.RAY:
            raise MoecastError(f"launcher.ray_address={self.ray_address} is for launcher=ray")

    @property
    def is_in_process(self) -> bool:
        """True if the command does the work itself, without workers."""
        return self.kind is LauncherKind.LOCAL and self.workers == 1


@dataclass(frozen=True, kw_only=True)
class CollectConfig(RunConfig):
    model: ModelConfig = chosen(ModelConfig, "model", REFERENCE_MODEL)
    data: DataConfig = chosen(DataConfig, "data", "pydocs")
    launcher: LauncherConfig = chosen(LauncherConfig, "launcher", "local")
    output: str | None = None
    """Folder of the trace, or an address (s3://BUCKET/PATH); an incomplete trace is completed.
    Default: runs/traces/MODEL/DATA-DIGEST, where `moecast train` finds it."""
    signals: list[str] = field(default_factory=lambda: [str(signal) for signal in ALL_SIGNALS])
    """Signals to record for each token and layer."""
    batch_size: int = 64
    """Prompts in a batch."""
    temperature: float = 0.0
    """0: greedy; above: sampled, by `seed`."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together have this probability."""
    shard_mib: int = 256
    """Size of a unit in MiB: held in memory, written as one file, recorded again if interrupted."""
    budget: str = "auto"
    """Memory for experts in each worker, as for `generate`. Give one if several workers share a
    machine."""

    def __post_init__(self) -> None:
        require_at_least(self, batch_size=1, shard_mib=1)
        check_sampling(self.temperature, self.top_p)
        if not self.signals:
            raise MoecastError(f"signals=[]: choose from {', '.join(ALL_SIGNALS)}")
        for signal in self.signals:
            if signal not in ALL_SIGNALS:
                raise MoecastError(f"signals: {unknown('signal', signal, map(str, ALL_SIGNALS))}")
        if len(set(self.signals)) < len(self.signals):
            raise MoecastError(f"signals={self.signals}: a signal is listed twice")


class ImportSplit(StrEnum):
    """Use of a log's requests."""

    BY_REQUEST = "by-request"
    HELD_OUT = "held-out"
    TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class ImportConfig(RunConfig):
    source: Path | None = None
    """Routing log, also as `.gz`: JSON lines with `layer`, `experts`, and if known `weights`,
    `token`, `request`, `position`, `phase`; or CSV with `layer`, `expert`, `weight`, `step`,
    `phase`."""
    output: str | None = None
    """Folder of the trace, or an address; default: runs/traces/imported/SOURCE."""
    model_id: str = "unknown"
    """Model that produced the log."""
    revision: str = "unknown"
    """Revision of the model, if known."""
    num_experts: int | None = None
    """Experts per layer; default: the highest id in the log plus one."""
    hidden_size: int = 0
    """Hidden size of the model, if known; predictors can be trained only with it."""
    dtype: str = "unknown"
    """Dtype of the model, if known."""
    split: ImportSplit = ImportSplit.BY_REQUEST
    """by-request: one request in ten is held out; held-out: all are, to replay them; train: none
    is."""
    origin: str = "unknown"
    """Address and licence of the log, kept in the trace."""

    def __post_init__(self) -> None:
        require_at_least(self, num_experts=1)
