"""Limits of one tenant over two regions, each with counts of its own in Redis, under full and one-way cuts."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import AsyncExitStack
from hashlib import sha256
from typing import Any, Final

import pytest

from controlplane.regions.declared import Declared, DeclaredState
from controlplane.regions.regions import Regions
from controlplane.regions.settings import RegionSettings
from kvmesh.errors import from_rpc_error
from kvmesh.snapshot.content import Content, PoolTrack, Track
from kvmesh.snapshot.published import Term, publish
from kvmesh.snapshot.regions import PERMILLE, RegionEntry
from tests.integration.frontend.conftest import CONFIG, Serving, serving_frontend, until
from tests.integration.frontend.scripted_router import Pool, serving_router
from tests.integration.frontend.test_generate import error_of, request

NAMES: Final = ("eu", "us")
LIMIT: Final = 6
"""Requests at a time that the tenant may have in all regions together."""

KEY: Final = "kvm_agents"
DOWN_S: Final = 20.0
"""A region is hard down after 6 s of failed probes."""


def tables(own: str) -> dict[str, Any]:
    """Return the configuration of a region. Its mesh has a name of its own: both use one Redis server in this test."""
    return {
        "mesh": {"name": f"limits-{own}"},
        "region": {"name": own},
        "regions": {name: {"control": [f"127.0.0.{at}:1"]} for at, name in enumerate(NAMES, start=1)},
        "tenants": {"agents": {"concurrency": LIMIT}},
        "keys": {"agents": {"tenant": "agents", "sha256": sha256(KEY.encode()).hexdigest()}},
    }


def shares(unreachable: Collection[tuple[str, str]], drained: str) -> dict[str, float]:
    """Return the share that each region decides to enforce. `unreachable`: pairs of an observer and its lost target."""
    found = {}
    for own in NAMES:
        regions = Regions(own, NAMES, RegionSettings())
        for name in NAMES:
            if name == drained:
                regions.on_declared(
                    name, Declared(state=DeclaredState.DRAINED, revision=1, reason="move"), 60.0, 0.0
                )
        now_s = 0.0
        while now_s < DOWN_S:
            now_s += 1.0
            for name in NAMES:
                regions.on_probe(name, (own, name) not in unreachable, now_s)
            regions.step(now_s)
        found[own] = regions.limit_share(now_s)
    return found


def apply(serving: Serving, own: str, share: float) -> None:
    """Give a frontend the snapshot of its control plane."""
    entry = RegionEntry(own, limit_share_permille=round(share * PERMILLE))
    content = Content((PoolTrack("default", CONFIG.engine.salt, Track.STABLE, 100),), regions=(entry,))
    serving.frontend.on_snapshot(publish(Term(1, "control-0"), 1, content))


@pytest.mark.parametrize(
    ("unreachable", "drained", "admitted"),
    [
        ([], "", {"eu": 3, "us": 3}),
        ([("eu", "us"), ("us", "eu")], "", {"eu": 6, "us": 6}),
        ([("eu", "us")], "", {"eu": 6, "us": 3}),
        ([], "us", {"eu": 6, "us": 1}),
        ([("us", "eu")], "us", {"eu": 6, "us": 6}),
    ],
    ids=["no cut", "full cut", "one-way cut", "drained", "drained, cut"],
)
async def test_regions_together_admit_at_most_their_shares_and_what_they_borrow(
    redis_url: str,
    pool: Pool,
    unreachable: list[tuple[str, str]],
    drained: str,
    admitted: dict[str, int],
) -> None:
    """From the decision through the snapshot to the reservation in Redis. Two regions admit at most twice a limit."""
    pool.hold_at = "queued"
    decided = shares(unreachable, drained)
    running: list[Any] = []
    found = {}
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving_router(pool, "router-0"))
        for own in NAMES:
            serving = await stack.enter_async_context(serving_frontend(redis_url, tables(own)))
            serving.route([("router-0", address)])
            await serving.until_up(1)
            apply(serving, own, decided[own])
            wanted = admitted[own]
            tenants = serving.frontend.tenants

            def allowed(tenants: Any = tenants) -> int:
                return int(tenants.catalogue.caller("agents").account.scopes[0].limit.concurrency)

            await until(lambda: allowed() == wanted, f"{own} enforces {wanted}, not {allowed()}")  # noqa: B023  # awaited here
            bearer = (("authorization", f"Bearer {KEY}"),)
            calls = [serving.stub.Generate(request(4), metadata=bearer) for _ in range(2 * LIMIT)]
            errors = [asyncio.ensure_future(error_of(each)) for each in calls]
            refused = 2 * LIMIT - wanted
            await until(lambda: sum(each.done() for each in errors) == refused, f"{refused} refused in {own}")  # noqa: B023
            reasons = {from_rpc_error(each.result()).reason for each in errors if each.done()}
            assert reasons == {"CONCURRENCY_EXCEEDED"}
            found[own] = len(errors) - refused
            running += [(one, error) for one, error in zip(calls, errors, strict=True) if not error.done()]
        assert found == admitted and sum(found.values()) <= len(NAMES) * LIMIT
        assert len(pool.runs) == sum(found.values())
        for one, error in running:
            one.cancel()
            error.cancel()
