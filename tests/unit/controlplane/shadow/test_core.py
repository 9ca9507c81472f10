"""The core with a shadow: start, refusals, every end, and a leader without Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace as changed

from controlplane.command_queue import Author
from controlplane.rollouts.commands import CommandRefused
from controlplane.shadow import document as documents
from controlplane.shadow import tracking
from controlplane.shadow_operators import ShadowOperators
from controlplane.snapshots.desired import Desired
from controlplane.snapshots.publication import is_all_to_stable
from controlplane.snapshots.receivers import Receiver
from kvmesh.control.v1 import shadow_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2
from kvmesh.errors import MeshError
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.shadow import Shadow
from tests.unit.controlplane.test_core import Driver, lease
from tests.unit.controlplane.test_takeover import baking

NAME = "shadow-19700101-012320"
WALL_S = 5000.0


class ShadowDriver(Driver):
    """A leader with frontends and routers that know shadows."""

    capabilities: tuple[str, ...] = ("pools", "shadow")
    can_place = True

    def __init__(self, *stored: Any, **options: Any) -> None:
        super().__init__(*stored, frontends=("frontend-0",), **options)

    def tick(self, seconds: float = 1.0) -> None:
        """As Driver, with the capability of frontends, and with reports of routers."""
        super().tick(seconds)
        members = [
            changed(each, capabilities=self.capabilities) if each.role == "frontend" else each
            for each in self.core.registry.members.values()
        ]
        self.core.on_members(members, self.now_s)
        for pool in self.core.versions():
            name = f"{pool}-router-0"
            receiver = self.core.receivers.get(name, "b")
            if receiver is None:
                receiver = Receiver(name, "b", "router", pool)
                self.core.on_hello(receiver, None, (), self.now_s)
            self.core.on_report(receiver, snapshot_pb2.ReceiverReport(can_place=self.can_place), self.now_s)
        self.perform()

    def wait(self) -> None:
        """Let the time between two writes of a document pass."""
        for _ in range(round(tracking.WRITE_S) + 1):
            self.tick()

    @property
    def operators(self) -> ShadowOperators:
        """Commands of operators."""
        return ShadowOperators(self.core, lambda: WALL_S + self.now_s)

    def start(self, ticket: int = 1, **fields: Any) -> None:
        """Start a shadow to `next`."""
        prepared, _ = self.operators.start(request(**fields), Author("ann"), NAME)
        prepared.run(self.now_s, self.core.library)
        self.core.command(prepared.command(ticket, Author("ann"), self.core.library), self.now_s)
        self.perform()

    def report(self, **fields: Any) -> None:
        """Send a report of the frontend."""
        receiver = Receiver("frontend-0", "b", "frontend", "")
        self.core.on_shadows(receiver, [pb.ShadowReport(shadow=NAME, boot_id="b", **fields)], self.now_s)
        self.perform()

    @property
    def document(self) -> documents.ShadowDocument:
        """The document of the shadow as Redis has it."""
        return documents.decode(NAME, self.shadows[NAME])


def published(driver: ShadowDriver) -> tuple[Shadow, ...]:
    """Return the shadows in force."""
    return driver.core.content.shadows


def request(ttl_s: int = 3600, **fields: Any) -> pb.StartShadowRequest:
    """Return a request to copy every session to `next`."""
    values: dict[str, Any] = {"to_pool": "next", "sample_permille": 1000, "token_max": 1000}
    made = pb.StartShadowRequest(settings=pb.Shadow(**(values | fields)))
    made.ttl.seconds = ttl_s
    return made


def leading(**options: Any) -> ShadowDriver:
    """Return a leader."""
    driver = ShadowDriver(**options)
    driver.lead(10)
    return driver


def test_a_shadow_is_published_reported_and_stopped() -> None:
    """The snapshot carries the order, the document the results, and both survive the leader in Redis."""
    driver = leading()
    driver.start()
    assert driver.done == {1: ""}
    (shadow,) = published(driver)
    assert (shadow.id, shadow.to_pool, shadow.token_max) == (NAME, "next", 1000)
    assert driver.sent[-1].content.shadows == (shadow,)
    driver.report(sequence=1, counts=pb.ShadowCounts(sampled=5, copied=4))
    driver.wait()
    assert driver.document.counts().copied == 4 and driver.document.ended_s == 0.0
    stop = driver.operators.stop(pb.StopShadowRequest())
    driver.core.command(stop.command(2, Author("ann"), driver.core.library), driver.now_s)
    driver.perform()
    driver.tick()
    assert driver.done[2] == "" and published(driver) == ()
    driver.report(sequence=2, counts=pb.ShadowCounts(sampled=5, copied=5))
    driver.wait()
    assert driver.document.is_over and driver.document.end_reason == tracking.STOPPED
    assert driver.document.counts().copied == 5, "the last report may follow the end"
    later = ShadowDriver()
    later.shadows = driver.shadows
    later.lead(10)
    known = later.core.shadows.get(NAME)
    assert known is not None and known.counts().copied == 5


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"to_pool": "stable"}, "settings.to_pool"),
        ({"to_pool": "gone"}, "a pool beside the stable one: next"),
        ({"baseline_pool": "next"}, "settings.baseline_pool"),
        ({"sample_permille": 0}, "settings.sample_permille is 0"),
        ({"token_max": 0}, "settings.token_max is 0"),
        ({"first_tokens": 5}, "settings.first_tokens is 5"),
        ({"ttl_s": 5}, "ttl is 5 s"),
        ({"ttl_s": 100_000}, "ttl is 100000 s"),
    ],
)
def test_bad_settings_are_refused_with_field_value_and_range(fields: dict[str, Any], text: str) -> None:
    """Nothing is written."""
    driver = leading()
    with pytest.raises(MeshError) as refused:
        driver.start(**fields)
    assert text in str(refused.value) or any(
        text in each for each in map(str, [refused.value, refused.value.metadata])
    )
    assert not driver.core.content.shadows


def test_a_mesh_that_cannot_serve_copies_refuses_them_by_name() -> None:
    """A frontend of the last release, and a pool that cannot place."""
    driver = leading()
    driver.capabilities = ("pools",)
    driver.tick()
    with pytest.raises(CommandRefused, match='no capability "shadow": frontend-0'):
        driver.start()
    driver.capabilities, driver.can_place = ("pools", "shadow"), False
    driver.tick()
    with pytest.raises(CommandRefused, match='the pool "next" cannot place requests'):
        driver.start()
    driver.can_place = True
    driver.tick()
    driver.start()
    with pytest.raises(CommandRefused, match=f'the shadow "{NAME}" runs already'):
        prepared, _ = driver.operators.start(request(), Author(), "shadow-2")
        prepared.run(driver.now_s, driver.core.library)


def _expires(driver: ShadowDriver) -> None:
    for _ in range(12):
        driver.tick()


def _ceiling(driver: ShadowDriver) -> None:
    driver.report(sequence=1, off_reason="ceiling", ledger_tokens=990)
    driver.tick()


def _rollback(driver: ShadowDriver) -> None:
    running = baking(1, 10)
    driver.core.library.adopt(changed(running, revision=5))
    driver.tick()
    driver.abort()
    driver.tick()


@pytest.mark.parametrize(
    ("ends", "reason"),
    [(_expires, tracking.EXPIRED), (_ceiling, tracking.CEILING), (_rollback, tracking.ROLLED_BACK)],
)
def test_the_leader_ends_a_shadow_by_itself(ends: Callable[[ShadowDriver], None], reason: str) -> None:
    """Time, ceiling and a rollback end it: the next snapshot has no shadow, the document says why."""
    driver = leading()
    driver.start(ttl_s=10)
    assert driver.core.content.shadows
    ends(driver)
    assert driver.core.content.shadows == ()
    assert driver.core.library.desired.shadow is None
    driver.wait()
    assert driver.document.end_reason == reason
    assert any(event.what == "shadow.ended" and event.result == reason for event in driver.events)


def test_a_shadow_ends_without_redis() -> None:
    """Taking copies away needs neither Redis nor a certain lease."""
    driver = leading()
    driver.start()
    driver.answers, driver.reads = None, False
    driver.core.on_store(None, driver.now_s)
    stop = driver.operators.stop(pb.StopShadowRequest())
    driver.core.command(stop.command(2, Author("ann"), driver.core.library), driver.now_s)
    driver.perform()
    assert driver.done[2] == "" and driver.core.content.shadows == ()


def test_a_new_shadow_is_a_step_forward_and_none_is_a_step_back() -> None:
    """So a leader with a doubtful lease may end one, and never start one."""
    driver = leading()
    before = driver.core.content
    driver.start()
    after: Content = driver.core.content
    assert not is_all_to_stable(before, after) and is_all_to_stable(after, before)


def test_a_revert_to_stable_ends_a_shadow() -> None:
    """All to stable, shadows off."""
    driver = leading()
    driver.start()
    desired = driver.core.library.desired.with_stable("stable", "", 0)
    assert isinstance(desired, Desired) and desired.shadow is None


def test_a_frontend_of_another_mesh_role_cannot_fill_the_leader() -> None:
    """Reports of unknown shadows are ignored."""
    driver = leading()
    driver.core.on_shadows(
        Receiver("frontend-0", "b", "frontend", ""), [pb.ShadowReport(shadow="x", boot_id="b")], driver.now_s
    )
    assert driver.core.shadows.all == [] and lease("x").process_id == "x"
