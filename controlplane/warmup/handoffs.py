"""Runs calls on a decode replica as users' requests run there: a prefill replica computes the prompts.

The decode pulls the KV blocks of each prompt and goes on. Its engine meets no shape of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from controlplane.rollouts.golden import Answer, Prompt
from controlplane.warmup.jobs import SOURCE_S, Target
from controlplane.warmup.session import Call, CallResult, ReplicaSession
from kvmesh.attach import frames
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.clock import Clock

SHORT_BYTES: Final = 4 * 64
SHORT_S: Final = 0.01
"""Expected prefill of a prompt of up to so many bytes. A replica runs more such calls beside its users'."""


def source_end_s(end_s: float, clock: Clock, most_s: float = SOURCE_S) -> float:
    """Return until when a prefill may compute the prompts of work that ends at `end_s`: at most half of the time left."""
    now_s = clock.now_s()
    return now_s + min(most_s, max(0.0, end_s - now_s) / 2)


async def compute(prefill: ReplicaSession, calls: Sequence[Call], end_s: float) -> list[CallResult]:
    """Compute the prompts of `calls` by `end_s`. Each result has a held handoff, or an error.

    The caller ends each handoff. A cancellation ends them all.
    """
    given = await prefill.run_together(
        [
            replace(
                each,
                phase=pb.PHASE_CONTEXT_ONLY,
                window=None,
                keeps_handoff=True,
                deadline_s=end_s,
                estimate_s=SHORT_S if len(each.token_ids) <= SHORT_BYTES else 0.0,
            )
            for each in calls
        ]
    )
    return [replace(each, error=_failure(each), refusal=None) for each in given]


def release(prefill: ReplicaSession, given: Sequence[CallResult]) -> None:
    """End the handoffs of `given` that are still held."""
    for each in given:
        prefill.end(each.slot, pb.Cancel.REASON_COMPLETE)


def continued(call: Call, context: CallResult, prefill: ReplicaSession) -> Call:
    """Return the call of a decode that pulls the handoff of `context` and goes on."""
    replica = prefill.replica
    return replace(
        call,
        phase=pb.PHASE_GENERATION_ONLY,
        context_phase_params=context.context_phase_params,
        kv_address=replica.kv_address if isinstance(replica, Target) else "",
    )


async def go_on(
    prefill: ReplicaSession, decode: ReplicaSession, calls: Sequence[Call], given: Sequence[CallResult]
) -> list[CallResult]:
    """Run `calls` on `decode` with the handoffs `given`, and return their results. Tokens begin with that of the prefill.

    A call whose prompt failed has that error. No handoff stays held, also after a cancellation.
    """
    taken = iter(list[CallResult]())
    try:
        taken = iter(
            await decode.run_together(
                [
                    continued(call, context, prefill)
                    for call, context in zip(calls, given, strict=True)
                    if not context.error
                ]
            )
        )
    finally:
        results = [each if each.error else _joined(each, next(taken, None)) for each in given]
        for context, result in zip(given, results, strict=True):
            is_pulled = result.is_transferred
            prefill.end(
                context.slot, pb.Cancel.REASON_TRANSFERRED if is_pulled else pb.Cancel.REASON_COMPLETE
            )
    return results


async def run_by_handoff(
    prefill: ReplicaSession, decode: ReplicaSession, calls: Sequence[Call], end_s: float
) -> list[CallResult]:
    """Run `calls` beside each other, and return their results in order. `end_s`: end of the prompts at the prefill.

    `calls` have at least two output tokens; their phase is ignored. See `go_on`.
    """
    return await go_on(prefill, decode, calls, await compute(prefill, calls, end_s))


async def answer(
    found: dict[int, Answer],
    sessions: tuple[ReplicaSession, ReplicaSession],
    prompts: Sequence[Prompt],
    end_s: float,
    running_max: int,
    clock: Clock,
    source_s: float = SOURCE_S,
) -> None:
    """Run golden prompts on a decode until `end_s`, `running_max` beside each other.

    `found` takes the answers of each batch by position. `sessions`: on the prefill and on the decode. `source_s`: longest
    time of a batch at the prefill.
    """
    for at in range(0, len(prompts), running_max):
        calls = [
            Call(
                phase=pb.PHASE_GENERATION_ONLY,
                token_ids=frames.pack_ids(prompt.token_ids),
                output_tokens=prompt.output_tokens,
                deadline_s=end_s,
                purpose=budget_pb2.PURPOSE_PROBE,
            )
            for prompt in prompts[at : at + running_max]
        ]
        results = await run_by_handoff(*sessions, calls, source_end_s(end_s, clock, source_s))
        for position, each in enumerate(results, start=at):
            found[position] = Answer(error=each.error) if each.error else Answer(each.token_ids)


def _failure(context: CallResult) -> str:
    """Return why a prefill gave no handoff. Empty: it did."""
    if context.error:
        return f"at the prefill: {context.error}"
    return "" if context.context_phase_params else "the prefill gave no handoff"


def _joined(context: CallResult, taken: CallResult | None) -> CallResult:
    if taken is None:
        return CallResult(error="not run")
    return taken if taken.error else replace(taken, token_ids=(*context.token_ids, *taken.token_ids))
