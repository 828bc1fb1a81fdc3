"""`runtime.policy.routing` as Ray Serve asks for it: ranks of replicas for a request."""

from typing import Any

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from runtime.policy.routing import ROUTINGS, Mass, Replica


class ExpertRouter(RequestRouter):
    """Lives where requests come in; replicas tell it every second what is resident."""

    def initialize_state(
        self,
        *,
        routing: str,
        num_layers: int,
        num_experts: int,
        max_running: int,
        max_waiting: int,
    ) -> None:
        self._routing = ROUTINGS[routing]()
        self._shape = num_layers, num_experts
        self._max_running, self._max_waiting = max_running, max_waiting
        self._views: dict[str, Replica] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The policy's choice, then the others, the least loaded first: when Ray finds the first
        one full.
        """
        if pending_request is not None:
            # Else Ray asks again at once, without end, while all are full.
            pending_request.routing_context.should_backoff = True
        seen = [self._seen(replica) for replica in candidate_replicas]
        chosen = self._routing.choose(self._mass(pending_request), seen)
        order = sorted(range(len(seen)), key=lambda i: (i != chosen, seen[i].load))
        return [[candidate_replicas[i]] for i in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        view = self._views.get(replica_id.unique_id)
        if view is not None:
            self._routing.sent(self._mass(pending_request), view)

    def _mass(self, request: PendingRequest | None) -> Mass:
        """The second argument of `Engine.answer`."""
        if request is not None and len(request.args) > 1 and request.args[1] is not None:
            return np.asarray(request.args[1], dtype=np.float32)
        return np.zeros(self._shape, dtype=np.float32)

    def _seen(self, replica: RunningReplica) -> Replica:
        name = replica.replica_id.unique_id
        waiting = self.replica_queue_len_cache.get(replica.replica_id) or 0
        resident = (replica.routing_stats or {}).get("resident")
        view = Replica(
            name=name,
            resident_LE=unpacked(resident, *self._shape),
            running=waiting,
            max_running=self._max_running,
            max_waiting=self._max_waiting,
        )
        self._views[name] = view
        return view


def unpacked(resident: str | None, num_layers: int, num_experts: int) -> np.ndarray:
    """`[L, E]` of what `Engine.record_routing_stats` tells; nothing yet: nothing is resident."""
    if not resident:
        return np.zeros((num_layers, num_experts), dtype=np.bool_)
    bits = bin(int(resident, 16))[3:]  # after `0b` and the leading 1
    flat = np.frombuffer(bits.encode(), dtype=np.uint8) == ord("1")
    return flat.reshape(num_layers, num_experts)
