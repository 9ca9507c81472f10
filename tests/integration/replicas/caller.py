"""A caller of one replica: an Attach stream that collects the rows received, by slot; a router without placement."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import TracebackType

import grpc

from kvmesh import blocks
from kvmesh.attach import frames
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.budget.v1 import budget_pb2
from tests.patience import patience


class Answers:
    """All rows received for one slot."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        """By position; a repeated position is an error."""
        self.first: pb.FirstToken | None = None
        self.rows: list[str] = []
        """Kinds of rows, in order, without frames."""
        self.finish: pb.Finish | None = None
        self.failure: pb.Failure | None = None
        self.refusal: pb.Refusal | None = None

    def is_over(self) -> bool:
        """Return whether the slot has ended."""
        return (self.finish or self.failure or self.refusal) is not None

    def ids(self) -> list[int]:
        """Return the tokens in order of position; raises an error for a gap."""
        positions = sorted(self.tokens)
        assert not positions or positions == list(range(positions[0], positions[-1] + 1)), positions
        return [self.tokens[position] for position in positions]


class Caller:
    """One Attach stream to `address`. Use as an async context manager."""

    def __init__(self, address: str, name: str = "router-test") -> None:
        self.loads: list[pb.LoadReport] = []
        self.answers: dict[int, Answers] = defaultdict(Answers)
        self.frame_total = 0
        self._address = address
        self._name = name
        self._changed = asyncio.Event()
        self._last_slot = 0
        self._writing = asyncio.Lock()  # concurrent writes fail

    async def __aenter__(self) -> Caller:
        self._channel = grpc.aio.insecure_channel(self._address)
        self._call = attach_pb2_grpc.AttachServiceStub(self._channel).Attach()  # type: ignore[call-arg]  # stubs lack the writing form
        hello = pb.Hello(process_id=self._name, boot_id=secrets.token_hex(8), protocol_version=1)
        await self._call.write(pb.AttachRequest(hello=hello))
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close(None)

    async def send(self, **parts: object) -> None:
        """Write one message with `parts`."""
        await asyncio.shield(self._write(pb.AttachRequest(**parts)))  # type: ignore[arg-type]  # fields by name

    async def submit(self, tokens: Sequence[int], phase: pb.Phase.ValueType, **changes: object) -> int:
        """Submit one attempt and return its slot."""
        message = submit(self.new_slot(), tokens, phase, **changes)
        # Known before it is sent: the write goes on if this call is cancelled, and the test cancels each slot it knows.
        self.answers[message.slot] = Answers()
        await self.send(submits=[message])
        return message.slot

    def new_slot(self) -> int:
        """Return a number that this stream has not used."""
        self._last_slot += 1
        return self._last_slot

    async def until(self, is_true: Callable[[], object], timeout_s: float = 20.0) -> None:
        """Wait until `is_true`. Raises TimeoutError."""
        async with patience(timeout_s):
            while not is_true():
                if self._reader.done():
                    await self._reader  # raises errors that the reading task has found
                    raise ConnectionError("the stream ended")
                self._changed.clear()
                await self._changed.wait()

    async def over(self, slot: int) -> Answers:
        """Wait until `slot` has ended; return its rows."""
        await self.until(self.answers[slot].is_over)
        return self.answers[slot]

    async def _write(self, message: pb.AttachRequest) -> None:
        """Must not be cancelled: grpc.aio ends the stream of a cancelled write."""
        async with self._writing:
            await self._call.write(message)

    async def _read(self) -> None:
        try:
            while isinstance(message := await self._call.read(), pb.AttachResponse):
                self._take(message)
                self._changed.set()
        finally:
            self._changed.set()

    def _take(self, message: pb.AttachResponse) -> None:
        if message.HasField("load_report"):
            self.loads.append(message.load_report)
        for kind in ("acceptances", "starts", "transfers"):
            for row in getattr(message, kind):
                self.answers[row.slot].rows.append(kind)
        for first in message.first_tokens:
            answers = self.answers[first.slot]
            answers.first = first
            answers.rows.append("first_tokens")
            self._add(answers, first.position, [first.token_id])
        self.frame_total += bool(message.frame.slots)
        for row in frames.rows(message.frame):
            self._add(self.answers[row.slot], row.position, frames.unpack_ids(row.token_ids))
        for finish in message.finishes:
            self.answers[finish.slot].finish = finish
        for failure in message.failures:
            self.answers[failure.slot].failure = failure
        for refusal in message.refusals:
            self.answers[refusal.slot].refusal = refusal

    @staticmethod
    def _add(answers: Answers, position: int, ids: Sequence[int]) -> None:
        for at, token in enumerate(ids, position):
            assert at not in answers.tokens, f"position {at} came twice"
            answers.tokens[at] = token


def submit(slot: int, tokens: Sequence[int], phase: pb.Phase.ValueType, **changes: object) -> pb.Submit:
    """Return a valid submit; `changes` replace `output`, `attempt` and other fields by name."""
    token_ids = frames.pack_ids(tokens)
    settings: dict[str, object] = {
        "output": 20,
        "attempt": 1,
        "request_id": secrets.token_hex(16),
        "remaining_ms": 60_000,
        "credit": 1 << 30,
        "seed": 7,
        "temperature": 0.8,
        "block_tokens": 32,
        "model_version": "kvmesh-1",
        "start": 0,
        "end_token_id": -1,
        "further_end_token_ids": (),
        "logprobs": False,
        "purpose": budget_pb2.PURPOSE_UNSPECIFIED,
    }
    assert set(changes) <= set(settings), changes
    settings.update(changes)
    block_tokens = int(str(settings["block_tokens"]))
    return pb.Submit(
        slot=slot,
        request_id=str(settings["request_id"]),
        attempt=int(str(settings["attempt"])),
        start_position=int(str(settings["start"])),
        token_ids=token_ids,
        block_hashes=blocks.pack(blocks.chain(token_ids, block_tokens, str(settings["model_version"]))),
        block_tokens=block_tokens,
        sampling=pb.Sampling(
            temperature=float(str(settings["temperature"])), top_p=1.0, seed=int(str(settings["seed"]))
        ),
        budget=budget_pb2.Budget(
            remaining_ms=int(str(settings["remaining_ms"])),
            max_output_tokens=int(str(settings["output"])),
            attempt=int(str(settings["attempt"])),
            attempts_max=4,
            purpose=int(str(settings["purpose"])),  # type: ignore[arg-type]  # a number of the enum
        ),
        phase=phase,
        credit_position=int(str(settings["credit"])),
        model_version=str(settings["model_version"]),
        end_token_id=int(str(settings["end_token_id"])),
        further_end_token_ids=settings["further_end_token_ids"],  # type: ignore[arg-type]  # numbers
        logprobs=bool(settings["logprobs"]),
    )
