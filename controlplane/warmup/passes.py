"""One pass: each shape once on one replica, the smallest first.

A prefill runs prompts, a decode batches of short answers.
"""

from __future__ import annotations

import asyncio
from typing import Final

from controlplane.warmup import pass_prompts
from controlplane.warmup.handoffs import compute, go_on, release, source_end_s
from controlplane.warmup.jobs import PassJob, Shape
from controlplane.warmup.session import Call, CallResult, ReplicaSession
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.clock import Clock

OUTPUT_TOKENS: Final = {"prefill": 2, "decode": 4}
"""Output of each request by role. A prefill makes one token of it."""

SETTLE_S: Final = 0.25
"""Time after which a load report has the last steps. The engine and its replica report a change after 50 ms each."""

REPORT_S: Final = 1.5
"""Longest wait for a load report. A replica at rest sends one each second."""

_FULL: Final = frozenset({pb.Refusal.REASON_QUEUE_FULL, pb.Refusal.REASON_KV_FULL})
"""Refusals of a replica that runs fewer requests of a warm-up beside each other than a shape has."""


class Pass:
    """One pass. `error` is why it proves nothing; empty: it is complete."""

    def __init__(
        self, job: PassJob, session: ReplicaSession, clock: Clock, source: ReplicaSession | None = None
    ) -> None:
        """`source`: session on the source of `job`."""
        self.seconds = 0.0
        """Engine time of the shapes so far."""
        self.cold_steps: int | None = None
        self.error = "the pass did not begin"
        self._job = job
        self._session = session
        self._clock = clock
        self._source = source

    async def run(self) -> None:
        """Run all shapes. A cancellation leaves an `error` that names how far the pass came."""
        before = await self._session.wait_load(lambda _: True, REPORT_S)
        if before is None:
            self.error = self._session.lost or f"no load report came within {REPORT_S:g} s"
            return
        wanted = sorted(self._job.shapes, key=lambda shape: (shape.prompt_tokens, shape.batch))
        unfit = ["the job has no shape"]
        for at, shape in enumerate(wanted):
            self.error = f"{at} of {len(wanted)} shapes were run in time"
            results = await self._run_shape(shape)
            error = _error(results)
            name = f"shape of {shape.prompt_tokens} tokens x {shape.batch}"
            if all(each.refusal == pb.Refusal.REASON_INVALID for each in results):
                unfit.append(f"{name}: {error}")
            elif error:
                self.error = f"{name}: {error}"
                return
        if len(unfit) > len(wanted):
            self.error = unfit[-1]
            return
        self.error = "the load report after the pass did not come in time"
        await self._count_cold_steps(before)

    async def _run_shape(self, shape: Shape) -> list[CallResult]:
        """Run the requests of `shape` beside each other."""
        job, target = self._job, self._job.target
        error = pass_prompts.fault(shape)
        if error:
            return [CallResult(error=error)]
        prompts = await asyncio.to_thread(pass_prompts.prompts, shape, job.vocabulary_size, job.seed)
        is_prefill = target.role == "prefill"
        calls = [
            Call(
                phase=pb.PHASE_CONTEXT_ONLY if is_prefill else pb.PHASE_CONTEXT_AND_GENERATION,
                token_ids=prompt,
                output_tokens=OUTPUT_TOKENS[target.role],
                deadline_s=job.end_s,
                purpose=budget_pb2.PURPOSE_WARM_UP,
            )
            for prompt in prompts
        ]
        if len(calls) <= job.source_rows_max and (shape.batch > 1 or not shape.prompt_tokens):
            results = await self._run_by_handoff(calls)
            if results:
                return results
        began_s = self._clock.now_s()
        results = await self._session.run_together(calls)
        # Prompts of a prefill may wait for their turn, which is no time of the engine.
        computed_s = sum(each.prefill_s for each in results)
        self.seconds += computed_s if is_prefill and computed_s else self._clock.now_s() - began_s
        return results

    async def _run_by_handoff(self, calls: list[Call]) -> list[CallResult]:
        """Run the requests of a batch whose prompts the source computes. Empty: there is no source that computes all.

        A part of a batch would be another shape. A source that failed once is not asked again in this pass.
        """
        source = self._source
        if source is None:
            return []
        given = await compute(source, calls, source_end_s(self._job.end_s, self._clock))
        if any(each.error for each in given):
            release(source, given)
            self._source = None
            return []
        results = await go_on(source, self._session, calls, given)
        self.seconds += max(each.seconds for each in results)
        return results

    async def _count_cold_steps(self, before: pb.LoadReport) -> None:
        """Take the count from a load report that has the last steps, and end the pass."""
        ended_s = self._clock.now_s()
        await asyncio.sleep(SETTLE_S)
        after = await self._session.wait_load(lambda _: True, REPORT_S, after_s=ended_s)
        if after is None:
            self.error = self._session.lost or f"no load report came within {REPORT_S:g} s after the pass"
        elif after.engine_boot_id != before.engine_boot_id:
            self.error = "the engine started anew"
        else:
            if before.HasField("cold_step_total") and after.HasField("cold_step_total"):
                self.cold_steps = max(0, after.cold_step_total - before.cold_step_total)
            self.error = ""


def _error(results: list[CallResult]) -> str:
    """Return why the shape was not run. A full replica may refuse some of its requests, if it runs the others."""
    failed = [each for each in results if each.error]
    if len(failed) == len(results):
        return failed[0].error
    return next((each.error for each in failed if each.refusal not in _FULL), "")
