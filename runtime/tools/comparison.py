"""Variants and conditions of a comparison, live (`runtime.tools.bench`) or in a replay."""

from dataclasses import dataclass

from runtime.config import SystemConfig


@dataclass(frozen=True)
class Condition:
    """Memory and load, which are the same for all variants that are compared."""

    budget: str
    batch: int

    def __str__(self) -> str:
        return f"budget {self.budget}, batch {self.batch}"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A system, or one with some of its options changed, under its name in tables and figures."""

    label: str
    system: SystemConfig
    predictor: str | None = None
    """Key of the forecasts in a replay; None: nothing is prefetched on forecasts."""
    reuse_predictor: str | None = None
    """Key of the reuse forecasts in a replay; None: the eviction policy has none."""

    @property
    def forecasts(self) -> tuple[str | None, str | None]:
        """Keys of the forecasts and of the reuse forecasts."""
        return self.predictor, self.reuse_predictor


@dataclass(frozen=True)
class Case:
    """A variant in a condition."""

    variant: Variant
    condition: Condition

    def __str__(self) -> str:
        return f"{self.variant.label}, {self.condition}"
