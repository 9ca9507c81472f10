"""The router process in a mesh with regions: its report, its grants and its metrics; and in a mesh without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import generate_latest

from kvmesh.advertise import AS_LISTENED
from kvmesh.attach.frames import pack_ids
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.clock import VirtualClock
from kvmesh.config import MeshConfig
from kvmesh.control.v1 import region_pb2, snapshot_pb2
from kvmesh.region_sections import Region, RegionTable
from kvmesh.service_options import ServiceOptions
from services.router.main import Router

REGIONS = {"eu": RegionTable(control=("127.0.0.1:1",)), "us": RegionTable(control=("127.0.0.1:2",))}


def router_of(config: MeshConfig) -> tuple[Router, VirtualClock]:
    """Return a router that is not started, and its clock."""
    router = Router(ServiceOptions(config, "router-0", "127.0.0.1:0", "redis://127.0.0.1:1", 0, AS_LISTENED))
    return router, VirtualClock(1000.0)


@contextmanager
def at(router: Router, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the router's clock as `clock`."""
    with monkeypatch.context() as patch:
        patch.setattr(type(router.clock), "now_s", lambda _: clock.now_s())
        yield


def grants_of(region: str, tokens_per_s: float, blocks: float) -> snapshot_pb2.RegionTraffic:
    quantity = region_pb2.Quantity(tokens_per_s=tokens_per_s, blocks=blocks)
    return snapshot_pb2.RegionTraffic(grants=[region_pb2.Grant(region=region, quantity=quantity)])


def submit_of(slot: int, region: str) -> pb.Submit:
    submit = pb.Submit(
        slot=slot,
        request_id=f"{slot:032x}",
        attempt=1,
        token_ids=pack_ids(range(100)),
        block_hashes=bytes(8 * (100 // MeshConfig().engine.block_tokens)),
        block_tokens=MeshConfig().engine.block_tokens,
        credit_position=10,
        end_token_id=-1,
    )
    submit.sampling.temperature = 1.0
    submit.budget.remaining_ms, submit.budget.max_output_tokens = 60_000, 10
    submit.budget.region = region
    return submit


def values(router: Router) -> dict[str, float]:
    lines = generate_latest(router.metrics.registry).decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name.removeprefix("kvmesh_router_"): float(value) for name, _, value in pairs}


async def test_a_router_of_a_region_reports_its_load_and_enforces_its_grants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guests are refused before the first grants and admitted with them; report and metrics show both."""
    router, clock = router_of(MeshConfig(region=Region(name="us"), regions=REGIONS))
    with at(router, clock, monkeypatch):
        router.core.add_replica("decode-0", "decode")
        outbox = DownwardOutbox()
        session = router.core.open_session(pb.Hello(process_id="f", region="us"), outbox, clock.now_s())

        def submit(slot: int, region: str) -> list[int]:
            message = submit_of(slot, region)
            message.model_version = router.pool.version.name
            session.on_request(pb.AttachRequest(submits=[message]), clock.now_s())
            answer = outbox.take(clock.now_s())
            return [each.reason for each in answer.refusals] if answer is not None else []

        assert submit(1, "eu") == [pb.Refusal.REASON_GRANT]
        router.on_regions(grants_of("eu", 200, 50))
        router.report()
        clock.advance(2.0)
        assert submit(2, "eu") == submit(3, "") == []
        for _ in range(8):
            router.report()
            clock.advance(1.0)
        load = router.report().region_load
        assert load.own.tokens_per_s == pytest.approx(10)
        assert [(each.region, each.refused_total) for each in load.guests] == [("eu", 1)]
        assert load.guests[0].load.tokens_per_s == pytest.approx(10)
        seen = values(router)
        assert seen['guest_tokens_per_second{region="eu"}'] == pytest.approx(10)
        assert seen['grant_tokens_per_second{region="eu"}'] == 200
        assert seen['grant_blocks{region="eu"}'] == 50
        assert seen['guest_blocks{region="eu"}'] > 0
        assert seen['refused_guests_total{region="eu"}'] == 1
        assert seen['refused_requests_total{reason="REASON_GRANT"}'] == 1
        clock.advance(60.0)
        assert values(router)['grant_tokens_per_second{region="eu"}'] == 50
    await router.close()


async def test_a_router_without_regions_measures_no_load_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh without tables of regions sends no load for other regions, and ignores grants and regions of callers."""
    router, clock = router_of(MeshConfig())
    with at(router, clock, monkeypatch):
        router.on_regions(grants_of("eu", 200, 50))
        assert not router.report().HasField("region_load")
        assert not any("guest" in name or "grant_" in name for name in values(router))
        router.core.add_replica("decode-0", "decode")
        outbox = DownwardOutbox()
        session = router.core.open_session(pb.Hello(process_id="f", region="eu"), outbox, clock.now_s())
        submit = submit_of(1, "eu")
        submit.model_version = router.pool.version.name
        session.on_request(pb.AttachRequest(submits=[submit]), clock.now_s())
        assert [one.home for one in router.core.attempts.open] == [None]
    await router.close()
