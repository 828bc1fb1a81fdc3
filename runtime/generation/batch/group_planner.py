"""The group size n: the smallest that satisfies Klotski's inequalities and fits in memory.

Notation of Klotski, section 7, for one layer in seconds: t_c_A, t_c_G and t_c_E are the compute
times of a batch's attention, its gate and an expert; t_io_A, t_io_G and t_io_E are the transfer
times of their weights. K hot experts are prefetched; Q are the other experts that the group uses.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from predictors.base import Floats
from runtime.errors import PlanError

MAX_GROUP_SIZE = 64
"""Largest group size. Beyond it ("if n becomes excessively large", Klotski, section 7) latency
grows with n and throughput hardly."""


@dataclass(frozen=True, kw_only=True)
class PlannerCosts:
    """Times in seconds on this machine for this model and batch size.

    Measured while computation and transfers run at the same time.
    """

    attention: float
    """t_c_A: a layer without gate and routed experts, for one batch's decode step."""
    gate: float
    """t_c_G."""
    expert_fixed: float
    """t_c_E is `expert_fixed` plus `expert_per_token` for each token."""
    expert_per_token: float
    expert_io: float
    """t_io_E."""
    attention_io: float
    """t_io_A: the weights of a layer without gate and routed experts."""
    gate_io: float
    """t_io_G."""

    @property
    def calls_gates(self) -> bool:
        """False for models that compute with a router's weights without calling the module."""
        return self.gate > 0

    def with_dense_in_memory(self) -> "PlannerCosts":
        """Return the costs of a run that transfers experts only: t_io_A = t_io_G = 0."""
        return replace(self, attention_io=0.0, gate_io=0.0)

    def experts(self, used: float, tokens: float) -> float:
        """Compute time of `used` experts on `tokens` tokens in total."""
        return used * self.expert_fixed + tokens * self.expert_per_token


@dataclass(frozen=True)
class Inequality:
    """One of inequalities (4) to (7): computation must take at least as long as transfers."""

    number: int
    what: str
    computes: float
    transfers: float

    @property
    def holds(self) -> bool:
        return self.computes >= self.transfers


@dataclass(frozen=True)
class ExpertPopularity:
    """Distribution of tokens over the experts of each layer.

    It determines the length of Q (Klotski, section 7: "based on statistical data").
    """

    shares_LE: Floats
    """Probability that a token chooses an expert; each row adds up to top_k."""
    hot: int
    """K: number of hot experts."""

    @classmethod
    def even(cls, num_layers: int, num_experts: int, top_k: int, hot: int) -> "ExpertPopularity":
        """Make a uniform distribution, which needs the most transfers."""
        return cls(np.full((num_layers, num_experts), top_k / num_experts), hot)

    def expected(self, tokens: int) -> "ExpectedActivation":
        """Expected activation for a number of tokens, averaged over the layers."""
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
    """Expected number of experts that a step of a group uses in a layer, and tokens on them."""

    hot: float
    hot_tokens: float
    others: float
    """len(Q)."""
    other_tokens: float


def make_inequalities(
    n: int, *, batch_size: int, costs: PlannerCosts, popularity: ExpertPopularity
) -> list[Inequality]:
    """Evaluate inequalities (4) to (7) of Klotski, section 7, for a decode step."""
    used = popularity.expected(n * batch_size)
    c, k = costs, popularity.hot
    gates = n * (c.attention + c.gate)
    hot_compute = c.experts(used.hot, used.hot_tokens)
    others_compute = c.experts(used.others, used.other_tokens)
    return [
        Inequality(4, "the gate has arrived when attention ends", n * c.attention, c.gate_io),
        Inequality(
            5, "hot experts have arrived when the gates end", gates, c.gate_io + k * c.expert_io
        ),
        Inequality(
            6,
            "the first cold expert has arrived when hot ones end",
            gates + hot_compute,
            c.gate_io + (k + min(1.0, used.others)) * c.expert_io,
        ),
        Inequality(
            7,
            "the next layer has arrived when cold ones end",
            gates + hot_compute + others_compute,
            c.gate_io + (k + used.others) * c.expert_io + c.attention_io,
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class KVDemand:
    """Demand of the batches' KV caches, the largest first; with activations if memory is split."""

    batch_size: int
    batch_bytes: Sequence[int]
    """Bytes of each batch's caches at their final lengths."""
    working_bytes: int = 0
    """Bytes of the cache layers in use while the others are offloaded."""

    @property
    def num_batches(self) -> int:
        return len(self.batch_bytes)

    def kv_bytes(self, n: int) -> int:
        """Return the bytes that the first n batches need together."""
        return sum(self.batch_bytes[:n]) + self.working_bytes


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """The group size and the reasons for it."""

    n: int
    smallest: int | None
    """The least n for which all inequalities hold; None: none up to `MAX_GROUP_SIZE`."""
    fitting: int
    """The largest n whose caches fit."""
    inequalities: list[Inequality]
    """Evaluated at `n`."""
    kv_bytes: int
    """Bytes of the group's KV caches."""
    offloaded_bytes: int
    """Bytes of these beyond the budget."""
    notes: list[str]

    @property
    def hides_transfers(self) -> bool:
        """True if computation takes at least as long as transfers, in every inequality."""
        return all(row.holds for row in self.inequalities)

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "inequalities": [
                {**asdict(inequality), "holds": inequality.holds}
                for inequality in self.inequalities
            ],
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
    """Choose the group size.

    It is the smallest n that satisfies every inequality (Klotski, section 7: "n should be set to
    the smallest integer that satisfies the inequality group"), or the largest that memory and the
    input allow.

    Args:
        offloads: KV caches beyond `kv_budget` bytes are offloaded.
        asked: the user's n.

    Raises:
        PlanError: KV caches would not fit; the message names what would.
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
            f"n={asked} needs {demand.kv_bytes(asked)} bytes for its KV caches, and kv_budget is "
            f"{kv_budget}; use n={fitting}, kv_budget={demand.kv_bytes(asked)}, or offload with "
            "kv_budget=SIZE and kv_offload=auto"
        )
    notes: list[str] = []
    wanted = min(smallest or MAX_GROUP_SIZE, most)
    n = min(asked or min(wanted, fitting), demand.num_batches)
    if asked is not None and asked != wanted:
        notes.append(f"n={asked} as requested; the planner would choose {wanted}")
    if smallest is None:
        notes.append(f"no n up to {MAX_GROUP_SIZE} hides all transfers: the link is the bottleneck")
    elif n < smallest:
        reason = "the input has" if n == demand.num_batches else "memory holds"
        notes.append(f"{smallest} batches would hide all transfers; {reason} {n}")
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
    """Return the largest n up to `most` whose KV caches fit.

    Raises:
        PlanError: not even one batch fits.
    """
    if offloads:
        if kv_budget < demand.working_bytes:
            raise PlanError(
                f"kv_budget of {kv_budget} bytes does not hold the working copies of one layer's "
                f"cache; use at least kv_budget={demand.working_bytes}, or a smaller batch_size"
            )
        return most
    if demand.kv_bytes(1) > kv_budget:
        rows = max(1, demand.batch_size * kv_budget // max(1, demand.kv_bytes(1)))
        raise PlanError(
            f"one batch's KV cache takes {demand.kv_bytes(1)} bytes, and kv_budget is {kv_budget}; "
            f"use batch_size={rows}, kv_budget={demand.kv_bytes(1)}, or offload with "
            "kv_budget=SIZE and kv_offload=auto"
        )
    return max(n for n in range(1, most + 1) if demand.kv_bytes(n) <= kv_budget)
