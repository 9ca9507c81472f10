"""The warm-up of replicas beside the core: lives, packages, registered prefixes, and the facts that they need. Pure.

Only a leader drives lives. It writes packages at once: nothing depends on them but the speed of a warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from msgspec.structs import replace as changed

from controlplane.actions import Action, AidKind, AppendEvent, WriteAid
from controlplane.pools.registry import Registry
from controlplane.snapshots.receivers import Receiver, Receivers
from controlplane.warmup.actions import LifeAction, Told
from controlplane.warmup.bounds import ModelBounds
from controlplane.warmup.jobs import RecordResult, Result
from controlplane.warmup.lives import Lives
from controlplane.warmup.package_making import PackageMaking
from controlplane.warmup.packages import Package, PackageError, Packages, encode
from controlplane.warmup.prefixes import Prefixes, RegisteredPrefix
from controlplane.warmup.prefixes import encode as encode_prefix
from controlplane.warmup.references import References
from controlplane.warmup.settings import Mode, WarmUpSettings
from controlplane.warmup.user_queues import user_queues
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.membership.member import Member

STEP_S: Final = 0.05
"""Shortest time between two steps. Reports arrive in bursts."""

TICK_S: Final = 1.0
"""Time between two steps without an event."""

ENDED_BOOTS: Final = "boots of two replicas ended with it"


class Warming:
    """See the module. `emit` takes the actions."""

    def __init__(
        self,
        settings: WarmUpSettings,
        references: References,
        bounds: Callable[[str], ModelBounds],
        wall: Callable[[], float],
    ) -> None:
        """`bounds` gives the bounds of a pool's engines. `wall` returns Unix time."""
        self.settings = settings
        self.references = references
        self.packages = Packages(wall)
        self.prefixes = Prefixes()
        self.lives = Lives(settings, references, self.packages, bounds, self._act, self._condemn)
        self._making = PackageMaking(
            settings.package_every_s,
            self.lives.fleet,
            self.lives.jobs,
            self.packages,
            references,
            self.prefixes.of_version,
            wall,
        )
        self._actions: list[Action] = []
        self._stepped_s = float("-inf")

    @property
    def next_step_s(self) -> float:
        """Time of the next step: soon after an event, else after TICK_S. Never without lives to drive."""
        if not self.settings.drives_lives:
            return float("inf")
        return self._stepped_s + (STEP_S if self.lives.is_due else TICK_S)

    def take_actions(self) -> list[Action]:
        """Return the actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    # Events.

    def on_members(self, members: Iterable[Member], now_s: float) -> None:
        """Take the leases."""
        self.lives.on_members(members, now_s)

    def on_report(self, receiver: Receiver, report: pb.ReceiverReport, now_s: float) -> None:
        """Take the report of a receiver; only replicas have a life."""
        if report.HasField("life"):
            self.lives.on_report(receiver.process_id, receiver.boot_id, report.life, now_s)

    def on_gone(self, process_id: str, boot_id: str) -> None:
        """Note the end of a receiver's stream."""
        self.lives.on_gone(process_id, boot_id)

    def on_stored(self, stored: Mapping[AidKind, Mapping[str, bytes]], *, is_leader: bool) -> None:
        """Take the packages and prefixes in Redis, or in a state folder. A leader writes those that are not there."""
        packages, prefixes = stored.get(AidKind.PACKAGE, {}), stored.get(AidKind.PREFIX, {})
        self.packages.learn(packages)
        self.prefixes.learn(prefixes)
        for package in self.packages.ordered():
            self.references.restore(package.key, package.golden)
        if is_leader:
            for package in self.packages.unwritten(packages):
                self._write(package)
            for prefix in self.prefixes.unwritten(prefixes):
                self._write_prefix(prefix)

    def on_result(self, number: int, result: Result, now_s: float) -> None:
        """Take the result of a job."""
        record = self.lives.jobs.record(number)
        if record is not None and isinstance(result, RecordResult):
            self.lives.jobs.take(number)
            for package in self._making.take(record, result):
                self._write(package)
            return
        self.lives.on_result(number, result, now_s)

    def forget(self) -> None:
        """Forget the lives: this process leads no more."""
        self.lives.forget()

    # Decisions.

    def step(self, registry: Registry, receivers: Receivers, now_s: float) -> None:
        """Drive the lives on, and make packages."""
        self._stepped_s = now_s
        routers: dict[str, tuple[tuple[str, str], ...]] = {}
        for member in registry.ordered():
            if member.role == "router" and not member.draining:
                routers[member.pool] = (*routers.get(member.pool, ()), (member.process_id, member.address))

        def routers_of(pool: str) -> tuple[tuple[str, str], ...]:
            return routers.get(pool, ())

        self.lives.step(user_queues(receivers), routers_of, now_s)
        self._making.step(routers_of, now_s)

    def quarantine(self, name: str, reason: str) -> Package | None:
        """Take a package out of use. None: there is none of that name."""
        package = self.packages.quarantine(name, reason)
        if package is not None:
            self._write(package)
        return package

    def lift(self, name: str) -> Package | None:
        """Take a quarantined package into use again. None: there is none of that name."""
        self.lives.boots.lifted(name)
        return self.quarantine(name, "")

    def register(self, prefix: RegisteredPrefix) -> RegisteredPrefix:
        """Keep a prefix; without tokens it is deleted, and packages lose its tokens. Raises PrefixError."""
        before = self.prefixes.get(prefix.name)
        made = self.prefixes.adopt(prefix)
        self._write_prefix(made)
        if before is not None:
            for package in self.packages.ordered():
                if before.token_ids in package.prefixes:
                    kept = tuple(each for each in package.prefixes if each != before.token_ids)
                    self._write(self.packages.adopt(changed(package, prefixes=kept)))
        return made

    # Parts.

    def _condemn(self, name: str) -> None:
        if self.quarantine(name, ENDED_BOOTS) is not None:
            self._actions.append(AppendEvent("package.quarantined", name, ENDED_BOOTS))

    def _write(self, package: Package) -> None:
        try:
            data = encode(package)
        except PackageError as error:
            self._actions.append(AppendEvent("package.too_large", package.name, str(error)))
            return
        self._actions.append(WriteAid(AidKind.PACKAGE, package.name, data, package.revision))

    def _write_prefix(self, prefix: RegisteredPrefix) -> None:
        self._actions.append(WriteAid(AidKind.PREFIX, prefix.name, encode_prefix(prefix), prefix.revision))

    def _act(self, action: LifeAction) -> None:
        self._actions.append(
            AppendEvent(action.what, action.target, action.result) if isinstance(action, Told) else action
        )


def idle_warming(wall: Callable[[], float]) -> Warming:
    """Return a warm-up that drives no lives."""
    return Warming(WarmUpSettings(mode=Mode.NONE), References((), {}), lambda _: ModelBounds(1, 1, {}), wall)
