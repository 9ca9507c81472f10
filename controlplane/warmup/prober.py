"""Checks of one replica: a cancelled request frees its blocks, and handoffs with its peers work."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from controlplane.rollouts.golden import Prompt
from controlplane.warmup.handoffs import compute, continued, run_by_handoff, source_end_s
from controlplane.warmup.jobs import Target
from controlplane.warmup.session import Call, ReplicaSession, opened
from kvmesh.attach import frames
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.clock import Clock

PEERS_MAX: Final = 16
"""Peers that exchange a handoff with the replica."""

HANDOFFS_MAX: Final = 4
"""Handoffs at a time."""

CHECK_S: Final = 3.0
"""Longest handoff, and longest request of the cancel check before its cancel."""

FREE_S: Final = 1.0
"""Time in which a cancelled request has to free its blocks."""

SETTLE_S: Final = 0.15
"""Time after which a load report shows a change. A replica reports changes each 50 ms, and its stream adds 20 ms."""

LONG_OUTPUT_TOKENS: Final = (1024, 256, 16)
"""Output of the request that is cancelled: the first value that the replica takes. The request must not end by itself."""

WINDOW_TOKENS: Final = 2
"""Flow-control window of that request."""

HANDOFF_OUTPUT_TOKENS: Final = 2
"""Output of a handoff: the prefill's token, and one of decode."""

_TOO_LARGE: Final = frozenset({pb.Refusal.REASON_INVALID, pb.Refusal.REASON_KV_FULL})
"""Refusals of an output that is too long for the replica's context, or for the KV blocks of its probes."""


class Prober:
    """The checks of one probe. `end_s`: when they end, on `clock`."""

    def __init__(
        self,
        session: ReplicaSession,
        prompts: Sequence[Prompt],
        end_s: float,
        clock: Clock,
        source: ReplicaSession | None = None,
    ) -> None:
        """`source`: session on a prefill, which computes the prompt that a decode continues until its cancel."""
        self._session = session
        self._end_s = end_s
        self._clock = clock
        self._source = source
        self._shortest = min((prompt.token_ids for prompt in prompts), key=len, default=(1,))
        self.handoffs_well = 0
        self.handoffs_failed = 0

    async def frees_blocks(self) -> bool | None:
        """Start a request, cancel it, and return whether its blocks were free within FREE_S. None: not known.

        The result is unknown if the request cannot be started, if no load report shows it, or if other requests run.
        """
        session = self._session
        await asyncio.sleep(SETTLE_S)  # until a load report shows the end of the calls before
        before = await session.wait_load(lambda _: True, FREE_S)
        if before is None or before.queued_request_count or before.running_request_count:
            return None
        idle = _held(before)
        for output_tokens in LONG_OUTPUT_TOKENS:
            call, given = await self._long_call(output_tokens)
            active = session.start(call)
            try:
                await self._until_first(active.first)
                result = active.result
                if result is not None and result.refusal in _TOO_LARGE:
                    continue
                if result is not None and result.error:
                    return None
                shown = await session.wait_load(lambda load: _held(load) > idle, FREE_S)
            finally:
                session.end(active.slot, pb.Cancel.REASON_COMPLETE)
                if self._source is not None:
                    self._source.end(given, pb.Cancel.REASON_COMPLETE)
            return await self._is_free(idle) if shown is not None else None
        return None

    async def exchange(
        self, peers: Sequence[Target], open_session: Callable[[Target], ReplicaSession]
    ) -> None:
        """Exchange a handoff with each of the first PEERS_MAX `peers`, and count them."""
        waiting = iter(peers[:PEERS_MAX])

        async def work(waiting: Iterator[Target]) -> None:
            for peer in waiting:
                session = open_session(peer)
                async with opened((session,)):
                    is_well = await self._exchange(peer, session)
                self.handoffs_well += is_well is True
                self.handoffs_failed += is_well is False

        async with asyncio.TaskGroup() as group:
            for _ in range(HANDOFFS_MAX):
                group.create_task(work(waiting), name="handoff")

    async def _exchange(self, peer: Target, session: ReplicaSession) -> bool | None:
        """Return whether a prompt's handoff goes from its prefill to its decode. None: the decode takes no handoffs."""
        if peer.role == "prefill":
            prefill, decode = session, self._session
        else:
            prefill, decode = self._session, session
        call = self._call(self._fresh_ids(), pb.PHASE_GENERATION_ONLY, HANDOFF_OUTPUT_TOKENS)
        end_s = source_end_s(call.deadline_s, self._clock)
        (taken,) = await run_by_handoff(prefill, decode, (call,), end_s)
        if not taken.error and len(taken.token_ids) == HANDOFF_OUTPUT_TOKENS:
            return True
        return None if decode.load is not None and decode.load.aggregated else False

    async def _until_first(self, first: asyncio.Event) -> None:
        """Wait for the first token or the end of a request, at most until its deadline."""
        try:
            async with asyncio.timeout(max(0.0, self._deadline_s() - self._clock.now_s())):
                await first.wait()
        except TimeoutError:
            return

    async def _is_free(self, idle: int) -> bool | None:
        """Return whether the request that has just been cancelled holds nothing within FREE_S."""
        freed = await self._session.wait_load(lambda load: _held(load) <= idle, FREE_S)
        if freed is not None:
            return True
        load = self._session.load
        is_disturbed = load is None or load.queued_request_count or load.running_request_count
        return None if is_disturbed or self._session.lost else False

    async def _long_call(self, output_tokens: int) -> tuple[Call, int]:
        """Return the request to cancel, and the slot of its handoff at the source; 0: none."""
        token_ids = self._fresh_ids()
        if self._session.replica.role == "prefill":
            return self._call(token_ids, pb.PHASE_CONTEXT_ONLY, HANDOFF_OUTPUT_TOKENS, keeps_handoff=True), 0
        call = self._call(token_ids, pb.PHASE_CONTEXT_AND_GENERATION, output_tokens, window=WINDOW_TOKENS)
        if self._source is None:
            return call, 0
        end_s = source_end_s(self._end_s, self._clock)
        (given,) = await compute(self._source, (replace(call, output_tokens=HANDOFF_OUTPUT_TOKENS),), end_s)
        call = replace(call, deadline_s=self._deadline_s())
        return (call if given.error else continued(call, given, self._source)), given.slot

    def _call(
        self,
        token_ids: bytes,
        phase: pb.Phase.ValueType,
        output_tokens: int,
        *,
        window: int | None = None,
        keeps_handoff: bool = False,
    ) -> Call:
        return Call(
            phase=phase,
            token_ids=token_ids,
            output_tokens=output_tokens,
            deadline_s=self._deadline_s(),
            purpose=budget_pb2.PURPOSE_PROBE,
            window=window,
            keeps_handoff=keeps_handoff,
        )

    def _fresh_ids(self) -> bytes:
        """Return the tokens of the shortest prompt in another order.

        The replica has cached the blocks of the prompt itself. It would compute the rest alone, which is another shape, and
        a cold one.
        """
        return frames.pack_ids(random.sample(self._shortest, k=len(self._shortest)))

    def _deadline_s(self) -> float:
        return min(self._end_s, self._clock.now_s() + CHECK_S)


def _held(load: pb.LoadReport) -> int:
    """Return a count that grows while a replica holds something for a request: blocks at decode, handoffs at prefill."""
    return load.block_reserved_count + load.held_handoff_count
