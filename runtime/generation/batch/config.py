"""Settings of `python -m runtime batch`."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from predictors.errors import MoecastError
from runtime.config import MISSING, ServedConfig

AUTO = "auto"
"""`n=auto`: the planner's."""


class Fsync(StrEnum):
    """When results are made to outlast a power cut; a kill they outlast anyway."""

    EACH = "each"
    SECOND = "second"
    END = "end"


class Offload(StrEnum):
    """Where caches go that `kv_budget` has no room for."""

    AUTO = "auto"
    HOST = "host"
    DISK = "disk"
    NONE = "none"


@dataclass(kw_only=True)
class GroupConfig:
    """How prompts are batched and batches grouped; what `generate_many` takes by keyword."""

    batch_size: int = 8
    """Prompts of a batch: rows that are computed in one pass."""
    n: str = AUTO
    """Batches of a group, which go through each layer together; auto: the planner's least number
    that hides transfers."""
    max_new_tokens: int = 64
    """Tokens to generate at most, where a prompt does not say."""
    temperature: float = 0.0
    """0: greedy; above: sampled, by `seed`."""
    kv_budget: str | None = None
    """Memory for the caches of a group's batches; none: all of them, where memory is free."""
    kv_offload: Offload = Offload.AUTO
    """What `kv_budget` has no room for: host (below a device), disk, none (refused); auto: host
    below a device, else disk."""
    kv_folder: Path | None = None
    """Folder for caches on the disk; none: the system's temporary one."""
    sinks: int = 4
    """First tokens that attention keeps where `window` is not 0."""
    window: int = 0
    """Attend to the `sinks` first and so many last tokens only; outputs change. 0: to all."""
    measure_again: bool = False
    """Measure this machine anew, whatever was measured before."""

    def __post_init__(self) -> None:
        for name, least in {"batch_size": 1, "max_new_tokens": 1, "sinks": 0, "window": 0}.items():
            if getattr(self, name) < least:
                raise MoecastError(f"{name}={getattr(self, name)}: must be at least {least}")
        if self.temperature < 0:
            raise MoecastError(f"temperature={self.temperature}: must be 0 (greedy) or above")
        if self.n != AUTO and not (self.n.isdecimal() and int(self.n) > 0):
            raise MoecastError(f"n={self.n}: must be auto or a number of batches, at least 1")
        if self.window and self.kv_budget is not None:
            raise MoecastError(
                f"window={self.window} with kv_budget={self.kv_budget}: a window's caches are "
                "small and stay where they are; leave kv_budget out"
            )

    @property
    def asked_n(self) -> int | None:
        """`n` where it is given."""
        return None if self.n == AUTO else int(self.n)


@dataclass(kw_only=True)
class BatchConfig(GroupConfig, ServedConfig):
    input: Path = MISSING
    """Prompts, one JSON object a line: `prompt` (text), `messages` or `tokens` (ids); if wanted
    `id` and `max_new_tokens`."""
    output: Path = MISSING
    """Results, a line as each prompt ends: id, text, tokens, finish_reason. The same command
    carries on where it was interrupted."""
    overwrite: bool = False
    """Start again, dropping the results that `output` holds."""
    budget: str = "50%"
    """Memory for experts: a size (4GiB, 512MiB) or a share of all experts' bytes (50%)."""
    memory: str | None = None
    """Memory for experts and caches together, which the planner divides; in place of `budget` and
    `kv_budget`."""
    fsync: Fsync = Fsync.SECOND
    """When results are made to outlast a power cut: each, second (at most one apart), end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory is not None and self.kv_budget is not None:
            raise MoecastError(
                f"memory={self.memory} with kv_budget={self.kv_budget}: memory is divided by the "
                "planner; give memory, or budget and kv_budget"
            )


SCHEMAS: dict[str, type] = {"batch": BatchConfig}
