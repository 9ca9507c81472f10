"""Budgets on a Redis Cluster of three nodes: the same script, each organisation on one node, many in one batch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings

from kvmesh.buckets.ledger import Ledger
from kvmesh.buckets.limits import Account, Limit, Scope
from kvmesh.buckets.operations import Granted, Reserve, Settle, Settled, Show, Shown
from kvmesh.buckets.wire import keys
from kvmesh.redis_link import RedisLink, RedisUnavailable
from tests.integration.buckets.cluster import Cluster, ask, running
from tests.integration.buckets.schedules import Step, schedules
from tests.integration.buckets.test_reference_budget import Bench
from tests.integration.containers.plan import IMAGES

MESH = "cluster-test"


def account(organisation: str) -> Account:
    """Return an account of two scopes."""
    limit = Limit(6000, 100, 600_000, 10_000, 10)
    return Account(
        organisation, (Scope(f"organisation:{organisation}", limit), Scope("tenant:search", limit))
    )


@pytest.fixture(scope="module")
def cluster(needs_images: Callable[..., None]) -> Iterator[Cluster]:
    """Three nodes, started once for all tests of this module because the start takes seconds."""
    needs_images(IMAGES["redis"])
    with running() as cluster:
        yield cluster


@pytest_asyncio.fixture
async def link(cluster: Cluster) -> AsyncIterator[RedisLink]:
    """A link to the nodes by name."""
    link = RedisLink(cluster.url)
    yield link
    await link.close()


@pytest.fixture
def bench(cluster: Cluster) -> Iterator[Bench]:
    """The bench of the comparison with the reference implementation, on the Cluster."""
    bench = Bench(cluster.url, cluster.forget_scripts)
    yield bench
    bench.close()


@given(steps=schedules())
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_the_script_is_its_twin_on_a_cluster(bench: Bench, steps: list[Step]) -> None:
    """The same comparison; each example is an organisation of its own, so the examples use all nodes."""
    bench.compare(steps)


async def test_one_batch_reaches_every_node(cluster: Cluster, link: RedisLink) -> None:
    """Operations of many organisations are answered in order, and each node has some of the keys."""
    ledger = Ledger(link, MESH)
    accounts = [account(f"spread-{index}") for index in range(40)]
    nodes = {cluster.node_of(keys(MESH, each.organisation)[0]) for each in accounts}
    assert nodes == {0, 1, 2}
    reserves = [Reserve(each, "r", 10 * at, 15) for at, each in enumerate(accounts)]
    answers = await ledger.run(reserves)
    assert [each.remaining.tokens for each in answers if isinstance(each, Granted)] == [
        10_000 - 10 * at for at in range(40)
    ]
    settled = await ledger.run([Settle(each, "r", 5) for each in accounts])
    assert [each.refunded for each in settled if isinstance(each, Settled)] == [
        max(0, 10 * at - 5) for at in range(40)
    ]


async def test_a_budget_survives_the_move_of_its_slot(cluster: Cluster, link: RedisLink) -> None:
    """The new node does not know the script yet; the answers continue from the same state."""
    ledger, mine = Ledger(link, MESH), account("mover")
    assert isinstance((await ledger.run([Reserve(mine, "before", 100, 15)]))[0], Granted)
    ask(cluster.nodes[(cluster.node_of(keys(MESH, "mover")[0]) + 1) % 3], "SCRIPT", "FLUSH")
    cluster.move(keys(MESH, "mover"))
    again, settled, shown = await ledger.run(
        [Reserve(mine, "before", 100, 15), Settle(mine, "before", 130), Show(mine)]
    )
    assert isinstance(again, Granted) and again.is_repeated
    assert isinstance(settled, Settled) and settled.overrun == 30
    assert isinstance(shown, Shown) and shown.ledger_totals.reserved == shown.ledger_totals.settled == 100


async def test_a_frozen_node_raises_redis_away(cluster: Cluster, link: RedisLink) -> None:
    """Operations on budgets of this node raise RedisUnavailable; the budgets are intact when the node is back."""
    ledger = Ledger(link, MESH)
    accounts = [account(f"away-{index}") for index in range(12)]
    here = {cluster.node_of(keys(MESH, each.organisation)[0]): each for each in accounts}
    assert len(await ledger.run([Reserve(each, "r", 1, 15) for each in here.values()])) == 3
    ask(cluster.nodes[1], "CLIENT", "PAUSE", 1500, "ALL")
    with pytest.raises(RedisUnavailable) as caught:
        await ledger.run([Reserve(here[1], "s", 1, 15)])
    assert caught.value.is_transient
    assert isinstance((await ledger.run([Reserve(here[0], "s", 1, 15)]))[0], Granted)
    ask(cluster.nodes[1], "PING")  # is answered after the pause
    back = (await ledger.run([Reserve(here[1], "s", 1, 15)]))[0]
    assert isinstance(back, Granted)
