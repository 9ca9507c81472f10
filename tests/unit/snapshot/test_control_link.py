"""The control plane's hold on a process: cordons and drains reach the role, the lease and the health, and end."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, cast

import pytest

from kvmesh.advertise import AS_LISTENED
from kvmesh.clock import VirtualClock
from kvmesh.config import MeshConfig
from kvmesh.control.v1 import shadow_pb2
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.control_link import ControlLink
from kvmesh.life_state import LifeState
from kvmesh.membership.member import Member
from kvmesh.membership.registration import Registration
from kvmesh.metrics import Metrics
from kvmesh.redis_link import RedisLink
from kvmesh.server import MeshServer
from kvmesh.service_options import ServiceOptions
from kvmesh.snapshot.availability import Availability, availability_of
from kvmesh.snapshot.content import Content, Cordon, PoolTrack, Track
from kvmesh.snapshot.identity import Identity
from kvmesh.snapshot.initial import initial_content
from kvmesh.snapshot.published import Published, Term, publish
from kvmesh.snapshot.state_file import StateFile
from kvmesh.trust.networks import Networks
from kvmesh.trust.peers import Trust
from tests.unit.snapshot.test_content import STABLE, split

NAME, BOOT = "decode-0", "boot-1"


class Role:
    """Records the steps. INVARIANT: it drains exactly while `begin_drain` was called last."""

    def __init__(self, *, by_lease: bool = True) -> None:
        self.takes_cordon_by_lease = by_lease
        self.is_cordoned = self.is_draining = False
        self.life_state = LifeState.SERVING
        self.snapshots: list[Published] = []

    def refusal(self, content: Content) -> str:
        return "no canary here" if content.canary_percent else ""

    def on_snapshot(self, published: Published) -> None:
        self.snapshots.append(published)

    def set_cordoned(self, is_cordoned: bool) -> None:
        self.is_cordoned = is_cordoned

    def begin_drain(self) -> None:
        assert not self.is_draining
        self.is_draining = True

    def end_drain(self) -> None:
        assert self.is_draining
        self.is_draining = False

    def report(self) -> pb.ReceiverReport:
        return pb.ReceiverReport()

    def observations(self) -> pb.ObservationBatch | None:
        return None

    def shadows(self) -> tuple[shadow_pb2.ShadowReport, ...]:
        return ()

    def on_confirmed(self, sequence: int) -> None:
        raise AssertionError(sequence)

    def on_leader(self) -> None:
        raise AssertionError

    def on_regions(self, traffic: pb.RegionTraffic) -> None:
        raise AssertionError("there is no leader")

    def on_life(self, drives_lives: bool, order: pb.LifeOrder | None) -> None:
        raise AssertionError(order)


class Process:
    """A control link without Redis: the test takes the place of the receiver's sources."""

    def __init__(self, folder: Path | None = None, *, by_lease: bool = True) -> None:
        self.config = MeshConfig()
        self.redis = RedisLink("redis://127.0.0.1:1")
        options = ServiceOptions(
            self.config, NAME, "127.0.0.1:0", "redis://127.0.0.1:1", 0, AS_LISTENED, state_dir=folder
        )
        self.role = Role(by_lease=by_lease)
        self.link = ControlLink(
            self.role,
            Identity(NAME, BOOT, "decode"),
            options,
            self.redis,
            Trust(self.config, "decode"),
            Networks(),
            VirtualClock(),
            Metrics("decode"),
        )
        member = Member(
            process_id=NAME, role="decode", address="", boot_id=BOOT, model_version="v", block_tokens=16
        )
        self.registration = Registration(self.redis, "m", member)
        self.version = 0

    async def start(self) -> None:
        """Start as `serve` does."""
        await self.link.start(self.registration)

    def publish(self, *cordons: Cordon) -> None:
        """Let the receiver take a snapshot."""
        self.version += 1
        content = Content((STABLE,), cordons=cordons)
        self.link.receiver._offer(publish(Term(1, "c"), self.version, content))

    @property
    def lease(self) -> tuple[str, bool, str]:
        """State, draining and snapshot of the lease."""
        member = self.registration.member
        return member.state, member.draining, member.snapshot


@pytest.fixture
async def process() -> Any:
    """A started process."""
    made = Process()
    await made.start()
    yield made
    await made.redis.close()


def test_a_drain_goes_before_a_cordon_and_names_its_boot() -> None:
    """Another boot, and another process, are not meant."""
    content = Content(
        (STABLE,),
        cordons=(Cordon(NAME, reason="disk"), Cordon(NAME, BOOT, is_draining=True), Cordon("decode-1")),
    )
    assert availability_of(content, NAME, BOOT) == (Availability.DRAINING, "draining by the control plane")
    state, reason = availability_of(content, NAME, "boot-2")
    assert state is Availability.CORDONED and reason == "cordoned by the control plane: disk"
    assert availability_of(content, "decode-2", BOOT) == (Availability.SERVING, "")


async def test_without_a_snapshot_the_initial_content_holds(process: Process) -> None:
    """The role is not called, and the lease says that the process serves."""
    assert process.link.content == initial_content(process.config)
    assert process.lease == ("serving", False, "") and not process.role.snapshots


async def test_a_cordon_and_a_drain_are_shown_and_reversed(process: Process) -> None:
    """Role, lease and availability agree after each snapshot of a random schedule."""
    chance = random.Random(6)
    kinds = {
        Availability.SERVING: (),
        Availability.CORDONED: (Cordon(NAME),),
        Availability.DRAINING: (Cordon(NAME), Cordon(NAME, BOOT, is_draining=True)),
    }
    for _ in range(200):
        state = chance.choice(list(kinds))
        process.publish(*kinds[state], Cordon("another"))
        out_of_use = state is not Availability.SERVING
        assert process.link.availability is state
        assert process.role.is_cordoned is out_of_use
        assert process.role.is_draining is (state is Availability.DRAINING)
        assert process.lease == (state.value, out_of_use, f"1.c/{process.version}")
    assert len(process.role.snapshots) == 200


async def test_a_cordoned_frontend_does_not_say_that_it_drains() -> None:
    """Other frontends would take its streams for moved, and its share of the budgets."""
    process = Process(by_lease=False)
    await process.start()
    process.publish(Cordon(NAME))
    assert process.lease == ("cordoned", False, "1.c/1")
    process.publish(Cordon(NAME, is_draining=True))
    assert process.lease == ("draining", True, "1.c/2")
    await process.redis.close()


async def test_a_signal_is_final(process: Process) -> None:
    """After SIGTERM no snapshot makes the process serve again."""
    process.publish(Cordon(NAME, is_draining=True))
    process.link.leave()
    process.publish()
    assert process.role.is_draining and process.lease == ("draining", True, "1.c/2")


async def test_a_refused_snapshot_is_not_shown(process: Process) -> None:
    """The lease keeps the name of the snapshot in force."""
    process.publish()
    process.link.receiver._offer(publish(Term(1, "c"), 9, split(5)))
    assert process.lease[2] == "1.c/1" and len(process.role.snapshots) == 1


async def test_a_cordon_of_the_state_folder_is_obeyed_from_the_start(tmp_path: Path) -> None:
    """A process that restarts without Redis is still cordoned before it registers."""
    StateFile(tmp_path).write(publish(Term(2, "c"), 5, Content((STABLE,), cordons=(Cordon(NAME),))))
    process = Process(tmp_path)
    await process.start()
    assert process.role.is_cordoned and process.lease == ("cordoned", True, "2.c/5")
    await process.redis.close()


async def test_health_follows_drains_and_the_cordons_of_frontends() -> None:
    """A load balancer reads health; routers read leases, so a cordoned replica stays healthy."""

    class Server:
        """Records the reason."""

        reason = ""

        async def set_aside(self, reason: str) -> None:
            self.reason = reason

    for by_lease, wanted in ((True, ""), (False, "cordoned by the control plane")):
        process, server = Process(by_lease=by_lease), Server()
        await process.start()
        (_, receiving), (_, keeping) = process.link.background(cast(MeshServer, server))
        receiving.close()
        task = asyncio.create_task(keeping)
        for cordons, reason in (
            ((Cordon(NAME),), wanted),
            ((Cordon(NAME, is_draining=True),), "draining by the control plane"),
            ((), ""),
        ):
            process.publish(*cordons)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert server.reason == reason
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await process.redis.close()


async def test_a_refused_board_at_the_start_gives_its_stable_pool(process: Process) -> None:
    """The role refuses each canary: the stable pool of the board is in force, and neither a guess nor the canary."""
    stable, canary = PoolTrack("other", "v1", Track.STABLE, 75), PoolTrack("next", "v2", Track.CANARY, 25)
    board = publish(Term(3, "c"), 2, Content((stable, canary), rollout="r1"))
    process.link.receiver._offer(board)
    found = process.link.content
    assert (found.stable.pool, found.stable.weight_percent, found.canary_percent) == ("other", 100, 0)
    assert [each.content for each in process.role.snapshots] == [found]
    process.link.receiver._offer(board)
    assert len(process.role.snapshots) == 1 and process.lease[2] == "" and process.link.receiver.is_reduced


async def test_the_lease_shows_the_life_unless_a_cordon_does(process: Process) -> None:
    """A held replica drains for release 0.1.0 and keeps its name. A cordon, a drain and the end go before its life."""
    chance, cordons = random.Random(9), ((), (Cordon(NAME),), (Cordon(NAME, is_draining=True),))
    for _ in range(200):
        process.role.life_state = chance.choice([*LifeState])
        if chance.random() < 0.5:
            process.publish(*chance.choice(cordons))
        process.link.on_life_changed()
        state, is_draining, _ = process.lease
        member, availability = process.registration.member, process.link.availability
        if availability is Availability.SERVING:
            is_out = process.role.life_state is not LifeState.SERVING
            assert (state, is_draining) == (process.role.life_state.value, is_out)
            assert not member.is_leaving and member.is_out_of_service is is_out
        else:
            assert (state, is_draining) == (availability.value, True) and member.is_leaving
    process.link.leave()
    assert process.lease[:2] == ("draining", True) and process.registration.member.is_leaving
