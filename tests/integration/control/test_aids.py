"""Packages and prefixes in a real Redis and in state folders: corrupt keys, other programs, full disks, deletions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.actions import AidKind, WriteAid
from controlplane.store.aids import MOST, AidStore
from controlplane.store.documents import Document, value_of
from controlplane.warmup.prefixes import Prefixes, RegisteredPrefix, encode
from kvmesh.redis_link import RedisLink
from kvmesh.snapshot.content import REVISION_MAX
from tests.one_redis import ONE_REDIS

pytestmark = ONE_REDIS

MESH = "kvmesh"
PACKAGES, PREFIXES = "kvmesh:control:packages", "kvmesh:control:prefixes"


@pytest.fixture
async def link(redis_url: str) -> AsyncIterator[RedisLink]:
    """A link to the Redis of the test."""
    one = RedisLink(redis_url)
    yield one
    await one.close()


def aid(name: str, data: bytes, revision: int = 1, kind: AidKind = AidKind.PACKAGE) -> WriteAid:
    return WriteAid(kind, name, data, revision)


async def test_what_one_process_writes_every_process_reads(link: RedisLink, tmp_path: Path) -> None:
    """From Redis, and after the loss of all data from the state folder; also what it never wrote itself."""
    one, other = AidStore(link, MESH, tmp_path / "one"), AidStore(link, MESH, tmp_path / "other")
    await one.write(aid("a", b'{"x":1}'))
    await one.write(aid("p", b'{"y":1}', kind=AidKind.PREFIX))
    wanted = {AidKind.PACKAGE: {"a": b'{"x":1}'}, AidKind.PREFIX: {"p": b'{"y":1}'}}
    for _ in range(2):  # the second answer has no values: they are known
        assert await one.read() == await other.read() == wanted
    await link.execute("DEL", PACKAGES, PREFIXES)
    assert await one.read() == {kind: {} for kind in AidKind}
    for folder in ("one", "other"):
        assert await AidStore(link, MESH, tmp_path / folder).load() == wanted


@pytest.mark.parametrize("command", [("SET", "x"), ("LPUSH", "x"), ("SADD", "x")])
async def test_a_key_of_another_type_is_replaced(link: RedisLink, command: tuple[str, str]) -> None:
    """Another program's key costs neither a read nor a write."""
    await link.execute(command[0], PACKAGES, command[1])
    store = AidStore(link, MESH, None)
    assert await store.read() == {kind: {} for kind in AidKind}
    await store.write(aid("a", b"{}"))
    assert (await store.read())[AidKind.PACKAGE] == {"a": b"{}"}


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"hello",
        b'{"revision":1,"digest":"0000000000000000","document":{}}',
        b'{"revision":0,"digest":"44136fa355b3678a","document":{}}',
        value_of(Document(REVISION_MAX + 1, b"{}")),
        value_of(Document(1, b"x" * (1 << 20))),
        b"\xff\xfe\x00",
    ],
)
async def test_values_of_other_programs_are_left_out(link: RedisLink, value: bytes) -> None:
    """The others are read; a later write replaces the value unless it claims a later revision."""
    await link.execute("HSET", PACKAGES, "bad", value)
    await link.execute("HSET", PACKAGES, b"\xff name", value_of(Document(1, b"{}")))
    store = AidStore(link, MESH, None)
    await store.write(aid("good", b"{}"))
    assert (await store.read())[AidKind.PACKAGE] == {"good": b"{}"}


async def test_the_later_revision_wins(link: RedisLink, tmp_path: Path) -> None:
    """In Redis and in the folder of each process, in whichever order they write."""
    one, other = AidStore(link, MESH, tmp_path / "one"), AidStore(link, MESH, tmp_path / "other")
    await one.write(aid("a", b"3", 3))
    await other.write(aid("a", b"2", 2))
    assert (await one.read())[AidKind.PACKAGE] == (await other.read())[AidKind.PACKAGE] == {"a": b"3"}
    await other.write(aid("a", b"4", 4))
    await one.read()
    for folder in ("one", "other"):
        assert (await AidStore(link, MESH, tmp_path / folder).load())[AidKind.PACKAGE] == {"a": b"4"}


@pytest.mark.parametrize("fault", ["read-only", "a file"])
async def test_a_disk_that_takes_nothing_costs_nothing_else(
    link: RedisLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Redis has the aids, and the process reads them."""
    folder = tmp_path / "state"
    if fault == "a file":
        folder.write_text("no folder")
    else:

        def refuse(*_: object) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr("controlplane.store.state_folder.replace_file", refuse)
    store = AidStore(link, MESH, folder)
    assert await store.load() == {kind: {} for kind in AidKind}
    await store.write(aid("a", b"{}"))
    for _ in range(2):
        assert (await store.read())[AidKind.PACKAGE] == {"a": b"{}"}


async def test_a_deleted_prefix_comes_back_from_no_folder(link: RedisLink, tmp_path: Path) -> None:
    """The folder of a process that only reads loses the tokens; one that slept through the deletion restores nothing."""
    tokens = (1_234_567_890, 1_111_111_111)
    first = RegisteredPrefix(name="p", token_ids=tokens)
    gone = RegisteredPrefix(name="p", revision=2)
    one, reader, sleeper = (AidStore(link, MESH, tmp_path / name) for name in ("one", "reader", "sleeper"))
    await one.write(aid("p", encode(first), 1, AidKind.PREFIX))
    await reader.read()
    await sleeper.read()
    await one.write(aid("p", encode(gone), 2, AidKind.PREFIX))
    await reader.read()
    assert has_tokens(tmp_path) == {"sleeper"}
    woken = AidStore(link, MESH, tmp_path / "sleeper")
    known = Prefixes()
    known.learn((await woken.load())[AidKind.PREFIX])
    assert known.ordered()
    stored = (await woken.read())[AidKind.PREFIX]
    known.learn(stored)
    assert not known.ordered() and not known.unwritten(stored)
    assert not has_tokens(tmp_path)
    await woken.write(aid("p", encode(first), 1, AidKind.PREFIX))
    assert (await one.read())[AidKind.PREFIX] == {"p": encode(gone)}


def has_tokens(folder: Path) -> set[str]:
    """Return the state folders with a token of the prefix."""
    return {
        path.relative_to(folder).parts[0]
        for path in folder.rglob("*")
        if path.is_file() and b"1234567890" in path.read_bytes()
    }


async def test_a_folder_is_bounded_and_keeps_what_redis_has(link: RedisLink, tmp_path: Path) -> None:
    """Packages of versions that are gone leave the disk, but not while Redis is empty."""
    store, most = AidStore(link, MESH, tmp_path), MOST[AidKind.PACKAGE]
    for number in range(most + 1):
        await store.write(aid(f"n{number:03}", b"{}"))
    await store.read()
    names = set((await AidStore(link, MESH, tmp_path).load())[AidKind.PACKAGE])
    assert names == set((await store.read())[AidKind.PACKAGE]) and len(names) == most
    await link.execute("DEL", PACKAGES)
    await store.read()
    assert set((await AidStore(link, MESH, tmp_path).load())[AidKind.PACKAGE]) == names
