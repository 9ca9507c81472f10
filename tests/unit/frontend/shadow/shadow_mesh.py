"""A frontend with shadow traffic on a virtual clock: users behind one fake mesh, copies behind another."""

from __future__ import annotations

import random
from typing import Any

from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.models.detokenizer import ByteDetokenizer
from kvmesh.snapshot.content import Content, PoolTrack, Track
from kvmesh.snapshot.shadow import Shadow
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.request_spec import RequestSpec
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import Limits
from services.frontend.shadow.ledger import LeaseAnswer, LeaseRequest
from services.frontend.shadow.shadow_core import ShadowCore
from services.frontend.shadow.traffic import ShadowTraffic
from tests.unit.frontend.fake_mesh import DETACHED_S, TOKEN_BYTES, Client, FakeMesh, changed, spec

WALL_S = 1_800_000_000.0
"""Unix time at time 0 of the virtual clock."""


class Recorder:
    """Counts the ends of users' requests, as the metrics of tenants do."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str, int]] = []

    def on_end(self, request: Any) -> None:
        """Note the end."""
        tokens = len(request.progress.ids)
        self.ends.append((request.spec.request_id, request.outcome.name, tokens))


class Redis:
    """The ledger of one shadow, as lease_tokens.lua keeps it."""

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow
        self.taken = 0
        self.is_up = True

    def lease(self, request: LeaseRequest) -> LeaseAnswer | None:
        """Answer a call."""
        if not self.is_up:
            return None
        self.taken = max(0, self.taken - request.returned)
        granted = min(request.most, self.shadow.token_max - self.taken)
        granted = granted if granted >= request.least else 0
        self.taken += granted
        assert self.taken <= self.shadow.token_max
        return LeaseAnswer(granted, self.taken)


def shadow(**changes: Any) -> Shadow:
    """Return a shadow of every session to the pool "next"."""
    values: dict[str, Any] = {
        "id": "shadow-1",
        "to_pool": "next",
        "sample_permille": 1000,
        "token_max": 1_000_000,
        "expires_ms": round(1000 * (WALL_S + 10_000)),
    }
    return Shadow(**(values | changes))


def content(*shadows: Shadow, target_version: str = "v1") -> Content:
    """Return a content with three pools."""
    return Content(
        (
            PoolTrack("default", "v1", Track.STABLE, 100),
            PoolTrack("next", target_version),
            PoolTrack("young", "v1"),
        ),
        shadows=shadows,
    )


class ShadowMesh:
    """See the module. `with_tap`: users' requests go through the tap, as in the service."""

    def __init__(
        self,
        seed: int,
        *,
        with_tap: bool = True,
        target_version: str = "v1",
        router_count: int = 1,
    ) -> None:
        self.observer = Recorder()
        self.users = FakeMesh(
            FrontendCore(
                Limits(8, DETACHED_S, 16),
                limit=64,
                retries=RetryBudget(0.1, 3.0, 1000.0),
                jitter=random.Random(seed).random,
                observer=self.observer,
            ),
            random.Random(seed),
            2,
            (("default", "v1"),),
        )
        self.users.core.take_snapshot(content(target_version=target_version))
        self.with_tap = with_tap
        self.traffic = ShadowTraffic(
            self.users.core,
            lambda observer: ShadowCore(16, observer, 1000.0),
            detokenizer=lambda _: ByteDetokenizer(TOKEN_BYTES),
            share_tokenizer=lambda _, __: True,
            wall_s=lambda: WALL_S + self.now_s,
            boot_id="boot",
        )
        self.copies = FakeMesh(
            self.traffic.core,
            random.Random(seed + 1),
            router_count,
            (("next", target_version), ("young", "v1")),
        )
        self.target_version = target_version
        self.redis: Redis | None = None
        self.clients: list[Client] = []
        self.wakes = 0
        self.traffic.on_wake = self._woke
        for mesh in (self.users, self.copies):
            for router in mesh.routers:
                mesh.open(router)

    @property
    def now_s(self) -> float:
        """Time of the virtual clock."""
        return self.users.now_s

    def _woke(self) -> None:
        self.wakes += 1

    def take(self, *shadows: Shadow) -> None:
        """Put a snapshot with `shadows` in force."""
        if shadows:
            self.redis = Redis(shadows[0])
        self.traffic.take(content(*shadows, target_version=self.target_version), self.now_s)
        self.check()

    def begin(self, number: int, **changes: Any) -> Client:
        """Submit a user's request, and show it to the tap."""
        return self.begin_spec(changed(spec(number), pool="default", **changes))

    def begin_spec(self, wanted: RequestSpec) -> Client:
        """Submit a user's request of `wanted`, and show it to the tap."""
        client = Client(self.users.core, wanted, self.now_s)
        self.clients.append(client)
        if self.with_tap and self.traffic.shadow is not None:
            self.traffic.offer(client.request, self.now_s)
        self.check()
        return client

    def pump(self) -> None:
        """Do the work of the shell: pump, and answer a lease."""
        self.traffic.pump(self.now_s)
        ledger = self.traffic.ledger
        request = ledger.request(self.now_s) if self.redis is not None else None
        if request is not None and self.redis is not None:
            ledger.on_answer(self.redis.lease(request), self.now_s)
        self.traffic.pump(self.now_s)
        self.check()

    def advance(self, seconds: float) -> None:
        """Let time pass for users and copies alike."""
        self.users.advance(seconds)
        self.copies.advance(seconds)
        self.copies.now_s = self.users.now_s

    def settle(self, rounds: int = 1) -> None:
        """Let everything that waits happen, `rounds` times."""
        for _ in range(rounds):
            for client in self.clients:
                client.read(self.now_s)
            self.pump()
            self.users.settle()
            self.copies.settle()
        self.pump()

    def finish(self) -> None:
        """Let every request and every copy end."""
        for _ in range(3000):
            self.settle()
            self.traffic.sweep(self.now_s)
            self.check()
            is_done = all(client.is_done for client in self.clients)
            if is_done and self.traffic.is_idle:
                return
            self.advance(0.05)
        raise AssertionError(f"{self.traffic} does not end")

    def report(self, pool: str = "default", *, queue_delay_s: float = 0.0) -> None:
        """Let the routers of users report their queue delay."""
        for router in self.users.routers:
            assert router.pool == pool
            router.down.load(
                attach.LoadReport(
                    engine_ready=True, can_place=True, queue_delay_us=round(1e6 * queue_delay_s)
                )
            )
        self.users.settle()

    def check(self) -> None:
        """Check the invariants."""
        self.traffic.assert_consistent()
        self.traffic.core.assert_consistent()
        self.users.core.assert_consistent()
