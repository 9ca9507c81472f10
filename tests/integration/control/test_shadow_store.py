"""Documents of shadows in a real Redis: compare-and-set, a flushed Redis, the end of their life; the ledger's script."""

from __future__ import annotations

import asyncio
from pathlib import Path

from controlplane.actions import DocumentKind, WriteDocument
from controlplane.shadow import document as documents
from controlplane.store import shadow_documents
from controlplane.store.shadow_documents import LIFE_S, is_old, name_at
from kvmesh.clock import wall_s
from kvmesh.snapshot.shadow import Shadow
from services.frontend.shadow.lease_store import LeaseStore
from services.frontend.shadow.ledger import LeaseRequest
from tests.integration.control.test_store import linked, store
from tests.unit.controlplane.shadow.shadows import order


def writing(name: str, revision: int, replaces: int) -> WriteDocument:
    """Return the write of a document."""
    document = documents.ShadowDocument(order=order(name), revision=revision)
    return WriteDocument(DocumentKind.SHADOW, name, documents.encode(document), revision, replaces)


async def test_documents_of_shadows_are_kept_apart_from_rollouts(redis_url: str, tmp_path: Path) -> None:
    """A conflict is refused; a flushed Redis gets them back from memory, and an empty one from the disk."""
    name = name_at(wall_s(), ())
    async with store(redis_url, folder=tmp_path) as one:
        assert await one.write(writing(name, 1, 0)) is True
        assert await one.write(writing(name, 3, 1)) is True
        assert await one.write(writing(name, 2, 1)) is False
        found = await one.read()
        assert found is not None and not found.rollouts
        assert documents.decode(name, found.shadows[name]).revision == 3
        async with linked(redis_url) as link:
            await link.execute("FLUSHALL")
        found = await one.read()
        assert found is not None and name in found.shadows
    async with linked(redis_url) as link:
        await link.execute("FLUSHALL")
    async with store(redis_url, folder=tmp_path) as other:
        await other.load()
        found = await other.read()
        assert found is not None and documents.decode(name, found.shadows[name]).revision == 3
        async with linked(redis_url) as link:
            assert await link.execute("HLEN", "kvmesh:control:shadows") == 1


async def test_an_old_document_is_removed_everywhere(redis_url: str, tmp_path: Path) -> None:
    """Results of shadows live for a week. No leader puts them back."""
    old, young = name_at(wall_s() - LIFE_S - 60, ()), name_at(wall_s(), ())
    async with store(redis_url, folder=tmp_path) as one:
        assert await one.write(writing(old, 1, 0)) and await one.write(writing(young, 1, 0))
        found = await one.read()
        assert found is not None and list(found.shadows) == [young]
        assert [each.name for each in tmp_path.glob("shadow.*")] == [f"shadow.{young}.json"]
        async with linked(redis_url) as link:
            assert await link.execute("HKEYS", "kvmesh:control:shadows") == [young.encode()]


def test_ids_tell_their_time() -> None:
    """Two shadows of one second have two ids; an id without a time is old."""
    first = name_at(1_800_000_000.0, ())
    assert first == "shadow-20270115-080000" and name_at(1_800_000_000.0, (first,)) == f"{first}-2"
    assert not is_old(first, 1_800_000_000.0 + LIFE_S - 1) and is_old(f"{first}-2", 1_800_000_001.0 + LIFE_S)
    assert is_old("junk", 0.0) and shadow_documents.PREFIX == "shadow-"


async def test_the_ledger_never_grants_more_than_the_ceiling(redis_url: str) -> None:
    """Many frontends ask at once, give back, and meet junk in the key."""
    shadow = Shadow(id="s1", to_pool="next", sample_permille=1, token_max=10_000, expires_ms=1)
    async with linked(redis_url) as link:
        leases = LeaseStore(link, "kvmesh")
        asked = [LeaseRequest(100 + number, 400, 0) for number in range(60)]
        answers = await asyncio.gather(*(leases.lease(shadow, each) for each in asked))
        granted = [each.granted for each in answers if each is not None]
        assert len(granted) == 60 and 9_800 < sum(granted) <= 10_000
        assert all(each == 0 or each >= 100 for each in granted)
        back = await leases.lease(shadow, LeaseRequest(0, 0, 1_000))
        assert back is not None and back.granted == 0 and back.total == sum(granted) - 1_000
        again = await leases.lease(shadow, LeaseRequest(500, 900, 0))
        assert again is not None and again.granted == 900
        await link.execute("SET", "kvmesh:shadow:s1:ledger", "junk")
        fresh = await leases.lease(shadow, LeaseRequest(1, 10, 0))
        assert fresh is not None and (fresh.granted, fresh.total) == (10, 10)


async def test_a_minute_has_a_ceiling_of_its_own(redis_url: str) -> None:
    """A refusal says that it is the minute's."""
    shadow = Shadow(
        id="s2", to_pool="next", sample_permille=1, token_max=10_000, tokens_per_minute_max=500, expires_ms=1
    )
    async with linked(redis_url) as link:
        leases = LeaseStore(link, "kvmesh")
        totals = []
        for _ in range(20):  # at most two minutes are touched
            answer = await leases.lease(shadow, LeaseRequest(100, 200, 0))
            assert answer is not None
            totals.append(answer.granted)
            assert answer.granted or answer.is_minute
        assert 400 <= sum(totals) <= 1_000 and totals[-1] == 0


async def test_without_redis_there_is_no_lease() -> None:
    """The caller counts it as refused."""
    shadow = Shadow(id="s3", to_pool="next", sample_permille=1, token_max=1, expires_ms=1)
    async with linked("redis://127.0.0.1:1/0") as link:
        assert await LeaseStore(link, "kvmesh").lease(shadow, LeaseRequest(1, 1, 0)) is None
