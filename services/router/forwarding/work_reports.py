"""Reports of this router's work to its placement policy and its peer routers: each dispatch, start and finish. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace

from services.router.forwarding.attempt import Attempt
from services.router.placement.policy import (
    DISPATCH_LIFE_S,
    Dispatched,
    DispatchEvent,
    Finished,
    Generated,
    Hit,
    PlacementPolicy,
    Started,
)
from services.router.queue.release_queue import ReleaseQueue
from services.router.queue.replica_reservation import ReplicaReservation
from services.router.regions.local_prompts import LocalPrompts


class WorkReports:
    """Reports the prompts of attempts, and charges tenants for the computed tokens.

    INVARIANT: each reported dispatch is followed by exactly one finish. `reservations`: the prompts at replicas, by tenant.
    """

    def __init__(
        self,
        router: str,
        policy: PlacementPolicy,
        queue: ReleaseQueue[Attempt],
        publish: Callable[[DispatchEvent], None],
        block_tokens: int,
    ) -> None:
        """`publish`: takes each event for the peer routers."""
        self.reservations = ReplicaReservation()
        self.local = LocalPrompts()
        self._router = router
        self._policy = policy
        self._queue = queue
        self._publish_to_peers = publish
        self._block_tokens = block_tokens

    def dispatched(self, attempt: Attempt, now_s: float) -> None:
        """Report that `attempt` was sent to the replica that runs its prompt. A call that no user waits for is left out."""
        submitted, routing = attempt.submitted, attempt.routing
        if submitted.purpose:  # no dispatch is open, so neither its start nor its end is reported
            return
        placement = routing.placement
        assert placement is not None, attempt
        routing.is_dispatched = True
        if placement.prefill is not None:
            tenant, tokens = (submitted.tenant, submitted.priority_class), submitted.token_count
            routing.reservation = self.reservations.dispatch(
                tenant, submitted.weight, placement.prefill, placement.prefill_s, tokens, now_s
            )
        self._publish(
            Dispatched(
                self._router,
                submitted.request_id,
                placement.prefill or placement.decode,
                attempt.hashes,
                placement.prefill_s,
                now_s,
                now_s + DISPATCH_LIFE_S + 10 * placement.prefill_s,
                submitted.precedence,
                submitted.token_count,
            )
        )

    def started(self, attempt: Attempt, now_s: float) -> None:
        """Report that the engine has the prompt of `attempt`."""
        routing = attempt.routing
        if routing.reservation is not None:
            self.reservations.start(routing.reservation, now_s)
        if routing.is_dispatched:
            self._publish(Started(self._router, attempt.submitted.request_id, now_s))

    def settle(self, attempt: Attempt, now_s: float, hit: Hit | None = None) -> bool:
        """Report that the prompt was computed, or never will be. Return False if `attempt` has no open dispatch."""
        routing = attempt.routing
        if hit is not None and attempt.charge is not None:
            attempt.charge.settle(hit.computed_tokens)
        if not routing.is_dispatched:
            return False
        routing.is_dispatched = False
        if routing.reservation is not None:
            alone_s = self.reservations.end(routing.reservation, now_s)
            routing.reservation = None
            if hit is not None and hit.prefill_s > alone_s:
                # The engine spent the remaining time on earlier prompts.
                hit = replace(hit, prefill_s=alone_s)
        elif hit is not None:
            self.local.add(hit.computed_tokens, hit.local_s)
        if hit is not None:
            self._queue.settle_prefill(attempt, hit.computed_tokens)
            home = attempt.home
            if home is not None:
                home.uncached_tokens += hit.computed_tokens - attempt.ticket.work
        self._publish(Finished(self._router, attempt.submitted.request_id, now_s, hit))
        return True

    def keep_hashes(self, attempt: Attempt) -> None:
        """Drop the hashes of a computed prompt, unless they are needed until its generation ends."""
        decode = attempt.decode.replica
        if decode is None or decode.has_kv_events or attempt.submitted.purpose:
            attempt.hashes = ()
        else:
            attempt.hashes = array("Q", attempt.hashes)  # for minutes: 8 bytes for a block in place of 40

    def generated(self, attempt: Attempt, now_s: float) -> None:
        """Report the end of `attempt` to the policy, if an engine without KV events has its blocks in cache.

        Peer routers are not told. They learn the prompt's blocks from its finish.
        """
        placement, submitted, hashes = attempt.routing.placement, attempt.submitted, attempt.hashes
        attempt.hashes = ()
        is_there = attempt.is_local or attempt.decode.is_transferred
        if not (hashes and attempt.outcome.first_token_s and is_there) or placement is None:
            return
        # The last token is not in the cache: no step has computed its keys and values.
        tokens = submitted.token_count + attempt.next_position - submitted.start_position - 1
        output_blocks = max(0, tokens // self._block_tokens - len(hashes))
        self._policy.observe(Generated(placement.decode, hashes, output_blocks, now_s))

    def _publish(self, event: DispatchEvent) -> None:
        self._policy.observe(event)
        self._publish_to_peers(event)
