"""Runs Lightning over a trace: callbacks, checkpoints, resuming."""

import hashlib
import logging
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import Logger

from collect.traces import Trace
from train.callbacks import PlainProgress, RunRecord, SaveEachEpoch
from train.checkpoint import SafeCheckpointIO
from train.data import TraceData
from train.module import StackFit
from train.networks import Edge, NetworkStack

CHECKPOINT = Path("checkpoints", "last.ckpt")


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """Everything that the trained weights depend on, beside the trace."""

    kinds: tuple[str, ...]
    width: int
    loss: str
    max_epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    seed: int


@dataclass(frozen=True)
class Fitted:
    """The trained networks and what it took."""

    stack: NetworkStack
    edges: list[Edge]
    steps: int
    seconds: float
    resumed: bool


def fit(
    trace: Trace,
    edges: list[Edge],
    settings: FitSettings,
    *,
    run_dir: Path,
    logger: Logger,
    fresh: bool = False,
) -> Fitted:
    """Trains all networks together; goes on from the run folder's checkpoint if there is one.

    Deterministic: the same trace, settings and number of threads give the same weights, with or
    without an interruption between two passes. Raises CheckpointError when the checkpoint is
    damaged or of another run.
    """
    quiet_lightning()
    seed_everything(settings.seed, verbose=False)
    data = TraceData(trace, batch_size=settings.batch_size, seed=settings.seed)
    first_pass = data.batches(epoch=0)
    module = StackFit(
        trace.spec,
        edges,
        width=settings.width,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        loss=settings.loss,
        total_steps=settings.max_epochs * len(first_pass),
    )
    module.normalise_by(next(iter(first_pass)))
    checkpoint = run_dir / CHECKPOINT
    if fresh:
        checkpoint.unlink(missing_ok=True)
    resumed = checkpoint.exists()
    record = {"trace": trace.digest, **asdict(settings)}
    progress = RichProgressBar() if sys.stderr.isatty() else PlainProgress()
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=settings.max_epochs,
        logger=logger,
        log_every_n_steps=10,
        callbacks=[RunRecord(record), SaveEachEpoch(checkpoint), progress],
        plugins=[SafeCheckpointIO()],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=isinstance(progress, RichProgressBar),
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
    )
    started = time.perf_counter()
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(module, data, ckpt_path=str(checkpoint) if resumed else None)
    except SystemExit as error:
        # Lightning turns Ctrl-C into an exit of its own and switches the signal off.
        signal.signal(signal.SIGINT, on_interrupt)
        raise KeyboardInterrupt from error
    return Fitted(
        module.stack.cpu().eval(),
        edges,
        trainer.global_step,
        time.perf_counter() - started,
        resumed,
    )


def digest_of(stack: NetworkStack) -> str:
    """sha256 over the weights: equal runs have equal digests."""
    digest = hashlib.sha256()
    for name, tensor in sorted(stack.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def quiet_lightning() -> None:
    """Its remarks on devices and workers are not about anything that the user can set."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    torch.set_float32_matmul_precision("highest")
