"""The board in a real Redis: only a higher name is written, bytes are kept, and no junk stays."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from kvmesh.config import ROOT
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.redis_link import RedisLink
from kvmesh.snapshot import content as contents
from kvmesh.snapshot.board import Board, Junk, Known, OnBoard, Refused, Written, order_of
from kvmesh.snapshot.content import Content, PoolTrack, Track
from kvmesh.snapshot.control_processes import read_control_processes
from kvmesh.snapshot.published import SNAPSHOT_BYTES_MAX, TERM_MAX, Name, Term, name_message, publish
from tests.unit.snapshot.test_content import STABLE

CONTENT = Content((STABLE,))
LEADERS = ("a", "control-0", "control-1", "control-10", "Control-1", "z", "\u00e9", "\U0001f600", "-", "~")


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[RedisLink]:
    """A link to an empty Redis."""
    link = RedisLink(redis_url)
    yield link
    await link.close()


async def test_the_board_keeps_the_highest_of_any_schedule(redis: RedisLink) -> None:
    """Writes in random order leave the highest name, with its exact bytes, and tell each writer the truth."""
    board, chance, best = Board(redis, "m"), random.Random(7), None
    numbers, versions = (1, 2, 9, 10, 255, 256, TERM_MAX), (1, 9, 10, 1 << 33, (1 << 64) - 1)
    for _ in range(300):
        term = Term(chance.choice(numbers), chance.choice(LEADERS))
        one = publish(term, chance.choice(versions), CONTENT)
        wanted = Written.WRITTEN
        if best is not None and one.name.order <= best.name.order:
            wanted = Written.SAME if one.name.order == best.name.order else Written.LOWER
        assert await board.write(one) is wanted, (one, best)
        best = one if wanted is Written.WRITTEN else best
        assert best is not None
        assert await board.read() == OnBoard(order_of(best.name), best)
        assert await board.read(order_of(best.name)) == Known(order_of(best.name))


def test_orders_compare_like_names() -> None:
    """The order of two texts, byte by byte, is the order of their names."""
    chance = random.Random(3)
    names = [
        Name(
            Term(chance.randint(1, TERM_MAX), "".join(chance.choices(LEADERS, k=chance.randint(1, 3)))),
            chance.randint(1, (1 << 64) - 1),
        )
        for _ in range(500)
    ]
    names += [Name(Term(1, leader), version) for leader in LEADERS for version in (1, 9, 10)]
    for lower, higher in pairwise(sorted(names, key=lambda name: name.order)):
        assert order_of(lower).encode() <= order_of(higher).encode(), (lower, higher)


async def test_an_empty_board_is_none(redis: RedisLink) -> None:
    """A mesh without a control plane has no board."""
    assert await Board(redis, "m").read() is None


@pytest.mark.parametrize(
    "commands",
    [
        [("SET", "m:snapshot", "text of another program")],
        [("RPUSH", "m:snapshot", "a", "b")],
        [("HSET", "m:snapshot", "other", "field")],
        [("HSET", "m:snapshot", "order", "9", "data", b"\xff\x00junk")],
        [("HSET", "m:snapshot", "order", "\xff\xfe", "data", "junk")],
        [("HSET", "m:snapshot", "order", "9" * 20 + ".61." + "9" * 20, "data", "junk")],
        [("HSET", "m:snapshot", "order", "x" * 300, "data", "x" * (SNAPSHOT_BYTES_MAX + 1))],
        [("HSET", "m:snapshot", "order", "x" * (SNAPSHOT_BYTES_MAX + 1), "data", "x")],
        [("HSET", "m:snapshot", "order", order_of(Name(Term(2, "b"), 1)), "data", "")],
    ],
    ids=["string", "list", "fields", "bytes", "order", "above-all", "too-large", "long-order", "no-data"],
)
async def test_junk_is_removed_and_overwritten(redis: RedisLink, commands: list[tuple[str, ...]]) -> None:
    """No bytes of another program, and no order above all, keep a snapshot off the board."""
    await redis.pipeline(commands)
    board, one = Board(redis, "m"), publish(Term(1, "a"), 1, CONTENT)
    junk = await board.read()
    assert isinstance(junk, Junk) and len(junk.reason) < 400
    await board.clear(junk)
    assert await board.write(one) is Written.WRITTEN
    assert await board.read() == OnBoard(order_of(one.name), one)


async def test_a_board_with_a_false_order_is_junk(redis: RedisLink) -> None:
    """A low snapshot under a high order would block every write: it is removed."""
    board, low = Board(redis, "m"), publish(Term(1, "a"), 1, CONTENT)
    high = order_of(Name(Term(TERM_MAX, "z"), 1))
    await redis.execute("HSET", board.key, "order", high, "data", low.data)
    junk = await board.read()
    assert isinstance(junk, Junk) and high[:20] in junk.reason
    assert await board.clear(junk)
    assert await board.read() is None


async def test_the_documented_rights_are_enough(redis: RedisLink, redis_url: str) -> None:
    """The scripts of receivers run with the rights of the mesh's user in docs/security.md."""
    said = re.search(
        r"^user mesh on >PASSWORD (.*)$", (ROOT / "docs" / "security.md").read_text(), re.MULTILINE
    )
    assert said is not None
    await redis.execute("ACL", "SETUSER", "mesh", "reset", "on", ">PASSWORD", *said.group(1).split())
    link = RedisLink(redis_url.replace("redis://", "redis://mesh:PASSWORD@"))
    try:
        board, one = Board(link, "kvmesh"), publish(Term(1, "a"), 1, CONTENT)
        await link.execute("HSET", board.key, "order", "junk", "data", "junk")
        junk = await board.read()
        assert isinstance(junk, Junk) and await board.clear(junk)
        assert await board.write(one) is Written.WRITTEN
        assert await read_control_processes(link, "kvmesh") == []
    finally:
        await link.close()
        await redis.execute("ACL", "DELUSER", "mesh")


async def test_a_board_that_changed_is_not_cleared(redis: RedisLink) -> None:
    """A snapshot that arrives between the read and the removal stays."""
    board, one = Board(redis, "m"), publish(Term(1, "a"), 1, CONTENT)
    await redis.execute("HSET", board.key, "order", "junk", "data", "junk")
    junk = await board.read()
    assert isinstance(junk, Junk)
    assert await board.write(one) is Written.WRITTEN
    assert not await board.clear(junk)
    assert isinstance(await board.read(), OnBoard)


async def test_a_snapshot_of_a_later_release_stays(redis: RedisLink) -> None:
    """Its name and digest are right, and only its content is beyond this release: it is refused, not removed."""
    board = Board(redis, "m")
    one = publish(Term(4, "a"), 2, CONTENT)
    odd = Content((PoolTrack("p", "v", Track.STABLE, 99),))
    body = contents.encode(odd)
    name = Name(one.name.term, 3, hashlib.sha256(body).digest())
    data = pb.Snapshot(name=name_message(name), content=body).SerializeToString()
    await redis.execute("HSET", board.key, "order", order_of(name), "data", data)
    found = await board.read()
    assert isinstance(found, Refused) and found.name == name and "99" in found.reason
    assert await board.write(one) is Written.LOWER
