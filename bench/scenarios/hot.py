"""Hot prefixes: the cost of recording a released prompt, and of an answer from a full record.

The process under test is this module as a process, with the recorder and the listing of a router. The recorder awaits
nothing, so that the CPU time of a batch is the cost of its requests. The record is full: each prompt evicts another one.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Mapping
from typing import Any, Final

from bench import aims, control
from bench.processes import TEST_CORE, Fleet
from bench.results import ScenarioResults, quantile
from bench.windows import Pace
from kvmesh import blocks
from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.clock import MonotonicClock
from kvmesh.router.v1 import router_pb2 as pb
from services.router.forwarding.attempt import Attempt, Stage, Submission
from services.router.hot.listing import HotPrefixListing
from services.router.hot.prompt_records import BYTES_MAX
from services.router.hot.release_recorder import ReleaseRecorder
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.policy import Placement

REQUESTS: Final = 20_000
QUICK_REQUESTS: Final = 10_000
BATCH: Final = 20
"""Requests of a batch: few enough that their submits are in the cache of the CPU, as they are at their release."""
LONG_REQUESTS: Final = 1_000

TIMEOUT_S: Final = 120.0
BLOCK_TOKENS: Final = 32
PROMPT_TOKENS: Final = 2_048
LONG_PROMPT_TOKENS: Final = 32_768
SYSTEM_PROMPTS: Final = 8
TENANTS: Final = 20
REPLICAS: Final = 8
SALT: Final = "m"

LONG_PROMPTS: Final = f"prompts of {LONG_PROMPT_TOKENS:,} tokens, a full record"
ANSWER: Final = f"an answer, {aims.HOT_PROMPTS}"


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        probe = fleet.start_ready("hot", __name__, TEST_CORE)
        requests = QUICK_REQUESTS if pace.is_quick else REQUESTS
        recorded = probe.ask("record", requests=requests, tokens=PROMPT_TOKENS, timeout_s=TIMEOUT_S)
        answered = probe.ask("answer", timeout_s=TIMEOUT_S)
        long = probe.ask("record", requests=LONG_REQUESTS, tokens=LONG_PROMPT_TOKENS, timeout_s=TIMEOUT_S)
    results.add(aims.HOT_PROMPTS, aims.RECORDING, "us", recorded["us"])
    results.add(LONG_PROMPTS, aims.RECORDING, "us", long["us"])
    results.add(ANSWER, "prompts in the record", "", answered["prompts"])
    results.add(ANSWER, "CPU of the answer", "ms", answered["cpu_ms"])
    results.add(ANSWER, "longest turn of the event loop", "ms", answered["longest_ms"])


class HotProbe:
    """A recorder and its listing."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._now_s = 1000.0
        self._recorder = ReleaseRecorder(BLOCK_TOKENS)
        self._index = LocalPrefixIndex()
        for number in range(REPLICAS):
            self._index.add(f"prefill-{number}")
        self._clock = MonotonicClock()
        self._listing = HotPrefixListing(self._recorder, self._index, SALT, BLOCK_TOKENS, self._clock)

    async def record(self, requests: int, tokens: int) -> Mapping[str, Any]:
        """Fill the record and record {requests} more, of {tokens}. Return `us`, CPU per request in the median batch."""
        fill = BYTES_MAX // (4 * tokens)
        self._now_s = self._clock.now_s()
        costs_ns: list[int] = []
        for first in range(0, fill + requests, BATCH):
            attempts = [self._attempt(number, tokens) for number in range(first, first + BATCH)]
            began_ns = time.process_time_ns()
            for attempt in attempts:
                self._recorder(attempt, 9, self._now_s)
            ended_ns = time.process_time_ns()
            if first >= fill:
                costs_ns.append(ended_ns - began_ns)
            elif first + BATCH >= fill:
                gc.collect()
                gc.freeze()  # as a router does before it serves
            await asyncio.sleep(0)
        self._recorder.prompts.assert_consistent()
        return {"us": quantile(costs_ns, 0.5) / 1e3 / BATCH}

    async def answer(self) -> Mapping[str, Any]:
        """Answer once. Return `prompts`, `cpu_ms` of the answer, and `longest_ms`, the longest turn of the event loop."""
        parts = 0
        longest_s = 0.0

        async def write(part: pb.ListHotPrefixesResponse) -> None:
            nonlocal parts
            parts += len(part.SerializeToString()) > 0
            await asyncio.sleep(0)

        gc.collect()
        began_ns = time.process_time_ns()
        request = pb.ListHotPrefixesRequest(block_count_max=1_000_000)
        call = asyncio.create_task(self._listing.answer(request, write))
        while not call.done():
            turn_s = time.perf_counter()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.perf_counter() - turn_s)
        await call
        cpu_ms = (time.process_time_ns() - began_ns) / 1e6
        return {"prompts": len(self._recorder.prompts), "cpu_ms": cpu_ms, "longest_ms": longest_s * 1e3}

    def _attempt(self, number: int, tokens: int) -> Attempt:
        """Return an attempt of a new session, or of the next turn of a recent one, as at its release."""
        session = number - self._draw.choice((0, 0, 0, BATCH))
        system = random.Random(session % SYSTEM_PROMPTS).randbytes(2 * tokens)
        token_ids = system + self._draw.randbytes(2 * tokens)
        hashes = blocks.chain(token_ids, BLOCK_TOKENS, SALT)
        self._index.store(f"prefill-{session % REPLICAS}", hashes)
        submit = attach.Submit(
            request_id=f"{number:032x}",
            token_ids=token_ids,
            block_hashes=blocks.pack(hashes),
            session_id=f"session-{session}",
        )
        submit.budget.tenant = f"tenant-{session % TENANTS}"
        attempt = Attempt(
            Submission(submit.request_id, 1, self._now_s, token_count=tokens, tenant=submit.budget.tenant),
            slot=number + 1,
            session=None,
            outbox=None,
            next_position=0,
            window_end=0,
            stage=Stage.RESERVING,
            message=submit,
            hashes=tuple(hashes),
        )
        attempt.routing.placement = Placement("prefill-0", "decode-0", tokens // 2 // BLOCK_TOKENS, 0.1, 0.1)
        return attempt


async def serve(seed: int = 1) -> None:
    """Serve until stdin ends."""
    probe = HotProbe(seed)
    await control.serve_commands(probe.record, probe.answer)


if __name__ == "__main__":
    control.main(serve, __doc__)
