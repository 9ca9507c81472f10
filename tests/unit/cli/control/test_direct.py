"""`kvmesh snapshot stable --direct` against a real Redis, with receivers that are played by their leases."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import socket

import pytest
from redis import Redis

from kvmesh.cli.control import direct
from kvmesh.membership.member import Member
from kvmesh.membership.membership import read_members
from kvmesh.redis_link import RedisLink, RedisUnavailable
from kvmesh.snapshot.board import Board, OnBoard, Written
from kvmesh.snapshot.content import Content, PoolTrack, RolloutState, Track
from kvmesh.snapshot.published import TERM_MAX, Published, Term, publish
from tests.unit.cli.control.scripted_control import Shell

AWAY = "Redis at redis://host is unavailable: Connection reset by peer"

CONTENT = Content(
    (PoolTrack("stable", "v1", Track.STABLE, 75), PoolTrack("next", "v2", Track.CANARY, 25)),
    rollout="r-7",
    rollout_state=RolloutState.BAKING,
    step=3,
)


async def _on_board(url: str, snapshot: Published | None) -> Published | None:
    """Write `snapshot` to the board if there is one, and return what the board has."""
    link = RedisLink(url)
    try:
        board = Board(link, "kvmesh")
        if snapshot is not None:
            await board.write(snapshot)
        found = await board.read()
        return found.snapshot if isinstance(found, OnBoard) else None
    finally:
        await link.close()


def put(url: str, term: int = 7, content: Content = CONTENT) -> Published:
    """Write a snapshot of a leader to the board."""
    snapshot = publish(Term(term, "control-0"), 4, content)
    asyncio.run(_on_board(url, snapshot))
    return snapshot


def on_board(url: str) -> Published:
    """Return the snapshot of the board."""
    found = asyncio.run(_on_board(url, None))
    assert found is not None
    return found


def lease(url: str, process_id: str, snapshot: str) -> None:
    """Write the lease of a receiver with this snapshot in force."""
    client = Redis.from_url(url)
    member = {
        "process_id": process_id,
        "role": "decode",
        "address": "127.0.0.1:1",
        "boot_id": "b",
        "model_version": "v1",
        "block_tokens": 16,
        "snapshot": snapshot,
    }
    client.sadd("kvmesh:procs", process_id)
    client.set(f"kvmesh:proc:{process_id}", json.dumps(member))
    client.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for receivers that take nothing."""
    monkeypatch.setattr(direct, "TAKEN_S", 0.3)
    monkeypatch.setattr(direct, "POLL_S", 0.02)


def test_all_goes_to_stable_without_a_control_plane(shell: Shell) -> None:
    """The rollout is taken back for ever, and the command says what a control plane will do."""
    put(shell.url)
    status, shown, errors = shell.run("snapshot", "stable", "--direct", "--reason", "errors at users")
    assert (status, errors) == (0, "")
    found = on_board(shell.url)
    assert found.name.term.number == 8
    assert found.name.term.leader.startswith("operator:")
    assert found.content.stable.weight_percent == 100
    assert found.content.ended_rollouts == ("r-7",)
    assert shown.splitlines()[:2] == [
        f"Wrote {found.name} to Redis: 100 % to stable (v1).",
        "Rollout r-7 is taken back: no process applies a weight of it again.",
    ]
    assert "A control plane that runs takes a term above this one" in shown
    (event,) = shell.json("events")
    assert event["what"] == "snapshot.stable"
    assert event["by"] == found.name.term.leader
    assert event["details"] == {"after": str(found.name), "reason": "errors at users"}


@pytest.mark.parametrize(("stored", "leased"), [(41, 3), (3, 41)])
def test_the_term_is_above_all_that_are_found(shell: Shell, stored: int, leased: int) -> None:
    """On the board, in Redis and in the leases of the receivers."""
    put(shell.url)
    client = Redis.from_url(shell.url)
    client.set("kvmesh:control:term", stored)
    lease(shell.url, "decode-0", f"{leased}.control-1/2")
    shell.run("snapshot", "stable", "--direct", *(["--force"] if leased > 7 else []))
    assert on_board(shell.url).name.term.number == 42
    assert client.get("kvmesh:control:term") == b"42"
    client.close()


def test_receivers_without_the_snapshot_are_named(shell: Shell) -> None:
    """The status is that of a failure, and --json has both lists."""
    put(shell.url)
    lease(shell.url, "decode-0", "7.control-0/4")
    lease(shell.url, "decode-1", "6.control-0/1")
    lease(shell.url, "old-release", "")
    status, shown, errors = shell.run("snapshot", "stable", "--direct")
    assert status == 1
    assert errors == "Without it after 0.3 s: decode-0, decode-1. They take it when they reach Redis.\n"
    assert "0 processes have it." in shown
    found = shell.json("snapshot", "stable", "--direct")
    assert (found["taken_by"], found["behind"], found["written"]) == ([], ["decode-0", "decode-1"], True)


def test_receivers_that_take_it_are_waited_for(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read the board once a second."""
    put(shell.url)
    lease(shell.url, "decode-0", "7.control-0/4")
    write = Board.write

    async def write_and_take(self: Board, snapshot: Published) -> Written:
        written = await write(self, snapshot)
        lease(shell.url, "decode-0", str(snapshot.name))
        return written

    monkeypatch.setattr(Board, "write", write_and_take)
    status, shown, _ = shell.run("snapshot", "stable", "--direct")
    assert status == 0
    assert "1 processes have it: decode-0." in shown


def test_a_dry_run_writes_nothing(shell: Shell) -> None:
    """Neither snapshot nor term nor event."""
    before = put(shell.url)
    status, shown, _ = shell.run("snapshot", "stable", "--direct", "--dry-run")
    assert status == 0
    assert shown.startswith("Would write 8.operator:")
    assert on_board(shell.url) == before
    assert shell.json("events") == []


def test_an_empty_board_is_left_alone(shell: Shell) -> None:
    """Pools cannot be guessed; receivers put their snapshot back."""
    status, shown, errors = shell.run("snapshot", "stable", "--direct")
    assert (status, shown) == (1, "")
    assert errors.startswith("Redis has no snapshot: nothing was written.")


def test_a_snapshot_published_meanwhile_wins(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The board refuses the lower one, and the command says so."""
    put(shell.url)
    prepare = direct._Writer.prepare

    async def prepare_slowly(self: direct._Writer, *, force: bool) -> Published:
        made = await prepare(self, force=force)
        await self._board.write(publish(Term(900, "control-1"), 1, CONTENT))
        return made

    monkeypatch.setattr(direct._Writer, "prepare", prepare_slowly)
    status, _, errors = shell.run("snapshot", "stable", "--direct")
    assert status == 1
    assert errors.splitlines()[0] == (
        "A control plane published a higher snapshot meanwhile: nothing was written."
    )


def test_the_term_of_redis_is_never_lowered(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another leader may raise it between reading and writing."""
    put(shell.url)
    prepare = direct._Writer.prepare

    async def prepare_slowly(self: direct._Writer, *, force: bool) -> Published:
        made = await prepare(self, force=force)
        await self._redis.execute("SET", "kvmesh:control:term", 500)
        return made

    monkeypatch.setattr(direct._Writer, "prepare", prepare_slowly)
    shell.run("snapshot", "stable", "--direct")
    client = Redis.from_url(shell.url)
    assert client.get("kvmesh:control:term") == b"500"
    client.close()


@pytest.mark.parametrize("leased", ["8.control-0/1", "7.control-1/1", "7.control-0/5"])
def test_a_board_older_than_the_receivers_is_refused(shell: Shell, leased: str) -> None:
    """Redis came back with an old dump: its pools may be those from before a promotion. --force takes them."""
    before = put(shell.url)
    lease(shell.url, "decode-0", "7.control-0/4")
    lease(shell.url, "decode-1", leased)
    for words in ((), ("--dry-run",)):
        status, shown, errors = shell.run("snapshot", "stable", "--direct", *words)
        assert (status, shown) == (1, "")
        assert errors.splitlines() == [
            "Redis lost a snapshot: decode-1 applies a higher one than its 7.control-0/4. Nothing was written.",
            "Receivers put it back within seconds: try again. With --force the pools of the older snapshot count.",
        ]
    failed = shell.json("snapshot", "stable", "--direct")["error"]
    assert (failed["code"], failed["processes"]) == ("UNAVAILABLE", ["decode-1"])
    assert failed["force_would_override"] == [
        "Redis has 7.control-0/4, and a receiver applies a higher snapshot"
    ]
    assert on_board(shell.url) == before
    assert shell.json("events") == []
    shell.run("snapshot", "stable", "--direct", "--force")
    assert on_board(shell.url).name.term.number > 7


def test_a_junk_name_in_a_lease_is_no_snapshot(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hinders no write, and does not count as a receiver that has the new snapshot."""
    monkeypatch.setattr(direct, "TAKEN_S", 0.0)
    put(shell.url)
    lease(shell.url, "decode-0", f"{TERM_MAX - 1}.control-0/1")
    status, shown, errors = shell.run("snapshot", "stable", "--direct")
    assert status == 1 and shown.startswith("Wrote 8.operator:") and "decode-0" in shown + errors
    assert on_board(shell.url).name.term.number == 8


@pytest.mark.parametrize("junk", [b"9" * 5000, b"9" * 17, b"-1", b"\xff", b"x", b" 12"])
def test_a_junk_term_in_redis_counts_as_none(shell: Shell, junk: bytes) -> None:
    """The scripts of a leader overwrite it as well."""
    put(shell.url)
    client = Redis.from_url(shell.url)
    client.set("kvmesh:control:term", junk)
    client.close()
    shell.run("snapshot", "stable", "--direct")
    assert on_board(shell.url).name.term.number == 8


def test_a_failed_audit_entry_changes_nothing_else(shell: Shell) -> None:
    """Redis refuses XADD. Receivers apply the snapshot all the same, so the command succeeds and names the lack."""
    put(shell.url)
    client = Redis.from_url(shell.url)
    client.set("kvmesh:control:events", "no stream")
    client.close()
    status, shown, errors = shell.run("snapshot", "stable", "--direct")
    found = on_board(shell.url)
    assert status == 0
    assert shown.startswith(f"Wrote {found.name} to Redis: 100 % to stable (v1).")
    assert errors.startswith(f"The snapshot {found.name} is written; its audit entry failed: Redis at ")
    assert len(errors.splitlines()) == 1
    done = shell.json("snapshot", "stable", "--direct")
    assert (done["written"], done["audited"]) == (True, False)


@pytest.mark.parametrize("failures", [2, 1000])
def test_a_failed_confirmation_is_no_failed_write(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Redis is away behind the write. The command asks again until TAKEN_S, and then says that it wrote."""
    put(shell.url)
    calls = 0

    async def broken(redis: RedisLink, mesh: str) -> list[Member]:
        nonlocal calls
        calls += 1
        if 1 < calls <= 1 + failures:  # the first call is before the write
            raise RedisUnavailable(AWAY)
        return await read_members(redis, mesh)

    monkeypatch.setattr(direct, "read_members", broken)
    status, shown, errors = shell.run("snapshot", "stable", "--direct")
    name = on_board(shell.url).name
    if failures == 2:
        assert (status, errors, calls) == (0, "", 4)
        return
    assert (status, shown) == (1, "")
    assert errors.splitlines()[0] == f"The snapshot {name} is written; its confirmation failed: {AWAY}."
    calls = 0
    failed = shell.json("snapshot", "stable", "--direct")["error"]
    assert (failed["written"], failed["snapshot"]) == (True, str(on_board(shell.url).name))


@pytest.mark.parametrize(
    ("is_connected", "sentence"),
    [
        (False, f"Redis did not confirm the snapshot, which may be written: {AWAY}."),
        (True, f"Redis did not take the snapshot: {AWAY}."),
    ],
)
def test_a_lost_answer_to_the_write_is_no_refused_write(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, is_connected: bool, sentence: str
) -> None:
    """Only a Redis that answers has surely not written."""
    put(shell.url)

    async def lose(self: Board, snapshot: Published) -> Written:
        self._redis.is_connected = is_connected
        raise RedisUnavailable(AWAY)

    monkeypatch.setattr(Board, "write", lose)
    status, shown, errors = shell.run("snapshot", "stable", "--direct")
    assert (status, shown, errors.splitlines()[0]) == (1, "", sentence)


@pytest.mark.parametrize("error", [KeyError("getpwuid(): uid not found: 1234"), OSError("No username")])
def test_a_user_without_a_name_is_named_by_its_number(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A container may run under a uid that its passwd file does not have."""

    def fail() -> str:
        raise error

    monkeypatch.setattr(getpass, "getuser", fail)
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    put(shell.url)
    assert shell.run("snapshot", "stable", "--direct")[0] == 0
    assert on_board(shell.url).name.term.leader == f"operator:1234@{socket.gethostname()}"
