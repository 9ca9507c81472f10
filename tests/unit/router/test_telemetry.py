"""A router's metrics of its placements: expected and actual hits, expected and actual TTFT, the imbalance."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import generate_latest

from kvmesh import blocks
from kvmesh.advertise import AS_LISTENED
from kvmesh.attach.frames import pack_ids
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.clock import VirtualClock
from kvmesh.config import MeshConfig
from kvmesh.metrics import Metrics
from kvmesh.service_options import ServiceOptions
from services.router import telemetry
from services.router.forwarding.attempt import Attempt, Stage, Submission
from services.router.main import Router
from services.router.placement.policy import Dispatched, Placement
from tests.unit.router.desk import Desk

BLOCK = 4


def ended(matched: int, cached: int, estimate_s: float, real_s: float, replica: str = "prefill-0") -> Attempt:
    item = Attempt(
        Submission("a" * 32, 1, 9.0, token_count=100),
        slot=1,
        session=None,
        outbox=None,
        next_position=1,
        window_end=0,
        stage=Stage.ENDED,
    )
    item.routing.placement = Placement(replica, "decode-0", matched, 0.5, estimate_s)
    item.routing.released_s = 10.0
    item.outcome.first_token_s, item.outcome.cached_tokens = 10.0 + real_s, cached
    return item


def values(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name.removeprefix("kvmesh_router_"): float(value) for name, _, value in pairs}


def test_hits_and_times_are_counted_as_expected_and_as_they_were() -> None:
    """Hits and times to first token are counted as expected and as measured.

    The last token is never expected in the cache. Late and early first tokens do not cancel each other out.
    """
    metrics = Metrics("router")
    tracing: Any = None
    record = telemetry.ForwardingTelemetry(metrics, tracing, BLOCK)
    record.set_replicas(["prefill-0", "prefill-1"])
    record(ended(10, 36, 0.5, 0.7), "REASON_LENGTH", 20.0)
    record(ended(25, 0, 0.5, 0.4, "prefill-1"), "REASON_LENGTH", 20.0)
    unanswered = ended(20, 0, 0.5, 0.0)
    unanswered.outcome.first_token_s = 0.0
    record(unanswered, "REASON_DEADLINE", 20.0)
    seen = values(metrics)
    assert seen["prompt_tokens_total"] == 200
    assert seen["cached_tokens_total"] == 36
    assert seen["expected_cached_tokens_total"] == 40 + 99
    assert seen["first_token_late_seconds_sum"] == pytest.approx(0.2)
    assert seen["first_token_early_seconds_sum"] == pytest.approx(0.1)
    assert (seen["first_token_late_seconds_count"], seen["first_token_early_seconds_count"]) == (1, 1)
    assert seen['placed_seconds_total{replica="prefill-0"}'] == 0.5
    assert seen['placed_seconds_total{replica="prefill-1"}'] == 0.5
    assert seen['wrong_hit_tokens_total{replica="prefill-0"}'] == 4
    assert seen['wrong_hit_tokens_total{replica="prefill-1"}'] == 99


def test_an_unexpected_hit_is_no_negative_wrong_hit() -> None:
    """A prompt with more of it in cache than expected counts no wrong hits."""
    metrics = Metrics("router")
    tracing: Any = None
    record = telemetry.ForwardingTelemetry(metrics, tracing, BLOCK)
    record.set_replicas(["prefill-0"])
    record(ended(1, 36, 0.5, 0.7), "REASON_LENGTH", 20.0)
    assert values(metrics)['wrong_hit_tokens_total{replica="prefill-0"}'] == 0


def test_replicas_that_left_are_not_named_any_more() -> None:
    """Metrics name only present replicas, also after many changes.

    An attempt that ends at a replica that left is not counted. A replica that returns starts at 0.
    """
    metrics = Metrics("router")
    tracing: Any = None
    record = telemetry.ForwardingTelemetry(metrics, tracing, BLOCK)

    def named() -> dict[str, float]:
        found = values(metrics)
        wrong = {name for name in found if name.startswith("wrong_hit_tokens")}
        work = {name: value for name, value in found.items() if name.startswith("placed_seconds")}
        assert {name.replace("placed_seconds", "wrong_hit_tokens") for name in work} == wrong
        return work

    for number in range(100):
        record.set_replicas([f"prefill-{number}", f"prefill-{number + 1}", "decode-0"])
        for replica in (f"prefill-{number}", f"prefill-{number - 1}"):
            record(ended(0, 0, 0.5, 0.7, replica), "REASON_LENGTH", 20.0)
        assert named() == {
            f'placed_seconds_total{{replica="prefill-{number}"}}': 0.5,
            f'placed_seconds_total{{replica="prefill-{number + 1}"}}': 0.0,
            'placed_seconds_total{replica="decode-0"}': 0.0,
        }
    record.set_replicas([])
    assert named() == {}
    record.set_replicas(["prefill-99"])
    assert named() == {'placed_seconds_total{replica="prefill-99"}': 0.0}


def test_the_imbalance_is_the_maximum_over_the_mean_of_all_routers_work() -> None:
    """The imbalance is the maximum over the mean of the work, whichever router dispatched it.

    An even load gives 1, all work at one replica gives the number of replicas, and too little work gives 0.
    A draining replica does not count.
    """
    desk = Desk(prefills=3)
    clock = VirtualClock(desk.now_s)

    def imbalance() -> float:
        return telemetry.imbalance(desk.core, desk.policy, clock.now_s())

    for number, router in enumerate(("router-0", "router-1")):
        assert imbalance() == 0.0
        desk.policy.observe(
            Dispatched(router, f"{number:032x}", "prefill-0", (), 3.0, desk.now_s, desk.now_s + 60)
        )
    assert imbalance() == pytest.approx(3.0)
    for number, replica in ((3, "prefill-1"), (4, "prefill-2")):
        desk.policy.observe(
            Dispatched("router-1", f"{number:032x}", replica, (), 6.0, desk.now_s, desk.now_s + 60)
        )
    assert imbalance() == pytest.approx(1.0)
    desk.down("prefill-2", load_report=pb.LoadReport(engine_ready=True, draining=True))
    assert imbalance() == pytest.approx(1.0)
    clock.advance(1000)
    assert imbalance() == 0.0


def test_the_queue_exports_the_uncached_tokens_that_wait() -> None:
    """A prompt counts without the blocks that an eligible replica had at its arrival, until it is cancelled or released."""
    desk, metrics = Desk(), Metrics("router")
    desk.core.dispatcher.forecast = desk.policy
    telemetry.export_queue(desk.core, metrics)
    for name in ("decode-0", "decode-1"):
        desk.lose(name)

    def waiting() -> tuple[float, float]:
        found = values(metrics)
        return found["queued_tokens"], found["queued_uncached_tokens"]

    cold = desk.submit(tokens=20)
    assert waiting() == (20, 20)
    desk.policy.local_index.store("prefill-0", blocks.chain(pack_ids(range(20)), BLOCK, "m")[:3])
    warm = desk.submit("b" * 32, tokens=20)
    assert waiting() == (40, 28)
    desk.ask(cancels=[pb.Cancel(slot=cold, reason=pb.Cancel.REASON_CLIENT)])
    assert waiting() == (20, 8)
    desk.ask(cancels=[pb.Cancel(slot=warm, reason=pb.Cancel.REASON_CLIENT)])
    assert waiting() == (0, 0)


async def test_a_router_names_the_replicas_it_has() -> None:
    """A router's metrics name the replicas of its links from the start, and no others."""
    options = ServiceOptions(MeshConfig(), "router-0", "127.0.0.1:0", "redis://127.0.0.1:1", 0, AS_LISTENED)
    router = Router(options)
    for names in (["prefill-0", "decode-0"], ["prefill-1", "decode-0"]):
        router.on_replicas(names)
        named = {name for name in values(router.metrics) if name.startswith("placed_seconds")}
        assert named == {f'placed_seconds_total{{replica="{name}"}}' for name in names}
    await router.close()
