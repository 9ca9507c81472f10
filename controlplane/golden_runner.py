"""Runs golden prompts on one replica, as an Attach caller of the role `control`.

A decode replica runs each prompt alone (PHASE_CONTEXT_AND_GENERATION). A prefill replica runs its context and gives the
first token; its handoff is released at once. Every failure becomes an answer with an error, which is inconclusive. No
failure is a difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import grpc

from controlplane.rollouts.golden import FILE_BYTES_MAX, Answer, GoldenSet, GoldenSetError, Prompt, read_set
from controlplane.rollouts.golden_schedule import RUN_S, GoldenRun, GoldenSchedule
from controlplane.warmup.session import Call, ReplicaSession
from kvmesh.attach import frames
from kvmesh.attach.dialing import Dialer
from kvmesh.attach.server import PROTOCOL_VERSION
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.clock import Clock
from kvmesh.pools import VersionSettings

RUNNING_MAX: Final = 4
"""Prompts that run at a time on the replica, so that users' requests keep their place."""


class GoldenRunner:
    """See the module. One for each control process."""

    def __init__(
        self,
        process_id: str,
        boot_id: str,
        clock: Clock,
        open_channel: Callable[[str, str], grpc.aio.Channel],
        dialer: Dialer | None = None,
    ) -> None:
        """`open_channel` takes an address and the role there. `dialer`: None lets the runner dial any address."""
        self._hello = pb.Hello(process_id=process_id, boot_id=boot_id, protocol_version=PROTOCOL_VERSION)
        self._clock = clock
        self._open_channel = open_channel
        self._dialer = dialer

    async def run(self, run: GoldenRun, timeout_s: float = RUN_S) -> tuple[Answer, ...]:
        """Return one answer for each prompt, within `timeout_s` and the time in which a session closes.

        Cancellation ends the run at the replica.
        """
        session = ReplicaSession(run, self._hello, self._clock, self._open_channel, self._dialer)
        async with session:
            return await answers(session, run.prompts, timeout_s, self._clock)

    async def run_for(self, schedule: GoldenSchedule, run: GoldenRun) -> None:
        """Run `run`, which `schedule` asked for, and give it the answers."""
        schedule.take(run, await self.run(run), self._clock.now_s())


async def answers(
    session: ReplicaSession, prompts: Sequence[Prompt], timeout_s: float, clock: Clock
) -> tuple[Answer, ...]:
    """Run `prompts` on the replica of `session`, and return one answer for each within `timeout_s`."""
    found: dict[int, Answer] = {}
    await answer(found, session, prompts, clock.now_s() + timeout_s, RUNNING_MAX)
    absent = Answer(error=session.lost or f"no answer within {timeout_s:g} s")
    return tuple(found.get(at, absent) for at in range(len(prompts)))


async def answer(
    found: dict[int, Answer],
    session: ReplicaSession,
    prompts: Sequence[Prompt],
    deadline_s: float,
    running_max: int,
) -> None:
    """Run `prompts` on the replica of `session` until `deadline_s`, `running_max` at a time.

    `found` takes each answer by its position as it comes, so a cancellation leaves those that came before it.
    """
    waiting = iter(enumerate(prompts))

    async def work(waiting: Iterator[tuple[int, Prompt]]) -> None:
        for at, prompt in waiting:
            given = await _answer(session, prompt, deadline_s)
            if given is None or (given.error and session.lost):
                return
            found[at] = given

    async with asyncio.TaskGroup() as group:
        for _ in range(running_max):
            group.create_task(work(waiting), name=f"golden:{session.replica.process_id}")


async def _answer(session: ReplicaSession, prompt: Prompt, deadline_s: float) -> Answer | None:
    """Return the answer for one prompt. None: it did not come in time."""
    is_prefill = session.replica.role == "prefill"
    result = await session.run(
        Call(
            phase=pb.PHASE_CONTEXT_ONLY if is_prefill else pb.PHASE_CONTEXT_AND_GENERATION,
            token_ids=frames.pack_ids(prompt.token_ids),
            output_tokens=prompt.output_tokens,
            deadline_s=deadline_s,
            purpose=budget_pb2.PURPOSE_PROBE,
        )
    )
    if result.is_late:
        return None
    return Answer(error=result.error) if result.error else Answer(result.token_ids)


def golden_sets(versions: Iterable[VersionSettings]) -> dict[str, GoldenSet]:
    """Return the golden sets that `versions` name, read from their files. Raises GoldenSetError with the path."""
    sets = {}
    for version in versions:
        if version.golden is None:
            continue
        try:
            with version.golden.open("rb") as file:
                sets[version.name] = read_set(file.read(FILE_BYTES_MAX + 1))
        except (OSError, GoldenSetError) as error:
            field = f'versions."{version.name}".golden'
            raise GoldenSetError(f"{field} = {version.golden}: {error}") from error
    return sets
