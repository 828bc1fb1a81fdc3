"""How many answers' caches of keys and values fit into the memory that they are given together."""

from collections.abc import Iterable
from dataclasses import dataclass

from runtime.errors import BudgetError
from runtime.hf.kv import CacheSize


@dataclass(frozen=True)
class CacheBudget:
    """An answer is given room for its prompt and all that it may become, before it begins: none has
    to be taken back half-way.

    Raises:
        BudgetError: no cache is known to take any memory, or not even two tokens fit.
    """

    size: CacheSize
    budget_bytes: int

    def __post_init__(self) -> None:
        if self.size.of(1) == 0:
            raise BudgetError(
                "kv_budget: what this model's caches take can not be measured; leave it out"
            )
        if self.longest is not None and self.longest < 2:
            raise BudgetError(
                f"kv_budget={self.budget_bytes}: the cache of two tokens takes {self.size.of(2)} "
                "bytes; give more, or leave it out"
            )

    @property
    def longest(self) -> int | None:
        """Tokens of prompt and answer together that fit alone; None: any number."""
        if self.size.bytes_per_token == 0:
            return None
        return (self.budget_bytes - self.size.bytes_fixed) // self.size.bytes_per_token

    def bytes_of(self, lengths: Iterable[int]) -> int:
        """Of rows with so many tokens."""
        return sum(map(self.size.of, lengths))

    def fit(self, lengths: Iterable[int]) -> bool:
        """Whether all of these do together."""
        return self.bytes_of(lengths) <= self.budget_bytes
