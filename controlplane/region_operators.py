"""Commands of operators about regions: each becomes the desired document to write, or a refusal. Pure.

A region drains and restores itself. It decides about another region only what its own callers do: the avoid order. These
commands need no Redis, because a region whose Redis is dead is one that an operator wants to leave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from controlplane.command_queue import Author
from controlplane.core import ControlCore
from controlplane.library import Document
from controlplane.operators import Prepared
from controlplane.region_control import RegionControl
from controlplane.regions import orders
from controlplane.regions.declared import Declared
from controlplane.regions.document import AvoidEntry
from controlplane.regions.forecast import Forecast
from controlplane.regions.orders import AvoidOrder, Drain, OrderRefused
from controlplane.rollouts.commands import CommandRefused
from kvmesh.control.v1 import region_pb2 as pb

Made = TypeVar("Made")


class RegionOperators:
    """See the module. `wall()` is Unix time."""

    def __init__(self, core: ControlCore, regions: RegionControl, wall: Callable[[], float]) -> None:
        self._core = core
        self._regions = regions
        self._wall = wall

    def drain(self, request: pb.DrainRegionRequest, author: Author) -> Prepared:
        """Drain the own region. Without force, the other regions must be able to carry its load.

        A region that is drained already has moved its load, so nothing is forecast.
        """
        until_s = request.until.ToMilliseconds() / 1000 if request.HasField("until") else 0.0
        order = Drain(request.region, request.reason, until_s)

        def make(now_s: float) -> tuple[Document, tuple[str, ...]]:
            known = self._declared()
            declared = _ordered(lambda: orders.drain(order, known, self._own(), author.name, self._wall()))
            found = self.forecast(now_s)
            fits = not known.is_serving or (found is not None and found.fits)
            objections = () if fits else (_objection(found),)
            if objections and not request.force:
                raise CommandRefused(*objections, can_force=True)
            return self._with_declared(declared), objections

        return Prepared("region.drain", request.region, make, request.reason, is_back=True, waits=True)

    def restore(self, request: pb.RestoreRegionRequest, author: Author) -> Prepared:
        """End the drain of the own region."""
        reason = request.reason or "restored"

        def make(_: float) -> tuple[Document, tuple[str, ...]]:
            declared = _ordered(
                lambda: orders.restore(
                    request.region, reason, self._declared(), self._own(), author.name, self._wall()
                )
            )
            return self._with_declared(declared), ()

        return Prepared("region.restore", request.region, make, reason, is_back=True, waits=True)

    def avoid(self, request: pb.AvoidRegionRequest, author: Author) -> Prepared:
        """Override what the own region observes of another one."""
        ttl_s = request.ttl.seconds + request.ttl.nanos / 1e9
        order = AvoidOrder(request.region, ttl_s, request.reason, is_ok=request.is_ok)

        def make(now_s: float) -> tuple[Document, tuple[str, ...]]:
            own, names = self._regions.own, (self._regions.own, *self._regions.regions.targets)
            found = _ordered(lambda: orders.avoid(order, own, names, author.name, now_s))
            entry = AvoidEntry(
                is_ok=found.is_ok,
                until_s=self._wall() + ttl_s,
                reason=found.reason,
                author=found.author,
            )
            desired = self._core.library.desired
            return desired.with_regions(desired.regions.with_avoid(request.region, entry)), ()

        return Prepared("region.avoid", request.region, make, request.reason, is_back=True, waits=True)

    def forecast(self, now_s: float) -> Forecast | None:
        """Return the forecast of a drain of the own region. None: its load or its capacity is unknown."""
        signals = self._regions.signals(self._regions.own)
        if signals is None or signals.capacity.is_zero:
            return None
        return self._regions.regions.forecast_drain(self._regions.own, now_s)

    def ending_streams(self) -> int:
        """Return the open requests whose version no other region serves."""
        version = self._regions.stable[1]
        others = [self._regions.entry(name) for name in self._regions.regions.targets]
        served = {router.model_version for entry in others for router in entry.routers}
        return 0 if not version or version in served else self._core.live_requests()

    def _declared(self) -> Declared:
        known = self._regions.regions.known(self._regions.own)
        assert known is not None, "the own region is known"
        return known.declared

    def _own(self) -> tuple[str, ...]:
        """Regions that this control plane may drain or restore: its own one."""
        return (self._regions.own,)

    def _with_declared(self, declared: Declared) -> Document:
        desired = self._core.library.desired
        return desired.with_regions(desired.regions.with_declared(self._regions.own, declared))


def _ordered(make: Callable[[], Made]) -> Made:
    """Return what `make` makes. Raises CommandRefused in place of OrderRefused."""
    try:
        return make()
    except OrderRefused as error:
        raise CommandRefused(*error.reasons) from None


def _objection(found: Forecast | None) -> str:
    return found.explanation if found is not None else "the load of the region is not known yet"
