"""The life of a replica: it is held until the control plane has warmed it up. Pure.

The state machine:

    STARTING -> WARMING -> SEEDING -> PROBING -> SERVING    by orders of the leader, which may skip states
    a held state -> SERVING                                 self-service
    any state -> QUARANTINED                                by an order, or an engine that an earlier process quarantined
    any state -> STARTING                                   the engine was started anew

Self-service: without any control process, with a leader that drives no lives, or SELF_SERVE_S after the last message of
the leader that drives them.

INVARIANT: within one boot of the engine the state never goes back, except to QUARANTINED, which only a new boot ends.
INVARIANT: no replica is held for longer than SELF_SERVE_S without a message of a leader that drives lives.
INVARIANT: `is_proved` only after an order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState
from kvmesh.replica.life_view import LifeView

SELF_SERVE_S: Final = 5.0
"""A held replica that hears no leader for this long serves by itself. A takeover of a control process may take as long."""

TEXT_CHARACTERS_MAX: Final = 200
"""A longer reason or package name of an order is cut."""

KEPT_OUT: Final = "its engine gave wrong golden tokens before the service was started anew"

STATES: Final = {pb.ReplicaState.Value(f"REPLICA_STATE_{state.name}"): state for state in LifeState}
"""State by its number in protocol messages."""

_NUMBERS: Final = {state: number for number, state in STATES.items()}
_NEVER: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class Order:
    """An order of the leader. `engine_boot_id`: the engine for which it was made."""

    state: LifeState
    engine_boot_id: str
    is_proved: bool = False
    has_slow_start: bool = False
    reason: str = ""
    package: str = ""


def order_of(message: pb.LifeOrder) -> Order | None:
    """Return the order in `message`. None: its state is unknown here."""
    state = STATES.get(message.state)
    if state is None:
        return None
    return Order(
        state,
        message.engine_boot_id,
        is_proved=message.proved,
        has_slow_start=message.slow_start,
        reason=message.reason[:TEXT_CHARACTERS_MAX],
        package=message.package[:TEXT_CHARACTERS_MAX],
    )


class ReplicaLife:
    """See the module. It begins in STARTING; `start` follows once the leases of control processes were read."""

    def __init__(self, now_s: float, quarantined: str = "") -> None:
        """`quarantined`: boot id of an engine that was quarantined before this process started. Empty: none."""
        self.state = LifeState.STARTING
        self.engine_boot_id = ""
        """Empty: the engine has not reported a boot id."""
        self.is_proved = False
        """True if the replica serves and every proof of the warm-up is there."""
        self.is_self_served = False
        """True if the replica serves without an order."""
        self.reason = ""
        """The reason in the last order, for people."""
        self.package = ""
        """The package in the last order. Empty: none."""
        self.since_s = now_s
        """Time at which the present state began."""
        self._quarantined = quarantined
        self._slow_start_s: float | None = None
        self._held_s = now_s
        """Time at which the replica was last held."""
        self._heard_s = _NEVER
        """Time of the last message of a leader that drives lives."""
        self._is_driven: bool | None = None
        """True if the last leader drives lives. None: no leader was heard."""

    def __repr__(self) -> str:
        proved = " proved" if self.is_proved else ""
        return f"ReplicaLife({self.state.value}{proved}, engine {self.engine_boot_id!r})"

    @property
    def is_held(self) -> bool:
        """True while the replica is warmed up before it serves."""
        return self.state.is_held

    @property
    def has_contact(self) -> bool:
        """True if it is settled whether a leader drives the life: one was heard, or the replica is not held."""
        return not self.is_held or self._is_driven is not None

    def view(self) -> LifeView:
        """Return the part of the life that the core of the replica needs."""
        return LifeView(self.state, self.reason, self._slow_start_s)

    def report(self, now_s: float, *, is_engine_lost: bool) -> pb.ReplicaLife:
        """Return the life for the control plane. `is_engine_lost`: the engine does not answer."""
        return pb.ReplicaLife(
            state=_NUMBERS[self.state],
            engine_boot_id=self.engine_boot_id,
            proved=self.is_proved,
            self_served=self.is_self_served,
            age_ms=max(0, round((now_s - self.since_s) * 1000)),
            package=self.package,
            engine_lost=is_engine_lost,
        )

    def start(self, now_s: float, *, is_control_known: bool) -> None:
        """Begin. `is_control_known`: a control process has a lease. Without one the replica serves at once."""
        self._begin(now_s, is_control_known=is_control_known)

    def on_engine(self, boot_id: str, now_s: float, *, is_control_known: bool) -> None:
        """Take the boot id of the engine. Another one than before begins a new life. Empty: unknown, ignored."""
        known = self.engine_boot_id
        if not boot_id or boot_id == known:
            return
        self.engine_boot_id = boot_id
        if boot_id == self._quarantined:
            self._enter(LifeState.QUARANTINED, now_s)
            self.is_proved = self.is_self_served = False
            self._slow_start_s = None
            self.reason = KEPT_OUT
        elif known:
            self._begin(now_s, is_control_known=is_control_known)

    def on_leader(self, now_s: float, *, drives_lives: bool) -> None:
        """Take any message of a leader. A held replica serves at once if the leader drives no lives."""
        self._is_driven = drives_lives
        if drives_lives:
            self._heard_s = now_s
        elif self.is_held:
            self._serve_alone(now_s)

    def on_order(self, order: Order, now_s: float) -> bool:
        """Take an order. Return False if it is ignored: for another engine, back, or of a leader that drives no lives."""
        if not self._is_driven or order.engine_boot_id != self.engine_boot_id:
            return False
        if order.state.rank < self.state.rank:  # QUARANTINED has the highest rank
            return False
        if order.state is LifeState.SERVING:
            self._take_serving(order, now_s)
        elif order.state is LifeState.QUARANTINED:
            self.is_proved = self.is_self_served = False
            self._slow_start_s = None
        self._enter(order.state, now_s)
        self.reason, self.package = order.reason, order.package
        return True

    def next_wake_s(self) -> float | None:
        """Return the time of the self-service, or None while the replica is not held."""
        return max(self._held_s, self._heard_s) + SELF_SERVE_S if self.is_held else None

    def on_timer(self, now_s: float) -> None:
        """Serve if the time has come. The replica may be cold, so routers send it less work at first."""
        wake_s = self.next_wake_s()
        if wake_s is not None and now_s >= wake_s:
            self._serve_alone(now_s)
            self._slow_start_s = now_s

    def _begin(self, now_s: float, *, is_control_known: bool) -> None:
        self.is_proved = self.is_self_served = False
        self.reason = self.package = ""
        self._slow_start_s = None
        self._held_s = now_s
        self.state, self.since_s = LifeState.STARTING, now_s
        is_heard = now_s - self._heard_s < SELF_SERVE_S
        if self._is_driven is False or not (is_heard or is_control_known):
            self._serve_alone(now_s)

    def _serve_alone(self, now_s: float) -> None:
        self.is_self_served = True
        self._enter(LifeState.SERVING, now_s)

    def _take_serving(self, order: Order, now_s: float) -> None:
        """Take the fields of an order to serve. A proof that is there stays."""
        if self.state is not LifeState.SERVING:
            self._slow_start_s = now_s if order.has_slow_start else None
        elif order.is_proved and not order.has_slow_start:
            self._slow_start_s = None
        self.is_proved = self.is_proved or order.is_proved
        self.is_self_served = False

    def _enter(self, state: LifeState, now_s: float) -> None:
        if state is not self.state:
            self.state, self.since_s = state, now_s
