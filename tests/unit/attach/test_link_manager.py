"""A link manager keeps one link per wanted process, and links to replaced processes until they are unused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kvmesh.attach.link_manager import LinkManager
from kvmesh.clock import MonotonicClock
from kvmesh.membership.member import Member
from tests.patience import patience


class Peer:
    """A peer that is also its link."""

    def __init__(self, member: Member, name: str) -> None:
        self.member, self.name = member, name
        self.is_up = True
        self.is_unused = False
        self.is_listed = True
        self.is_replaced = False
        self.is_closing = self.is_closed = False
        self.is_slow_to_end = False

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if self.is_slow_to_end:
                await asyncio.Event().wait()  # until it is cancelled once more


class Peers:
    """A Host that records every opened peer."""

    def __init__(self) -> None:
        self.opened: list[Peer] = []
        self.names: list[str] = []
        self.returns = True
        self.is_broken = False

    def is_wanted(self, member: Member) -> bool:
        return member.role == "router"

    def open(self, member: Member, name: str) -> tuple[Peer, Any]:
        if self.is_broken:
            raise ValueError("a bug")
        self.opened.append(Peer(member, name))
        return self.opened[-1], self.opened[-1]

    def on_listed(self, peer: Peer, member: Member | None) -> None:
        peer.is_listed = member is not None
        peer.is_replaced = False

    def on_replaced(self, peer: Peer) -> None:
        peer.is_replaced = True

    def may_return(self, peer: Peer) -> bool:
        return self.returns

    def may_close(self, peer: Peer, now_s: float, *, is_replaced: bool) -> bool:
        assert is_replaced == peer.is_replaced
        return not peer.is_up or (is_replaced and peer.is_unused)

    def on_closing(self, peer: Peer, now_s: float) -> None:
        peer.is_closing = True

    def on_closed(self, peer: Peer, now_s: float) -> None:
        assert not peer.is_closed
        peer.is_closed = True

    def on_settled(self, names: list[str], now_s: float) -> None:
        self.names = names


def member(name: str = "r", boot_id: str = "A", role: Any = "router") -> Member:
    return Member(
        process_id=name, role=role, address="a:1", boot_id=boot_id, model_version="m", block_tokens=4
    )


@asynccontextmanager
async def managed() -> AsyncIterator[tuple[LinkManager[Peer], Peers]]:
    peers = Peers()
    links = LinkManager(peers, MonotonicClock(), "router")
    task = asyncio.create_task(links.run())
    try:
        yield links, peers
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert len(links) == 0 and all(peer.is_closed for peer in peers.opened)


async def until(condition: Callable[[], bool]) -> None:
    async with patience(5):
        while not condition():
            await asyncio.sleep(0)


async def test_wanted_processes_get_one_link_each() -> None:
    """A process without a lease keeps its link while the stream is up."""
    async with managed() as (links, peers):
        assert links.is_settled()
        links.update([member("r"), member("s"), member("d", role="decode")])
        assert not links.is_settled()
        await until(links.is_settled)
        assert peers.names == ["r", "s"] and len(links) == 2
        links.update([member("s")])
        assert not peers.opened[0].is_listed
        await until(lambda: not links._changed.is_set())
        assert len(links) == 2
        peers.opened[0].is_up = False
        links.update([member("s")])
        await until(lambda: peers.opened[0].is_closed)
        assert peers.names == ["s"] and not peers.opened[1].is_closed


async def test_a_replaced_process_is_linked_until_it_is_unused() -> None:
    """Its successor gets a link of its own at once, under another name."""
    async with managed() as (links, peers):
        links.update([member(boot_id="A")])
        await until(lambda: len(links) == 1)
        links.update([member(boot_id="B")])
        await until(lambda: len(links) == 2)
        old, new = peers.opened
        assert old.is_replaced and (old.name, new.name) == ("r", "r@a:1#B")
        old.is_unused = True
        links.update([member(boot_id="B")])
        await until(lambda: old.is_closed)
        assert old.is_closing and len(links) == 1 and not new.is_closing


async def test_a_link_that_is_being_closed_at_the_end_is_closed() -> None:
    """The end comes while the manager waits for a replaced link. `managed` checks that each peer is closed."""
    async with managed() as (links, peers):
        links.update([member(boot_id="A")])
        await until(links.is_settled)
        (old,) = peers.opened
        old.is_unused = old.is_slow_to_end = True
        links.update([member(boot_id="B")])
        await until(lambda: old.is_closing)
        assert not old.is_closed


async def test_a_process_that_holds_its_name_again_keeps_its_link_if_it_may() -> None:
    """If the owner cannot reuse the old link, the process gets a new one."""
    for returns in (True, False):
        async with managed() as (links, peers):
            peers.returns = returns
            for boot_id in ("A", "B", "A"):
                links.update([member(boot_id=boot_id)])
                await until(lambda: not links._changed.is_set())
            assert len(peers.opened) == (2 if returns else 3)
            assert peers.opened[0].is_replaced is not returns
            assert peers.opened[1].is_replaced


async def test_a_bug_with_one_peer_is_tried_again() -> None:
    """The links to other peers stay."""
    async with managed() as (links, peers):
        links.update([member("r")])
        await until(links.is_settled)
        peers.is_broken = True
        links.update([member("r"), member("s")])
        await until(lambda: not links._changed.is_set())
        peers.is_broken = False
        links.update([member("r"), member("s")])
        await until(links.is_settled)
        assert not peers.opened[0].is_closed


async def test_processes_of_equal_names_in_two_regions_get_a_link_each() -> None:
    """The link to another region is named "region/name"; the own region's link is not replaced by it."""
    peers = Peers()
    links = LinkManager(peers, MonotonicClock(), "router", "eu")
    task = asyncio.create_task(links.run())
    own, other = member("r"), msgspec.structs.replace(member("r", boot_id="B"), region="us")
    links.update([msgspec.structs.replace(own, region="eu"), other])
    await until(lambda: len(links) == 2)
    assert peers.names == ["r", "us/r"] and not any(peer.is_replaced for peer in peers.opened)
    task.cancel()
    await asyncio.wait([task])
