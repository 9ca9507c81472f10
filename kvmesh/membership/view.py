"""The members that one process counts as present. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvmesh.membership.member import LEASE_S, RENEW_S, Member

MISSING_S = 1.5 * RENEW_S
"""A lease missing for this long was not renewed. After a flush of Redis, each live process writes its lease sooner."""


class View:
    """The members after each poll.

    A member that left is removed at once. A member with a missing lease is removed when two polls, MISSING_S apart, did
    not find it. After a flush of Redis, the leases come back one by one. If Redis may have lost all leases, every member
    is kept for LEASE_S. In this time each live process writes its lease again.
    """

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self._missing_since_s: dict[str, float] = {}
        self._left: set[str] = set()
        """Boot ids of members that gave their lease back."""
        self._removals_suspended_until_s = float("-inf")

    def suspend_removals(self, now_s: float) -> None:
        """Keep members with missing leases for the next LEASE_S, because Redis broke."""
        self._removals_suspended_until_s = now_s + LEASE_S

    def leave(self, boot_id: str) -> None:
        """Note that the process of `boot_id` gave its lease back."""
        if any(member.boot_id == boot_id for member in self.members.values()):
            self._left.add(boot_id)

    def take(self, found: Iterable[Member], now_s: float) -> bool:
        """Take the members that a poll found. Return True if the view changed."""
        new = {member.process_id: member for member in found}
        missing = {name: self._missing_since_s.get(name, now_s) for name in self.members if name not in new}
        self._missing_since_s = missing
        if not new and self._is_sudden(now_s):
            self.suspend_removals(now_s)  # all leases missing at once: Redis was flushed between two polls
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
        unexplained = [member for member in self.members.values() if member.boot_id not in self._left]
        return bool(unexplained) and now_s >= self._removals_suspended_until_s + LEASE_S
