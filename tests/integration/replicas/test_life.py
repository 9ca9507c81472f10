"""A real replica beside a real engine, a real Redis and a control process: it is held, ordered into service, and let go."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.clock import MonotonicClock
from kvmesh.control.v1 import snapshot_pb2 as control_pb
from kvmesh.decode.v1 import decode_pb2, decode_pb2_grpc
from kvmesh.membership.member import Member
from kvmesh.membership.membership import read_members
from kvmesh.redis_link import RedisLink
from kvmesh.replica.life import SELF_SERVE_S
from tests.integration.harness import START_S_MAX, Part, engine_part, engine_ready, until
from tests.integration.replicas.caller import Answers, Caller, submit
from tests.integration.replicas.test_engine_silence import send
from tests.integration.replicas.test_replicas import CONFIG, LOCAL, is_serving, service
from tests.integration.snapshot.control_server import ControlServer, running_control
from tests.one_redis import ONE_REDIS

pytestmark = [pytest.mark.mesh, ONE_REDIS]

NAME = "decode-0"
PROMPT_S_MAX = 1.0
"""Longest time from an order to its effect in lease, load report and the report of the life."""

STARTING, WARMING = control_pb.REPLICA_STATE_STARTING, control_pb.REPLICA_STATE_WARMING
SERVING, QUARANTINED = control_pb.REPLICA_STATE_SERVING, control_pb.REPLICA_STATE_QUARANTINED


@dataclass
class Rig:
    """A decode replica with its engine."""

    engine: Part
    replica: Part
    redis: RedisLink

    async def member(self) -> Member | None:
        """Return the lease of the replica."""
        return next((each for each in await read_members(self.redis, CONFIG.mesh.name)), None)

    async def leased(self, state: str, timeout_s: float = PROMPT_S_MAX) -> Member:
        """Wait until the lease has `state`, and return it."""

        async def has_state() -> bool:
            member = await self.member()
            return member is not None and member.state == state

        await until(has_state, timeout_s, f"lease {state}")
        member = await self.member()
        assert member is not None
        return member

    async def state(self) -> str:
        """Return the state in the status of the replica."""
        async with grpc.aio.insecure_channel(self.replica.address) as channel:
            stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
            return str((await stub.GetStatus(decode_pb2.GetStatusRequest())).state)


@asynccontextmanager
async def rig(folder: Path, redis_url: str, role: str = "decode") -> AsyncIterator[Rig]:
    """Start an engine. The replica is not started."""
    engine = engine_part(CONFIG, folder, "--step-s", "0.004")
    replica = service(role, engine.address, redis_url, folder)
    redis = RedisLink(redis_url)
    engine.start()
    try:
        await until(lambda: engine_ready(engine.address), START_S_MAX, "engine ready")
        yield Rig(engine, replica, redis)
    finally:
        await redis.close()
        for part in (replica, engine):
            if part.process is not None:
                await part.end()


async def heard_life(
    control: ControlServer, state: int, timeout_s: float = PROMPT_S_MAX, *, not_boot: str = ""
) -> control_pb.ReplicaLife:
    """Wait until the replica reports `state`, of another engine boot than `not_boot`; return its life."""

    async def is_there() -> bool:
        report = control.reports.get(NAME)
        return report is not None and report.life.state == state and report.life.engine_boot_id != not_boot

    await until(is_there, timeout_s, f"report of state {state}")
    return control.reports[NAME].life


def order(
    control: ControlServer, state: control_pb.ReplicaState.ValueType, boot_id: str, **more: Any
) -> None:
    """Send an order to the replica."""
    message = control_pb.LifeOrder(state=state, engine_boot_id=boot_id, **more)
    control.push(control_pb.WatchResponse(life_order=message))


async def run(
    caller: Caller, purpose: budget_pb2.Purpose.ValueType = budget_pb2.PURPOSE_UNSPECIFIED
) -> Answers:
    """Run one request and return its rows."""
    message = submit(caller.new_slot(), [1, 2, 3], LOCAL, output=4)
    message.budget.purpose = purpose
    await caller.send(submits=[message])
    return await caller.over(message.slot)


async def test_a_replica_is_held_until_the_leader_orders_it_into_service(
    tmp_path: Path, redis_url: str
) -> None:
    """Held, warmed, served, quarantined, started anew: lease, load report, report and refusals say so at once."""
    async with rig(tmp_path, redis_url) as one, running_control(redis_url, CONFIG.mesh.name) as control:
        control.drives_lives = True
        one.replica.start()
        life = await heard_life(control, STARTING, START_S_MAX)
        member = await one.leased("starting")
        assert member.draining and not member.is_leaving and "life" in member.capabilities
        assert "life" in control.hellos[-1].capabilities
        assert await is_serving(one.replica), "its health is that of the engine"
        boot_id = (await heard_life(control, STARTING, not_boot="")).engine_boot_id
        assert life.state == STARTING and boot_id
        async with Caller(one.replica.address) as caller:
            await caller.until(lambda: caller.loads)
            assert caller.loads[-1].held and caller.loads[-1].draining and caller.loads[-1].engine_ready
            assert (await run(caller)).finish is not None, "a held replica serves a late request"
            await _check_orders(one, control, caller, boot_id)
        await _check_new_engine(one, control, boot_id)


async def _check_orders(one: Rig, control: ControlServer, caller: Caller, boot_id: str) -> None:
    order(control, SERVING, "another-engine", proved=True)
    order(control, WARMING, boot_id, package="p1")
    assert (await heard_life(control, WARMING)).package == "p1"
    await one.leased("warming")
    order(control, SERVING, boot_id, slow_start=True)
    life = await heard_life(control, SERVING)
    assert not life.proved and not life.self_served
    assert not (await one.leased("serving")).draining
    await caller.until(lambda: not caller.loads[-1].held and not caller.loads[-1].draining, PROMPT_S_MAX)
    await caller.until(lambda: caller.loads[-1].slow_start_age_ms > 0, PROMPT_S_MAX)
    order(control, WARMING, boot_id)
    order(control, SERVING, boot_id, proved=True)

    async def is_proved() -> bool:
        return control.reports[NAME].life.proved

    await until(is_proved, PROMPT_S_MAX, "proved")
    await caller.until(lambda: not caller.loads[-1].slow_start_age_ms, PROMPT_S_MAX)
    assert control.reports[NAME].life.state == SERVING, "the order back is ignored"

    order(control, QUARANTINED, boot_id, reason="golden prompt 3 gave other tokens")
    assert (await one.leased("quarantined")).draining
    refusal = (await run(caller)).refusal
    assert refusal is not None and refusal.reason == pb.Refusal.REASON_DRAINING
    assert refusal.message == f"{NAME} is quarantined: golden prompt 3 gave other tokens"
    assert (await run(caller, budget_pb2.PURPOSE_PROBE)).finish is not None
    assert await one.state() == "quarantined"


async def _check_new_engine(one: Rig, control: ControlServer, boot_id: str) -> None:
    """Another engine begins another life. Without the leader the replica then serves by itself."""
    digest = (await one.leased("quarantined")).digests["engine"]
    await one.engine.end()
    one.engine.start()
    boot_id = (await heard_life(control, STARTING, START_S_MAX, not_boot=boot_id)).engine_boot_id
    assert (await one.leased("starting")).draining

    # Another build: the service ends, as routers and limits stand on the facts of the first one.
    await one.engine.end()
    one.engine.command = [*one.engine.command, "--end-token", "0", "--max-running", "32"]
    one.engine.start()
    await until(lambda: _has_fallen(one), START_S_MAX, "end of the replica")
    assert await one.replica.end() == 2 and "max_sequences was 64, is 32" in one.replica.tail()
    one.replica.start()
    await heard_life(control, STARTING, START_S_MAX, not_boot=boot_id)
    member = await one.leased("starting", START_S_MAX)
    assert member.draining and member.digests["engine"] not in ("", digest)
    clock = MonotonicClock()
    await control.stop()
    stopped_s = clock.now_s()
    await one.leased("serving", SELF_SERVE_S + 3.0)
    assert clock.now_s() - stopped_s > SELF_SERVE_S - 2.0, "the leader's last message is at most a second old"
    async with Caller(one.replica.address) as caller:
        await caller.until(lambda: caller.loads)
        assert not caller.loads[-1].held and caller.loads[-1].slow_start_age_ms > 0
        assert (await run(caller)).finish is not None


async def test_without_a_leader_that_drives_lives_a_replica_serves_at_once(
    tmp_path: Path, redis_url: str
) -> None:
    """Without a control process, and beside one that sends heartbeats and no orders."""
    async with rig(tmp_path, redis_url) as one:
        one.replica.start()
        member = await one.leased("serving", START_S_MAX)
        assert not member.draining and await one.state() == "serving"
        await one.replica.end(signal.SIGTERM)
        await until(lambda: _is_gone(one), 10.0, "lease gone")
        async with running_control(redis_url, CONFIG.mesh.name) as control:
            one.replica.start()
            seen: set[str] = set()

            async def is_leased() -> bool:
                member = await one.member()
                seen.add("" if member is None else member.state)
                return "serving" in seen

            await until(is_leased, START_S_MAX, "lease")
            assert seen <= {"", "serving"}, "its first lease says that it serves"
            await heard_life(control, SERVING)
            assert control.reports[NAME].life.self_served
            async with Caller(one.replica.address) as caller:
                await caller.until(lambda: caller.loads)
                assert not caller.loads[-1].held and not caller.loads[-1].slow_start_age_ms


async def _has_fallen(one: Rig) -> bool:
    return one.replica.has_fallen


async def _is_gone(one: Rig) -> bool:
    return await one.member() is None


async def test_a_restarted_service_is_in_use_as_soon_as_the_leader_says_so(
    tmp_path: Path, redis_url: str
) -> None:
    """The engine served before: the report goes out with the first contact, and the order works at once."""
    async with rig(tmp_path, redis_url) as one, running_control(redis_url, CONFIG.mesh.name) as control:
        control.drives_lives = True
        for _ in range(2):
            control.reports.clear()
            one.replica.start()
            life = await heard_life(control, STARTING, START_S_MAX)

            async def has_boot() -> bool:
                return bool(control.reports[NAME].life.engine_boot_id)

            await until(has_boot, PROMPT_S_MAX, "the boot id of the engine")
            life = control.reports[NAME].life
            order(control, SERVING, life.engine_boot_id, proved=True)
            member = await one.leased("serving", PROMPT_S_MAX + 1.0)
            assert not member.draining
            await one.replica.end(signal.SIGTERM)


async def test_the_leader_hears_of_a_queue_and_of_a_lost_engine(tmp_path: Path, redis_url: str) -> None:
    """Users queue at a prefill replica whose engine stands still; then the engine is lost, and answers again."""
    async with (
        rig(tmp_path, redis_url, "prefill") as one,
        running_control(redis_url, CONFIG.mesh.name) as control,
    ):
        one.replica.start()

        async def heard(is_true: Callable[[control_pb.ReceiverReport], bool], what: str) -> None:
            async def is_heard() -> bool:
                report = control.reports.get("prefill-0")
                return report is not None and is_true(report)

            await until(is_heard, START_S_MAX, what)

        await heard(lambda report: report.life.state == SERVING and not report.life.engine_lost, "service")
        assert not control.reports["prefill-0"].longest_wait_us
        async with Caller(one.replica.address) as caller:
            await caller.until(lambda: caller.loads and caller.loads[-1].engine_ready)
            frozen = [one.engine.pid]  # not its model: Triton may abort after that (`thawed`)
            try:
                send(frozen, signal.SIGSTOP)
                for number in range(8):
                    await caller.submit([number] * 64, pb.PHASE_CONTEXT_ONLY)
                await heard(lambda report: report.longest_wait_us > 0, "longest wait")
                await heard(lambda report: report.life.engine_lost, "lost engine")
            finally:
                send(frozen, signal.SIGCONT)
            await heard(lambda report: not (report.life.engine_lost or report.longest_wait_us), "engine back")
