"""`PrefixRouter`: Ray Serve's interface to the routing by prompt prefix."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tokenleap.ray.cluster import (
    PrefixMemory,
)


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray's types are not read
    """Sends a request to the replica that has seen most of its prompt, if that is not too busy.

    Calls have the argument `keys` (`prompt_keys`); those without go to the replica with the fewest
    requests. If a replica takes no more, the next one in the order is tried.
    """

    queue_len_response_deadline_s = 1.0  # Ray's own is short for a machine that computes
    max_queue_len_response_deadline_s = 10.0

    def initialize_state(self, **_: Any) -> None:
        """Called by Ray before the first request."""
        self._memory = PrefixMemory()
        self._running: dict[str, set[str]] = defaultdict(set)  # of a replica: ids of requests

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Candidates in their order, each a rank of its own."""
        found = {each.replica_id.to_full_id_str(): each for each in candidate_replicas}
        loads = {name: len(self._running[name]) for name in found}
        return [[found[name]] for name in self._memory.ranked(_keys(pending_request), loads)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Called by Ray when a replica has a request."""
        name = replica_id.to_full_id_str()
        self._memory.saw(_keys(pending_request), name)
        self._running[name].add(pending_request.metadata.internal_request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray when a request has ended, in whatever way."""
        self._running[replica_id.to_full_id_str()].discard(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray when there are other replicas."""
        super().update_replicas(replicas)
        names = {each.replica_id.to_full_id_str() for each in replicas}
        self._memory.keep(names)
        for name in self._running.keys() - names:
            del self._running[name]


def _keys(request: PendingRequest | None) -> list[int]:
    return [] if request is None else request.kwargs.get("keys", [])
