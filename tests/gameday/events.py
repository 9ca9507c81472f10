"""The events of a game day: what breaks, how it heals, and the aims by which it is judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tests.gameday import acts, aims, state_aims
from tests.gameday.shapes import BOTH, COLD, EQUAL, MIXED, TRIPLE, UNEQUAL, Shape
from tests.gameday.verdicts import Judge

PLAN: Final = "plan"
"""The load that `kvmesh region plan` gives for the hit ratio of the conversations, fully seeded."""

SIXTY: Final = "60"
BETWEEN: Final = ("40", "45", "50")
"""Loads in percent that have no aims: they show how much the plan leaves unused."""

LOADS: Final = (PLAN, *BETWEEN, SIXTY)
FULL_LOADS: Final = (PLAN, SIXTY)
SURGE: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event. Clients are under load from before it to after its healing."""

    name: str
    title: str
    strike: acts.Act
    heal: acts.Act = acts.nothing
    prepare: acts.Act = acts.nothing
    """Before the load."""
    prelude: acts.Act = acts.nothing
    """Under load, right before the event."""
    shape: Shape = EQUAL
    fault_s: float = 75.0
    """From the begin of the event to that of its healing, at least."""
    strike_s_max: float = 0.0
    """Longest time that the event itself takes, beyond `fault_s`."""
    after_s: float = 15.0
    """From the end of the healing to that of the load."""
    surge: float = 1.0
    """Factor of the conversations at the target while the event lasts."""
    loses: bool = True
    """The target's capacity is lost: at 60 % the survivors are full."""
    moves: bool = False
    """All callers of the target move: the event shows if a load is survivable."""
    loads: tuple[str, ...] = FULL_LOADS
    """Loads of a full game day."""
    counts: tuple[int, ...] = (2,)
    """Numbers of regions of a full game day."""
    ends_accounts: bool = True
    """The event ends a frontend or a Redis, and so its count of charges."""
    judges: tuple[Judge, ...]
    """Aims at the planned load."""
    full: tuple[Judge, ...] = aims.FULL
    """Aims at 60 %, if the event loses capacity."""

    def judges_at(self, load: str) -> tuple[Judge, ...]:
        """Return the aims at a load. At the planned load they are the event's own ones."""
        if load in BETWEEN:
            return aims.ALWAYS
        own = self.judges if load == PLAN or not self.loses else self.full
        charges = () if self.ends_accounts else (aims.charged_once,)
        return (*own, *aims.ALWAYS, *charges)


MOVE: Final = (aims.good_after_5_s, aims.streams_exact, aims.ttft_back)

EVENTS: Final = (
    Event(
        name="kill",
        moves=True,
        title="kill -9 of a whole region",
        strike=acts.kill,
        heal=acts.restart,
        counts=(2, 3),
        judges=MOVE,
    ),
    Event(
        name="kill-unseeded",
        title="kill -9 of a whole region, whose hot prompts are not replayed",
        strike=acts.kill,
        heal=acts.restart,
        shape=COLD,
        loads=(PLAN,),
        judges=(aims.typed, aims.streams_exact),
    ),
    Event(
        name="unequal",
        title="the larger of two unequal regions killed while the smaller lacks a replica",
        prepare=acts.lack,
        strike=acts.kill,
        heal=acts.restart,
        shape=UNEQUAL,
        judges=(aims.own_95, aims.typed, aims.shed_by_priority, aims.not_sent_to_dead),
    ),
    Event(
        name="isolate",
        ends_accounts=False,
        moves=True,
        title="a region cut off from everything, packets dropped",
        strike=acts.isolate,
        heal=acts.heal_link,
        counts=(2, 3),
        judges=MOVE,
    ),
    Event(
        name="both-versions",
        title="a region killed while the other one serves a later version, and still its own",
        strike=acts.kill,
        heal=acts.restart,
        shape=BOTH,
        judges=(aims.typed, aims.streams_exact),
    ),
    Event(
        name="versions",
        title="regions one version apart, one killed",
        strike=acts.kill,
        heal=acts.restart,
        shape=MIXED,
        judges=(aims.good_after_5_s, aims.stale_with_tokens),
        full=aims.FULL_OF_VERSIONS,
    ),
    Event(
        name="decode",
        ends_accounts=False,
        title="the decode pool of a region killed",
        strike=acts.kill_decode,
        heal=acts.restart,
        judges=(aims.nothing_lost, aims.no_failover),
    ),
    Event(
        name="redis",
        title="the Redis of a region killed",
        strike=acts.kill_redis,
        heal=acts.restart,
        loses=False,
        judges=(aims.nothing_lost, aims.no_failover),
    ),
    Event(
        name="control",
        ends_accounts=False,
        title="the control plane of a region killed",
        strike=acts.kill_control,
        heal=acts.restart,
        loses=False,
        judges=(aims.nothing_lost, aims.no_failover),
    ),
    Event(
        name="brownout",
        ends_accounts=False,
        title=f"engines of a region {acts.BROWN:g} times slower",
        strike=acts.brown,
        heal=acts.recover,
        loses=False,
        judges=(aims.nothing_lost, state_aims.suspect_at_most),
    ),
    Event(
        name="third",
        ends_accounts=False,
        title="one of three replicas a role killed",
        strike=acts.kill_third,
        heal=acts.restart,
        shape=TRIPLE,
        loses=False,
        judges=(aims.nothing_lost, state_aims.suspect_at_most),
    ),
    Event(
        name="flap",
        ends_accounts=False,
        title="the probes of a region flap 20 times a minute",
        strike=acts.flap,
        heal=acts.heal_link,
        loses=False,
        judges=(state_aims.no_transition, aims.own_throughout),
    ),
    Event(
        name="link",
        ends_accounts=False,
        title="80 ms and 1 % loss each way between the regions",
        strike=acts.slow_link,
        heal=acts.heal_link,
        loses=False,
        judges=(state_aims.no_transition, aims.own_throughout),
    ),
    Event(
        name="cut",
        ends_accounts=False,
        title="the link between the regions cut both ways",
        strike=acts.cut,
        heal=acts.heal_link,
        loses=False,
        counts=(2, 3),
        judges=(aims.own_throughout, aims.heals_smoothly),
    ),
    Event(
        name="cut-one-way",
        ends_accounts=False,
        title="the link between the regions cut one way",
        strike=acts.cut_one_way,
        heal=acts.heal_link,
        loses=False,
        judges=(aims.own_throughout, aims.heals_smoothly),
    ),
    Event(
        name="dark",
        title="all control planes killed, then a region",
        prelude=acts.darken,
        strike=acts.kill,
        heal=acts.relight,
        judges=(aims.own_95, aims.typed, aims.streams_exact, aims.survivors_stay, aims.not_sent_to_dead),
    ),
    Event(
        name="drain",
        ends_accounts=False,
        title="planned drain and restore",
        strike=acts.drain,
        heal=acts.restore,
        fault_s=75.0,
        after_s=90.0,
        counts=(2, 3),
        judges=(aims.nothing_lost, aims.errors_not_up, aims.sessions_back),
    ),
    Event(
        name="upgrade",
        title="all processes replaced, region by region",
        strike=acts.upgrade,
        fault_s=15.0,
        strike_s_max=600.0,
        after_s=60.0,
        loads=(PLAN,),
        judges=(aims.nothing_lost, aims.errors_not_up, aims.sessions_back_home, state_aims.all_drained),
    ),
    Event(
        name="surge",
        ends_accounts=False,
        title=f"{SURGE:g} times the load on one region",
        strike=acts.nothing,
        surge=SURGE,
        fault_s=60.0,
        loses=False,
        judges=(aims.typed, aims.shed_by_priority, aims.others_95, state_aims.spill_within_grant),
    ),
)

BY_NAME: Final = {event.name: event for event in EVENTS}
