"""`kvmesh snapshot stable --direct` against a real Redis, with receivers that are played by their leases."""

from __future__ import annotations

import asyncio
import json

import pytest
from redis import Redis

from kvmesh.cli.control import direct
from kvmesh.redis_link import RedisLink
from kvmesh.snapshot.board import Board, OnBoard, Written
from kvmesh.snapshot.content import Content, PoolTrack, RolloutState, Track
from kvmesh.snapshot.published import Published, Term, publish
from tests.unit.cli.control.scripted_control import Shell

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
    shell.run("snapshot", "stable", "--direct")
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

    async def prepare_slowly(self: direct._Writer) -> Published:
        made = await prepare(self)
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

    async def prepare_slowly(self: direct._Writer) -> Published:
        made = await prepare(self)
        await self._redis.execute("SET", "kvmesh:control:term", 500)
        return made

    monkeypatch.setattr(direct._Writer, "prepare", prepare_slowly)
    shell.run("snapshot", "stable", "--direct")
    client = Redis.from_url(shell.url)
    assert client.get("kvmesh:control:term") == b"500"
    client.close()
