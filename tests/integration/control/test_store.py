"""The store of the control plane against a real Redis: leases, documents, board, history, audit, state folder."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from controlplane.actions import AppendEvent, DocumentKind, WriteDocument
from controlplane.leadership import Holder
from controlplane.library import StoreRead
from controlplane.rollouts.document import ROLLOUTS_MAX
from controlplane.store.audit import WAITING_MAX
from controlplane.store.documents import Document, read_value, value_of
from controlplane.store.leader_lease import Identity
from controlplane.store.snapshot_history import SNAPSHOTS_MAX, PastSnapshot
from controlplane.store.store import Store
from kvmesh.redis_link import RedisLink
from kvmesh.snapshot.content import Content, PoolTrack, Track
from kvmesh.snapshot.published import JUMP_MAX, Published, Term, publish
from tests.integration.router.conftest import RedisServer
from tests.patience import patience

MESH = "kvmesh"
LEADER = "kvmesh:control:leader"


def identity(name: str, boot: str = "b0") -> Identity:
    return Identity(name, boot, f"127.0.0.1:{7000 + int(name[-1])}")


@asynccontextmanager
async def store(
    url: str, name: str = "control-0", boot: str = "b0", folder: Path | None = None
) -> AsyncIterator[Store]:
    """The loaded store of one control process."""
    link = RedisLink(url)
    one = Store(link, MESH, identity(name, boot), folder)
    await one.load()
    try:
        yield one
    finally:
        await link.close()


@asynccontextmanager
async def linked(url: str) -> AsyncIterator[RedisLink]:
    link = RedisLink(url)
    try:
        yield link
    finally:
        await link.close()


def snapshot(version: int, number: int = 1) -> Published:
    content = Content((PoolTrack("default", "v1", Track.STABLE, 100),), published_ms=version)
    return publish(Term(number, "control-0"), version, content)


def rollout(revision: int, text: str = "", name: str = "r-1") -> WriteDocument:
    data = json.dumps({"id": name, "revision": revision, "text": text}).encode()
    return WriteDocument(DocumentKind.ROLLOUT, name, data, revision, revision - 1)


async def read(one: Store) -> StoreRead:
    found = await one.read()
    assert found is not None
    return found


async def until(condition: Callable[[], Any], what: str) -> None:
    async with patience(10):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_one_process_holds_the_lease_of_the_leader(redis_url: str) -> None:
    """The first claim wins, renewals keep it, another boot of the same name does not, and a release hands it over."""
    async with (
        store(redis_url) as one,
        store(redis_url, "control-1") as two,
        store(redis_url, boot="b1") as again,
    ):
        first = await one.claim(0)
        assert first is not None and first.holder == Holder("control-0", "b0", "127.0.0.1:7000")
        for other in (two, again):
            answer = await other.claim(9)
            assert answer is not None and (answer.holder.boot_id, answer.number) == ("b0", 0)
        renewed = await one.claim(4)
        assert renewed is not None and renewed.number == 4
        await two.release()
        await again.release()
        held = await two.claim(0)
        assert held is not None and held.holder.process_id == "control-0" and held.number == 4
        await one.release()
        taken = await two.claim(0)
        assert taken is not None and taken.holder.process_id == "control-1"


async def test_a_number_never_falls_and_stays_exact(redis_url: str) -> None:
    """The number of a term has up to 53 bits."""
    async with store(redis_url) as one:
        largest = (1 << 53) - 1
        for number in (largest, largest - JUMP_MAX, 0):
            answer = await one.claim(number)
            assert answer is not None and answer.number == largest
        assert (await read(one)).number == largest


@pytest.mark.parametrize(
    "junk",
    [
        *(b"nan", b"-nan", b"inf", b"1e400", b"1e3", b"-5", b"0x10", b" 7", b"7\n", b"7.5", b"", b"\xff"),
        *(b"9007199254740992", b"9999999999999999", b"9" * 17, b"9" * 400),
    ],
)
async def test_junk_instead_of_a_number_is_overwritten(redis_url: str, junk: bytes) -> None:
    """It counts as 0, and the leader goes on."""
    async with linked(redis_url) as link, store(redis_url) as one:
        await link.execute("SET", "kvmesh:control:term", junk)
        for number, stored in ((0, 0), (3, 3), (0, 3)):
            answer = await one.claim(number)
            assert answer is not None and answer.number == stored
        assert await link.execute("GET", "kvmesh:control:term") == b"3"


async def test_a_number_far_above_the_term_of_the_leader_is_overwritten(redis_url: str) -> None:
    """The leader did not believe it, so the next process must not need it. A follower overwrites nothing."""
    async with linked(redis_url) as link, store(redis_url) as one, store(redis_url, "control-1") as two:
        await link.execute("SET", "kvmesh:control:term", JUMP_MAX + 4)
        assert (answer := await one.claim(0)) is not None and answer.number == JUMP_MAX + 4
        assert (answer := await two.claim(3)) is not None and answer.number == JUMP_MAX + 4
        assert (answer := await one.claim(4)) is not None and answer.number == JUMP_MAX + 4
        assert (answer := await one.claim(3)) is not None and answer.number == 3
        assert (answer := await two.claim(0)) is not None and answer.number == 3


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b'"x"', b'{"process_id":1,"boot_id":2}', b"\xff\x00"])
async def test_an_unreadable_lease_is_free(redis_url: str, junk: bytes) -> None:
    """Another program may have written the keys, of whatever type."""
    async with linked(redis_url) as link, store(redis_url) as one:
        await link.execute("SET", LEADER, junk)
        await link.execute("LPUSH", "kvmesh:control:term", "x")
        answer = await one.claim(3)
        assert answer is not None and answer.holder.process_id == "control-0" and answer.number == 3
        await link.execute("DEL", LEADER)
        await link.execute("LPUSH", LEADER, "x")
        assert await one.claim(0) == answer


async def test_the_lease_of_a_dead_leader_expires(redis_url: str) -> None:
    """Its life is LEASE_S, which Redis counts."""
    async with linked(redis_url) as link, store(redis_url) as one, store(redis_url, "control-1") as two:
        await one.claim(0)
        assert 4_000 < await link.execute("PTTL", LEADER) <= 5_000
        await link.execute("PEXPIRE", LEADER, 1)

        async def is_taken() -> bool:
            answer = await two.claim(0)
            return answer is not None and answer.holder.process_id == "control-1"

        await until(is_taken, "the other process takes the lease")


async def test_control_processes_see_each_other(redis_url: str) -> None:
    """Old, foreign and unreadable entries vanish, and so does one that leaves. A second boot of a name is seen."""
    async with linked(redis_url) as link, store(redis_url) as one, store(redis_url, "control-1") as two:
        old = {"process_id": "control-9", "boot_id": "x", "address": "a:1", "at_ms": 1}
        await link.execute("HSET", "kvmesh:control:procs", "control-9", json.dumps(old), "junk", b"\xff")
        assert await one.renew() == []
        (seen,) = await two.renew() or []
        assert (seen.process_id, seen.boot_id, seen.address) == ("control-0", "b0", "127.0.0.1:7000")
        assert seen.version and seen.at_ms > 1
        assert sorted(await link.execute("HKEYS", "kvmesh:control:procs")) == [b"control-0", b"control-1"]
        async with store(redis_url, boot="b1") as again:
            assert [each.process_id for each in await again.renew() or []] == ["control-0", "control-1"]
            await again.release()
        await two.release()
        assert await one.renew() == []


async def test_no_process_of_the_last_release_sees_a_control_lease(redis_url: str) -> None:
    """A process of release 0.1.0 logs an error for an unknown role at each poll, so the keys are apart."""
    async with linked(redis_url) as link, store(redis_url) as one:
        await one.claim(1)
        await one.renew()
        keys = {name.decode() for name in await link.execute("KEYS", "kvmesh:*")}
        assert keys == {LEADER, "kvmesh:control:term", "kvmesh:control:procs"}


async def test_documents_are_written_by_compare_and_set(redis_url: str) -> None:
    """Of two processes that replace one revision, one has a conflict, and reads the other's document."""
    async with store(redis_url) as one, store(redis_url, "control-1") as two:
        assert await one.write(rollout(1, "first")) is True
        await read(two)
        assert await one.write(rollout(2, "one")) is True
        assert await two.write(rollout(2, "two")) is False
        for each in (one, two):
            found = await read(each)
            assert json.loads(found.rollouts["r-1"])["text"] == "one"
            assert found.desired is None
        desired = WriteDocument(DocumentKind.DESIRED, "", b'{"revision":1}', 1, 0)
        assert await two.write(desired) is True
        assert (await read(one)).desired == b'{"revision":1}'


async def test_only_changed_documents_travel(redis_url: str) -> None:
    """Each process reads once a second; documents are large."""
    async with linked(redis_url) as link, store(redis_url) as one, store(redis_url, "control-1") as two:
        await one.write(rollout(1, "x" * 100_000))
        await read(two)
        before = await sent_bytes(link)
        for _ in range(5):
            assert len((await read(two)).rollouts["r-1"]) > 100_000
        assert await sent_bytes(link) - before < 20_000


async def sent_bytes(link: RedisLink) -> int:
    found: dict[str, int] = await link.execute("INFO", "stats")
    return found["total_net_output_bytes"]


async def test_a_flushed_redis_gets_documents_and_snapshot_back(redis_url: str) -> None:
    """Also where it comes back with an earlier revision."""
    async with linked(redis_url) as link, store(redis_url) as one, store(redis_url, "control-1") as two:
        await one.write(rollout(1))
        await one.write(rollout(2, "kept"))
        await one.write_board(snapshot(2))
        await read(two)
        await link.execute("FLUSHALL")
        found = await read(two)
        assert json.loads(found.rollouts["r-1"])["text"] == "kept"
        assert found.board == snapshot(2)
        await link.execute("HSET", "kvmesh:control:rollouts", "r-1", value_of(Document(1, b"{}")))
        await two.read()
        async with store(redis_url, "control-2") as fresh:
            found = await read(fresh)
            assert json.loads(found.rollouts["r-1"])["text"] == "kept" and found.board == snapshot(2)


async def test_a_state_folder_outlives_every_process_and_redis(redis_url: str, tmp_path: Path) -> None:
    """A process that starts alone with an empty Redis fills it from its folder."""
    async with store(redis_url, folder=tmp_path) as one:
        await one.write(rollout(1, "kept"))
        await one.write(WriteDocument(DocumentKind.DESIRED, "", b'{"revision":4}', 4, 3))
        await one.write_board(snapshot(3))
    (tmp_path / "rollout.r-2.json").write_bytes(b"torn")
    async with linked(redis_url) as link:
        await link.execute("FLUSHALL")
    async with store(redis_url, folder=tmp_path) as one, store(redis_url, "control-1") as other:
        assert list((await read(one)).rollouts) == ["r-1"]
        found = await read(other)
        assert json.loads(found.rollouts["r-1"])["text"] == "kept"
        assert found.desired == b'{"revision":4}' and found.board == snapshot(3)


async def test_a_full_disk_fails_no_write(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once."""
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    async with store(redis_url, folder=blocked / "state") as one:
        assert await one.write(rollout(1)) is True
        assert await one.write(rollout(2)) is True
        assert one.folder.failure_total == 2
    assert sum("cannot be written" in line for line in caplog.messages) == 1


async def test_the_earliest_rollouts_leave_redis_and_disk(redis_url: str, tmp_path: Path) -> None:
    """No other process puts them back."""
    async with store(redis_url, folder=tmp_path) as one, store(redis_url, "control-1") as two:
        for number in range(ROLLOUTS_MAX + 2):
            await one.write(rollout(1, name=f"r-{number:03d}"))
            await two.read()
        for each in (one, two, one):
            assert len((await read(each)).rollouts) == ROLLOUTS_MAX
        await one.write(rollout(1, name="r-900"))
        await read(one)
        assert not (tmp_path / "rollout.r-000.json").exists()


async def test_junk_in_documents_is_overwritten(redis_url: str) -> None:
    """It is no document, and no reader fails."""
    async with linked(redis_url) as link, store(redis_url) as one:
        await link.execute("HSET", "kvmesh:control:rollouts", "r-1", b"\xff{", "../x", b"{}", "", b"{}")
        await link.execute("LPUSH", "kvmesh:control:desired", "x")
        found = await read(one)
        assert not found.rollouts and found.desired is None
        assert await one.write(rollout(1)) is True
        assert await one.write(WriteDocument(DocumentKind.DESIRED, "", b"{}", 1, 0)) is True
        found = await read(one)
        assert list(found.rollouts) == ["r-1"] and found.desired == b"{}"


async def test_the_last_snapshots_are_kept_with_their_reasons(redis_url: str) -> None:
    """The latest first; rows of other programs are left out, and a key of another type is removed."""
    async with linked(redis_url) as link, store(redis_url) as one:
        await link.execute("SET", "kvmesh:control:snapshots", "x")
        await one.record(PastSnapshot(snapshot(1)))
        for version in range(1, SNAPSHOTS_MAX + 3):
            await one.record(PastSnapshot(snapshot(version), f"reason {version}", "operator"))
        await link.execute("LPUSH", "kvmesh:control:snapshots", b"\xff", "{}")
        found = await one.history(10)
        assert found is not None and len(found) == 8
        assert (found[0].snapshot.name.version, found[0].reason, found[0].by) == (52, "reason 52", "operator")
        assert await link.execute("LLEN", "kvmesh:control:snapshots") == SNAPSHOTS_MAX + 2


async def test_a_snapshot_is_listed_once(redis_url: str) -> None:
    """The leader writes the board again when a read before the write comes back after it."""
    async with store(redis_url) as one:
        for version in (1, 2, 2):
            await one.record(PastSnapshot(snapshot(version), "a new leader"))
        found = await one.history(10)
        assert found is not None and [each.snapshot.name.version for each in found] == [2, 1]


async def test_a_snapshot_that_redis_missed_is_written_at_the_next_read(own_redis: RedisServer) -> None:
    """Redis comes back with the snapshot before it. Board and history get the latest one."""
    async with store(own_redis.url) as one:
        await one.write_board(snapshot(1))
        await read(one)
        own_redis.stop()
        assert await one.write_board(snapshot(2)) is None
        await one.record(PastSnapshot(snapshot(2), "missed"), is_later=True)
        await own_redis.start()
        async with store(own_redis.url, "control-1") as disk:
            await disk.write_board(snapshot(1))  # as Redis has it from its disk

        async def is_read() -> bool:
            return await one.read() is not None

        await until(is_read, "Redis answers")
        async with store(own_redis.url, "control-2") as fresh:
            assert (await read(fresh)).board == snapshot(2)
            assert await fresh.history(10) == [PastSnapshot(snapshot(2), "missed")]


async def test_a_checkpoint_is_not_written_to_the_disk_each_second(redis_url: str, tmp_path: Path) -> None:
    """A change of state and what Redis does not have are written at once, by the leader and by a follower."""

    def baking(revision: int, weight: int) -> WriteDocument:
        head = {"id": "r-1", "revision": revision, "state": "BAKING", "step": 1, "weight_percent": weight}
        return WriteDocument(DocumentKind.ROLLOUT, "r-1", json.dumps(head).encode(), revision, revision - 1)

    def on_disk(folder: Path) -> int:
        value = read_value((folder / "rollout.r-1.json").read_bytes())
        return value.revision if value is not None else 0

    one, two = tmp_path / "one", tmp_path / "two"
    async with store(redis_url, folder=one) as leader, store(redis_url, "control-1", folder=two) as follower:
        for revision, weight, kept in ((1, 5, 1), (2, 5, 1), (3, 5, 1), (4, 10, 4), (5, 10, 4)):
            assert await leader.write(baking(revision, weight)) is True
            for each in (leader, follower):
                await read(each)
            assert (on_disk(one), on_disk(two)) == (kept, kept)


async def test_events_are_logged_and_streamed_in_order(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Caller, source, target, values before and after, result. A key of another type is removed."""
    caplog.set_level(logging.INFO)
    async with linked(redis_url) as link, store(redis_url) as one:
        await link.execute("SET", "kvmesh:control:events", "x")
        for number in range(3):
            one.append(
                AppendEvent(
                    "replica.cordon",
                    f"decode-{number}",
                    "done",
                    "operator.kvmesh.internal",
                    "ipv4:10.0.0.1:1",
                    {"before": "serving", "after": "cordoned"},
                )
            )
        await one.flush()
        assert one.audit.waiting_count == 3
        await one.flush()
        assert one.audit.waiting_count == 0
        rows = await link.execute("XRANGE", "kvmesh:control:events", "-", "+")
        fields = [dict(row[1]) for row in rows]
        assert [each[b"target"] for each in fields] == [b"decode-0", b"decode-1", b"decode-2"]
        assert fields[0] == {
            b"process_id": b"control-0",
            b"what": b"replica.cordon",
            b"target": b"decode-0",
            b"result": b"done",
            b"by": b"operator.kvmesh.internal",
            b"source": b"ipv4:10.0.0.1:1",
            b"details": b'{"before":"serving","after":"cordoned"}',
        }
    (line, *_) = [record for record in caplog.records if record.message == "audit"]
    assert vars(line)["by"] == "operator.kvmesh.internal" and vars(line)["details"]["after"] == "cordoned"


async def test_without_redis_every_answer_is_none(own_redis: RedisServer, tmp_path: Path) -> None:
    """No exception leaves the store, events wait, a document is kept on disk, and everything goes on afterwards."""
    async with store(own_redis.url, folder=tmp_path) as one:
        assert await one.write(rollout(1)) is True
        own_redis.stop()
        assert await one.claim(1) is None and await one.renew() is None and await one.read() is None
        assert await one.write(rollout(2, "unstored")) is None
        assert b"unstored" in (tmp_path / "rollout.r-1.json").read_bytes()
        assert await one.write_board(snapshot(1)) is None
        assert await one.history(5) is None
        for number in range(WAITING_MAX + 10):
            one.append(AppendEvent("x", str(number), "done"))
        await one.flush()
        await one.record(PastSnapshot(snapshot(1)))
        await one.release()
        assert one.audit.waiting_count == WAITING_MAX and one.audit.dropped_total == 10
        await own_redis.start()

        async def is_read() -> bool:
            return await one.read() is not None

        await until(is_read, "Redis answers")
        assert await one.write(rollout(2, "stored")) is True
        await one.flush()
        assert one.audit.waiting_count == 0
