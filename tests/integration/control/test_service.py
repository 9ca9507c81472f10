"""ControlPlaneService over a real connection: reads, commands, refusals with field, value and range, audit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf.duration_pb2 import Duration

from controlplane import core
from controlplane.main import ControlProcess
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2
from kvmesh.errors import ErrorDetails, from_rpc_error
from kvmesh.redis_link import RedisLink
from tests.integration.control.control_process import (
    Leases,
    control,
    hello,
    leading,
    operator,
    snapshot_of,
    until,
    watching,
)
from tests.integration.router.conftest import RedisServer
from tests.patience import patience

PROCESSES = (("router", 0), ("prefill", 0), ("decode", 0), ("decode", 1))
MEMBERS = (
    ("frontend-0", "frontend", ""),
    *((f"{pool}-{role}-{number}", role, pool) for pool in ("stable", "next") for role, number in PROCESSES),
)
PAUSE = pb.ChangeRolloutRequest.CHANGE_PAUSE


@pytest.fixture(autouse=True)
def quick_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    """No receiver is waited for."""
    monkeypatch.setattr(core, "TAKEOVER_S", 0.1)


@pytest.fixture
async def redis(url: str) -> AsyncIterator[RedisLink]:
    """A connection to the Redis of the test, with the leases of a mesh of two pools."""
    link = RedisLink(url)
    for member in MEMBERS:
        await Leases(link).write(*member)
    yield link
    await link.close()


async def knows_all(one: ControlProcess) -> None:
    await until(lambda: len(one.core.registry.members) == len(MEMBERS), "all leases are read")


async def refusal(call: Awaitable[Any]) -> ErrorDetails:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return from_rpc_error(error.value)


async def events(redis: RedisLink) -> list[dict[bytes, bytes]]:
    rows = await redis.execute("XRANGE", "kvmesh:control:events", "-", "+")
    return [dict(row[1]) for row in rows]


async def test_state_receivers_and_snapshots_are_shown(url: str, redis: RedisLink) -> None:
    """Names, terms and the receivers behind."""
    async with leading(url) as one, operator(one.server.address) as stub:
        state = (await stub.GetControlPlane(pb.GetControlPlaneRequest())).control_plane
        assert state.is_leader and state.redis_connected and state.process_id == "control-0"
        assert (state.leader, state.leader_address) == ("control-0", one.server.address)
        assert (state.term.number, state.term.leader, state.receiver_count) == (1, "control-0", 0)
        async with watching(one.server.address, hello()) as call:
            snapshot = await snapshot_of(call)
            await until(lambda: len(one.core.receivers) == 1, "the receiver is known")
            (seen,) = (await stub.ListReceivers(pb.ListReceiversRequest())).receivers
            assert (seen.process_id, seen.role, seen.is_current) == ("frontend-0", "frontend", False)
            state = (await stub.GetControlPlane(pb.GetControlPlaneRequest())).control_plane
            assert (state.receiver_count, state.behind_count) == (1, 1)
            await call.write(snapshot_pb2.WatchRequest(applied=snapshot.name))
            report = snapshot_pb2.ReceiverReport(live_request_count=7)
            await call.write(snapshot_pb2.WatchRequest(report=report))
            await until(
                lambda: all(each.report and each.report.live_request_count for each in one.core.receivers),
                "a report",
            )
            (seen,) = (await stub.ListReceivers(pb.ListReceiversRequest())).receivers
            assert seen.is_current and seen.applied == snapshot.name and seen.live_request_count == 7
        shown = (await stub.GetSnapshot(pb.GetSnapshotRequest())).snapshot
        assert shown.name == snapshot.name and {each.pool for each in shown.content.pools} == {
            "stable",
            "next",
        }
        listed = (await stub.ListSnapshots(pb.ListSnapshotsRequest())).snapshots
        assert [each.name for each in listed] == [shown.name]


async def test_a_cordon_is_published_audited_and_taken_back(url: str, redis: RedisLink) -> None:
    """Twice the same is one; `validate_only` changes nothing."""
    async with leading(url) as one, operator(one.server.address) as stub:
        await knows_all(one)
        ask = pb.CordonReplicaRequest(process_id="stable-decode-0", reason="kernel update")
        trial = pb.CordonReplicaRequest(process_id="stable-decode-0", validate_only=True)
        assert (await stub.CordonReplica(trial)).cordon.process_id == "stable-decode-0"
        assert not one.core.content.cordons
        for _ in range(2):
            answer = await stub.CordonReplica(ask)
            assert answer.cordon.reason == "kernel update" and not answer.cordon.draining
        await until(lambda: len(one.core.content.cordons) == 1, "the snapshot has the cordon")
        drained = await stub.CordonReplica(pb.CordonReplicaRequest(process_id="stable-decode-0", drain=True))
        assert drained.cordon.draining and drained.cordon.boot_id == "boot-stable-decode-0"
        assert (
            await stub.UncordonReplica(pb.UncordonReplicaRequest(process_id="stable-decode-0"))
        ).was_cordoned
        again = await stub.UncordonReplica(pb.UncordonReplicaRequest(process_id="stable-decode-0"))
        assert not again.was_cordoned

        async def has_all() -> bool:
            what = [each[b"what"] for each in await events(redis)]
            return (
                what.count(b"replica.cordon") == 2
                and b"replica.drain" in what
                and b"replica.uncordon" in what
            )

        await until(has_all, "the audit has every command")
        first = next(each for each in await events(redis) if each[b"what"] == b"replica.cordon")
        assert (first[b"by"], first[b"target"], first[b"result"]) == (
            b"unverified operator",
            b"stable-decode-0",
            b"done",
        )
        assert first[b"source"].startswith(b"ipv4:127.0.0.1")
        assert msgspec.json.decode(first[b"details"]) == {
            "before": "cordons none",
            "after": "cordons stable-decode-0 (cordon)",
            "reason": "kernel update",
        }


async def test_the_last_of_a_role_needs_force(url: str, redis: RedisLink) -> None:
    """The refusal says so and is audited, and force overrides it."""
    async with leading(url) as one, operator(one.server.address) as stub:
        await knows_all(one)
        details = await refusal(stub.CordonReplica(pb.CordonReplicaRequest(process_id="next-prefill-0")))
        assert (details.code, details.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CHANGE_REFUSED")
        assert 'the last prefill replica in use of the pool "next"' in details.message
        assert details.metadata["can_force"] == "true"

        async def is_audited() -> bool:
            found = [each for each in await events(redis) if each[b"what"] == b"replica.cordon"]
            return any(each[b"result"].startswith(b'refused: "next-prefill-0" is the last') for each in found)

        await until(is_audited, "the audit has the refusal")
        forced = await stub.CordonReplica(pb.CordonReplicaRequest(process_id="next-prefill-0", force=True))
        assert "the last prefill" in forced.overridden[0]


@pytest.mark.parametrize(
    ("method", "request_", "code", "sentence"),
    [
        ("CordonReplica", pb.CordonReplicaRequest(), "INVALID_ARGUMENT", "process_id is empty"),
        (
            "CordonReplica",
            pb.CordonReplicaRequest(process_id="x"),
            "INVALID_ARGUMENT",
            'process_id is "x"; no process has that name; there are: ',
        ),
        (
            "UncordonReplica",
            pb.UncordonReplicaRequest(process_id="x"),
            "INVALID_ARGUMENT",
            'process_id is "x"; no process has that name; there are: ',
        ),
        (
            "CordonReplica",
            pb.CordonReplicaRequest(process_id="stable-decode-0", reason="x" * 201),
            "INVALID_ARGUMENT",
            "reason is 201 characters; up to 200 characters are allowed",
        ),
        (
            "Freeze",
            pb.FreezeRequest(ttl=Duration(seconds=90_000)),
            "INVALID_ARGUMENT",
            "ttl is 90000 s; 0 to 86400 s",
        ),
        ("Freeze", pb.FreezeRequest(ttl=Duration(seconds=-1)), "INVALID_ARGUMENT", "ttl is -1 s"),
        (
            "ListRollouts",
            pb.ListRolloutsRequest(page_size=101),
            "INVALID_ARGUMENT",
            "page_size is 101; 0 to 100",
        ),
        (
            "ListSnapshots",
            pb.ListSnapshotsRequest(page_size=101),
            "INVALID_ARGUMENT",
            "page_size is 101; 0 to 100",
        ),
        ("GetRollout", pb.GetRolloutRequest(), "NOT_FOUND", "no rollout has run in this mesh"),
        (
            "GetRollout",
            pb.GetRolloutRequest(rollout="r-9"),
            "INVALID_ARGUMENT",
            'rollout is "r-9"; no rollout has that name; ',
        ),
        (
            "ChangeRollout",
            pb.ChangeRolloutRequest(),
            "INVALID_ARGUMENT",
            "change is 0; pause, resume, promote",
        ),
        (
            "ChangeRollout",
            pb.ChangeRolloutRequest(change=PAUSE),
            "NOT_FOUND",
            "no rollout has run in this mesh",
        ),
        (
            "RevertSnapshot",
            pb.RevertSnapshotRequest(to="7.x/1"),
            "INVALID_ARGUMENT",
            'to is "7.x/1"; "stable" or a name',
        ),
        (
            "StartRollout",
            pb.StartRolloutRequest(settings=pb.RolloutSettings(to_pool="nowhere")),
            "INVALID_ARGUMENT",
            'settings.to_pool is "nowhere"; the known pools are: next, stable',
        ),
        (
            "StartRollout",
            pb.StartRolloutRequest(settings=pb.RolloutSettings(to_pool="next", steps_percent=[50, 10])),
            "INVALID_ARGUMENT",
            "settings.steps_percent is 50,10; each step must be above the step before it",
        ),
    ],
)
async def test_a_bad_request_is_refused_with_field_value_and_range(
    url: str, redis: RedisLink, method: str, request_: Any, code: str, sentence: str
) -> None:
    """Nothing is changed."""
    async with leading(url) as one, operator(one.server.address) as stub:
        await knows_all(one)
        details = await refusal(getattr(stub, method)(request_))
        assert details.code.name == code and sentence in details.message
        assert one.core.library.desired.revision == 0 and not one.core.library.rollouts


async def test_a_freeze_is_shown_and_ended(url: str, redis: RedisLink) -> None:
    """A duration of 0 ends it."""
    async with leading(url) as one, operator(one.server.address) as stub:
        answer = await stub.Freeze(pb.FreezeRequest(ttl=Duration(seconds=3600), reason="release night"))
        assert answer.frozen_until.seconds > 1e9
        state = (await stub.GetControlPlane(pb.GetControlPlaneRequest())).control_plane
        assert state.frozen_until == answer.frozen_until
        assert not (await stub.Freeze(pb.FreezeRequest())).HasField("frozen_until")
        state = (await stub.GetControlPlane(pb.GetControlPlaneRequest())).control_plane
        assert not state.HasField("frozen_until")


async def test_a_rollout_starts_is_followed_and_aborted(url: str, redis: RedisLink) -> None:
    """Its document outlives the process."""
    settings = pb.RolloutSettings(to_pool="next", steps_percent=[10, 100], bake=Duration(seconds=10))
    async with leading(url) as one, operator(one.server.address) as stub:
        await knows_all(one)
        trial = await stub.StartRollout(
            pb.StartRolloutRequest(settings=settings, force=True, validate_only=True)
        )
        assert trial.rollout.to_version == "v2" and not one.core.library.rollouts
        started = (await stub.StartRollout(pb.StartRolloutRequest(settings=settings, force=True))).rollout
        assert started.rollout.startswith("r-2") and started.from_pool == "stable"
        second = await refusal(stub.StartRollout(pb.StartRolloutRequest(settings=settings, force=True)))
        assert "one rollout runs at a time" in second.message
        following = stub.WatchRollout(pb.WatchRolloutRequest())
        seen = [await following.read() for _ in range(2)]
        assert {each.rollout.rollout for each in seen} == {started.rollout}
        abort = pb.ChangeRolloutRequest(change=pb.ChangeRolloutRequest.CHANGE_ABORT, reason="wrong weights")
        assert (await stub.ChangeRollout(abort)).rollout.state == snapshot_pb2.ROLLOUT_STATE_ABORTED
        async with patience(10):
            while (state := await following.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # stubs lack it
                seen.append(state)
        assert seen[-1].rollout.state == snapshot_pb2.ROLLOUT_STATE_ABORTED
        assert "wrong weights" in seen[-1].rollout.reason
        listed = (await stub.ListRollouts(pb.ListRolloutsRequest())).rollouts
        assert [each.rollout for each in listed] == [started.rollout]
    async with leading(url, name="control-1") as one, operator(one.server.address) as stub:
        kept = (await stub.GetRollout(pb.GetRolloutRequest())).rollout
        assert kept.rollout == started.rollout and kept.started_by == "unverified operator"


async def test_a_trial_of_any_change_changes_nothing(url: str, redis: RedisLink) -> None:
    """Neither document, snapshot nor audit, whether the change would be refused or not."""
    kinds = pb.ChangeRolloutRequest
    settings = pb.RolloutSettings(to_pool="next")
    async with leading(url) as one, operator(one.server.address) as stub:
        await knows_all(one)
        start = pb.StartRolloutRequest(settings=settings, force=True)
        await stub.StartRollout(start)
        await until(lambda: one.core.content.rollout != "", "the rollout is published")

        async def is_audited() -> bool:
            return any(each[b"what"] == b"rollout.start" for each in await events(redis))

        await until(is_audited, "the audit has the start")
        library, before = one.core.library, (one.core.library.desired, one.core.publisher.published)
        waiting, known = one.core.library.running, await events(redis)
        assert waiting is not None
        start.validate_only = True
        for call in (
            stub.CordonReplica(
                pb.CordonReplicaRequest(
                    process_id="stable-decode-0", drain=True, force=True, validate_only=True
                )
            ),
            stub.CordonReplica(pb.CordonReplicaRequest(process_id="next-prefill-0", validate_only=True)),
            stub.UncordonReplica(pb.UncordonReplicaRequest(process_id="stable-decode-0", validate_only=True)),
            stub.StartRollout(start),
            stub.RevertSnapshot(pb.RevertSnapshotRequest(to="stable", validate_only=True)),
            stub.Freeze(pb.FreezeRequest(ttl=Duration(seconds=3600), validate_only=True)),
            stub.Freeze(pb.FreezeRequest(validate_only=True)),
            *(
                stub.ChangeRollout(kinds(change=each, requirement="evals", force=True, validate_only=True))
                for each in kinds.Change.values()
            ),
        ):
            with suppress(grpc.aio.AioRpcError):
                await call
        assert (library.desired, one.core.publisher.published) == before
        running = library.running
        assert running is not None and (running.id, running.state) == (waiting.id, waiting.state)
        commands = {b"replica.", b"rollout.abort", b"rollout.start", b"snapshot.revert", b"mesh."}
        later = (await events(redis))[len(known) :]
        assert not [each for each in later if any(each[b"what"].startswith(name) for name in commands)]


async def test_a_rollout_names_the_processes_of_the_last_release(url: str, redis: RedisLink) -> None:
    """They lack the capability `pools`, so it refuses to start."""
    await Leases(redis).write("stable-router-1", "router", "stable", capabilities=())
    async with leading(url) as one, operator(one.server.address) as stub:
        await until(lambda: len(one.core.registry.members) > len(MEMBERS), "all leases are read")
        ask = pb.StartRolloutRequest(settings=pb.RolloutSettings(to_pool="next"), force=True)
        details = await refusal(stub.StartRollout(ask))
        assert details.reason == "CHANGE_REFUSED" and "stable-router-1" in details.message
        assert details.metadata["can_force"] == "false"


async def test_a_revert_changes_the_stable_pool_with_force_alone(url: str, redis: RedisLink) -> None:
    """All traffic at once is more than 25 points. The history names the snapshot."""
    async with leading(url) as one, operator(one.server.address) as stub:
        await knows_all(one)
        first = (await stub.GetSnapshot(pb.GetSnapshotRequest())).snapshot
        name = f"{first.name.term.number}.{first.name.term.leader}/{first.name.version}"

        async def is_recorded() -> bool:
            return bool((await stub.ListSnapshots(pb.ListSnapshotsRequest())).snapshots)

        await until(is_recorded, "the history has the snapshot")
        await stub.RevertSnapshot(pb.RevertSnapshotRequest(to=name))
        await stub.RevertSnapshot(pb.RevertSnapshotRequest(to="stable"))
        assert one.core.content.stable.pool == "stable"


async def test_a_follower_redirects_commands_and_answers_reads(url: str, redis: RedisLink) -> None:
    """The metadata has the leader's address."""
    async with leading(url) as one, control(url, "control-1") as two, operator(two.server.address) as stub:
        await until(lambda: two.core.leadership.holder is not None, "the follower knows the leader")
        for call in (
            stub.Freeze(pb.FreezeRequest(ttl=Duration(seconds=1))),
            stub.UncordonReplica(pb.UncordonReplicaRequest(process_id="x")),
            stub.StartRollout(pb.StartRolloutRequest()),
            stub.ChangeRollout(pb.ChangeRolloutRequest(change=PAUSE)),
            stub.RevertSnapshot(pb.RevertSnapshotRequest(to="stable")),
            stub.ListReceivers(pb.ListReceiversRequest()),
        ):
            details = await refusal(call)
            assert (details.code, details.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_LEADER")
            assert details.metadata["leader_address"] == one.server.address
        state = (await stub.GetControlPlane(pb.GetControlPlaneRequest())).control_plane
        assert not state.is_leader and state.leader == "control-0"
        await until(lambda: two.core.publisher.latest is not None, "the follower reads the board")
        assert (await stub.GetSnapshot(pb.GetSnapshotRequest())).snapshot.name.term.leader == "control-0"


async def test_without_redis_commands_are_refused_and_reads_answered(
    own_redis: RedisServer, redis: RedisLink
) -> None:
    """Nothing is changed; afterwards commands work again."""
    async with leading(own_redis.url) as one, operator(one.server.address) as stub:
        await knows_all(one)
        own_redis.stop()
        await until(lambda: not one.core.has_redis, "the outage is seen")
        details = await refusal(stub.Freeze(pb.FreezeRequest(ttl=Duration(seconds=5))))
        assert (details.code, details.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
        assert (await stub.GetSnapshot(pb.GetSnapshotRequest())).snapshot.content.pools
        assert (await stub.ListSnapshots(pb.ListSnapshotsRequest())).snapshots
        await own_redis.start()
        await until(lambda: one.core.has_redis and one.core.leads, "Redis answers")
        assert (await stub.Freeze(pb.FreezeRequest(ttl=Duration(seconds=5)))).HasField("frozen_until")
