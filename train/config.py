"""Options of `moecast train` and `moecast zoo score`."""

from dataclasses import dataclass, field
from enum import StrEnum

from collect.config import DataConfig, LauncherConfig
from predictors.config import PredictorConfig, RunConfig, chosen, require_at_least
from predictors.errors import MoecastError, unknown
from runtime.config import REFERENCE_MODEL, HardwareConfig, ModelConfig, ShapeConfig, SystemConfig
from train.tracking.config import LoggerKind
from zoo.config import EntryConfig


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
        least = {"max_epochs": 1, "batch_size": 1, "replay_tokens": 1, "devices": 1, "threads": 1}
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
