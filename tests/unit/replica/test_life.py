"""The life of a replica: held only while a leader that drives lives is heard, never back, proved only by an order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import OUT_OF_SERVICE, SLOW_START_S, LifeState
from kvmesh.replica.life import SELF_SERVE_S, STATES, TEXT_CHARACTERS_MAX, Order, ReplicaLife, order_of
from kvmesh.replica.life_view import IN_SERVICE, LifeView

BOOT = "engine-1"
HELD = [state for state in LifeState if state.is_held]


def life(*, is_control_known: bool = True, boot_id: str = BOOT) -> ReplicaLife:
    """Return a life that began at 0, with its engine."""
    one = ReplicaLife(0.0)
    one.start(0.0, is_control_known=is_control_known)
    one.on_engine(boot_id, 0.0, is_control_known=is_control_known)
    return one


def driven(state: LifeState | None = None, **more: object) -> ReplicaLife:
    """Return a life whose leader drives it, after an order to `state`."""
    one = life()
    one.on_leader(0.0, drives_lives=True)
    if state is not None:
        assert one.on_order(Order(state, BOOT, **more), 0.0)  # type: ignore[arg-type]
    return one


@dataclass
class Facts:
    """Facts about the present boot of the engine, kept by the test alone."""

    held_s: float = 0.0
    heard_s: float = float("-inf")
    is_proof_known: bool = False
    is_quarantined: bool = False
    boots: int = 1
    states: list[LifeState] = field(default_factory=list)

    def boot(self, now_s: float) -> str:
        """Begin another boot."""
        self.held_s, self.is_proof_known, self.is_quarantined = now_s, False, False
        self.boots += 1
        self.states = []
        return f"engine-{self.boots}"


@pytest.mark.parametrize("seed", range(200))
def test_invariants_hold_under_any_schedule(seed: int) -> None:
    """Never held for SELF_SERVE_S without a message of a driving leader, never back, proved by orders alone."""
    chance, now_s, facts = random.Random(seed), 0.0, Facts()
    one = life(is_control_known=chance.random() < 0.8)
    drives: bool | None = None
    for step in range(300):
        was = repr(one.report(now_s, is_engine_lost=False)), one.view()
        kind = chance.choice(("pass", "pass", "leader", "order", "order", "boot", "same boot"))
        if kind == "pass":
            until_s = now_s + chance.choice((0.1, 1.0, 4.9, 6.0))
            while (wake_s := one.next_wake_s()) is not None and wake_s <= until_s:
                now_s = max(now_s, wake_s)
                one.on_timer(now_s)
            now_s = until_s
        elif kind == "leader":
            drives = chance.random() < 0.9
            facts.heard_s = now_s if drives else facts.heard_s
            one.on_leader(now_s, drives_lives=drives)
            assert drives or not one.is_held, f"seed={seed} step={step}: held beside a leader without orders"
        elif kind == "order":
            is_other = chance.random() < 0.2
            order = Order(
                chance.choice([*LifeState]),
                "engine-0" if is_other else f"engine-{facts.boots}",
                is_proved=chance.random() < 0.5,
                has_slow_start=chance.random() < 0.5,
            )
            is_taken = one.on_order(order, now_s)
            if is_other or not drives or order.state.rank < max((s.rank for s in facts.states), default=0):
                assert not is_taken, f"seed={seed} step={step}: {order} was taken"
            if not is_taken:
                assert was == (repr(one.report(now_s, is_engine_lost=False)), one.view()), (
                    f"seed={seed} step={step}"
                )
            else:
                facts.is_proof_known |= order.state is LifeState.SERVING and order.is_proved
                facts.is_quarantined |= order.state is LifeState.QUARANTINED
        elif kind == "boot" and chance.random() < 0.3:
            is_known = chance.random() < 0.5
            one.on_engine(facts.boot(now_s), now_s, is_control_known=is_known)
            is_heard = now_s - facts.heard_s < SELF_SERVE_S
            assert one.is_held == (drives is not False and (is_heard or is_known)), f"seed={seed} step={step}"
        else:
            one.on_engine(chance.choice(("", f"engine-{facts.boots}")), now_s, is_control_known=True)
        facts.states.append(one.state)
        ranks = [state.rank for state in facts.states]
        assert ranks == sorted(ranks), f"seed={seed} step={step}: {facts.states[-2:]}"
        if one.is_held:
            assert now_s - max(facts.held_s, facts.heard_s) < SELF_SERVE_S, f"seed={seed} step={step}: {one}"
        assert (one.state is LifeState.QUARANTINED) == facts.is_quarantined, f"seed={seed} step={step}"
        assert not one.is_proved or (facts.is_proof_known and one.state is LifeState.SERVING)
        assert not (one.is_proved and one.is_self_served)
        assert (one.view().slow_start_s is None) or one.state is LifeState.SERVING
        assert (one.next_wake_s() is not None) == one.is_held


def test_without_a_control_process_a_replica_serves_at_once() -> None:
    """As a mesh without a control plane always did: no proof, no slow start, also after the engine is started anew."""
    one = life(is_control_known=False)
    assert one.state is LifeState.SERVING and one.is_self_served and not one.is_proved
    one.on_engine("engine-2", 7.0, is_control_known=False)
    assert one.state is LifeState.SERVING and one.view() == IN_SERVICE and one.has_contact
    report = one.report(8.0, is_engine_lost=True)
    assert report.engine_boot_id == "engine-2" and report.age_ms == 1000 and report.self_served


def test_a_leader_that_drives_no_lives_holds_no_replica() -> None:
    """Such a leader sends heartbeats and no orders."""
    one = life()
    contacts = [one.has_contact]
    one.on_leader(0.5, drives_lives=False)
    assert one.view() == IN_SERVICE and [*contacts, one.has_contact] == [False, True]
    one.on_engine("engine-2", 1.0, is_control_known=True)
    assert one.view() == IN_SERVICE
    assert not one.on_order(Order(LifeState.QUARANTINED, "engine-2"), 1.0)


def test_a_held_replica_serves_by_itself_when_its_leader_is_silent() -> None:
    """Five seconds after the last message: unproved, with a slow start, in every held state."""
    for state in HELD:
        one = driven(state)
        one.on_leader(3.0, drives_lives=True)
        assert one.next_wake_s() == 3.0 + SELF_SERVE_S
        one.on_timer(3.0 + SELF_SERVE_S - 0.001)
        assert one.state is state
        one.on_timer(3.0 + SELF_SERVE_S)
        assert one.state is LifeState.SERVING and one.is_self_served and not one.is_proved
        assert one.view().slow_start_age_ms(9.0) == 1000


def test_an_order_later_proves_a_replica_that_served_by_itself() -> None:
    """The proof ends its slow start. No later order takes the proof, or the replica out of service."""
    one = driven(LifeState.WARMING)
    one.on_timer(SELF_SERVE_S)
    one.on_leader(8.0, drives_lives=True)
    for state in HELD:
        assert not one.on_order(Order(state, BOOT), 8.0)
    assert one.on_order(Order(LifeState.SERVING, BOOT, is_proved=True), 8.0)
    assert one.is_proved and not one.is_self_served and one.view() == IN_SERVICE
    assert one.on_order(Order(LifeState.SERVING, BOOT), 9.0)
    assert one.is_proved


def test_only_another_boot_of_the_engine_ends_a_quarantine() -> None:
    """Wrong tokens keep a replica out of service, whatever is heard and for how long."""
    one = driven(LifeState.SERVING)
    assert one.on_order(Order(LifeState.QUARANTINED, BOOT, reason="wrong tokens"), 1.0)
    one.on_timer(1_000.0)
    one.on_leader(1_000.0, drives_lives=False)
    assert one.view() == LifeView(LifeState.QUARANTINED, "wrong tokens") and one.next_wake_s() is None
    one.on_engine("engine-2", 1_001.0, is_control_known=False)
    assert one.state is LifeState.SERVING and one.reason == ""


def test_the_first_boot_id_of_an_engine_is_no_restart() -> None:
    """Orders for an engine without a boot id are taken until it reports one; its state then stays."""
    one = life(boot_id="")
    one.on_leader(0.0, drives_lives=True)
    assert one.on_order(Order(LifeState.WARMING, ""), 0.0)
    one.on_engine("engine-7", 1.0, is_control_known=True)
    assert one.state is LifeState.WARMING
    assert not one.on_order(Order(LifeState.SEEDING, ""), 1.0)


def test_a_slow_start_begins_with_the_service_and_ends_by_itself() -> None:
    """Its age is at least 1 ms, because 0 means none, and a second order does not begin it again."""
    one = driven(LifeState.SERVING, has_slow_start=True)
    one.on_order(Order(LifeState.SERVING, BOOT, has_slow_start=True), 10.0)
    ages = [one.view().slow_start_age_ms(at_s) for at_s in (0.0, 10.0, SLOW_START_S - 0.001, SLOW_START_S)]
    assert ages == [1, 10_000, 29_999, 0]


def test_hostile_orders_are_bounded_or_ignored() -> None:
    """Long texts are cut, unknown states are no orders."""
    order = order_of(pb.LifeOrder(state=pb.REPLICA_STATE_WARMING, reason="x" * 9_999, package="y" * 9_999))
    assert order is not None and len(order.reason) == len(order.package) == TEXT_CHARACTERS_MAX
    assert order_of(pb.LifeOrder()) is None
    unknown = pb.LifeOrder.FromString(b"\x08\x63")  # state 99, of a later release
    assert order_of(unknown) is None


def test_each_state_of_the_protocol_is_a_state_here() -> None:
    """REPLICA_STATE_UNSPECIFIED alone is none."""
    assert {*STATES} == {*pb.ReplicaState.values()} - {pb.REPLICA_STATE_UNSPECIFIED}
    assert {state.value for state in LifeState} - OUT_OF_SERVICE == {"serving"}
