"""Serve's request router for model replicas: asks this process's board which replica answers first.

Serve creates one for each handle, in the process that holds the handle, and sends this module there by value. So the
module keeps no state of its own, and finds the board by the model's name.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Any

from ray.serve._private.common import RunningReplicaInfo
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.generation_calls import GenerationCall
from deployments.routing.asked import Asked, asked_of
from deployments.routing.board import Board, board_of
from engine.request import RequestId

MAX_RANKS = 8
"""So many replicas are tried one after another, then all the others together."""
SPARE_CALLS = 16
"""Places of a replica that no generation takes. Serve's broadcasts, such as for health and metrics, wait for one."""


class _ReplicaForGenerations(RunningReplica):
    """A replica that counts as full without its spare places."""

    def __init__(self, replica_info: RunningReplicaInfo, max_generations: int) -> None:
        super().__init__(replica_info)
        self._max_generations = max_generations

    @property
    def max_ongoing_requests(self) -> int:
        max_calls: int = super().max_ongoing_requests
        return min(self._max_generations, max_calls)


class FirstTokenRouter(RequestRouter):
    """Sends a generation to the replica that is expected to return its first token first.

    With one replica, or for other calls, the choice is left to Serve.
    """

    def initialize_state(self, *, model: str, max_generations: int) -> None:
        """Find the board. Serve calls it once, with the most generations of a replica."""
        self._board: Board = board_of(model)
        self._max_generations = max_generations
        # The request that the current task routes. Serve finds requests by an id that all calls of one HTTP request
        # share, and a request for several choices makes several calls.
        self._routed: ContextVar[PendingRequest | None] = ContextVar("routed", default=None)
        self._asked: dict[RequestId, Asked] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Pass Serve's list of replicas on to the board."""
        super().update_replicas(replicas)
        self._board.set_replicas([replica.replica_id.unique_id for replica in replicas])

    def create_replica_wrapper(self, replica_info: RunningReplicaInfo) -> RunningReplica:
        """Return the replica that Serve describes."""
        return _ReplicaForGenerations(replica_info, self._max_generations)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that Serve has found dead."""
        super().on_replica_actor_died(replica_id)
        self._board.lose(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which to try them."""
        self._routed.set(pending_request)
        if pending_request is None:
            return [candidate_replicas]
        # If all are full, Serve waits a while before it retries.
        pending_request.routing_context.should_backoff = True
        call = _generation(pending_request)
        if len(candidate_replicas) < 2 or call is None:
            return [candidate_replicas]
        if pending_request.future.done():
            # Its caller is gone, and nobody would report its end to the board.
            return []
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        order = self._board.choose(self._asked_of(call, pending_request), list(by_id), time.monotonic())
        ranked = [by_id[replica_id] for replica_id in order]
        return [*([replica] for replica in ranked[:MAX_RANKS]), ranked[MAX_RANKS:]]

    def _asked_of(self, call: GenerationCall, pending: PendingRequest) -> Asked:
        asked = self._asked.get(call.request_id)
        if asked is None:
            # Kept: while all replicas are full, Serve asks again and again, and a long prompt takes milliseconds.
            asked = self._asked[call.request_id] = asked_of(call, self._board.block_tokens)
            pending.future.add_done_callback(lambda _: self._asked.pop(call.request_id))
        return asked

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata: Any = None) -> None:
        """Assign a replica to exactly the request that it was chosen for."""
        routed = self._routed.get()
        if routed is None:
            super()._fulfill_next_pending_request(replica, request_metadata)
        elif not routed.future.done():
            call = _generation(routed)
            if call is not None:
                self._board.move(call.request_id, replica.replica_id.unique_id)
            self._record_queue_wait_time(routed)
            routed.future.set_result(replica)
            self._remove_pending_request_from_indices(routed)


def _generation(pending: PendingRequest) -> GenerationCall | None:
    call = pending.args[0] if pending.args else None
    return call if isinstance(call, GenerationCall) else None
