"""A load generator that speaks Attach as a caller: a fake frontend of a router, or a fake router of a decode replica.

It submits, moves the flow-control windows as a reader does, checks every position, and counts. Commands come over stdin
(see `load`).
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from typing import Literal

import grpc

from bench import control
from bench.generation import random_ids
from bench.load import LoadCounters, serve_load
from bench.source import stub_trust
from kvmesh import blocks
from kvmesh.attach import frames
from kvmesh.attach.client import AttachLink
from kvmesh.attach.server import PROTOCOL_VERSION
from kvmesh.attach.token_log import Gap, admit
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.clock import MonotonicClock

WINDOW_TOKENS = 64
"""Flow-control window: tokens ahead of the reader. It moves when half is used, as in the frontend."""
DEADLINE_S = 600.0


class Reading:
    """One request of the sink."""

    __slots__ = ("end", "next_position", "started_s", "window")

    def __init__(self, end: int, started_s: float) -> None:
        self.next_position = 0
        self.window = WINDOW_TOKENS
        self.end = end
        self.started_s = started_s


class AttachSink:
    """Reads many requests over one link. Implements Load and Sink."""

    def __init__(
        self,
        name: str,
        address: str,
        *,
        phase: pb.Phase.ValueType,
        block_tokens: int,
        model_version: str,
        seed: int,
        open_channel: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self.counters = LoadCounters()
        self._phase = phase
        self._block_tokens = block_tokens
        self._model_version = model_version
        self._draw = random.Random(seed)
        self._readings: dict[int, Reading] = {}
        hello = pb.Hello(process_id=name, boot_id=secrets.token_hex(8), protocol_version=PROTOCOL_VERSION)
        self.link = AttachLink("target", address, hello, self, MonotonicClock(), open_channel, keep=True)

    def begin(self, prompt_tokens: int, output_tokens: int) -> None:
        """See Load."""
        outbox = self.link.outbox
        slot = outbox.new_slot()
        token_ids = frames.pack_ids(random_ids(prompt_tokens, self._draw))
        hashes = blocks.chain(token_ids, self._block_tokens, self._model_version)
        submit = pb.Submit(
            slot=slot,
            request_id=f"{self._draw.getrandbits(128):032x}",
            attempt=1,
            token_ids=token_ids,
            block_hashes=blocks.pack(hashes),
            block_tokens=self._block_tokens,
            sampling=pb.Sampling(temperature=0.0, top_p=1.0, seed=1),
            budget=budget_pb2.Budget(max_output_tokens=output_tokens, attempt=1, attempts_max=1),
            phase=self._phase,
            credit_position=WINDOW_TOKENS,
            model_version=self._model_version,
            end_token_id=-1,
        )
        now_s = time.monotonic()
        self._readings[slot] = Reading(output_tokens, now_s)
        self.counters.started += 1
        outbox.submit(submit, now_s + DEADLINE_S)

    async def close(self) -> None:
        """See Load. The protocol answers no cancel, so this waits for the write only."""
        for slot in self._readings:
            self.link.outbox.cancel(slot, pb.Cancel.REASON_CLIENT)
        self._readings.clear()
        while self.link.outbox.waiting_bytes:  # an outbox has one listener, its writer
            await asyncio.sleep(0.01)

    def on_attached(self, link: AttachLink, peer: pb.Hello, now_s: float) -> None:
        """See Sink."""

    def on_lost(self, link: AttachLink, reason: str, now_s: float) -> None:
        """See Sink."""
        for _ in self._readings:
            self.counters.fault(f"stream lost: {reason}")
        self._readings.clear()

    def on_response(self, link: AttachLink, message: pb.AttachResponse, now_s: float) -> None:
        """See Sink."""
        counters = self.counters
        counters.messages += 1
        for first in message.first_tokens:
            reading = self._readings.get(first.slot)
            if reading is not None:
                counters.first_tokens += 1
                counters.tokens += 1
                counters.ttft_ms.append((now_s - reading.started_s) * 1000)
                self._check(first.slot, reading, first.position)
                reading.next_position = first.position + 1
        if message.frame.slots:
            counters.frames += 1
            self._read_frame(message.frame)
        for finish in message.finishes:
            reading = self._readings.pop(finish.slot, None)
            if reading is None:
                continue
            if reading.next_position == finish.end_position == reading.end:
                counters.finished += 1
            else:
                counters.fault(
                    f"finish at {finish.end_position}, have {reading.next_position} of {reading.end}"
                )
        for failure in message.failures:
            if self._readings.pop(failure.slot, None):
                counters.fault(f"failure {pb.Failure.Code.Name(failure.code)}: {failure.message}")
        for refusal in message.refusals:
            if self._readings.pop(refusal.slot, None):
                counters.fault(f"refusal {pb.Refusal.Reason.Name(refusal.reason)}: {refusal.message}")

    def _read_frame(self, frame: pb.StepFrame) -> None:
        counters = self.counters
        for row in frames.rows(frame):
            counters.rows += 1
            reading = self._readings.get(row.slot)
            if reading is None:
                continue
            try:
                fresh = admit(row, reading.next_position)
            except Gap as error:
                counters.fault(f"gap: {error}")
                del self._readings[row.slot]
                continue
            if fresh is None:
                continue
            counters.tokens += fresh.count
            reading.next_position += fresh.count
            if reading.window - reading.next_position < WINDOW_TOKENS // 2 and reading.window < reading.end:
                reading.window = reading.next_position + WINDOW_TOKENS
                self.link.outbox.credit(row.slot, reading.window)

    def _check(self, slot: int, reading: Reading, position: int) -> None:
        if position != reading.next_position:
            self.counters.fault(f"slot {slot}: first token at {position}, expected {reading.next_position}")


async def serve(
    target: str,
    phase: Literal["router", "local"] = "router",
    id_: str = "bench-sink",
    model_version: str = "kvmesh-1",
    block_tokens: int = 32,
    seed: int = 1,
    certificates: str = "",
) -> None:
    """Answer commands on stdin until stdin ends (see `load`).

    `target`: host:port of the process under test. `phase`: "router" for a router, "local" for a decode replica that runs
    the prompts itself. `certificates`: folder of `kvmesh certificates`, for a router only; empty: plain text.
    """
    plain = grpc.aio.insecure_channel
    sink = AttachSink(
        id_,
        target,
        phase=pb.PHASE_CONTEXT_AND_GENERATION if phase == "local" else pb.PHASE_UNSPECIFIED,
        block_tokens=block_tokens,
        model_version=model_version,
        seed=seed,
        open_channel=stub_trust(certificates, "frontend").channels_to("router") if certificates else plain,
    )
    async with asyncio.TaskGroup() as tasks:
        linking = tasks.create_task(sink.link.run(), name="sink-link")
        await serve_load(sink, seed)
        linking.cancel()


if __name__ == "__main__":
    control.main(serve, __doc__)
