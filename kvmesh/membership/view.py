"""The members one process believes in. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvmesh.membership.member import LEASE_S, RENEW_S, Member

MISSING_S = 1.5 * RENEW_S
"""A lease that is missing this long was not renewed: after a flush of Redis every live process has written it again."""


class View:
    """`take` gets what a poll found.

    A member that said farewell is gone at once. One whose lease is merely missing is gone when two polls, MISSING_S
    apart, did not find it: a Redis that was flushed knows those first who renewed first. Where the whole of Redis may
    have forgotten, everybody is kept for LEASE_S, in which every live process writes its lease again.
    """

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self._missing_since_s: dict[str, float] = {}
        self._left: set[str] = set()
        """Boot ids of members that gave their lease back."""
        self._removals_suspended_until_s = float("-inf")

    def suspend_removals(self, now_s: float) -> None:
        """Redis broke: what it lacks in the next LEASE_S says nothing."""
        self._removals_suspended_until_s = now_s + LEASE_S

    def leave(self, boot_id: str) -> None:
        """The process of that boot gave its lease back."""
        if any(member.boot_id == boot_id for member in self.members.values()):
            self._left.add(boot_id)

    def take(self, found: Iterable[Member], now_s: float) -> bool:
        """Take the answer of a poll. Return True if the view changed."""
        new = {member.process_id: member for member in found}
        missing = {name: self._missing_since_s.get(name, now_s) for name in self.members if name not in new}
        self._missing_since_s = missing
        if not new and self._is_sudden(now_s):
            self.suspend_removals(now_s)  # all gone together: Redis was wiped faster than we looked
        for name, since_s in list(missing.items()):
            member = self.members[name]
            is_believed = now_s >= self._removals_suspended_until_s and now_s - since_s >= MISSING_S
            if is_believed or member.boot_id in self._left:
                del missing[name]
            else:
                new[name] = member
        self._left &= {member.boot_id for member in new.values()}
        changed = new != self.members
        self.members = new
        return changed

    def _is_sudden(self, now_s: float) -> bool:
        silent = [member for member in self.members.values() if member.boot_id not in self._left]
        return bool(silent) and now_s >= self._removals_suspended_until_s + LEASE_S
