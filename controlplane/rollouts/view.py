"""The facts by which the state machine of a rollout decides, as the leader sees them at one time. Pure.

A missing fact is None or an empty collection. It never lets a rollout go forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from controlplane.rollouts.verdict import NO_VERDICT, Verdict

HEARD_S: Final = 10.0
"""A frontend that was heard within this time must have applied a weight before the weight counts as in force."""

SILENT_S: Final = 30.0
"""A frontend that was silent for longer is named, and forward steps wait: its traffic is not under control."""


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """One pool. The counts have the processes that are leased and neither cordoned nor draining."""

    routers: int = 0
    prefill: int = 0
    decode: int = 0
    can_place: bool = False
    """True if a router of the pool says that new requests can be placed on prefill and decode."""
    queue_delay_s: float | None = None
    """Largest queue delay among the pool's routers. None: no router reported it."""
    prefill_load: float | None = None
    """Prefill work that the pool does, in seconds per second, over all its replicas. None: unknown."""
    uncached_prefill: float | None = None
    """Prefill work of the arriving requests as if no cache hit, in seconds per second. None: unknown."""
    live_requests: int | None = None
    """Requests that the pool still serves. None: unknown."""
    other_versions: tuple[str, ...] = ()
    """Processes with another model version than the configured one, in words. They count nowhere."""

    @property
    def is_complete(self) -> bool:
        """True if each role has a process."""
        return bool(self.routers and self.prefill and self.decode)

    @property
    def missing_roles(self) -> tuple[str, ...]:
        """Roles without a process."""
        counts = (("router", self.routers), ("prefill", self.prefill), ("decode", self.decode))
        return tuple(role for role, count in counts if not count)


@dataclass(frozen=True, slots=True)
class FrontendFacts:
    """One leased frontend."""

    process_id: str
    silent_s: float
    """Seconds since the leader heard of it."""
    applies: bool = False
    """True if it applied the snapshot with the present state and weights of the document, or a later one."""
    model_versions: frozenset[str] = frozenset()
    """Model versions that it can serve."""

    @property
    def is_heard(self) -> bool:
        """True if the frontend was heard within HEARD_S."""
        return self.silent_s <= HEARD_S

    @property
    def is_silent(self) -> bool:
        """True if the frontend was silent for longer than SILENT_S."""
        return self.silent_s > SILENT_S


@dataclass(frozen=True, slots=True)
class Nack:
    """A receiver's refusal of the snapshot with the present state and weights of the document."""

    process_id: str
    reason: str


class GoldenState(Enum):
    """Result of the golden prompts."""

    MISSING = "missing"
    """Not all runs that are due have ended, or one had no answer. Inconclusive."""
    GREEN = "green"
    RED = "red"


@dataclass(frozen=True, slots=True)
class GoldenFacts:
    """Result of the golden prompts for one step. Step 0: in PREPARING, on each replica of the canary."""

    step: int = 0
    state: GoldenState = GoldenState.MISSING
    reason: str = ""


class ShadowState(Enum):
    """Result of the shadow before a rollout."""

    WAITING = "waiting"
    """It has not started, or is not decided."""
    WITHIN = "within"
    BEYOND = "beyond"
    INCONCLUSIVE = "inconclusive"
    """It ended without a decision."""


@dataclass(frozen=True, slots=True)
class ShadowFacts:
    """The shadow of the running rollout."""

    state: ShadowState = ShadowState.WAITING
    reason: str = "the shadow has not started"


@dataclass(frozen=True, slots=True)
class RegionRollout:
    """The running rollout of another region, else its last one."""

    region: str
    state: str
    to_version: str
    is_final: bool
    age_s: float
    """Time in that state."""


@dataclass(frozen=True, slots=True)
class View:
    """All facts at one time."""

    pools: Mapping[str, PoolFacts] = field(default_factory=dict)
    frontends: tuple[FrontendFacts, ...] = ()
    incapable: tuple[str, ...] = ()
    """Frontends, routers and replicas without the capability `pools`."""
    nacks: tuple[Nack, ...] = ()
    is_published: bool = False
    """True if the latest published snapshot carries the present state and weights of the document."""
    verdict: Verdict = NO_VERDICT
    verdict_step: int = 0
    """Step that `verdict` judges. A verdict of another step lets nothing go forward."""
    golden: GoldenFacts = GoldenFacts()
    shadow: ShadowFacts = ShadowFacts()
    frozen_s: float = 0.0
    """Seconds until the end of the freeze. 0: none."""
    has_redis: bool = False
    """True while Redis answers."""
    has_lease: bool = False
    """True while the leader's lease is certain."""
    other_rollout: str = ""
    """Id of another rollout that is not over. Empty: none."""
    ended_rollouts: frozenset[str] = frozenset()
    """Rollouts that a receiver named as taken back."""
    elsewhere: tuple[RegionRollout, ...] = ()
    """The running or last rollout of each other region."""
    unheard: tuple[str, ...] = ()
    """Other regions that are not heard: their rollouts are not known."""

    @property
    def may_go_forward(self) -> bool:
        """True if documents are stored and the leader is the only one. Else a leader may only go back."""
        return self.has_redis and self.has_lease

    @property
    def is_frozen(self) -> bool:
        """True during a freeze."""
        return self.frozen_s > 0

    @property
    def heard(self) -> tuple[FrontendFacts, ...]:
        """Frontends that were heard within HEARD_S."""
        return tuple(each for each in self.frontends if each.is_heard)

    @property
    def silent(self) -> tuple[FrontendFacts, ...]:
        """Frontends that were silent for longer than SILENT_S."""
        return tuple(each for each in self.frontends if each.is_silent)

    @property
    def is_applied(self) -> bool:
        """True if the snapshot of the document is published and each heard frontend, one at least, applied it."""
        heard = self.heard
        return self.is_published and bool(heard) and all(each.applies for each in heard)

    def pool(self, name: str) -> PoolFacts:
        """Return the facts of a pool; all counts are 0 for an unknown one."""
        return self.pools.get(name, PoolFacts())
