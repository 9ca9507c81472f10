"""One other region as its observer knows it: signals, probes, states, and the grants in both directions. Pure."""

from __future__ import annotations

from controlplane.regions.declared import FULL_PERCENT, SERVING, Declared, Known, ramp
from controlplane.regions.observed import Facts, Observed, State
from controlplane.regions.panic import Capacity
from controlplane.regions.settings import RegionSettings
from controlplane.regions.signals import Signals, SignalWindow
from kvmesh.regions.lease import decayed
from kvmesh.regions.quantity import NOTHING, Quantity
from kvmesh.regions.spill import SpillTarget


class Target:
    """See the module. Methods take the facts; `controlplane.regions.regions` decides."""

    def __init__(self, name: str, settings: RegionSettings) -> None:
        self.name = name
        self.window = SignalWindow(settings)
        self.known = Known(SERVING, float("-inf"))
        self.observed = Observed()
        self.granted = NOTHING
        """Its grant to the own region, as it was last renewed."""
        self.given = NOTHING
        """The own region's grant to it."""
        self.floor = NOTHING
        """The same when it was last heard."""
        self.is_seeded = False
        """True if its seeding ended since it entered OUT."""
        self._settings = settings
        self._renewed_s = float("-inf")
        self._probed_s = float("-inf")
        self._is_failing = False
        self._passed_since_step = False

    def on_probe(self, is_ok: bool, now_s: float) -> None:
        """Take the result of a probe of its data path."""
        self._probed_s, self._is_failing = now_s, not is_ok
        self._passed_since_step |= is_ok

    def on_grant(self, grant: Quantity, now_s: float) -> None:
        """Take a renewed grant."""
        self.granted, self._renewed_s = grant, now_s

    def facts(self, now_s: float, *, is_panic: bool, oldest_s: float) -> Facts:
        """Return the facts since the last step, and begin the next ones.

        `oldest_s`: age of the oldest decode engine of all other regions with capacity; 0: none is known.
        """
        signals = self.signals(now_s)
        is_fresh = now_s - self._probed_s <= self._settings.probe_fresh_s
        facts = Facts(
            health=self.window.health(now_s),
            # A drained region may be replaced: its operator said so, and it gets no load anyway.
            is_failing=self._is_failing
            and is_fresh
            and not self._passed_since_step
            and self.declared.is_serving,
            is_cold=signals is not None
            and signals.engine_age_s < self._settings.cold_below_s <= oldest_s - signals.engine_age_s,
            is_panic=is_panic,
            is_seeded=self.is_seeded,
        )
        self._passed_since_step = False
        return facts

    def signals(self, now_s: float) -> Signals | None:
        """Return its last signals; None: it is not heard."""
        return self.window.latest(now_s)

    @property
    def declared(self) -> Declared:
        """Its declared state."""
        return self.known.declared

    def declared_percent(self, now_s: float) -> float:
        """Return the weight that it declares."""
        return ramp(self.known.declared, now_s - self.known.since_s, self._settings)

    def weight_percent(self, now_s: float) -> float:
        """Return the weight that counts: the lower of the declared and the observed one."""
        return min(self.declared_percent(now_s), self.observed.weight_percent(self._settings))

    def grant(self, now_s: float) -> Quantity:
        """Return its grant to the own region after its decay."""
        return decayed(self.granted, now_s - self._renewed_s, self._settings.lease)

    def is_lost(self, now_s: float) -> bool:
        """True if its callers are guests of other regions: it is not heard, or its data path fails, or it says that it
        has no capacity, or that it is drained to weight 0, or it is observed OUT.

        A region that returns stays OUT for a while, and so do its callers. An order to avoid it says nothing of them.
        """
        if self.is_drained(now_s):
            return True
        is_out = self.observed.state is State.OUT and not self.observed.is_by_hand
        is_failing = self.observed.failing_s >= self._settings.grant_lost_after_s
        signals = self.signals(now_s)
        return is_out or is_failing or signals is None or signals.serves_none

    def is_drained(self, now_s: float) -> bool:
        """True if it declares weight 0."""
        return self.declared_percent(now_s) <= 0

    @property
    def is_hard_down(self) -> bool:
        """True if its data path failed all probes for long enough."""
        return self.observed.is_hard_down(self._settings)

    def capacity(self, now_s: float) -> Capacity:
        """Return its place in the sums of the panic threshold."""
        signals = self.window.last
        return Capacity(
            signals.leased_capacity.tokens_per_s if signals is not None else 0.0,
            self.window.health(now_s),
            self.observed.is_hard_down(self._settings),
            not self.declared.is_serving
            or (self.observed.is_by_hand and self.observed.weight_percent(self._settings) == 0),
        )

    def spill_target(self, now_s: float) -> SpillTarget:
        """Return it as a target of spill."""
        return SpillTarget(
            self.name,
            self.weight_percent(now_s),
            self.grant(now_s),
            self.observed.takes_new_spill and self.declared_percent(now_s) >= FULL_PERCENT,
        )
