"""A session on one replica: calls of the control plane over Attach, each with one result.

Every call is bounded by its deadline, carries the lowest priority, and is one attempt. A failure is an error in the result,
never an exception. A lost stream ends all calls of the session, and the session opens no other one: its caller repeats
jobs, not calls.

INVARIANT: whatever the replica sends, a call keeps at most its output tokens and one handoff of HANDOFF_BYTES_MAX.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol

import grpc

from controlplane.warmup.jobs import ERROR_CHARACTERS_MAX
from kvmesh import blocks
from kvmesh.attach import frames
from kvmesh.attach.client import AttachLink
from kvmesh.attach.dialing import Dialer
from kvmesh.attach.frames import FrameError
from kvmesh.attach.names import name_of
from kvmesh.attach.outbox import MESSAGE_BYTES_MAX
from kvmesh.attach.rules import HANDOFF_BYTES_MAX
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.clock import Clock

ANSWER_BYTES_MAX: Final = MESSAGE_BYTES_MAX
"""Longest message that a replica may send to a session, for the channel of its stream: a full outbox."""

CLOSE_S: Final = 0.4
"""Longest wait until the cancels of a session are written."""

CLOSE_CHECK_S: Final = 0.005
"""Time between two looks at the outbox while it empties."""

PRIORITY: Final = -100
PRIORITY_CLASS: Final = 0
"""Lowest priority: users go first."""


class Replica(Protocol):
    """The replica that a session calls."""

    @property
    def process_id(self) -> str: ...
    @property
    def boot_id(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def model_version(self) -> str: ...
    @property
    def block_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt on a replica."""

    phase: pb.Phase.ValueType
    token_ids: bytes = field(repr=False)
    """Prompt: 32-bit little-endian token ids."""
    output_tokens: int
    deadline_s: float
    """On the clock of the session. The call has ended by then."""
    purpose: budget_pb2.Purpose.ValueType
    window: int | None = None
    """End of the flow-control window. None: all output tokens."""
    context_phase_params: bytes = field(default=b"", repr=False)
    """Handoff to pull, for PHASE_GENERATION_ONLY and PHASE_SEED. Its first token counts as sent."""
    kv_address: str = ""
    """Address from which the replica pulls the handoff's KV blocks."""
    keeps_handoff: bool = False
    """True: the handoff of a PHASE_CONTEXT_ONLY stays held until `ReplicaSession.end`. False: it is released at once."""
    estimate_s: float = 0.0
    """Prefill time that the caller expects. A replica runs more short calls beside its users'. 0: unknown."""
    is_private: bool = False
    """True: texts of the replica are left out of the error, because the prompt is a user's."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """Result of a call."""

    token_ids: tuple[int, ...] = field(default=(), repr=False)
    """Output tokens. With a handoff, without its first token."""
    context_phase_params: bytes = field(default=b"", repr=False)
    """Handoff of a prefill. See `Call.keeps_handoff`."""
    cached_tokens: int = 0
    computed_tokens: int = 0
    prefill_s: float = 0.0
    """Engine time from the submission to the first token."""
    is_transferred: bool = False
    """True if the replica has pulled the handoff's blocks. Its source has released them."""
    seconds: float = 0.0
    refusal: pb.Refusal.Reason.ValueType | None = None
    """Reason of the refusal. None: not refused."""
    failure: pb.Failure.Code.ValueType | None = None
    """Code of the failure. None: not failed."""
    is_late: bool = False
    """True: the deadline came before the end."""
    error: str = ""
    """Empty: the call is complete."""
    slot: int = 0


class ActiveCall:
    """A call in progress. `first` is set at its first token and at its end."""

    def __init__(self, call: Call, slot: int, began_s: float) -> None:
        self.call = call
        self.slot = slot
        self.first = asyncio.Event()
        self._began_s = began_s
        self._ended = asyncio.Event()
        self._result: CallResult | None = None
        # State of the answer.
        self._start = 1 if call.context_phase_params else 0
        self._tokens: dict[int, int] = {}
        self._first_token = pb.FirstToken()
        self._is_transferred = False

    @property
    def result(self) -> CallResult | None:
        """The result, or None while the call runs."""
        return self._result

    async def wait(self) -> CallResult:
        """Return the result, once there is one."""
        await self._ended.wait()
        assert self._result is not None, self.slot
        return self._result

    def take(self, position: int, token_ids: Sequence[int]) -> None:
        """Keep tokens. Raises FrameError for positions outside the output."""
        most = self.call.output_tokens
        if not self._start <= position <= position + len(token_ids) <= most:
            raise FrameError(
                f"tokens {position} to {position + len(token_ids)} of slot {self.slot}; "
                f"{self._start} to {most} is allowed"
            )
        for at, token_id in enumerate(token_ids, start=position):
            self._tokens.setdefault(at, token_id)
        self.first.set()

    def take_first(self, first: pb.FirstToken) -> None:
        """Keep the first token with its handoff and its counts. Raises FrameError."""
        size = len(first.context_phase_params)
        if size > HANDOFF_BYTES_MAX:
            raise FrameError(
                f"first_token.context_phase_params has {size} bytes; up to {HANDOFF_BYTES_MAX} is allowed"
            )
        self._first_token = first
        self.take(first.position, (first.token_id,))

    def take_transfer(self) -> None:
        """Note that the handoff's blocks have been pulled."""
        self._is_transferred = True

    def end(
        self,
        now_s: float,
        error: str = "",
        *,
        refusal: pb.Refusal.Reason.ValueType | None = None,
        failure: pb.Failure.Code.ValueType | None = None,
        is_late: bool = False,
    ) -> None:
        """Set the result, unless there is one. Tokens with a gap are an error."""
        if self._result is not None:
            return
        if not error and self._tokens and max(self._tokens) + 1 - self._start != len(self._tokens):
            error = "a gap in the tokens"
        first = self._first_token
        self._result = CallResult(
            token_ids=() if error else tuple(token_id for _, token_id in sorted(self._tokens.items())),
            context_phase_params=first.context_phase_params,
            cached_tokens=first.cached_token_count,
            computed_tokens=first.computed_token_count,
            prefill_s=first.prefill_us / 1e6,
            is_transferred=self._is_transferred,
            seconds=now_s - self._began_s,
            refusal=refusal,
            failure=failure,
            is_late=is_late,
            error=error[:ERROR_CHARACTERS_MAX],
            slot=self.slot,
        )
        self.first.set()
        self._ended.set()


class ReplicaSession:
    """See the module. An async context manager, which is entered once. Implements kvmesh.attach.client.Sink."""

    def __init__(
        self,
        replica: Replica,
        hello: pb.Hello,
        clock: Clock,
        open_channel: Callable[[str, str], grpc.aio.Channel],
        dialer: Dialer | None = None,
    ) -> None:
        """`open_channel` takes an address and the role there. `dialer`: None lets the session dial any address."""
        self.replica = replica
        self.load: pb.LoadReport | None = None
        """The last load report. None: none has come."""
        self.load_s = float("-inf")
        """Time at which it came."""
        self.lost = ""
        """Why the stream broke. Empty: it did not."""
        self._clock = clock
        self._link = AttachLink(
            replica.process_id,
            replica.address,
            hello,
            self,
            clock,
            lambda address: open_channel(address, replica.role),
            keep=True,
            expected_process=replica.process_id,
            expected_boot=replica.boot_id,
            dialer=dialer,
        )
        self._is_closed = False
        self._streaming: asyncio.Task[None] | None = None
        self._calls: dict[int, ActiveCall] = {}
        self._held: set[int] = set()
        """Slots with a handoff that the replica holds."""
        self._news: set[asyncio.Event] = set()
        """Set at each load report and at the end of the stream, for those that wait for one."""

    def __repr__(self) -> str:
        return f"ReplicaSession({self.replica.process_id}, {len(self._calls)} calls, {len(self._held)} held)"

    async def __aenter__(self) -> ReplicaSession:
        self._streaming = asyncio.create_task(self._link.run(), name=f"warm-up:{self.replica.process_id}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs and what is held, and close the stream within CLOSE_S."""
        for slot in (*self._calls, *self._held):
            self._link.outbox.cancel(slot, pb.Cancel.REASON_ABANDONED)
        self._is_closed = True
        self._end_all()
        if self._streaming is None:
            return
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    while self._link.is_up and self._link.outbox.waiting_bytes:
                        await asyncio.sleep(CLOSE_CHECK_S)
        finally:
            self._streaming.cancel()
            await asyncio.gather(self._streaming, return_exceptions=True)

    async def run(self, call: Call) -> CallResult:
        """Run one call, and return its result by its deadline. Cancellation cancels the call at the replica."""
        return (await self.run_together((call,)))[0]

    async def run_together(self, calls: Sequence[Call]) -> list[CallResult]:
        """Submit `calls` in one message, and return their results in order. See `run`.

        Cancellation also ends the handoffs that the calls left at the replica.
        """
        active = [self.start(call) for call in calls]
        try:
            return [await self.finish(each) for each in active]
        except BaseException:
            for each in active:
                self.end(each.slot, pb.Cancel.REASON_ABANDONED)
            raise

    def start(self, call: Call) -> ActiveCall:
        """Submit `call`. The caller ends it by `finish` or `end`."""
        now_s = self._clock.now_s()
        if self.lost or self._is_closed:
            active = ActiveCall(call, 0, now_s)
            active.end(now_s, self._lost_text(call))
            return active
        slot = self._link.outbox.new_slot()
        active = self._calls[slot] = ActiveCall(call, slot, now_s)
        self._link.outbox.submit(_submit(self.replica, call, slot), call.deadline_s)
        if call.context_phase_params:
            self._link.outbox.handoff(
                pb.Handoff(
                    slot=slot,
                    context_phase_params=call.context_phase_params,
                    first_token_count=1,
                    kv_address=call.kv_address,
                )
            )
        return active

    async def finish(self, active: ActiveCall) -> CallResult:
        """Return the result of `active`, at its deadline at the latest."""
        began_s = self._clock.now_s()
        left_s = max(0.0, active.call.deadline_s - began_s)
        try:
            async with asyncio.timeout(left_s):
                return await active.wait()
        except TimeoutError:
            active.end(self._clock.now_s(), f"no answer within {left_s:.3g} s", is_late=True)
            self.end(active.slot, pb.Cancel.REASON_DEADLINE)
            return await active.wait()

    def end(self, slot: int, reason: pb.Cancel.Reason.ValueType) -> None:
        """End a call that runs, or the handoff that it left. Nothing is sent for a slot that is over."""
        active = self._calls.pop(slot, None)
        if active is not None:
            active.end(self._clock.now_s(), "cancelled")
        elif slot not in self._held:
            return
        self._held.discard(slot)
        self._link.outbox.cancel(slot, reason)

    async def wait_load(
        self, is_wanted: Callable[[pb.LoadReport], bool], timeout_s: float, *, after_s: float = float("-inf")
    ) -> pb.LoadReport | None:
        """Return the first load report that came after `after_s` and `is_wanted`. None: none within `timeout_s`."""
        with self._listening() as news, contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (self.lost or self._is_closed):
                    if self.load is not None and self.load_s > after_s and is_wanted(self.load):
                        return self.load
                    news.clear()
                    await news.wait()
        return None

    @contextmanager
    def _listening(self) -> Iterator[asyncio.Event]:
        news = asyncio.Event()
        self._news.add(news)
        try:
            yield news
        finally:
            self._news.discard(news)

    # Sink.

    def on_attached(self, link: AttachLink, peer: pb.Hello, now_s: float) -> None:
        """See Sink. Calls may wait in the outbox before."""

    def on_lost(self, link: AttachLink, reason: str, now_s: float) -> None:
        """See Sink. The session ends with its first stream."""
        if self._is_closed or self.lost:
            return
        self.lost = f"the stream was lost: {reason}"[:ERROR_CHARACTERS_MAX]
        self._end_all()
        if self._streaming is not None:
            self._streaming.cancel()

    def on_response(self, link: AttachLink, message: pb.AttachResponse, now_s: float) -> None:
        """See Sink."""
        if self.lost or self._is_closed:
            return
        for first in message.first_tokens:
            self._take_first(first, now_s)
        for transfer in message.transfers:
            if (active := self._calls.get(transfer.slot)) is not None:
                active.take_transfer()
        for row in frames.rows(message.frame):
            if (active := self._calls.get(row.slot)) is not None:
                active.take(row.position, frames.unpack_ids(row.token_ids))
        for finish in message.finishes:
            is_short = finish.reason not in (pb.Finish.REASON_LENGTH, pb.Finish.REASON_END_TOKEN)
            error = f"ended by {name_of(pb.Finish.Reason, finish.reason)}" if is_short else ""
            self._over(finish.slot, now_s, error)
        for failure in message.failures:
            name = name_of(pb.Failure.Code, failure.code)
            self._over(failure.slot, now_s, name, failure.message, failure=failure.code)
        for refusal in message.refusals:
            name = name_of(pb.Refusal.Reason, refusal.reason)
            self._over(refusal.slot, now_s, name, refusal.message, refusal=refusal.reason)
        if message.HasField("load_report"):
            self.load, self.load_s = message.load_report, now_s
            self._tell()

    def _take_first(self, first: pb.FirstToken, now_s: float) -> None:
        """Take a first token. It ends a call of PHASE_CONTEXT_ONLY, and the replica may hold its handoff."""
        active = self._calls.get(first.slot)
        if active is None:
            return
        active.take_first(first)
        if active.call.phase != pb.PHASE_CONTEXT_ONLY:
            return
        del self._calls[first.slot]
        if active.call.keeps_handoff:
            self._held.add(first.slot)
        else:
            self._link.outbox.cancel(first.slot, pb.Cancel.REASON_COMPLETE)
        active.end(now_s)

    def _over(
        self,
        slot: int,
        now_s: float,
        error: str,
        text: str = "",
        *,
        refusal: pb.Refusal.Reason.ValueType | None = None,
        failure: pb.Failure.Code.ValueType | None = None,
    ) -> None:
        """End a call, or a held handoff, that is over at the replica."""
        self._held.discard(slot)
        active = self._calls.pop(slot, None)
        if active is not None:
            error = error if active.call.is_private or not text else f"{error}: {text}"
            active.end(now_s, error, refusal=refusal, failure=failure)

    def _end_all(self) -> None:
        """End all calls, because the stream broke or the session closes."""
        calls, self._calls = self._calls, {}
        for active in calls.values():
            active.end(self._clock.now_s(), self._lost_text(active.call))
        self._held.clear()
        self._tell()

    def _lost_text(self, call: Call) -> str:
        if not self.lost:
            return "the session is closed"
        return "the stream was lost" if call.is_private else self.lost

    def _tell(self) -> None:
        for news in self._news:
            news.set()


@asynccontextmanager
async def opened(sessions: Sequence[ReplicaSession]) -> AsyncIterator[None]:
    """Open `sessions`, and close all of them at the same time."""
    try:
        for session in sessions:
            await session.__aenter__()
        yield
    finally:
        await asyncio.gather(*(session.close() for session in sessions))


def _submit(replica: Replica, call: Call, slot: int) -> pb.Submit:
    """Return the submit of `call`, greedy, which no end token ends."""
    hashes = blocks.chain(call.token_ids, replica.block_tokens, replica.model_version)
    return pb.Submit(
        slot=slot,
        request_id=secrets.token_hex(16),
        attempt=1,
        token_ids=call.token_ids,
        block_hashes=blocks.pack(hashes),
        block_tokens=replica.block_tokens,
        sampling=pb.Sampling(temperature=0.0, top_p=1.0, seed=1),
        budget=budget_pb2.Budget(
            max_output_tokens=call.output_tokens,
            attempt=1,
            attempts_max=1,
            priority=PRIORITY,
            band=PRIORITY_CLASS,
            purpose=call.purpose,
        ),
        phase=call.phase,
        credit_position=call.output_tokens if call.window is None else call.window,
        model_version=replica.model_version,
        end_token_id=-1,
        prefill_estimate_us=round(call.estimate_s * 1e6),
    )
