"""Several replicas of a served model behind a router, on one simulated clock.

Each replica is a `Simulator` with an arena and a link of its own that decodes several requests
together, as the server does: a prompt by itself, then one token of every running request a step.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.policy.build import build_planner, build_prefetcher
from runtime.policy.counters import Counters, added
from runtime.policy.routing import Mass, Replica, Routing
from runtime.sim.hardware import Hardware
from runtime.sim.replay import simulate_step
from runtime.sim.simulator import Simulator
from runtime.sim.step import BatchedStep, RecordedStep


@dataclass(eq=False)
class Request:
    """One of them, with its times in simulated seconds."""

    arrival: float
    steps: Sequence[RecordedStep]
    """Its prompt's, then one for each token."""
    mass_LE: Mass
    """What its prompt is expected to need."""
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    _left: deque[RecordedStep] = field(default_factory=deque)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The server's own."""

    max_running: int = 8
    max_waiting: int = 64


class SimulatedReplica:
    """Its clock runs while it has something to do."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        system: SystemConfig,
        hardware: Hardware,
        slots: int,
        limits: Limits,
    ):
        self._spec, self._hardware, self._limits = spec, hardware, limits
        self._prefetcher = build_prefetcher(
            system,
            spec,
            num_slots=[slots],
            chunk_bytes=[hardware.chunk_bytes] * spec.num_layers,
        )
        self._simulator = Simulator(
            self._prefetcher,
            hardware,
            predictor=None,
            planner=build_planner(system, spec, self._prefetcher),
        )
        self.prefill = [Counters() for _ in range(spec.num_layers)]
        self.decode = [Counters() for _ in range(spec.num_layers)]
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    def take(self, request: Request) -> None:
        """At the router's time, which is not before any step of this replica began."""
        self._waiting.append(request)

    def advance(self, until: float) -> None:
        """Steps that begin before `until`; one may end after it."""
        while (self._waiting or self._running) and self._now < until:
            self._step()
        if not (self._waiting or self._running) and until > self._now:
            self._simulator.compute(until - self._now)  # idle

    def finish(self) -> None:
        """All that is left."""
        while self._waiting or self._running:
            self._step()

    @property
    def _now(self) -> float:
        return self._simulator.now

    def _step(self) -> None:
        if self._waiting and len(self._running) < self._limits.max_running:
            request = self._waiting.popleft()
            # A replica that was idle waits for it.
            if request.arrival > self._now:
                self._simulator.compute(request.arrival - self._now)
            request.started = self._now
            self._replay(request.steps[0], self.prefill, new_request=True)
            request.first_token = self._now
            request._left = deque(request.steps[1:])
            self._running.append(request)
        else:
            steps = [request._left.popleft() for request in self._running]
            self._replay(BatchedStep(steps), self.decode, new_request=False)
        for request in [one for one in self._running if not one._left]:
            request.ended = self._now
            self._running.remove(request)

    def _replay(self, step: RecordedStep, counters: list[Counters], *, new_request: bool) -> None:
        self._prefetcher.counters = counters
        self._prefetcher.begin_step(new_request=new_request)
        seconds = self._hardware.layer_seconds(len(step.tokens_T))
        simulate_step(self._simulator, None, step, spec=self._spec, layer_seconds=seconds)
        self._prefetcher.end_step()

    def seen(self, name: str) -> Replica:
        """As the router sees it now."""
        shape = self._spec.num_layers, self._spec.num_experts
        resident_LE = np.zeros(shape, dtype=np.bool_)
        for layer, e in self._prefetcher.top.cache:
            resident_LE[layer, e] = True
        return Replica(
            name=name,
            resident_LE=resident_LE,
            running=len(self._running),
            waiting=len(self._waiting),
            max_running=self._limits.max_running,
            max_waiting=self._limits.max_waiting,
        )


@dataclass(frozen=True)
class Outcome:
    """What a routing gave."""

    requests: Sequence[Request]
    replicas: Sequence[SimulatedReplica]
    num_refused: int
    sent_to: Sequence[int]
    """The replica of each request that was taken."""

    def as_dict(self) -> dict[str, Any]:
        """Hit rates over all replicas; times in seconds, waiting included."""
        served = [one for one in self.requests if one.ended is not None]
        ttft = [one.first_token - one.arrival for one in served if one.first_token is not None]
        whole = [one.ended - one.arrival for one in served if one.ended is not None]
        decode = added(layer for one in self.replicas for layer in one.decode)
        prefill = added(layer for one in self.replicas for layer in one.prefill)
        both = added([decode, prefill])
        sent = np.bincount(self.sent_to, minlength=len(self.replicas))
        return {
            "served": len(served),
            "refused": self.num_refused,
            "hit_rate": both.hit_rate,
            "decode_hit_rate": decode.hit_rate,
            "prefill_hit_rate": prefill.hit_rate,
            "bytes_moved": both.bytes_moved,
            "ttft_seconds": float(np.mean(ttft)),
            "ttft_p95_seconds": float(np.percentile(ttft, 95)),
            "latency_seconds": float(np.mean(whole)),
            "latency_p95_seconds": float(np.percentile(whole, 95)),
            "busiest_share": float(sent.max() / sent.sum()),
        }


def route(
    requests: Iterable[Request],
    routing: Routing,
    make: Callable[[], SimulatedReplica],
    *,
    num_replicas: int,
) -> Outcome:
    """Sends each request, at its arrival, to the replica that the routing names.

    `requests` ascend by arrival. What no queue has room for is refused and counted.
    """
    replicas = [make() for _ in range(num_replicas)]
    taken, sent_to, num_refused = [], [], 0
    for request in requests:
        for replica in replicas:
            replica.advance(request.arrival)
        seen = [replica.seen(str(i)) for i, replica in enumerate(replicas)]
        chosen = routing.choose(request.mass_LE, seen)
        if chosen is None:
            num_refused += 1
            continue
        routing.sent(request.mass_LE, seen[chosen])
        replicas[chosen].take(request)
        taken.append(request)
        sent_to.append(chosen)
    for replica in replicas:
        replica.finish()
    return Outcome(taken, replicas, num_refused, sent_to)
