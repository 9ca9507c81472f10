"""`kvmesh events`: the audit stream as people and programs read it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from redis import Redis

from kvmesh.cli.control import audit, events
from tests.unit.cli.control.scripted_control import Shell

STREAM = "kvmesh:control:events"


def append(url: str, entry_id: str = "*", **fields: str) -> None:
    """Append an entry as the control plane does."""
    client: Any = Redis.from_url(url)
    whole = {
        "process_id": "control-0",
        "what": "rollout.start",
        "target": "r-1",
        "result": "in force",
        **fields,
    }
    client.xadd(STREAM, whole, id=entry_id)
    client.close()


def test_events_say_when_which_operator_from_where_what_and_the_result(shell: Shell) -> None:
    """The oldest first, with their details."""
    details = json.dumps({"before": "-", "after": "BAKING", "reason": "new weights"})
    append(shell.url, "1795428902000-0", by="alice", source="10.0.0.7:4242", details=details)
    append(shell.url, "1795428903000-0", what="rollout.step", result="step 2")
    status, shown, errors = shell.run("events")
    assert (status, errors) == (0, "")
    for words in (
        "alice",
        "10.0.0.7:4242",
        "rollout.start",
        "r-1",
        "in force",
        "reason new weights",
        "control plane",
    ):
        assert words in shown, words
    assert shown.index("alice") < shown.index("rollout.step")
    found = shell.json("events")
    assert found[0] == {
        "id": "1795428902000-0",
        "at_ms": 1_795_428_902_000,
        "by": "alice",
        "source": "10.0.0.7:4242",
        "what": "rollout.start",
        "target": "r-1",
        "result": "in force",
        "process_id": "control-0",
        "details": {"before": "-", "after": "BAKING", "reason": "new weights"},
    }


def test_the_last_events_are_shown(shell: Shell) -> None:
    """As many as asked for."""
    for number in range(5):
        append(shell.url, target=f"r-{number}")
    assert [each["target"] for each in shell.json("events", "--count", "2")] == ["r-3", "r-4"]


def test_events_of_replicas_are_those_about_processes(shell: Shell) -> None:
    """Their author and their result."""
    append(shell.url, what="replica.drain", target="decode-0", by="alice")
    append(shell.url)
    assert [each["target"] for each in shell.json("replicas", "events")] == ["decode-0"]
    assert "decode-0" in shell.run("replicas", "events")[1]


def test_without_events_the_command_says_so(shell: Shell) -> None:
    """That is no failure."""
    assert shell.run("events") == (0, "There are no events.\n", "")
    assert shell.json("events") == []


def test_hostile_entries_are_text(shell: Shell) -> None:
    """Another program may write to Redis; the terminal gets no control character, and no entry hides another one."""
    append(shell.url, by="\x1b[31m[red]x", details="{not json", more="\x07")
    client = Redis.from_url(shell.url)
    client.xadd(STREAM, {b"\xff\xfe": b"\xff"})
    client.close()
    status, shown, _ = shell.run("events")
    assert status == 0
    assert "\x1b" not in shown and "\x07" not in shown
    assert "[red]x" in shown and "{not json" in shown
    assert len(shell.json("events")) == 2


@pytest.mark.parametrize("as_json", [False, True])
def test_followed_events_come_in_order(shell: Shell, monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    """Each once, in one line; Ctrl-C ends with 130."""
    monkeypatch.setattr(events, "POLL_S", 0.01)
    later = events.EventStream.later
    calls = 0

    async def append_then_interrupt(self: events.EventStream) -> list[audit.AuditEvent]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        append(shell.url, target=f"r-{calls}0")
        return await later(self)

    append(shell.url)
    monkeypatch.setattr(events.EventStream, "later", append_then_interrupt)
    status, shown, _ = shell.run("events", "--follow", *(["--json"] if as_json else []))
    assert status == 130
    lines = shown.splitlines()
    targets = (
        [json.loads(line)["target"] for line in lines]
        if as_json
        else [line.split()[-3][:-1] for line in lines]
    )
    assert targets == ["r-1", "r-10", "r-20"]


async def test_an_outage_of_redis_is_waited_for(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said once, and the next events come after it."""
    from kvmesh.cli.found_mesh import FoundMesh
    from kvmesh.config import MeshConfig
    from kvmesh.redis_link import RedisLink, RedisUnavailable

    stream = events.EventStream(FoundMesh(MeshConfig(), redis_url, None))
    try:
        append(redis_url)
        assert len(await stream.last()) == 1
        answers = RedisLink.execute

        async def away(*_: Any) -> None:
            raise RedisUnavailable("Redis is away")

        monkeypatch.setattr(RedisLink, "execute", away)
        assert [await stream.later(), await stream.later()] == [[], []]
        assert capsys.readouterr().err == "Redis is away; waiting for Redis.\n"
        monkeypatch.setattr(RedisLink, "execute", answers)
        append(redis_url, target="r-2")
        assert [each.target for each in await stream.later()] == ["r-2"]
    finally:
        await stream.close()


def test_without_redis_the_command_fails(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one sentence."""
    monkeypatch.setenv("KVMESH_REDIS_URL", "redis://127.0.0.1:1/0")
    status, shown, errors = shell.run("events")
    assert (status, shown) == (1, "")
    assert errors.startswith("The events cannot be read: Redis at redis://127.0.0.1:1/0 is unavailable")
