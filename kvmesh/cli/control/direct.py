"""`kvmesh snapshot stable --direct`: writes "all to stable" to the board in Redis, without a control plane."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from kvmesh.cli.control.audit import EVENTS_MAX, own_fields
from kvmesh.cli.control.failures import ControlFailed
from kvmesh.cli.control.output import print_json, say, show
from kvmesh.cli.control.stable_content import is_believed, name_order, stable_snapshot, term_number
from kvmesh.cli.found_mesh import FoundMesh
from kvmesh.clock import wall_ns
from kvmesh.membership.member import Member
from kvmesh.membership.membership import read_members
from kvmesh.redis_link import RedisLink, RedisUnavailable, key
from kvmesh.redis_script import Script
from kvmesh.snapshot.board import Board, Junk, OnBoard, Refused, Written
from kvmesh.snapshot.content import SnapshotError
from kvmesh.snapshot.published import Name, Published
from kvmesh.trust.names import OPERATOR
from kvmesh.trust.peers import Trust

TAKEN_S: Final = 5.0
"""Time in which receivers take the snapshot from the board. They read it, and renew their leases, each second."""

POLL_S: Final = 0.25

_RAISE: Final = Script.beside(__file__, "raise_term.lua")

EMPTY: Final = (
    "Redis has no snapshot: nothing was written. Receivers put theirs back within seconds; without any snapshot they "
    "send all new sessions to the first stable pool already."
)
TAKEN_OVER: Final = (
    "A control plane that runs takes a term above this one, and takes the rollout back as well. Without one, this snapshot "
    "stays in force."
)


async def write_stable(
    mesh: FoundMesh, operator: str, reason: str, *, force: bool, dry_run: bool, as_json: bool
) -> int:
    """Write the snapshot, and wait until the receivers have it; return 1 if some have not within TAKEN_S.

    `force`: also from a snapshot in Redis that is older than those of receivers. A failure behind the write says that the
    snapshot is written. A failed audit entry changes neither the way on nor the exit status.

    Raises ControlFailed, and ConfigError if the configuration has TLS and the operator's certificate cannot be read.
    """
    Trust(mesh.config, OPERATOR)
    writer = _Writer(mesh, operator, reason)
    taken: list[str] = []
    behind: list[str] = []
    is_audited = False
    try:
        snapshot = await writer.prepare(force=force)
        if not dry_run:
            await writer.write(snapshot)
            is_audited = await writer.record(snapshot)
            taken, behind = await writer.wait_until_taken(snapshot)
    except RedisUnavailable as away:
        raise ControlFailed((f"Redis did not take the snapshot: {away}.",), code="UNAVAILABLE") from away
    finally:
        await writer.close()
    if as_json:
        name = str(snapshot.name)
        facts = {"written": not dry_run, "audited": is_audited, "taken_by": taken, "behind": behind}
        print_json({"snapshot": name, **facts})
    else:
        _show(snapshot, writer.newly_ended, taken, behind, dry_run=dry_run)
    return 1 if behind else 0


class _Writer:
    def __init__(self, mesh: FoundMesh, operator: str, reason: str) -> None:
        self._mesh = mesh.config.mesh.name
        self._operator = operator
        self._reason = reason
        self._redis = RedisLink(mesh.redis_url)
        self._board = Board(self._redis, self._mesh)
        self.newly_ended: tuple[str, ...] = ()
        """Rollouts that the snapshot takes back."""

    async def close(self) -> None:
        await self._redis.close()

    async def prepare(self, *, force: bool) -> Published:
        """Return the snapshot to write, with a term above every one in Redis and in the leases of receivers.

        Raises ControlFailed without `force` if a receiver applies a higher snapshot than that of Redis. Redis lost writes
        then, and the pools of its snapshot may be those from before a promotion.
        """
        found = await self._board.read()
        if isinstance(found, Junk | Refused):
            raise ControlFailed(
                (f"The snapshot in Redis cannot be read: {found.reason}.", "Nothing was written.")
            )
        if not isinstance(found, OnBoard):
            raise ControlFailed((EMPTY,))
        stored = await self._redis.execute("GET", key(self._mesh, "control", "term"))
        members = await read_members(self._redis, self._mesh)
        stored_number = term_number((stored or b"").decode("ascii", "replace"))
        numbers = [stored_number, *(term_number(member.snapshot) for member in members)]
        before = found.snapshot
        higher = [each.process_id for each in members if _is_higher(each.snapshot, before.name)]
        if higher and not force:
            raise ControlFailed(
                _went_back(before, higher),
                code="UNAVAILABLE",
                processes=higher,
                force_would_override=[f"Redis has {before.name}, and a receiver applies a higher snapshot"],
            )
        try:
            made = stable_snapshot(before, numbers, self._operator, wall_ns() // 1_000_000)
        except SnapshotError as error:
            raise ControlFailed((f"No snapshot can be made: {error}.", "Nothing was written.")) from error
        known = before.content.ended_rollouts
        self.newly_ended = tuple(each for each in made.content.ended_rollouts if each not in known)
        return made

    async def write(self, snapshot: Published) -> None:
        """Store the number of the term, then the snapshot. Raises RedisUnavailable if the snapshot is not written."""
        number = snapshot.name.term.number
        await self._redis.scripts(_RAISE, [((key(self._mesh, "control", "term"),), (number,))])
        try:
            written = await self._board.write(snapshot)
        except RedisUnavailable as away:
            if self._redis.is_connected:
                raise  # Redis refused the write
            raise ControlFailed(
                (f"Redis did not confirm the snapshot, which may be written: {away}.", "Try again."),
                code="UNAVAILABLE",
            ) from away
        if written is not Written.WRITTEN:
            raise ControlFailed(
                ("A control plane published a higher snapshot meanwhile: nothing was written.", "Try again.")
            )

    async def record(self, snapshot: Published) -> bool:
        """Write the audit entry. Return False, and say so, if Redis does not take the entry."""
        details = {"before": "", "after": str(snapshot.name), "reason": self._reason}
        words = own_fields(
            what="snapshot.stable",
            target=str(snapshot.name),
            result="written to Redis without a control plane",
            by=f"operator:{self._operator}",
            source="",
            details={name: value for name, value in details.items() if value},
        )
        stream = key(self._mesh, "control", "events")
        try:
            await self._redis.execute("XADD", stream, "MAXLEN", "~", EVENTS_MAX, "*", *words)
        except RedisUnavailable as away:
            say(f"The snapshot {snapshot.name} is written; its audit entry failed: {away}.")
            return False
        return True

    async def wait_until_taken(self, snapshot: Published) -> tuple[list[str], list[str]]:
        """Return the processes with the snapshot or a higher one in their lease, and the others after TAKEN_S.

        Raises ControlFailed if the leases cannot be read at the end of that time.
        """
        end_s = time.monotonic() + TAKEN_S
        while True:
            is_last = time.monotonic() > end_s
            try:
                members = [each for each in await read_members(self._redis, self._mesh) if each.snapshot]
            except RedisUnavailable as away:
                if is_last:
                    raise ControlFailed(
                        _unconfirmed(snapshot, away),
                        code="UNAVAILABLE",
                        snapshot=str(snapshot.name),
                        written=True,
                    ) from away
            else:
                behind = [each.process_id for each in members if not _has(each, snapshot)]
                if is_last or not behind:
                    return [each.process_id for each in members if _has(each, snapshot)], behind
            await asyncio.sleep(POLL_S)


def _went_back(board: Published, higher: Sequence[str]) -> Sequence[str]:
    verb = "applies" if len(higher) == 1 else "apply"
    return (
        f"Redis lost a snapshot: {', '.join(higher)} {verb} a higher one than its {board.name}. Nothing was written.",
        "Receivers put it back within seconds: try again. With --force the pools of the older snapshot count.",
    )


def _unconfirmed(snapshot: Published, away: RedisUnavailable) -> Sequence[str]:
    return (
        f"The snapshot {snapshot.name} is written; its confirmation failed: {away}.",
        "Receivers take it when they reach Redis; `kvmesh replicas show NAME` names the snapshot of a process.",
    )


def _is_higher(name: str, known: Name) -> bool:
    return is_believed(term_number(name), known.term.number) and name_order(name) > known.order


def _has(member: Member, snapshot: Published) -> bool:
    number, own = term_number(member.snapshot), snapshot.name.term.number
    return member.snapshot == str(snapshot.name) or (number > own and is_believed(number, own))


def _show(
    snapshot: Published, ended: Sequence[str], taken: Sequence[str], behind: Sequence[str], *, dry_run: bool
) -> None:
    stable = snapshot.content.stable
    done = "Would write" if dry_run else "Wrote"
    show(f"{done} {snapshot.name} to Redis: 100 % to {stable.pool} ({stable.model_version}).")
    for rollout in ended:
        show(f"Rollout {rollout} is taken back: no process applies a weight of it again.")
    if dry_run:
        return
    show(f"{len(taken)} processes have it{': ' + ', '.join(taken) if taken else ''}.")
    if behind:
        say(f"Without it after {TAKEN_S:g} s: {', '.join(behind)}. They take it when they reach Redis.")
    show(TAKEN_OVER)
