"""One router, real prefill cores and engines with prefill times, on a virtual clock, to measure times to first token.

Messages travel in no time. Every request asks for one token, so that the end of its prompt is its own end.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.triton.port import EngineCall, EngineLoad, EngineSink, FirstAnswer
from services.decode.core import DecodeCore
from services.decode.limits import DecodeLimits
from services.prefill.core import PrefillCore
from services.prefill.limits import PrefillLimits
from services.router.forwarding.admission import ForwardingLimits
from services.router.forwarding.core import ForwardingCore
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from tests.simulation.streams import ServerEnd, Stream, settle, tick
from tests.unit.triton.fake_engine import facts

BLOCK_TOKENS = 32
BASE_S = 0.005
TOKEN_S = 0.0005
"""Cost of a prompt in an engine: `BASE_S`, and `TOKEN_S` for each token."""

VERSION = "v1"
MODEL = facts(tokens_per_block=BLOCK_TOKENS, kv_blocks=100_000, max_sequence_tokens=100_000)


class Arrival(NamedTuple):
    """One request. Times in seconds."""

    at_s: float
    tenant: str
    tokens: int
    terms: Mapping[str, Any] = {}
    """Fields of its budget."""


@dataclass(slots=True, eq=False)
class RequestResult:
    """A request and its result."""

    arrival: Arrival
    first_s: float | None = None
    """When its first token came."""
    refusal: pb.Refusal | None = None
    refused_s: float = 0.0
    is_late: bool = False
    """True if its deadline passed in the engine."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.arrival.at_s


@dataclass(slots=True)
class TimedEngine:
    """An EnginePort that runs one prompt after the other in order of admission, as with chunked prefill."""

    sink: EngineSink
    name: str
    waiting: deque[tuple[int, EngineCall]] = field(default_factory=deque)
    end_s: float | None = None
    """When the first of them is done."""
    now_s: float = 0.0
    slowness: float = 1.0
    handoffs: int = 0
    computed_tokens: int = 0

    def start(self, call_id: int, call: EngineCall) -> None:
        self.waiting.append((call_id, call))
        if len(self.waiting) == 1:
            self._begin()

    def cancel(self, call_id: int) -> None:
        is_first = bool(self.waiting) and self.waiting[0][0] == call_id
        self.waiting = deque(one for one in self.waiting if one[0] != call_id)
        if is_first:
            self._begin()

    def release(self, context_phase_params: bytes) -> None:
        pass

    def open_calls(self) -> int:
        return len(self.waiting)

    def report(self) -> None:
        self.sink.on_ready(True, self.now_s)
        self.sink.on_load(
            EngineLoad(f"{self.name}.1", MODEL.kv_blocks, MODEL.kv_blocks, handoffs_held=0), self.now_s
        )

    def finish(self) -> None:
        """Finish the first prompt."""
        call_id, call = self.waiting.popleft()
        self.computed_tokens += len(call.token_ids) // 4
        self._begin()
        self.handoffs += 1
        self.sink.on_first(
            call_id, FirstAnswer(f"{self.name}/{self.handoffs}".encode(), reused_blocks=0), self.now_s
        )
        self.sink.on_tokens(call_id, (1,), (), self.now_s)
        self.sink.on_end(call_id, self.now_s)

    def _begin(self) -> None:
        self.end_s = None
        if self.waiting:
            tokens = len(self.waiting[0][1].token_ids) // 4
            self.end_s = self.now_s + (BASE_S + TOKEN_S * tokens) * self.slowness


class Frontend:
    """The frontend's side of the router's session: records the messages that it gets."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.results: dict[int, RequestResult] = {}
        self.stream = Stream("router-0", "frontend-0", self)
        self.delay_us = 0

    def on_attached(self, link: Any, hello: pb.Hello, now_s: float) -> None:
        pass

    def on_response(self, link: Any, message: pb.AttachResponse, now_s: float) -> None:
        for first in message.first_tokens:
            self.results[first.slot].first_s = now_s
        for refusal in message.refusals:
            result = self.results[refusal.slot]
            result.refusal, result.refused_s = refusal, now_s
        for finish in message.finishes:
            self.results[finish.slot].is_late = self.results[finish.slot].first_s is None
        for failure in message.failures:
            raise AssertionError(f"a request failed: {failure}")
        if message.HasField("load_report"):
            self.delay_us = message.load_report.queue_delay_us


class Pool:
    """See the module's docstring."""

    def __init__(self, seed: int, *, prefills: int = 4, limits: ForwardingLimits | None = None) -> None:
        self.draw = random.Random(seed)
        self.now_s = 1000.0
        self.policy = CostPolicy(
            "router-0",
            LocalPrefixIndex(),
            self.draw,
            block_tokens=BLOCK_TOKENS,
            dispatch_ahead_s=1.0,
            local_prefill_tokens_max=0,
        )
        self.router_core = ForwardingCore(
            "router-0",
            VERSION,
            BLOCK_TOKENS,
            self.policy,
            limits or ForwardingLimits(queue_max_requests=100_000),
            forecast=self.policy,
        )
        self.cores: list[Any] = [self.router_core]
        self.engines: dict[str, TimedEngine] = {}
        self.streams: list[Stream] = []
        self.services: dict[str, Any] = {"router-0": self.router_core}
        for number in range(prefills):
            name = f"prefill-{number}"
            self._add("prefill", name, PrefillCore(name, MODEL, PrefillLimits(engine_concurrency=2)))
        decode_limits = DecodeLimits(
            slots_max=10_000,
            detached_s=1.0,
            slow_reader_s=60.0,
            first_token_timeout_s=600.0,
            token_timeout_s=60.0,
        )
        self._add("decode", "decode-0", DecodeCore("decode-0", MODEL, decode_limits, lambda *_: True))
        self.frontend = Frontend(self)
        self.streams.append(self.frontend.stream)
        self._flow()
        self.learn()

    def learn(self) -> None:
        """Let the router measure the cost of prompts, one after the other."""
        for number in range(40):
            tokens = 100 + 100 * (number % 20)
            self.run([Arrival(self.now_s, "", tokens)])
        self.advance(60.0)

    def run(self, arrivals: Iterable[Arrival], drain_s: float = 600.0) -> list[RequestResult]:
        """Send `arrivals`, in order of their times, and wait until all have ended."""
        results = []
        for arrival in arrivals:
            self.advance_to(max(arrival.at_s, self.now_s))
            results.append(self._submit(arrival))
            self._flow()
        end_s = self.now_s + drain_s
        while any(one.first_s is None and one.refusal is None and not one.is_late for one in results):
            assert self.now_s < end_s, "requests never end"
            self.advance(0.5)
        return results

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.advance_to(self.now_s + seconds)

    def advance_to(self, end_s: float) -> None:
        """Stop at each timer and each end of a prompt on the way."""
        while True:
            times = [core.next_wake_s() for core in self.cores]
            times += [engine.end_s for engine in self.engines.values()]
            next_s = min((time for time in times if time is not None), default=end_s)
            if next_s > end_s:
                break
            self._set(max(self.now_s, next_s))
            for engine in self.engines.values():
                if engine.end_s is not None and engine.end_s <= self.now_s:
                    engine.finish()
            self._flow()
        self._set(end_s)

    def _set(self, now_s: float) -> None:
        self.now_s = now_s
        for engine in self.engines.values():
            engine.now_s = now_s

    def _submit(self, arrival: Arrival) -> RequestResult:
        stream, draw = self.frontend.stream, self.draw
        slot = stream.outbox.new_slot()
        submit = pb.Submit(
            slot=slot,
            request_id=f"{draw.getrandbits(128):032x}",
            attempt=1,
            token_ids=bytes(4 * arrival.tokens),
            block_hashes=draw.randbytes(8 * (arrival.tokens // BLOCK_TOKENS)),
            block_tokens=BLOCK_TOKENS,
            model_version=VERSION,
            credit_position=10,
            end_token_id=-1,
        )
        submit.sampling.temperature = 1.0
        submit.sampling.top_p = 1.0
        submit.budget.remaining_ms = 600_000
        submit.budget.max_output_tokens = 1
        submit.budget.tenant = arrival.tenant
        for name, value in arrival.terms.items():
            setattr(submit.budget, name, value)
        result = self.frontend.results[slot] = RequestResult(arrival)
        stream.outbox.submit(submit, self.now_s + submit.budget.remaining_ms / 1000)
        return result

    def _add(self, role: Literal["prefill", "decode"], name: str, core: Any) -> None:
        engine = TimedEngine(core.sink, name, now_s=self.now_s)
        core.connect(engine)
        engine.report()
        self.cores.append(core)
        self.engines[name] = engine
        self.services[name] = core
        replica = self.router_core.add_replica(name, role, kv_address="127.0.0.1:9")
        stream = Stream(name, "router-0", replica)
        replica.connect(stream)
        self.streams.append(stream)
        self.policy.local_index.add(name)

    def _flow(self) -> None:
        """Deliver all messages, and run the timers that are due, until nothing moves."""
        for stream in self.streams:
            stream.open(self.services[stream.name], "b")
        moved = True
        while moved:
            moved = False
            for core in self.cores:
                settle(core, self.now_s)
                tick(core, self.now_s)
            for stream in self.streams:
                server: ServerEnd | None = stream.server
                assert server is not None
                stream.write_up(self.now_s)
                stream.write_down(self.now_s)
                moved = moved or bool(stream.up or stream.down)
                while stream.up:
                    stream.arrive_up(self.now_s)
                while stream.down:
                    stream.arrive_down(self.now_s)


def poisson(
    draw: random.Random, tenant: str, per_s: float, tokens: int, start_s: float, end_s: float, **terms: Any
) -> list[Arrival]:
    """Return requests at random moments."""
    arrivals, at_s = [], start_s
    while (at_s := at_s + draw.expovariate(per_s)) < end_s:
        arrivals.append(Arrival(at_s, tenant, tokens, terms))
    return arrivals


def merged(*many: Iterable[Arrival]) -> list[Arrival]:
    """Return all in order of their times."""
    return list(heapq.merge(*many, key=lambda one: one.at_s))


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)]
