"""Serve's request router: asks the policy, with what this process knows of the replicas' loads."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from mlxsrv.replicas.policy import choose


class ConversationRouter(RequestRouter):
    """Sends the requests of a session to one replica, unless it is busier than others by much."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are asked to take the request."""
        known = {each.replica_id.unique_id: each for each in candidate_replicas}
        lengths = self.replica_queue_len_cache
        loads = {name: lengths.get(each.replica_id) or 0 for name, each in known.items()}
        if pending_request is None:
            return [sorted(candidate_replicas, key=lambda r: loads[r.replica_id.unique_id])]
        pending_request.routing_context.should_backoff = True  # after the last of the list
        metadata = pending_request.metadata
        if metadata.session_id:
            order = choose(metadata.session_id, loads)
        else:
            order = choose(metadata.internal_request_id, loads, spare=1, slack=0)
        return [[known[name]] for name in order]
