"""Settings of `python -m benchmarks tables`."""

from dataclasses import dataclass

from predictors.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class TablesConfig(RunConfig):
    """`python -m benchmarks tables` has no options."""
