"""Safety of simulated regions, checked at every step and every admission."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from controlplane.regions.declared import Declared
from controlplane.regions.observed import Observed, State
from controlplane.regions.signals import Signals
from kvmesh.regions.bucket import BURST_S
from kvmesh.regions.quantity import NOTHING, Quantity, total
from tests.simulation.regions.nodes import Region

if TYPE_CHECKING:
    from tests.simulation.regions.world import World

STABLE_S = 60.0
"""Time without a change after which a region's queue and grants have settled."""
IN_FLIGHT_S = 2.0
"""Time for which charges of an older, larger grant may still count."""
HEALTHY = 0.7
PANIC = 0.5
HARD_DOWN_S = 6.0
GRANT_SHARE = 0.8
LOADED = 0.7
RISE_PER_S = 0.2


@dataclass
class Account:
    """Twin of all buckets of one source at one target: what the grants allow, counted by the whole grant."""

    at_s: float
    credit: float = 0.0
    prompt: float = 0.0
    """Largest prompt: each router may be in debt by one."""
    rates: deque[tuple[float, float]] = field(default_factory=deque)
    """(time, rate) of the grants that may count."""

    def rate(self, now_s: float) -> float:
        """Return the highest rate that counts now."""
        while len(self.rates) > 1 and self.rates[1][0] < now_s - IN_FLIGHT_S:
            self.rates.popleft()
        return max((rate for _, rate in self.rates), default=0.0)

    def refill(self, now_s: float, now_rate: float) -> None:
        """Add the tokens of the time since the last call."""
        self.credit = min(now_rate * BURST_S, self.credit + now_rate * (now_s - self.at_s))
        self.at_s = now_s


class Checkers:
    """See the module. Methods are called by the world; each failure is an AssertionError with its facts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.accounts: dict[tuple[str, str], Account] = {}
        self.heard: dict[str, dict[str, deque[tuple[float, Signals]]]] = {}
        """Signals by their receiver and their region, of the last 10 s."""
        self.revisions: dict[tuple[str, int, str], int] = {}
        """Highest declared revision by control process, boot and region."""
        self.remembered: dict[str, int] = dict.fromkeys(world.names, 0)
        """Revision that some memory held at each loss of memory, or that was declared since."""
        self.granted: dict[tuple[str, int, str], tuple[float, Quantity]] = {}
        """Arrival and amount of the last grant, by holder, its boot, and target."""
        self.failing_since_s: dict[tuple[str, int, str], float] = {}
        self.recovers_from: dict[tuple[str, str], int] = {}
        """Stage at which an observer's RECOVERING of a target began: above 0 behind a restart."""
        self.outs_for_health = 0
        self.panics = 0
        """Steps of a control process in panic."""

    # Events.

    def on_start(self, region: Region) -> None:
        """Forget what the last process heard. A recovery goes on at the weight that the snapshot has, never above it."""
        self.heard[region.name] = {name: deque() for name in self.world.names}
        for name, target in region.control.regions.targets.items():
            self.recovers_from[region.name, name] = target.observed.stage
            if target.observed.state is State.RECOVERING:
                _, published, _ = region.redis.observed[name]
                now = target.observed.weight_percent(self.world.settings)
                least = self.world.settings.stages_percent[0]
                assert now <= max(published, least), f"{region.name} of {name}: {now} after {published}"

    def on_signals(self, receiver: Region, name: str, signals: Signals) -> None:
        """Keep the signals as the receiver has them."""
        window = self.heard[receiver.name][name]
        window.append((self.world.now_s, signals))
        while len(window) > 5:
            window.popleft()

    def on_declared(self, region: Region, declared: Declared) -> None:
        """A region's operator has declared a state: above all that was declared, also after lost memory."""
        is_above = declared.revision > self.remembered[region.name]
        assert is_above or region.name in self.world.stepped, (
            f"{region.name} declares {declared}, which peers ignore"
        )
        self.remembered[region.name] = max(self.remembered[region.name], declared.revision)

    def on_lost_memory(self) -> None:
        """Some memory was lost: a revision that no other memory holds is forgotten."""
        for name in self.world.names:
            revisions = [self.world.regions[name].redis.declared.revision]
            for region in self.world.regions.values():
                known = region.control.regions.known(name) if region.control.is_up else None
                revisions.append(known.declared.revision if known is not None else 0)
            self.remembered[name] = min(self.remembered[name], max(revisions))

    def on_granted(self, receiver: Region, name: str, grant: Quantity) -> None:
        """A grant of `name` arrived at `receiver`."""
        self.granted[receiver.name, receiver.control.boot, name] = (self.world.now_s, grant)

    def on_probe(self, source: str, boot: int, target: str, is_ok: bool) -> None:
        """Keep the time since which all probes of a control process fail."""
        if is_ok:
            self.failing_since_s.pop((source, boot, target), None)
        else:
            self.failing_since_s.setdefault((source, boot, target), self.world.now_s)

    # Safety at each step of a control process.

    def on_step(
        self,
        region: Region,
        before: Mapping[str, Observed],
        grants: Mapping[str, Quantity],
        shares: Mapping[str, float],
        elapsed_s: float,
    ) -> None:
        """Check every decision of a step: states, grants and shares were `before`, `grants` and `shares`."""
        self.panics += region.control.regions.is_panic
        self._check_grants(region, grants)
        self._check_spill(region)
        self._check_ramp(region, shares, elapsed_s)
        for name, target in region.control.regions.targets.items():
            if not (target.observed.is_by_hand or before[name].is_by_hand):
                self._check_transition(region, name, target.observed, before)
        self._check_revisions(region)

    def _check_grants(self, region: Region, before: Mapping[str, Quantity]) -> None:
        """Grants to all, floors included, fit into the headroom that the region knew; while one is lost, into the rest.

        A loaded region raises none of a region that is not lost.
        """
        now_s = self.world.now_s
        window = self.heard[region.name][region.name]
        if not window or now_s - window[-1][0] > self.world.settings.unheard_after_s:
            return
        signals = window[-1][1]
        regions = region.control.regions
        share = GRANT_SHARE * regions.own_percent(now_s) / 100
        room = signals.capacity * share - signals.load
        heard = [name for name in regions.targets if not regions.targets[name].is_lost(now_s)]
        given = total(regions.grants()[name] for name in heard)
        assert given.fits(room), f"{region.name} grants {given} of {room}"
        rest = signals.capacity * (regions.own_percent(now_s) / 100) - signals.load
        every = total(regions.grants().values())
        assert every.fits(rest), f"{region.name} grants {every} of {rest} to all regions"
        if (
            regions.spill()
            or (signals.load + total(signals.guests.values())).share_of(signals.capacity) > LOADED
        ):
            raised = [
                name
                for name, grant in regions.grants().items()
                if not grant.fits(before[name]) and name in heard
            ]
            assert not raised, f"{region.name} is loaded and raises its grants to {raised}"

    def _check_spill(self, region: Region) -> None:
        """The spilled load fits into the grant and its age, and none goes to a region that is out."""
        regions = region.control.regions
        window = self.heard[region.name][region.name]
        for name, share in regions.spill().items():
            at_s, grant = self.granted[region.name, region.control.boot, name]
            age_s = self.world.now_s - at_s
            room = grant * (1.0 if age_s < 30 else 0.25 if age_s < 600 else 0.0)
            moved = window[-1][1].cold_load * share
            assert moved.fits(room), f"{region.name} spills {moved} to {name}, granted {room}"
            is_out = regions.targets[name].observed.state is State.OUT
            assert not is_out, f"{region.name} spills to {name}, which is OUT"

    def _check_ramp(self, region: Region, before: Mapping[str, float], elapsed_s: float) -> None:
        """The spilled share rises by at most 20 points a second."""
        grown = sum(region.control.regions.spill().values()) - sum(before.values())
        assert grown <= RISE_PER_S * min(elapsed_s, 2.0) + 1e-9, (
            f"{region.name} spills {grown:.2f} more at once"
        )

    def _check_transition(
        self, region: Region, name: str, new: Observed, before: Mapping[str, Observed]
    ) -> None:
        """Each transition has its cause in what was true, and its time."""
        old = before[name]
        if new.state is old.state:
            return
        settings, now_s = self.world.settings, self.world.now_s
        told = f"{region.name} of {name}: {old.state.value} -> {new.state.value}: {new.reason}"
        assert old.stepped_s is None or now_s - old.stepped_s <= settings.step_max_s, f"after a gap: {told}"
        if old.state is State.OUT:
            assert new.state is State.RECOVERING and now_s - old.since_s >= settings.out_min_s, told
        if old.state is State.RECOVERING and new.state is State.HEALTHY:
            stages = len(settings.stages_percent) - self.recovers_from[region.name, name]
            assert now_s - old.since_s >= settings.stage_s * stages - 1e-6, told
        self.recovers_from[region.name, name] = 0
        if new.state is not State.OUT:
            return
        assert old.state in (State.SUSPECT, State.RECOVERING), told
        failing_s = now_s - self.failing_since_s.get((region.name, region.control.boot, name), now_s)
        if failing_s >= HARD_DOWN_S - 1e-6:
            return
        self.outs_for_health += 1
        healthy, full = self._healthy(region, before)
        assert healthy >= PANIC * full - 1e-6, f"in panic, {healthy:.0f} of {full:.0f} is healthy: {told}"

    def _healthy(self, region: Region, before: Mapping[str, Observed]) -> tuple[float, float]:
        """Return healthy and full capacity among the regions that answered before the step, from the raw signals."""
        now_s, full, healthy = self.world.now_s, 0.0, 0.0
        for name, window in self.heard[region.name].items():
            old = before.get(name)
            is_avoided = old is not None and old.avoid is not None and not old.avoid.is_ok
            if is_avoided or (old is not None and old.failing_s >= HARD_DOWN_S):
                continue
            known = region.control.regions.known(name)
            assert known is not None
            if not known.declared.is_serving or not window or now_s - window[-1][0] > 6.0:
                continue
            fresh = [signals for at_s, signals in window if now_s - at_s <= 10.0]
            attempts = sum(each.attempts for each in fresh)
            health = sum(each.serving_share or 0.0 for each in fresh) / len(fresh)
            if attempts >= 20:
                health = min(health, 1 - sum(each.failures for each in fresh) / attempts)
            capacity = window[-1][1].leased_capacity.tokens_per_s
            full += capacity
            healthy += capacity if health >= HEALTHY else 0.0
        return healthy, full

    def _check_revisions(self, region: Region) -> None:
        """A declared state never goes back within one process."""
        control = region.control
        for name in self.world.names:
            known = control.regions.known(name)
            assert known is not None
            key = (region.name, control.boot, name)
            assert known.declared.revision >= self.revisions.get(key, 0), (
                f"{region.name} forgets {name}'s state"
            )
            self.revisions[key] = known.declared.revision

    # Safety at each admission.

    def on_grant(self, target: str, source: str, grant: Quantity) -> None:
        """The routers of `target` enforce a new grant."""
        now_s = self.world.now_s
        account = self.accounts.setdefault((target, source), Account(now_s))
        account.refill(now_s, account.rate(now_s))
        account.rates.append((now_s, grant.tokens_per_s))

    def on_guest(self, target: str, source: str, tokens: float, allowed: tuple[str, ...] | None) -> None:
        """A router of `target` admitted a prompt of a caller of `source`."""
        assert allowed is None or target in allowed, f"a tenant of {allowed} runs in {target}"
        now_s = self.world.now_s
        account = self.accounts.setdefault((target, source), Account(now_s))
        rate = account.rate(now_s)
        account.refill(now_s, rate)
        account.credit -= tokens
        account.prompt = max(account.prompt, tokens)
        debt = len(self.world.regions[target].routers) * account.prompt + rate * IN_FLIGHT_S + 1.0
        assert account.credit >= -debt, (
            f"{source} exceeds its grant of {rate:.0f}/s at {target}: {account.credit:.0f}"
        )

    def on_corrected(self, target: str, source: str, tokens: float) -> None:
        """A charge was too high by `tokens`."""
        self.accounts[target, source].credit += tokens

    def on_shed_guest(self, target: Region) -> None:
        """A guest within its grant is shed: while the target changes, has no control process, or runs large prompts."""
        now_s = self.world.now_s
        prompts = sum(
            account.prompt * len(target.routers)
            for (to, _), account in self.accounts.items()
            if to == target.name
        )
        is_small = prompts < target.capacity.tokens_per_s
        is_settled = now_s - target.changed_s > STABLE_S and target.control.is_up and is_small
        assert not is_settled, f"{target.name} sheds guests that it granted; backlog {target.backlog:.0f}"

    def on_shed_own(self, home: Region) -> None:
        """An own caller is refused: only for the own load or for the own change of it."""
        is_own = home.load.share_of(home.capacity) > GRANT_SHARE
        is_settled = self.world.now_s - home.changed_s > STABLE_S
        assert is_own or not is_settled, (
            f"{home.name} refuses its own callers at {home.load} of {home.capacity}"
        )

    # Agreement at the end.

    def check_end(self) -> None:
        """All agree about each declared state, and none that a memory held is lost."""
        for name in self.world.names:
            known = {
                region.name: each.declared
                for region in self.world.regions.values()
                if (each := region.control.regions.known(name)) is not None
            }
            assert len(set(known.values())) == 1, f"{name} is known as {known}"
            revision = known[name].revision
            assert revision >= self.remembered[name], (
                f"{name} lost revision {self.remembered[name]}: {known[name]}"
            )
        self._check_limits()
        for region in self.world.regions.values():
            if region.control.regions.own_percent(self.world.now_s) == 100:
                given = total(region.control.regions.grants().values())
                assert given != NOTHING or region.load.share_of(region.capacity) > 0.7, (
                    f"{region.name} grants nothing"
                )

    def _check_limits(self) -> None:
        """Regions that agree enforce each limit once, and the part of drained regions twice."""
        now_s = self.world.now_s
        controls = [region.control.regions for region in self.world.regions.values()]
        drained = [each.own for each in controls if each.states(now_s)[each.own].declared.state.is_drained]
        lent = sum(controls[0].shares(now_s)[name] for name in drained)
        whole = sum(each.limit_share(now_s) for each in controls)
        expected = 1.0 + lent if len(drained) < len(controls) else whole
        assert abs(whole - expected) < 1e-6, f"limits are enforced {whole:.3f} times, expected {expected:.3f}"
