"""Options of `moecast train`, `moecast zoo score` and `moecast evaluate`."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from collect.config import DataConfig, LauncherConfig
from predictors.config import PredictorConfig, RunConfig, chosen, require_at_least, several
from predictors.errors import MoecastError, unknown
from runtime.config import REFERENCE_MODEL, HardwareConfig, ModelConfig, ShapeConfig, SystemConfig
from runtime.store.model_source import resolve
from zoo.config import EntryConfig


class LoggerKind(StrEnum):
    """Destination of a run's curves and figures."""

    CSV = "csv"
    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"


class Loss(StrEnum):
    """Loss of the networks."""

    BCE = "bce"
    LISTWISE = "listwise"


@dataclass(frozen=True, kw_only=True)
class TracedConfig(RunConfig):
    """Options of every command that reads a trace of a model, or records it."""

    model: ModelConfig = chosen(ModelConfig, "model", REFERENCE_MODEL)
    data: DataConfig = chosen(DataConfig, "data", "pydocs")
    shape: ShapeConfig = chosen(ShapeConfig, "shape", "qwen1.5-moe")
    trace: str | None = None
    """Folder or address of a finished trace. Default: runs/traces/MODEL/DATA, recorded if it is
    missing."""

    @property
    def folder(self) -> Path:
        """The run folder of a command that always has one."""
        assert self.run_dir is not None
        return self.run_dir


@dataclass(frozen=True, kw_only=True)
class ScoringConfig(TracedConfig):
    """Options of every command that scores predictors."""

    system: SystemConfig = chosen(SystemConfig, "system", "promoe")
    hardware: HardwareConfig = chosen(HardwareConfig, "hardware", "rtx4090-pcie4")
    budget: str = "50%"
    """Memory for experts in the replay behind fetch_rate: a size or a share of all experts."""
    replay_tokens: int = 500
    """Generated tokens to replay for fetch_rate and hit rates; accuracy is taken on all tokens."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ScoringConfig):
    predictor: PredictorConfig = chosen(PredictorConfig, "predictor", "residual")
    other_hardware: HardwareConfig = chosen(HardwareConfig, "hardware", "desktop-nvme4")
    launcher: LauncherConfig = chosen(LauncherConfig, "launcher", "local")
    shifted: DataConfig = chosen(
        DataConfig, "data", "pysource", num_prompts=64, max_prompt_tokens=128, max_new_tokens=16
    )
    """To score on, not to learn from: a fraction of the prompts will do."""
    shifted_trace: str | None = None
    """The same for prompts of another distribution, on which predictors are scored too."""
    score_shifted: bool = True
    """Score on the shifted prompts; false saves recording them."""
    other_kinds: dict[str, str] = field(default_factory=dict)
    """Finished traces of other prompts, as in `{chat: runs/traces/chat}`: cards tell each
    predictor's accuracy on them."""
    zoo: str | None = None
    """Score this zoo's entries anew, and train nothing."""
    logger: list[str] = field(default_factory=lambda: [LoggerKind.CSV.value])
    """Destinations of curves, figures and entries: csv, tensorboard, wandb, mlflow."""
    loss: Loss = Loss.BCE
    """bce: calibrated scores; listwise: softmax cross-entropy against the chosen set."""
    max_epochs: int = 5
    """Epochs over the training requests."""
    devices: int = 1
    """Devices to train on (Lightning's DDP; with launcher=ray Ray Train), each with its share of
    every batch. Never run on several GPUs."""
    batch_size: int = 256
    """Tokens per step, which every network learns from."""
    lr: float = 4e-3
    """Peak learning rate of AdamW."""
    weight_decay: float = 1e-2
    """Weight decay of AdamW."""
    figures: bool = True
    """Write report.html; without it, the same command writes it later."""
    overwrite: bool = False
    """Train from the beginning, even if there is a checkpoint to resume from."""
    threads: int | None = None
    """CPU threads of torch; its own choice unless given."""

    def __post_init__(self) -> None:
        # One token has no deviation to normalise by.
        least = {"max_epochs": 1, "batch_size": 2, "replay_tokens": 1, "devices": 1, "threads": 1}
        require_at_least(self, **least, weight_decay=0)
        for kind in self.logger:
            if kind not in list(LoggerKind):
                raise MoecastError(unknown("logger", kind, list(LoggerKind)))
        if not 0 < self.lr <= 1:
            raise MoecastError(f"lr={self.lr}: must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(ScoringConfig, EntryConfig):
    trace: str | None = None
    """Folder or address of a finished trace. Default: runs/traces/MODEL/DATA, recorded if it is
    missing. All of its requests are scored; of the entry's own trace the held-out ones."""
    max_drop: float = 0.02
    """Drop of the accuracy, and of that of the worst layer, below the card's, beyond two standard
    errors, from which on the entry does not fit these prompts."""
    json: bool = False
    """Print JSON instead of a table."""

    def __post_init__(self) -> None:
        require_at_least(self, replay_tokens=1, max_drop=0)


OURS = "moecast"
"""The system whose rank in every condition is reported."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(TracedConfig):
    system: list[SystemConfig] = several("system")
    """Systems to compare; the baseline is always among them."""
    hardware: list[HardwareConfig] = several("hardware", "rtx4090-pcie4,desktop-nvme4")
    """Machines to simulate."""
    baseline: SystemConfig = chosen(SystemConfig, "system", "on-demand")
    """The system without prefetching that speed-ups are against, at equal budget."""
    budget: list[str] = field(default_factory=lambda: ["10%", "25%", "50%", "75%"])
    """Memory for experts: sizes, or shares of all experts."""
    batch_size: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    """Requests that decode together."""
    predictor: str | None = None
    """Kind, zoo entry or folder, in place of what each system names; or a run folder, as for
    `entries`."""
    entries: Path | None = None
    """Run folder of `moecast train`, or a folder with an entry for each kind; looked at before the
    zoo."""
    replay_tokens: int = 500
    """Generated held-out tokens to replay, in whole requests."""
    figures: bool = True
    """Write report.html, whose figures need further replays."""
    workers: int | None = None
    """Processes that replay; default: one for each core."""
    overwrite: bool = False
    """Replay all conditions, even those whose results are in the run folder."""

    def __post_init__(self) -> None:
        require_at_least(self, replay_tokens=1, workers=1)
        if not self.budget or not self.batch_size:
            raise MoecastError(
                "budget and batch_size must name at least one value, as in budget=25%"
            )
        if min(self.batch_size) < 1:
            raise MoecastError(f"batch_size={min(self.batch_size)}: must be at least 1")
        if self.baseline.prefetch:
            raise MoecastError(
                f"baseline={self.baseline.name} prefetches: name a system that does not, such as "
                "baseline=on-demand"
            )

    @property
    def batches(self) -> list[int]:
        return sorted(set(self.batch_size))


def check_model(config: EvaluateConfig) -> None:
    """Refuses a model that cannot be served, before heavy imports.

    Raises:
        CheckpointError: it is needed to record the trace, and cannot be served.
    """
    if config.trace is None:
        resolve(config.model)
