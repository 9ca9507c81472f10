"""Copies the steps of a seeding into the cache of one replica.

A pull runs the prefix at its source, which has it in its cache, and gives the handoff to the target. One token behind the
prefix makes the source compute that token alone: an engine always computes the last block of a prompt. At most
SOURCE_PULLS_MAX pulls run at a source. One that computes prefixes instead of reading its cache is left out.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from controlplane.warmup.jobs import SeedResult, Target
from controlplane.warmup.seeding import SeedStep
from controlplane.warmup.session import Call, CallResult, ReplicaSession
from kvmesh.attach.frames import TOKEN_BYTES
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.clock import Clock

SOURCE_PULLS_START: Final = 2
SOURCE_PULLS_MAX: Final = 8
"""Pulls at a time from one source: few at first, and one more for each prefix that was in its cache."""

STEPS_MAX: Final = 8
"""Steps at a time at the target."""

PULL_S: Final = 5.0
"""Longest pull. One that takes longer fails. A prefix that the target computes may take all the time that is left."""

SOURCE_MISSES_MAX: Final = 3
"""Prefixes that a source computed itself, or failed in a row, after which nothing more is pulled from it."""

TARGET_FAILURES_MAX: Final = 8
"""Steps in a row that fail at the target, after which the seeding ends with an error."""

CONFIRM_S: Final = 1.0
"""Longest wait for the KV events of the last blocks."""

REPORT_S: Final = 1.5
"""Longest wait for the first load report. A replica at rest sends one each second."""

PULL_ESTIMATE_S: Final = 0.005
"""Prefill time of a cached prefix, for the lane of its source."""

PIECE_TOKENS: Final = 128
"""Tokens that a replay beside users computes at a time: the longest wait of a user's prompt for it."""

PAUSE_S_MAX: Final = 2.0
"""Longest pause of such a replay. A piece that waited behind users took little time of its own."""

SOURCE_OUTPUT_TOKENS: Final = 2
"""Output tokens of a pull at its source. An answer of one token would be complete, without a handoff."""


class _Fault(enum.Enum):
    """The part at which a step failed."""

    NONE = enum.auto()
    SOURCE = enum.auto()
    TARGET = enum.auto()


@dataclass(slots=True)
class Source:
    """A replica to pull from."""

    replica: Target
    session: ReplicaSession
    pulls: int = 0
    """Pulls that run."""
    hits: int = 0
    """Prefixes in a row that were in its cache."""
    misses: int = 0
    """Prefixes that the source computed itself."""
    failures: int = 0
    """Pulls in a row that failed at the source."""

    @property
    def has_place(self) -> bool:
        """True if a further pull may begin."""
        return self.pulls < min(SOURCE_PULLS_MAX, SOURCE_PULLS_START + self.hits)

    @property
    def is_usable(self) -> bool:
        """True while pulls may begin."""
        is_lost = bool(self.session.lost)
        return not is_lost and max(self.misses, self.failures) < SOURCE_MISSES_MAX


class Seeder:
    """One seeding. `error` is why it ended early; empty: it did not."""

    def __init__(
        self,
        target: ReplicaSession,
        sources: Mapping[str, Source],
        steps: Sequence[SeedStep],
        end_s: float,
        clock: Clock,
        time_share: float = 1.0,
    ) -> None:
        """`sources`: by name, all that `steps` name. `end_s`: on `clock`. `time_share`: see `SeedJob`."""
        self.error = ""
        self._target = target
        self._sources = sources
        self._end_s = end_s
        self._clock = clock
        self._time_share = time_share
        self._began_s = clock.now_s()
        self._waiting: dict[str, deque[tuple[int, SeedStep]]] = {}
        """Steps by source, with their rank."""
        for rank, step in enumerate(steps):
            self._waiting.setdefault(step.source, deque()).append((rank, step))
        self._freed = asyncio.Event()
        self._target_failures = 0
        self._cached_before: int | None = None
        # Counts of the result.
        self._left = len(steps)
        self._copied = 0
        self._failed = 0
        self._pulled_blocks = 0
        self._replayed_blocks = 0

    async def run(self) -> None:
        """Copy until no step is left, or until `error` is set. Then wait for the KV events of the last blocks."""
        before = await self._target.wait_load(lambda _: True, REPORT_S)
        if before is None:
            self.error = self._target.lost or f"no load report came within {REPORT_S:g} s"
            return
        self._cached_before = before.cached_block_count
        async with asyncio.TaskGroup() as group:
            for _ in range(STEPS_MAX if self._time_share == 1.0 else 1):
                group.create_task(self._work(), name="seed")
        copied = self._pulled_blocks + self._replayed_blocks
        await self._target.wait_load(
            lambda load: load.cached_block_count >= before.cached_block_count + copied, CONFIRM_S
        )

    def result(self, error: str) -> SeedResult:
        """Return the result so far. `error`: why the seeding ended early; empty: it did not, or its time was over."""
        return SeedResult(
            is_complete=not (self._left or self._failed or error),
            prefixes=self._copied,
            failed_prefixes=self._failed,
            pulled_blocks=self._pulled_blocks,
            replayed_blocks=self._replayed_blocks,
            confirmed_blocks=self._confirmed_blocks(),
            seconds=self._clock.now_s() - self._began_s,
            error=error,
        )

    def _confirmed_blocks(self) -> int:
        """Return the growth of the target's cache."""
        load = self._target.load
        if load is None or self._cached_before is None:
            return 0
        return max(0, load.cached_block_count - self._cached_before)

    async def _work(self) -> None:
        while not self.error:
            step = self._next()
            if step is None:
                if not self._left:
                    return
                self._freed.clear()
                await self._freed.wait()
                continue
            source = self._sources.get(step.source)
            began_s = self._clock.now_s()
            try:
                fault = await (self._replay(step) if source is None else self._pull(step, source))
                self._count(step, fault)
            finally:
                if source is not None:
                    source.pulls -= 1
                self._freed.set()
            if self._left:  # a busy target takes longer, and so has a longer pause
                pause_s = (self._clock.now_s() - began_s) * (1.0 / self._time_share - 1.0)
                await asyncio.sleep(min(PAUSE_S_MAX, pause_s))

    def _next(self) -> SeedStep | None:
        """Take the first step that may begin, with its place at the source. None: none may."""
        ready = []
        for name, steps in self._waiting.items():
            source = self._sources.get(name)
            if source is not None and not source.is_usable:
                self._left -= len(steps)
                self._failed += len(steps)
                steps.clear()
                self._freed.set()
            if steps and (source is None or source.has_place):
                ready.append((steps[0][0], name))
        if not ready:
            return None
        _, name = min(ready)
        if name in self._sources:
            self._sources[name].pulls += 1
        return self._waiting[name].popleft()[1]

    def _count(self, step: SeedStep, fault: _Fault) -> None:
        """Count the end of a step."""
        self._left -= 1
        if fault is _Fault.NONE:
            self._copied += step.is_last
            self._target_failures = 0
            if step.source:
                self._pulled_blocks += step.blocks
            else:
                self._replayed_blocks += step.blocks
            return
        self._failed += 1
        if fault is _Fault.TARGET:
            self._target_failures += 1

    async def _replay(self, step: SeedStep) -> _Fault:
        """Let the target compute the prefix."""
        is_prefill = self._target.replica.role == "prefill"
        phase = pb.PHASE_CONTEXT_ONLY if is_prefill else pb.PHASE_CONTEXT_AND_GENERATION
        return self._fault(await self._target.run(self._call(step, phase, 1, self._end_s)))

    async def _pull(self, step: SeedStep, source: Source) -> _Fault:
        """Run the prefix at the source, and give its handoff to the target."""
        end_s = min(self._end_s, self._clock.now_s() + PULL_S)
        call = replace(
            self._call(step, pb.PHASE_CONTEXT_ONLY, SOURCE_OUTPUT_TOKENS, end_s),
            token_ids=_with_tail(step.token_ids),
            keeps_handoff=True,
            estimate_s=PULL_ESTIMATE_S,
        )
        given = await source.session.run(call)
        if given.error or not given.context_phase_params:
            source.session.end(given.slot, pb.Cancel.REASON_COMPLETE)
            source.failures += 1
            return _Fault.SOURCE
        if _is_miss(given, step):
            source.misses, source.hits = source.misses + 1, 0
        else:
            source.hits += 1
        taken = CallResult()
        try:
            taken = await self._target.run(self._pull_call(step, given, source, end_s))
        finally:
            # A handoff that was pulled is released already.
            reason = pb.Cancel.REASON_TRANSFERRED if taken.is_transferred else pb.Cancel.REASON_COMPLETE
            source.session.end(given.slot, reason)
        if taken.failure == pb.Failure.CODE_HANDOFF_LOST:
            source.failures += 1
            return _Fault.SOURCE
        source.failures = 0
        return self._fault(taken)

    def _pull_call(self, step: SeedStep, given: CallResult, source: Source, end_s: float) -> Call:
        """Return the call that pulls `given` into the target, a prefill."""
        return replace(
            self._call(step, pb.PHASE_SEED, 1, end_s),
            token_ids=_with_tail(step.token_ids),
            context_phase_params=given.context_phase_params,
            kv_address=source.replica.kv_address,
            estimate_s=PULL_ESTIMATE_S,
        )

    def _call(
        self,
        step: SeedStep,
        phase: pb.Phase.ValueType,
        output_tokens: int,
        end_s: float,
    ) -> Call:
        return Call(
            phase=phase,
            token_ids=step.token_ids,
            output_tokens=output_tokens,
            deadline_s=end_s,
            purpose=budget_pb2.PURPOSE_WARM_UP,
            is_private=True,
        )

    def _fault(self, result: CallResult) -> _Fault:
        """Return where the step failed by the target's result, and end the seeding if the target takes nothing."""
        if not result.error:
            return _Fault.NONE
        name = self._target.replica.process_id
        if self._target.lost:
            self.error = f"{name}: {result.error}"
        elif self._target_failures + 1 >= TARGET_FAILURES_MAX:
            self.error = f"{name}: {TARGET_FAILURES_MAX} prefixes in a row failed: {result.error}"
        return _Fault.TARGET


def _with_tail(token_ids: bytes) -> bytes:
    """Return the prefix and one token behind it."""
    return token_ids + token_ids[:TOKEN_BYTES]


def _is_miss(given: CallResult, step: SeedStep) -> bool:
    """True if the source had less than half of the prefix in its cache."""
    return 2 * given.cached_tokens < len(step.token_ids) // TOKEN_BYTES
