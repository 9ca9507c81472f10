"""Load and capacity for other regions: by a simulated pool with the real placement, and by example."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from kvmesh import blocks
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.control.v1 import region_pb2
from kvmesh.regions.quantity import Quantity
from services.router.forwarding.admission import ForwardingLimits
from services.router.forwarding.core import ForwardingCore
from services.router.forwarding.outlier_ejection import EJECT_AFTER
from services.router.forwarding.region_load import MEASURED_MIN, RegionLoad
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from services.router.placement.policy import Stored
from services.router.regions.callers import Callers
from tests.unit.router.desk import A, B, Desk, Link, first, with_room

BLOCK = 32
PREFILLS = 3
COSTS = (0.06, 180e-6, 9e-9)
"""c0 (s), a (s/token), b (s/token^2) of the simulated engines."""


def true_s(uncached: int, total: int) -> float:
    """Return the seconds of a prefill at a simulated engine."""
    c0, a, b = COSTS
    return c0 + uncached * (a + b * (total - uncached / 2))


class Mix:
    """Prompts of `groups` shared prefixes of up to 8,000 tokens, with own parts of 40 to 3,000 tokens."""

    def __init__(self, rng: random.Random, hit_share: float) -> None:
        self._rng = rng
        self._hit_share = hit_share
        self._fresh = count(1 << 40)
        self.prefixes = [
            [rng.getrandbits(63) for _ in range(rng.choice((16, 60, 128, 250)))] for _ in range(12)
        ]

    def prompt(self) -> tuple[list[int], int, list[int]]:
        """Return the hashes and the tokens of a prompt, and its shared prefix; empty: it shares none."""
        rng = self._rng
        prefix = rng.choice(self.prefixes) if rng.random() < self._hit_share else []
        own = round(40 * (3000 / 40) ** rng.random())
        tokens = len(prefix) * BLOCK + own
        return [*prefix, *(next(self._fresh) for _ in range(own // BLOCK))], tokens, prefix


class Pool:
    """One router with PREFILLS prefill engines, which run one prompt at a time, and a decode replica with ample room."""

    def __init__(self, seed: int, hit_share: float) -> None:
        self.rng = random.Random(seed)
        self.mix = Mix(self.rng, hit_share)
        self.now_s = 1000.0
        self.offered_s = 0.0
        """Prefill seconds of all prompts that came, with the hits that the pool has for them."""
        self._index = LocalPrefixIndex()
        self.policy = CostPolicy(
            "router-0",
            self._index,
            self.rng,
            block_tokens=BLOCK,
            dispatch_ahead_s=0.5,
            local_prefill_tokens_max=0,
        )
        self.callers = Callers("us", ("eu", "us"))
        self.core = ForwardingCore(
            *("router-0", "m", BLOCK, self.policy, ForwardingLimits(64, queue_delay_max_s=3.0)),
            forecast=self.policy,
            callers=self.callers,
        )
        self.load = RegionLoad(self.core, self.callers, self.policy, 256, lambda outcome: 0)
        self._outbox = DownwardOutbox()
        self._session = self.core.open_session(
            pb.Hello(process_id="f", region="us"), self._outbox, self.now_s
        )
        self._links: dict[str, Link] = {}
        self._cached: dict[str, set[int]] = {}
        self._waiting: dict[str, deque[pb.Submit]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count(1)
        for name in (*(f"prefill-{number}" for number in range(PREFILLS)), "decode-0"):
            replica = self.core.add_replica(name, "decode" if name == "decode-0" else "prefill")
            link = self._links[name] = Link()
            replica.connect(link)
            self._index.add(name)
            self._cached[name], self._waiting[name] = set(), deque()
            replica.on_attached(link, pb.Hello(), self.now_s)

    def begin(self, per_s: float) -> None:
        """Let prompts come at `per_s` from now on."""
        self._after(0.0, self._every_second)
        self._after(self.rng.expovariate(per_s), lambda: self._arrive(per_s))

    def run(self, seconds: float) -> region_pb2.RouterLoad:
        """Return the report after `seconds`."""
        until_s = self.now_s + seconds
        while self._events[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._events)
            act()
            wake_s = self.core.next_wake_s()
            if wake_s is not None and wake_s <= self.now_s:
                self.core.on_timer(self.now_s)
            self._serve()
        return self.load.report(self.now_s)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._numbers), act))

    def _every_second(self) -> None:
        for name in self._links:
            report = pb.LoadReport(engine_ready=True, block_total_count=100_000, block_free_count=100_000)
            self._answer(name, load_report=report)
        self.load.sample(self.now_s)
        self._after(1.0, self._every_second)

    def _arrive(self, per_s: float) -> None:
        self._after(self.rng.expovariate(per_s), lambda: self._arrive(per_s))
        hashes, tokens, prefix = self.mix.prompt()
        is_hit = any(prefix and prefix[-1] in cached for cached in self._cached.values())
        self.offered_s += true_s(tokens - len(prefix) * BLOCK if is_hit else tokens, tokens)
        number = next(self._numbers)
        submit = pb.Submit(
            slot=number,
            request_id=f"{number:032x}",
            attempt=1,
            token_ids=bytes(4 * tokens),
            block_hashes=blocks.pack(hashes),
            block_tokens=BLOCK,
            model_version="m",
            credit_position=10,
            end_token_id=-1,
        )
        submit.sampling.temperature = 1.0
        submit.budget.remaining_ms, submit.budget.max_output_tokens = 60_000, 1
        self._session.on_request(pb.AttachRequest(submits=[submit]), self.now_s)
        self.core.after_event(self.now_s)
        self._outbox.take(self.now_s)

    def _serve(self) -> None:
        """Take the submits of the replicas, and start idle engines."""
        for submit in self._submits("decode-0"):
            self._answer("decode-0", acceptances=[pb.Acceptance(slot=submit.slot)])
        for name, waiting in self._waiting.items():
            was_idle = not waiting
            waiting.extend(self._submits(name) if name != "decode-0" else ())
            if was_idle and waiting:
                self._start(name)

    def _submits(self, name: str) -> Iterator[pb.Submit]:
        while (message := self._links[name].outbox.take(self.now_s)) is not None:
            yield from message.submits

    def _start(self, name: str) -> None:
        submit = self._waiting[name][0]
        tokens, hashes = len(submit.token_ids) // 4, blocks.unpack(submit.block_hashes)
        depth = 0
        while depth < len(hashes) and hashes[depth] in self._cached[name]:
            depth += 1
        uncached = max(1, tokens - depth * BLOCK)
        seconds = true_s(uncached, tokens) * self.rng.uniform(0.9, 1.1)
        self._answer(name, starts=[pb.Start(slot=submit.slot)])
        self._after(seconds, lambda: self._finish(name, tokens - uncached, uncached, seconds))

    def _finish(self, name: str, cached: int, computed: int, seconds: float) -> None:
        submit = self._waiting[name].popleft()
        shared = [one for one in blocks.unpack(submit.block_hashes) if one not in range(1 << 40, 1 << 41)]
        self._cached[name].update(shared)
        self.policy.observe(Stored(name, shared))
        token = pb.FirstToken(
            slot=submit.slot,
            cached_token_count=cached,
            computed_token_count=computed,
            prefill_us=round(seconds * 1e6),
        )
        self._answer(name, first_tokens=[token])
        if self._waiting[name]:
            self._start(name)

    def _answer(self, name: str, **rows: object) -> None:
        message = pb.AttachResponse(**rows)  # type: ignore[arg-type]  # rows by field name
        self.core.replicas[name].on_response(self._links[name], message, self.now_s)


def mean_s(seed: int, hit_share: float) -> float:
    """Return the mean prefill seconds of a prompt of the mix with warm caches."""
    mix = Mix(random.Random(seed), hit_share)
    prompts = [mix.prompt() for _ in range(4000)]
    return sum(true_s(tokens - len(prefix) * BLOCK, tokens) for _, tokens, prefix in prompts) / len(prompts)


@pytest.mark.parametrize(("use", "hit_share"), [(0.6, 0.5), (1.0, 0.0), (1.0, 0.5), (1.0, 0.9), (1.6, 0.5)])
def test_load_over_capacity_is_the_use_of_prefill(use: float, hit_share: float) -> None:
    """With mixed lengths and hits, load over capacity is within 15 percent of the prefill work that is asked for.

    At 1.6 two of five requests are refused for capacity, and count as load all the same.
    """
    seed = round(100 * use + 10 * hit_share)
    pool = Pool(seed, hit_share)
    pool.begin(use * PREFILLS / mean_s(seed, hit_share))
    pool.run(50)
    ratios, refusals = [], pool.core.admission.refusals
    offered_s, began_s, refused = pool.offered_s, pool.now_s, refusals[pb.Refusal.REASON_QUEUE_FULL]
    for _ in range(6):
        report = pool.run(10)
        ratios.append(report.own.tokens_per_s / report.capacity.tokens_per_s)
    asked = (pool.offered_s - offered_s) / (pool.now_s - began_s) / PREFILLS
    assert sum(ratios) / len(ratios) == pytest.approx(asked, rel=0.15)
    if use > 1.5:
        assert refusals[pb.Refusal.REASON_QUEUE_FULL] > refused + 100
    cold_factor = report.own_prompt_tokens_per_s / report.own.tokens_per_s
    assert cold_factor > 2 if hit_share else cold_factor == pytest.approx(1)


def sampled(load: RegionLoad, desk: Desk, seconds: int) -> region_pb2.RouterLoad:
    """Let the desk stand for `seconds`, with a sample each second, and return the report."""
    for _ in range(seconds):
        load.sample(desk.now_s)
        desk.now_s += 1
    load.sample(desk.now_s)
    return load.report(desk.now_s)


MUCH = Quantity(1e6, 1e6)


def desk_of(grant: Quantity = MUCH, **options: Any) -> tuple[Desk, RegionLoad]:
    """Return a desk of region "us" that grants much to "eu"."""
    callers = Callers("us", ("eu", "us"))
    desk = Desk(callers=callers, **options)
    callers.renew({"eu": grant}, desk.now_s - 10)
    load = RegionLoad(desk.core, callers, desk.policy, 16, desk.ended.count)
    load.sample(desk.now_s)
    return desk, load


def measured(desk: Desk, tokens_per_s: float) -> None:
    """Let prefill replicas have computed enough prompts at a rate."""
    desk.policy.measured_tokens += MEASURED_MIN
    desk.policy.measured_total_s += MEASURED_MIN / tokens_per_s


def test_load_is_split_by_home_and_leaves_out_calls_without_a_user() -> None:
    """Own callers and guests are load of their regions; warm-up, probes and shadow traffic are none."""
    desk, load = desk_of()
    submits: tuple[tuple[int, dict[str, Any]], ...] = (
        (100, {}),
        (40, {"region": "eu"}),
        (60, {"region": "us"}),
        (80, {"shadow": True, "purpose": budget_pb2.PURPOSE_SHADOW}),
        (80, {"shadow": True, "purpose": budget_pb2.PURPOSE_SHADOW, "region": "us"}),
        (80, {"purpose": budget_pb2.PURPOSE_PROBE}),
        (80, {"purpose": budget_pb2.PURPOSE_WARM_UP, "region": "eu"}),
    )
    for number, (tokens, fields) in enumerate(submits):
        desk.submit(f"{number:032x}", tokens=tokens, **fields)
    report = sampled(load, desk, 10)
    assert report.own.tokens_per_s == pytest.approx(16)
    assert report.own_prompt_tokens_per_s == pytest.approx(16)
    (guests,) = report.guests
    assert guests.region == "eu" and guests.load.tokens_per_s == pytest.approx(4)


def test_a_guest_without_a_grant_is_no_load() -> None:
    """The home region counts what this region refuses for lack of a grant."""
    desk, load = desk_of(Quantity(1e6, 0))
    desk.core.admission.refusals.clear()
    desk.submit(A, region="mars")
    desk.submit(B, tokens=4_000, region="eu")
    report = sampled(load, desk, 10)
    assert report.own.tokens_per_s == report.guests[0].load.tokens_per_s == 0
    assert report.guests[0].refused_total == 1
    assert desk.core.admission.refusals[pb.Refusal.REASON_GRANT] == 2


def test_computed_tokens_replace_the_estimate() -> None:
    """A prompt of 20 tokens counts as 20 at its arrival, and as the 12 that prefill computed afterwards."""
    desk, load = desk_of()
    _, _, slot = desk.reserved()
    assert sampled(load, desk, 10).own.tokens_per_s == pytest.approx(2)
    desk, load = desk_of()
    _, _, slot = desk.reserved()
    desk.down("prefill-0", first_tokens=[first(slot)])
    report = sampled(load, desk, 10)
    assert report.own.tokens_per_s == pytest.approx(1.2)
    assert report.own_prompt_tokens_per_s == pytest.approx(2)


def test_blocks_count_while_decode_holds_them_or_lacks_room_for_them() -> None:
    """Blocks of placed attempts are averaged over the window, and those of waiting ones count while decode is full."""
    desk, load = desk_of()
    desk.generating(tokens=20, output=10)
    desk.submit(B, region="eu", tokens=40, output=20)
    report = sampled(load, desk, 10)
    assert report.own.blocks == pytest.approx(8) and report.guests[0].load.blocks == pytest.approx(15)
    desk, load = desk_of()
    for name in ("decode-0", "decode-1"):
        full = pb.LoadReport(engine_ready=True, block_total_count=10, block_reserved_count=9)
        desk.down(name, load_report=full)
    desk.submit(A, tokens=20, output=10)
    assert len(desk.core.queue) == 1
    assert sampled(load, desk, 10).own.blocks == pytest.approx(8)
    desk, load = desk_of()
    desk.submit(A, tokens=20, output=10)
    desk.submit(B, tokens=20, output=10)
    assert len(desk.core.queue) == 1, "it waits for prefill"
    assert sampled(load, desk, 10).own.blocks == pytest.approx(8)


def test_capacity_is_unknown_until_costs_are_known() -> None:
    """Nothing is guessed: no tokens/s before eight prompts, and no blocks before decode reported its own."""
    desk, load = desk_of()
    measured(desk, 1000)
    sampled(load, desk, 2)
    capacity = load.capacity(desk.now_s)
    assert capacity.tokens_per_s == pytest.approx(1000)
    assert capacity.blocks == 0, "decode has not reported yet"
    desk, load = desk_of()
    with_room(desk)
    assert load.capacity(desk.now_s) == Quantity(0, 2000), "no prompt was measured"
    for number in range(8):
        desk.policy.costs.observe(1000 + number, 1000 + number, 0.5)
    nominal = load.capacity(desk.now_s)
    assert nominal.blocks == 2000
    assert nominal.tokens_per_s == pytest.approx(1024 / desk.policy.costs.estimate_s(1024, 1024))
    measured(desk, 2000)
    sampled(load, desk, 2)
    assert load.capacity(desk.now_s).tokens_per_s == pytest.approx(2000)


def test_capacity_counts_the_replicas_that_serve() -> None:
    """A lost prefill replica takes its part of the capacity along; without decode no block is left."""
    desk, load = desk_of(prefills=3)
    with_room(desk)
    measured(desk, 1000)
    sampled(load, desk, 2)
    assert load.capacity(desk.now_s).tokens_per_s == pytest.approx(3000)
    desk.lose("prefill-1")
    desk.down("prefill-2", load_report=pb.LoadReport(engine_ready=False))
    assert load.capacity(desk.now_s).tokens_per_s == pytest.approx(1000)
    desk.lose("decode-0")
    assert load.capacity(desk.now_s).blocks == 1000
    desk.lose("decode-1")
    assert load.capacity(desk.now_s) == Quantity(load.capacity(desk.now_s).tokens_per_s, 0)


def test_slots_bound_the_blocks() -> None:
    """Two replicas of 16 slots hold 32 sequences of five blocks, however many blocks there are."""
    desk, load = desk_of(prefills=0)
    desk.core.work.local.add(MEASURED_MIN, MEASURED_MIN / 1000)
    for name in ("decode-0", "decode-1"):
        report = pb.LoadReport(
            engine_ready=True, block_total_count=1000, block_reserved_count=20, running_request_count=4
        )
        desk.down(name, load_report=report)
    sampled(load, desk, 5)
    capacity = load.capacity(desk.now_s)
    assert capacity.tokens_per_s == pytest.approx(2000)
    assert capacity.blocks == 160


def test_prompts_that_decode_runs_beside_prefill_count_on_both_sides() -> None:
    """Short prompts at decode raise load and capacity alike, for each router of the pool."""
    desk, load = desk_of()
    with_room(desk)
    measured(desk, 1000)
    sampled(load, desk, 2)
    for _ in range(10):
        desk.core.work.local.add(50, 0.0)
        desk.core.admission._callers.own.offer(50, 50)  # type: ignore[union-attr]
    report = sampled(load, desk, 8)
    assert report.own.tokens_per_s == pytest.approx(50)
    assert report.capacity.tokens_per_s == pytest.approx(1050)
    load.router_count = 3
    assert load.capacity(desk.now_s).tokens_per_s == pytest.approx(1150)


def test_a_taken_over_stream_counts_as_a_sequence_of_mean_length() -> None:
    """An adopt has no budget: its blocks are estimated by those of the sequences in decode."""
    desk, load = desk_of()
    report = pb.LoadReport(
        engine_ready=True, block_total_count=1000, block_reserved_count=24, running_request_count=2
    )
    desk.down("decode-0", load_report=report)
    sampled(load, desk, 4)
    desk.down("decode-0", load_report=report)
    desk.ask(
        adopts=[
            pb.Adopt(
                slot=1, request_id=A, attempt=1, position=3, credit_position=100, decode_replica="decode-0"
            )
        ]
    )
    assert sampled(load, desk, 12).own.blocks == pytest.approx(12)


def test_attempts_and_failures_are_counted_without_refusals_and_cancels() -> None:
    """Served attempts and those that a replica failed count. Cancelled, refused and invalid ones are no failures."""
    desk, load = desk_of()
    decode, slot = desk.generating()
    desk.down(decode, finishes=[pb.Finish(slot=slot, end_position=1, reason=pb.Finish.REASON_LENGTH)])
    for code in (pb.Failure.CODE_ENGINE_ERROR, pb.Failure.CODE_INVALID):
        decode, slot = desk.generating()
        desk.down(decode, failures=[pb.Failure(slot=slot, code=code)])
    desk.generating()
    desk.ask(cancels=[pb.Cancel(slot=desk.slot, reason=pb.Cancel.REASON_CLIENT)])
    desk.submit(A, model_version="other")
    desk.submit(A, shadow=True)
    desk.ask(cancels=[pb.Cancel(slot=desk.slot, reason=pb.Cancel.REASON_CLIENT)])
    report = load.report(desk.now_s)
    assert (report.attempt_total, report.failure_total) == (3, 1)


def test_the_load_report_counts_the_decode_replicas_for_new_work() -> None:
    """Lost and ejected decode replicas are left out, in a mesh without regions too."""
    desk = Desk()
    assert desk.core.load_report().placeable_decode_count == 2
    for _ in range(EJECT_AFTER):
        desk.links["decode-0"][0].failed(desk.now_s, desk.now_s, "test")
    assert desk.core.load_report().placeable_decode_count == 1
    desk.lose("decode-1")
    report = desk.core.load_report()
    assert report.HasField("placeable_decode_count") and report.placeable_decode_count == 0
