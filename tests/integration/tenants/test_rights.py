"""The rights of the mesh's Redis user in docs/security.md suffice for tenants and their budgets, and none is
superfluous.
"""

from __future__ import annotations

import re

from kvmesh.buckets.ledger import Ledger
from kvmesh.buckets.limits import Account, Limit, Scope
from kvmesh.buckets.operations import Granted, Reserve, Settle, Settled, Show, Sweep
from kvmesh.config import ROOT, build
from kvmesh.redis_link import RedisLink
from kvmesh.tenants.store import CatalogueStore, change, restore


async def test_the_documented_rights_are_enough(redis_url: str) -> None:
    """Changes of tenants, notifications, and all paths of the script."""
    said = re.search(
        r"^user mesh on >PASSWORD (.*)$", (ROOT / "docs" / "security.md").read_text(), re.MULTILINE
    )
    assert said is not None
    admin = RedisLink(redis_url)
    await admin.execute("ACL", "SETUSER", "mesh", "reset", "on", ">PASSWORD", *said.group(1).split())
    link = RedisLink(redis_url.replace("redis://", "redis://mesh:PASSWORD@"))
    try:
        account = Account("acme", (Scope("organisation:acme", Limit(concurrency=3)),))
        granted, settled, *_ = await Ledger(link, "kvmesh").run(
            [Reserve(account, "r1", 10, 5.0), Settle(account, "r1", 7), Show(account), Sweep("acme")]
        )
        assert isinstance(granted, Granted)
        assert isinstance(settled, Settled)
        override = await change(link, "kvmesh", "tenant:search", lambda _: {"weight": 2.0})
        await restore(link, "kvmesh", {"tenant:search": override})
        store = CatalogueStore(link, build({"tenants": {"search": {}}}))
        await store.poll()
        found = store.catalogue.caller("search")
        assert found is not None
        assert found.tenant.weight == 2.0
        subscription = link.subscription()
        await link.guarded(subscription.subscribe("kvmesh:tenants-news"))
        await link.guarded(subscription.get_message(timeout=0.1))
        await subscription.aclose()
    finally:
        await link.close()
        await admin.execute("ACL", "DELUSER", "mesh")
        await admin.close()
