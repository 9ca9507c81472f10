"""A whole mesh of real cores on a virtual clock: frontends, routers, prefill and decode. Only engines are fakes."""

from __future__ import annotations

import random
from typing import Any

from kvmesh.attach import frames
from kvmesh.models.detokenizer import ByteDetokenizer
from services.decode.core import DecodeCore
from services.decode.limits import DecodeLimits
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.output import Output
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.request_spec import RequestSpec, Timing
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import Limits
from services.frontend.requests.sampling import Sampling
from services.prefill.core import PrefillCore
from services.prefill.limits import PrefillLimits
from services.router.forwarding.admission import ForwardingLimits
from services.router.forwarding.core import ForwardingCore
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from tests.simulation.streams import Stream, settle, tick
from tests.unit.triton.fake_engine import END_TOKEN, VOCABULARY, FakeEngine, expected, facts

BLOCK_TOKENS = 4
DETACHED_S = 1.0
KV_ADDRESS = "127.0.0.1:9"
MODEL_VERSION = "v1"
TOKEN_BYTES = [bytes([65 + token % 26]) for token in range(VOCABULARY)]


class Client:
    """Reads one request as a handler would, and checks the guarantees to every client."""

    def __init__(self, core: FrontendCore, spec: RequestSpec, now_s: float) -> None:
        self.core, self.spec = core, spec
        self.ids: list[int] = []
        self.has_left = False
        output = Output(ByteDetokenizer(TOKEN_BYTES), spec.stop, with_logprobs=False)
        self.request: LiveRequest = core.submit(spec, output, lambda: None, now_s)

    @property
    def is_done(self) -> bool:
        """Return True if there is nothing more to read."""
        return self.request.outcome is not None and not self.request.output.has_waiting()

    def read(self, now_s: float) -> None:
        """Take the waiting tokens, and report their delivery."""
        tokens = self.request.output.take()
        if tokens is not None:
            assert tokens.position == len(self.ids), f"{self.request}: a gap or a repeat"
            self.ids += tokens.ids
            self.core.deliver(self.request, self.request.output.taken, now_s)


class Mesh:
    """Processes by name. A killed one is replaced by a new boot at once, and its streams are cut."""

    def __init__(
        self, draw: random.Random, *, frontends: int, routers: int, prefills: int, decodes: int
    ) -> None:
        self.draw = draw
        self.now_s = 1000.0
        self.boots = 0
        self.cores: dict[str, Any] = {}
        self.engines: dict[str, FakeEngine] = {}
        self.streams: list[Stream] = []
        self.clients: list[Client] = []
        self.prefill_names = [f"prefill-{number}" for number in range(prefills)]
        self.decode_names = [f"decode-{number}" for number in range(decodes)]
        self.router_names = [f"router-{number}" for number in range(routers)]
        self.frontend_names = [f"frontend-{number}" for number in range(frontends)]
        for name in (*self.prefill_names, *self.decode_names, *self.router_names, *self.frontend_names):
            self.boot(name)

    def boot(self, name: str) -> None:
        """Start process `name` with nothing in memory, and its callers' links to it."""
        self.boots += 1
        role = name.partition("-")[0]
        core: Any
        if role == "prefill":
            limits = PrefillLimits(
                queue_max_requests=16,
                engine_concurrency=2,
                handoff_timeout_s=5.0,
                detached_s=DETACHED_S,
                first_token_timeout_s=20.0,
            )
            core = PrefillCore(name, facts(), limits)
            self._start_engine(name, core)
        elif role == "decode":
            core = DecodeCore(
                name,
                facts(),
                DecodeLimits(
                    slots_max=8,
                    detached_s=DETACHED_S,
                    slow_reader_s=60.0,
                    first_token_timeout_s=20,
                    token_timeout_s=20,
                ),
                lambda address, _: address == KV_ADDRESS,
            )
            self._start_engine(name, core)
        elif role == "router":
            core = self._router(name)
        else:
            core = FrontendCore(
                Limits(8, DETACHED_S, BLOCK_TOKENS),
                limit=64,
                retries=RetryBudget(0.5, 10.0, self.now_s),
                jitter=self.draw.random,
            )
            for router in self.router_names:
                stream = Stream(router, name, core)
                core.add_router(stream)
                self.streams.append(stream)
        self.cores[name] = core

    def _router(self, name: str) -> ForwardingCore:
        policy = CostPolicy(
            name,
            LocalPrefixIndex(),
            self.draw,
            block_tokens=BLOCK_TOKENS,
            dispatch_ahead_s=1.0,
            local_prefill_tokens_max=8,
        )
        router_core = ForwardingCore(
            name, MODEL_VERSION, BLOCK_TOKENS, policy, ForwardingLimits(32, 30.0, DETACHED_S)
        )
        for replica_name in (*self.prefill_names, *self.decode_names):
            role = "prefill" if replica_name.startswith("prefill") else "decode"
            replica = router_core.add_replica(replica_name, role, kv_address=KV_ADDRESS)  # type: ignore[arg-type]
            stream = Stream(replica_name, name, replica)
            replica.connect(stream)
            self.streams.append(stream)
        return router_core

    def _start_engine(self, name: str, core: Any) -> None:
        peer = None
        if name.startswith("decode"):
            peer = _Handoffs(self)
        engine = FakeEngine(core.sink, boot_id=f"{name}.{self.boots}", peer=peer)  # type: ignore[arg-type]
        core.connect(engine)
        engine.report(self.now_s)
        self.engines[name] = engine

    def kill(self, name: str) -> None:
        """kill -9 and start again: its memory and its engine's are lost, its peers notice now or later."""
        for stream in self.streams:
            if stream.name == name:
                stream.half_dead.clear()
                if stream.server is not None:
                    stream.server.session = None
                stream.cut(self.now_s)
        own = [stream for stream in self.streams if stream.caller == name]
        for stream in own:
            if stream.server is not None:
                stream.half_dead.append(stream.server)
            self.draw.random()
        for stream in own:
            stream.notice(self.now_s)
            self.streams.remove(stream)
        self.boot(name)

    def settle(self) -> None:
        """Run the timers that are due, as every shell does after each event."""
        for core in self.cores.values():
            settle(core, self.now_s)
            tick(core, self.now_s)

    def advance(self, seconds: float) -> None:
        """Move the clock, stopping at every timer on the way."""
        end_s = self.now_s + seconds
        for _ in range(100_000):
            wakes = [wake_s for core in self.cores.values() if (wake_s := core.next_wake_s()) is not None]
            next_s = min(wakes, default=float("inf"))
            if next_s > end_s:
                break
            self.now_s = max(self.now_s, next_s)
            self.settle()
        else:
            wakes_now = {name: core.next_wake_s() for name, core in self.cores.items()}
            raise AssertionError(f"timers without end at {self.now_s}: {wakes_now}")
        self.now_s = end_s
        self.settle()

    def connect(self) -> None:
        """Open every stream that is closed."""
        for stream in self.streams:
            stream.open(self.cores[stream.name], f"{stream.name}.{self.boots}")

    def travel(self) -> None:
        """Let all waiting messages travel one hop in both directions."""
        for stream in self.streams:
            stream.write_up(self.now_s)
            while stream.up and stream.server is not None and not stream.frozen:
                stream.arrive_up(self.now_s)
            stream.write_down(self.now_s)
            while stream.down and not stream.frozen:
                stream.arrive_down(self.now_s)
        self.settle()

    def assert_consistent(self) -> None:
        """Ask every core whether its state is consistent."""
        for core in self.cores.values():
            core.assert_consistent()

    def submit(self) -> Client:
        """Send a random request through a random frontend."""
        draw = self.draw
        prompt = [draw.randrange(1, VOCABULARY) for _ in range(draw.choice((1, 3, 9, 20, 40)))]
        if draw.random() < 0.5:
            prompt = [7] * 16 + prompt
        seconds = draw.choice((0.3, 2.0, 600.0, 600.0, 600.0))
        return self.send(
            prompt,
            draw.choice((1, 2, 8, 40, 60)),
            seconds,
            priority=draw.choice((0, 0, 0, 5, -5)),
            is_clients_deadline=draw.random() < 0.5,
        )

    def send(
        self,
        prompt: list[int],
        output: int,
        seconds: float = 600.0,
        end_token_id: int = END_TOKEN,
        *,
        is_clients_deadline: bool = True,
        **fields: Any,
    ) -> Client:
        """Send a request for `output` tokens behind `prompt` through a random frontend. `fields`: of its request spec."""
        spec = RequestSpec(
            request_id=f"{self.draw.getrandbits(128):032x}",
            prompt_ids=frames.pack_ids(prompt),
            sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=7),
            max_output_tokens=output,
            model_version=MODEL_VERSION,
            end_token_ids=frozenset((end_token_id,) if end_token_id >= 0 else ()),
            timing=Timing(
                arrived_s=self.now_s,
                deadline_s=self.now_s + seconds,
                is_clients_deadline=is_clients_deadline,
            ),
            **fields,
        )
        client = Client(self.cores[self.draw.choice(self.frontend_names)], spec, self.now_s)
        self.clients.append(client)
        return client

    def oracle(self, spec: RequestSpec) -> list[int]:
        """Return the output of `spec` on an engine alone."""
        return expected(
            frames.unpack_ids(spec.prompt_ids), spec.max_output_tokens, max(spec.end_token_ids, default=-1)
        )

    def held(self) -> list[str]:
        """Return the resources that the mesh still holds for requests."""
        left = [f"{name}: engine calls {engine.live}" for name, engine in self.engines.items() if engine.live]
        left += [f"{name}: handoffs {engine.held}" for name, engine in self.engines.items() if engine.held]
        for name in self.frontend_names:
            live = self.cores[name].admitted
            if live.serving or live.leaving:
                left.append(f"{name}: {live.serving} {live.leaving}")
            left += [f"{name}: {peer} {peer.slots}" for peer in self.cores[name].peers if peer.slots]
        for name in self.router_names:
            router_core = self.cores[name]
            if router_core.attempts.open or router_core.queue:
                left.append(f"{name}: {router_core.attempts.open}")
        for name in (*self.decode_names, *self.prefill_names):
            if self.cores[name].slot_table.slots:
                left.append(f"{name}: {self.cores[name].slot_table.slots}")
        return left


class _Handoffs:
    """All handoffs of all prefill engines, as a decode engine reaches them over the network."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @property
    def held(self) -> _Handoffs:
        return self

    def pop(self, handoff: bytes, default: int | None) -> int | None:
        for name in self._mesh.prefill_names:
            if handoff in self._mesh.engines[name].held:
                return self._mesh.engines[name].held.pop(handoff)
        return default
