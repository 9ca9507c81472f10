"""Routers and a decode pool that keep the protocol's promises and break everything else, under a seed.

The tokens are a pure function of the whole history. So a token lost, repeated or resumed from the wrong
position changes all later tokens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import xxhash

from kvmesh.attach import frames, rules
from kvmesh.attach.outbox import DownwardOutbox, UpwardOutbox
from kvmesh.attach.token_log import TokenLog
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.models.detokenizer import ByteDetokenizer
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.output import Output
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.request_spec import RequestSpec, Timing
from services.frontend.requests.sampling import Sampling

END_ID = 1
VOCABULARY = 300
TOKEN_BYTES = [b""] * 4 + [bytes([each % 256]) for each in range(4, VOCABULARY)]
DETACHED_S = 3.0
COMPUTED_STRIDE = 32
"""Number of tokens that an attempt computes beyond its flow-control window before it reports them."""


def next_token(history: bytes, model_version: str = "v1") -> int:
    """Return the token of `model_version` behind `history` (packed ids)."""
    seed = 0 if model_version == "v1" else xxhash.xxh3_64_intdigest(model_version.encode())
    digest = xxhash.xxh3_64_intdigest(history, seed)
    return END_ID if digest % 41 == 0 else 4 + digest % (VOCABULARY - 4)


def oracle(prompt: bytes, max_output_tokens: int, model_version: str = "v1") -> list[int]:
    """Return the whole output of `prompt` by `model_version`."""
    history, ids = prompt, list[int]()
    while len(ids) < max_output_tokens:
        ids.append(next_token(history, model_version))
        history += frames.pack_ids(ids[-1:])
        if ids[-1] == END_ID:
            break
    return ids


@dataclass
class Router:
    """One router's link: the view of the frontend core, and the messages in transit in both directions."""

    name: str
    is_up: bool = False
    outbox: UpwardOutbox = field(default_factory=UpwardOutbox)
    down: DownwardOutbox = field(default_factory=DownwardOutbox)
    upward: deque[pb.AttachRequest] = field(default_factory=deque)
    downward: deque[pb.AttachResponse] = field(default_factory=deque)
    runs: dict[int, Run] = field(default_factory=dict)
    last_slot: int = 0
    is_frozen: bool = False
    pool: str = "default"
    model_version: str = ""
    """Version that its pool serves; empty: any."""
    can_place: bool = True
    region: str = ""
    """Empty: the frontend's own region."""


@dataclass
class Run:
    """One attempt behind the routers."""

    submit: pb.Submit
    router: Router | None
    slot: int
    log: TokenLog
    history: bytes
    stage: str = "queued"  # then accepted, placed, started, running, finished
    detached_until_s: float | None = None
    reason: int = 0
    told: int = 0
    """Position computed beyond the flow-control window that its router was told last."""
    region: str = ""

    @property
    def end(self) -> int:
        """Return the position behind the last one the attempt may make."""
        return self.submit.start_position + self.submit.budget.max_output_tokens


class FakeMesh:
    """Everything behind one frontend core, stepped by hand."""

    def __init__(
        self,
        core: FrontendCore,
        draw: random.Random,
        router_count: int = 2,
        pools: Sequence[tuple[str, str]] = (("default", ""),),
        others: Mapping[str, Sequence[tuple[str, str]]] = MappingProxyType({}),
    ) -> None:
        """`router_count`: routers of each of `pools`, given with their versions. `others`: pools of other regions."""
        self.core = core
        self.draw = draw
        self.now_s = 1000.0
        self.knows_one_end = False
        """True for engines that end at one token alone, as those of an earlier release."""
        self.routers = [
            Router(
                f"router-{each}" if pool == "default" else f"{pool}-router-{each}",
                pool=pool,
                model_version=version,
            )
            for pool, version in pools
            for each in range(router_count)
        ]
        self.routers += [
            Router(f"{region}/{pool}-router-{each}", pool=pool, model_version=version, region=region)
            for region, its in others.items()
            for pool, version in its
            for each in range(router_count)
        ]
        self.runs: list[Run] = []
        self.highest: dict[tuple[str, str], int] = {}
        """Highest attempt number by region and request: no region knows the attempts of another one."""
        self.submits: list[pb.Submit] = []
        self.adopts = 0
        self.decode = "decode-0"
        """The replica where attempts are placed."""
        self.contradictions: list[tuple[str, str]] = []
        """Contradictions received, as (router, replica)."""
        self.cancels: list[int] = []
        self.pools: dict[str, list[str]] = {}
        """Pools of the attempts, by request."""
        self.regions: dict[str, list[str]] = {}
        """Regions of the attempts, by request."""
        self.adopted: list[tuple[str, pb.Adopt]] = []
        """Adopts received, with the region of the router."""
        self.computed: dict[str, int] = {}
        """Position behind the highest output position computed, by request."""
        for router in self.routers:
            core.add_router(router, router.pool, router.model_version, router.region)

    # Links.

    def open(self, router: Router) -> None:
        """Attach the router: the core receives its hello."""
        if not router.is_up:
            router.is_up = True
            self.core.on_attached(router, pb.Hello(process_id=router.name), self.now_s)

    def cut(self, router: Router) -> None:
        """Break the stream: messages in transit are lost, running attempts are detached, the others end."""
        if not router.is_up:
            return
        for run in list(router.runs.values()):
            run.router = None
            if run.stage in ("running", "finished"):
                run.detached_until_s = self.now_s + DETACHED_S
            else:
                self.runs.remove(run)
        router.runs.clear()
        router.upward.clear()
        router.downward.clear()
        router.is_up, router.is_frozen, router.last_slot = False, False, 0
        router.outbox, router.down = UpwardOutbox(), DownwardOutbox()
        self.core.on_lost(router, "cut", self.now_s)

    # Messages.

    def send_up(self, router: Router) -> None:
        """Put the contents of the core's outbox in transit."""
        message = router.outbox.take(self.now_s) if router.is_up else None
        if message is not None:
            router.upward.append(message)

    def arrive_up(self, router: Router) -> None:
        """Let the oldest message reach the router."""
        if router.is_frozen or not router.upward:
            return
        message = router.upward.popleft()
        for cancel in message.cancels:
            self.cancels.append(cancel.reason)
            run = router.runs.pop(cancel.slot, None)
            if run is not None:
                self.runs.remove(run)
        self.contradictions += [(router.name, row.replica) for row in message.contradictions]
        last = router.last_slot  # within one message, adopts ascend and submits ascend
        for adopt in message.adopts:
            self.adopts += 1
            self.adopted.append((router.region, adopt))
            rules.check_adopt(adopt, last_slot=last)
            last = adopt.slot
            self._adopt(router, adopt)
        highest, last = last, router.last_slot
        for submit in message.submits:
            rules.check_submit(submit, last_slot=last)
            last = submit.slot
            self._submit(router, submit)
        router.last_slot = max(highest, last)
        for slot, position in zip(message.credit_slots, message.credit_positions, strict=True):
            run = router.runs.get(slot)
            if run is not None:
                run.log.grant(position)

    def send_down(self, router: Router) -> None:
        """Put the router's pending rows in transit; tokens only within the flow-control window."""
        for slot, run in list(router.runs.items()):
            while run.stage in ("running", "finished") and (chunk := run.log.take()) is not None:
                router.down.tokens(slot, chunk.position, chunk.token_ids, chunk.logprobs)
            if run.log.is_blocked() and (
                run.stage == "finished" or run.log.end - run.told >= COMPUTED_STRIDE
            ):
                run.told = run.log.end
                router.down.computed(slot, run.told)
            if run.stage == "finished" and run.log.is_drained():
                router.down.finish(slot, run.log.end, run.reason)  # type: ignore[arg-type]
                router.runs.pop(slot)
                run.router, run.detached_until_s = None, self.now_s + DETACHED_S
        message = router.down.take(self.now_s)
        if message is not None:
            router.downward.append(message)

    def arrive_down(self, router: Router) -> None:
        """Let the oldest message reach the core."""
        if router.is_up and not router.is_frozen and router.downward:
            self.core.on_response(router, router.downward.popleft(), self.now_s)

    # Work.

    def work(self, run: Run) -> None:
        """Let one attempt advance by one stage or some tokens."""
        router, slot = run.router, run.slot
        if run.stage == "running":
            self._generate(run, self.draw.randint(1, 6))
        if router is None:
            return
        if run.stage == "queued":
            run.stage = "accepted"
            router.down.accept(slot)
        elif run.stage == "accepted":
            run.stage = "placed"
            router.down.placement(
                pb.Placement(slot=slot, prefill_replica="prefill-0", decode_replica=self.decode)
            )
        elif run.stage == "placed":
            run.stage = "started"
            router.down.start(slot, 10)
        elif run.stage == "started":
            run.stage = "running"
            self._generate(run, 1)
            run.log.sent = run.log.start + 1
            context = len(run.submit.token_ids) // 4
            router.down.first_token(
                pb.FirstToken(
                    slot=slot,
                    position=run.log.start,
                    token_id=frames.unpack_ids(run.history[-frames.TOKEN_BYTES :])[0],
                    cached_token_count=0,
                    computed_token_count=context,
                )
            )

    def refuse(self, run: Run, reason: pb.Refusal.Reason.ValueType, retry_after_ms: int = 0) -> None:
        """End a queued attempt with a refusal."""
        assert run.router is not None
        run.router.down.refuse(run.slot, reason, "no", retry_after_ms=retry_after_ms)
        self.drop(run)

    def fail(
        self,
        run: Run,
        code: pb.Failure.Code.ValueType,
        message: str = "broke",
        *,
        contestable: bool = False,
    ) -> None:
        """End an attempt with a failure."""
        if run.router is not None:
            untouched = run.stage in ("queued", "accepted", "placed")
            run.router.down.fail(
                run.slot,
                code,
                message,
                replica=self.decode,
                untouched=untouched,
                contestable=contestable,
            )
        self.drop(run)

    def repeat(self, run: Run) -> None:
        """Send some tokens a second time."""
        if run.router is None or run.log.sent == run.log.start:
            return
        position = self.draw.randint(run.log.start, run.log.sent - 1)
        until = self.draw.randint(position + 1, run.log.sent)
        first = len(run.history) - frames.TOKEN_BYTES * run.log.end
        ids = run.history[first + frames.TOKEN_BYTES * position : first + frames.TOKEN_BYTES * until]
        run.router.down.tokens(run.slot, position, ids)

    def skip(self, run: Run) -> None:
        """Lose some tokens, which leaves a gap."""
        if run.router is not None:
            run.log.take()

    def drop(self, run: Run) -> None:
        """Forget an attempt."""
        if run.router is not None:
            run.router.runs.pop(run.slot, None)
        self.runs.remove(run)

    # Time.

    def advance(self, seconds: float) -> None:
        """Let time pass: due timers fire, detached streams end."""
        until_s = self.now_s + seconds
        while (wake_s := self.core.next_wake_s()) is not None and wake_s <= until_s:
            self.now_s = max(self.now_s, wake_s)
            self.core.on_timer(self.now_s)
        self.now_s = until_s
        for run in list(self.runs):
            if run.router is None and run.detached_until_s is not None and run.detached_until_s <= until_s:
                self.runs.remove(run)

    def settle(self, rounds: int = 1) -> None:
        """Deliver all messages in transit and let every attempt work, `rounds` times. No time passes."""
        for _ in range(rounds):
            for router in self.routers:
                self.send_up(router)
                while router.upward and not router.is_frozen:
                    self.arrive_up(router)
            for run in list(self.runs):
                self.work(run)
            for router in self.routers:
                self.send_down(router)
                while router.downward and not router.is_frozen:
                    self.arrive_down(router)

    def report(self, router: Router, *, can_place: bool | None, features: Sequence[str] = ()) -> None:
        """Send the load report of a router. None: a router of release 0.1.0, which does not say."""
        router.can_place = can_place is not False
        if router.is_up:
            router.down.load(pb.LoadReport(engine_ready=True, can_place=can_place, features=features))

    def _submit(self, router: Router, submit: pb.Submit) -> None:
        self.submits.append(submit)
        assert router.model_version in ("", submit.model_version), f"{submit.model_version} at {router.name}"
        self.pools.setdefault(submit.request_id, []).append(router.pool)
        self.regions.setdefault(submit.request_id, []).append(router.region)
        key = (router.region, submit.request_id)
        known = self.highest.get(key, 0)
        if submit.attempt <= known:
            router.down.refuse(submit.slot, pb.Refusal.REASON_SUPERSEDED, "old")
            return
        self.highest[key] = submit.attempt
        for run in [each for each in self.runs if (each.region, each.submit.request_id) == key]:
            if run.router is not None:
                run.router.down.finish(run.slot, run.log.end, pb.Finish.REASON_SUPERSEDED)
            self.drop(run)
        log = TokenLog(submit.start_position, submit.credit_position)
        run = Run(submit, router, submit.slot, log, submit.token_ids, region=router.region)
        router.runs[submit.slot] = run
        self.runs.append(run)

    def _adopt(self, router: Router, adopt: pb.Adopt) -> None:
        for run in self.runs:
            wanted = (router.region, adopt.request_id, adopt.attempt)
            if (run.region, run.submit.request_id, run.submit.attempt) != wanted:
                continue
            assert run.submit.model_version == router.model_version or not router.model_version
            if run.stage not in ("running", "finished") or not run.log.start <= adopt.position <= run.log.end:
                break
            if run.router is not None:
                run.router.down.finish(run.slot, run.log.end, pb.Finish.REASON_ADOPTED)
                run.router.runs.pop(run.slot)
            run.log.rewind(adopt.position, adopt.credit_position)
            run.told = 0
            run.router, run.slot, run.detached_until_s = router, adopt.slot, None
            router.runs[adopt.slot] = run
            router.down.accept(adopt.slot)
            return
        router.down.refuse(adopt.slot, pb.Refusal.REASON_UNKNOWN_REQUEST, "who?")

    def _generate(self, run: Run, count: int) -> None:
        for _ in range(count):
            token = next_token(run.history, run.submit.model_version)
            run.history += frames.pack_ids((token,))
            run.log.append((token,))
            known = self.computed.get(run.submit.request_id, 0)
            self.computed[run.submit.request_id] = max(known, run.log.end)
            ends = {run.submit.end_token_id} if self.knows_one_end else frames.end_token_ids(run.submit)
            if token in ends:
                run.stage, run.reason = "finished", pb.Finish.REASON_END_TOKEN
                return
            if run.log.end == run.end:
                run.stage, run.reason = "finished", pb.Finish.REASON_LENGTH
                return


class Client:
    """Reads one request as a handler would, and checks the guarantees given to every client."""

    def __init__(self, core: FrontendCore, spec: RequestSpec, now_s: float) -> None:
        self.core = core
        self.spec = spec
        self.ids: list[int] = []
        self.text = ""
        self.ready = False
        self.ends = 0
        output = Output(ByteDetokenizer(TOKEN_BYTES), spec.stop, with_logprobs=spec.logprobs)
        self.request: LiveRequest = core.submit(spec, output, self._on_ready, now_s)

    def _on_ready(self) -> None:
        self.ready = True

    @property
    def is_done(self) -> bool:
        """True if there is nothing more to read."""
        return self.request.outcome is not None and not self.request.output.has_waiting()

    def read(self, now_s: float) -> None:
        """Take the waiting output and tell the core that it left."""
        tokens = self.request.output.take()
        if tokens is None:
            return
        assert tokens.position == len(self.spec.execution.received_ids) + len(self.ids), "a gap or a repeat"
        self.ids += tokens.ids
        self.text += tokens.text
        self.core.deliver(self.request, self.request.output.taken, now_s)


def spec(request_id: int, **changes: object) -> RequestSpec:
    """Return a request spec with a prompt of its own. `changes`: fields of the spec or of one of its parts."""
    draw = random.Random(request_id)
    prompt = [draw.randrange(4, VOCABULARY) for _ in range(draw.randint(1, 80))]
    made = RequestSpec(
        request_id=f"{request_id:032x}",
        prompt_ids=frames.pack_ids(prompt),
        sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=7),
        max_output_tokens=draw.randint(1, 200),
        model_version="v1",
        end_token_ids=frozenset({END_ID}),
        timing=Timing(arrived_s=1000.0, deadline_s=1600.0),
    )
    return changed(made, **changes)


def changed(of: RequestSpec, **changes: Any) -> RequestSpec:
    """Return `of` with other values for fields of the spec, or of its sampling, timing or execution."""
    for name, part in (("sampling", of.sampling), ("timing", of.timing), ("execution", of.execution)):
        own = {each.name: changes.pop(each.name) for each in fields(part) if each.name in changes}
        changes[name] = replace(part, **own)
    return replace(of, **changes)
