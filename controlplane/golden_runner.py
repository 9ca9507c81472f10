"""Runs golden prompts on one replica, as an Attach caller of the role `control`.

A decode replica runs each prompt alone (PHASE_CONTEXT_AND_GENERATION). A prefill replica runs its context and gives the
first token; its handoff is released at once. Every failure becomes an answer with an error, which is inconclusive. No
failure is a difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import grpc

from controlplane.rollouts.golden import FILE_BYTES_MAX, Answer, GoldenSet, GoldenSetError, Prompt, read_set
from controlplane.rollouts.golden_schedule import RUN_S, GoldenRun, GoldenSchedule
from kvmesh import blocks
from kvmesh.attach import frames
from kvmesh.attach.client import AttachLink
from kvmesh.attach.dialing import Dialer
from kvmesh.attach.frames import FrameError
from kvmesh.attach.server import PROTOCOL_VERSION
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.clock import Clock
from kvmesh.pools import VersionSettings

RUNNING_MAX: Final = 4
"""Prompts that run at a time on the replica, so that users' requests keep their place."""

CLOSE_S: Final = 0.5
"""Longest wait until the cancels of a run are written."""

CLOSE_CHECK_S: Final = 0.005
"""Time between two looks at the outbox while it empties."""


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
        """Return one answer for each prompt, within `timeout_s` and CLOSE_S. Cancellation ends the run at the replica."""
        sink = _Sink(run, self._clock.now_s() + timeout_s)
        link = AttachLink(
            run.process_id,
            run.address,
            self._hello,
            sink,
            self._clock,
            lambda address: self._open_channel(address, run.role),
            keep=True,
            expected_process=run.process_id,
            expected_boot=run.boot_id,
            dialer=self._dialer,
        )
        streaming = asyncio.create_task(link.run(), name=f"golden:{run.process_id}")
        try:
            async with asyncio.timeout(timeout_s):
                await sink.done.wait()
        except TimeoutError:
            pass
        finally:
            sink.close(link)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    while link.is_up and link.outbox.waiting_bytes:
                        await asyncio.sleep(CLOSE_CHECK_S)
            streaming.cancel()
            await asyncio.gather(streaming, return_exceptions=True)
        return sink.answers(timeout_s)

    async def run_for(self, schedule: GoldenSchedule, run: GoldenRun) -> None:
        """Run `run`, which `schedule` asked for, and give it the answers."""
        schedule.take(run, await self.run(run), self._clock.now_s())


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


class _Slot:
    """One prompt that runs."""

    __slots__ = ("prompt", "tokens")

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.tokens: dict[int, int] = {}
        """By position."""


class _Sink:
    """Submits prompts and collects their tokens. Implements kvmesh.attach.client.Sink."""

    def __init__(self, run: GoldenRun, deadline_s: float) -> None:
        self.done = asyncio.Event()
        self._run = run
        self._deadline_s = deadline_s
        self._waiting = deque(range(len(run.prompts)))
        self._slots: dict[int, _Slot] = {}
        self._answers: dict[int, Answer] = {}
        self._lost = ""
        self._is_closed = False

    def answers(self, timeout_s: float) -> tuple[Answer, ...]:
        """Return the answers so far; the others have an error."""
        absent = Answer(error=self._lost or f"no answer within {timeout_s:g} s")
        return tuple(self._answers.get(at, absent) for at in range(len(self._run.prompts)))

    def close(self, link: AttachLink) -> None:
        """Cancel the prompts that run, and take nothing any more."""
        self._is_closed = True
        self._waiting.clear()
        for slot in self._slots:
            link.outbox.cancel(slot, pb.Cancel.REASON_ABANDONED)
        self._slots.clear()

    def on_attached(self, link: AttachLink, peer: pb.Hello, now_s: float) -> None:
        """See Sink."""
        self._submit(link)

    def on_lost(self, link: AttachLink, reason: str, now_s: float) -> None:
        """See Sink. Every prompt without an answer stays without one; the schedule repeats the run."""
        if self._is_closed:
            return
        self._lost = f"the stream was lost: {reason}"
        self._slots.clear()
        self.done.set()

    def on_response(self, link: AttachLink, message: pb.AttachResponse, now_s: float) -> None:
        """See Sink."""
        if self._is_closed:
            return
        for first in message.first_tokens:
            self._take(first.slot, first.position, (first.token_id,))
            if self._run.role == "prefill":
                self._end(link, first.slot)
                link.outbox.cancel(first.slot, pb.Cancel.REASON_COMPLETE)  # releases the handoff
        for row in frames.rows(message.frame):
            self._take(row.slot, row.position, frames.unpack_ids(row.token_ids))
        for finish in message.finishes:
            is_short = finish.reason not in (pb.Finish.REASON_LENGTH, pb.Finish.REASON_END_TOKEN)
            error = f"ended by {pb.Finish.Reason.Name(finish.reason)}" if is_short else ""
            self._end(link, finish.slot, error)
        for failure in message.failures:
            self._end(link, failure.slot, f"{pb.Failure.Code.Name(failure.code)}: {failure.message}")
        for refusal in message.refusals:
            self._end(link, refusal.slot, f"{pb.Refusal.Reason.Name(refusal.reason)}: {refusal.message}")
        self._submit(link)

    def _submit(self, link: AttachLink) -> None:
        if self._lost or self._is_closed:  # the link opens a stream again until the run has ended
            return
        while self._waiting and len(self._slots) < RUNNING_MAX:
            at = self._waiting.popleft()
            slot = link.outbox.new_slot()
            self._slots[slot] = _Slot(at)
            link.outbox.submit(_submit(self._run, self._run.prompts[at], slot), self._deadline_s)
        if not self._waiting and not self._slots:
            self.done.set()

    def _take(self, slot: int, position: int, token_ids: tuple[int, ...]) -> None:
        """Keep tokens. Raises FrameError for a position beyond the prompt's output."""
        known = self._slots.get(slot)
        if known is None:
            return
        most = self._run.prompts[known.prompt].output_tokens
        if not 0 <= position <= position + len(token_ids) <= most:
            raise FrameError(f"tokens {position} to {position + len(token_ids)} of {most} output tokens")
        for at, token_id in enumerate(token_ids, start=position):
            known.tokens.setdefault(at, token_id)

    def _end(self, link: AttachLink, slot: int, error: str = "") -> None:
        known = self._slots.pop(slot, None)
        if known is None:
            return
        tokens = tuple(token_id for _, token_id in sorted(known.tokens.items()))
        has_gap = bool(known.tokens) and max(known.tokens) + 1 != len(tokens)
        self._answers[known.prompt] = (
            Answer(error=error or "a gap in the tokens") if error or has_gap else Answer(tokens)
        )


def _submit(run: GoldenRun, prompt: Prompt, slot: int) -> pb.Submit:
    """Return the submit of `prompt`, greedy, which no end token ends."""
    token_ids = frames.pack_ids(prompt.token_ids)
    hashes = blocks.chain(token_ids, run.block_tokens, run.model_version)
    is_prefill = run.role == "prefill"
    return pb.Submit(
        slot=slot,
        request_id=secrets.token_hex(16),
        attempt=1,
        token_ids=token_ids,
        block_hashes=blocks.pack(hashes),
        block_tokens=run.block_tokens,
        sampling=pb.Sampling(temperature=0.0, top_p=1.0, seed=1),
        budget=budget_pb2.Budget(
            max_output_tokens=prompt.output_tokens,
            attempt=1,
            attempts_max=1,
            purpose=budget_pb2.PURPOSE_PROBE,
        ),
        phase=pb.PHASE_CONTEXT_ONLY if is_prefill else pb.PHASE_CONTEXT_AND_GENERATION,
        credit_position=prompt.output_tokens,
        model_version=run.model_version,
        end_token_id=-1,
    )
