"""The known facts of each attempt of a request, and the explanation that the client gets. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from google.protobuf.duration_pb2 import Duration

from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.regions.names import qualified, split

Cause: TypeAlias = pb.AttemptExplanation.Cause.ValueType


@dataclass(slots=True)
class Attempt:
    """One run of a request at a replica, as the router's rows report it."""

    number: int
    """Attempt number on the wire; unique in the request, ascending."""
    cause: Cause
    start_position: int
    """Output tokens before the attempt's first one."""
    context_tokens: int
    """Tokens of the prompt and of the output known at the start."""
    router: str
    """Name of the router, "region/name" in another region."""
    last_seen_s: float
    """Time at which the attempt was sent, or of its last row."""
    is_anothers: bool = False
    """True if another frontend started the attempt, and this one took it over."""
    is_accepted: bool = False
    is_started: bool = False
    """True once an engine has the attempt."""
    has_tokens: bool = False
    placement: attach.Placement | None = None
    replica_queue_us: int = 0
    first_token: attach.FirstToken | None = None
    transfer_us: int | None = None
    pause_s: float | None = None
    """Seconds without a token before its first one, if an attempt before it had tokens."""
    fault: str = ""
    failed_replica: str = ""
    """Replica that ended the attempt by `fault`, as the router said. Empty: unknown, or no replica."""
    sent_s: float = field(init=False)
    """Time at which the attempt was sent."""

    def __post_init__(self) -> None:
        self.sent_s = self.last_seen_s

    @property
    def is_untouched(self) -> bool:
        """True while no engine is known to have the attempt; another attempt is then a retry, not a resume."""
        return not (self.is_started or self.has_tokens)

    @property
    def region(self) -> str:
        """Region of its router. Empty: the own one, or no router yet."""
        return split(self.router)[0]

    def crossing(self, replica: str) -> str:
        """Return the name of `replica` in the attempt's region as the own region writes it."""
        return qualified(self.region, replica)

    @property
    def decode_replica(self) -> str:
        """Replica that generates; empty before the placement."""
        return self.placement.decode_replica if self.placement is not None else ""

    @property
    def serving_replica(self) -> str:
        """Replica that works on the attempt: prefill until the first token, then decode. Empty before the placement."""
        if self.placement is None:
            return ""
        return (not self.has_tokens and self.placement.prefill_replica) or self.placement.decode_replica

    @property
    def queue_s(self) -> float:
        """Wait in the router's queue; 0 before the placement."""
        return self.placement.queue_us / 1e6 if self.placement is not None else 0.0

    def explanation(self, number: int, own_region: str) -> pb.AttemptExplanation:
        """Return the attempt in the client's form, numbered `number`. Names are bare beside their region."""
        region, router = split(self.router)
        row = pb.AttemptExplanation(
            number=number,
            cause=self.cause,
            region=region or own_region,
            router=router,
            fault=self.fault,
            start_position=self.start_position,
        )
        if self.is_started:
            row.replica_queue.CopyFrom(of_us(self.replica_queue_us))
        if self.placement is not None:
            self._add_placement(row, self.placement)
        if self.first_token is not None:
            row.cached_token_count = self.first_token.cached_token_count
            row.prefill.CopyFrom(of_us(self.first_token.prefill_us))
        if self.transfer_us is not None:
            row.transfer.CopyFrom(of_us(self.transfer_us))
        if self.pause_s is not None:
            row.pause.CopyFrom(of_s(self.pause_s))
        return row

    def _add_placement(self, row: pb.AttemptExplanation, placement: attach.Placement) -> None:
        row.prefill_replica = placement.prefill_replica
        row.decode_replica = placement.decode_replica
        row.matched_block_count = placement.matched_block_count
        row.prompt_block_count = placement.prompt_block_count
        row.router_queue.CopyFrom(of_us(placement.queue_us))
        row.estimate.CopyFrom(of_us(placement.estimate_us))
        row.reason = placement.reason
        for candidate in placement.candidates:
            told = row.candidates.add(
                replica=candidate.replica,
                matched_block_count=candidate.matched_block_count,
                queue=of_us(candidate.queue_us),
                prefill=of_us(candidate.prefill_us),
                score=candidate.score,
            )
            if candidate.HasField("decode_us"):
                told.decode.CopyFrom(of_us(candidate.decode_us))


def note_pause(attempts: Sequence[Attempt], now_s: float) -> None:
    """Note the pause before the first token of the last attempt, which has come now."""
    before = next((each for each in reversed(attempts[:-1]) if each.has_tokens), None)
    if before is not None:
        attempts[-1].pause_s = max(0.0, now_s - before.last_seen_s)


def waited_s(attempts: Sequence[Attempt], now_s: float) -> float:
    """Return the time without an engine until the first token, or until `now_s`: in queues, and on failed attempts there.

    Attempts behind the first token resume the request. They are not counted.
    """
    total_s = 0.0
    for at, attempt in enumerate(attempts):
        if attempt.is_started or attempt.has_tokens:
            total_s += attempt.queue_s + attempt.replica_queue_us / 1e6
        else:
            total_s += max(
                0.0, (attempts[at + 1].sent_s if at + 1 < len(attempts) else now_s) - attempt.sent_s
            )
        if attempt.has_tokens:
            break
    return total_s


def of_us(microseconds: int) -> Duration:
    """Return `microseconds` as a Duration."""
    duration = Duration()
    duration.FromMicroseconds(microseconds)
    return duration


def of_s(seconds: float) -> Duration:
    """Return `seconds` as a Duration, whole microseconds."""
    return of_us(round(seconds * 1e6))
