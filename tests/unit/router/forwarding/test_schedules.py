"""The core under random schedules: late, repeated and lost messages; peers that refuse, fail and vanish."""

from __future__ import annotations

import pytest

from services.router.forwarding.outlier_ejection import EJECT_AFTER
from tests.unit.router.peers import ORPHAN_S
from tests.unit.router.world import World


def assert_nothing_left(world: World) -> None:
    """Check that every entry, reservation and estimate is gone once all requests ended and detached streams expired."""
    for request in world.requests:
        if request.state not in ("done", "cancelled"):
            world.cancel(request)
    world.faults = False
    for _ in range(6):
        world.settle()
        world.advance(ORPHAN_S / 2 + 0.01)
        for peer in world.peers.values():
            peer.expire()
        for link in world.links:
            if link.down_outbox is None:
                link.attach()
            else:
                link.peer.report(link)
    world.settle()
    world.check()
    core = world.core
    assert not core.attempts.open, core.attempts.open
    assert not core.attempts.latest
    assert len(core.attempts.deadlines) == 0
    assert len(core.queue) == 0
    assert len(world.policy.backlog) == 0
    list(world.local_index.maintain())
    assert world.local_index.in_flight_block_count == 0
    for replica in core.replicas.values():
        assert not replica.slots
        assert replica.ejection.probe is None
        assert replica.load.state.block_reserved == 0
    for session in core.sessions:
        assert not session.slots
    for peer in world.peers.values():
        left = [run for run in peer.runs if run.state != "ended"]
        assert not left, f"{peer.name} still has {left}"


def finish_all(world: World) -> None:
    """Without further faults every request must finish."""
    world.faults = False
    for _ in range(40_000):
        world.step()
        if all(request.state in ("done", "cancelled") for request in world.requests):
            world.check()
            return
    unfinished = [request for request in world.requests if request.state not in ("done", "cancelled")]
    raise AssertionError(f"seed={world.seed}: {unfinished} never finished; {world.core.attempts.open}")


@pytest.mark.parametrize("seed", range(30))
def test_no_repeat_no_gap_no_leak(seed: int) -> None:
    """Under any faults, every request that ends has every token exactly once, and leaves nothing behind."""
    world = World(seed, prefills=seed % 3, decodes=1 + seed % 3, local_tokens=(0, 8, 100)[seed % 3])
    for round_ in range(1200):
        if round_ < 700 and world.rng.random() < 0.05:
            world.submit(world.new_request())
        if world.rng.random() < 0.004 and world.requests:
            world.cancel(world.rng.choice(world.requests))
        world.step()
        world.check()
    finish_all(world)
    assert_nothing_left(world)


@pytest.mark.parametrize("seed", range(6))
def test_beliefs_stay_within_the_blocks_of_the_engines(seed: int) -> None:
    """Under any faults the index believes at most the KV blocks of engines without events, and forgets them with them."""
    world = World(
        seed, local_tokens=(0, 100)[seed % 2], decode_blocks=(40, 60)[seed // 2 % 2], has_kv_events=False
    )
    most = 0
    for round_ in range(600):
        if round_ < 500 and world.rng.random() < 0.1:
            world.submit(world.new_request())
        world.step()
        world.check()
        most = max(most, *map(world.local_index.blocks_of, world.peers))
        assert most <= world.decode_blocks
    assert most
    finish_all(world)
    assert_nothing_left(world)
    assert not any(attempt.hashes for attempt in world.core.attempts.open)
    for name in world.peers:
        world.local_index.drop(name)
    list(world.local_index.maintain())
    world.local_index.assert_consistent()
    assert world.local_index.block_count == 0


@pytest.mark.parametrize("seed", range(12))
def test_without_faults_every_request_finishes_in_its_first_attempt(seed: int) -> None:
    """Delays alone lose nothing and repeat nothing."""
    world = World(seed, faults=False, prefills=seed % 3, decodes=1 + seed % 2)
    for _ in range(15):
        world.submit(world.new_request())
    finish_all(world)
    assert all(request.attempt == 1 for request in world.requests)
    assert_nothing_left(world)


@pytest.mark.parametrize("seed", range(12))
def test_no_probe_stays_open(seed: int) -> None:
    """Replicas are ejected and probed again and again. After any end of a probe, another probe is possible."""
    world = World(seed, prefills=1 + seed % 3, decodes=1 + seed % 2, local_tokens=(0, 8)[seed % 2])
    trials = 0
    for _ in range(1200):
        if world.rng.random() < 0.06:
            world.submit(world.new_request())
        if world.rng.random() < 0.01 and world.requests:
            world.cancel(world.rng.choice(world.requests))
        if world.rng.random() < 0.03:
            replica = world.rng.choice(list(world.core.replicas.values()))
            for _ in range(EJECT_AFTER):
                world.advance(0.001)
                replica.failed(world.now_s, world.now_s, "test")
        if world.rng.random() < 0.03:
            world.advance(1.0)
        before = {name: one.ejection.probe for name, one in world.core.replicas.items()}
        world.step()
        world.check()
        for name, one in world.core.replicas.items():
            trials += one.ejection.probe not in (None, before[name])
    finish_all(world)
    assert_nothing_left(world)
    assert trials >= 3, seed
