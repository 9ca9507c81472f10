"""Commands of operators: each becomes a document to write, or a refusal with field, value and range. Pure.

A command is checked twice: when it arrives, and when the core writes its document. With `validate_only` it ends after the
first check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from msgspec.structs import replace as changed

from controlplane.audit_details import changes
from controlplane.command_queue import Author, Command
from controlplane.core import ControlCore
from controlplane.library import Document, Library
from controlplane.rollouts import commands as rollout_commands
from controlplane.rollouts import settings as rollout_settings
from controlplane.rollouts.commands import CommandRefused
from controlplane.rollouts.conditions import listed
from controlplane.rollouts.document import RolloutDocument
from controlplane.rollouts.settings import SettingsError
from controlplane.rollouts.view import View
from controlplane.snapshots.desired import CordonEntry, Desired
from controlplane.snapshots.publication import objections, settled
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.errors import MeshError, Violation, invalid
from kvmesh.membership.member import Member
from kvmesh.snapshot.content import CORDONS_MAX, REVISION_MAX, RolloutState
from kvmesh.snapshot.published import Published

REASON_MAX: Final = 200
"""Longest reason, in characters."""

FREEZE_MAX_S: Final = 24 * 3600.0

STABLE: Final = "stable"
"""Target of a revert: all to the stable pool."""

BACK: Final = frozenset(
    {
        pb.ChangeRolloutRequest.CHANGE_ABORT,
        pb.ChangeRolloutRequest.CHANGE_UNDO,
    }
)
"""Changes that only move traffic back, beside a failed attestation. They need no Redis."""


@dataclass(slots=True)
class Prepared:
    """A command on its way. `run` fills `made` and `overridden`."""

    what: str
    target: str
    make: Callable[[float], tuple[Document, tuple[str, ...]]]
    reason: str = ""
    is_back: bool = False
    waits: bool = False
    """See `Command.waits`."""
    made: Document | None = None
    """The document, as last made."""
    overridden: tuple[str, ...] = ()
    """Checks that `force` overrode, or would override."""
    details: dict[str, str] = field(default_factory=dict)
    """Values before and after, for the audit."""

    def run(self, now_s: float, library: Library) -> Document:
        """Return the document to write. Raises CommandRefused."""
        self.made, self.overridden = self.make(now_s)
        made = self.made
        before = library.rollout(made.id) if isinstance(made, RolloutDocument) else library.desired
        self.details.clear()
        self.details.update(changes(before, self.made, self.overridden))
        return self.made

    def command(self, ticket: int, author: Author, library: Library) -> Command:
        """Return the command for the core."""
        make = partial(self.run, library=library)
        return Command(
            ticket, self.what, self.target, author, make, self.reason, self.is_back, self.details, self.waits
        )


class Operators:
    """Prepares commands from requests. Methods raise MeshError for bad requests."""

    def __init__(
        self, core: ControlCore, wall: Callable[[], float], golden_versions: frozenset[str] | None = None
    ) -> None:
        """`golden_versions`: versions with a golden set of their own. None: unknown."""
        self._core = core
        self._wall = wall
        self._golden_versions = golden_versions

    def cordon(self, request: pb.CordonReplicaRequest, author: Author) -> Prepared:
        """Take a process out of use."""
        member = self._member(request.process_id)
        reason = checked_reason(request.reason)

        def make(_: float) -> tuple[Document, tuple[str, ...]]:
            desired = self._core.library.desired
            if request.drain and desired.is_frozen(self._wall()):
                raise CommandRefused("the mesh is frozen: no drain begins before the freeze ends")
            if len(desired.cordons) >= CORDONS_MAX:
                raise CommandRefused(f"{CORDONS_MAX} processes are cordoned already")
            overridden = self._last_of(member)
            if overridden and not request.force:
                raise CommandRefused(*overridden, can_force=True)
            entry = CordonEntry(
                process_id=member.process_id,
                boot_id=member.boot_id if request.drain else "",
                draining=request.drain,
                reason=reason,
                by=author.name,
                at_s=self._wall(),
            )
            boots = {each.process_id: each.boot_id for each in self._core.registry.ordered()}
            return _next(desired.without_gone(boots).cordoned(entry), desired), overridden

        what = "replica.drain" if request.drain else "replica.cordon"
        return Prepared(what, request.process_id, make, reason)

    def uncordon(self, request: pb.UncordonReplicaRequest) -> Prepared:
        """Put a process into use again, also one that has left a short time ago."""
        if not self.is_cordoned(request.process_id) and not self._core.registry.knows(request.process_id):
            self._member(request.process_id)

        def make(_: float) -> tuple[Document, tuple[str, ...]]:
            desired = self._core.library.desired
            return _next(desired.uncordoned(request.process_id), desired), ()

        return Prepared("replica.uncordon", request.process_id, make)

    def is_cordoned(self, process_id: str) -> bool:
        """True if a cordon is in force for the process."""
        return any(entry.process_id == process_id for entry in self._core.library.desired.cordons)

    def freeze(self, request: pb.FreezeRequest) -> Prepared:
        """Forbid forward steps for a time."""
        ttl_s = request.ttl.seconds + request.ttl.nanos / 1e9
        if not 0 <= ttl_s <= FREEZE_MAX_S:
            raise _out_of_range("ttl", f"{ttl_s:g} s", f"0 to {FREEZE_MAX_S:g} s")

        def make(_: float) -> tuple[Document, tuple[str, ...]]:
            desired = self._core.library.desired
            until_s = self._wall() + ttl_s if ttl_s else 0.0
            return _next(changed(desired, frozen_until_s=until_s), desired), ()

        return Prepared("mesh.freeze" if ttl_s else "mesh.unfreeze", "", make, checked_reason(request.reason))

    def start(self, request: pb.StartRolloutRequest, author: Author, rollout: str) -> Prepared:
        """Start the rollout `rollout`."""
        core = self._core
        stable = core.content.stable
        try:
            settings = rollout_settings.parse(
                request.settings,
                versions=core.versions(),
                others=core.of_other_models(),
                stable_pool=stable.pool,
                golden_versions=self._golden_versions,
            )
        except SettingsError as error:
            raise _not_allowed(f"settings.{error.field}", str(error.value), error.allowed) from None

        def make(now_s: float) -> tuple[Document, tuple[str, ...]]:
            now_stable = core.content.stable
            if now_stable.pool != stable.pool:
                raise CommandRefused(f'the stable pool has changed to "{now_stable.pool}"; try again')
            done = rollout_commands.start(
                rollout,
                settings,
                from_pool=stable.pool,
                from_version=stable.model_version,
                to_version=core.versions()[settings.to_pool],
                by=author.name,
                view=self._view_for_start(now_s),
                now_s=core.library.start_s(self._wall()),
                is_forced=request.force,
            )
            return done.document, done.overridden

        return Prepared("rollout.start", rollout, make, f"to {settings.to_pool}")

    def change(self, request: pb.ChangeRolloutRequest, author: Author) -> Prepared:
        """Pause, resume, promote, abort, undo or attest."""
        if request.change not in _CHANGES:
            names = ", ".join(_CHANGES.values())
            raise _not_allowed("change", str(request.change), f"{names} are allowed")
        reason = checked_reason(request.reason)
        if len(request.by) > rollout_commands.AUTHOR_CHARACTERS_MAX:
            most = rollout_commands.AUTHOR_CHARACTERS_MAX
            raise _not_allowed("by", f"{len(request.by)} characters", f"up to {most} characters are allowed")
        document = self._rollout(request.rollout)
        if request.change == pb.ChangeRolloutRequest.CHANGE_ATTEST:
            _check_requirement(request.requirement, document)
        wanted = rollout_commands.of_message(request, author.name)

        def make(now_s: float) -> tuple[Document, tuple[str, ...]]:
            known = self._core.library.rollout(document.id)
            if known is None:
                raise CommandRefused(f'the rollout "{document.id}" is forgotten')
            done = rollout_commands.command(known, wanted, self._core.view(now_s), self._wall())
            return done.document, done.overridden

        is_failed = request.change == pb.ChangeRolloutRequest.CHANGE_ATTEST and not request.passed
        is_back = is_failed or request.change in BACK
        return Prepared(f"rollout.{_CHANGES[request.change]}", document.id, make, reason, is_back)

    def revert(self, request: pb.RevertSnapshotRequest, author: Author, past: Published | None) -> Prepared:
        """Make the stable pool of an earlier snapshot stable again. `past`: that snapshot; None for all to stable.

        Cordons and drains stay. Those of `past` may be of boots that are gone, and would pass the checks of `cordon`.
        """
        reason = checked_reason(request.reason)
        target = request.to if past is not None else STABLE
        running = self._core.library.running

        def make(now_s: float) -> tuple[Document, tuple[str, ...]]:
            core = self._core
            if past is None and core.library.running is not None:
                return self._taken_back(core.library.running, request, author, now_s)
            if core.library.running is not None:
                raise CommandRefused(f'the rollout "{core.library.running.id}" is not over; abort it first')
            content = core.content
            pool = past.content.stable.pool if past is not None else content.stable.pool
            if pool not in core.versions():
                if past is not None:
                    raise CommandRefused(
                        f'the pool "{pool}" of snapshot {request.to} is not configured any more'
                    )
                pool = core.initial.stable.pool  # the stable pool left the configuration: this is the way out
            elif (model := core.of_other_models().get(pool)) is not None:
                raise CommandRefused(
                    f'the pool "{pool}" of snapshot {request.to} serves the model "{model}" now, and the stable pool '
                    "serves another one"
                )
            overridden = tuple(objections(content, settled(content, core.versions(), pool)))
            if overridden and not request.force:
                raise CommandRefused(*overridden, can_force=True)
            last = core.library.rollout("")
            after = last.id if last is not None else ""
            if content.stable_revision >= REVISION_MAX - 1:
                raise CommandRefused(
                    f"the snapshot in force has stable_revision {content.stable_revision}, the largest one; "
                    "restart all processes with an empty Redis and empty state folders"
                )
            return core.library.desired.with_stable(pool, after, content.stable_revision), overridden

        is_back = past is None and running is not None
        return Prepared("snapshot.revert", target, make, reason, is_back)

    def _view_for_start(self, now_s: float) -> View:
        """Return the facts for a new rollout: the running one is another one."""
        running = self._core.library.running
        return replace(self._core.view(now_s), other_rollout=running.id if running is not None else "")

    def _taken_back(
        self, document: RolloutDocument, request: pb.RevertSnapshotRequest, author: Author, now_s: float
    ) -> tuple[Document, tuple[str, ...]]:
        """Return the running rollout, aborted. A promoted one stays: all traffic is on its stable pool already."""
        if document.state is RolloutState.PROMOTING:
            raise CommandRefused(
                f'the rollout "{document.id}" is in PROMOTING, so the promoted pool "{document.to_pool}" is stable '
                "already; `kvmesh rollout undo` swaps it back"
            )
        kind = pb.ChangeRolloutRequest.CHANGE_ABORT
        asked = rollout_commands.Command(kind, author.name, request.reason, is_forced=request.force)
        done = rollout_commands.command(document, asked, self._core.view(now_s), self._wall())
        return done.document, done.overridden

    def _member(self, process_id: str) -> Member:
        if not process_id:
            raise _out_of_range("process_id", "empty", "the name of a process")
        member = self._core.registry.members.get(process_id)
        if member is None:
            known = listed(self._core.registry.members) or "none"
            allowed = f"there are: {known} (`kvmesh replicas` lists all)"
            raise unknown_name("process_id", process_id, f"no process has that name; {allowed}")
        return member

    def _rollout(self, name: str) -> RolloutDocument:
        document = self._core.library.rollout(name)
        if document is None:
            raise unknown_rollout(name)
        return document

    def _last_of(self, member: Member) -> tuple[str, ...]:
        cordons = self._core.library.desired.content_cordons()
        if self._core.registry.peers(member, cordons):
            return ()
        kind = f"{member.role} replica" if member.role in ("prefill", "decode") else member.role
        return (
            f'"{member.process_id}" is the last {kind} in use of the pool "{member.pool}"'
            if member.pool
            else f'"{member.process_id}" is the last {kind} in use',
        )


_CHANGES: Final = {
    pb.ChangeRolloutRequest.CHANGE_PAUSE: "pause",
    pb.ChangeRolloutRequest.CHANGE_RESUME: "resume",
    pb.ChangeRolloutRequest.CHANGE_PROMOTE: "promote",
    pb.ChangeRolloutRequest.CHANGE_ABORT: "abort",
    pb.ChangeRolloutRequest.CHANGE_UNDO: "undo",
    pb.ChangeRolloutRequest.CHANGE_ATTEST: "attest",
}


def unknown_rollout(name: str) -> MeshError:
    """Return the refusal for a rollout that is not there."""
    if not name:
        return MeshError("NO_ROLLOUT", "no rollout has run in this mesh")
    return unknown_name(
        "rollout", name, "no rollout has that name; `kvmesh rollout history` lists the rollouts"
    )


def unknown_name(field: str, value: str, allowed: str) -> MeshError:
    """Return the refusal of a name that nothing has. `allowed`: a clause about the names that there are."""
    return invalid("NAME_UNKNOWN", [Violation(field, f'"{value[:64]}"', allowed, is_clause=True)])


def _next(desired: Desired, before: Desired) -> Desired:
    return changed(desired, revision=before.revision + 1)


def checked_reason(text: str) -> str:
    """Return the reason of a command. Raises MeshError if it is too long."""
    if len(text) > REASON_MAX:
        raise _not_allowed("reason", f"{len(text)} characters", f"up to {REASON_MAX} characters are allowed")
    return text


def _check_requirement(name: str, document: RolloutDocument) -> None:
    if name not in document.settings.requirements:
        names = ", ".join(document.settings.requirements) or "none"
        raise _not_allowed("requirement", f'"{name[:64]}"', f"this rollout requires: {names}")


def _out_of_range(field: str, value: str, allowed: str) -> MeshError:
    return invalid("FIELD_OUT_OF_RANGE", [Violation(field, value[:200], allowed)])


def _not_allowed(field: str, value: str, clause: str) -> MeshError:
    return invalid("FIELD_OUT_OF_RANGE", [Violation(field, value[:200], clause, is_clause=True)])
