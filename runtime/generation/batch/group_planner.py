"""How many batches a group has: klotski's inequalities, solved for the smallest n that fits.

The paper's names, of one layer and in seconds: t_c_A, t_c_G, t_c_E what a batch's attention, its
gate and an expert compute; t_io_A, t_io_G, t_io_E what their weights take to transfer. K hot
experts are prefetched; Q are the others that the group's tokens choose.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from predictors.base import Floats
from runtime.errors import PlanError

MAX_GROUP_SIZE = 64
"""Batches beyond which the paper would change the strategy by hand ("if n becomes excessively
large"): latency grows with n, throughput hardly."""


@dataclass(frozen=True, kw_only=True)
class PlannerCosts:
    """Of this machine, this model and this batch size.

    While computation and transfers run together, each at the speed that it then has.
    """

    attention: float
    """t_c_A: all of a layer for one batch's decode step but its gate and its routed experts."""
    gate: float
    """t_c_G."""
    expert_fixed: float
    """t_c_E is this and `expert_per_token` for each token."""
    expert_per_token: float
    expert_io: float
    """t_io_E."""
    attention_io: float = 0.0
    """t_io_A: 0 where dense weights stay where they are computed with, as here."""
    gate_io: float = 0.0
    """t_io_G."""

    def experts(self, used: float, tokens: float) -> float:
        """So many experts on so many tokens together."""
        return used * self.expert_fixed + tokens * self.expert_per_token


@dataclass(frozen=True)
class Inequality:
    """One of (4) to (7): the computation on the left hides the transfers on the right."""

    number: int
    what: str
    computes: float
    transfers: float

    @property
    def holds(self) -> bool:
        return self.computes >= self.transfers


@dataclass(frozen=True)
class ExpertPopularity:
    """How a layer's tokens spread over its experts: "we determine the length of each layer of Q
    based on statistical data".
    """

    shares_LE: Floats
    """Probability that a token chooses an expert; each row adds up to top_k."""
    hot: int
    """K."""

    @classmethod
    def even(cls, num_layers: int, num_experts: int, top_k: int, hot: int) -> "ExpertPopularity":
        """Nothing is known: every expert alike, the most transfers that there can be."""
        return cls(np.full((num_layers, num_experts), top_k / num_experts), hot)

    def expected(self, tokens: int) -> "ExpectedActivation":
        """What so many tokens use of a layer, mean over the layers."""
        ordered_LE = -np.sort(-self.shares_LE, axis=1)
        used_LE = 1 - (1 - np.minimum(ordered_LE, 1.0)) ** tokens
        hot, rest = slice(None, self.hot), slice(self.hot, None)
        return ExpectedActivation(
            hot=float(used_LE[:, hot].sum(axis=1).mean()),
            hot_tokens=float(tokens * ordered_LE[:, hot].sum(axis=1).mean()),
            others=float(used_LE[:, rest].sum(axis=1).mean()),
            other_tokens=float(tokens * ordered_LE[:, rest].sum(axis=1).mean()),
        )


@dataclass(frozen=True)
class ExpectedActivation:
    """Experts of a layer that a group's step uses, and tokens on them; expected values."""

    hot: float
    hot_tokens: float
    others: float
    """len(Q)."""
    other_tokens: float


def make_inequalities(
    n: int, *, batch_size: int, costs: PlannerCosts, popularity: ExpertPopularity
) -> list[Inequality]:
    """(4) to (7), section 7, of a decode step: one token of every row."""
    used = popularity.expected(n * batch_size)
    hot, c, k = popularity.hot, costs, popularity.hot
    gates = n * (c.attention + c.gate)
    hot_compute = c.experts(used.hot, used.hot_tokens)
    others_compute = c.experts(used.others, used.other_tokens)
    return [
        Inequality(4, "the gate is there when attention ends", n * c.attention, c.gate_io),
        Inequality(5, "hot experts, when the gates end", gates, c.gate_io + hot * c.expert_io),
        Inequality(
            6,
            "the first cold expert, when hot ones end",
            gates + hot_compute,
            c.gate_io + (k + min(1.0, used.others)) * c.expert_io,
        ),
        Inequality(
            7,
            "the next layer, when cold ones end",
            gates + hot_compute + others_compute,
            c.gate_io + (k + used.others) * c.expert_io + c.attention_io,
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class KVDemand:
    """What is to be run, in batches of which the largest come first."""

    batch_size: int
    num_batches: int
    kv_bytes: Callable[[int], int]
    """Of the caches of the first so many batches, when their last tokens have come."""
    working_bytes: int = 0
    """Of caches that are beside the computation for a moment, where others are outside."""


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """`n`, and why."""

    n: int
    smallest: int | None
    """The least n for which all inequalities hold; None: none up to `MAX_GROUP_SIZE`."""
    fitting: int
    """The largest n whose caches fit."""
    inequalities: list[Inequality]
    """At `n`."""
    kv_bytes: int
    """Of the group's caches."""
    offloaded_bytes: int
    """Of these, beyond the budget."""
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "inequalities": [{**asdict(one), "holds": one.holds} for one in self.inequalities],
        }


def plan_group(
    demand: KVDemand,
    costs: PlannerCosts,
    popularity: ExpertPopularity,
    *,
    kv_budget: int,
    offloads: bool,
    asked: int | None = None,
) -> GroupPlan:
    """The smallest n for which every inequality holds ("n should be set to the smallest integer
    that satisfies the inequality group"), or the largest that memory and the input allow.

    Args:
        kv_budget: bytes.
        offloads: caches beyond the budget go elsewhere.
        asked: n as the user wants it.

    Raises:
        PlanError: caches would not fit; the message names what would.
    """
    most = min(MAX_GROUP_SIZE, demand.num_batches)
    table = {
        n: make_inequalities(n, batch_size=demand.batch_size, costs=costs, popularity=popularity)
        for n in range(1, MAX_GROUP_SIZE + 1)
    }
    smallest = next((n for n, rows in table.items() if all(row.holds for row in rows)), None)
    fitting = max_fitting_group(demand, kv_budget, max(most, asked or 1), offloads=offloads)
    if asked is not None and asked > fitting:
        raise PlanError(
            f"n={asked} needs {demand.kv_bytes(asked)} bytes for its batches' caches and has "
            f"{kv_budget}: n={fitting} fits, or kv_budget={demand.kv_bytes(asked)}, or offload "
            "with kv_budget=SIZE and kv_offload=auto"
        )
    notes: list[str] = []
    wanted = min(smallest or MAX_GROUP_SIZE, most)
    n = asked or min(wanted, fitting)
    n = min(n, demand.num_batches)
    if asked is not None and asked != wanted:
        notes.append(f"n={asked} as asked; the plan's is {wanted}")
    if smallest is None:
        notes.append(f"no n up to {MAX_GROUP_SIZE} hides all transfers: the link is the bottleneck")
    elif n < smallest:
        why = "of this input" if n == demand.num_batches else "fit in memory"
        notes.append(f"{smallest} batches would hide all transfers, {n} {why}")
    kv = demand.kv_bytes(n)
    return GroupPlan(
        n=n,
        smallest=smallest,
        fitting=fitting,
        inequalities=table[min(n, MAX_GROUP_SIZE)],
        kv_bytes=kv,
        offloaded_bytes=max(0, kv - kv_budget),
        notes=notes,
    )


def max_fitting_group(demand: KVDemand, kv_budget: int, most: int, *, offloads: bool) -> int:
    """The largest n up to `most` whose caches fit.

    Raises:
        PlanError: not even one batch's do.
    """
    if offloads:
        if kv_budget < demand.working_bytes:
            raise PlanError(
                f"kv_budget of {kv_budget} bytes is less than one layer's cache takes to work "
                f"with; the least is kv_budget={demand.working_bytes}, or a smaller batch_size"
            )
        return most
    if demand.kv_bytes(1) > kv_budget:
        rows = max(1, demand.batch_size * kv_budget // max(1, demand.kv_bytes(1)))
        raise PlanError(
            f"one batch's cache takes {demand.kv_bytes(1)} bytes and {kv_budget} are there: "
            f"batch_size={rows} would fit, or kv_budget={demand.kv_bytes(1)}, or offload with "
            "kv_budget=SIZE and kv_offload=auto"
        )
    return max(n for n in range(1, most + 1) if demand.kv_bytes(n) <= kv_budget)


@dataclass(frozen=True)
class MemorySplit:
    """Memory for experts and for caches, in bytes (klotski 6.1)."""

    experts: int
    caches: int


def split_memory(
    memory: int,
    demand: KVDemand,
    costs: PlannerCosts,
    popularity: ExpertPopularity,
    *,
    least_experts: int,
    asked: int | None = None,
) -> tuple[MemorySplit, GroupPlan]:
    """Caches of the smallest n that hides transfers come first.

    What is left holds experts, which then need no transfer ("when there is ample free memory, it
    can be further utilized to reduce some I/O").

    Args:
        least_experts: bytes that the experts under way need.

    Raises:
        PlanError: the memory is less than one batch and its experts need, with that least.
    """
    least = least_experts + demand.kv_bytes(1)
    if memory < least:
        raise PlanError(
            f"memory of {memory} bytes is too small: experts under way need {least_experts}, one "
            f"batch's cache {demand.kv_bytes(1)}; the least is memory={least}, or a smaller "
            "batch_size"
        )
    made = plan_group(
        demand,
        costs,
        popularity,
        kv_budget=memory - least_experts,
        offloads=False,
        asked=asked,
    )
    return MemorySplit(experts=memory - made.kv_bytes, caches=made.kv_bytes), made


def cumulative_bytes(per_batch: Sequence[int]) -> Callable[[int], int]:
    """From n to the bytes of the first n batches' caches."""
    sums = np.concatenate([[0], np.cumsum(per_batch)])
    return lambda n: int(sums[min(n, len(per_batch))])
